"""FLOPs of a loss, read from the matmuls and convolutions of its jaxpr."""

import math
from typing import Any

import jax

from meshwright.wrapped.keys import KEY_WORDS, key_of, nested_jaxprs
from meshwright.wrapped.model import WrappedParts, on_one_device


def training_flops(parts: WrappedParts) -> float:
    """Returns the model FLOPs of a step on the whole batch: three times those of the forward pass."""
    return 3.0 * jaxpr_flops(forward_jaxpr(parts).jaxpr)


def forward_jaxpr(parts: WrappedParts) -> Any:
    """Returns the closed jaxpr of the loss on the whole batch, on one device."""

    def loss(params: Any, variables: Any, batch: Any, words: Any) -> Any:
        return parts.loss((params, variables), batch, key_of(words, 1, parts.draws), True).loss

    return jax.make_jaxpr(on_one_device(loss))(parts.params, parts.variables, parts.source.example, KEY_WORDS)


def jaxpr_flops(jaxpr: Any) -> float:
    """Returns the FLOPs of the matrix products of an open jaxpr, loops by their trip counts.

    Of the branches of a conditional the costliest counts; the body of a `while` without known end counts once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            total += 2.0 * equation.outvars[0].aval.size * depth
        elif name == "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            kernel = equation.invars[1].aval.shape
            taps = math.prod(kernel[d] for d in numbers.rhs_spec[2:]) * kernel[numbers.rhs_spec[1]]
            total += 2.0 * equation.outvars[0].aval.size * taps / equation.params.get("batch_group_count", 1)
        inner = [jaxpr_flops(part) for part in nested_jaxprs(equation)]
        if inner:
            times = equation.params.get("length", 1) if name == "scan" else 1
            total += times * (max(inner) if name == "cond" else sum(inner))
    return total

"""Whole state beside split parameters, and matrix products that devices compute more than once."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from meshwright.analysis.lint import MIN_REPLICATED_BYTES, Finding
from meshwright.analysis.memory import Argument
from meshwright.analysis.source_lint import product_flops
from meshwright.formatting import format_count

_TWICE = 1.8
"""FLOPs of all devices over those of the function from which work counts as done more than once."""
_MIN_FLOPS = 2**30
"""FLOPs on all devices that are done more than once from which they are reported."""


def lint_whole_state(arguments: Sequence[Argument], line: str) -> list[Finding]:
    """Reports optimizer state that is less split than the parameter it belongs to, and batches that are not split.

    State belongs to the parameter of its shape.  line: where the function is defined.
    """
    split = {a.shape: a for a in arguments if a.category == "parameters" and a.local_shape != a.shape}
    findings: list[Finding] = []
    for argument in arguments:
        owner = split.get(argument.shape)
        if argument.category == "optimizer state" and owner is not None:
            whole, part = math.prod(argument.local_shape), math.prod(owner.local_shape)
            excess = argument.bytes - argument.bytes * part // whole
            if excess >= MIN_REPLICATED_BYTES:
                findings.append(
                    Finding(
                        "replicated",
                        argument.path,
                        f"{list(argument.local_shape)} on a device, where the parameter {owner.path} has "
                        f"{list(owner.local_shape)}",
                        "give it the sharding of its parameter: initialise it from the sharded ones under jax.jit",
                        excess,
                        line,
                    )
                )
        whole_batch = argument.category == "batch" and argument.local_shape == argument.shape and argument.shape
        if whole_batch and split and argument.bytes >= MIN_REPLICATED_BYTES:
            findings.append(
                Finding(
                    "replicated",
                    argument.path,
                    "every device has the whole batch, beside parameters that are split",
                    "shard its first dimension over the axes of data parallelism",
                    argument.bytes,
                    line,
                )
            )
    return findings


def lint_duplicated_work(
    jaxpr: Any, flops: float, arguments: Sequence[Argument], mesh: Mapping[str, int], line: str
) -> list[Finding]:
    """Reports a program whose devices together multiply far more than its function has to.

    jaxpr: closed, None if there is none.  flops: matrix products of one device.  line: where the function is defined.
    A function with loops of unknown length, or with `shard_map`, whose shapes are those of one device, is not judged.
    """
    devices = math.prod(mesh.values())
    needed = None if jaxpr is None or devices == 1 else _needed(jaxpr.jaxpr, 1)
    if not needed or devices * flops < max(_TWICE * needed, needed + _MIN_FLOPS):
        return []
    times = devices * flops / needed
    axes = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1)
    split = sorted({a.path for a in arguments if a.local_shape != a.shape})
    return [
        Finding(
            "duplicated",
            f"matrix products of {format_count(devices * flops)} FLOPs on all devices",
            f"the function has {format_count(needed)}: devices of {axes} compute the same products {times:.1f} times; "
            + (f"split over them are {', '.join(split[:3])}" if split else "no argument is split over them"),
            "shard the batch, or a dimension of the weights, over every axis",
            0,
            line,
        )
    ]


def _needed(jaxpr: Any, times: int) -> float | None:
    """Sums the FLOPs of the products of an open jaxpr; None if they are not known."""
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in (
            "shard_map",
            "pallas_call",
            "ragged_dot_general",
            "conv_general_dilated",
            "xla_pmap",
            "custom_call",
        ):
            return None
        if name == "dot_general":
            total += times * product_flops(equation)
        parts: list[float] = []
        for inner in _nested(equation):
            part = _needed(inner, times * (equation.params["length"] if name == "scan" else 1))
            if part is None:
                return None
            parts.append(part)
        if name == "while" and any(parts):
            return None
        total += max(parts, default=0.0) if name == "cond" else sum(parts)
    return total


def _nested(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)
            if isinstance(inner, core.Jaxpr):
                yield inner

"""Work of a wrapped model's loss as the planner prices it, read from its jaxpr."""

import math
from typing import Any

import jax

from meshwright.models.model import Widths
from meshwright.planner.work import Matmul, Work
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.wrapped.parts import check_rows
from xlacensus.jaxprs import Origin, uses

_NONE = Matmul("unembedding", 0.0, 0.0, 0)


def forward_flops_of_loss(model: Any, seq: int) -> dict[str, float]:
    """Returns the FLOPs of the loss's matmuls and convolutions for one example."""
    function, arguments = model.parts.traced(train=True)
    found = [
        matmul_of(equation, times)
        for equation, _, times in uses(jax.make_jaxpr(function)(*arguments).jaxpr, {})
    ]
    return {"matmuls of the loss": sum(m.flops for m in found if m) / model.parts.source.batch_size}


def work_of_loss(model: Any, placed: PlacedRun) -> Work:
    """Returns the work of a microbatch on a device.

    A matmul whose parameter is split over `tensor` is divided by its degree; all others count in full.
    Raises ConfigError for a loss that does not take as many examples.
    """
    parts, shape, training = model.parts, placed.layout.shape, placed.run.training
    rows = training.batch // (shape.over(BATCH_AXES) * training.microbatches)
    if rows < parts.source.batch_size:
        check_rows(parts, rows, rows if parts.held_out is not None else 0)
    function, arguments = parts.traced(True, rows)

    def kept(params: Any, *others: Any) -> list[Any]:
        backward = jax.vjp(lambda params: function(params, *others)[0], params)[1]
        own = {id(x) for x in jax.tree.leaves((params, others))}
        return [x for x in jax.tree.leaves(backward) if id(x) not in own]

    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    matmuls, over_tensor = list[Matmul](), 0.0
    for equation, given, times in uses(jaxpr, parts.origins(jaxpr)):
        m = matmul_of(equation, times)
        if m is None:
            continue
        split = [(side, _split_dims(origin, placed)) for side, origin in enumerate(given[:2])]
        for side, dims in split if equation.primitive.name == "dot_general" else ():
            if dims:
                # Rows of a pair of matrices need a sum of the result forward, columns one of the input backward.
                by_rows = dims[0] in equation.params["dimension_numbers"][0][side]
                moved = (equation.outvars[0] if by_rows else equation.invars[1 - side]).aval
                over_tensor += times * moved.size * moved.dtype.itemsize
                m = matmul_of(equation, times / shape.tensor)
        matmuls += [m] if m else []
    return Work(
        tokens=rows,
        layers=0,
        width=0,
        matmuls=tuple(matmuls),
        unembedding=_NONE,
        attention=0,
        scores=0,
        widths=Widths(0, 0, 0, 0, 0, 0),
        ffn_hidden=0,
        experts=0,
        expert_rows=0,
        expert_layers=0,
        kept_bytes=_bytes(jax.eval_shape(kept, *arguments)),
        input_bytes=_bytes(arguments[2]) * training.microbatches + _bytes(parts.variables),
        over_tensor=over_tensor,
    )


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _split_dims(origin: Origin | None, placed: PlacedRun) -> list[int]:
    """Dimensions of a parameter, as it is used, that are split over `tensor`."""
    if origin is None:
        return []
    in_use = placed.layout.placements[origin[0]].in_use
    return [i for i, dim in enumerate(origin[1]) if "tensor" in in_use[dim]]


def matmul_of(equation: Any, times: float) -> Matmul | None:
    """Returns a product or convolution as the matmul that takes as long; None for other operations."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), (batched, _) = params["dimension_numbers"]
        left, right = (v.aval for v in equation.invars)
        k = math.prod(left.shape[d] for d in contracted)
        groups = math.prod(left.shape[d] for d in batched)
        n = max(1, round(right.size / k / groups))
        return Matmul("projection", left.size / k, k, n, times, groups if groups > 1 else 0)
    if name == "conv_general_dilated":
        kernel, spec = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        n, depth = kernel[spec[0]], math.prod(kernel[d] for d in spec[1:])
        out, groups = equation.outvars[0].aval.size, params.get("batch_group_count", 1)
        return Matmul("projection", out / n, depth, n, times / groups)
    return None

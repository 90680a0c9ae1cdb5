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

    A matmul whose parameter is split over `tensor` is divided by its degree; all others count in
    full. Raises ConfigError for a loss that does not take as many examples.
    """
    parts = model.parts
    training = placed.run.training
    examples = training.batch // (placed.layout.shape.over(BATCH_AXES) * training.microbatches)
    if examples < parts.source.batch_size:
        held_out = examples if parts.held_out is not None else 0
        check_rows(parts, examples, held_out)
    function, arguments = parts.traced(True, examples)
    matmuls, over_tensor = _local_matmuls(parts, function, arguments, placed)
    batch_bytes = _bytes(arguments[2]) * training.microbatches
    return Work(
        tokens=examples,
        layers=0,
        halves=0,
        width=0,
        matmuls=matmuls,
        unembedding=_NONE,
        attention=0,
        scores=0,
        widths=Widths(0, 0, 0, 0, 0, 0),
        ffn_hidden=0,
        experts=0,
        expert_rows=0,
        expert_layers=0,
        kept_bytes=_residual_bytes(function, arguments),
        input_bytes=batch_bytes + _bytes(parts.variables),
        over_tensor=over_tensor,
    )


def _residual_bytes(function: Any, arguments: Any) -> float:
    """Returns the bytes that the backward pass reads, the loss's arguments excepted."""

    def residuals(params: Any, *others: Any) -> list[Any]:
        _, backward = jax.vjp(lambda params: function(params, *others)[0], params)
        inputs = {id(x) for x in jax.tree.leaves((params, others))}
        return [x for x in jax.tree.leaves(backward) if id(x) not in inputs]

    return _bytes(jax.eval_shape(residuals, *arguments))


def _local_matmuls(
    parts: Any, function: Any, arguments: Any, placed: PlacedRun
) -> tuple[tuple[Matmul, ...], float]:
    """Returns the matmuls of a device, and the bytes that `tensor` sums for them in a step."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    matmuls: list[Matmul] = []
    over_tensor = 0.0
    for equation, origins, times in uses(jaxpr, parts.origins(jaxpr)):
        matmul, sent_bytes = _local_matmul(equation, origins, times, placed)
        over_tensor += sent_bytes
        if matmul is not None:
            matmuls.append(matmul)
    return tuple(matmuls), over_tensor


def _local_matmul(
    equation: Any, origins: Any, times: float, placed: PlacedRun
) -> tuple[Matmul | None, float]:
    """Returns the matmul of an equation on one device,
    and the bytes that `tensor` sums for it in a step.

    origins: parameters that the equation reads, or None for each input that is not one.
    """
    matmul = matmul_of(equation, times)
    sent_bytes = 0.0
    if matmul is None or equation.primitive.name != "dot_general":
        return matmul, sent_bytes
    contracted_dims = equation.params["dimension_numbers"][0]
    for side, origin in enumerate(origins[:2]):
        split_dims = _split_dims(origin, placed)
        if not split_dims:
            continue
        matmul = matmul_of(equation, times / placed.layout.shape.tensor)
        # Rows of a pair of matrices need a sum of the result forward, columns one
        # of the input backward.
        is_split_by_rows = split_dims[0] in contracted_dims[side]
        summed = equation.outvars[0] if is_split_by_rows else equation.invars[1 - side]
        sent_bytes += times * summed.aval.size * summed.aval.dtype.itemsize
    return matmul, sent_bytes


def _bytes(tree: Any) -> float:
    return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _split_dims(origin: Origin | None, placed: PlacedRun) -> list[int]:
    """Dimensions of a parameter, as it is used, that are split over `tensor`."""
    if origin is None:
        return []
    in_use = placed.layout.placements[origin[0]].in_use
    return [i for i, dim in enumerate(origin[1]) if "tensor" in in_use[dim]]


def matmul_of(equation: Any, times: float) -> Matmul | None:
    """Returns a product or convolution as the matmul that takes as long;
    None for other operations."""
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        (contracted, _), (batched, _) = params["dimension_numbers"]
        left, right = (v.aval for v in equation.invars)
        k = math.prod(left.shape[d] for d in contracted)
        groups = math.prod(left.shape[d] for d in batched)
        n = max(1, round(right.size / k / groups))
        return Matmul("projection", left.size / k, k, n, times, groups if groups > 1 else 0)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_dim, *summed_dims = params["dimension_numbers"].rhs_spec
        n = kernel[out_dim]
        k = math.prod(kernel[dim] for dim in summed_dims)
        m = equation.outvars[0].aval.size / n
        groups = params.get("batch_group_count", 1)
        return Matmul("projection", m, k, n, times / groups)
    return None

"""The layout of a placed run, from shapes alone: every parameter sharded and gathered,
and the pipeline's stages."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from meshwright.config import Training
from meshwright.formatting import format_count
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.params import Param, is_low_precision, named_leaves
from meshwright.sharding.placement import local_shape, notation
from meshwright.views.blocks import Block, Column, Table, Text

if TYPE_CHECKING:
    from meshwright.models.quantisation import MatmulPrecision


@dataclasses.dataclass(frozen=True)
class ParamRow:
    """One parameter on the mesh."""

    path: str
    """Dotted path, such as `blocks.query`."""
    shape: tuple[int, ...]
    sharded: str
    """Placement between steps: `w[L, D/fsdp, F/tensor]`."""
    gathered: str
    """Placement of the weight in the compute dtype, after the FSDP all-gather."""
    parameters: int
    """Number of elements."""
    bytes_sharded: int
    """Bytes on one device between steps."""
    bytes_gathered: int
    """Bytes on one device after the gather, of one layer where the parameter is stacked."""


@dataclasses.dataclass(frozen=True)
class StageRow:
    """One pipeline stage."""

    layers: str
    """Layers of the stage, by number."""
    flops_fraction: float
    """Fraction of the FLOPs of all layers."""


Quantises = Callable[[Param], bool]
_WHERE_FASTER = "e4m3 where that is faster (NVIDIA GPUs since B200, fp8 recipes)"


def _low_precision(training: Training) -> "MatmulPrecision | None":
    if training.matmul_precision == "compute":
        return None
    from meshwright.models.quantisation import find_precision

    return find_precision(training.matmul_precision)


def param_rows(placed: PlacedRun, quantises: Quantises = is_low_precision) -> tuple[ParamRow, ...]:
    """Returns the layout of every parameter of a placed run.
    quantises: whether a weight is in low precision."""
    training = placed.run.training
    low = _low_precision(training)
    gathers_quantised = low is not None and low.scaling in ("tensor", "row")
    rows = []
    for path, p, where in placed.layout.leaves:
        at_rest = local_shape(p.shape, where.at_rest, placed.layout.shape)
        in_use = local_shape(p.shape, where.in_use, placed.layout.shape)
        stored = jnp.dtype(p.stored or training.param_dtype)
        bytes_of_element = jnp.dtype(training.compute_dtype).itemsize
        if low is not None and quantises(p) and (gathers_quantised or "E" in p.dims):
            bytes_of_element = 1
        layers = in_use[0] if p.dims.startswith("L") else 1
        row = ParamRow(
            path,
            p.shape,
            sharded=notation("w", p.dims, where.at_rest),
            gathered=notation("w", p.dims, where.in_use),
            parameters=p.size,
            bytes_sharded=math.prod(at_rest) * stored.itemsize,
            bytes_gathered=math.prod(in_use) * bytes_of_element // layers,
        )
        rows.append(row)
    return tuple(rows)


def params_table(rows: tuple[ParamRow, ...], note: str = "") -> Table:
    """Returns the table of parameters on the mesh."""
    columns = [
        Column("parameter", cell="path"),
        Column("sharded", cell="sharded"),
        Column("gathered", cell="gathered"),
        Column("shape", cell=lambda row: "x".join(map(str, row.shape))),
        Column("elements", "count", "parameters", where="page"),
        Column("bytes sharded", "bytes", "bytes_sharded", bar=True),
        Column("layer gathered", "bytes", "bytes_gathered", bar=True),
    ]
    return Table.of(rows, columns, searchable=True, printed=None, title="All parameters", note=note)


def stage_rows(placed: PlacedRun) -> tuple[StageRow, ...]:
    """Returns the pipeline stages of a placed run; none without a pipeline."""
    stages = placed.layout.stages
    if stages.stages == 1:
        return ()
    rows = []
    for stage in range(stages.stages):
        texts = [_range_text(layers) for layers in stages.layers_of(stage) if layers]
        rows.append(StageRow(" and ".join(texts), stages.cost_fraction(stage)))
    return tuple(rows)


def _range_text(layers: Sequence[int]) -> str:
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else f"{layers[0]}"


def stages_table(stages: tuple[StageRow, ...]) -> Table:
    """Returns the table of the layers of each pipeline stage."""
    fraction = "of the FLOPs of all layers"
    columns = [
        Column("stage", cell=lambda numbered: f"stage {numbered[0]}"),
        Column("layers", cell=lambda numbered: numbered[1].layers, wide=True),
        Column(fraction, "fraction", lambda numbered: numbered[1].flops_fraction, bar=True),
    ]
    return Table.of(enumerate(stages), columns, title="Layers of each stage", printed=8)


def precision_blocks(
    placed: PlacedRun, quantises: Quantises = is_low_precision, grouped: str = _WHERE_FASTER
) -> list[Block]:
    """Returns which matmuls are in low precision and what stays in the compute dtype;
    nothing if none is.

    quantises: whether a weight is in low precision.
    grouped: format of the grouped matmuls, in words.
    """
    training, leaves = placed.run.training, named_leaves(placed.layout.params).values()
    precision = _low_precision(training)
    if precision is None:
        return []
    low = sum(p.size for p in leaves if quantises(p))
    others = "embedding, unembedding, norms, router and attention itself"
    text = (
        f"matmuls of {format_count(low)} parameters in {training.matmul_precision}: "
        f"{precision.summary}"
    )
    with_experts = (
        f"; the grouped matmuls of experts in {grouped}"
        if any("E" in p.dims for p in leaves)
        else ""
    )
    return [Text([f"{text}{with_experts}; in {training.compute_dtype}: {others}"])]

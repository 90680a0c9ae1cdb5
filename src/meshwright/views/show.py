"""Layout report of a placed run: every parameter sharded and gathered, pipeline stages, and pictures.

Everything is arithmetic on shapes: no device, no array and no data are needed.
"""

import dataclasses
import math

import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, nearest
from meshwright.planner.memory_model import state_bytes
from meshwright.planner.work import low_precision
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import LOW_PRECISION_ROLES, count_params, named_leaves
from meshwright.sharding.placement import local_shape, notation
from meshwright.views.draw.blocks import ArrayPicture, picture_of
from meshwright.views.draw.machine import MachineGrid, MachinePicture, draw_machine
from meshwright.views.draw.timeline import PipelineTimeline

_WHOLE_MOMENTS = ("adamw", "lion", "sgd")
"""Optimizers whose state is copies of the parameters, which the planner's arithmetic counts without optax."""


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


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """Parameters and pipeline stages of a run on its mesh."""

    mesh: MeshShape
    rows: tuple[ParamRow, ...]
    parameters: int
    """Number of parameters, without padding."""
    bytes_parameters: int
    """Bytes of parameters on one device."""
    bytes_optimizer: int
    """Bytes of optimizer state on one device."""
    stages: tuple[StageRow, ...]
    """Pipeline stages; empty without a pipeline."""


def layout_report(placed: PlacedRun) -> LayoutReport:
    """Returns the layout of every parameter of a placed run, and bytes per device."""
    placements, training = named_leaves(placed.placements), placed.run.training
    compute_itemsize, low = jnp.dtype(training.compute_dtype).itemsize, low_precision(placed)
    rows = []
    for path, p in named_leaves(placed.params).items():
        placement = placements[path]
        gathered = local_shape(p.shape, placement.in_use, placed.shape)
        layers = gathered[0] if p.dims.startswith("L") else 1
        quantised = low is not None and low.gathered and p.role in LOW_PRECISION_ROLES and "E" not in p.dims
        rows.append(
            ParamRow(
                path,
                p.shape,
                sharded=notation("w", p.dims, placement.at_rest),
                gathered=notation("w", p.dims, placement.in_use),
                parameters=p.size,
                bytes_sharded=math.prod(local_shape(p.shape, placement.at_rest, placed.shape))
                * jnp.dtype(p.stored or training.param_dtype).itemsize,
                bytes_gathered=math.prod(gathered) * (1 if quantised else compute_itemsize) // layers,
            )
        )
    return LayoutReport(
        placed.shape,
        tuple(rows),
        count_params(placed.params),
        bytes_parameters=sum(row.bytes_sharded for row in rows),
        bytes_optimizer=_optimizer_bytes(placed),
        stages=stage_rows(placed),
    )


def _optimizer_bytes(placed: PlacedRun) -> int:
    if placed.run.optimizer.name in _WHOLE_MOMENTS:
        return round(state_bytes(placed))
    from meshwright.planner.optimizer_state import optimizer_state_bytes  # loads optax

    run = placed.run
    return optimizer_state_bytes(run.optimizer, run.training, placed.params, placed.placements, placed.shape)


def stage_rows(placed: PlacedRun) -> tuple[StageRow, ...]:
    """Returns the pipeline stages of a placed run; none without a pipeline."""
    stages = placed.stages
    if stages.stages == 1:
        return ()
    return tuple(
        StageRow(" and ".join(_format_layers(part) for part in stages.layers_of(s) if part), stages.cost_fraction(s))
        for s in range(stages.stages)
    )


def _format_layers(part: range) -> str:
    return f"{part[0]} to {part[-1]}" if len(part) > 1 else f"{part[0]}"


def pipeline_timeline(placed: PlacedRun) -> PipelineTimeline | None:
    """Returns the schedule of the run's pipeline as a picture, or None without a pipeline."""
    return None if placed.shape.stage == 1 else PipelineTimeline(placed.schedule_table)


def tensor_pictures(placed: PlacedRun, paths: tuple[str, ...] = ()) -> list[tuple[ArrayPicture, ...]]:
    """Draws parameters, each sharded and, where that differs, gathered; then the batch.

    paths: of the parameters; all where none is given. Raises ConfigError for a path that the model does not have.
    """
    params, placements = named_leaves(placed.params), named_leaves(placed.placements)
    for path in paths:
        if path not in params:
            raise ConfigError(f"a picture of {path!r}", "the model has no such parameter", nearest(path, params))
    mesh = placed.shape.degrees()
    pictures: list[tuple[ArrayPicture, ...]] = []
    for path in paths or params:
        p, placement = params[path], placements[path]
        sharded = picture_of(path, p.shape, p.dims, placement.at_rest, mesh)
        gathered = picture_of(f"{path}, gathered", p.shape, p.dims, placement.in_use, mesh)
        pictures.append((sharded,) if placement.in_use == placement.at_rest else (sharded, gathered))
    batch = (placed.run.training.batch, placed.run.training.seq)
    pictures.append((picture_of("batch", batch, "BT", (BATCH_AXES, ()), mesh),))
    return pictures


def machine_picture(placed: PlacedRun, machine: MachineGrid | None) -> MachinePicture:
    """Draws the run's mesh over a machine, or over one host where none is given."""
    return draw_machine(placed.shape.degrees(), machine)

"""Page of a layout: any tensor on the devices, the mesh over the machine, and the pipeline's ticks and memory."""

import math

import jax.numpy as jnp

from meshwright.formatting import format_bytes, format_count
from meshwright.planner.memory_model import keeps_stages, kept_bytes
from meshwright.planner.work import work_of
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import count_params, named_leaves
from meshwright.sharding.placement import Placement as AxesOfDims
from meshwright.sharding.placement import notation
from meshwright.sharding.schedule_table import IDLE, PLACE, ScheduleTable
from meshwright.views import show
from meshwright.views.draw.machine import MachineGrid, draw_machine
from meshwright.views.draw.timeline import PipelineTimeline
from meshwright.views.pages import Bar, Bars, Block, Cell, Column, Figure, Figures, Page, Section, Table
from meshwright.views.pages.drawings import (
    Machine,
    MeshAxes,
    Panel,
    Pipeline,
    PipelineTasks,
    Placement,
    TensorPlacement,
)

_FIRST = ("blocks.up", "blocks.query", "embed")
"""Tensors of which the first that the model has is shown when a page opens."""


def layout_page(placed: PlacedRun, machine: MachineGrid | None) -> Page:
    """Returns the page of a layout. machine: None draws one host."""
    run, report = placed.run, show.layout_report(placed)
    stages = f"{placed.shape.stage} stages of {placed.shape.size // placed.shape.stage} devices"
    figures = [
        Figure("parameters", format_count(report.parameters), "without padding"),
        Figure("devices", f"{placed.shape.size:,}", stages if placed.shape.stage > 1 else f"layout {run.layout}"),
        Figure("parameters of a device", format_bytes(report.bytes_parameters), run.training.param_dtype),
        Figure("optimizer state of a device", format_bytes(report.bytes_optimizer), run.optimizer.name),
    ]
    lead = f"{format_count(count_params(placed.params))} parameters on mesh {run.mesh}, layout {run.layout}"
    return Page(
        f"{run.name} on {run.mesh}",
        [Section("At a glance", [Figures(figures)]), *layout_sections(placed, machine)],
        topic="layout",
        lead=lead,
    )


def layout_sections(placed: PlacedRun, machine: MachineGrid | None) -> list[Section]:
    """Returns tensors on devices, the pipeline, the mesh over the machine, and the table of parameters."""
    report = show.layout_report(placed)
    rows: list[list[Cell]] = [
        [r.path, r.sharded, r.gathered, "x".join(map(str, r.shape)), r.parameters, r.bytes_sharded, r.bytes_gathered]
        for r in report.rows
    ]
    columns = [
        Column("parameter"), Column("sharded"), Column("gathered"), Column("shape"), Column("elements", "count"),
        Column("bytes, sharded", "bytes", bar=True), Column("bytes of a layer, gathered", "bytes", bar=True),
    ]  # fmt: skip
    totals = (
        f"On each device {format_bytes(report.bytes_parameters)} of parameters and "
        f"{format_bytes(report.bytes_optimizer)} of optimizer state."
    )
    return [
        Section(
            "Tensors on devices",
            [tensor_placement(placed, report)],
            "Equal colours hold equal data. Between steps every tensor is sharded; a layer's weights are gathered "
            "while it runs. Hover a block or a device to see the other side.",
        ),
        *_pipeline_section(placed, report),
        Section("Mesh over the machine", [machine_block(placed, machine)]),
        Section("Parameters", [Table(columns, rows, searchable=True, title="All parameters", note=totals)]),
    ]


def machine_block(placed: PlacedRun, machine: MachineGrid | None) -> Machine:
    """Returns the mesh over a machine, or over one host where none is given."""
    picture = draw_machine(placed.shape.degrees(), machine)
    panels = [
        Panel(
            panel.caption,
            1 + max(cell.row for cell in panel.cells),
            1 + max(cell.column for cell in panel.cells),
            [(cell.device, cell.row, cell.column) for cell in panel.cells],
        )
        for panel in picture.panels
    ]
    return Machine(MeshAxes(_axes(placed), picture.axis_summaries), panels, title=picture.title)


def mesh_axes_on(placed: PlacedRun, machine: MachineGrid) -> MeshAxes:
    """Returns the axes of a run's mesh and their links on a machine."""
    return MeshAxes(_axes(placed), draw_machine(placed.shape.degrees(), machine).axis_summaries)


def _axes(placed: PlacedRun) -> list[tuple[str, int]]:
    return [(axis, n) for axis, n in placed.shape.degrees().items() if n > 1]


def tensor_placement(placed: PlacedRun, report: show.LayoutReport) -> Placement:
    """Returns every parameter and the batch, sharded and gathered, over the devices of the mesh."""
    axes = _axes(placed)
    index = {axis: i for i, (axis, _) in enumerate(axes)}

    def over(placement: AxesOfDims) -> list[list[int]]:
        return [[index[axis] for axis in names if axis in index] for names in placement]

    params, placements = named_leaves(placed.params), named_leaves(placed.placements)
    tensors = []
    for row in report.rows:
        p, where = params[row.path], placements[row.path]
        tensors.append(
            TensorPlacement(
                row.path, list(p.dims), p.shape, over(where.at_rest), over(where.in_use), row.sharded, row.gathered,
                row.bytes_sharded, row.bytes_gathered, p.dims.startswith("L"),
            )
        )  # fmt: skip
    batch, seq = placed.run.training.batch, placed.run.training.seq
    split = (BATCH_AXES, ("context",)) if placed.shape.context > 1 else (BATCH_AXES, ())
    degrees = placed.shape.degrees()
    bytes_each = 4 * batch * seq // math.prod(degrees[axis] for axes_of_dim in split for axis in axes_of_dim)
    text = notation("tokens", "BT", split)
    tensors.append(
        TensorPlacement("batch", ["B", "T"], (batch, seq), over(split), over(split), text, text, bytes_each,
                        bytes_each, False)
    )  # fmt: skip
    names = {tensor.name for tensor in tensors}
    first = next((name for name in _FIRST if name in names), tensors[0].name)
    return Placement(axes, placed.shape.size, tensors, first)


def _pipeline_section(placed: PlacedRun, report: show.LayoutReport) -> list[Section]:
    if not report.stages:
        return []
    timeline = PipelineTimeline(placed.schedule_table)
    stages: list[list[Cell]] = [
        [f"stage {s}", stage.layers, stage.flops_fraction] for s, stage in enumerate(report.stages)
    ]
    columns = [
        Column("stage"),
        Column("layers", wide=True),
        Column("part of the FLOPs of all layers", "fraction", True),
    ]
    return [
        Section(
            "Pipeline schedule",
            [
                pipeline_block(placed.schedule_table),
                _stage_memory(placed, report),
                Table(columns, stages, title="Layers of each stage"),
            ],
            f"{timeline.summary}. Hover a task, or move the slider, to follow its microbatch; the bars below each "
            "stage are the microbatches in flight there.",
        )
    ]


def pipeline_block(table: ScheduleTable) -> Pipeline:
    """Returns the tasks of every stage in every tick."""
    fields: list[list[int]] = [[], [], [], [], [], []]
    used = sorted({PLACE[kind] for kind, count in table.task_counts.items() if count})
    for tick in range(table.ticks):
        for stage in range(table.stages):
            for task in table.tasks(tick, stage):
                if task.kind == IDLE:
                    continue
                values = (tick, stage, used.index(PLACE[task.kind]), task.kind, task.virtual_stage, task.microbatch)
                for field, value in zip(fields, values, strict=True):
                    field.append(int(value))
    live = [[int(n) for n in table.live_inputs[:, s]] for s in range(table.stages)]
    title = PipelineTimeline(table).title
    return Pipeline(
        table.stages, table.ticks, len(used), table.virtual_stages, table.microbatches, PipelineTasks(*fields), live,
        title=title,
    )  # fmt: skip


def _stage_memory(placed: PlacedRun, report: show.LayoutReport) -> Block:
    """Returns the bytes of a device of each stage: parameters, optimizer state, and what its microbatches keep."""
    training, work, table = placed.run.training, work_of(placed), placed.schedule_table
    each = work.tokens / placed.shape.tensor * work.width * jnp.dtype(training.compute_dtype).itemsize
    kept = kept_bytes(placed, work) / table.virtual_stages if keeps_stages(placed) else 0.0
    rows = []
    for stage in range(table.stages):
        live = int(table.live_inputs[:, stage].max())
        rows.append(
            Bar(f"stage {stage}: {live} in flight",
                [report.bytes_parameters, report.bytes_optimizer, live * each, live * kept])
        )  # fmt: skip
    names = ("parameters", "optimizer state", "inputs of microbatches", "saved activations of microbatches")
    return Bars(
        "bytes", names, ("c1", "c6", "c5", "c3"), rows, title="Memory of a device, by stage",
        note="Parameters lie in stacks of equal size on all stages. Weights in use, gradients and temporaries come on "
        "top; plan has them all.",
    )  # fmt: skip

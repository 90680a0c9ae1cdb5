"""Report of a layout: parameters, any tensor on the devices, the mesh over the machine, the pipeline's schedule."""

import dataclasses
import math
from collections.abc import Mapping

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, nearest
from meshwright.formatting import format_bytes, format_count
from meshwright.planner.memory_model import PhaseMemory
from meshwright.planner.optimizer import state_bytes
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import BATCH_AXES, find_layout
from meshwright.sharding.params import count_params, named_leaves
from meshwright.sharding.placement import Placement, notation
from meshwright.sharding.schedule_table import ScheduleTable
from meshwright.views.blocks import Column, Figure, Figures, Table
from meshwright.views.charts import Drawing
from meshwright.views.draw import (
    ArrayPicture,
    MachineGrid,
    PipelineTimeline,
    draw_machine,
    picture_of,
)
from meshwright.views.layout import (
    ParamRow,
    StageRow,
    param_rows,
    params_table,
    precision_blocks,
    stage_rows,
    stages_table,
)
from meshwright.views.report import Report, Section

_FIRST = ("blocks.up", "blocks.query", "embed")
"""Tensors of which the first that the model has is shown when a page opens."""


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
    rows = param_rows(placed)
    return LayoutReport(
        mesh=placed.layout.shape,
        rows=rows,
        parameters=count_params(placed.layout.params),
        bytes_parameters=sum(row.bytes_sharded for row in rows),
        bytes_optimizer=state_bytes(placed),
        stages=stage_rows(placed),
    )


def layout_page(placed: PlacedRun, machine: MachineGrid | None) -> Report:
    """Returns the report of a layout. machine: None draws one host."""
    run, report = placed.run, layout_report(placed)
    shape = placed.layout.shape
    stages = f"{shape.stage} stages of {shape.size // shape.stage} devices"
    dtypes = ", ".join(
        sorted({p.stored or run.training.param_dtype for _, p, _ in placed.layout.leaves})
    )
    figures = [
        Figure("parameters", format_count(report.parameters), "without padding"),
        Figure(
            "devices",
            f"{placed.layout.shape.size:,}",
            stages if placed.layout.shape.stage > 1 else f"layout {run.layout}",
        ),
        Figure("parameters of a device", format_bytes(report.bytes_parameters), dtypes),
        Figure(
            "optimizer state of a device", format_bytes(report.bytes_optimizer), run.optimizer.name
        ),
    ]
    lead = f"{format_count(report.parameters)} parameters on mesh {run.mesh}, layout {run.layout}"
    note = f"layout {run.layout}: {find_layout(run.layout).summary}"
    glance = Section("At a glance", [Figures(figures, note=note), *precision_blocks(placed)])
    return Report(
        f"{run.name} on {run.mesh}",
        [glance, *layout_sections(placed, machine)],
        topic="layout",
        lead=lead,
    )


def layout_sections(placed: PlacedRun, machine: MachineGrid | None) -> list[Section]:
    """Returns tensors on devices, the pipeline, the mesh over the machine, and the table of parameters."""
    report = layout_report(placed)
    totals = (
        f"On each device {format_bytes(report.bytes_parameters)} of parameters and "
        f"{format_bytes(report.bytes_optimizer)} of optimizer state."
    )
    sections = [
        Section(
            "Tensors on devices",
            [_placement_drawing(placed, report.rows)],
            "Equal colours hold equal data. Between steps every tensor is sharded; a layer's weights are gathered "
            "while it runs.",
            "Hover a block or a device to see the other side.",
        ),
        Section("Mesh over the machine", [machine_drawing(placed, machine)]),
        Section("Parameters", [params_table(report.rows, totals)]),
    ]
    if report.stages:
        table = placed.schedule_table
        blocks = [_pipeline_drawing(table), stages_table(report.stages)]
        hint = (
            "Hover a task, or move the slider, to follow its microbatch; the bars below each stage are the "
            "microbatches in flight there."
        )
        sections.insert(1, Section("Pipeline schedule", blocks, f"{table.summary}.", hint))
    return sections


def mesh_data(placed: PlacedRun, machine: MachineGrid | None) -> dict[str, object]:
    """Returns the axes of a mesh of more than one device, and the links along each of them."""
    return {
        "axes": _axes(placed),
        "summaries": draw_machine(placed.layout.shape.degrees(), machine).lines,
    }


def machine_drawing(
    placed: PlacedRun,
    machine: MachineGrid | None,
    link: str = "",
    others: dict[str, PlacedRun] | None = None,
) -> Drawing:
    """Returns the mesh over a machine, or over one host where none is given.

    link, others: a selection, and by its keys the runs whose mesh is shown in place of this one.
    """
    picture = draw_machine(placed.layout.shape.degrees(), machine)
    panels = [
        {
            "caption": panel.caption,
            "rows": panel.rows,
            "columns": panel.columns,
            "cells": [(*cell.devices, cell.row, cell.column) for cell in panel.cells],
        }
        for panel in picture.panels
    ]
    meshes = {key: mesh_data(other, machine) for key, other in (others or {}).items()}
    data = {"mesh": mesh_data(placed, machine), "panels": panels, "link": link, "meshes": meshes}
    return Drawing("Machine", data, title=picture.title)


def _axes(placed: PlacedRun) -> list[tuple[str, int]]:
    return [(axis, n) for axis, n in placed.layout.shape.degrees().items() if n > 1]


def _placement_drawing(placed: PlacedRun, rows: tuple[ParamRow, ...]) -> Drawing:
    axes = _axes(placed)
    index = {axis: i for i, (axis, _) in enumerate(axes)}

    def over(placement: Placement) -> list[list[int]]:
        return [[index[axis] for axis in names if axis in index] for names in placement]

    tensors = [
        {
            "name": row.path,
            "dims": list(p.dims),
            "shape": p.shape,
            "sharded": over(where.at_rest),
            "gathered": over(where.in_use),
            "sharded_text": row.sharded,
            "gathered_text": row.gathered,
            "bytes_sharded": row.bytes_sharded,
            "bytes_gathered": row.bytes_gathered,
            "stacked": p.dims.startswith("L"),
        }
        for row, (_, p, where) in zip(rows, placed.layout.leaves, strict=True)
    ]
    names = [row.path for row in rows]
    shape = (placed.run.training.batch, placed.run.training.seq)
    split = (BATCH_AXES, ("context",)) if placed.layout.shape.context > 1 else (BATCH_AXES, ())
    degrees = placed.layout.shape.degrees()
    size = (
        4
        * math.prod(shape)
        // math.prod(degrees[axis] for axes_of_dim in split for axis in axes_of_dim)
    )
    batch = {"name": "batch", "dims": ["B", "T"], "shape": shape, "stacked": False}
    for state in ("sharded", "gathered"):
        batch |= {
            state: over(split),
            f"{state}_text": notation("tokens", "BT", split),
            f"bytes_{state}": size,
        }
    first = next((name for name in _FIRST if name in names), names[0])
    data = {
        "axes": axes,
        "devices": placed.layout.shape.size,
        "tensors": [*tensors, batch],
        "first": first,
    }
    return Drawing("Placement", data)


def _pipeline_drawing(table: ScheduleTable) -> Drawing:
    picture = PipelineTimeline(table)
    return Drawing("Pipeline", picture.page_data(), title=picture.title)


def tensor_pictures(placed: PlacedRun, paths: tuple[str, ...] = ()) -> list[ArrayPicture]:
    """Draws parameters, each sharded and, where that differs, gathered; then the batch.

    paths: of the parameters; all if empty. Raises ConfigError for a path that the model does not have.
    """
    params, placements = named_leaves(placed.layout.params), named_leaves(placed.layout.placements)
    mesh, pictures = placed.layout.shape.degrees(), []
    for path in paths or params:
        if path not in params:
            raise ConfigError(
                f"a picture of {path!r}", "the model has no such parameter", nearest(path, params)
            )
        p, where = params[path], placements[path]
        pictures.append(picture_of(path, p.shape, p.dims, where.at_rest, mesh))
        if where.in_use != where.at_rest:
            pictures.append(picture_of(f"{path}, gathered", p.shape, p.dims, where.in_use, mesh))
    batch = (placed.run.training.batch, placed.run.training.seq)
    return [*pictures, picture_of("batch", batch, "BT", (BATCH_AXES, ()), mesh)]


def phases_section(
    planned: Mapping[str, PhaseMemory], compiled: Mapping[str, int] | None = None
) -> Section:
    """Returns the memory of each phase of a training, by arithmetic where it is planned, and as compiled."""
    columns = [Column("phase", cell=str)]
    columns += [Column("compiled", "bytes", lambda name: compiled[name])] if compiled else []
    if planned:
        columns += [
            Column("planned", "bytes", lambda name: planned[name].device),
            Column("host", "bytes", lambda name: planned[name].host),
        ]
    table = Table.of(
        list(planned or compiled or {}), columns, title="Memory of each phase", printed=None
    )
    note = "Most bytes of a device, the state included; host: copies in memory, for each of a host's devices."
    return Section("Memory of a training", [table], note)

"""Report of a layout: parameters, any tensor on the devices, the mesh
over the machine, the pipeline's schedule."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

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
from meshwright.views.blocks import Block, Column, Figure, Figures, Table, Text
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


def layout_page(
    placed: PlacedRun, machine: MachineGrid | None, notes: Sequence[str] = ()
) -> Report:
    """Returns the report of a layout.

    machine: None draws one host.  notes: what to know of the machine.
    """
    run = placed.run
    note = f"layout {run.layout}: {find_layout(run.layout).summary}"
    figures = Figures(_layout_figures(placed), note=note)
    blocks: list[Block] = [figures, *precision_blocks(placed)]
    if notes:
        blocks.append(Text([f"note: {note}" for note in notes]))
    glance = Section("At a glance", blocks)
    parameters = format_count(count_params(placed.layout.params))
    return Report(
        f"{run.name} on {run.mesh}",
        [glance, *layout_sections(placed, machine)],
        topic="layout",
        lead=f"{parameters} parameters on mesh {run.mesh}, layout {run.layout}",
    )


def _layout_figures(placed: PlacedRun) -> list[Figure]:
    run = placed.run
    shape = placed.layout.shape
    report = layout_report(placed)
    split = f"layout {run.layout}"
    if shape.stage > 1:
        split = f"{shape.stage} stages of {shape.size // shape.stage} devices"
    dtypes = {p.stored or run.training.param_dtype for _, p, _ in placed.layout.leaves}
    of_parameters = ", ".join(sorted(dtypes))
    bytes_optimizer = format_bytes(report.bytes_optimizer)
    return [
        Figure("parameters", format_count(report.parameters), "without padding"),
        Figure("devices", f"{shape.size:,}", split),
        Figure("parameters of a device", format_bytes(report.bytes_parameters), of_parameters),
        Figure("optimizer state of a device", bytes_optimizer, run.optimizer.name),
    ]


def layout_sections(placed: PlacedRun, machine: MachineGrid | None) -> list[Section]:
    """Returns tensors on devices, the pipeline, the mesh over the machine,
    and the table of parameters."""
    report = layout_report(placed)
    sections = [_tensors_section(placed, report.rows)]
    if report.stages:
        sections.append(_pipeline_section(placed.schedule_table, report.stages))
    totals = (
        f"On each device {format_bytes(report.bytes_parameters)} of parameters and "
        f"{format_bytes(report.bytes_optimizer)} of optimizer state."
    )
    return [
        *sections,
        Section("Mesh over the machine", [machine_drawing(placed, machine)]),
        Section("Parameters", [params_table(report.rows, totals)]),
    ]


def _tensors_section(placed: PlacedRun, rows: tuple[ParamRow, ...]) -> Section:
    return Section(
        "Tensors on devices",
        [_placement_drawing(placed, rows)],
        "Equal colours hold equal data. Between steps every tensor is sharded; a layer's weights "
        "are gathered while it runs.",
        "Hover a block or a device to see the other side.",
    )


def _pipeline_section(table: ScheduleTable, stages: tuple[StageRow, ...]) -> Section:
    picture = PipelineTimeline(table)
    drawing = Drawing("Pipeline", picture.page_data(), title=picture.title)
    hint = (
        "Hover a task, or move the slider, to follow its microbatch; the bars below each stage are "
        "the microbatches in flight there."
    )
    blocks = [drawing, stages_table(stages)]
    return Section("Pipeline schedule", blocks, f"{table.summary}.", hint)


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
    panels = []
    for panel in picture.panels:
        cells = [(*cell.devices, cell.row, cell.column) for cell in panel.cells]
        fields = {"caption": panel.caption, "rows": panel.rows, "columns": panel.columns}
        panels.append({**fields, "cells": cells})
    meshes = {key: mesh_data(other, machine) for key, other in (others or {}).items()}
    data = {"mesh": mesh_data(placed, machine), "panels": panels, "link": link, "meshes": meshes}
    return Drawing("Machine", data, title=picture.title)


def _axes(placed: PlacedRun) -> list[tuple[str, int]]:
    return [(axis, n) for axis, n in placed.layout.shape.degrees().items() if n > 1]


def _placement_drawing(placed: PlacedRun, rows: tuple[ParamRow, ...]) -> Drawing:
    """Returns the blocks of every parameter and of the batch, of which a reader chooses one.

    The placement of a tensor is a list for each of its dimensions: the axes that split it,
    by their number in `axes`.
    """
    axes = _axes(placed)
    numbers = {axis: number for number, (axis, _) in enumerate(axes)}
    tensors = []
    for row, (_, p, where) in zip(rows, placed.layout.leaves, strict=True):
        tensor = {
            "name": row.path,
            "dims": list(p.dims),
            "shape": p.shape,
            "sharded": _numbered(where.at_rest, numbers),
            "gathered": _numbered(where.in_use, numbers),
            "sharded_text": row.sharded,
            "gathered_text": row.gathered,
            "bytes_sharded": row.bytes_sharded,
            "bytes_gathered": row.bytes_gathered,
            "stacked": p.dims.startswith("L"),
        }
        tensors.append(tensor)
    tensors.append(_batch_tensor(placed, numbers))
    paths = [row.path for row in rows]
    data = {
        "axes": axes,
        "devices": placed.layout.shape.size,
        "tensors": tensors,
        "first": next((path for path in _FIRST if path in paths), paths[0]),
    }
    return Drawing("Placement", data)


def _numbered(placement: Placement, numbers: Mapping[str, int]) -> list[list[int]]:
    """Returns the numbers of the axes that split each dimension; axes of one device have none."""
    found = []
    for axes in placement:
        found.append([numbers[axis] for axis in axes if axis in numbers])
    return found


def _batch_tensor(placed: PlacedRun, numbers: Mapping[str, int]) -> dict[str, object]:
    """Returns the tokens of a step, int32 [B, T], which a device never gathers."""
    placement = _batch_placement(placed)
    shape = (placed.run.training.batch, placed.run.training.seq)
    batch: dict[str, object] = {
        "name": "batch",
        "dims": ["B", "T"],
        "shape": shape,
        "stacked": False,
    }
    degrees = placed.layout.shape.degrees()
    blocks = math.prod(degrees[axis] for axes in placement for axis in axes)
    for state in ("sharded", "gathered"):
        batch[state] = _numbered(placement, numbers)
        batch[f"{state}_text"] = notation("tokens", "BT", placement)
        batch[f"bytes_{state}"] = 4 * math.prod(shape) // blocks
    return batch


def _batch_placement(placed: PlacedRun) -> Placement:
    """Returns the axes that split the sequences of a batch, and those that split a sequence."""
    return (BATCH_AXES, ("context",) if placed.layout.shape.context > 1 else ())


def tensor_pictures(placed: PlacedRun, paths: tuple[str, ...] = ()) -> list[ArrayPicture]:
    """Draws parameters, each sharded and, where that differs, gathered; then the batch.

    paths: of the parameters; all if empty.
    Raises ConfigError for a path that the model does not have.
    """
    params = named_leaves(placed.layout.params)
    placements = named_leaves(placed.layout.placements)
    mesh = placed.layout.shape.degrees()
    pictures = []
    for path in paths or params:
        if path not in params:
            raise ConfigError(
                f"a picture of {path!r}", "the model has no such parameter", nearest(path, params)
            )
        p = params[path]
        where = placements[path]
        pictures.append(picture_of(path, p.shape, p.dims, where.at_rest, mesh))
        if where.in_use != where.at_rest:
            pictures.append(picture_of(f"{path}, gathered", p.shape, p.dims, where.in_use, mesh))
    batch = (placed.run.training.batch, placed.run.training.seq)
    return [*pictures, picture_of("batch", batch, "BT", _batch_placement(placed), mesh)]


def phases_section(
    planned: Mapping[str, PhaseMemory], compiled: Mapping[str, int] | None = None
) -> Section:
    """Returns the memory of each phase of a training, by arithmetic where it is planned,
    and as compiled."""
    columns = [Column("phase", cell=str)]
    if compiled:
        columns.append(Column("compiled", "bytes", lambda name: compiled[name]))
    if planned:
        columns += [
            Column("planned", "bytes", lambda name: planned[name].device),
            Column("host", "bytes", lambda name: planned[name].host),
        ]
    phases = list(planned or compiled or {})
    table = Table.of(phases, columns, title="Memory of each phase", printed=None)
    note = (
        "Most bytes of a device, the state included; "
        "host: copies in memory, for each of a host's devices."
    )
    return Section("Memory of a training", [table], note)

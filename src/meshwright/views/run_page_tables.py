"""Tables of a run's page: what happened, samples, configuration, profile, parity and rehearsal."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.views.pages import Block, Code, Column, Table
from meshwright.views.run_folder import RunFolder, flat_fields

_SAMPLES = 12
"""Most samples that are shown, the last."""
EVENTS = 400
"""Most events of a run that are shown, the last."""


def foresight(folder: RunFolder) -> list[Block]:
    """Returns the table of the parts of a step, foreseen and measured."""
    document = folder.document("foresight.json")
    gaps = document.get("gaps")
    rows = [[str(row.get("part")), real(row.get("predicted")), real(row.get("measured"))]
            for row in (gaps if isinstance(gaps, list) else []) if isinstance(row, dict)]  # fmt: skip
    if not rows:
        return []
    columns = [Column("part of a step"), Column("foreseen", "seconds"), Column("measured", "seconds")]
    return [Table(columns, rows, title=f"Foreseen and measured, {folder.name}",
                  note=f"Figures of the chip: {document.get('source', '')}")]  # fmt: skip


def profile(folder: RunFolder) -> list[Block]:
    """Returns the table of a profile: measured beside simulated."""
    document = folder.document("profile.json")
    rows = [
        [str(row.get("kind", "")), str(row.get("name", "")), real(row.get("measured")), real(row.get("simulated"))]
        for row in _objects(document.get("rows"))
    ]
    if not rows:
        return []
    columns = [Column("kind", choices=True), Column("what", wide=True), Column("measured", "seconds", bar=True),
               Column("simulated", "seconds")]  # fmt: skip
    return [Table(columns, rows, searchable=True, title=f"Profile, {folder.name}", note=str(document.get("note", "")))]


def event_table(folders: Sequence[RunFolder]) -> Block:
    """Returns the table of events and bad steps, the last first."""
    rows: list[list[str | int | float | None]] = []
    for folder in folders:
        for event in folder.events[-EVENTS:]:
            step = event.get("step")
            rows.append([folder.name, _clock(event.get("time")), step if isinstance(step, int) else None,
                         str(event.get("event", "")), real(event.get("seconds")), _detail(event)])  # fmt: skip
        for step, reason in folder.bad_steps():
            rows.append([folder.name, "", step, "bad step", None, reason])
    if len(folders) == 1:
        rows = [["", *row[1:]] for row in rows]
    columns = [Column("run", choices=True), Column("time (UTC)"), Column("step", "integer"),
               Column("event", choices=True), Column("took", "seconds"), Column("detail", wide=True)]  # fmt: skip
    return Table(columns, rows[::-1], searchable=True, shown=30)


def _detail(event: Mapping[str, Any]) -> str:
    """Formats what an event holds besides its time: `mesh fsdp=4, devices 4, processes 1, kind cpu, fresh`."""
    known = ("time", "step", "event", "seconds", "text")
    return ", ".join(
        f"{value}" if name == "how" else f"{name} {value}" for name, value in event.items() if name not in known
    )


def _clock(value: Any) -> str:
    number = real(value)
    if number is None or not 0 <= number < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(number))


def samples(folders: Sequence[RunFolder]) -> list[Block]:
    """Returns the last texts sampled from each model, the last first."""
    several = len(folders) > 1
    return [
        Code(text, title=f"{folder.name + ', ' if several else ''}step {step:,}")
        for folder in folders
        for step, text in folder.samples()[: -_SAMPLES - 1 : -1]
    ]


def configuration(folders: Sequence[RunFolder], recipes: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """Returns the Runs: how they differ from each other and from their recipes, and all of their fields."""
    fields = [flat_fields(folder.document("run.json")) for folder in folders]
    blocks: list[Block] = []
    if len(folders) > 1:
        names = sorted({name for each in fields for name in each})
        rows = [[name, *(each.get(name, "") for each in fields)] for name in names
                if len({each.get(name) for each in fields}) > 1]  # fmt: skip
        columns = [Column("field"), *(Column(folder.name, wide=True) for folder in folders)]
        blocks.append(Table(columns, rows, title="What differs between the runs"))
    for folder, each in zip(folders, fields, strict=True):
        name = each.get("name", "")
        if name in recipes:
            recipe = flat_fields(recipes[name])
            changed = [field for field, value in each.items() if recipe.get(field) != value]
            rows = [[field, recipe.get(field, ""), each[field]] for field in changed]
            columns = [Column("field"), Column(f"recipe {name}", wide=True), Column("this run", wide=True)]
            blocks.append(Table(columns, rows, title=f"{folder.name}: differences from the recipe {name}"))
    for folder, each in zip(folders, fields, strict=True):
        if each:
            table = Table([Column("field"), Column("value", wide=True)], [list(row) for row in each.items()],
                          searchable=True, shown=20, title=f"{folder.name}: run.json")  # fmt: skip
            blocks.append(table)
    return blocks


def checks(folder: RunFolder) -> list[Block]:
    """Returns the results of `meshwright parity --json` and `rehearse --json` that are kept in the folder."""
    rehearsal = folder.document("rehearsal.json")
    blocks = parity_table(folder.document("parity.json"), f"Parity, {folder.name}")
    rows = [[str(row.get("name")), str(row.get("result")), real(row.get("seconds"))]
            for row in _objects(rehearsal.get("parts"))]  # fmt: skip
    if rows:
        columns = [Column("part"), Column("result", wide=True), Column("took", "seconds")]
        blocks.append(Table(columns, rows, title=f"Rehearsal, {folder.name}", note=f"mesh {rehearsal.get('mesh', '')}"))
    return blocks


def parity_table(parity: Mapping[str, Any], title: str) -> list[Block]:
    """Returns the table of a parity document, `Parity` as JSON; nothing where it has no step."""
    blocks: list[Block] = []
    rows = [[row.get("step"), *_pair(row.get("losses")), real(row.get("gradient_difference")),
             str(row.get("worst_tensor", ""))] for row in _objects(parity.get("steps"))]  # fmt: skip
    if rows:
        meshes = [str(mesh) for mesh in parity.get("meshes", [])][:2]
        headings = [f"loss, {mesh}" for mesh in meshes] if len(meshes) == 2 else ["loss", "loss of the other"]
        columns = [Column("step", "integer"), *(Column(heading, "number") for heading in headings),
                   Column("gradients differ by", "number"), Column("most in")]  # fmt: skip
        note = str(parity.get("first_divergence") or "The meshes compute the same function.")
        blocks.append(Table(columns, rows, title=title, note=note))
    return blocks


def _objects(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _pair(value: Any) -> list[float | None]:
    values = [real(item) for item in value][:2] if isinstance(value, list) else []
    return [*values, None, None][:2]


def real(value: Any) -> float | None:
    """Returns a JSON number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

"""Draws the pipeline schedules and lists the features: `python docs/parallelism.py` writes `img/schedule-*.svg` and
`composition.md`."""

from pathlib import Path

from meshwright.declarations import Refused
from meshwright.models.remat import REMAT_POLICIES
from meshwright.plugins import PARTS
from meshwright.runs.checks import REFUSED
from meshwright.runs.fields import PATHS, declaration_of, fields_of_runs, status_of
from meshwright.sharding.schedules import SCHEDULES, build_table
from meshwright.update_rules import UPDATE_RULES
from meshwright.views.draw import PipelineTimeline, standalone
from meshwright.words import AXES

DOCS = Path(__file__).parent
FEATURES: dict[str, tuple[str, ...]] = {
    "model families": tuple(PARTS["model family"]),
    "mesh axes": (*AXES, "any one of them across slices"),
    "pipeline": (*SCHEDULES, "uneven stages"),
    "context strategies": ("ring", "all_gather", "ulysses", "usp"),
    "experts": ("dropless", "capacity", "folded", "leading dense layers"),
    "memory": ("accumulation", "zero1", *(f"remat {name}" for name in REMAT_POLICIES)),
    "model": ("tied embeddings", "dropout", "multi-token prediction"),
    "optimizers": tuple(UPDATE_RULES),
    "every run": ("packing", "evaluation", "checkpoint on another mesh"),
}


def schedules() -> dict[str, str]:
    """Returns the drawing of each schedule by file name: eight microbatches through four stages."""
    tables = (build_table(name, 4, 8, schedule.virtual_stages_for(2)) for name, schedule in SCHEDULES.items())
    return {f"img/schedule-{table.name}.svg": standalone(PipelineTimeline(table).svg()) for table in tables}


def combinations() -> str:
    """Returns the page that lists which features go together, and which fields mean something where."""
    lines = [
        "# What goes together",
        "",
        "Look up whether two features can be combined. Every feature below goes with every other, except the pairs at",
        "the end. `meshwright.runs.checks` has those pairs, and the trainer checks them before anything",
        "is traced. Tests walk all pairs on eight devices, and compare each run with one device.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {kind} | {', '.join(names)} |" for kind, names in FEATURES.items()),
        "",
        "## What is refused",
        "",
    ]
    for refusal in REFUSED:
        lines += [f"- **{' with '.join(refusal.features)}**: {refusal.because}. Instead: {refusal.instead}."]
    return "\n".join([*lines, "", *fields()]) + "\n"


def fields() -> list[str]:
    """Returns the lines of the table of fields by path."""
    conditions = ("text", "full", "lora")  # of `train` itself
    paths = [path for path in PATHS if path not in conditions]
    marks = {"honoured": "yes", "refused": "refused", "no effect": ""}
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in fields_of_runs():
        rows.setdefault(tuple(status_of(path, field) for path in paths), []).append(f"`{field}`")
    lines = [
        "## Fields of a run by path",
        "",
        "Look up what becomes of a field where a run is given to something else than `train` on text: it is",
        "honoured (yes), refused with the reason where it is not at its default, or has no effect there (empty).",
        "`answers` and `preferences` are fine-tuning with that objective, `wrap` is a run of",
        "[your own model](wrap.md). Fields of a model are honoured everywhere. `parity` compares in float32, with the",
        "full batch at every step. A field that belongs to another (`training.virtual_stages` to a schedule) means",
        "something where that one is set; `text`, `full` and `lora` below are the objective and the methods of",
        "fine-tuning. Every field says so where it is declared, and tests change every field.",
        "",
        f"| field | {' | '.join(paths)} |",
        f"|---|{'---|' * len(paths)}",
        *(f"| {', '.join(names)} | {' | '.join(marks[status] for status in row)} |" for row, names in rows.items()),
        "",
        "Why a path refuses a field:",
        "",
    ]
    for refusal, names in refusals().items():
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"- **{', '.join(refusal.paths)}**, {listed}: {refusal.because}.")
    return lines


def refusals() -> dict[Refused, list[str]]:
    """Returns the fields that have each reason to be refused."""
    found: dict[Refused, list[str]] = {}
    for field in fields_of_runs():
        for refusal in declaration_of(field).refusals:
            found.setdefault(refusal, []).append(field)
    return found


if __name__ == "__main__":
    for file, drawing in {**schedules(), "composition.md": combinations()}.items():
        (DOCS / file).write_text(drawing, encoding="utf-8")

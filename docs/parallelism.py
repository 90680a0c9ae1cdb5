"""Draws the pipeline schedules and lists the features: `python docs/parallelism.py` writes `img/schedule-*.svg` and
`composition.md`."""

from pathlib import Path

from meshwright.models.remat import REMAT_POLICIES
from meshwright.plugins import PARTS
from meshwright.runs.checks import ALWAYS, REFUSED
from meshwright.sharding.schedules import SCHEDULES, build_table
from meshwright.views.draw import PipelineTimeline, standalone
from meshwright.words import AXES

DOCS = Path(__file__).parent
FEATURES: dict[str, tuple[str, ...]] = {
    "model families": tuple(PARTS["model family"]),
    "mesh axes": (*AXES, "any one of them across slices"),
    "pipeline": (*SCHEDULES, "uneven stages"),
    "context strategies": ("ring", "all_gather", "ulysses", "usp"),
    "experts": ("dropless", "capacity", "leading dense layers"),
    "memory": ("accumulation", "zero1", *(f"remat {name}" for name in REMAT_POLICIES)),
    "model": ("tied embeddings", "dropout", "multi-token prediction"),
    "optimizers": ("adamw", "adafactor", "lion", "muon", "sgd"),
    "every run": ALWAYS,
}


def schedules() -> dict[str, str]:
    """Returns the drawing of each schedule by file name: eight microbatches through four stages."""
    tables = (build_table(name, 4, 8, schedule.virtual_stages_for(2)) for name, schedule in SCHEDULES.items())
    return {f"img/schedule-{table.name}.svg": standalone(PipelineTimeline(table).svg()) for table in tables}


def combinations() -> str:
    """Returns the page that lists which features go together."""
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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for file, drawing in {**schedules(), "composition.md": combinations()}.items():
        (DOCS / file).write_text(drawing, encoding="utf-8")

"""Draws the pipeline schedules and the table of features: `python docs/parallelism.py` writes `img/schedule-*.svg` and
`composition.md`."""

from pathlib import Path

from meshwright.runs.composition import REFUSED, refusal_of
from meshwright.runs.feature_table import FEATURES, IMPLIED
from meshwright.sharding.schedules import SCHEDULES, build_table
from meshwright.views.draw import PipelineTimeline
from meshwright.views.draw.svg import standalone

DOCS = Path(__file__).parent
AXES = (*FEATURES["mesh axis"], *FEATURES["slices"])
ROWS = {kind: names for kind, names in FEATURES.items() if kind not in ("mesh axis", "slices")}


def schedules() -> dict[str, str]:
    """Returns the drawing of each schedule by file name: eight microbatches through four stages."""
    tables = (build_table(name, 4, 8, schedule.virtual_stages_for(2)) for name, schedule in SCHEDULES.items())
    return {f"img/schedule-{table.name}.svg": standalone(PipelineTimeline(table).svg()) for table in tables}


def matrix() -> str:
    """Returns the page that lists which features go together."""
    lines = [
        "# What goes together",
        "",
        "Look up whether two features can be combined. Every feature goes with every other"
        + (", except the pairs at the end." if REFUSED else "."),
        "The page is made from `meshwright.runs.composition`, the table that the trainer checks before anything is",
        "traced. Tests walk it pair by pair on eight devices, and compare each run with one device.",
        "",
        f"| | {' | '.join(AXES)} |",
        f"|---|{'---|' * len(AXES)}",
    ]
    for kind, names in ROWS.items():
        lines += [f"| **{kind}** |{' |' * len(AXES)}"]
        for name in names:
            cells = ("no" if refusal_of({name, *IMPLIED.get(name, ()), axis}) else "yes" for axis in AXES)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## What is refused", ""] if REFUSED else []
    for refusal in REFUSED:
        lines += [f"- **{' with '.join(refusal.features)}**: {refusal.because}. Instead: {refusal.instead}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for file, drawing in {**schedules(), "composition.md": matrix()}.items():
        (DOCS / file).write_text(drawing, encoding="utf-8")

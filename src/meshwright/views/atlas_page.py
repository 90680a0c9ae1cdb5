"""Pages of the atlas: a published training run, what the planner predicts and would have chosen, and an index."""

import statistics
from collections.abc import Sequence

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.planner.estimate import Estimate
from meshwright.planner.explain import STEP_PARTS
from meshwright.planner.published import Chapter
from meshwright.views.atlas_tables import saving
from meshwright.views.layout_page import layout_sections
from meshwright.views.pages import (
    Axis,
    Bar,
    Bars,
    Block,
    Cell,
    Chart,
    Column,
    Facts,
    Figure,
    Figures,
    Grid,
    Page,
    Section,
    Series,
    Table,
    Text,
)
from meshwright.views.plan_page import MEMORY_COLOURS, PART_COLOURS, machine_of_target, plans_section, shown_plans

_SHOWN = 80
"""Plans on a page that fit, and as many that do not."""
_CLOSE = 0.1
"""Error of a prediction that the index calls close."""
_FOOTER = (
    "Predicted by arithmetic, from the files of facts in docs/atlas/runs: meshwright atlas FILE --out FOLDER makes "
    "this page. It loads nothing."
)


def chapter_page(chapter: Chapter) -> Page:
    """Returns the page of one published run."""
    run = chapter.run
    opened = [plan for plan in (chapter.best, chapter.same_mesh or chapter.own) if plan is not None]
    shown = shown_plans(chapter.found, opened, most=_SHOWN)
    sections = [
        Section("Published and predicted", _comparison(chapter)),
        plans_section(shown, chapter.found, "What the planner would have done", saving(chapter)),
        Section("Memory of one device", [_memory(chapter)]),
        Section("Traffic of one device", [_traffic(chapter.predicted)], "On the published mesh."),
        *layout_sections(run.placed, machine_of_target(run.target)),
        Section("Sources", [_sources(chapter)]),
    ]
    return Page(run.title, sections, topic="atlas of published runs", lead=run.summary, footer=_FOOTER)


def index_page(chapters: Sequence[Chapter]) -> Page:
    """Returns the page that compares all runs."""
    errors = [abs(chapter.error) for chapter in chapters]
    saved = [chapter.saved for chapter in chapters if chapter.saved is not None]
    figures = [
        Figure("published runs", f"{len(chapters)}", f"{min(c.run.year for c in chapters)} to "
               f"{max(c.run.year for c in chapters)}"),
        Figure("median error of the step", f"{statistics.median(errors):.0%}", f"largest {max(errors):.0%}"),
        Figure(f"within {_CLOSE:.0%}", f"{sum(error <= _CLOSE for error in errors)}", f"of {len(errors)} runs"),
        Figure("the planner saves", f"{statistics.median(saved):.0%}" if saved else "-",
               f"of a step in the median, at most {max(saved):.0%}" if saved else "nothing fits"),
    ]  # fmt: skip
    columns = [
        Column("run"), Column("page", "link"), Column("mesh"), Column("published", "seconds"),
        Column("predicted", "seconds"), Column("error", "fraction"), Column("published MFU", "fraction"),
        Column("predicted MFU", "fraction"), Column("planner saves", "fraction", bar=True),
        Column("planner's plan", wide=True), Column("chip", choices=True), Column("year"),
    ]  # fmt: skip
    table = Table(
        columns, [_index_row(chapter) for chapter in chapters], keys=[c.run.name for c in chapters], link="run",
        searchable=True, title="Every run",
        note="The planner's saving is against the published mesh, both with Meshwright's step.",
    )  # fmt: skip
    sections = [
        Section("Predicted against published", [Figures(figures), table]),
        Section("Step times", [_index_chart(chapters)]),
    ]
    return Page(
        "Atlas of published training runs", sections, topic="atlas",
        lead="Where the parameters of well-known models lay, what a step cost, and what the planner would have chosen.",
        footer=_FOOTER,
    )  # fmt: skip


def _index_chart(chapters: Sequence[Chapter]) -> Chart:
    points = [(c.run.published_seconds(c.predicted)[0], c.predicted.seconds) for c in chapters]
    ends = [0.8 * min(map(min, points)), 1.25 * max(map(max, points))]
    tips = [f"{c.run.title}\n{c.error:+.0%}" for c in chapters]
    return Chart(
        Axis("published seconds per step", "seconds", log=True),
        Axis("predicted seconds per step", "seconds", log=True),
        [
            Series("equal", ends, ends, "muted", dashed=True),
            Series("runs", [x for x, _ in points], [y for _, y in points], "c1", "points", tips=tips,
                   keys=[c.run.name for c in chapters]),
        ],
        link="run", note="On the line the prediction is right; a click marks the run in the table.",
    )  # fmt: skip


def _index_row(chapter: Chapter) -> list[Cell]:
    run, best, e = chapter.run, chapter.best, chapter.predicted
    return [
        run.title, f"{run.name}.html open", str(run.placed.shape), run.published_seconds(e)[0], e.seconds,
        chapter.error, run.published_mfu(e)[0], e.mfu, chapter.saved, best.name if best else "nothing fits",
        run.target.chip.name, str(run.year),
    ]  # fmt: skip


def _comparison(chapter: Chapter) -> list[Block]:
    run, e = chapter.run, chapter.predicted
    seconds, _ = run.published_seconds(e)
    placed = run.placed
    training = placed.run.training
    microbatches = f", {training.microbatches} microbatches" if training.microbatches > 1 else ""
    facts = [
        ("machine", f"{run.target}: {run.target.chips:,} {run.target.chip.name}"),
        ("mesh", str(placed.shape)),
        ("batch", f"{training.batch:,} sequences of {training.seq:,} tokens{microbatches}"),
        ("rematerialisation", training.remat),
        ("matmuls", training.compute_dtype if training.matmul_precision == "compute" else training.matmul_precision),
        ("priced as", f"{run.software.name} (planner/software.py)"),
    ]
    if placed.shape.stage > 1:
        facts.insert(3, ("pipeline", f"{training.pipeline_schedule}, {placed.virtual_stages} virtual stages"))
    facts += _whole_training(chapter)
    texts = [Text([run.reason], title="Why the prediction is off")] if run.reason else []
    texts += [Text(run.differs, title="How the priced run differs from the published one")] if run.differs else []
    return [
        Figures(_figures(chapter)),
        _step_bars(chapter, seconds),
        Grid([Facts(facts, title="The published run"), *texts]),
    ]


def _figures(chapter: Chapter) -> list[Figure]:
    """Returns what a reader wants first: step, MFU, memory, and what the planner's choice saves."""
    run, e, own = chapter.run, chapter.predicted, chapter.own.estimate
    seconds, origin = run.published_seconds(e)
    mfu, counted = run.published_mfu(e)
    source = run.sources[0]
    room = f"{own.bytes / own.hbm_bytes:.0%} of {format_bytes(own.hbm_bytes)}, for Meshwright's step"
    if not own.fits:
        room += ": too much" + (" with fragmentation" if own.bytes <= own.hbm_bytes else "")
    saved = chapter.saved
    if chapter.best is None:
        choice = Figure("planner's step", "none", "nothing fits", "bad")
    elif saved is None:
        choice = Figure("planner's step", format_step(chapter.best.estimate.seconds), chapter.best.name)
    elif saved < 0.005:
        choice = Figure("planner's plan saves", "nothing", "the published mesh is as good")
    else:
        choice = Figure("planner's plan saves", f"{saved:.0%}", f"of the step, with {chapter.best.name}", "good")
    return [
        Figure("published step", format_step(seconds), f"{origin}: {source.where}", url=source.url),
        Figure("predicted step", format_step(e.seconds), f"{chapter.error:+.1%} against the published"),
        Figure("published MFU", f"{mfu:.1%}", counted, url=source.url if run.published.mfu else ""),
        Figure("predicted MFU", f"{e.mfu:.1%}", f"bound by {e.bound_by}"),
        Figure("memory of a device", format_bytes(own.bytes), room, "" if own.fits else "bad"),
        choice,
    ]


def _whole_training(chapter: Chapter) -> list[tuple[str, str]]:
    """States the chip-hours of the whole training: predicted, published, and what the planner's choice saves."""
    run, e, p = chapter.run, chapter.predicted, chapter.run.published
    if p.tokens is None:
        return []
    hours_of_second = p.tokens / run.tokens_per_step / 3600 * run.target.chips
    text = f"{format_count(hours_of_second * e.seconds)} predicted without downtime"
    if p.chip_hours is not None:
        text += f", {format_count(p.chip_hours)} published"
    if chapter.best is not None and chapter.same_mesh is not None and chapter.saved:
        saved = chapter.same_mesh.estimate.seconds - chapter.best.estimate.seconds
        text += f"; the planner's plan saves {format_count(hours_of_second * saved)}"
    return [(f"chip-hours of {format_count(p.tokens)} tokens", text)]


def _step_bars(chapter: Chapter, seconds: float) -> Bars:
    """Seconds of the step by part: the published program, ours on its mesh, ours on the planner's."""
    rows = [(f"published mesh, {chapter.run.software.name}", chapter.predicted)]
    if chapter.same_mesh is not None:
        rows.append(("published mesh, Meshwright", chapter.same_mesh.estimate))
    if chapter.best is not None:
        rows.append(("planner's mesh, Meshwright", chapter.best.estimate))
    return Bars(
        "seconds", list(STEP_PARTS.values()), [PART_COLOURS[part] for part in STEP_PARTS],
        [Bar(label, [e.parts[part] for part in STEP_PARTS]) for label, e in rows],
        limit=seconds, limit_name="published step", title="Where the seconds of a step go",
    )  # fmt: skip


def _memory(chapter: Chapter) -> Bars:
    rows = [("published mesh", chapter.own.estimate)]
    if chapter.best is not None:
        rows.append(("planner's mesh", chapter.best.estimate))
    names = list(dict.fromkeys(name for _, e in rows for name, size in e.memory.items() if size > 0))
    return Bars(
        "bytes", names, [MEMORY_COLOURS.get(name, "c7") for name in names],
        [Bar(label, [e.memory.get(name, 0.0) for name in names]) for label, e in rows],
        limit=chapter.predicted.hbm_bytes, limit_name=f"memory of {chapter.run.target.chip.name}",
        note="What Meshwright's step keeps. The published program kept other things, and fitted.",
    )  # fmt: skip


def _traffic(e: Estimate) -> Table:
    columns = [
        Column("mesh axes"), Column("links", wide=True), Column("links busy", "seconds", bar=True),
        Column("exposed", "seconds", bar=True),
    ]  # fmt: skip
    axes = sorted(e.busy, key=lambda axes: -e.busy[axes])
    rows: list[list[Cell]] = [[name, e.routes[name], e.busy[name], e.exposed.get(name, 0.0)] for name in axes]
    return Table(columns, rows, title="Seconds of the links")


def _sources(chapter: Chapter) -> Table:
    rows = [[s.states, f"{s.url} {s.where}"] for s in chapter.run.sources]
    return Table([Column("fact", wide=True), Column("published in", "link", wide=True)], rows, title="Published facts")

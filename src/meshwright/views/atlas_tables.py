"""Table of published training runs that `meshwright atlas` prints, and its JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.formatting import format_bytes, format_step
from meshwright.planner.explain import memory_shortfall, nothing_fits, slowdown_reason
from meshwright.planner.plan_file import prediction_json
from meshwright.planner.published import Chapter
from meshwright.views.plain_table import plain_table


def print_chapters(console: Console, chapters: Sequence[Chapter]) -> None:
    """Prints published and predicted steps, and the planner's choice for the same model, batch and machine."""
    headings = ("published", "predicted", "error", "published MFU", "predicted MFU", "ours", "saves")
    table = plain_table("run", *headings, "memory", "plan", right=headings)
    for chapter in chapters:
        run, e, best, own = chapter.run, chapter.predicted, chapter.best, chapter.own.estimate
        saved = chapter.saved
        table.add_row(
            escape(run.title), format_step(run.published_seconds(e)[0]), format_step(e.seconds),
            f"{chapter.error:+.0%}", f"{run.published_mfu(e)[0]:.0%}", f"{e.mfu:.0%}",
            format_step(best.estimate.seconds) if best else "-", "-" if saved is None else f"{saved:.0%}",
            f"{format_bytes(own.bytes)} of {format_bytes(own.hbm_bytes)}",
            escape(best.name) if best else "nothing fits",
        )  # fmt: skip
    console.print(table)
    console.print(
        "[dim]predicted: the published mesh with the published program's constants. ours: Meshwright's step on the "
        "mesh that the planner chooses; saves: against the published mesh. memory: of Meshwright's step on that.[/]"
    )


def saving(chapter: Chapter) -> str:
    """States what the planner's choice saves against the published mesh, both with Meshwright's step."""
    best, same, saved = chapter.best, chapter.same_mesh, chapter.saved
    if best is None:
        return f"Nothing fits: {nothing_fits(chapter.run.placed.run, chapter.found).truth}."
    step = format_step(best.estimate.seconds)
    if same is None or saved is None:
        published, _ = chapter.run.published_seconds(chapter.predicted)
        return (
            f"On the published mesh Meshwright's step {memory_shortfall(chapter.own)}. The fastest plan that fits is "
            f"{best.name}: {step} a step, {best.estimate.seconds / published - 1:+.0%} of the published."
        )
    if saved < 0.005:
        return f"The published mesh is as good as the planner's choice, {best.name}: {step} a step."
    lost = slowdown_reason(same, best).partition(": ")[2]
    return (
        f"{best.name}: {step} a step against {format_step(same.estimate.seconds)} on the published mesh, both with "
        f"Meshwright's step: {saved:.0%} less. The published mesh has {lost}."
    )


def chapter_json(chapter: Chapter) -> dict[str, Any]:
    """Returns a published run, its prediction and the planner's choice as JSON values."""
    run, best = chapter.run, chapter.best
    e, own = chapter.predicted, chapter.own.estimate
    seconds, origin = run.published_seconds(e)
    mfu, counted = run.published_mfu(e)
    return {
        "name": run.name, "title": run.title, "year": run.year, "target": str(run.target), "chips": run.target.chips,
        "mesh": str(run.placed.shape), "program": run.software.name, "tokens_per_step": run.tokens_per_step,
        "published_seconds": seconds, "published_seconds_from": origin, "published_mfu": mfu,
        "published_mfu_from": counted,
        "predicted": {"seconds": e.seconds, "mfu": e.mfu, "bytes": e.bytes, "parts": dict(e.parts)},
        "error": chapter.error, "reason": run.reason, "differs": run.differs,
        "own_step": {"seconds": own.seconds, "bytes": own.bytes, "fits": own.fits},
        "same_mesh_seconds": chapter.same_mesh.estimate.seconds if chapter.same_mesh else None,
        "best": None if best is None else {"name": best.name, **prediction_json(best)},
        "saved": chapter.saved, "saving": saving(chapter),
        "sources": [{"states": s.states, "where": s.where, "url": s.url} for s in run.sources],
    }  # fmt: skip

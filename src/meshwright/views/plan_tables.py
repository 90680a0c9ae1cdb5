"""Tables that `meshwright plan` and `meshwright train` print of plans and forecasts."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.hardware.targets import Target
from meshwright.planner.explain import STEP_PARTS, Alternative, differences
from meshwright.planner.forecast import ForecastGap
from meshwright.planner.search import Plan, SearchResult
from meshwright.views.plain_table import plain_table

_DAY = 86400.0
_SMALL = 0.005
"""Fraction of a step or of the memory below which a part is not printed."""
_EQUAL_BYTES = 2**28
"""Difference between two plans below which a category of memory is not printed."""


def print_plans(
    console: Console, result: SearchResult, *, name: str, shown: int, tokens: float, search_seconds: float
) -> None:  # fmt: skip
    """Prints the ranked plans.

    name: of the run. shown: number of rows. tokens: of the whole training, from which days follow.
    """
    target, training = result.target, result.plans[0].run.training
    console.print(
        f"[bold]{escape(name)}[/] on [bold]{target}[/] ({target.chips} chips): {training.batch} x {training.seq} = "
        f"{format_count(training.batch * training.seq)} tokens per step; {result.priced} plans priced in "
        f"{search_seconds:.1f} s, {len(result.plans)} fit"
    )
    console.print("[dim]all figures are predicted by arithmetic; --prove compiles the best plans[/]")
    console.print(f"[dim]efficiency: {escape(target.efficiency_source)}[/]\n" if target.efficiency_source else "")
    days = [f"{tokens / plan.estimate.tokens_per_second / _DAY:,.1f}" for plan in result.plans[:shown]]
    console.print(plans_table(result.plans[:shown], days=days))
    console.print(f"[dim]days of steps for {format_count(tokens)} tokens; MFU leaves recomputation out[/]\n")


def plans_table(plans: Sequence[Plan], days: Sequence[str] = ()) -> Table:
    """Returns the table of ranked plans. days: of each plan's training; none for plans of several machines."""
    named = ("days",) if days else ("machine",)
    right = ("", "step", "MFU", "tokens/s", "GiB", "days")
    table = plain_table("", "plan", "step", "MFU", "tokens/s", "GiB", "bound by", *named, right=right)
    for index, plan in enumerate(plans):
        e = plan.estimate
        table.add_row(
            str(index + 1), escape(plan.name), f"{e.seconds:.3g} s", f"{e.mfu:.0%}",
            format_count(e.tokens_per_second), f"{e.bytes / 2**30:.0f} of {e.hbm_bytes / 2**30:.0f}", e.bound_by,
            days[index] if days else str(e.target),
        )  # fmt: skip
    return table


def print_best_plan(console: Console, plan: Plan, target: Target) -> None:
    """Prints the mesh axes, step time by part, link time and memory of a plan."""
    e = plan.estimate
    if e.axis_mapping.spans:
        console.print(f"mesh axes of [bold]{plan.mesh}[/] on {target}: {e.axis_mapping}")
    parts = [
        f"{name} {format_step(e.parts[part])} ({e.parts[part] / e.seconds:.0%})"
        for part, name in STEP_PARTS.items()
        if e.parts[part] > _SMALL * e.seconds
    ]
    console.print("step: " + ", ".join(parts))
    links = [
        f"{axes} {format_step(seconds)} over {e.routes[axes]}, {format_step(e.exposed.get(axes, 0.0))} of it exposed"
        for axes, seconds in e.busy.items()
        if seconds
    ]
    if links:
        console.print("links: " + "; ".join(links))
    memory = [f"{category} {format_bytes(n)}" for category, n in e.memory.items() if n > _SMALL * e.bytes]
    console.print("memory: " + ", ".join(memory))
    console.print(f"host memory while a checkpoint is written: {format_bytes(e.saved)} for each of a host's devices\n")


def print_alternatives(console: Console, losers: list[Alternative], shown: int) -> None:
    """Prints why plans with other mesh axes lose against the winner."""
    if not losers:
        return
    table = plain_table("mesh axes", "best plan", "step", "reason", right=("step",), title="why not")
    for loser in losers[:shown]:
        seconds = loser.best.estimate.seconds
        table.add_row(loser.axes, escape(loser.best.name), f"{seconds:.3g} s", loser.reason)
    console.print(table)
    if len(losers) > shown:
        console.print(f"[dim]... and {len(losers) - shown} more (--shown {len(losers)})[/]")


def print_comparison(console: Console, a: Plan, b: Plan) -> None:
    """Prints two plans side by side."""
    table = plain_table("", a.name, b.name, "difference", right=(a.name, b.name, "difference"))
    for part, seconds_a, seconds_b in [
        ("step", a.estimate.seconds, b.estimate.seconds),
        *((f"  {part}", mine, other) for part, mine, other in differences(a.estimate, b.estimate)),
    ]:
        table.add_row(part, f"{seconds_a:.3g} s", f"{seconds_b:.3g} s", f"{seconds_b - seconds_a:+.3g} s")
    table.add_row("memory", format_bytes(a.estimate.bytes), format_bytes(b.estimate.bytes), "")
    for category in dict.fromkeys((*a.estimate.memory, *b.estimate.memory)):
        bytes_a, bytes_b = (plan.estimate.memory.get(category, 0.0) for plan in (a, b))
        if abs(bytes_a - bytes_b) > _EQUAL_BYTES:
            difference = ("+" if bytes_b > bytes_a else "-") + format_bytes(abs(bytes_b - bytes_a))
            table.add_row(f"  {category}", format_bytes(bytes_a), format_bytes(bytes_b), difference)
    console.print(table)


def print_forecast_gaps(console: Console, gaps: list[ForecastGap]) -> None:
    """Prints the predicted and measured seconds of a step, by part."""
    right = ("predicted", "measured", "difference")
    table = plain_table("part", "predicted", "measured", "difference", right=right, title="time per step")
    for gap in gaps:
        difference = ("-" if gap.seconds < 0 else "+") + format_step(abs(gap.seconds))
        table.add_row(gap.part, format_step(gap.predicted), format_step(gap.measured), difference)
    console.print()
    console.print(table)
    console.print(f"largest difference: {gaps[0].part}")

"""Tables that `meshwright plan` prints of offers: days and cost of a training, each with its arithmetic."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_count, format_step, format_time
from meshwright.planner.offers import Offer
from meshwright.views.plain_table import plain_table


def format_amount(value: float) -> str:
    """Formats a number with three digits, and all digits before the point: `3.14`, `31.4`, `12,345`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_offers(console: Console, offers: Sequence[Offer], *, heading: str, shown: int) -> None:
    """Prints ranked offers, and the arithmetic of each."""
    console.print(heading)
    console.print("[dim]all figures are predicted by arithmetic[/]\n")
    console.print(offers_table(offers[:shown]))
    if len(offers) > shown:
        console.print(f"[dim]... and {len(offers) - shown} more (--shown {len(offers)})[/]")
    console.print()
    for number, offer in enumerate(offers[:shown], 1):
        _print(console, f"{number}  {arithmetic(offer)}")
    _print(console, "")
    print_assumptions(console, offers[:shown])


def offers_table(offers: Sequence[Offer]) -> Table:
    """Returns the table of ranked offers."""
    right = ("", "step", "days", "cost")
    table = plain_table("", "target", "plan", "step", "days", "cost", "bound by", right=right)
    for number, offer in enumerate(offers, 1):
        e = offer.plan.estimate
        table.add_row(
            str(number), str(offer.plan.target), escape(offer.plan.name), f"{e.seconds:.3g} s",
            format_amount(offer.days), "-" if offer.dollars is None else f"${format_amount(offer.dollars)}",
            e.bound_by,
        )  # fmt: skip
    return table


def print_training(console: Console, offer: Offer) -> None:
    """Prints days and cost of a plan's training, with their arithmetic."""
    _print(console, f"training: {arithmetic(offer)}")
    print_assumptions(console, [offer])
    _print(console, "")


def arithmetic(offer: Offer) -> str:
    """Returns how the days and dollars of an offer follow from its speed."""
    e, chips = offer.plan.estimate, offer.plan.target.chips
    parts = [
        f"{offer.plan.target}: {format_count(offer.tokens)} tokens / {e.tokens_per_second:,.0f} tokens/s = "
        f"{format_amount(offer.step_days)} days of steps; / {offer.goodput.fraction:.4f} goodput = "
        f"{format_amount(offer.days)} days; x 24 h x {chips:,} chips = {offer.chip_hours:,.0f} chip-hours"
    ]
    if offer.price is not None and offer.dollars is not None:
        parts.append(f"x ${offer.price.dollars:g} = ${format_amount(offer.dollars)}")
    low, high = (offer.days * factor for factor in (offer.band.low, offer.band.high))
    parts.append(f"expect {format_amount(low)} to {format_amount(high)} days: {offer.band}")
    return "; ".join(parts)


def print_assumptions(console: Console, offers: Sequence[Offer]) -> None:
    """Prints prices and reliability that offers were made with, and what is missing."""
    lines: dict[str, None] = {}
    for offer in offers:
        good, chip = offer.goodput, offer.plan.target.name
        lines[
            f"goodput of {offer.plan.target}: a failure every {format_time(good.failure_seconds)}, a checkpoint every "
            f"{format_time(good.period)} of steps that stops {format_step(good.save_seconds)} of them, "
            f"{format_time(good.restart_seconds)} of restart: {good.fraction:.2%}"
        ] = None
    for offer in offers:
        chip = offer.plan.target.name
        if offer.price is None:
            lines[f"price of {chip}: none on these --terms; --prices FILE adds one"] = None
        else:
            lines[f"price of {chip}: {offer.price}; {offer.price.source}, read {offer.price.read_on}"] = None
    for line in lines:
        _print(console, line)


def print_refused(console: Console, refused: Mapping[str, MeshwrightError]) -> None:
    """Prints the targets that no plan fits, and why."""
    for name, error in refused.items():
        reason = " ".join(error.truth.split("\n")[:2])  # the second line has the closest plan
        _print(console, f"no plan for {name}: {' '.join(reason.split())}; {error.fix}")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)

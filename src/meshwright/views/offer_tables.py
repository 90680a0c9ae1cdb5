"""Tables that `meshwright plan` prints of offers: days, cost and energy of a training, each with its arithmetic."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_count, format_step, format_time
from meshwright.planner.offers import Offer, Recommendation
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
    right = ("", "step", "days", "cost", "MWh")
    table = plain_table("", "target", "plan", "step", "days", "cost", "MWh", "bound by", right=right)
    for number, offer in enumerate(offers, 1):
        e = offer.plan.estimate
        table.add_row(
            str(number), str(offer.plan.target), escape(offer.plan.name), f"{e.seconds:.3g} s",
            format_amount(offer.days), "-" if offer.dollars is None else f"${format_amount(offer.dollars)}",
            "-" if offer.megawatt_hours is None else format_amount(offer.megawatt_hours), e.bound_by,
        )  # fmt: skip
    return table


def print_training(console: Console, offer: Offer) -> None:
    """Prints days, cost and energy of a plan's training, with their arithmetic."""
    _print(console, f"training: {arithmetic(offer)}")
    print_assumptions(console, [offer])
    _print(console, "")


def arithmetic(offer: Offer) -> str:
    """Returns how the days, dollars and energy of an offer follow from its speed."""
    e, chips = offer.plan.estimate, offer.plan.target.chips
    parts = [
        f"{offer.plan.target}: {format_count(offer.tokens)} tokens / {e.tokens_per_second:,.0f} tokens/s = "
        f"{format_amount(offer.step_days)} days of steps; / {offer.goodput.fraction:.4f} goodput = "
        f"{format_amount(offer.days)} days; x 24 h x {chips:,} chips = {offer.chip_hours:,.0f} chip-hours"
    ]
    if offer.price is not None and offer.dollars is not None:
        parts.append(f"x ${offer.price.dollars:g} = ${format_amount(offer.dollars)}")
    if offer.power is not None and offer.megawatt_hours is not None:
        parts.append(f"x {offer.power.watts:g} W x {offer.pue:g} PUE = {format_amount(offer.megawatt_hours)} MWh")
    low, high = (offer.days * factor for factor in (offer.band.low, offer.band.high))
    parts.append(f"expect {format_amount(low)} to {format_amount(high)} days: {offer.band}")
    return "; ".join(parts)


def print_assumptions(console: Console, offers: Sequence[Offer]) -> None:
    """Prints prices, power and reliability that offers were made with, and what is missing."""
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
        if offer.power is None:
            lines[f"power of {chip}: not published; --power FILE adds it"] = None
        else:
            lines[f"power of {chip}: {offer.power.watts:g} W, {offer.power.meaning}; {offer.power.source}"] = None
    for line in lines:
        _print(console, line)


def print_refused(console: Console, refused: Mapping[str, MeshwrightError]) -> None:
    """Prints the targets that no plan fits, and why."""
    for name, error in refused.items():
        reason = " ".join(error.truth.split("\n")[:2])  # the second line has the closest plan
        _print(console, f"no plan for {name}: {' '.join(reason.split())}; {error.fix}")


def print_recommendation(console: Console, found: Recommendation) -> None:
    """Prints the model size and tokens of a scaling law, the nearest recipe, and their losses."""
    law = found.law
    _print(console, f"scaling law: {law.name} ({law.source})")
    _print(
        console,
        f"loss = {law.e} + {law.a} / N^{law.alpha} + {law.b} / D^{law.beta} nats; {found.flops:.3g} FLOPs = 6 N D",
    )
    _print(
        console,
        f"optimum: N = {found.parameters:.3g} parameters, D = {found.tokens:.3g} tokens "
        f"({found.tokens / found.parameters:.1f} per parameter): loss {found.optimal_loss:.4f}",
    )
    ratio = found.offer.tokens / found.recipe_parameters
    _print(
        console,
        f"nearest recipe: {found.recipe}, N = {found.recipe_parameters:.3g}, D = {found.offer.tokens:.3g} tokens "
        f"({ratio:.1f} per parameter): loss {found.recipe_loss:.4f}\n",
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)

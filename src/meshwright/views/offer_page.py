"""Page of several targets or batches: days against cost of a training, and the arithmetic of each."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_bytes, format_count
from meshwright.planner.offers import Offer
from meshwright.views.draw.colours import series_colour
from meshwright.views.offer_tables import arithmetic, format_amount
from meshwright.views.pages import Axis, Cell, Chart, Column, Figure, Figures, Grid, Page, Section, Series, Table
from meshwright.views.plan_page import plan_inspector

_MARKERS = ("circle", "square", "diamond", "triangle")


def offer_page(
    offers: Sequence[Offer], refused: Mapping[str, MeshwrightError] = MappingProxyType({}),
    beyond: Sequence[Offer] = (),
) -> Page:  # fmt: skip
    """Returns the page of ranked offers, the best first.

    refused: targets and batches that no plan fits, and why.  beyond: offers that do not keep the deadline or budget.
    """
    keyed = {f"o{i}": offer for i, offer in enumerate(offers)}
    best = offers[0]
    tokens = format_count(best.tokens)
    plans = {key: offer.plan for key, offer in keyed.items()}
    reasons = {key: arithmetic(offer) for key, offer in keyed.items()}
    figures = [
        Figure("first", str(best.plan.target), best.plan.name),
        Figure("days", format_amount(best.days), f"{best.goodput.fraction:.1%} goodput"),
        Figure("cost", "-" if best.dollars is None else f"${format_amount(best.dollars)}",
               "no list price" if best.price is None else str(best.price)),
    ]  # fmt: skip
    inspector = plan_inspector(plans, reasons, "o0", len(plans))
    sections = [
        Section("At a glance", [Figures(figures)]),
        Section("Days and cost", [Grid([_scatter(keyed, reasons), inspector], wide=True), _table(keyed)],
                f"Training on {tokens} tokens. Click two to compare them."),
        *_left_out(refused, beyond),
    ]  # fmt: skip
    lead = (
        f"{len(offers)} plans for {tokens} tokens; first {best.plan.target}: {format_amount(best.days)} days, "
        f"{format_bytes(best.plan.estimate.bytes)} per device"
    )
    if refused or beyond:
        lead += f"; {len(refused) + len(beyond)} left out"
    title = f"{best.plan.run.name} on {len({str(o.plan.target) for o in offers})} targets"
    footer = "Every figure is predicted by arithmetic from list prices. This file loads nothing."
    return Page(title, sections, topic="plan", lead=lead, footer=footer)


def _left_out(refused: Mapping[str, MeshwrightError], beyond: Sequence[Offer]) -> list[Section]:
    """Returns the section of the targets without an offer here, and why; none where all have one."""
    rows: list[list[Cell]] = [[name, "nothing fits", error.truth, error.fix] for name, error in refused.items()]
    for o in beyond:
        cost = "no list price" if o.dollars is None else f"${format_amount(o.dollars)}"
        reason = f"{format_amount(o.days)} days, {cost}: {o.plan.name} is its fastest plan"
        rows.append([str(o.plan.target), "beyond the limits", reason, "a later deadline, or more to spend"])
    columns = [
        Column("target", wide=True), Column("left out", choices=True), Column("reason", wide=True),
        Column("what would mend it", wide=True),
    ]  # fmt: skip
    why = "Targets that were asked for and have no offer above."
    return [Section("Left out", [Table(columns, rows, title="Targets without an offer")], why)] if rows else []


def _scatter(keyed: Mapping[str, Offer], reasons: Mapping[str, str]) -> Chart:
    """Days against dollars, or against chip-hours where a price is missing."""
    offers = list(keyed.values())
    if all(offer.dollars is not None for offer in offers):
        label, unit, values = "cost", "dollars", {key: offer.dollars for key, offer in keyed.items()}
    else:
        label, unit, values = "chip-hours", "count", {key: offer.chip_hours for key, offer in keyed.items()}
    series = []
    for number, chip in enumerate(dict.fromkeys(offer.plan.target.name for offer in offers)):
        keys = [key for key, offer in keyed.items() if offer.plan.target.name == chip]
        tips = [f"{keyed[key].plan.target}: {keyed[key].plan.name}\n{reasons[key]}" for key in keys]
        series.append(
            Series(chip, [keyed[key].days for key in keys], [values[key] for key in keys], series_colour(number),
                   "points", _MARKERS[number % len(_MARKERS)], keys=keys, tips=tips)  # type: ignore[arg-type]
        )  # fmt: skip
    return Chart(
        Axis("days of training", "days", toggle=True), Axis(label, unit, toggle=True), series, link="plans",  # type: ignore[arg-type]
        title=f"Days and {label} of each offer", height=640, note="Left is sooner, low is cheaper.",
    )  # fmt: skip


def _table(keyed: Mapping[str, Offer]) -> Table:
    columns = [
        Column("target"), Column("plan"), Column("step", "seconds"), Column("MFU", "fraction"),
        Column("tokens/s", "count"), Column("days", "days", bar=True), Column("cost", "dollars", bar=True),
        Column("bound by", choices=True),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for o in keyed.values():
        e = o.plan.estimate
        rows.append(
            [str(o.plan.target), o.plan.name, e.seconds, e.mfu, e.tokens_per_second, o.days, o.dollars,
             e.bound_by]
        )  # fmt: skip
    return Table(columns, rows, list(keyed), link="plans", searchable=True, title="Every offer", shown=30)

"""Report of several targets or batches: days against cost of a training, and the arithmetic of each."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_bytes, format_count
from meshwright.planner.offers import Offer
from meshwright.views.blocks import (
    Axis,
    Block,
    Chart,
    Column,
    Figure,
    Figures,
    Grid,
    Series,
    Table,
    Text,
    format_amount,
)
from meshwright.views.colours import series_colour
from meshwright.views.plan_page import MARKERS, Row, arithmetic, assumptions, plan_inspector
from meshwright.views.report import Report, Section


def offer_page(
    offers: Sequence[Offer],
    refused: Mapping[str, MeshwrightError] = MappingProxyType({}),
    beyond: Sequence[Offer] = (),
    *,
    notes: Sequence[str] = (),
    shown: int = 30,
) -> Report:
    """Returns the report of ranked offers, the best first.

    refused: targets and batches that no plan fits, and why.  beyond: offers that do not keep the deadline or budget.
    notes: lines of the first section.  shown: offers on a terminal.
    """
    best, tokens = offers[0], format_count(offers[0].tokens)
    rows = [Row(f"o{i}", offer.plan, arithmetic(offer), i + 1) for i, offer in enumerate(offers)]
    figures = [
        Figure("first", str(best.plan.target), best.plan.name),
        Figure("days", format_amount(best.days), f"{best.goodput.fraction:.1%} goodput"),
        Figure(
            "cost",
            "-" if best.dollars is None else f"${format_amount(best.dollars)}",
            "no list price" if best.price is None else str(best.price),
        ),
    ]
    calculated = [f"{row.rank}  {row.reason}" for row in rows[:shown]]
    grid: list[Block] = [_scatter(offers, rows), plan_inspector(rows, "o0")]
    sections = [
        Section("At a glance", [Figures(figures), *([Text(notes)] if notes else [])]),
        Section(
            "Days and cost",
            [Grid(grid, wide=True, where="page"), offers_table(offers, rows, shown)],
            f"Training on {tokens} tokens.",
            "Click two to compare them.",
        ),
        Section("Arithmetic", [Text(calculated), Text(assumptions(offers[:shown]))]),
        *_left_out(refused, beyond),
    ]
    lead = (
        f"{len(offers)} plans for {tokens} tokens; first {best.plan.target}: {format_amount(best.days)} days, "
        f"{format_bytes(best.plan.estimate.bytes)} per device"
    )
    if refused or beyond:
        lead += f"; {len(refused) + len(beyond)} left out"
    title = f"{best.plan.run.name} on {len({str(offer.plan.target) for offer in offers})} targets"
    footer = "Every figure is predicted by arithmetic from list prices. This file loads nothing."
    return Report(title, sections, topic="plan", lead=lead, footer=footer)


def offers_table(offers: Sequence[Offer], rows: Sequence[Row] = (), printed: int = 30) -> Table:
    """Returns the table of ranked offers. rows: with their keys on a page."""
    columns = [
        Column("", "integer", lambda item: item[0], where="terminal"),
        Column("target", cell=lambda item: str(item[1].plan.target)),
        Column("plan", cell=lambda item: item[1].plan.name),
        Column("step", "seconds", lambda item: item[1].plan.estimate.seconds),
        Column("MFU", "fraction", lambda item: item[1].plan.estimate.mfu),
        Column("tokens/s", "count", lambda item: item[1].plan.estimate.tokens_per_second),
        Column("days", "days", lambda item: item[1].days, bar=True),
        Column("cost", "dollars", lambda item: item[1].dollars, bar=True),
        Column("bound by", cell=lambda item: item[1].plan.estimate.bound_by, choices=True),
    ]
    keys = [row.key for row in rows]
    return Table.of(
        enumerate(offers, 1),
        columns,
        keys=keys,
        link="plans",
        searchable=True,
        title="Every offer",
        shown=30,
        printed=printed,
    )


def _left_out(refused: Mapping[str, MeshwrightError], beyond: Sequence[Offer]) -> list[Section]:
    """Returns the section of the targets without an offer here, and why; none where all have one."""
    rows = [[name, "nothing fits", error.truth, error.fix] for name, error in refused.items()]
    for offer in beyond:
        cost = "no list price" if offer.dollars is None else f"${format_amount(offer.dollars)}"
        reason = f"{format_amount(offer.days)} days, {cost}: {offer.plan.name} is its fastest plan"
        rows.append([str(offer.plan.target), "beyond the limits", reason, "a later deadline, or more to spend"])
    columns = [
        Column("target", wide=True),
        Column("left out", choices=True),
        Column("reason", wide=True),
        Column("what would mend it", wide=True),
    ]
    table = Table(columns, rows, title="Targets without an offer")
    return [Section("Left out", [table], "Targets that were asked for and have no offer above.")] if rows else []


def _scatter(offers: Sequence[Offer], rows: Sequence[Row]) -> Chart:
    """Days against dollars, or against chip-hours where a price is missing."""
    dollars = [offer.dollars for offer in offers if offer.dollars is not None]
    priced = len(dollars) == len(offers)
    axis = Axis("cost", "dollars", toggle=True) if priced else Axis("chip-hours", "count", toggle=True)
    costs = dollars if priced else [offer.chip_hours for offer in offers]
    points = list(zip(offers, rows, costs, strict=True))
    series = []
    for number, chip in enumerate(dict.fromkeys(offer.plan.target.name for offer in offers)):
        group = [point for point in points if point[0].plan.target.name == chip]
        series.append(
            Series(
                chip,
                [offer.days for offer, _, _ in group],
                [cost for _, _, cost in group],
                series_colour(number),
                "points",
                MARKERS[number % len(MARKERS)],
                keys=[row.key for _, row, _ in group],
                tips=[f"{row.plan.target}: {row.plan.name}\n{row.reason}" for _, row, _ in group],
            )
        )
    return Chart(
        Axis("days of training", "days", toggle=True),
        axis,
        series,
        link="plans",
        title=f"Days and {axis.label} of each offer",
        height=640,
        note="Left is sooner, low is cheaper.",
    )

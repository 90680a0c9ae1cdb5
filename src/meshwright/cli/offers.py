"""Offers in the verb `plan`: several targets, numbers of chips and batches, deadlines, budgets."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from meshwright.api.renting import find_offers, parse_budget, read_market
from meshwright.cli.output import write_json
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.formatting import format_count, parse_count
from meshwright.planner.divisibility import batch_note
from meshwright.planner.goodput import CHIP_HOURS_PER_FAILURE, RESTART_MINUTES, Reliability
from meshwright.planner.offers import Aim, Market, Offer, choose, rank
from meshwright.planner.plan_file import prediction_json
from meshwright.planner.prices import PriceTerms
from meshwright.runs.run import Run
from meshwright.views.offer_tables import print_offers, print_refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferOptions:
    """Options of a renter."""

    days: float | None = None
    """Latest end of the training, in days: the cheapest plans that keep it."""
    budget: str | None = None
    """Most to be spent, in dollars (500k): the fastest plans that keep it."""
    rank_by: Aim = "time"
    """Order of several targets."""
    terms: PriceTerms = "on-demand"
    """Terms of the prices."""
    prices: Path | None = None
    """Prices in place of the package's: CSV of chip, provider, region, terms, usd_per_chip_hour, source, read_on."""
    failure_chip_hours: float = CHIP_HOURS_PER_FAILURE
    """Chip-hours between two failures; by default those of Llama 3 405B on H100."""
    restart_minutes: float = RESTART_MINUTES
    """Minutes from a failure to the first step after it."""
    save_seconds: float | None = None
    """Seconds that a checkpoint stops the steps; by default the copy of a device's state to its host."""

    def market(self) -> Market:
        """Reads the table of prices."""
        reliability = Reliability(self.failure_chip_hours, self.restart_minutes, self.save_seconds)
        return read_market(self.prices, self.terms, reliability)

    def spending(self) -> float | None:
        """Parses the budget in dollars. Raises ConfigError for limits with another order."""
        if self.rank_by != "time" and (self.days is not None or self.budget is not None):
            raise ConfigError(
                f"--rank-by {self.rank_by} with --days or --budget",
                "with a deadline the cheapest comes first, else the fastest", "leave --rank-by out, or the limits",
            )  # fmt: skip
        return None if self.budget is None else parse_budget(self.budget)


@dataclasses.dataclass(frozen=True)
class RankedOffers:
    """Offers of a question, and what it left out."""

    offers: list[Offer]
    """The best first."""
    beyond: Sequence[Offer] = ()
    """Offers that do not keep the deadline or the budget."""
    refused: Mapping[str, MeshwrightError] = dataclasses.field(default_factory=dict)
    """Targets and batches that no plan fits, and why."""


def plan_offers(
    options: OfferOptions,
    run: Run,
    on: str,
    *,
    tokens: str,
    tokens_per_step: str | None,
    shown: int,
    console: Console,
    as_json: bool,
) -> RankedOffers:
    """Prints the offers of several targets or batches, or those that keep a deadline or a budget; returns them.

    Raises ConfigError where nothing fits, or nothing keeps them.
    """
    began = time.perf_counter()
    budget = options.spending()
    found, refused = find_offers(run, on, tokens=tokens, tokens_per_step=tokens_per_step, market=options.market())
    if not found:
        raise next(iter(refused.values()))
    limited = options.days is not None or budget is not None
    offers = choose(found, options.days, budget) if limited else rank(found, options.rank_by)
    ranked = RankedOffers(offers, [offer for offer in found if offer not in offers], refused)
    if as_json:
        write_json({"offers": [offer_json(offer) for offer in offers], "refused": _reasons(refused)})
        return ranked
    limits = [f"within {options.days:g} days"] if options.days is not None else []
    limits += [f"for at most ${budget:,.0f}"] if budget is not None else []
    order = ("cheapest" if options.days is not None else "fastest") if limited else f"least {options.rank_by}"
    total = format_count(parse_count(tokens, "--tokens"))
    heading = (
        f"[bold]{run.name}[/], {total} tokens{' ' if limits else ''}{' and '.join(limits)}: {len(found)} plans in "
        f"{time.perf_counter() - began:.1f} s, {len(offers)} of them kept, {order} first"
    )
    print_offers(console, offers, heading=heading, shown=shown)
    print_refused(console, refused)
    for note in dict.fromkeys(batch_note(offer.plan.run, offer.plan.target) for offer in offers[:shown]):
        if note is not None:
            console.print(f"note: {note}", markup=False, highlight=False)
    return ranked


def offer_json(offer: Offer) -> dict[str, Any]:
    """Returns an offer as JSON values, with everything that its figures follow from."""
    good = offer.goodput
    return {
        "target": str(offer.plan.target), "chips": offer.plan.target.chips, "name": offer.plan.name,
        "mesh": str(offer.plan.mesh), "tokens": offer.tokens,
        "tokens_per_step": offer.plan.estimate.tokens, "step_days": offer.step_days, "days": offer.days,
        "chip_hours": offer.chip_hours, "dollars": offer.dollars,
        "price": None if offer.price is None else dataclasses.asdict(offer.price),
        "goodput": {**dataclasses.asdict(good), "fraction": good.fraction},
        "error_band": {"low": offer.band.low, "high": offer.band.high, **dataclasses.asdict(offer.band)},
        "predicted": prediction_json(offer.plan),
    }  # fmt: skip


def _reasons(refused: dict[str, MeshwrightError]) -> dict[str, str]:
    return {name: str(error) for name, error in refused.items()}

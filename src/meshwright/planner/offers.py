"""Offers: the best plan of a target with the days and dollars of a whole training, ranked and chosen.

days = tokens / (tokens per second) / goodput / 86400; dollars = days 24 chips price.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.planner.error_bands import ErrorRange, band_of
from meshwright.planner.goodput import Goodput, Reliability, goodput
from meshwright.planner.prices import Price, PriceTerms, cheapest
from meshwright.planner.search import Plan

Aim = Literal["time", "cost"]
_DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Market:
    """Prices and reliability that offers are made with."""

    prices: Sequence[Price]
    terms: PriceTerms = "on-demand"
    reliability: Reliability = dataclasses.field(default_factory=Reliability)


@dataclasses.dataclass(frozen=True)
class Offer:
    """A plan with what the whole training takes.

    Example:
        >>> offers = mw.offers("llama3-8b", on="v5p:4x4x4,h100:64", tokens="1T", tokens_per_step="1M")
        >>> offers[0].days < offers[1].days, offers[0].dollars > 0
        (True, True)
    """

    plan: Plan
    tokens: int
    """Tokens of the whole training."""
    goodput: Goodput
    price: Price | None
    """Cheapest list price of the chip; None where the table has none."""
    band: ErrorRange
    """Error of predictions of this kind."""

    @property
    def step_days(self) -> float:
        """Days of steps alone."""
        return self.tokens / self.plan.estimate.tokens_per_second / _DAY

    @property
    def days(self) -> float:
        """Days of the training, with failures, checkpoints and restarts."""
        return self.step_days / self.goodput.fraction

    @property
    def chip_hours(self) -> float:
        """Hours of all chips together."""
        return self.days * 24 * self.plan.target.chips

    @property
    def dollars(self) -> float | None:
        """Cost of the training; None without a price."""
        return None if self.price is None else self.chip_hours * self.price.dollars


def make_offer(plan: Plan, tokens: int, market: Market) -> Offer:
    """Returns the offer of one plan."""
    chip = plan.target.name
    return Offer(
        plan,
        tokens,
        goodput(plan.placed, plan.target, market.reliability),
        cheapest(market.prices, chip, market.terms),
        band_of(plan.placed, plan.target),
    )


AIMS: dict[Aim, Callable[[Offer], float | None]] = {
    "time": lambda offer: offer.days,
    "cost": lambda offer: offer.dollars,
}


def rank(offers: Sequence[Offer], aim: Aim) -> list[Offer]:
    """Returns the offers with the least days or dollars first; those without the number last, by days."""

    def key(offer: Offer) -> tuple[bool, float, float]:
        value = AIMS[aim](offer)
        return value is None, value or 0.0, offer.days

    return sorted(offers, key=key)


def choose(offers: Sequence[Offer], days: float | None, dollars: float | None) -> list[Offer]:
    """Returns the offers that keep a deadline and a budget: under a deadline the cheapest first, else the fastest.

    Raises ConfigError with the nearest offers where there is none.
    """
    kept = [offer for offer in offers if _keeps(offer, days, dollars)]
    if not kept:
        raise _impossible(offers, days, dollars)
    return rank(kept, "time" if days is None else "cost")


def _keeps(offer: Offer, days: float | None, dollars: float | None) -> bool:
    in_budget = dollars is None or (offer.dollars is not None and offer.dollars <= dollars)
    return in_budget and (days is None or offer.days <= days)


def _impossible(offers: Sequence[Offer], days: float | None, dollars: float | None) -> ConfigError:
    """Builds the error for limits that no offer keeps, with the nearest that is possible for each limit."""
    limits = [f"{days:g} days"] if days is not None else []
    limits += [f"${dollars:,.0f}"] if dollars is not None else []
    priced = [offer for offer in offers if offer.dollars is not None]
    if dollars is not None and not priced:
        chips = sorted({offer.plan.target.name for offer in offers})
        return ConfigError(
            f"a training within {' and '.join(limits)}",
            f"there is no price for {', '.join(chips)}",
            "--prices FILE with a row for the chip, or other --terms",
        )
    fastest = min(offers, key=lambda offer: offer.days)
    lines, fixes = [f"fastest:  {_line(fastest)}"], []
    if dollars is not None:
        lines.append(f"cheapest: {_line(min(priced, key=lambda offer: offer.dollars or 0.0))}")

    def excess(offer: Offer) -> float:
        return max(offer.days / (days or math.inf), (offer.dollars or 0.0) / (dollars or math.inf))

    nearest = min(offers if dollars is None else priced, key=excess)
    tokens = offers[0].tokens
    lines.append(
        f"nearest:  {_line(nearest)}, {excess(nearest):.3g} times the limit: {tokens / 1e9 / excess(nearest):,.0f} B "
        "tokens would keep it"
    )
    if days is not None:
        fixes.append(f"--days {math.ceil(max(days, nearest.days) * 10) / 10:g}")
    if dollars is not None:
        fixes.append(f"--budget {max(dollars, math.ceil((nearest.dollars or 0.0) / 1000) * 1000):.0f}")
    return ConfigError(
        f"a training of {tokens / 1e9:,.0f} B tokens within {' and '.join(limits)}",
        "none of the plans keeps it:\n    " + "\n    ".join(lines),
        " ".join(fixes) + (", more or faster chips in --on" if days is not None else "") + ", or fewer --tokens",
    )


def _line(offer: Offer) -> str:
    money = "no price" if offer.dollars is None else f"${offer.dollars:,.0f}"
    return f"{offer.plan.target}, {offer.plan.name}: {offer.days:.1f} days, {money}"

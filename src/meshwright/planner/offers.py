"""Offers: the best plan of a target with the days and dollars
of a whole training, ranked and chosen.

days = tokens / (tokens per second) / goodput / 86400; dollars = days 24 chips price.
"""

import csv
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from meshwright.errors import ConfigError, by_class, nearest, reason_of
from meshwright.formatting import Brief, format_count
from meshwright.hardware.chips import CHIPS
from meshwright.hardware.targets import Target
from meshwright.planner.memory_model import checkpoint_bytes
from meshwright.planner.search import Plan
from meshwright.ranges import PositiveFloat, Ranged
from meshwright.runs.placed_run import PlacedRun

Aim = Literal["time", "cost"]
PriceTerms = Literal["on-demand", "spot", "committed"]
TERMS: tuple[PriceTerms, ...] = get_args(PriceTerms)
PRICES_FILE = Path(__file__).with_name("data") / "prices.csv"
_COLUMNS = ("chip", "provider", "region", "terms", "usd_per_chip_hour", "source", "read_on")


@dataclasses.dataclass(frozen=True)
class Price:
    """List price of a chip."""

    chip: str
    """Name of the chip, as `--on` takes it."""
    provider: str
    region: str
    terms: PriceTerms
    dollars: float
    """Dollars per chip-hour."""
    source: str
    read_on: str
    """Date at which the source was read."""

    def __str__(self) -> str:
        return f"${self.dollars:g} per chip-hour ({self.provider}, {self.region}, {self.terms})"


def read_prices(file: Path | None = None) -> tuple[Price, ...]:
    """Reads a table of list prices, by default the package's own.
    A chip without a row has no price.

    Columns: chip, provider, region, terms (one of `TERMS`), usd_per_chip_hour, source, read_on.
    Raises ConfigError with the line that is wrong.
    """
    file = file or PRICES_FILE
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            columns = reader.fieldnames or ()
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise by_class(
            error,
            ConfigError(f"table {file}", f"it cannot be read: {reason_of(error)}", "a CSV file"),
        ) from error
    lacking = [name for name in _COLUMNS if name not in columns]
    if lacking:
        raise ConfigError(
            f"table {file}",
            f"it has no column {lacking[0]!r}",
            f"its first line: {','.join(_COLUMNS)}",
        )
    prices = []
    for line, row in rows:
        where = f"{file}, line {line}"
        empty = next((name for name in _COLUMNS if not (row[name] or "").strip()), None)
        if empty:
            raise ConfigError(where, f"{empty} is empty", f"give all of {', '.join(_COLUMNS)}")
        terms = next((terms for terms in TERMS if terms == row["terms"]), None)
        if terms is None:
            raise ConfigError(
                where, f"there are no terms {row['terms']!r}", nearest(row["terms"], TERMS)
            )
        try:
            dollars = float(row["usd_per_chip_hour"])
        except ValueError:
            dollars = math.nan
        if not 0 < dollars < math.inf:
            raise ConfigError(
                where, f"usd_per_chip_hour is {row['usd_per_chip_hour']!r}", "a positive number"
            )
        chip = row["chip"].strip()
        if chip.lower() in CHIPS:  # as in --on
            chip = chip.lower()
        prices.append(
            Price(
                chip,
                row["provider"],
                row["region"],
                terms,
                dollars,
                row["source"],
                row["read_on"],
            )
        )
    return tuple(prices)


def cheapest(prices: Iterable[Price], chip: str, terms: PriceTerms) -> Price | None:
    """Returns the lowest price of a chip on these terms, of all providers and regions;
    None without one."""
    found = (price for price in prices if (price.chip, price.terms) == (chip, terms))
    return min(found, key=lambda price: price.dollars, default=None)


def require_price(asked: str, chips: Iterable[str], market: "Market") -> None:
    """Raises ConfigError where none of the chips has a price on the terms of the market.

    asked: what needs prices, `--budget 50k`.  chips: names as in `Target.name`.
    """
    names = list(dict.fromkeys(chips))
    if any(cheapest(market.prices, name, market.terms) is not None for name in names):
        return
    listed = ", ".join(dict.fromkeys(price.chip for price in market.prices))
    fix = f"--prices FILE with a row of the chip {names[0]}"
    others = [price.terms for price in market.prices if price.chip in names]
    if others:
        fix = f"--terms {others[0]}, or {fix}"
    raise ConfigError(
        asked,
        f"there is no {market.terms} price of {', '.join(names)}; the table has prices of {listed}",
        fix,
    )


CHIP_HOURS_PER_FAILURE = float(round(54 * 24 * 16384 / 419))
"""Chip-hours between failures: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3
405B, arXiv:2407.21783, section 3.3.4 and table 5). Other chips and clouds have their own rate."""
RESTART_MINUTES = 10.0
"""Minutes from a failure to the first step after it: failures are found and diagnosed in less than
10 minutes (MegaScale, arXiv:2402.15627)."""
_MOST_FAILURES = 100
"""Failures during a restart and a period of steps beyond which hardly any of them ends."""
STORAGE_BANDWIDTH = 2e12
"""Bytes/s that shared storage sustains (Llama 3 405B, arXiv:2407.21783, section 3.3.1)."""


@dataclasses.dataclass(frozen=True)
class Reliability(Ranged):
    """How often chips fail, and what a failure and a checkpoint cost."""

    chip_hours_per_failure: PositiveFloat = CHIP_HOURS_PER_FAILURE
    restart_minutes: PositiveFloat = RESTART_MINUTES
    save_seconds: PositiveFloat | None = None
    """Seconds that a checkpoint stops the steps;
    None computes them: the device's copy to its host."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Expected fraction of a training's time that makes steps, and its parts."""

    failure_seconds: float
    """Mean seconds between two failures of the whole job."""
    save_seconds: float
    """Seconds that a checkpoint stops the steps."""
    write_seconds: float
    """Seconds until a checkpoint is in storage, during further steps: no period is shorter."""
    restart_seconds: float
    period: float
    """Seconds of steps between two checkpoints."""

    @property
    def fraction(self) -> float:
        """Steps' seconds over all seconds: Daly's complete model, exact for random failures."""
        rate = 1 / self.failure_seconds
        grown = math.exp(self.restart_seconds * rate) * math.expm1(
            (self.period + self.save_seconds) * rate
        )
        return self.period * rate / grown


def daly_period(save_seconds: float, failure_seconds: float) -> float:
    """Returns the seconds of steps between checkpoints that waste least time.

    Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps,
    Future Generation Computer Systems 22, equation 37. The first factor is Young's optimum, sqrt(2
    save failure).
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    small = save_seconds / (2 * failure_seconds)
    young = math.sqrt(2 * save_seconds * failure_seconds)
    return young * (1 + math.sqrt(small) / 3 + small / 9) - save_seconds


def goodput(placed: PlacedRun, target: Target, reliability: Reliability) -> Goodput:
    """Returns the goodput of a placed run with the best period between checkpoints.

    Failures come at random with a constant rate per chip; each loses the steps since the last
    checkpoint, and a restart. A checkpoint stops the steps while devices copy their state to their
    hosts, which write it during further steps.
    """
    total, copied = checkpoint_bytes(placed)
    chip, save = target.chip, reliability.save_seconds
    save = copied / chip.host_bandwidth if save is None else save
    write = max(copied / chip.network_bandwidth, total / STORAGE_BANDWIDTH)
    failure = reliability.chip_hours_per_failure * 3600 / target.chips
    period, restart = max(daly_period(save, failure), write), 60 * reliability.restart_minutes
    if restart + period + save > _MOST_FAILURES * failure:
        raise ConfigError(
            f"a failure every {reliability.chip_hours_per_failure:g} chip-hours on {target}",
            f"that is one every {failure:.3g} s, and a restart takes {restart:.3g} s and the steps "
            f"up to the next checkpoint {period + save:.3g} s: no training ends",
            f"--failure-chip-hours {CHIP_HOURS_PER_FAILURE:g} --restart-minutes "
            f"{RESTART_MINUTES:g}, no --save-seconds",
        )
    return Goodput(failure, save, write, restart, period)


ERRORS_FILE = Path(__file__).with_name("data") / "errors.json"
"""Quantiles of published over predicted step time, by kind of plan, of programs that no constant
was fitted to. `python bench/foresight/errors.py` writes it."""
UNSEEN = "a chip with few published runs or none"
EVERY = "all published runs"
FEWEST = 6
"""Runs that a kind needs for a band."""


@dataclasses.dataclass(frozen=True)
class ErrorBand:
    """Published over predicted step time of the runs of one kind."""

    kind: str
    runs: int
    """Published runs, each predicted with constants that were fitted on the runs
    of other programs."""
    low: float
    """10th percentile."""
    median: float
    high: float
    """90th percentile."""


@dataclasses.dataclass(frozen=True)
class ErrorRange:
    """Lowest and highest end of the bands of all kinds that a plan belongs to."""

    lowest: ErrorBand
    """Kind with the lowest 10th percentile."""
    highest: ErrorBand
    """Kind with the highest 90th percentile."""

    @property
    def low(self) -> float:
        """Published over predicted time that 9 of 10 runs of its kind exceed."""
        return self.lowest.low

    @property
    def high(self) -> float:
        """Published over predicted time that 9 of 10 runs of its kind stay below."""
        return self.highest.high

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{band.kind}: {band.runs}" for band in (self.lowest, self.highest))
        return (
            f"{self.low:.2f} to {self.high:.2f} of it, as 8 of 10 published runs of programs that "
            f"no constant was fitted to ({', '.join(ends)})"
        )


def kinds_of(placed: PlacedRun, target: Target) -> list[str]:
    """Returns the kinds of a plan: chip, precision, and what it splits besides the batch."""
    degrees, precise = (
        placed.layout.shape.degrees(),
        placed.run.training.matmul_precision == "compute",
    )
    family = CHIPS[target.name].family if target.name in CHIPS else ""
    kinds = [EVERY, family or UNSEEN, "bfloat16" if precise else "below bfloat16"]
    kinds += [f"{axis} axis" for axis in ("stage", "context", "tensor") if degrees[axis] > 1]
    return (
        [*kinds, "experts"]
        if any(layer.experts is not None for layer in placed.layout.spec.layers)
        else kinds
    )


@functools.cache
def read_bands() -> dict[str, ErrorBand]:
    """Reads the measured bands by kind."""
    kinds = json.loads(ERRORS_FILE.read_text(encoding="utf-8"))["kinds"]
    return {kind: ErrorBand(kind, **quantiles) for kind, quantiles in kinds.items()}


def band_of(placed: PlacedRun, target: Target) -> ErrorRange | None:
    """Returns the ends of the bands of all kinds that a plan belongs to;
    kinds with too few runs have none.

    A chip with too few runs has the band of a chip without any. An announced chip has no range: its
    figures are assumed in part, and no run tells by how much they are wrong.
    """
    if target.chip.announced:
        return None
    bands, (every, family, *others) = read_bands(), kinds_of(placed, target)
    kinds = [every, family if family in bands else UNSEEN, *others]
    known = [bands[kind] for kind in kinds if kind in bands]
    return ErrorRange(min(known, key=lambda band: band.low), max(known, key=lambda band: band.high))


@dataclasses.dataclass(frozen=True)
class Market:
    """Prices and reliability that offers are made with."""

    prices: Sequence[Price]
    terms: PriceTerms = "on-demand"
    reliability: Reliability = dataclasses.field(default_factory=Reliability)


@dataclasses.dataclass(frozen=True, repr=False)
class Offer(Brief):
    """A plan with what the whole training takes.

    Example:
        >>> machines = "v5p:4x4x4,h100:64"
        >>> offers = mw.offers("llama3-8b", on=machines, tokens="1T", tokens_per_step="1M")
        >>> offers[0].days < offers[1].days, offers[0].dollars > 0
        (True, True)
    """

    plan: Plan
    tokens: int
    """Tokens of the whole training."""
    goodput: Goodput
    price: Price | None
    """Cheapest list price of the chip; None where the table has none."""
    band: ErrorRange | None
    """Error of predictions of this kind; None for an announced chip."""

    def brief(self) -> str:
        """Returns the plan, the days and the dollars."""
        cost = "no list price" if self.dollars is None else f"${self.dollars:,.0f}"
        return (
            f"of {format_count(self.tokens)} tokens: {self.days:.3g} days, {cost}; "
            f"{self.plan.brief()}"
        )

    @property
    def step_days(self) -> float:
        """Days of steps, without failures and checkpoints."""
        return self.tokens / self.plan.estimate.tokens_per_second / 86400.0

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
    placed, target = plan.placed, plan.target
    price = cheapest(market.prices, target.name, market.terms)
    return Offer(
        plan, tokens, goodput(placed, target, market.reliability), price, band_of(placed, target)
    )


def rank(offers: Sequence[Offer], aim: Aim) -> list[Offer]:
    """Returns the offers with the least days or dollars first;
    those without the number last, by days."""

    def key(offer: Offer) -> tuple[bool, float, float]:
        value = offer.days if aim == "time" else offer.dollars
        return value is None, value or 0.0, offer.days

    return sorted(offers, key=key)


def choose(offers: Sequence[Offer], days: float | None, dollars: float | None) -> list[Offer]:
    """Returns the offers that keep a deadline and a budget: under a deadline the cheapest
    first, else the fastest.

    Raises ConfigError with the nearest offers where there is none.
    """
    in_budget = [
        o for o in offers if dollars is None or (o.dollars is not None and o.dollars <= dollars)
    ]
    kept = [o for o in in_budget if days is None or o.days <= days]
    if not kept:
        raise _impossible(offers, days, dollars)
    return rank(kept, "time" if days is None else "cost")


def _impossible(offers: Sequence[Offer], days: float | None, dollars: float | None) -> ConfigError:
    """Returns the error where no plan keeps the limits, with the plans that come nearest."""
    limits = [f"{days:g} days"] if days is not None else []
    limits += [f"${dollars:,.0f}"] if dollars is not None else []
    within = " and ".join(limits)
    priced = [offer for offer in offers if offer.dollars is not None]
    if dollars is not None and not priced:
        chips = sorted({offer.plan.target.name for offer in offers})
        return ConfigError(
            f"a training within {within}",
            f"there is no price for {', '.join(chips)}",
            f"--prices FILE with a row of the chip {chips[0]}",
        )

    fastest = min(offers, key=lambda offer: offer.days)
    lines = [f"fastest:  {_line(fastest)}"]
    if dollars is not None:
        cheapest = min(priced, key=lambda offer: offer.dollars or 0.0)
        lines.append(f"cheapest: {_line(cheapest)}")
    possible = offers if dollars is None else priced
    close = min(possible, key=lambda offer: _excess(offer, days, dollars))
    excess = _excess(close, days, dollars)
    fewer = close.tokens / 1e9 / excess
    lines.append(
        f"nearest:  {_line(close)}, {excess:.3g} times the limit: {fewer:,.0f} B tokens "
        "would keep it"
    )
    fixes = []
    if days is not None:
        fixes.append(f"--days {math.ceil(max(days, close.days) * 10) / 10:g}")
    if dollars is not None:
        needed = math.ceil((close.dollars or 0.0) / 1000) * 1000
        fixes.append(f"--budget {max(dollars, needed):.0f}")
    more_chips = ", more or faster chips in --on" if days is not None else ""
    return ConfigError(
        f"a training of {close.tokens / 1e9:,.0f} B tokens within {within}",
        "none of the plans keeps it:\n    " + "\n    ".join(lines),
        f"{' '.join(fixes)}{more_chips}, or fewer --tokens",
    )


def _excess(offer: Offer, days: float | None, dollars: float | None) -> float:
    """Returns how many times the days or dollars of a plan are those of the limits."""
    excess_days = offer.days / (days or math.inf)
    excess_dollars = (offer.dollars or 0.0) / (dollars or math.inf)
    return max(excess_days, excess_dollars)


def _line(offer: Offer) -> str:
    money = "no price" if offer.dollars is None else f"${offer.dollars:,.0f}"
    return f"{offer.plan.target}, {offer.plan.name}: {offer.days:.1f} days, {money}"

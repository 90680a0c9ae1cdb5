"""Renting from Python: targets, numbers of chips and batches ranked by days and dollars of a whole training."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.api.planning import find_target, with_vocab
from meshwright.api.ranked import Offers
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.formatting import parse_count
from meshwright.hardware.target_lists import expand_targets
from meshwright.planner.explain import nothing_fits
from meshwright.planner.goodput import Reliability
from meshwright.planner.offers import Aim, Market, Offer, choose, make_offer, rank
from meshwright.planner.prices import PriceTerms, read_prices
from meshwright.planner.search import search, with_tokens_per_step
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run


def read_market(
    prices: Path | None = None,
    terms: PriceTerms = "on-demand",
    reliability: Reliability | None = None,
) -> Market:
    """Reads the prices that offers are made with; those of the package where no file is given."""
    return Market(read_prices(prices), terms, reliability or Reliability())


def offers(
    run: Run | str,
    on: str | Sequence[str],
    *,
    tokens: str | int = "1T",
    tokens_per_step: str | int | None = None,
    days: float | None = None,
    budget: float | None = None,
    rank_by: Aim = "time",
    market: Market | None = None,
) -> Offers:
    """Returns the best plan of each target and batch with the days and dollars of a training, the best first.

    run: a Run, or a recipe's name.  on: targets, numbers of chips or ranges: `v5p:4x4x8,h100:64`, `h100:64..1024`.
    tokens: of the whole training.  tokens_per_step: global batch, several (`1M,2M`) or a range (`1M..4M`).
    days, budget: latest end and most dollars: what keeps both is returned, the cheapest first under a deadline, else
    the fastest.  rank_by: without them, what comes first: `time` or `cost`.
    market: prices and reliability (`meshwright.api.renting.read_market`).
    Raises ConfigError where nothing fits, or where nothing keeps the limits, with the nearest that is possible.

    Example:
        >>> found = mw.offers("llama32-1b", on="h100:8,v5p:2x2x2", tokens="100B", rank_by="cost")
        >>> [str(offer.plan.target) for offer in found]
        ['h100:1x8', 'v5p:2x2x2']
    """
    found, refused = find_offers(run, on, tokens=tokens, tokens_per_step=tokens_per_step, market=market)
    if not found:
        raise next(iter(refused.values()))
    return Offers(rank(found, rank_by) if days is None and budget is None else choose(found, days, budget))


def find_offers(
    run: Run | str,
    on: str | Sequence[str],
    *,
    tokens: str | int,
    tokens_per_step: str | int | None = None,
    market: Market | None = None,
) -> tuple[list[Offer], dict[str, MeshwrightError]]:
    """Returns the offer of each target and batch, and the error of each that has none."""
    market = market or read_market()
    base = with_vocab(find_recipe(run) if isinstance(run, str) else run)
    targets = [name for text in ((on,) if isinstance(on, str) else on) for name in expand_targets(text)]
    found: list[Offer] = []
    refused: dict[str, MeshwrightError] = {}
    total = parse_count(str(tokens), "--tokens")
    for name in targets:
        for sized in with_batches(base, tokens_per_step):
            try:
                target = find_target(name)
                result = search(sized, target)
                if not result.plans:
                    raise nothing_fits(sized, result)
            except MeshwrightError as error:
                refused[f"{name} with {sized.training.batch} x {sized.training.seq} tokens per step"] = error
                continue
            found.append(make_offer(result.plans[0], total, market))
    return found, refused


def with_batches(run: Run, tokens_per_step: str | int | None) -> list[Run]:
    """Returns the run with each batch that is asked for: one number of tokens, several, or powers of two of a range."""
    if tokens_per_step is None:
        return [run]
    numbers: dict[int, None] = {}
    for part in str(tokens_per_step).split(","):
        low, between, high = part.partition("..")
        first = parse_count(low, "--tokens-per-step")
        last = parse_count(high, "--tokens-per-step") if between else first
        if last < first:
            raise ConfigError(
                f"--tokens-per-step {part}", f"{first} to {last} holds nothing", "--tokens-per-step 1M..4M"
            )
        numbers |= dict.fromkeys(first * 2**n for n in range(int(math.log2(last / first)) + 1))
    return list(dict.fromkeys(with_tokens_per_step(run, number) for number in numbers))


def parse_budget(text: str) -> float:
    """Parses dollars: `500k` or `$2.5M`. Raises ConfigError on anything else."""
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"--budget {text}", "a budget is a sum of dollars", "--budget 500k")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]

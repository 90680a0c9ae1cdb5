"""Renting from Python: targets, numbers of chips and batches ranked by days, dollars and energy of a whole training."""

import dataclasses
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
from meshwright.planner.offers import Aim, Market, Offer, Recommendation, choose, make_offer, rank
from meshwright.planner.prices import PUE, PriceTerms, read_power, read_prices
from meshwright.planner.scaling_law import SCALING_LAWS, ScalingLaw
from meshwright.planner.search import search, with_tokens_per_step
from meshwright.runs.recipe import find_recipe, list_recipes
from meshwright.runs.run import Run
from meshwright.sharding.params import count_params

_ROUNDS = 6
"""Recipes tried at most on the way to the one that a sum of money pays for."""


def read_market(
    prices: Path | None = None,
    power: Path | None = None,
    terms: PriceTerms = "on-demand",
    pue: float = PUE,
    reliability: Reliability | None = None,
) -> Market:
    """Reads the tables that offers are made with; those of the package where no file is given."""
    return Market(read_prices(prices), read_power(power), terms, pue, reliability or Reliability())


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
    """Returns the best plan of each target and batch with the days, dollars and energy of a training, the best first.

    run: a Run, or a recipe's name.  on: targets, numbers of chips or ranges: `v5p:4x4x8,h100:64`, `h100:64..1024`.
    tokens: of the whole training.  tokens_per_step: global batch, several (`1M,2M`) or a range (`1M..4M`).
    days, budget: latest end and most dollars: what keeps both is returned, the cheapest first under a deadline, else
    the fastest.  rank_by: without them, what comes first: `time`, `cost` or `energy`.
    market: prices, power and reliability (`meshwright.api.renting.read_market`).
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


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limit of what may be spent: dollars, or FLOPs."""

    dollars: float | None = None
    flops: float | None = None


def parse_budget(text: str) -> Budget:
    """Parses `500k`, `$2.5M` (dollars) or `1e24 FLOPs`. Raises ConfigError on anything else."""
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*(flops?)?", text.strip().lower())
    if not match or float(match[1]) <= 0 or ("$" in text and match[3]):
        raise ConfigError(f"--budget {text}", "a budget is a sum of dollars or of FLOPs", "--budget 500k, or 1e24flops")
    amount = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]
    return Budget(flops=amount) if match[3] else Budget(dollars=amount)


def compute_optimal(
    budget: Budget,
    on: str,
    *,
    law: str = "besiroglu2024",
    tokens_per_step: str | None = None,
    market: Market | None = None,
) -> Recommendation:
    """Returns the model size and tokens that a scaling law makes best for a budget, and the nearest recipe's training.

    A sum of money is worth the FLOPs that the recipe's own plan makes with it, so the recipe is found in rounds: its
    plan gives FLOPs, those another optimum, and that perhaps another recipe, until it stays.
    """
    market = market or read_market()
    fitted, sizes = SCALING_LAWS[law], dense_recipes()
    flops, tried = budget.flops, dict[str, Recommendation]()
    recipe = min(sizes, key=lambda name: abs(sizes[name] - 1e9)) if flops is None else _nearest(sizes, fitted, flops)
    for _ in range(_ROUNDS):
        found, refused = find_offers(recipe, on, tokens="1T", tokens_per_step=tokens_per_step, market=market)
        if not found:
            raise next(iter(refused.values()))
        if budget.dollars is not None:
            offer = rank(found, "cost")[0]
            if offer.dollars is None:
                raise ConfigError(
                    f"a budget of ${budget.dollars:,.0f} on {offer.plan.target}", "there is no price for its chip",
                    "--prices FILE with a row for it, or --budget in FLOPs",
                )  # fmt: skip
            tokens = round(offer.tokens * budget.dollars / offer.dollars)
            flops = 6.0 * sizes[recipe] * tokens
        else:
            assert flops is not None  # a budget has one of the two
            offer, tokens = rank(found, "time")[0], round(flops / 6 / sizes[recipe])
        parameters, best_tokens = fitted.optimum(flops)
        offer = dataclasses.replace(offer, tokens=tokens)
        tried[recipe] = Recommendation(fitted, flops, parameters, best_tokens, recipe, sizes[recipe], offer)
        recipe = _nearest(sizes, fitted, flops)
        if recipe in tried:
            break
    return min(tried.values(), key=lambda one: one.recipe_loss) if budget.flops is None else next(iter(tried.values()))


def dense_recipes() -> dict[str, int]:
    """Returns the parameters of the dense language models among the recipes, by name."""
    sizes = {}
    for name in list_recipes():
        model = find_recipe(name).model
        if model.vocab is not None and not any(layer.experts for layer in model.spec().layers):
            sizes[name] = count_params(model.params())
    return sizes


def _nearest(sizes: dict[str, int], law: ScalingLaw, flops: float) -> str:
    """Name of the recipe whose number of parameters is nearest to the optimum, by their ratio."""
    parameters, _ = law.optimum(flops)
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / parameters)))

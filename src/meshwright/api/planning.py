"""Planning from Python: layouts for hardware that need not be here, and offers of it, ranked by arithmetic."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.activity import activity
from meshwright.bench.calibration_file import read_calibration
from meshwright.config import MeshShape
from meshwright.data.corpus import vocab_of_corpus
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.formatting import parse_count
from meshwright.hardware.targets import Target, expand_targets, parse_target
from meshwright.planner.explain import nothing_fits
from meshwright.planner.forecast import calibrate_target
from meshwright.planner.offers import Aim, Market, Offer, PriceTerms, Reliability, choose, make_offer, rank, read_prices
from meshwright.planner.search import Plan, SearchResult, search, with_tokens_per_step
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.storage.paths import default_cache_folder
from meshwright.views.plan_page import offer_page, offers_table, plan_page, plans_table
from meshwright.views.terminal import text_of


class Plans(list[Plan]):
    """Plans, the fastest predicted step first. They print as a table; in a notebook they show their page.

    Example:
        >>> plans = mw.plan("llama32-1b", on="v6e:2x2", tokens_per_step="128k", at_most=2)
        >>> print(str(plans).splitlines()[1])
        1  fsdp=4, projections, 2 microbatches         864 ms  37.3%     152 k  20.6 GiB  matmuls   v6e:2x2
        >>> plans._repr_html_()[:7]
        '<iframe'
    """

    def __init__(self, plans: Iterable[Plan], searches: Iterable[SearchResult] = ()):
        super().__init__(plans)
        self.searches = tuple(searches)
        """Searches that the plans come from, with all that was priced; none of a wrapped model."""

    def __repr__(self) -> str:
        return text_of(plans_table(self))

    def _repr_html_(self) -> str | None:
        """Returns the page of the best plan and of the search that it comes from; None of a wrapped model's."""
        for found in self.searches:
            if self and self[0].target == found.target:
                return plan_page(self[0], found).frame()
        return None


class Offers(list[Offer]):
    """Offers, the best first. They print as a table; in a notebook they show days against cost.

    Example:
        >>> offers = mw.offers("llama32-1b", on="v6e:2x2", tokens="10B")
        >>> len(str(offers).splitlines()), offers._repr_html_()[:7]
        (3, '<iframe')
    """

    def __init__(
        self,
        offers: Iterable[Offer],
        beyond: Sequence[Offer] = (),
        refused: Mapping[str, MeshwrightError] | None = None,
    ):
        super().__init__(offers)
        self.beyond = beyond
        """Offers that do not keep the deadline or the budget."""
        self.refused = refused or {}
        """Targets and batches that no plan fits, and why."""

    def __repr__(self) -> str:
        return text_of(offers_table(self))

    def _repr_html_(self) -> str:
        return offer_page(self).frame()


def plan(
    run: Run | str,
    on: str | Sequence[str],
    *,
    tokens_per_step: str | int | None = None,
    at_most: int = 20,
    include: Sequence[MeshShape] = (),
) -> Plans:
    """Returns the best plans of a run on hardware that need not be here, the fastest predicted step first.

    run: a Run, or a recipe's name.  on: a machine such as `v5p:8x8x16` or `h100:64`, or several.
    tokens_per_step: global batch in tokens, such as `4M`; None keeps the run's batch.
    include: meshes that are priced in any case, to be explained.
    Memory and time are predicted by arithmetic; `prove` compiles a plan.
    Raises ConfigError where no mesh of a machine has the memory.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4", tokens_per_step="1M")
        >>> best[0].mesh.size, best[0].estimate.fits
        (64, True)
    """
    base = find_recipe(run) if isinstance(run, str) else run
    targets = [find_target(name) for name in ((on,) if isinstance(on, str) else on)]
    base = with_vocab(base)
    if tokens_per_step is not None:
        refuse_wrapped(base, [f"{tokens_per_step} tokens per step"])
        base = with_tokens_per_step(base, parse_count(str(tokens_per_step), "--tokens-per-step"))
    searches = [_search(base, target, include) for target in targets]
    plans = [plan for result in searches for plan in result.plans[:at_most]]
    pages = searches if base.model.unit == "tokens" else ()
    return Plans(sorted(plans, key=lambda p: p.estimate.seconds)[:at_most], pages)


def _search(run: Run, target: Target, include: Sequence[MeshShape] = ()) -> SearchResult:
    with activity("plan", f"pricing plans for {target}", "priced plans"):
        result = search(run, target, tuple(include))
    if not result.plans:
        raise nothing_fits(run, result)
    return result


def refuse_wrapped(run: Run, asked: Sequence[str]) -> None:
    """Raises ConfigError where something is asked of a wrapped model that only the package's own families have."""
    if asked and run.model.unit != "tokens":
        raise ConfigError(f"{asked[0]} with a wrapped model", "it would not be used there", "leave it out")


def find_target(text: str) -> Target:
    """Returns the machine that `text` names, with the efficiencies that `meshwright bench` measured on such a chip."""
    target = parse_target(text)
    for file in sorted((default_cache_folder() / "calibration").glob("*.json")):
        target = calibrate_target(target, read_calibration(file))
    return target


def with_vocab(run: Run) -> Run:
    """Returns the run with a vocabulary size, which some recipes leave to their tokenizer."""
    if run.model.vocab is not None:
        return run
    data, cache = run.data, default_cache_folder()
    vocab = vocab_of_corpus(data.paths, data.tokenizer, cache, run.faults.bad_records, data.text_field)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))


def read_market(
    prices: Path | None = None, terms: PriceTerms = "on-demand", reliability: Reliability | None = None
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
    market: prices and reliability (`meshwright.api.planning.read_market`).
    Raises ConfigError where nothing fits, or where nothing keeps the limits, with the nearest that is possible.

    Example:
        >>> found = mw.offers("llama32-1b", on="h100:8,v5p:2x2x2", tokens="100B", rank_by="cost")
        >>> [str(offer.plan.target) for offer in found]
        ['h100:1x8', 'v5p:2x2x2']
    """
    market = market or read_market()
    base = with_vocab(find_recipe(run) if isinstance(run, str) else run)
    targets = [name for text in ((on,) if isinstance(on, str) else on) for name in expand_targets(text)]
    found: list[Offer] = []
    refused: dict[str, MeshwrightError] = {}
    total = parse_count(str(tokens), "--tokens")
    for name in targets:
        for sized in with_batches(base, tokens_per_step):
            try:
                found.append(make_offer(_search(sized, find_target(name)).plans[0], total, market))
            except MeshwrightError as error:
                refused[f"{name} with {sized.training.batch} x {sized.training.seq} tokens per step"] = error
    if not found:
        raise next(iter(refused.values()))
    best = rank(found, rank_by) if days is None and budget is None else choose(found, days, budget)
    return Offers(best, [offer for offer in found if offer not in best], refused)


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
    dollars = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    if not 0 < dollars < math.inf:
        truth = "it takes a finite sum of dollars above 0, with k, M, B or T behind it"
        raise ConfigError(f"--budget {text}", truth, "--budget 500k")
    return dollars

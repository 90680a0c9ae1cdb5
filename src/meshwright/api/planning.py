"""The verb `plan`: layouts and offers of hardware that need not be here, ranked by arithmetic."""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from rich.console import Console
from rich.markup import escape

from meshwright.activity import activity
from meshwright.api.measured import (
    MeasuredRun,
    read_measured,
    require_model,
    traced_machine,
    traced_plan,
    what_changed,
)
from meshwright.api.proofs import Proof, Tuned, prove_best, tune
from meshwright.api.targets import find_target, refuse_wrapped, with_vocab
from meshwright.api.verb import (
    Base,
    Call,
    Outcome,
    RunOptions,
    base_run,
    given_options,
    refuse_options,
    require_writable,
    value_of,
)
from meshwright.config import MeshShape
from meshwright.errors import ConfigError, MeshwrightError, shell_word
from meshwright.formatting import format_bytes, parse_count
from meshwright.hardware.aot import require_compiler
from meshwright.hardware.targets import Target, expand_targets, parse_target
from meshwright.planner.explain import (
    alternatives,
    announced_note,
    batch_note,
    explain_mesh,
    fewer_are_faster,
    notes,
    nothing_fits,
    room_note,
)
from meshwright.planner.offers import (
    CHIP_HOURS_PER_FAILURE,
    RESTART_MINUTES,
    Aim,
    ErrorRange,
    Market,
    Offer,
    PriceTerms,
    Reliability,
    choose,
    make_offer,
    rank,
    read_prices,
    require_price,
)
from meshwright.planner.plan_file import prediction_json, write_plan
from meshwright.planner.search import (
    Plan,
    SearchResult,
    check_size,
    price_mesh,
    rounding_note,
    search,
    with_open_choices,
    with_tokens_per_step,
)
from meshwright.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Ranged, TimeLimit
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run
from meshwright.storage.paths import path_of
from meshwright.trainer.relations import check_run
from meshwright.trust import own
from meshwright.views.blocks import Column, Table, Text
from meshwright.views.plan_page import offer_page, offers_table, plan_page, plans_table
from meshwright.views.report import Report, Section, print_sections
from meshwright.views.terminal import text_of

_CHOSEN = (
    "--mesh",
    "--training.remat",
    "--training.microbatches",
    "--training.stage-saves",
    "--training.context-strategy",
)
"""Options of a Run that the search chooses."""
_OF_ONE_PLAN = ("why", "compare", "prove", "tune", "measured")
"""Options about the plans of one target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferOptions(Ranged):
    """Options of a renter."""

    days: PositiveFloat | None = None
    """Latest end of the training, in days: the cheapest plans that keep it."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="DOLLARS")] = None
    """Most to be spent, in dollars (500k): the fastest plans that keep it."""
    rank_by: Aim = "time"
    """Order of several targets."""
    terms: PriceTerms = "on-demand"
    """Terms of the prices."""
    prices: Path | None = None
    """Prices in place of the package's: CSV of chip, provider, region, terms, usd_per_chip_hour,
    source, read_on."""
    failure_chip_hours: PositiveFloat = CHIP_HOURS_PER_FAILURE
    """Chip-hours between two failures; by default those of Llama 3 405B on H100."""
    restart_minutes: PositiveFloat = RESTART_MINUTES
    """Minutes from a failure to the first step after it."""
    save_seconds: PositiveFloat | None = None
    """Seconds that a checkpoint stops the steps; by default the copy of a device's state to its
    host."""

    def market(self) -> Market:
        """Reads the table of prices."""
        reliability = Reliability(self.failure_chip_hours, self.restart_minutes, self.save_seconds)
        return read_market(self.prices, self.terms, reliability)


_OF_OFFERS = tuple(field.name for field in dataclasses.fields(OfferOptions))
_NOT_OF_WRAPPED = ("tune", *_OF_OFFERS, "tokens", "tokens_per_step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(OfferOptions, RunOptions):
    """Find the fastest way to lay RECIPE (by default `tiny`) out on hardware that is not here, and
    explain why the others lose. All figures are predicted by arithmetic; nothing is compiled unless
    --prove or --tune asks for it.
    """

    on: Annotated[str, tyro.conf.arg(metavar="CHIP:SIZE,...")]
    """Hardware: v5p:8x8x16, 2*v6e:16x16, h100:64, gb200:144, or your own chip as FILE.toml:SIZE or
    module:attribute:SIZE. Several are ranked: v5p:4x4x8,h100:64,128, or numbers of chips in a
    range: v5p:64..1024."""
    tokens_per_step: Annotated[str | None, tyro.conf.arg(metavar="COUNT,...")] = None
    """Tokens per step, as 4M or 2097152; by default the recipe's batch. Several are ranked: 1M,2M
    or 1M..8M."""
    tokens: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "1T"
    """Tokens of the whole training, for the days and the cost."""
    measured: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """Plan with the rates of the steps that `train --profile` traced into this output folder, on
    their machine, and say what they change; by default the run of the folder."""
    why: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Also explain this mesh (axis=degree,...): its rank, and what it loses against the best."""
    compare: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="AXIS=N,... AXIS=N,...")] = (
        None
    )
    """Compare two meshes side by side."""
    prove: NonNegativeInt = 0
    """Compile this many of the best plans for the hardware, and rank them by the compiled step."""
    tune: bool = False
    """Compile variants of the best plan (remat, dtypes, block sizes, compiler options) and keep
    what is faster."""
    limit: TimeLimit = 3600
    """Most seconds of processor time for one compilation."""
    html: Path | None = None
    """Write one offline page: every plan by step time and memory, why each loses, the best on the
    hardware; with --compare the two side by side, and of several targets days against cost."""
    out: Path | None = None
    """Write the best plan as JSON, which train, prove and rehearse take."""
    shown: PositiveInt = 8
    """Rows of each table."""
    json: bool = False
    """Print JSON."""

    @classmethod
    def base(cls, args: Sequence[str]) -> Base:
        """Returns the run of a recipe;
        with --measured the machine of the trace, and without a recipe its run."""
        folder = value_of(args, "--measured")
        if folder is None:
            return base_run(args)
        target = traced_machine(path_of(folder))
        names_run = value_of(args, "--run") is not None or (args and not args[0].startswith("-"))
        if not names_run:
            return Base(read_run(path_of(folder) / "run.json"), args, target)
        return dataclasses.replace(base_run(args), target=target)

    @classmethod
    def of(cls, base: Base) -> Self:
        """Returns the options before any is given: a plan names its hardware."""
        return cls(run=base.run, on=base.target or tyro.MISSING)

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright plan`: searches, compiles where asked, writes, prints.

        Raises ConfigError.
        """
        if self.run.model.states_layers:
            self._refuse_chosen(call.words)
        require_writable((self.html, self.out))
        refuse_wrapped(self.run, given_options(self, _NOT_OF_WRAPPED))
        console = call.console
        named = (self.on, self.tokens_per_step or "")
        several = any("," in text or ".." in text for text in named)
        if several or self.days is not None or self.budget is not None:
            fix = "plan first, then the target that is best with it, and without the limits"
            refuse_options(
                self, _OF_ONE_PLAN, "several plans to rank, or a deadline or budget", fix
            )
            best, record = self._plan_offers(console)
        else:
            refuse_options(self, ("rank_by",), "one target", "several targets, or leave it out")
            best, record = self._plan_target(console)
        if self.out:
            compiled: dict[str, Any] = {
                name: record[name] for name in ("proofs", "tuned") if name in record
            }
            write_plan(best, best.target, self.out, compiled)
            prove = f"meshwright prove {shell_word(self.out)}"
            train = f"meshwright train {shell_word(self.out)}"
            text = f"\nwritten: {self.out} ({prove}, {train})"
            console.print(text, markup=False, soft_wrap=True)
        return Outcome(record=record)

    def _refuse_chosen(self, words: Sequence[str]) -> None:
        """Raises ConfigError for an option that names what a plan chooses."""
        names = [word.partition("=")[0].replace("_", "-") for word in words]
        for name in _CHOSEN:
            if name not in names:
                continue
            instead = "leave it out"
            if name == "--mesh":
                instead = f"--why {self.run.mesh}, which explains that mesh"
            fix = f"{instead}, or `meshwright prove --on {self.on}` with it"
            raise ConfigError(f"{name} with plan", "plan prices all of them, and chooses", fix)

    def _plan_target(self, console: Console) -> tuple[Plan, dict[str, Any]]:
        """Prints the plans of one target; returns the best, and all figures as JSON."""
        if self.prove or self.tune:
            check_run(self.run, MeshShape())  # a run that no compiler would take needs none
            require_compiler(find_target(self.on))  # before the search
        explained = MeshShape.parse(self.why) if self.why else None
        tokens = parse_count(self.tokens, "--tokens")
        market = self.market()
        measured = None
        if self.measured is not None:
            measured = read_measured(self.measured, self.on)
            require_model(measured, self.run)
        target = find_target(self.on) if measured is None else measured.target
        for mesh in self.compare or ():
            check_size(MeshShape.parse(mesh), target)
        began = time.perf_counter()
        plans = _plans(
            self.run,
            [target],
            self.tokens_per_step,
            include=() if explained is None else (explained,),
        )
        found = plans.searches[0]
        took = time.perf_counter() - began
        run = plans[0].run
        offer = None
        if run.model.reads_text:
            offer = make_offer(plans[0], tokens, market)
        remarks = [*self._rounding_notes(), *notes(run, found)]
        page = functools.partial(
            plan_page,
            result=found,
            compared=self._compared(run, found),
            offer=offer,
            notes=[f"{found.priced:,} plans priced in {took:.1f} s", *remarks],
            shown=self.shown,
        )
        why = []
        if explained is not None:
            why = [Section(f"why {explained}", [Text([explain_mesh(found, explained)])])]
        if not self.json:  # compiling takes minutes: the ranking comes first
            _with_sections(page(plans[0]), why).print(console)
        chosen = plans[0]
        sections: list[Section] = []
        proofs: dict[str, Any] = {}
        figures = _search_json(found, self.shown)
        if measured is not None:
            section, figures["measured"] = self._changes(measured, plans[0])
            why.append(section)
            if not self.json:
                print_sections(console, [section])
        if self.prove > 0 or self.tune:
            chosen, sections, proofs = self._compile(found, console)
        if self.html:
            _with_sections(page(chosen, compiled=sections), why).write(self.html)
        training = None if offer is None else offer_json(offer)
        return chosen, {**figures, "training": training, "notes": remarks, **proofs}

    def _changes(self, measured: MeasuredRun, best: Plan) -> tuple[Section, dict[str, Any]]:
        """Returns what the rates of a trace change, against the plan without them."""
        before = None
        if measured.before is not None:
            before = _plans(self.run, [measured.before], self.tokens_per_step)[0]
        lines = what_changed(measured, best, before)
        record = {
            "rates": measured.step["rates"],
            "refused": measured.step["refused"],
            "traced": {
                "measured_seconds": measured.step["seconds"],
                "planned_seconds_before": measured.step["planned_seconds"],
                "planned_seconds": traced_plan(measured).estimate.seconds,
            },
            "best_before": None if before is None else before.name,
        }
        return Section(f"Measured by {measured.folder}", [Text(lines)]), record

    def _compared(self, run: Run, found: SearchResult) -> tuple[Plan, ...]:
        """Returns the best plan of each mesh of --compare, or the smallest one where none fits."""
        compared: list[Plan] = []
        for mesh in self.compare or ():
            shape = MeshShape.parse(mesh)
            # Raises where there is neither.
            best, smallest = price_mesh(with_open_choices(run), found.target, shape)
            compared += [plan for plan in (best or smallest,) if plan is not None]
        return tuple(compared)

    def _rounding_notes(self) -> list[str]:
        """Says where a batch is not the tokens per step that were asked for."""
        found = []
        for tokens in numbers_of_tokens(self.tokens_per_step):
            note = rounding_note(with_tokens_per_step(self.run, tokens), tokens)
            if note is not None:
                found.append(note)
        return found

    def _plan_offers(self, console: Console) -> tuple[Plan, dict[str, Any]]:
        """Prints offers of several targets or batches, or within limits.

        Returns the best plan, and all as JSON.
        """
        limited = self.days is not None or self.budget is not None
        if limited and self.rank_by != "time":
            raise ConfigError(
                f"--rank-by {self.rank_by} with --days or --budget",
                "with a deadline the cheapest comes first, else the fastest",
                "leave --rank-by out, or the limits",
            )
        budget = None if self.budget is None else parse_budget(self.budget)
        began = time.perf_counter()
        found = offers(
            self.run,
            self.on,
            tokens=self.tokens,
            tokens_per_step=self.tokens_per_step,
            days=self.days,
            budget=budget,
            rank_by=self.rank_by,
            market=self.market(),
        )
        took = time.perf_counter() - began
        if not self.json:
            lines = [self._kept_line(found, took, budget)]
            lines += [f"note: {note}" for note in self._notes_on_offers(found)]
            page = offer_page(found, found.refused, found.beyond, notes=lines, shown=self.shown)
            page.print(console)
        if self.html:
            offer_page(found, found.refused, found.beyond).write(self.html)
        refused = {name: str(error) for name, error in found.refused.items()}
        return found[0].plan, {"offers": [offer_json(offer) for offer in found], "refused": refused}

    def _kept_line(self, found: "Offers", took: float, budget: float | None) -> str:
        """Formats how many plans were priced, how many are within the limits, and their order."""
        limits = []
        if self.days is not None:
            limits.append(f"within {self.days:g} days")
        if budget is not None:
            limits.append(f"for at most ${budget:,.0f}")
        order = f"least {self.rank_by}"
        if self.days is not None:
            order = "cheapest"
        elif budget is not None:
            order = "fastest"
        priced = len(found) + len(found.beyond)
        kept = " ".join([f"{len(found)} of them kept", " and ".join(limits)]).rstrip()
        return f"{priced} plans in {took:.1f} s, {kept}, {order} first"

    def _notes_on_offers(self, found: "Offers") -> list[str]:
        """Returns notes on the plans that are shown and on the ranking, each once."""
        remarks: list[str | None] = list(self._rounding_notes())
        plans = [offer.plan for offer in found[: self.shown]]
        remarks += [announced_note(plan.target) for plan in plans]
        remarks += [batch_note(plan.run, plan.target) for plan in plans]
        remarks += [plan.record_note for plan in plans]
        remarks += [room_note(plan) for plan in plans]
        remarks += fewer_are_faster([offer.plan for offer in (*found, *found.beyond)])
        return list(dict.fromkeys(note for note in remarks if note))

    def _compile(
        self, found: SearchResult, console: Console
    ) -> tuple[Plan, list[Section], dict[str, Any]]:
        """Compiles the best plans, and variants of the best.

        Returns the best, sections, and figures as JSON.
        """

        say = functools.partial(_say, console)
        proofs = prove_best(found.plans[: max(1, self.prove)], found.target, self.limit, say)
        best = proofs[0]
        section = _proofs_section(proofs)
        sections = [section]
        print_sections(console, [section])
        figures: dict[str, Any] = {"proofs": [proof.to_json() for proof in proofs]}
        if self.tune:
            tuned = tune(best, found.target, self.limit, say)
            section = _tuning_section(best, tuned)
            sections.append(section)
            print_sections(console, [section])
            start, best = best, tuned.best
            assert start.step_seconds is not None and best.step_seconds is not None
            gain = f"{best.step_seconds / start.step_seconds - 1:+.1%}"
            console.print(f"best: {best.step_seconds:.3g} s, {gain}: {escape(best.plan.name)}")
            figures["tuned"] = [
                {"change": name, "kept": name in tuned.kept, **proof.to_json()}
                for name, proof in tuned.tried
            ]
        return (found.plans[0] if best.refused else best.plan), sections, figures


def _say(console: Console, line: str) -> None:
    console.print(f"[dim]{escape(line)}[/]")


def _with_sections(page: Report, sections: Sequence[Section]) -> Report:
    """Returns a page with further sections at its end."""
    return dataclasses.replace(page, sections=[*page.sections, *sections])


def _proofs_section(proofs: Sequence[Proof]) -> Section:
    """Returns the table of compiled plans: each planned figure beside the compiler's."""
    headings = [
        "plan",
        "step, planned",
        "step, simulated",
        "memory, planned",
        "memory, compiled",
        "compile time",
    ]
    rows = []
    for proof in proofs:
        estimate = proof.plan.estimate
        row = [proof.plan.name, f"{estimate.seconds:.3g} s", _step(proof)]
        row += [format_bytes(estimate.bytes), _bytes(proof)]
        row += [f"{proof.compile_seconds:.0f} s" if proof.compile_seconds else "", proof.refused]
        rows.append(row)
    note = "Proved by the compiler; the step time is simulated."
    return Section("Compiled for the hardware", [_table(headings, rows)], note)


def _tuning_section(best: Proof, tuned: Tuned) -> Section:
    """Returns the table of the changes that were tried, and which of them were kept."""
    rows = [["(as planned)", _step(best), _bytes(best), ""]]
    for name, proof in tuned.tried:
        outcome = "kept" if name in tuned.kept else proof.refused
        rows.append([name, _step(proof), _bytes(proof), outcome])
    table = _table(["change", "step", "memory"], rows)
    return Section("Tuned, each change on top of those kept", [table])


def _search_json(found: SearchResult, shown: int) -> dict[str, Any]:
    losers = [
        {"axes": a.axes, "best": a.best.name, "fits": a.fits, "reason": a.reason}
        for a in alternatives(found)
    ]
    plans = [
        {"name": p.name, "mesh": str(p.mesh), **prediction_json(p)} for p in found.plans[:shown]
    ]
    figures: dict[str, Any] = {
        "target": str(found.target),
        "priced": found.priced,
        "refused": found.refused,
    }
    figures |= {"least_searched_seconds": found.bound} if found.bound else {}
    return {**figures, "plans": plans, "alternatives": losers}


def offer_json(offer: Offer) -> dict[str, Any]:
    """Returns an offer as JSON values, with everything that its figures follow from."""
    plan, good = offer.plan, offer.goodput
    return {
        "target": str(plan.target),
        "chips": plan.target.chips,
        "name": plan.name,
        "mesh": str(plan.mesh),
        "tokens_per_step": plan.estimate.tokens,
        **{
            name: getattr(offer, name)
            for name in ("tokens", "step_days", "days", "chip_hours", "dollars")
        },
        "price": None if offer.price is None else dataclasses.asdict(offer.price),
        "goodput": {**dataclasses.asdict(good), "fraction": good.fraction},
        "error_band": None if offer.band is None else error_range_json(offer.band),
        "predicted": prediction_json(plan),
    }


def error_range_json(found: ErrorRange) -> dict[str, Any]:
    """Returns the range of published over predicted time as JSON values,
    with the kinds at its ends."""
    return {"low": found.low, "high": found.high, **dataclasses.asdict(found)}


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    columns = [*map(Column, headings), Column("outcome", wide=True)]
    return Table(columns, rows, title="Compiled and simulated steps", printed=len(rows))


def _step(proof: Proof) -> str:
    return "" if proof.step_seconds is None else f"{proof.step_seconds:.3g} s"


def _bytes(proof: Proof) -> str:
    return "" if proof.peak_bytes is None else format_bytes(proof.peak_bytes)


_MOST = 500
"""Plans that fit, and as many that do not, on a page that is written to a file."""
_IN_NOTEBOOK = 20
"""Those in a cell of a notebook."""


class Plans(list[Plan]):
    """Plans, the fastest predicted step first.

    They print as a table; in a notebook they show their page.

    Example:
        >>> plans = mw.plan("llama32-1b", on="v6e:2x2", tokens_per_step="128k", at_most=2)
        >>> print(str(plans).splitlines()[1])
        1  fsdp=4, projections, 2 microbatches  793 ms  40.6%     165 k  20.6 GiB  matmuls   v6e:2x2
        >>> plans._repr_html_()[:7]
        '<iframe'
    """

    def __init__(self, plans: Iterable[Plan], searches: Iterable[SearchResult] = ()):
        super().__init__(plans)
        self.searches = tuple(searches)
        """Searches that the plans come from, with all that was priced."""

    def __repr__(self) -> str:
        return text_of(plans_table(self))

    def page(self) -> Report | None:
        """Returns the page of the best plan and of its search.

        None without a plan.
        """
        return self._page(_MOST)

    def _page(self, most: int) -> Report | None:
        for found in self.searches:
            if self and self[0].target == found.target:
                return plan_page(self[0], found, most=most)
        return None

    def _repr_html_(self) -> str | None:
        """Returns the page with as many plans as a notebook shows; `page().write(FILE)` has all."""
        page = self._page(_IN_NOTEBOOK)
        return None if page is None else page.frame()


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

    def page(self) -> Report | None:
        """Returns the page of the offers; None where there is none."""
        return offer_page(self) if self else None

    def _repr_html_(self) -> str | None:
        page = self.page()
        return None if page is None else page.frame()


def plan(
    run: Run | str,
    on: str | Sequence[str],
    *,
    tokens_per_step: str | int | None = None,
    at_most: int = 20,
    include: Sequence[MeshShape] = (),
) -> Plans:
    """Returns the best plans of a run, the fastest predicted step first.

    The hardware need not be here.
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
    run, on = own(run), own(on)
    base = find_recipe(run) if isinstance(run, str) else run
    targets = [find_target(name) for name in ((on,) if isinstance(on, str) else on)]
    return _plans(base, targets, tokens_per_step, at_most, include)


def _plans(
    base: Run,
    targets: Sequence[Target],
    tokens_per_step: str | int | None,
    at_most: int = 20,
    include: Sequence[MeshShape] = (),
) -> Plans:
    """Returns the best plans of a run on some machines, as `plan` does."""
    if tokens_per_step is not None:
        refuse_wrapped(base, [f"{tokens_per_step} tokens per step"])
        base = with_tokens_per_step(base, parse_count(str(tokens_per_step), "--tokens-per-step"))
    base = with_vocab(base, MeshShape())
    searches = [_search(base, target, include) for target in targets]
    plans = [plan for result in searches for plan in result.plans[:at_most]]
    return Plans(sorted(plans, key=lambda p: p.estimate.seconds)[:at_most], searches)


def _search(run: Run, target: Target, include: Sequence[MeshShape] = ()) -> SearchResult:
    with activity("plan", f"pricing plans for {target}", "priced plans"):
        result = search(run, target, tuple(include))
    if not result.plans:
        raise nothing_fits(run, result)
    return result


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
    """Returns the best plan of each target and batch, the best first.

    Each has the days and dollars of a training.
    run: a Run, or a recipe's name.  on: targets, numbers of chips or ranges: `v5p:4x4x8,h100:64`,
    `h100:64..1024`.
    tokens: of the whole training.  tokens_per_step: global batch, several (`1M,2M`) or a range
    (`1M..4M`).
    days, budget: latest end and most dollars: what keeps both is returned, the cheapest first under
    a deadline, else the fastest.  rank_by: without them, what comes first: `time` or `cost`.
    market: prices and reliability (`meshwright.api.planning.read_market`).
    Raises ConfigError where nothing fits, or where nothing keeps the limits, with the nearest that
    is possible.

    Example:
        >>> found = mw.offers("llama32-1b", on="h100:8,v5p:2x2x2", tokens="100B", rank_by="cost")
        >>> [str(offer.plan.target) for offer in found]
        ['h100:1x8', 'v5p:2x2x2']
    """
    market = market or read_market()
    total = parse_count(str(tokens), "--tokens")
    run, on = own(run), own(on)
    base = find_recipe(run) if isinstance(run, str) else run
    sized_runs = with_batches(base, tokens_per_step)
    model = with_vocab(sized_runs[0], MeshShape()).model
    targets = [
        name for text in ((on,) if isinstance(on, str) else on) for name in expand_targets(text)
    ]
    if budget is not None or rank_by == "cost":
        asked = "--rank-by cost" if budget is None else f"a budget of ${budget:,.0f}"
        require_price(asked, [parse_target(name).name for name in targets], market)
    found: list[Offer] = []
    refused: dict[str, MeshwrightError] = {}
    for name in targets:
        for batch in sized_runs:
            sized = dataclasses.replace(batch, model=model)
            try:
                found.append(make_offer(_search(sized, find_target(name)).plans[0], total, market))
            except MeshwrightError as error:
                refused[
                    f"{name} with {sized.training.batch} x {sized.training.seq} tokens per step"
                ] = error
    if not found:
        raise next(iter(refused.values()))
    best = rank(found, rank_by) if days is None and budget is None else choose(found, days, budget)
    return Offers(best, [offer for offer in found if offer not in best], refused)


def with_batches(run: Run, tokens_per_step: str | int | None) -> list[Run]:
    """Returns the run with each batch that is asked for; the run itself where none is."""
    if tokens_per_step is None:
        return [run]
    sized = [with_tokens_per_step(run, number) for number in numbers_of_tokens(tokens_per_step)]
    return list(dict.fromkeys(sized))


def numbers_of_tokens(tokens_per_step: str | int | None) -> list[int]:
    """Reads one number of tokens, several, or powers of two of a range (`1M..4M`)."""
    numbers: dict[int, None] = {}
    if tokens_per_step is None:
        return []
    for part in str(tokens_per_step).split(","):
        low, between, high = part.partition("..")
        first = parse_count(low, "--tokens-per-step")
        last = parse_count(high, "--tokens-per-step") if between else first
        if last < first:
            raise ConfigError(
                f"--tokens-per-step {part}",
                f"{first} to {last} holds nothing",
                f"--tokens-per-step {high}..{low}",
            )
        numbers |= dict.fromkeys(first * 2**n for n in range(int(math.log2(last / first)) + 1))
    return list(numbers)


def parse_budget(text: str) -> float:
    """Parses dollars: `500k` or `$2.5M`. Raises ConfigError on anything else."""
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    dollars = (
        float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]]
        if match
        else 0.0
    )
    if not 0 < dollars < math.inf:
        truth = "it takes a finite sum of dollars above 0, with k, M, B or T behind it"
        raise ConfigError(f"--budget {text}", truth, "--budget 500k")
    return dollars

"""The verb `plan`: search, explain, compare, rank offers, compile, write."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape

from meshwright.api.planning import (
    find_target,
    offers,
    parse_budget,
    plan,
    read_market,
    refuse_wrapped,
)
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.output import require_writable, write_json
from meshwright.cli.parse import given_options, parse, refuse_options
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes, parse_count
from meshwright.planner.explain import alternatives, batch_note, explain_mesh, notes, offloading_note
from meshwright.planner.offers import (
    CHIP_HOURS_PER_FAILURE,
    RESTART_MINUTES,
    Aim,
    Market,
    Offer,
    PriceTerms,
    Reliability,
    make_offer,
)
from meshwright.planner.plan_file import prediction_json, write_plan
from meshwright.planner.search import Plan, SearchResult, price_mesh
from meshwright.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Ranged, TimeLimit
from meshwright.reporters.console import open_console
from meshwright.views.blocks import Column, Table, Text
from meshwright.views.plan_page import offer_page, plan_page, plans_table
from meshwright.views.report import Report, Section, print_sections
from meshwright.views.terminal import print_blocks

if TYPE_CHECKING:
    from meshwright.api.proving import Proof


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
    """Prices in place of the package's: CSV of chip, provider, region, terms, usd_per_chip_hour, source, read_on."""
    failure_chip_hours: PositiveFloat = CHIP_HOURS_PER_FAILURE
    """Chip-hours between two failures; by default those of Llama 3 405B on H100."""
    restart_minutes: PositiveFloat = RESTART_MINUTES
    """Minutes from a failure to the first step after it."""
    save_seconds: PositiveFloat | None = None
    """Seconds that a checkpoint stops the steps; by default the copy of a device's state to its host."""

    def market(self) -> Market:
        """Reads the table of prices."""
        reliability = Reliability(self.failure_chip_hours, self.restart_minutes, self.save_seconds)
        return read_market(self.prices, self.terms, reliability)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(OfferOptions, RunOptions):
    """Find the fastest way to lay RECIPE (by default `tiny`) out on hardware that is not here, and explain why the
    others lose. All figures are predicted by arithmetic; nothing is compiled unless --prove or --tune asks for it."""

    on: Annotated[str, tyro.conf.arg(metavar="CHIP:SIZE,...")]
    """Hardware: v5p:8x8x16, 2*v6e:16x16, h100:64, gb200:144, or your own chip as FILE.toml:SIZE or
    module:attribute:SIZE. Several are ranked: v5p:4x4x8,h100:64,128, or numbers of chips in a range: v5p:64..1024."""
    tokens_per_step: Annotated[str | None, tyro.conf.arg(metavar="COUNT,...")] = None
    """Tokens per step, as 4M or 2097152; by default the recipe's batch. Several are ranked: 1M,2M or 1M..8M."""
    tokens: Annotated[str, tyro.conf.arg(metavar="COUNT")] = "1T"
    """Tokens of the whole training, for the days and the cost."""
    why: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Also explain this mesh (axis=degree,...): its rank, and what it loses against the best."""
    compare: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="AXIS=N,... AXIS=N,...")] = None
    """Compare two meshes side by side."""
    prove: NonNegativeInt = 0
    """Compile this many of the best plans for the hardware, and rank them by the compiled step."""
    tune: bool = False
    """Compile variants of the best plan (remat, dtypes, block sizes, compiler options) and keep what is faster."""
    limit: TimeLimit = 900
    """Most seconds for one compilation."""
    html: Path | None = None
    """Write one offline page: every plan by step time and memory, why each loses, the best on the hardware; with
    --compare the two side by side, and of several targets days against cost."""
    out: Path | None = None
    """Write the best plan as JSON, which train, prove and rehearse take."""
    shown: PositiveInt = 8
    """Rows of each table."""
    json: bool = False
    """Print JSON."""


_CHOSEN = (
    "--mesh",
    "--training.remat",
    "--training.microbatches",
    "--training.stage-saves",
    "--training.context-strategy",
)
"""Options of a Run that the search chooses."""
_OF_ONE_PLAN = ("why", "compare", "prove", "tune")
"""Options about the plans of one target."""
_OF_OFFERS = tuple(field.name for field in dataclasses.fields(OfferOptions))
_NOT_OF_WRAPPED = (*_OF_ONE_PLAN, *_OF_OFFERS, "html", "tokens", "tokens_per_step")


def main(args: Sequence[str]) -> int:
    """Runs `meshwright plan`."""
    base = base_run(args)
    default = PlanOptions(run=base.run, on=base.target or tyro.MISSING)
    options = parse(PlanOptions, "plan [RECIPE]", base.args, default=default)
    names = [word.partition("=")[0].replace("_", "-") for word in base.args]
    for name in _CHOSEN if options.run.model.unit == "tokens" else ():
        if name in names:
            fix = f"--why {options.run.mesh}, which explains that mesh" if name == "--mesh" else "leave it out"
            fix += f", or meshwright prove --on {options.on} with it"
            raise ConfigError(f"{name} with plan", "plan prices all of them, and chooses", fix)
    return run_plan(options)


def run_plan(options: PlanOptions) -> int:
    """Searches, compiles where asked, writes, prints. Raises ConfigError where no mesh has the memory."""
    require_writable((options.html, options.out))
    refuse_wrapped(options.run, given_options(options, _NOT_OF_WRAPPED))
    console = open_console(sys.stderr if options.json else sys.stdout)
    several = any("," in text or ".." in text for text in (options.on, options.tokens_per_step or ""))
    if several or options.days is not None or options.budget is not None:
        fix = "plan first, then the target that is best with it, and without the limits"
        refuse_options(options, _OF_ONE_PLAN, "several plans to rank, or a deadline or budget", fix)
        best, proofs = _plan_offers(options, console), dict[str, Any]()
    else:
        refuse_options(options, ("rank_by",), "one target", "several targets, or leave it out")
        best, proofs = _plan_target(options, console)
    if options.out:
        write_plan(best, best.target, options.out, proofs)
        text = f"\nwritten: {options.out} (meshwright prove {options.out}, meshwright train {options.out})"
        console.print(text, markup=False, soft_wrap=True)
    return 0


def _plan_target(options: PlanOptions, console: Console) -> tuple[Plan, dict[str, Any]]:
    """Prints the plans of one target; returns the best, and figures of what was compiled."""
    explained = MeshShape.parse(options.why) if options.why else None
    began = time.perf_counter()
    plans = plan(
        options.run,
        options.on,
        tokens_per_step=options.tokens_per_step,
        include=(explained,) if explained else (),
    )
    if not plans.searches:  # of a wrapped model
        target = find_target(options.on)
        if options.json:
            write_json({"target": str(target), "plans": [{"plan": p.name, **prediction_json(p)} for p in plans]})
        else:
            title = f"{options.run.name} on {target}: {options.run.training.batch} examples per step, predicted"
            print_blocks(console, title, "", [plans_table(plans)])
        return plans[0], {}
    found, took = plans.searches[0], time.perf_counter() - began
    run = plans[0].run
    compared: tuple[Plan, ...] = ()
    for shape in map(MeshShape.parse, options.compare or ()):
        best, smallest = price_mesh(run, found.target, shape)  # raises where there is neither
        compared += tuple(filter(None, (best or smallest,)))
    offer = make_offer(plans[0], parse_count(options.tokens, "--tokens"), options.market())
    remarks = [*notes(run, found), *filter(None, [offloading_note(found)])]

    def report(best: Plan, sections: Sequence[Section] = ()) -> Report:
        lines = [f"{found.priced:,} plans priced in {took:.1f} s", *remarks]
        page = plan_page(best, found, sections, compared, offer=offer, notes=lines, shown=options.shown)
        if explained is None:
            return page
        why = Section(f"why {explained}", [Text([explain_mesh(found, explained)])])
        return dataclasses.replace(page, sections=[*page.sections, why])

    chosen, sections, proofs = plans[0], list[Section](), dict[str, Any]()
    if options.prove > 0 or options.tune:
        if not options.json:  # compiling takes minutes: the ranking comes first
            report(chosen).print(console)
        chosen, sections, proofs = _compile(options, found, console)
    elif not options.json:
        report(chosen).print(console)
    if options.html:
        report(chosen, sections).write(options.html)
    if options.json:
        write_json({**_search_json(found, options.shown), "training": offer_json(offer), "notes": remarks, **proofs})
    return chosen, proofs


def _search_json(found: SearchResult, shown: int) -> dict[str, Any]:
    losers = [{"axes": a.axes, "best": a.best.name, "fits": a.fits, "reason": a.reason} for a in alternatives(found)]
    plans = [{"name": p.name, "mesh": str(p.mesh), **prediction_json(p)} for p in found.plans[:shown]]
    figures = {"target": str(found.target), "priced": found.priced, "refused": found.refused}
    return {**figures, "plans": plans, "alternatives": losers}


def _plan_offers(options: PlanOptions, console: Console) -> Plan:
    """Prints offers of several targets or batches, or within limits; returns the best plan."""
    limited = options.days is not None or options.budget is not None
    if limited and options.rank_by != "time":
        raise ConfigError(
            f"--rank-by {options.rank_by} with --days or --budget",
            "with a deadline the cheapest comes first, else the fastest",
            "leave --rank-by out, or the limits",
        )
    budget = None if options.budget is None else parse_budget(options.budget)
    began = time.perf_counter()
    found = offers(
        options.run,
        options.on,
        tokens=options.tokens,
        tokens_per_step=options.tokens_per_step,
        days=options.days,
        budget=budget,
        rank_by=options.rank_by,
        market=options.market(),
    )
    if options.json:
        refused = {name: str(error) for name, error in found.refused.items()}
        write_json({"offers": [offer_json(offer) for offer in found], "refused": refused})
    else:
        limits = [f"within {options.days:g} days"] if options.days is not None else []
        limits += [f"for at most ${budget:,.0f}"] if budget is not None else []
        order = ("cheapest" if options.days is not None else "fastest") if limited else f"least {options.rank_by}"
        kept = (
            f"{len(found) + len(found.beyond)} plans in {time.perf_counter() - began:.1f} s, {len(found)} of them kept"
            f"{' ' if limits else ''}{' and '.join(limits)}, {order} first"
        )
        plans = [offer.plan for offer in found[: options.shown]]
        remarks = dict.fromkeys(filter(None, (batch_note(plan.run, plan.target) for plan in plans)))
        lines = [kept, *(f"note: {note}" for note in remarks)]
        offer_page(found, found.refused, found.beyond, notes=lines, shown=options.shown).print(console)
    if options.html:
        offer_page(found, found.refused, found.beyond).write(options.html)
    return found[0].plan


def offer_json(offer: Offer) -> dict[str, Any]:
    """Returns an offer as JSON values, with everything that its figures follow from."""
    plan, good = offer.plan, offer.goodput
    return {
        "target": str(plan.target),
        "chips": plan.target.chips,
        "name": plan.name,
        "mesh": str(plan.mesh),
        "tokens_per_step": plan.estimate.tokens,
        **{name: getattr(offer, name) for name in ("tokens", "step_days", "days", "chip_hours", "dollars")},
        "price": None if offer.price is None else dataclasses.asdict(offer.price),
        "goodput": {**dataclasses.asdict(good), "fraction": good.fraction},
        "error_band": {"low": offer.band.low, "high": offer.band.high, **dataclasses.asdict(offer.band)},
        "predicted": prediction_json(plan),
    }


def _compile(options: PlanOptions, found: SearchResult, console: Console) -> tuple[Plan, list[Section], dict[str, Any]]:
    """Compiles the best plans, and variants of the best of them; returns the best, sections, and figures as JSON."""

    def say(line: str) -> None:
        console.print(f"[dim]{escape(line)}[/]")

    from meshwright.api.proving import prove_best, tune

    proofs = prove_best(found.plans[: max(1, options.prove)], found.target, options.limit, say)
    best = proofs[0]
    headings = ["plan", "step, planned", "step, simulated", "memory, planned", "memory, compiled", "compile time"]
    rows = [
        [
            p.plan.name,
            f"{p.plan.estimate.seconds:.3g} s",
            _step(p),
            format_bytes(p.plan.estimate.bytes),
            _bytes(p),
            f"{p.compile_seconds:.0f} s" if p.compile_seconds else "",
            p.refused,
        ]
        for p in proofs
    ]
    note = "Proved by the compiler; the step time is simulated."
    sections = [Section("Compiled for the hardware", [_table(headings, rows)], note)]
    print_sections(console, sections)
    figures: dict[str, Any] = {"proofs": [proof.to_json() for proof in proofs]}
    if options.tune:
        tuned = tune(best, found.target, options.limit, say)
        rows = [["(as planned)", _step(best), _bytes(best), ""]]
        for name, proof in tuned.tried:
            rows.append([name, _step(proof), _bytes(proof), "kept" if name in tuned.kept else proof.refused])
        title = "Tuned, each change on top of those kept"
        sections.append(Section(title, [_table(["change", "step", "memory"], rows)]))
        print_sections(console, sections[1:])
        start, best = best, tuned.best
        assert start.step_seconds is not None and best.step_seconds is not None
        gain = f"{best.step_seconds / start.step_seconds - 1:+.1%}"
        console.print(f"best: {best.step_seconds:.3g} s, {gain}: {escape(best.plan.name)}")
        figures["tuned"] = [
            {"change": name, "kept": name in tuned.kept, **proof.to_json()} for name, proof in tuned.tried
        ]
    return (found.plans[0] if best.refused else best.plan), sections, figures


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    columns = [*map(Column, headings), Column("outcome", wide=True)]
    return Table(columns, rows, title="Compiled and simulated steps", printed=len(rows))


def _step(proof: "Proof") -> str:
    return "" if proof.step_seconds is None else f"{proof.step_seconds:.3g} s"


def _bytes(proof: "Proof") -> str:
    return "" if proof.peak_bytes is None else format_bytes(proof.peak_bytes)

"""The verb `plan`: search, explain, compare, write."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from meshwright.api.planning import find_target, with_vocab
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.offers import OfferOptions, offer_json, plan_offers
from meshwright.cli.output import require_writable, write_json
from meshwright.cli.parse import parse, refuse_options
from meshwright.config import MeshShape
from meshwright.formatting import parse_count
from meshwright.hardware.targets import Target
from meshwright.planner.divisibility import notes
from meshwright.planner.explain import alternatives, explain_mesh, nothing_fits
from meshwright.planner.offers import Offer, make_offer
from meshwright.planner.offloading import offloading_note
from meshwright.planner.plan_file import prediction_json, write_plan
from meshwright.planner.search import Plan, SearchResult, price_mesh, search, with_tokens_per_step
from meshwright.report.console import open_console
from meshwright.runs.run import Run
from meshwright.views.offer_tables import print_training
from meshwright.views.plan_tables import print_alternatives, print_best_plan, print_comparison, print_plans
from meshwright.wrapped.model import is_wrapped

if TYPE_CHECKING:
    from meshwright.cli.tune import Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(OfferOptions, RunOptions):
    """Find the fastest way to lay RECIPE (by default `tiny`) out on hardware that is not here, and explain why the
    others lose. All figures are predicted by arithmetic; nothing is compiled unless --prove or --tune asks for it."""

    on: Annotated[str, tyro.conf.arg(metavar="CHIP:SIZE,...")]
    """Hardware: v5p:8x8x16, 2*v6e:16x16, h100:64, gb200:144, or your own chip as FILE.toml:SIZE or
    module:attribute:SIZE. Several are ranked: v5p:4x4x8,h100:64,128, or numbers of chips in a range: v5p:64..1024."""
    tokens_per_step: str | None = None
    """Tokens per step, as 4M or 2097152; by default the recipe's batch. Several are ranked: 1M,2M or 1M..8M."""
    tokens: str = "1T"
    """Tokens of the whole training, for the days and the cost."""
    why: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Also explain this mesh (axis=degree,...): its rank, and what it loses against the best."""
    compare: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="AXIS=N,... AXIS=N,...")] = None
    """Compare two meshes side by side."""
    prove: int = 0
    """Compile this many of the best plans for the hardware, and rank them by the compiled step."""
    tune: bool = False
    """Compile variants of the best plan (remat, dtypes, block sizes, compiler options) and keep what is faster."""
    limit: int = 900
    """Most seconds for one compilation."""
    decode: tuple[int, ...] = ()
    """Price prefill and decode instead of training, for texts of these numbers of tokens."""
    decode_batch: tuple[int, ...] = (1, 16, 256)
    """Sequences decoded together, for --decode."""
    html: Path | None = None
    """Write one offline page: every plan by step time and memory, why each loses, the best on the hardware; with
    --compare the two side by side, and of several targets days against cost."""
    out: Path | None = None
    """Write the best plan as JSON, which train, prove and rehearse take."""
    shown: int = 8
    """Rows of each table."""
    json: bool = False
    """Print JSON."""


_OF_ONE_PLAN = ("why", "compare", "prove", "tune")
"""Options about the plans of one target."""
_OF_OFFERS = tuple(field.name for field in dataclasses.fields(OfferOptions))


@dataclasses.dataclass(frozen=True)
class Planned:
    """A search and what was asked of it besides."""

    found: SearchResult
    seconds: float
    """Seconds that the search took."""
    tokens: int
    """Tokens of the whole training."""
    explained: MeshShape | None
    """Mesh of `--why`."""
    compared: tuple[Plan, Plan] | None
    """Plans of `--compare`."""
    offer: Offer
    """Training of the best plan."""
    notes: list[str]
    """Factors of the devices that divide neither batch nor parameters; how far plans that offload may be off."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright plan`."""
    base = base_run(args)
    default = PlanOptions(run=base.run, on=base.target or tyro.MISSING)
    options = parse(PlanOptions, "plan [RECIPE]", base.args, default=default)
    return run_plan(options)


def run_plan(options: PlanOptions) -> int:
    """Searches, compiles where asked, writes, prints. Raises ConfigError where no mesh has the memory."""
    require_writable((options.html, options.out))
    if is_wrapped(options.run):
        from meshwright.cli.wrapped import print_wrapped_plans  # a plan of a family's model loads no wrapped one

        unused = (*_OF_ONE_PLAN, *_OF_OFFERS, "html", "decode", "tokens", "tokens_per_step")
        refuse_options(options, unused, "a wrapped model", "leave it out")
        console = open_console(sys.stderr if options.json else sys.stdout)
        return print_wrapped_plans(options.run, find_target(options.on), console, out=options.out, as_json=options.json)
    if options.decode:
        from meshwright.cli.decoding import plan_decode  # a plan of training prices no decoding

        refuse_options(options, (*_OF_ONE_PLAN, *_OF_OFFERS, "html", "out", "tokens", "tokens_per_step"), "--decode",
                       "leave it out: --decode prices contexts and batches")  # fmt: skip
        console = open_console(sys.stderr if options.json else sys.stdout)
        run, target = with_vocab(options.run), find_target(options.on)
        return plan_decode(run, target, options.decode, options.decode_batch, console=console, as_json=options.json)
    refuse_options(options, ("decode_batch",), "a plan of training", "--decode 4096 with it")
    if _ranks_offers(options):
        return _plan_offers(options)
    refuse_options(options, ("rank_by",), "one target", "several targets, or leave it out")
    planned = _search(options)
    found, console = planned.found, open_console(sys.stderr if options.json else sys.stdout)
    compiles = options.prove > 0 or options.tune
    if compiles and not options.json:  # compiling takes minutes: the ranking comes first
        _print(console, options, planned)
    outcome = _compile(options, found, console) if compiles else None
    _write_files(options, planned, outcome)
    if options.json:
        training = {"training": offer_json(planned.offer), "notes": planned.notes}
        write_json({**_to_json(found, options.shown), **training, **(outcome.figures if outcome else {})})
    elif not compiles:
        _print(console, options, planned)
    if options.out:
        text = f"\nwritten: {options.out} (meshwright prove {options.out}, meshwright train {options.out})"
        console.print(text, markup=False, soft_wrap=True)
    return 0


def _ranks_offers(options: PlanOptions) -> bool:
    """Whether the question has several targets or batches, or a limit."""
    several = any("," in text or ".." in text for text in (options.on, options.tokens_per_step or ""))
    return several or options.days is not None or options.budget is not None


def _plan_offers(options: PlanOptions) -> int:
    """Prints offers and writes the best plan. Raises ConfigError for options of a single plan."""
    refuse_options(options, _OF_ONE_PLAN, "several plans to rank, or a deadline or budget",
                   "plan first, then the target that is best with it, and without the limits")  # fmt: skip
    console = open_console(sys.stderr if options.json else sys.stdout)
    ranked = plan_offers(
        options, with_vocab(options.run), options.on, tokens=options.tokens, tokens_per_step=options.tokens_per_step,
        shown=options.shown, console=console, as_json=options.json,
    )  # fmt: skip
    best = ranked.offers[0]
    if options.html:
        from meshwright.views.offer_page import offer_page  # only for a page

        offer_page(ranked.offers, ranked.refused, ranked.beyond).write(options.html)
    if options.out:
        write_plan(best.plan, best.plan.target, options.out, {})
        console.print(f"written: {options.out}", markup=False, soft_wrap=True)
    return 0


def _compile(options: PlanOptions, found: SearchResult, console: Console) -> "Outcome":
    from meshwright.cli.tune import prove_search, tune_search  # arithmetic alone needs no compiler

    outcome = prove_search(found, options.prove, options.limit, console)
    return tune_search(outcome, found.target, options.limit, console) if options.tune else outcome


def _search(options: PlanOptions) -> Planned:
    target, tokens, run = find_target(options.on), parse_count(options.tokens, "--tokens"), with_vocab(options.run)
    if options.tokens_per_step:
        run = with_tokens_per_step(run, parse_count(options.tokens_per_step, "--tokens-per-step"))
    shapes = [MeshShape.parse(text) for text in options.compare or ()]
    explained = MeshShape.parse(options.why) if options.why else None
    began = time.perf_counter()
    found = search(run, target, (explained,) if explained else ())
    seconds = time.perf_counter() - began
    if not found.plans:
        raise nothing_fits(run, found)
    compared = (_price(run, target, shapes[0]), _price(run, target, shapes[1])) if shapes else None
    offer = make_offer(found.plans[0], tokens, options.market())
    offloading = offloading_note(found)
    found_notes = [*notes(run, found), *([offloading] if offloading else [])]
    return Planned(found, seconds, tokens, explained, compared, offer, found_notes)


def _price(run: Run, target: Target, shape: MeshShape) -> Plan:
    best, smallest = price_mesh(run, target, shape)
    plan = best or smallest
    assert plan is not None  # price_mesh raises where there is neither
    return plan


def _to_json(found: SearchResult, shown: int) -> dict[str, Any]:
    return {
        "target": str(found.target),
        "priced": found.priced,
        "refused": found.refused,
        "plans": [{"name": p.name, "mesh": str(p.mesh), **prediction_json(p)} for p in found.plans[:shown]],
        "alternatives": [
            {"axes": a.axes, "best": a.best.name, "fits": a.fits, "reason": a.reason} for a in alternatives(found)
        ],
    }


def _print(console: Console, options: PlanOptions, planned: Planned) -> None:
    """Prints the ranking, the best plan, why the others lose, and what --why and --compare ask for."""
    found = planned.found
    print_plans(
        console, found, name=options.run.name, shown=options.shown, tokens=planned.tokens,
        search_seconds=planned.seconds,
    )  # fmt: skip
    for note in planned.notes:
        console.print(f"note: {note}\n", markup=False, highlight=False)
    print_best_plan(console, found.plans[0], found.target)
    print_training(console, planned.offer)
    print_alternatives(console, alternatives(found), options.shown)
    if planned.explained is not None:
        console.print(f"\n[bold]why {planned.explained}[/]")
        console.print(explain_mesh(found, planned.explained), markup=False)
    if planned.compared:
        console.print()
        print_comparison(console, *planned.compared)


def _write_files(options: PlanOptions, planned: Planned, outcome: "Outcome | None") -> None:
    """Writes --html and --out: the best plan, by its compiled step where one was compiled."""
    found = planned.found
    best = found.plans[0] if outcome is None or outcome.best.refused else outcome.best.plan
    if options.html:
        from meshwright.views.plan_page import plan_page  # only for a page

        sections = outcome.sections if outcome else ()
        plan_page(best, found, sections, planned.compared or ()).write(options.html)
    if options.out:
        write_plan(best, found.target, options.out, outcome.figures if outcome else {})

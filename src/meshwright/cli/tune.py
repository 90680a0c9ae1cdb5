"""Plans compiled for their hardware, one after another, and ranked again: `plan --prove` and `plan --tune`."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from meshwright.api.planning import Proof, prove_plan
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware.chips import Torus
from meshwright.hardware.compiler_options import AUTO, COMPILER_OPTIONS
from meshwright.hardware.targets import Target
from meshwright.planner.search import Plan, SearchResult, price_run, remat_policies
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.views.pages import Column, Section, Table
from meshwright.views.plain_table import plain_table

_KEPT = 0.998
"""Largest fraction of the best step so far with which a change is kept."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Result of tuning a plan."""

    start: Proof
    best: Proof
    tried: tuple[tuple[str, Proof], ...]
    """Name of each change, tried on top of those kept before, and its proof."""
    kept: frozenset[str]
    """Names of the changes that were kept."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Compiled plans of a search, for a plan file and for a page."""

    best: Proof
    """The plan with the fastest compiled step."""
    figures: dict[str, Any]
    """Figures of all that was compiled, as JSON."""
    sections: tuple[Section, ...]
    """Sections of a page with the same figures."""


def prove_search(found: SearchResult, count: int, limit: int, console: Console) -> Outcome:
    """Compiles the best `count` plans of a search, at least one, and prints their figures.

    limit: most seconds for each.
    """
    proofs = prove_best(list(found.plans[: max(1, count)]), found.target, limit, console)
    console.print()
    print_proofs(console, proofs)
    section = Section("Compiled for the hardware", [_table(PROVED, rows_of_proofs(proofs))])
    return Outcome(proofs[0], {"proofs": [proof.to_json() for proof in proofs]}, (section,))


def tune_search(outcome: Outcome, target: Target, limit: int, console: Console) -> Outcome:
    """Compiles variants of the best plan of `outcome` and prints them; returns the outcome with the best variant."""
    tuned = tune(outcome.best, target, limit, console)
    console.print()
    print_trials(console, tuned)
    rows = [{"change": name, "kept": name in tuned.kept, **proof.to_json()} for name, proof in tuned.tried]
    section = Section("Tuned, each change on top of those kept", [_table(TUNED, rows_of(tuned))])
    return Outcome(tuned.best, {**outcome.figures, "tuned": rows}, (*outcome.sections, section))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    columns = [Column(heading or "outcome", wide=not heading) for heading in headings]
    return Table(columns, rows, title="Compiled and simulated steps")


def prove_best(plans: list[Plan], target: Target, limit: int, console: Console) -> list[Proof]:
    """Compiles the plans; those that fit come first, the fastest first."""
    proofs = []
    for plan in plans:
        console.print(f"[dim]compiling {escape(plan.name)} for {target} ...[/]")
        proofs.append(prove_plan(plan, target, limit))
    return sorted(proofs, key=lambda p: (bool(p.refused), p.step_seconds or 0.0))


def trials(run: Run, target: Target) -> Iterator[tuple[str, Run]]:
    """Yields `run` with one thing changed, and the name of the change.

    The changes are the neighbouring remat policies, half and twice the microbatches, the dtype of gradient sums, block
    sizes of attention and loss, and compiler options.
    """
    training = run.training

    def changed(**fields: Any) -> Run:
        return dataclasses.replace(run, training=dataclasses.replace(training, **fields))

    policies = remat_policies(target)
    current = policies.index(training.remat)
    for remat in policies[max(0, current - 2) : current + 2]:
        if remat != training.remat:
            yield f"remat {remat}", changed(remat=remat)
    for microbatches in (training.microbatches // 2, 2 * training.microbatches):
        other = changed(microbatches=microbatches)
        if _is_legal(other):
            yield f"{microbatches} microbatch{'es' if microbatches > 1 else ''}", other
    if training.reduce_dtype == "float32":
        yield "gradients summed in bfloat16", changed(reduce_dtype="bfloat16")
    if isinstance(target.chip.interconnect, Torus):
        for block in (1024, 256):
            if training.seq % block == 0:
                yield f"attention in blocks of {block}", changed(attention_block=block)
    for mib in (256, 2048):
        yield f"logits of {mib} MiB", changed(logits_mib=mib)
    if AUTO in training.compiler_options and COMPILER_OPTIONS.get(target.name):
        others = tuple(word for word in training.compiler_options if word != AUTO)
        yield "the compiler's own options", changed(compiler_options=others)


def _is_legal(run: Run) -> bool:
    if run.training.microbatches < 1:
        return False
    try:
        place_run(run)
    except ConfigError:
        return False
    return True


def tune(proof: Proof, target: Target, limit: int, console: Console) -> Tuned:
    """Tries each change of `trials` on top of those that made the compiled step faster.

    Raises ConfigError where the plan itself has no proof.
    """
    if proof.step_seconds is None:
        raise ConfigError(f"tuning {proof.plan.name}", f"it cannot be compiled: {proof.refused}", "another plan")
    # Any variant that fits is better than a plan that does not.
    best, fastest = proof, math.inf if proof.refused else proof.step_seconds
    tried, kept = list[tuple[str, Proof]](), set[str]()
    names = [name for name, _ in trials(best.plan.run, target)]
    for name in names:
        changed = dict(trials(best.plan.run, target)).get(name)
        if changed is None:
            continue
        console.print(f"[dim]trying {name} ...[/]")
        variant = prove_plan(price_run(changed, target), target, limit)
        tried.append((name, variant))
        if variant.step_seconds is not None and not variant.refused and variant.step_seconds < fastest * _KEPT:
            best, fastest = variant, variant.step_seconds
            kept.add(name)
    return Tuned(proof, best, tuple(tried), frozenset(kept))


PROVED = ("plan", "step, planned", "step, simulated", "memory, planned", "memory, compiled", "compile time", "")
"""Headings of `rows_of_proofs`."""


def rows_of_proofs(proofs: list[Proof]) -> list[list[str]]:
    """Returns each plan with its planned and its compiled figures, as text."""
    return [
        [p.plan.name, f"{p.plan.estimate.seconds:.3g} s", _step(p), format_bytes(p.plan.estimate.bytes), _bytes(p),
         f"{p.compile_seconds:.0f} s" if p.compile_seconds else "", p.refused]
        for p in proofs
    ]  # fmt: skip


def print_proofs(console: Console, proofs: list[Proof]) -> None:
    """Prints the planned and the compiled figures of each plan."""
    table = plain_table(*PROVED, right=PROVED[1:-1], title="proved by the compiler; the step time is simulated")
    for row in rows_of_proofs(proofs):
        table.add_row(*map(escape, row))
    console.print(table)


TUNED = ("change", "step", "memory", "")
"""Headings of `rows_of`."""


def rows_of(tuned: Tuned) -> list[list[str]]:
    """Returns change, step, memory per device and outcome as text; the plan itself comes first."""
    rows = [["(as planned)", _step(tuned.start), _bytes(tuned.start), ""]]
    for name, proof in tuned.tried:
        rows.append([name, _step(proof), _bytes(proof), "kept" if name in tuned.kept else proof.refused])
    return rows


def print_trials(console: Console, tuned: Tuned) -> None:
    """Prints each change that was tried, and its compiled step."""
    table = plain_table(*TUNED, right=TUNED[1:-1], title="tuned, each change on top of those kept")
    for row in rows_of(tuned):
        table.add_row(*map(escape, row))
    console.print(table)
    start, best = tuned.start.step_seconds, tuned.best.step_seconds
    assert start is not None and best is not None
    console.print(f"best: {best:.3g} s, {best / start - 1:+.1%}: {escape(tuned.best.plan.name)}")


def _step(proof: Proof) -> str:
    return "" if proof.step_seconds is None else f"{proof.step_seconds:.3g} s"


def _bytes(proof: Proof) -> str:
    return "" if proof.peak_bytes is None else format_bytes(proof.peak_bytes)

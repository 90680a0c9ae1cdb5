"""Check for missed overlap: exposed collectives, although the program has independent work
that takes as long.

A collective is exposed while the device does nothing but wait for it. Work that neither makes its
operands nor needs its result could run in that time. In a loop there are three places for it:

    time ------------------------------------------------------------>
    beside    | makes operands | collective | needs result |              the same iteration
                               | free work  |
    ahead     | iteration i - 1             | iteration i  |   the collective of i moves into i - 1
              | free work   | collective    | needs result |
    behind    | iteration i    | iteration i + 1           |   the collective of i moves into i + 1
              | makes operands | collective | needs result |
                               | free work  |
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from xlacensus.findings import Finding
from xlacensus.formatting import format_step
from xlacensus.hlo.collectives import collective_in, done_of, overlapped_work, transfer_start
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.hlo.parser import Computation, Instruction, Module
from xlacensus.schedule import SimulatedSchedule, Span

MIN_EXPOSED = 0.01
"""Fraction of the step for which a collective must be exposed to be reported."""
_COMPUTE = ("matmul", "attention", "memory", "loop")
_SMALL = 0.05
"""Fraction of a loop's body that may depend on a collective which could end one iteration later."""


@dataclasses.dataclass(frozen=True)
class _Placement:
    """Where the work runs that could overlap with a collective,
    and how to move the collective there."""

    place: str
    fix: str


_BESIDE = _Placement(
    "beside it",
    "start it before that work and use its result after it; where the compiler orders them "
    "otherwise, an option that makes it asynchronous (v5e: none for sums; v5p, v6e: "
    "xla_tpu_enable_sparse_core_collective_offload_*; GPU: "
    "xla_gpu_enable_latency_hiding_scheduler)",
)
_AHEAD = _Placement(
    "in the iteration before",
    "gather ahead: carry the value of the next iteration through the loop, or unroll two "
    "iterations",
)
_BEHIND = _Placement(
    "in the iteration after",
    "carry the value through the loop and move it one iteration later, or unroll two iterations",
)


@dataclasses.dataclass(frozen=True)
class _MissedOverlap:
    """An exposed collective, and independent work that takes at least as long."""

    collective: Span
    entry: LedgerEntry
    placement: _Placement
    work: tuple[Span, ...]
    """Spans of the independent work, longest first."""

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the step for which the collective is exposed, all executions together."""
        return self.collective.exposed * self.collective.count


def lint_missed_overlap(
    module: Module, schedule: SimulatedSchedule, ledger: Sequence[LedgerEntry], min_sent: int = 0
) -> Iterator[Finding]:
    """Reports exposed collectives for which the program has independent computation of
    at least the exposed time.

    Work that overlaps with a collective already, or is counted for another finding, is not counted
    again. Collectives that send fewer than `min_sent` bytes in one execution of the program, or
    whose exposed time is below 1 % of the step, are left out. Collectives of one kind, mesh axes,
    source line and placement are one finding.
    """
    groups = defaultdict[tuple[str, str, str, _Placement], list[_MissedOverlap]](list)
    for missed in _missed_overlaps(module, schedule, ledger, min_sent):
        entry = missed.entry
        groups[entry.kind, entry.axes_label, entry.line, missed.placement].append(missed)
    for group in groups.values():
        seconds = sum(missed.exposed_seconds for missed in group)
        if seconds >= MIN_EXPOSED * schedule.step_seconds:
            yield _finding_of(group, seconds, schedule.step_seconds)


def _finding_of(group: Sequence[_MissedOverlap], seconds: float, step_seconds: float) -> Finding:
    """Describes collectives of one kind, axes, line and placement.
    seconds: for which they are exposed in a step."""
    first = group[0]
    entry = first.entry
    operand = entry.operands[0] if entry.operands else first.collective.instruction
    subject = f"{entry.kind} over {entry.axes_label} of {operand}"
    if len(group) > 1:
        subject += " and others"
    work = ", ".join(f"{s.instruction} ({format_step(s.seconds)})" for s in first.work[:2])
    if len(first.work) > 2:
        work += f" and {len(first.work) - 2} more"
    executions = sum(missed.collective.count for missed in group)
    reason = (
        f"the device waits {format_step(seconds)} ({executions} x, {seconds / step_seconds:.0%} of "
        f"the simulated step) while {work}, which does not depend on it, could run "
        f"{first.placement.place}"
    )
    sent = int(sum(missed.entry.sent for missed in group))
    return Finding("overlap", subject, reason, first.placement.fix, sent, entry.line)


def _missed_overlaps(
    module: Module, schedule: SimulatedSchedule, ledger: Sequence[LedgerEntry], min_sent: int
) -> Iterator[_MissedOverlap]:
    """Yields the exposed collectives that independent work could overlap with, the longest
    exposed first."""
    spans = {span.instruction: span for span in schedule.spans}
    entries = {entry.instruction: entry for entry in ledger}
    collectives = [i for i in module if i.name in spans and spans[i.name].kind == "collective"]
    claimed: set[str] = set()
    for start in collectives:
        if start.opcode.endswith("-start"):
            claimed.update(overlapped_work(start))
    exposed = [start for start in collectives if spans[start.name].exposed > 0]
    exposed.sort(key=lambda start: -spans[start.name].exposed * spans[start.name].count)
    for start in exposed:
        inner = collective_in(start)
        entry = None if inner is None else entries.get(inner.name)
        if entry is None or entry.sent < min_sent:
            continue
        found = _independent_work(start, spans, claimed)
        if found is not None:
            placement, work = found
            claimed.update(work)
            work_spans = tuple(spans[name] for name in work)
            yield _MissedOverlap(spans[start.name], entry, placement, work_spans)


def _independent_work(
    start: Instruction, spans: Mapping[str, Span], claimed: Collection[str]
) -> tuple[_Placement, list[str]] | None:
    """Returns work that takes as long as a collective is exposed, longest first, and where;
    None if there is too little.

    claimed: names of instructions that overlap with another collective.
    """
    computation = start.computation
    span = spans[start.name]
    makes_operands = _reachable([transfer_start(start), start], _operands)
    needs_result = _reachable([done_of(start) or start, start], _users)
    seconds: dict[Instruction, float] = {}
    for instruction in computation:
        if instruction.name in spans and spans[instruction.name].kind in _COMPUTE:
            seconds[instruction] = spans[instruction.name].seconds
    free = {i: time for i, time in seconds.items() if i.name not in claimed}

    work = _longest(free, makes_operands | needs_result, span.exposed)
    if work:
        return _BESIDE, work
    is_loop_body = span.count > 1 and not computation.is_entry
    if not is_loop_body:
        return None
    if _is_ready_early(computation, makes_operands):
        work = _longest(free, makes_operands, span.exposed)
        if work:
            return _AHEAD, work
    dependent = needs_result | _dependent_in_next_iteration(computation, needs_result)
    dependent_seconds = sum(time for i, time in seconds.items() if i in dependent)
    if dependent_seconds <= _SMALL * sum(seconds.values()):
        work = _longest(free, dependent, span.exposed)
        if work:
            return _BEHIND, work
    return None


def _longest(
    seconds: Mapping[Instruction, float], excluded: Collection[Instruction], needed: float
) -> list[str]:
    """Returns the fewest instructions that take at least `needed` seconds together;
    none if all take less."""
    candidates = [instruction for instruction in seconds if instruction not in excluded]
    candidates.sort(key=lambda instruction: -seconds[instruction])
    names: list[str] = []
    total = 0.0
    for instruction in candidates:
        names.append(instruction.name)
        total += seconds[instruction]
        if total >= needed:
            return names
    return []


def _operands(instruction: Instruction) -> Iterable[Instruction]:
    return instruction.operands


def _users(instruction: Instruction) -> Iterable[Instruction]:
    return instruction.users


def _reachable(
    ends: Iterable[Instruction], neighbours: Callable[[Instruction], Iterable[Instruction]]
) -> set[Instruction]:
    """Returns `ends` and the instructions that are reached from them by `neighbours`:
    by operands, or by users."""
    reached: set[Instruction] = set()
    pending = list(ends)
    while pending:
        instruction = pending.pop()
        if instruction not in reached:
            reached.add(instruction)
            pending += neighbours(instruction)
    return reached


def _dependent_in_next_iteration(
    body: Computation, needs_result: Collection[Instruction]
) -> set[Instruction]:
    """Returns the instructions of a loop's body that need a collective's result
    of the iteration before."""
    if body.root.opcode != "tuple":
        return set()
    carried = {index for index, made in enumerate(body.root.operands) if made in needs_result}
    readers = [instruction for instruction in body if _carried_element(instruction) in carried]
    return _reachable(readers, _users)


def _carried_element(instruction: Instruction) -> int | None:
    """Returns which element of a loop's state an instruction reads from the body's parameter;
    None for all others."""
    if instruction.opcode != "get-tuple-element":
        return None
    source = instruction.operand()
    if source is None or source.opcode != "parameter":
        return None
    return int(instruction.attributes["index"])


def _is_ready_early(body: Computation, makes_operands: Iterable[Instruction]) -> bool:
    """Whether what a collective in a loop's body needs is known an iteration ahead: the
    counter, and what never changes.

    The layers' weights, of which it takes a slice, are such a value;
    what the iteration before has computed is not.
    """
    if body.root.opcode != "tuple":
        return False
    for instruction in makes_operands:
        index = _carried_element(instruction)
        is_counter = str(instruction.shape) in ("s32[]", "u32[]", "s64[]")
        if index is None or is_counter:
            continue
        next_value = _uncopied(body.root.operand(index))
        if next_value is None or _carried_element(next_value) != index:
            return False
    return True


def _uncopied(value: Instruction | None) -> Instruction | None:
    """Returns what an instruction copies, through copies of copies;
    the instruction itself if it is no copy."""
    while (
        value is not None and value.opcode in ("copy", "bitcast", "opt-barrier") and value.operands
    ):
        value = value.operand()
    return value

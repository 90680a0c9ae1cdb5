"""Collectives that could overlap with computation and do not, read from a simulated schedule.

The device waits in them although the program has work that neither needs their result nor makes their operands: in
the same computation, or, in a loop, in the iteration before or after.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from meshwright.analysis.lint import Finding
from meshwright.analysis.simulate import SimulatedSchedule
from meshwright.analysis.timeline import Span
from meshwright.formatting import format_step
from meshwright.hlo.collectives import collective_in, done_of, overlapped_work, transfer_start
from meshwright.hlo.ledger import LedgerEntry
from meshwright.hlo.parser import Computation, Instruction, Module

MIN_EXPOSED = 0.01
"""Fraction of the step for which a collective must be exposed to be reported."""
_COMPUTE = ("matmul", "attention", "memory", "loop")
_SMALL = 0.05
"""Fraction of a loop's body that may depend on a collective which could end one iteration later."""

_FIXES = {
    "beside": "start it before that work and use its result after it; where the compiler orders them otherwise, an "
    "option that makes it asynchronous (v5e: xla_tpu_enable_async_collective_fusion; v5p, v6e: "
    "xla_tpu_enable_sparse_core_collective_offload_*; GPU: xla_gpu_enable_latency_hiding_scheduler)",
    "ahead": "gather ahead: carry the value of the next iteration through the loop "
    "(a Run: --training.gather-ahead layer), or unroll two iterations",
    "behind": "carry the value through the loop and move it one iteration later "
    "(a Run: --training.gather-ahead layer), or unroll two iterations",
}


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """An exposed collective at its place in the program."""

    computation: Computation
    start: Instruction
    span: Span

    @property
    def exposed(self) -> float:
        """Seconds of all executions in which nothing else runs."""
        return self.span.exposed * self.span.count


def lint_missed_overlap(
    module: Module, schedule: SimulatedSchedule, ledger: Sequence[LedgerEntry], min_sent: int = 0
) -> list[Finding]:
    """Reports exposed collectives for which the program has independent computation of at least the exposed time.

    Work that overlaps with a collective already, or is counted for another finding, is not counted again. Collectives
    that send fewer than `min_sent` bytes in one execution of the program, or whose exposed time is below 1 % of the
    step, are left out.
    """
    spans = {_instruction_name(span): span for span in schedule.spans}
    transfers = [
        _Transfer(computation, instruction, span)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if (span := spans.get(instruction.name)) is not None and span.kind == "collective" and span.exposed > 0
    ]
    entries = {entry.instruction: entry for entry in ledger}
    used = _overlapping(module, spans)
    groups: dict[tuple[str, str, str, str], list[tuple[_Transfer, float, str, LedgerEntry]]] = {}
    for transfer in sorted(transfers, key=lambda t: -t.exposed):
        inner = collective_in(module, transfer.start)
        entry = entries.get(inner.name) if inner is not None else None
        found = None if entry is None else _hidden_by(transfer, spans, used)
        if entry is not None and found is not None and entry.sent >= min_sent:
            how, work = found
            used |= set(work)
            label = ", ".join(f"{n} ({format_step(spans[n].seconds)})" for n in work[:2])
            label += f" and {len(work) - 2} more" if len(work) > 2 else ""
            key = (entry.kind, entry.axes_label, entry.line, how)
            groups.setdefault(key, []).append((transfer, transfer.exposed, label, entry))
    findings = []
    for (kind, axes, line, how), members in groups.items():
        exposed = sum(seconds for _, seconds, _, _ in members)
        if exposed < MIN_EXPOSED * schedule.step_seconds:
            continue
        first, _, label, entry = members[0]
        count = sum(t.span.count for t, _, _, _ in members)
        place = {"beside": "beside it", "ahead": "in the iteration before", "behind": "in the iteration after"}[how]
        findings.append(
            Finding(
                "overlap",
                f"{kind} over {axes} of {entry.operands[0] if entry.operands else first.start.name}"
                + (" and others" if len(members) > 1 else ""),
                f"the device waits {format_step(exposed)} ({count} x, {exposed / schedule.step_seconds:.0%} of the "
                f"simulated step) while {label}, which does not depend on it, could run {place}",
                _FIXES[how],
                int(sum(e.sent for _, _, _, e in members)),
                line,
            )
        )
    return findings


def _instruction_name(span: Span) -> str:
    """Returns the instruction of a span, whose name may begin with scopes."""
    return span.name.rpartition(": ")[2]


def _overlapping(module: Module, spans: Mapping[str, Span]) -> set[str]:
    """Returns the work that runs beside a collective in the schedule."""
    found: set[str] = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            span = spans.get(instruction.name)
            if span is not None and span.kind == "collective" and instruction.opcode.endswith("-start"):
                found |= set(overlapped_work(computation, instruction))
    return found


def _hidden_by(transfer: _Transfer, spans: Mapping[str, Span], used: set[str]) -> tuple[str, list[str]] | None:
    """Returns how a collective could be hidden, and the work that does it, longest first; None if nothing could."""
    computation, start = transfer.computation, transfer.start
    begin, done = transfer_start(computation, start), done_of(computation, start) or start
    before = _reachable(computation, [begin, start], backwards=True)
    after = _reachable(computation, [done, start], backwards=False)
    compute = {n: spans[n].seconds for n in computation.instructions if n in spans and spans[n].kind in _COMPUTE}
    free = [n for n in compute if n not in used]
    beside = _enough(transfer, [n for n in free if n not in before and n not in after], compute)
    if beside:
        return "beside", beside
    if transfer.span.count < 2 or computation.is_entry:
        return None
    if _is_ready_early(computation, before):
        ahead = _enough(transfer, [n for n in free if n not in before], compute)
        if ahead:
            return "ahead", ahead
    late = _used_later(computation, after)
    if sum(compute[n] for n in compute if n in late) <= _SMALL * sum(compute.values()):
        behind = _enough(transfer, [n for n in free if n not in late], compute)
        if behind:
            return "behind", behind
    return None


def _enough(transfer: _Transfer, names: Iterable[str], compute: Mapping[str, float]) -> list[str]:
    """Returns the fewest of the named instructions that take as long as the collective is exposed; none if too few."""
    chosen: list[str] = []
    seconds = 0.0
    for name in sorted(names, key=lambda n: -compute[n]):
        if seconds >= transfer.span.exposed:
            break
        chosen.append(name)
        seconds += compute[name]
    return chosen if seconds >= transfer.span.exposed else []


def _reachable(computation: Computation, ends: Iterable[Instruction], backwards: bool) -> set[str]:
    """Returns the instructions on which `ends` depend, or that depend on them; `ends` included."""
    found: set[str] = set()
    pending = [instruction.name for instruction in ends]
    while pending:
        name = pending.pop()
        if name in found or name not in computation.instructions:
            continue
        found.add(name)
        instruction = computation.instructions[name]
        pending += instruction.operands if backwards else [user.name for user in computation.users[name]]
    return found


def _used_later(computation: Computation, after: set[str]) -> set[str]:
    """Returns the instructions of a loop's body that depend on a collective in its own iteration or the next."""
    root, found = computation.root, set(after)
    carried = {i for i, name in enumerate(root.operands) if name in after} if root.opcode == "tuple" else set()
    for instruction in computation.instructions.values():
        if instruction.opcode == "get-tuple-element" and int(instruction.attributes["index"]) in carried:
            source = computation.instructions.get(instruction.operands[0])
            if source is not None and source.opcode == "parameter":
                found |= _reachable(computation, [instruction], backwards=False)
    return found


def _is_ready_early(computation: Computation, before: set[str]) -> bool:
    """Whether what a collective in a loop's body needs is known an iteration ahead: the counter, what never changes.

    The layers' weights, of which it takes a slice, are such a value; what the iteration before has computed is not.
    """
    root = computation.root
    if root.opcode != "tuple":
        return False
    for name in before:
        instruction = computation.instructions[name]
        if instruction.opcode != "get-tuple-element":
            continue
        index = int(instruction.attributes["index"])
        source = computation.instructions.get(instruction.operands[0])
        if source is None or source.opcode != "parameter":
            continue
        carried = computation.instructions.get(root.operands[index]) if index < len(root.operands) else None
        unchanged = carried is not None and _origin(computation, carried) == index
        counter = str(instruction.shape) in ("s32[]", "u32[]", "s64[]")
        if not unchanged and not counter:
            return False
    return True


def _origin(computation: Computation, instruction: Instruction) -> int | None:
    """Returns the element of the loop's state that an instruction passes on unchanged; None if it is another value."""
    current: Instruction | None = instruction
    while current is not None and current.opcode in ("copy", "bitcast", "opt-barrier") and current.operands:
        current = computation.instructions.get(current.operands[0])
    if current is None or current.opcode != "get-tuple-element":
        return None
    source = computation.instructions.get(current.operands[0])
    return int(current.attributes["index"]) if source is not None and source.opcode == "parameter" else None

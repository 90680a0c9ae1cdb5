"""Checks of a program's collectives: those that its source does not contain, and those that could overlap and do not.

Written and compiled collectives are matched by source line, axes and bytes. The device waits for an exposed collective
although the program has work that neither needs its result nor makes its operands: in the same computation, or, in a
loop, in the iteration before or after.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set

from xlacensus.formatting import format_step
from xlacensus.hlo.collectives import collective_in, done_of, overlapped_work, transfer_start
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.hlo.parser import Computation, Instruction, Module
from xlacensus.jaxprs import CONSTRAINED, JaxprCollective
from xlacensus.lints import Finding
from xlacensus.peak_memory import Argument
from xlacensus.schedule import SimulatedSchedule, Span

MIN_SENT_BYTES = 1024
"""Bytes sent in one execution of the program below which an inserted collective is not reported: scalars, norms."""
_WIDENED = 2
"""XLA:CPU sends bfloat16 as float32: compiled bytes over those that are written."""

_INSERTED_FIXES = {
    "all-gather": "shard the operands of the operation alike, or gather the value once where it is made",
    "all-reduce": "the dimension that is summed over is sharded: shard another one, or write the sum (psum)",
    "reduce-scatter": "the dimension that is summed over is sharded: shard another one, or write psum_scatter",
    "all-to-all": "the value changes its sharded dimension: constrain it once, to the sharding of its next use",
    "collective-permute": "shards are shifted or reordered: slice, pad and concatenate along unsharded dimensions",
}

_Key = tuple[str, frozenset[str]]


def lint_unexpected_collectives(
    entries: Sequence[LedgerEntry],
    written: Sequence[JaxprCollective],
    arguments: Sequence[Argument] = (),
    min_sent: int = MIN_SENT_BYTES,
    results: Collection[tuple[int, ...]] = (),
) -> list[Finding]:
    """Reports collectives that the compiler inserted to reshard a value.

    A compiled collective is known if its source line contains one over the same axes with at least its bytes, whatever
    the compiler made of it, or if the written ones of its kind and axes, moved and combined, account for its bytes. A
    written gather of 256 KiB does not hide another of 32 MiB. What the layout asks for and leaves to the compiler is
    known too: sums of gradients over devices that have the same shard of an argument or of one of its layers (data
    parallelism), gathers of a sharded parameter for a product (FSDP), and sums of products whose result has a sharding
    constraint (tensor parallelism).

    min_sent: bytes that a device sends in one execution below which nothing is reported.  results: shapes of the
    function's results; an argument with one of them is taken for a parameter, which is returned updated or derived.
    """
    shapes, asked = (
        _shard_sizes(arguments),
        {line for w in written if w.kind == CONSTRAINED for line in w.lines},
    )
    known = (
        e.axes == ()
        or _gathers_parameter(e, arguments, results)
        # A sum of the backward pass: of arrays that have the sizes of arguments, in any order, or of a product.
        or (_is_backward_sum(e) and all(_sizes(_dims(operand)) in shapes for operand in e.operands))
        or (bool(asked) and _is_backward_sum(e) and _PRODUCT.search(e.op_name) is not None)
        or (_family(e.kind) == "all-reduce" and e.line in asked)
        or _is_made_of(e, written)
        for e in entries
    )
    unknown = _unmatched(
        [e for e, is_known in zip(entries, known, strict=True) if not is_known], written
    )
    inserted = defaultdict[tuple[str, str, str], list[LedgerEntry]](list)
    for entry in unknown:
        inserted[entry.kind, entry.axes_label, entry.line].append(entry)
    findings: list[Finding] = []
    for (kind, axes_label, line), group in inserted.items():
        sent, count, payload = (
            sum(n) for n in zip(*((e.sent, e.count, e.total) for e in group), strict=True)
        )
        operation = group[0].op_name.rpartition("/")[2].strip("()") or "an operation"
        found = Finding(
            "unexpected",
            f"{kind} over {axes_label} of {group[0].operands[0]}"
            + (" and others" if len(group) > 1 else ""),
            f"not in the function: the compiler inserted it, {count} x, {payload} bytes in all, to reshard a value "
            f"for {operation}",
            _INSERTED_FIXES.get(
                kind, "shard the operands as the operation needs them, or write the collective"
            ),
            int(sent),
            line,
        )
        findings += [found] if sent >= min_sent else []
    return sorted(findings, key=lambda f: -f.bytes)


def _unmatched(
    entries: Sequence[LedgerEntry], written: Sequence[JaxprCollective]
) -> list[LedgerEntry]:
    left: defaultdict[_Key, float] = defaultdict(float)
    written = [w for w in written if w.kind != CONSTRAINED]
    for w in written:
        left[_family(w.kind), frozenset(w.axes)] += _WIDENED * w.payload
    rest: list[LedgerEntry] = []
    for entry in entries:
        # Groups that are no product of axes are known only by their line.
        here = [w for w in written if entry.line in w.lines]
        if entry.axes is not None:
            here = [
                w for w in here if w.kind == "reshard" or frozenset(w.axes) == frozenset(entry.axes)
            ]
        if any(w.kind == "reshard" for w in here):
            continue
        # Loops that are not scans run more often than the jaxpr tells: one execution is compared.
        if entry.payload <= _WIDENED * sum(w.payload / w.count for w in here):
            left[_family(entry.kind), frozenset(entry.axes or ())] -= entry.total
        else:
            rest.append(entry)
    unknown: list[LedgerEntry] = []
    for entry in sorted(rest, key=lambda e: e.total):
        key = _family(entry.kind), frozenset(entry.axes or ())
        if entry.axes is not None and left[key] >= entry.total:
            left[key] -= entry.total
        else:
            unknown.append(entry)
    return unknown


def _is_made_of(entry: LedgerEntry, written: Sequence[JaxprCollective]) -> bool:
    """Whether the compiler made an entry of a written collective, which it takes apart.

    Those that reshard a value have the name of the operation that needs it. Parts of another collective have none:
    groups of a factor of its axis, or shifts of the rows by which its tiles and the shards differ (1,222 of 2,374).
    """
    if entry.op_name or entry.line:
        return False
    return any(
        w.kind != CONSTRAINED
        and entry.payload <= _WIDENED * w.payload / w.count
        and (entry.axes is None or set(entry.axes) <= set(w.axes))
        for w in written
    )


def _family(kind: str) -> str:
    """A backend may turn an all-reduce into a reduce-scatter, or the other way round."""
    return "all-reduce" if kind == "reduce-scatter" else kind


_Sizes = tuple[int, ...]


def _is_backward_sum(entry: LedgerEntry) -> bool:
    return _family(entry.kind) == "all-reduce" and "transpose(" in entry.op_name


_PRODUCT = re.compile(r"(?:dot_general|conv_general_dilated|ragged_dot_general|->\w*)[^/]*$")
_READ = re.compile(
    r"/(?:convert_element_type|squeeze|dynamic_slice|slice|transpose|reshape|gather|copy)[^/]*$"
)
"""Last part of the name of an operation that only reads an argument, or takes a layer of it."""


def _gathers_parameter(
    entry: LedgerEntry, arguments: Sequence[Argument], results: Collection[tuple[int, ...]]
) -> bool:
    """Whether an entry gathers the shards of a parameter for a product, beside another argument that is sharded too.

    Where nothing else is sharded, no device has work of its own: the gather is no FSDP.
    """
    # A gather of the argument itself has no line where no single operation asked for it.
    whole = not entry.line and "/" not in entry.op_name
    if entry.kind != "all-gather" or not (
        whole or _PRODUCT.search(entry.op_name) or _READ.search(entry.op_name)
    ):
        return False
    sharded = [a for a in arguments if a.local_shape != a.shape]
    trained = [a for a in sharded if a.category == "parameters" or a.shape in results]
    gathered = [
        a for a in trained if all(_sizes(_dims(o)) in _shard_sizes([a]) for o in entry.operands[:1])
    ]
    return bool(gathered) and len(sharded) > 1


def _shard_sizes(arguments: Sequence[Argument]) -> set[_Sizes]:
    found: set[_Sizes] = {()}
    for argument in arguments:
        choices = [
            {n, whole} for n, whole in zip(argument.local_shape, argument.shape, strict=False)
        ]
        for dims in itertools.product(*choices):
            found |= {_sizes(dims), _sizes(dims[1:])}
    return found


def _dims(operand: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", operand.partition("[")[2])]


def _sizes(dims: Iterable[int]) -> _Sizes:
    """Returns the dimensions of an array without their order, which a transposed gradient changes."""
    return tuple(sorted(n for n in dims if n > 1))


MIN_EXPOSED = 0.01
"""Fraction of the step for which a collective must be exposed to be reported."""
_COMPUTE = ("matmul", "attention", "memory", "loop")
_SMALL = 0.05
"""Fraction of a loop's body that may depend on a collective which could end one iteration later."""

_OVERLAPS = {
    "beside": (
        "beside it",
        "start it before that work and use its result after it; where the compiler orders them otherwise, an "
        "option that makes it asynchronous (v5e: none for sums; v5p, v6e: "
        "xla_tpu_enable_sparse_core_collective_offload_*; GPU: xla_gpu_enable_latency_hiding_scheduler)",
    ),
    "ahead": (
        "in the iteration before",
        "gather ahead: carry the value of the next iteration through the loop, "
        "or unroll two iterations",
    ),
    "behind": (
        "in the iteration after",
        "carry the value through the loop and move it one iteration later, "
        "or unroll two iterations",
    ),
}
"""Where the work could run that hides a collective, and the fix."""


def lint_missed_overlap(
    module: Module, schedule: SimulatedSchedule, ledger: Sequence[LedgerEntry], min_sent: int = 0
) -> Iterator[Finding]:
    """Reports exposed collectives for which the program has independent computation of at least the exposed time.

    Work that overlaps with a collective already, or is counted for another finding, is not counted again. Collectives
    that send fewer than `min_sent` bytes in one execution of the program, or whose exposed time is below 1 % of the
    step, are left out.
    """
    spans = {span.instruction: span for span in schedule.spans}
    entries = {entry.instruction: entry for entry in ledger}
    timed = [
        (i, spans[i.name]) for i in module if i.name in spans and spans[i.name].kind == "collective"
    ]
    used = {work for i, _ in timed if i.opcode.endswith("-start") for work in overlapped_work(i)}
    exposed = [(i, span) for i, span in timed if span.exposed > 0]
    groups = defaultdict[tuple[str, str, str, str], list[tuple[Span, str, LedgerEntry]]](list)
    for start, span in sorted(exposed, key=lambda pair: -pair[1].exposed * pair[1].count):
        inner = collective_in(start)
        entry = entries.get(inner.name) if inner is not None else None
        found = None if entry is None else _hidden_by(start, spans, used)
        if entry is not None and found is not None and entry.sent >= min_sent:
            how, work = found
            used |= set(work)
            label = ", ".join(f"{n} ({format_step(spans[n].seconds)})" for n in work[:2])
            label += f" and {len(work) - 2} more" if len(work) > 2 else ""
            groups[entry.kind, entry.axes_label, entry.line, how].append((span, label, entry))
    for (kind, axes, line, how), members in groups.items():
        seconds = sum(span.exposed * span.count for span, _, _ in members)
        if seconds < MIN_EXPOSED * schedule.step_seconds:
            continue
        first, label, entry = members[0]
        place, fix = _OVERLAPS[how]
        yield Finding(
            "overlap",
            f"{kind} over {axes} of {entry.operands[0] if entry.operands else first.instruction}"
            + (" and others" if len(members) > 1 else ""),
            f"the device waits {format_step(seconds)} ({sum(span.count for span, _, _ in members)} x, "
            f"{seconds / schedule.step_seconds:.0%} of the simulated step) while {label}, which does not depend on it, "
            f"could run {place}",
            fix,
            int(sum(entry.sent for _, _, entry in members)),
            line,
        )


def _hidden_by(
    start: Instruction, spans: Mapping[str, Span], used: set[str]
) -> tuple[str, list[str]] | None:
    """Returns how a collective could be hidden, and the work that does it, longest first; None if nothing could."""
    computation, span = start.computation, spans[start.name]
    before = _reachable([transfer_start(start), start], lambda i: i.operands)
    after = _reachable([done_of(start) or start, start], lambda i: i.users)
    compute = {
        i: spans[i.name].seconds
        for i in computation
        if i.name in spans and spans[i.name].kind in _COMPUTE
    }

    def enough(excluded: Set[Instruction]) -> list[str]:
        """Returns the fewest instructions that take as long as the collective is exposed; none if all are too few."""
        free = sorted(
            (i for i in compute if i.name not in used and i not in excluded),
            key=lambda i: -compute[i],
        )
        sums = itertools.accumulate(compute[i] for i in free)
        count = next((n for n, seconds in enumerate(sums, 1) if seconds >= span.exposed), 0)
        return [i.name for i in free[:count]]

    if beside := enough(before | after):
        return "beside", beside
    if span.count < 2 or computation.is_entry:
        return None
    if _is_ready_early(computation, before) and (ahead := enough(before)):
        return "ahead", ahead
    # What depends on the collective in its own iteration or the next.
    root, late = computation.root, set(after)
    carried = (
        {i for i, made in enumerate(root.operands) if made in after}
        if root.opcode == "tuple"
        else set()
    )
    late |= _reachable(
        (i for i in computation if _carried_element(i) in carried), lambda i: i.users
    )
    is_small = sum(seconds for i, seconds in compute.items() if i in late) <= _SMALL * sum(
        compute.values()
    )
    if is_small and (behind := enough(late)):
        return "behind", behind
    return None


def _reachable(
    ends: Iterable[Instruction], neighbours: Callable[[Instruction], Iterable[Instruction]]
) -> set[Instruction]:
    """Returns the instructions that follow from `ends` by operands, or by users; `ends` included."""
    found, pending = set[Instruction](), list(ends)
    while pending:
        instruction = pending.pop()
        if instruction not in found:
            found.add(instruction)
            pending += neighbours(instruction)
    return found


def _carried_element(instruction: Instruction) -> int | None:
    """Returns which element of the loop's state an instruction takes from the parameter; None for all others."""
    source = instruction.operand() if instruction.opcode == "get-tuple-element" else None
    return (
        int(instruction.attributes["index"])
        if source is not None and source.opcode == "parameter"
        else None
    )


def _is_ready_early(computation: Computation, before: set[Instruction]) -> bool:
    """Whether what a collective in a loop's body needs is known an iteration ahead: the counter, what never changes.

    The layers' weights, of which it takes a slice, are such a value; what the iteration before has computed is not.
    """
    if computation.root.opcode != "tuple":
        return False
    for instruction in before:
        index = _carried_element(instruction)
        if index is None or str(instruction.shape) in ("s32[]", "u32[]", "s64[]"):
            continue
        carried = computation.root.operand(index)
        while (
            carried is not None
            and carried.opcode in ("copy", "bitcast", "opt-barrier")
            and carried.operands
        ):
            carried = carried.operand()
        if carried is None or _carried_element(carried) != index:
            return False
    return True

"""Collectives that the source does not contain: written and compiled ones matched by source line, axes and bytes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshwright.analysis.jaxpr_collectives import JaxprCollective
from meshwright.analysis.lint import Finding
from meshwright.analysis.memory import Argument
from meshwright.hlo.ledger import LedgerEntry

MIN_SENT_BYTES = 1024
"""Bytes sent in one execution of the program below which an inserted collective is not reported: scalars, norms."""
_WIDENED = 2
"""XLA:CPU sends bfloat16 as float32: compiled bytes over those that are written."""

_FIXES = {
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
) -> list[Finding]:
    """Reports collectives that the compiler inserted to reshard a value.

    A compiled collective is known if its source line contains one over the same axes with at least its bytes, whatever
    the compiler made of it, or if the written ones of its kind and axes, moved and combined, account for its bytes. A
    written gather of 256 KiB does not hide another of 32 MiB. The sums of gradients over devices that have the same
    shard of an argument, which data parallelism without `shard_map` leaves to the compiler, are known too.

    min_sent: bytes that a device sends in one execution below which nothing is reported.
    """
    unknown = _unmatched([e for e in entries if e.axes != () and not _sums_gradients(e, arguments)], written)
    inserted: dict[tuple[str, str, str], list[LedgerEntry]] = {}
    for entry in unknown:
        inserted.setdefault((entry.kind, entry.axes_label, entry.line), []).append(entry)
    findings: list[Finding] = []
    for (kind, axes_label, line), group in inserted.items():
        sent, count, payload = (sum(n) for n in zip(*((e.sent, e.count, e.total) for e in group), strict=True))
        if sent < min_sent:
            continue
        operation = group[0].op_name.rpartition("/")[2].strip("()") or "an operation"
        findings.append(
            Finding(
                "unexpected",
                f"{kind} over {axes_label} of {group[0].operands[0]}" + (" and others" if len(group) > 1 else ""),
                f"not in the function: the compiler inserted it, {count} x, {payload} bytes in all, to reshard a value "
                f"for {operation}",
                _FIXES.get(kind, "shard the operands as the operation needs them, or write the collective"),
                int(sent),
                line,
            )
        )
    return sorted(findings, key=lambda f: -f.bytes)


def _unmatched(entries: Sequence[LedgerEntry], written: Sequence[JaxprCollective]) -> list[LedgerEntry]:
    """Returns the entries that no written collective accounts for."""
    left: defaultdict[_Key, float] = defaultdict(float)
    for w in written:
        left[_family(w.kind), frozenset(w.axes)] += _WIDENED * w.payload
    rest: list[LedgerEntry] = []
    for entry in entries:
        here = [w for w in written if entry.line in w.lines and _same_axes(entry, w)]
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


def _family(kind: str) -> str:
    """A backend may turn an all-reduce into a reduce-scatter, or the other way round."""
    return "all-reduce" if kind == "reduce-scatter" else kind


def _same_axes(entry: LedgerEntry, written: JaxprCollective) -> bool:
    """Whether both span the same axes; groups that are no product of axes are known by their line alone."""
    if entry.axes is None or written.kind == "reshard":
        return True
    return frozenset(entry.axes) == frozenset(written.axes)


def _sums_gradients(entry: LedgerEntry, arguments: Sequence[Argument]) -> bool:
    """Whether an entry sums arrays of the backward pass that have the local sizes of arguments, in any order."""
    if _family(entry.kind) != "all-reduce" or "transpose(" not in entry.op_name:
        return False
    shapes = {_sizes(a.local_shape) for a in arguments} | {()}
    return all(_sizes(map(int, re.findall(r"\d+", o.partition("[")[2]))) in shapes for o in entry.operands)


def _sizes(dims: Iterable[int]) -> tuple[int, ...]:
    """Returns the dimensions of an array without their order, which a transposed gradient changes."""
    return tuple(sorted(n for n in dims if n > 1))

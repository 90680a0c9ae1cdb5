"""Collectives that the source does not contain: written and compiled ones matched by source line, axes and bytes."""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from meshwright.analysis.jaxpr_collectives import CONSTRAINED, JaxprCollective
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
    shapes, asked = _shard_sizes(arguments), {line for w in written if w.kind == CONSTRAINED for line in w.lines}
    known = (
        e.axes == ()
        or _sums_gradients(e, shapes)
        or _gathers_parameter(e, arguments, results)
        or (_family(e.kind) == "all-reduce" and bool(asked) and (e.line in asked or _is_backward_product(e)))
        for e in entries
    )
    unknown = _unmatched([e for e, is_known in zip(entries, known, strict=True) if not is_known], written)
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
    written = [w for w in written if w.kind != CONSTRAINED]
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


_Sizes = tuple[int, ...]


def _sums_gradients(entry: LedgerEntry, shapes: set[_Sizes]) -> bool:
    """Whether an entry sums arrays of the backward pass that have the sizes of arguments, in any order."""
    if _family(entry.kind) != "all-reduce" or "transpose(" not in entry.op_name:
        return False
    return all(_sizes(_dims(operand)) in shapes for operand in entry.operands)


_PRODUCT = re.compile(r"(?:dot_general|conv_general_dilated|ragged_dot_general|->\w*)[^/]*$")
_READ = re.compile(r"/(?:convert_element_type|squeeze|dynamic_slice|slice|transpose|reshape|gather|copy)[^/]*$")
"""Last part of the name of an operation that only reads an argument, or takes a layer of it."""


def _is_backward_product(entry: LedgerEntry) -> bool:
    """Whether an entry sums a product of the backward pass, as where the forward product has split columns."""
    return "transpose(" in entry.op_name and _PRODUCT.search(entry.op_name) is not None


def _gathers_parameter(entry: LedgerEntry, arguments: Sequence[Argument], results: Collection[tuple[int, ...]]) -> bool:
    """Whether an entry gathers the shards of a parameter for a product, beside another argument that is sharded too.

    Where nothing else is sharded, no device has work of its own: the gather is no FSDP.
    """
    # A gather of the argument itself has no line where no single operation asked for it.
    whole = not entry.line and "/" not in entry.op_name
    if entry.kind != "all-gather" or not (whole or _PRODUCT.search(entry.op_name) or _READ.search(entry.op_name)):
        return False
    sharded = [a for a in arguments if a.local_shape != a.shape]
    trained = [a for a in sharded if a.category == "parameters" or a.shape in results]
    gathered = [a for a in trained if all(_sizes(_dims(o)) in _shard_sizes([a]) for o in entry.operands[:1])]
    return bool(gathered) and len(sharded) > 1


def _shard_sizes(arguments: Sequence[Argument]) -> set[_Sizes]:
    """Returns the sizes of arguments on a device, with any of their dimensions gathered, whole and layer by layer."""
    found: set[_Sizes] = {()}
    for argument in arguments:
        choices = [{n, whole} for n, whole in zip(argument.local_shape, argument.shape, strict=False)]
        for dims in itertools.product(*choices):
            found |= {_sizes(dims), _sizes(dims[1:])}
    return found


def _dims(operand: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", operand.partition("[")[2])]


def _sizes(dims: Iterable[int]) -> _Sizes:
    """Returns the dimensions of an array without their order, which a transposed gradient changes."""
    return tuple(sorted(n for n in dims if n > 1))

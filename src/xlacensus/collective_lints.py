"""Check for collectives that a function's source does not contain: the compiler inserted them
to reshard a value.

Written and compiled collectives are matched by source line, mesh axes and bytes.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from xlacensus.findings import Finding
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.jaxprs import CONSTRAINED, JaxprCollective
from xlacensus.peak_memory import Argument

MIN_SENT_BYTES = 1024
"""Bytes sent in one execution of the program below which an inserted collective is not
reported: scalars, norms."""
_WIDENED = 2
"""XLA:CPU sends bfloat16 as float32: compiled bytes over those that are written."""

_INSERTED_FIXES = {
    "all-gather": "shard the operands of the operation alike, or gather the value once where it "
    "is made",
    "all-reduce": "the dimension that is summed over is sharded: shard another one, or write "
    "the sum (psum)",
    "reduce-scatter": "the dimension that is summed over is sharded: shard another one, or write "
    "psum_scatter",
    "all-to-all": "the value changes its sharded dimension: constrain it once, to the sharding of "
    "its next use",
    "collective-permute": (
        "shards are shifted or reordered: slice, pad and concatenate along unsharded dimensions"
    ),
}

_OTHER_FIX = "shard the operands as the operation needs them, or write the collective"
_Key = tuple[str, frozenset[str]]
"""Kind of a collective, with reduce-scatters as all-reduces, and its mesh axes."""


def lint_unexpected_collectives(
    entries: Sequence[LedgerEntry],
    written: Sequence[JaxprCollective],
    arguments: Sequence[Argument] = (),
    min_sent: int = MIN_SENT_BYTES,
    results: Collection[tuple[int, ...]] = (),
) -> list[Finding]:
    """Reports collectives that the compiler inserted to reshard a value.

    A compiled collective is known if its source line contains one over the same axes with at least
    its bytes, whatever the compiler made of it, or if the written ones of its kind and axes, moved
    and combined, account for its bytes. A written gather of 256 KiB does not hide another of 32
    MiB. What the layout asks for and leaves to the compiler is known too: sums of gradients over
    devices that have the same shard of an argument or of one of its layers (data parallelism),
    gathers of a sharded parameter for a product (FSDP), and sums of products whose result has a
    sharding constraint (tensor parallelism).

    min_sent: bytes that a device sends in one execution below which nothing is reported.
    results: shapes of the function's results; an argument with one of them is taken for a
    parameter, which is returned updated or derived.
    """
    expected = _Expected(written, arguments, results)
    unexplained = [entry for entry in entries if not expected.explains(entry)]
    groups = defaultdict[tuple[str, str, str], list[LedgerEntry]](list)
    for entry in _unmatched(unexplained, written):
        groups[entry.kind, entry.axes_label, entry.line].append(entry)
    findings = [_inserted(group) for group in groups.values()]
    large = [finding for finding in findings if finding.bytes >= min_sent]
    return sorted(large, key=lambda finding: -finding.bytes)


class _Expected:
    """Collectives that a function's source and the shardings of its arguments ask for."""

    def __init__(
        self,
        written: Sequence[JaxprCollective],
        arguments: Sequence[Argument],
        results: Collection[tuple[int, ...]],
    ):
        self._written = written
        self._arguments = arguments
        self._results = results
        self._shard_sizes = _shard_sizes(arguments)
        self._constrained_lines: set[str] = set()
        for collective in written:
            if collective.kind == CONSTRAINED:
                self._constrained_lines.update(collective.lines)

    def explains(self, entry: LedgerEntry) -> bool:
        """Whether a collective of the ledger is one that the source or the layout asks for."""
        is_among_one_device = entry.axes == ()
        if is_among_one_device or _gathers_parameter(entry, self._arguments, self._results):
            return True
        if _is_backward_sum(entry) and self._sums_gradient(entry):
            return True
        if _family(entry.kind) == "all-reduce" and entry.line in self._constrained_lines:
            return True
        return _is_made_of(entry, self._written)

    def _sums_gradient(self, entry: LedgerEntry) -> bool:
        """Whether a sum of the backward pass is of arrays with the sizes of arguments,
        or of a product."""
        if all(_sizes(_dims(operand)) in self._shard_sizes for operand in entry.operands):
            return True
        return bool(self._constrained_lines) and _PRODUCT.search(entry.op_name) is not None


def _inserted(group: Sequence[LedgerEntry]) -> Finding:
    """Describes inserted collectives of one kind, mesh axes and source line."""
    first = group[0]
    sent = sum(entry.sent for entry in group)
    count = sum(entry.count for entry in group)
    payload = sum(entry.total for entry in group)
    operation = first.op_name.rpartition("/")[2].strip("()") or "an operation"
    subject = f"{first.kind} over {first.axes_label} of {first.operands[0]}"
    if len(group) > 1:
        subject += " and others"
    return Finding(
        "unexpected",
        subject,
        f"not in the function: the compiler inserted it, {count} x, {payload} bytes in all, to "
        f"reshard a value for {operation}",
        _INSERTED_FIXES.get(first.kind, _OTHER_FIX),
        int(sent),
        first.line,
    )


def _unmatched(
    entries: Sequence[LedgerEntry], written: Sequence[JaxprCollective]
) -> list[LedgerEntry]:
    """Returns the entries that no written collective accounts for, smallest first.

    Each written collective has a budget of bytes: its own, twice, since XLA:CPU sends bfloat16 as
    float32. Entries on the line of a written one over their axes take theirs from it; others,
    smallest first, from what remains of their kind and axes.
    """
    budget: defaultdict[_Key, float] = defaultdict(float)
    sending = [collective for collective in written if collective.kind != CONSTRAINED]
    for collective in sending:
        budget[_family(collective.kind), frozenset(collective.axes)] += (
            _WIDENED * collective.payload
        )
    elsewhere: list[LedgerEntry] = []
    for entry in entries:
        same_line = [collective for collective in sending if _is_on_line(entry, collective)]
        if any(collective.kind == "reshard" for collective in same_line):
            continue
        # Loops that are not scans run more often than the jaxpr tells: one execution is compared.
        written_once = sum(collective.payload / collective.count for collective in same_line)
        if entry.payload <= _WIDENED * written_once:
            budget[_key_of(entry)] -= entry.total
        else:
            elsewhere.append(entry)
    unmatched: list[LedgerEntry] = []
    for entry in sorted(elsewhere, key=lambda entry: entry.total):
        if entry.axes is not None and budget[_key_of(entry)] >= entry.total:
            budget[_key_of(entry)] -= entry.total
        else:
            unmatched.append(entry)
    return unmatched


def _is_on_line(entry: LedgerEntry, collective: JaxprCollective) -> bool:
    """Whether a written collective is on an entry's source line,
    and over its mesh axes where these are known."""
    if entry.line not in collective.lines:
        return False
    if entry.axes is None or collective.kind == "reshard":
        return True
    return frozenset(collective.axes) == frozenset(entry.axes)


def _key_of(entry: LedgerEntry) -> _Key:
    return _family(entry.kind), frozenset(entry.axes or ())


def _is_made_of(entry: LedgerEntry, written: Sequence[JaxprCollective]) -> bool:
    """Whether the compiler made an entry of a written collective, which it takes apart.

    Those that reshard a value have the name of the operation that needs it. Parts of another
    collective have none: groups of a factor of its axis, or shifts of the rows by which its tiles
    and the shards differ (1,222 of 2,374).
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
    """Whether an entry gathers the shards of a parameter
    for a product, beside another argument that is sharded too.

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
    """Returns the dimensions of an array without their order,
    which a transposed gradient changes."""
    return tuple(sorted(n for n in dims if n > 1))

"""Collective instructions: their kind, the devices of a group, the bytes they move,
and what runs meanwhile.

XLA writes replica groups in three ways: as a list (`{{0,1},{2,3}}`), as a reshaped and transposed
iota (`[2,4]<=[4,2]T(1,0)`), or as axes of a mesh (`mesh['a'=4,'b'=2] {'b'}`). All are expanded to
sets of device numbers, which are compared with every subset of the mesh axes. Device i is the i-th
of `mesh.devices.flat`.

An asynchronous collective is a pair of a start and a done, between which other work runs. XLA
writes them as opcodes of their own (`all-gather-start`), as an asynchronous computation
(`async-start`), as a call on another core (`call-start`, `custom-call-start`) or, on some TPUs, as
fusions named `async-collective-start`. A start on another core may come without operands; an update
then passes them, and begins the transfer.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from xlacensus.hlo.parser import Instruction, bytes_of

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""

COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# TPU slices exchange data through their hosts (MegaScale): a `send` carries the collective's
# kind and devices.
_MEGASCALE_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEGASCALE_DEVICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}')


def kind_of(instruction: Instruction) -> str | None:
    """Returns the kind of a collective, one of COLLECTIVE_KINDS; None for any other instruction."""
    if instruction.opcode == "send":
        between_slices = _MEGASCALE_KIND.search(instruction.attribute_text)
        name = between_slices[1].lower().replace("_", "-") if between_slices else ""
    else:
        name = instruction.opcode.removesuffix("-start")
    return name if name in COLLECTIVE_KINDS else None


def _is_collective(instruction: Instruction) -> bool:
    megascale = "_xla_megascale_transfer_type" in instruction.attribute_text
    return instruction.opcode.removesuffix("-start") in COLLECTIVE_KINDS or megascale


def collective_in(instruction: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is,
    or the one inside its fusion or asynchronous computation."""
    if _is_collective(instruction):
        return instruction
    if instruction.opcode not in ("fusion", "custom-call") and not instruction.opcode.endswith(
        "-start"
    ):
        return None
    return next(filter(_is_collective, itertools.chain.from_iterable(instruction.called)), None)


COLLECTIVE_TEXT = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
    r"|\b(?:replica_groups|source_target_pairs)=|_xla_megascale_transfer_type|OFFLOAD_COLLECTIVE"
    r'|"has_communication":true|nccl|nvshmem|mpi_all',
    re.IGNORECASE,
)
"""Text that only collectives and kernels with communication of their own contain."""


def looks_collective(instruction: Instruction) -> bool:
    """Whether an instruction may move bytes between devices;
    the ends of asynchronous ones are left out."""
    if instruction.opcode.endswith(("-done", "-update")) or instruction.opcode == "recv":
        return False  # their start or send counts
    text = instruction.attribute_text
    return (
        kind_of(instruction) is not None
        or COLLECTIVE_TEXT.search(f"{instruction.opcode}({text}") is not None
    )


def group_of(
    instruction: Instruction, mesh: dict[str, int] | None
) -> tuple[Groups, tuple[str, ...] | None]:
    """Returns the groups of devices that exchange bytes,
    and the mesh axes they span (None if they span no product).

    mesh: degree of each axis, outermost first, in the order of the program's devices.
    """
    pairs = instruction.attributes.get("source_target_pairs")
    if instruction.opcode == "send":
        devices = _MEGASCALE_DEVICES.search(instruction.attribute_text)
        return (tuple(range(len(devices[1].split(",")) if devices else 1)),), ("slices",)
    if pairs is not None:
        return _chains(pairs), axes_of_pairs(expand(pairs, 1), mesh) if mesh else None
    devices_of_all = instruction.computation.module.num_devices
    groups = expand(instruction.attributes.get("replica_groups", "{}"), devices_of_all)
    return groups, axes_of_groups(groups, mesh) if mesh else None


def group_label(groups: Groups, axes: tuple[str, ...] | None) -> str:
    """Names the devices that exchange bytes: `fsdp+tensor`,
    or `8 devices` if they span no product of mesh axes."""
    return "+".join(axes) if axes else f"{max(len(group) for group in groups)} devices"


def payload_of(
    instruction: Instruction,
    kind: str,
    devices: int,
    axes: str = "",
    sent_rows: Mapping[str, int] | None = None,
) -> int:
    """Returns the payload in bytes: the whole gathered or reduced array of one group,
    or the block one device sends.

    axes: label of the group.
    sent_rows: rows that a ragged all-to-all sends of its buffer, by that label, or all.
    """
    # The other operands of a ragged all-to-all are the output buffer, offsets and sizes.
    operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    moved = sum(bytes_of(operand.shape) for operand in operands)
    if kind == "ragged-all-to-all":
        buffer = instruction.operand_arrays[0].dims[0]
        return moved * min(buffer, (sent_rows or {}).get(axes, buffer)) // buffer
    return moved * devices if kind == "all-gather" else moved


_MESH = re.compile(r"mesh\[(.*?)\]\s*(?:,?\s*device_ids=\(?\[?([\d,\s]*)\]?\)?)?\s*\{(.*?)\}", re.S)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def expand(text: str, num_devices: int) -> Groups:
    """Expands the text of replica groups;
    an empty list is one group of all `num_devices` devices."""
    text = text.strip()
    if (match := _MESH.match(text)) is not None:
        return _expand_mesh(match[1], match[2], match[3])
    if (match := _IOTA.match(text)) is not None:
        shape, source = _numbers(match[1]), _numbers(match[2])
        ids = np.arange(math.prod(source)).reshape(source)
        if match[3]:
            ids = ids.transpose(_numbers(match[3]))
        return _rows(ids.reshape(shape[0], -1) if len(shape) > 1 else ids.reshape(1, -1))
    listed = re.findall(r"\{([\d,\s]+)\}", text)
    return tuple(tuple(_numbers(group)) for group in listed) or (tuple(range(num_devices)),)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _expand_mesh(axes: str, ids: str | None, grouped: str) -> Groups:
    """Expands groups over some axes of a mesh. axes: degrees of all axes;
    ids: order of the devices."""
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
    shape: list[int] = []
    grouped_dims: list[int] = []
    for name, degree in re.findall(r"'([^']+)'=(\d+)", axes):
        # Part of an axis is written 'a':(before)size: the axis is split into (before, size, after).
        parts = [
            (int(before), int(size)) for other, before, size in wanted if other == name and before
        ]
        whole = (name, "", "") in wanted
        cuts = sorted({1, int(degree)}.union(*((before, before * size) for before, size in parts)))
        for low, high in itertools.pairwise(cuts):
            if whole or any(before == low for before, _ in parts):
                grouped_dims.append(len(shape))
            shape.append(high // low)
    flat = np.array(_numbers(ids)) if ids and _numbers(ids) else np.arange(math.prod(shape))
    other_dims = [i for i in range(len(shape)) if i not in grouped_dims]
    size = math.prod(shape[i] for i in grouped_dims)
    return _rows(flat.reshape(shape).transpose(*other_dims, *grouped_dims).reshape(-1, size))


def axes_of_groups(groups: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """Finds the smallest set of mesh axes whose groups these are, in the mesh's order;
    None if there is none.

    Groups over part of an axis, as where the axis crosses slices or dimensions of a torus, are
    named `data within 4` (4 neighbours along the axis), `data between 2` (the devices at equal
    places of its 2 parts), or `data between 2 within 8` (those of the 2 halves of each 8
    neighbours).
    mesh: degree of each axis, outermost first.
    """
    whole = _whole_axes(groups, mesh)
    return whole if whole is not None else next(_parts_of_axes(groups, mesh), None)


def _parts_of_axes(groups: Groups, mesh: dict[str, int]) -> Iterator[tuple[str, ...]]:
    for axis, degree in mesh.items():
        divisors = [d for d in range(1, degree + 1) if degree % d == 0]
        # The axis as (outer, size, inner) devices, of which the groups are along `size`.
        for outer, inner in itertools.product(divisors, divisors):
            size = degree // (outer * inner)
            if outer * size * inner != degree or size in (1, degree):
                continue
            between = f"{axis} between {size}" if inner > 1 else f"{axis} within {size}"
            name = f"{between} within {size * inner}" if inner > 1 and outer > 1 else between
            pieces = {f"outer of {axis}": outer, name: size, f"inner of {axis}": inner}
            split: dict[str, int] = {}
            for other, n in mesh.items():
                split |= pieces if other == axis else {other: n}
            axes = _whole_axes(groups, split)
            if axes is not None and not any(" of " in a for a in axes):
                yield axes


def _whole_axes(groups: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    wanted = frozenset(frozenset(group) for group in groups)
    # The program of one of several slices lists only its own devices.
    listed = frozenset(device for group in groups for device in group)
    nontrivial = [axis for axis, degree in mesh.items() if degree > 1]
    ids = np.arange(math.prod(mesh.values())).reshape([mesh[a] for a in nontrivial] or [1])
    for n in range(len(nontrivial) + 1):
        for chosen in itertools.combinations(range(len(nontrivial)), n):
            others = [i for i in range(len(nontrivial)) if i not in chosen]
            size = math.prod(mesh[nontrivial[i]] for i in chosen)
            rows = (ids.transpose(*others, *chosen) if nontrivial else ids).reshape(-1, size)
            candidate = (frozenset(row) for row in rows.tolist())
            if frozenset(row for row in candidate if row <= listed) == wanted:
                return tuple(nontrivial[i] for i in chosen)
    return None


def axes_of_pairs(pairs: Groups, mesh: dict[str, int]) -> tuple[str, ...] | None:
    """Finds the axes along which a collective-permute's (source, target) pairs move;
    None if one leaves the mesh."""
    names, shape = list(mesh), list(mesh.values()) or [1]
    moved: set[str] = set()
    for source, target in pairs:
        if max(source, target) >= math.prod(shape):
            return None
        a, b = np.unravel_index(source, shape), np.unravel_index(target, shape)
        moved |= {name for name, x, y in zip(names, a, b, strict=False) if x != y}
    return tuple(name for name in names if name in moved)


def _chains(pairs: str) -> Groups:
    group_by_device: dict[int, set[int]] = defaultdict(set)
    for source, target in expand(pairs, 1):
        joined = group_by_device[source] | group_by_device[target] | {source, target}
        for member in joined:
            group_by_device[member] = joined
    return tuple({tuple(sorted(group)) for group in group_by_device.values()})


_WRAPPERS = ("async-start", "call-start", "custom-call-start")
_WORK = (
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "while",
    "call",
    "conditional",
    "sort",
    "scatter",
    "reduce",
)
"""Opcodes of computation that can overlap with communication."""
_FUSED_START, _FUSED_DONE = "async-collective-start", "async-collective-done"


def is_wrapper(instruction: Instruction) -> bool:
    """Whether an instruction starts the asynchronous execution of a computation."""
    return instruction.opcode in _WRAPPERS or instruction.name.startswith(_FUSED_START)


def is_fused_done(instruction: Instruction) -> bool:
    """Whether a fusion is the done of an `async-collective-start`."""
    return instruction.name.startswith(_FUSED_DONE)


def is_done(instruction: Instruction) -> bool:
    """Whether an instruction ends what a start began."""
    return instruction.opcode.endswith("-done") or is_fused_done(instruction)


def start_of(instruction: Instruction) -> Instruction | None:
    """Returns the start that a done or update belongs to; None if there is none."""
    if is_fused_done(instruction):
        return instruction.computation.instructions.get(
            instruction.name.replace(_FUSED_DONE, _FUSED_START, 1)
        )
    operand = instruction.operand()
    if operand is None:
        return None
    passes_on = operand.opcode.endswith("-update") or operand.opcode == "get-tuple-element"
    return start_of(operand) if passes_on else operand


def transfer_start(start: Instruction) -> Instruction:
    """Returns the instruction that begins a transfer: the start,
    or the update that passes its operands."""
    updates = (
        user for user in start.users if user.opcode.endswith("-update") and len(user.operands) > 1
    )
    return start if start.operands else next(updates, start)


def overlapped_work(start: Instruction) -> tuple[str, ...]:
    """Lists the work scheduled while a transfer is in flight: from its beginning to its done."""
    begin = transfer_start(start)
    handles = {start, begin}
    work: list[str] = []
    scheduled = itertools.dropwhile(lambda i: i is not begin, start.computation)
    for instruction in itertools.islice(scheduled, 1, None):
        takes_handle = not handles.isdisjoint(instruction.operands)
        is_fused_end = is_fused_done(instruction) and start_of(instruction) is start
        if is_fused_end or (takes_handle and is_done(instruction)):
            break
        if takes_handle and (
            instruction.opcode == "get-tuple-element" or instruction.opcode.endswith("-update")
        ):
            handles.add(instruction)
        elif instruction.opcode in _WORK and not instruction.name.startswith("async-collective"):
            work.append(instruction.name)
    return tuple(work)


def done_of(start: Instruction) -> Instruction | None:
    """Returns the done of a start; None if the program has none."""
    return next((i for i in start.computation if is_done(i) and start_of(i) is start), None)

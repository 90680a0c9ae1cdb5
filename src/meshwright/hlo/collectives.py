"""Collective instructions: their kind, the devices of a group, the bytes they move."""

import re
from collections import defaultdict

from meshwright.hlo.groups import Groups, axes_of_groups, axes_of_pairs, expand
from meshwright.hlo.parser import Computation, Instruction, Module, bytes_of

COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# TPU slices exchange data through their hosts (MegaScale): a `send` carries the collective's kind and devices.
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


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction moves bytes between devices."""
    megascale = "_xla_megascale_transfer_type" in instruction.attribute_text
    return instruction.opcode.removesuffix("-start") in COLLECTIVE_KINDS or megascale


def collective_in(module: Module, instruction: Instruction) -> Instruction | None:
    """Returns the collective that an instruction is, or the one inside its fusion or asynchronous computation."""
    if is_collective(instruction):
        return instruction
    if instruction.opcode in ("fusion", "custom-call") or instruction.opcode.endswith("-start"):
        for body in (module.computations[n] for n in instruction.called if n in module.computations):
            for inner in body.instructions.values():
                if is_collective(inner):
                    return inner
    return None


COLLECTIVE_TEXT = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
    r"|\b(?:replica_groups|source_target_pairs)=|_xla_megascale_transfer_type|OFFLOAD_COLLECTIVE"
    r'|"has_communication":true|nccl|nvshmem|mpi_all',
    re.IGNORECASE,
)
"""Text that only collectives and kernels with communication of their own contain."""


def looks_collective(instruction: Instruction) -> bool:
    """Whether an instruction may move bytes between devices; the ends of asynchronous ones are left out."""
    if instruction.opcode.endswith(("-done", "-update")) or instruction.opcode == "recv":
        return False  # their start or send counts
    text = instruction.attribute_text
    return kind_of(instruction) is not None or COLLECTIVE_TEXT.search(f"{instruction.opcode}({text}") is not None


def group_of(
    module: Module, instruction: Instruction, mesh: dict[str, int] | None
) -> tuple[Groups, tuple[str, ...] | None]:
    """Returns the groups of devices that exchange bytes, and the mesh axes they span (None if they span no product).

    mesh: degree of each axis, outermost first, in the order of the program's devices.
    """
    pairs = instruction.attributes.get("source_target_pairs")
    if instruction.opcode == "send":
        devices = _MEGASCALE_DEVICES.search(instruction.attribute_text)
        return (tuple(range(len(devices[1].split(",")) if devices else 1)),), ("slices",)
    if pairs is not None:
        return _chains(pairs), axes_of_pairs(expand(pairs, 1), mesh) if mesh else None
    groups = expand(instruction.attributes.get("replica_groups", "{}"), module.num_devices)
    return groups, axes_of_groups(groups, mesh) if mesh else None


def payload_of(computation: Computation, instruction: Instruction, kind: str, devices: int) -> int:
    """Returns the payload in bytes: the whole gathered or reduced array of one group, or the block one device sends.

    A ragged all-to-all counts its whole input buffer, of which it may send less.
    """
    operands = computation.operand_shapes(instruction)
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # the others are the output buffer, offsets and sizes
    moved = sum(bytes_of(shape) for shape in operands)
    return moved * devices if kind == "all-gather" else moved


def _chains(pairs: str) -> Groups:
    """Groups the devices that a permutation's (source, target) pairs connect."""
    group_by_device: dict[int, set[int]] = defaultdict(set)
    for source, target in expand(pairs, 1):
        joined = group_by_device[source] | group_by_device[target] | {source, target}
        for member in joined:
            group_by_device[member] = joined
    return tuple({tuple(sorted(group)) for group in group_by_device.values()})

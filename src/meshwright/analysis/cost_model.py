"""Roofline cost model of single instructions: seconds of a chip's compute units, bytes of its memory.

TPU programs carry the compiler's own estimate of every fusion in cycles. It is used for matrix products; for
elementwise work it is several times too high, so that bytes over HBM bandwidth are an upper bound there. GPU programs
carry no estimates: FLOPs and bytes are divided by the achieved peak.
"""

import dataclasses
import math
import re

from meshwright.hardware.chips import Chip, Efficiency
from meshwright.hlo.flops import ALL_ROWS, Rate, Skipped, computed_flops, kernel_work, matmul_flops, rate_of
from meshwright.hlo.parser import Array, Computation, Instruction, Module, Shape, arrays_of

FREE = re.compile(
    "parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|replica-id|opt-barrier|add-dependency"
    "|domain|iota|.*-(done|update)"
)
"""Opcodes that cost nothing."""

_HOST = 5
"""Memory space of the host in a TPU's layouts."""
_VMEM = 1
"""Memory space of VMEM in a TPU's layouts."""
_NO_ESTIMATE = 10**15
"""Cycles from which the compiler's estimate is a placeholder."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Time of one execution of one instruction."""

    kind: str
    """matmul, attention, memory, collective, or host."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Cost of instructions on one chip."""

    chip: Chip
    efficiency: Efficiency
    skipped: Skipped = ALL_ROWS
    """Parts of their operands that kernels skip."""

    def cost_of(self, module: Module, computation: Computation, instruction: Instruction) -> Cost:
        """Returns how long an instruction keeps the chip busy; collectives and loops are not covered."""
        if FREE.fullmatch(instruction.opcode):
            return Cost("memory", 0.0)
        if instruction.opcode == "custom-call":
            return self._custom_call(module, computation, instruction)
        compute = self._matmul_seconds(module, computation, instruction)
        memory = self.memory_seconds(hbm_bytes_accessed(module, computation, instruction))
        cycles = _estimated_cycles(instruction)
        estimate = cycles / self.chip.clock_hz if cycles is not None and self.chip.clock_hz else None
        if compute:
            return Cost("matmul", max(compute if estimate is None else estimate, memory))
        return Cost("memory", memory if estimate is None else min(estimate, memory))

    def _matmul_seconds(self, module: Module, computation: Computation, instruction: Instruction) -> float:
        """Seconds of a matrix product, or of those in a fusion, nested ones included, at the peaks of their types."""
        if instruction.opcode in ("dot", "convolution"):
            rate = rate_of(computation.operand_arrays(instruction)[:2])
            return matmul_flops(computation, instruction) / (peak_flops(self.chip, rate) * self.efficiency.matmul)
        body = _fused_body(module, instruction) if instruction.opcode == "fusion" else None
        if body is None:
            return 0.0
        return sum(self._matmul_seconds(module, body, inner) for inner in body.instructions.values())

    def memory_seconds(self, num_bytes: float) -> float:
        """Returns the time to move bytes to or from HBM."""
        return num_bytes / (self.chip.hbm_bandwidth * self.efficiency.hbm)

    def _custom_call(self, module: Module, computation: Computation, instruction: Instruction) -> Cost:
        """Prices a kernel by its FLOPs and its bytes; one whose FLOPs are not known by its bytes alone."""
        work = kernel_work(computation, instruction)
        if work.kind == "hint":
            return Cost("memory", 0.0)
        memory = self.memory_seconds(hbm_bytes_accessed(module, computation, instruction))
        peak, flops = peak_flops(self.chip, work.rate), computed_flops(work, instruction, self.skipped)
        if work.kind == "attention":
            return Cost("attention", max(flops / (peak * self.efficiency.attention), memory))
        reached = self.efficiency.matmul * (self.efficiency.grouped_matmul if work.kind == "grouped matmul" else 1.0)
        return Cost("matmul" if flops else "memory", max(flops / (peak * reached), memory))


def peak_flops(chip: Chip, rate: Rate) -> float:
    """Returns the peak FLOP/s of a chip for products of these types; that of bfloat16 where it has no other."""
    special = {"fp8": chip.flops_fp8, "int8": chip.flops_int8, "mxfp8": chip.flops_mxfp8}.get(rate)
    return special or chip.flops_bf16


def hbm_bytes_accessed(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Counts the bytes of HBM that an instruction reads and writes; of a slice of a larger array, the slice alone."""
    operands = computation.operand_shapes(instruction)
    body = _fused_body(module, instruction)
    if body is None:
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2.0 * hbm_bytes(instruction.shape)
        if instruction.opcode == "dynamic-update-slice":
            return 2.0 * hbm_bytes(operands[1])
        return hbm_bytes(instruction.shape) + sum(hbm_bytes(shape) for shape in operands)
    total = 0.0
    for number, shape in enumerate(operands):
        parameter = body.parameters.get(number)
        read = math.inf if parameter is None else _bytes_read(module, body, parameter)
        total += min(hbm_bytes(shape), read)
    return total + _bytes_written(module, body, body.root, _result_shape(instruction))


def _result_shape(instruction: Instruction) -> Shape:
    """Returns the shape of what an instruction writes; a start's own shape begins with its operands' (XLA:GPU)."""
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and not isinstance(shape, Array) and len(shape) > 1:
        return shape[1]
    return shape


def _fused_body(module: Module, instruction: Instruction) -> Computation | None:
    """Returns the computation that a fusion or an asynchronous start runs; None for any other instruction."""
    if instruction.opcode.startswith("custom-call"):
        return None
    return next(iter(module.called_by(instruction)), None)


def hbm_bytes(shape: Shape) -> float:
    """Sums the bytes of the arrays in HBM."""
    return float(sum(array.bytes for array in arrays_of(shape) if array.memory_space not in (_VMEM, _HOST)))


def host_bytes(shape: Shape) -> float:
    """Sums the bytes of the arrays in the host's memory."""
    return float(sum(array.bytes for array in arrays_of(shape) if array.memory_space == _HOST))


_Callers = tuple[tuple[Computation, Instruction], ...]
"""Fusions around a nested one, outermost first, each with its computation."""


def _bytes_read(module: Module, body: Computation, value: Instruction, callers: _Callers = ()) -> float:
    """Counts the bytes that a fusion reads of an operand, through fusions nested in it; infinity for all of it."""
    total = 0.0
    if value.is_root:
        # The value leaves the fusion unchanged: a nested one passes it to its users.
        total += _bytes_read(module, *callers[-1], callers[:-1]) if callers else math.inf
    for user in body.users[value.name]:
        nested = _fused_body(module, user)
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += sum(array.bytes for array in arrays_of(user.shape))
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode == "bitcast":
            total += _bytes_read(module, body, user, callers)
        elif nested is not None:
            numbers = [i for i, name in enumerate(user.operands) if name == value.name and i in nested.parameters]
            inside = (*callers, (body, user))
            total += sum(_bytes_read(module, nested, nested.parameters[i], inside) for i in numbers)
        else:
            return math.inf
    return total


def _bytes_written(module: Module, body: Computation, root: Instruction, shape: Shape) -> float:
    """Counts the bytes that a fusion writes for one of its results."""
    if root.opcode == "tuple" and not isinstance(shape, Array):
        parts = [body.instructions[name] for name in root.operands]
        return sum(_bytes_written(module, body, part, array) for part, array in zip(parts, shape, strict=False))
    if root.opcode == "bitcast" and root.operands:
        return _bytes_written(module, body, body.instructions[root.operands[0]], shape)
    nested = _fused_body(module, root)
    if nested is not None:
        return _bytes_written(module, nested, nested.root, shape)
    if root.opcode == "dynamic-update-slice":
        return float(sum(array.bytes for array in arrays_of(body.instructions[root.operands[1]].shape)))
    return hbm_bytes(shape)


def _estimated_cycles(instruction: Instruction) -> int | None:
    match = re.search(r'"estimated_cycles":"(\d+)"', instruction.attribute_text)
    return int(match[1]) if match and 0 < int(match[1]) < _NO_ESTIMATE else None

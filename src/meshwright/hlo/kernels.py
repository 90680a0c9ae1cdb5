"""Work of custom calls: kernels and library routines, of which a program's text shows no computation.

The FLOPs of matrix products and of attention follow from the shapes of operands and results, those of other Pallas
kernels from the `cost_estimate` of their author. A custom call of neither kind is `unknown`: it is named, not guessed.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Literal

from meshwright.hlo.convolutions import convolution_flops
from meshwright.hlo.parser import Array, Computation, Instruction, Module, arrays_of

Rate = Literal["bf16", "fp8", "int8", "mxfp8"]
"""Peak of a chip at which a product runs; wider types than bfloat16 count as bfloat16, which is never slower."""


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """Work of one execution of a custom call."""

    kind: Literal["matmul", "grouped matmul", "attention", "priced", "memory", "hint", "unknown"]
    """`priced`: FLOPs as its author estimates them; `memory`: no products; `hint`: costs nothing."""
    name: str
    """Kernel or routine."""
    flops: float = 0.0
    """FLOPs of the products, attention's over all pairs of query and key."""
    rate: Rate = "bf16"


_MOSAIC, _TRITON = "tpu_custom_call", "__gpu$xla.gpu.triton"
"""Targets of Pallas kernels, whose own name is in the scope of the call."""
_HINTS = frozenset(
    {
        "AllocateBuffer",
        "ConcatBitcast",
        "Sharding",
        "AssumeGatherIndicesInBound",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "LayoutConstraint",
        "annotate_device_placement",
        "MoveToHost",
        "MoveToDevice",
        "PinToDevice",
        "X64SplitLow",
        "X64SplitHigh",
        "X64Combine",
        "AsyncCollectiveStart",
        "AsyncCollectiveDone",
    }
)
_NO_PRODUCTS = re.compile(r"topk|top_k|sort|threefry|rng|random|callback|infeed|outfeed|partialreduce", re.IGNORECASE)
_ATTENTION = re.compile(r"splash|flash_attention|flash_mha")
_GROUPED = re.compile(r"gmm|grouped|ragged|megablox")
_FLOATING = re.compile(r"bf16|f16|f32|f64|f8\w+|f4\w+")


def kernel_work(computation: Computation, instruction: Instruction) -> KernelWork:
    """Returns the work of a custom call of `computation`."""
    target = target_of(instruction)
    if target in _HINTS:
        return KernelWork("hint", target)
    name = re.sub(r"\.\d.*$", "", instruction.name) if target == _MOSAIC else target
    given = [a for shape in computation.operand_shapes(instruction) for a in arrays_of(shape)]
    results = list(arrays_of(instruction.shape))
    if target.startswith("__cudnn$fmha"):
        return KernelWork("attention", name, _cudnn_flops(target, given), rate_of(given[:2]))
    if target.startswith("__cudnn$blockScaledDot"):
        return KernelWork("matmul", name, _product_flops(instruction, given, results[0]), "mxfp8")
    if target.startswith("__cudnn$conv") and "dim_labels" in instruction.attributes and len(given) >= 2:
        convolved = convolution_flops(instruction, *_convolved(target, given, results))
        return KernelWork("matmul", name, convolved, rate_of(given[:2]))
    words = f"{instruction.op_name} {instruction.name}"
    factors = [a for a in given if _is_factor(a) and len(a.dims) >= 2]
    if _GROUPED.search(words if target in (_MOSAIC, _TRITON) else target.lower()):
        flops = _grouped_flops(factors, results)
        if flops is not None:
            return KernelWork("grouped matmul", name, flops, rate_of(factors[:2]))
    elif re.search("gemm|matmul", target) and len(given) >= 2:
        return KernelWork("matmul", name, _product_flops(instruction, given, results[0]), rate_of(given[:2]))
    if target == _MOSAIC and _ATTENTION.search(words):
        blocks = [a for a in factors if len(a.dims) >= 3 and _is_floating(a)]
        flops = _attention_flops(instruction, blocks, results)
        if flops is not None:
            return KernelWork("attention", name, flops, rate_of(blocks[:2]))
    estimated = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attribute_text)
    if estimated:
        return KernelWork("priced", name, float(estimated[1]))
    if _NO_PRODUCTS.search(target) or not any(map(_is_floating, (*given, *results))):
        return KernelWork("memory", name)
    return KernelWork("unknown", name)


def target_of(instruction: Instruction) -> str:
    """Returns the target of a custom call: the routine, or `tpu_custom_call` for every TPU kernel."""
    match = re.search(r'custom_call_target="([^"]*)"', instruction.attribute_text)
    return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Parts of their operands that kernels skip, which the shapes do not show."""

    causal_fraction: float = 0.5
    """Fraction of the key positions that attention reads: 1/2 for causal attention, less with a sliding window.

    It is used where a kernel's own scope, `visible_FRACTION` (models/kernels/chunks.py), states none.
    """
    group_fraction: float = 1.0
    """Fraction of the rows of a grouped matmul's buffer that belong to a group."""


ALL_ROWS = Skipped()
"""Causal attention, and grouped matmuls of all rows of their buffers."""


def computed_flops(work: KernelWork, instruction: Instruction, skipped: Skipped) -> float:
    """Returns the FLOPs of a kernel without what it skips: hidden blocks of attention, rows that belong to no group."""
    if work.kind == "attention":
        stated = re.findall(r"visible_([0-9.]+)", instruction.op_name)
        return work.flops * (float(stated[-1]) if stated else skipped.causal_fraction)
    return work.flops * (skipped.group_fraction if work.kind == "grouped matmul" else 1.0)


def rate_of(operands: Iterable[Array]) -> Rate:
    """Returns the peak at which a product of these operands runs."""
    types = {array.dtype for array in operands}
    if types and all(dtype.startswith("f8") for dtype in types):
        return "fp8"
    return "int8" if types == {"s8"} else "bf16"


def is_call(instruction: Instruction, module: Module) -> bool:
    """Whether an instruction runs code that the text does not contain: a custom call without a computation."""
    if instruction.opcode not in ("custom-call", "custom-call-start"):
        return False
    return not any(name in module.computations for name in instruction.called)


def _is_floating(array: Array) -> bool:
    return _FLOATING.fullmatch(array.dtype) is not None


def _is_factor(array: Array) -> bool:
    return array.dtype in ("s8", "u8") or _is_floating(array)


def _grouped_flops(factors: list[Array], results: list[Array]) -> float | None:
    """Counts the FLOPs of a grouped matmul over all rows of its buffer; None if the shapes are of another operation.

    Rows [M, K] times the weights [E, K, N] or [E, N, K] of E groups give [M, N]; for the gradient of the weights, rows
    [M, K] or [K, M] and [M, N] give [E, K, N]. Every row belongs to one group, so that E does not enter.
    """
    if len(factors) < 2 or not results:
        return None
    (left, right), out = factors[:2], results[0]
    if len(left.dims) == 2 and len(right.dims) == 3 and len(out.dims) == 2:
        contracted = set(right.dims[1:]) if left.dims[1] == out.dims[1] else set(right.dims[1:]) - {out.dims[1]}
        if left.dims[0] == out.dims[0] and left.dims[1] in contracted and out.dims[1] in right.dims[1:]:
            return 2.0 * left.elements * out.dims[1]
    if len(left.dims) == len(right.dims) == 2 and len(out.dims) == 3:
        rows = {left.elements / out.dims[1], right.elements / out.dims[2]}
        if len(rows) == 1 and rows & set(left.dims):
            return 2.0 * rows.pop() * out.dims[1] * out.dims[2]
    return None


_ATTENTION_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products in each kernel of splash and flash attention; the backward kernels compute the scores again.

A fused backward kernel, named dkv, has a fifth for the gradients of the queries, its third result.
"""


def _attention_flops(instruction: Instruction, blocks: list[Array], results: list[Array]) -> float | None:
    """Counts the FLOPs of a TPU attention kernel over all keys; None if the shapes are of another operation.

    blocks: its floating-point operands of rank three or more, first the queries [.., T, H], then the keys [.., S, H].
    """
    if len(blocks) < 2 or blocks[0].dims[-1] != blocks[1].dims[-1]:
        return None
    queries, keys = blocks[:2]
    kernel = next((k for k in ("dkv", "dq") if k in instruction.name), "fwd")
    products = _ATTENTION_PRODUCTS[kernel] + (kernel == "dkv" and len(results) == 3)
    return products * 2.0 * queries.elements * keys.dims[-2]


def _cudnn_flops(target: str, given: list[Array]) -> float:
    """Counts the FLOPs of a cuDNN attention kernel over all keys; its operands are q [B, T, N, H] and k [B, S, K, H].

    The forward kernel has two matrix products, the backward kernel five.
    """
    queries, keys = given[:2]
    return (5 if "Backward" in target else 2) * 2.0 * queries.elements * keys.dims[1]


def _convolved(target: str, given: list[Array], results: list[Array]) -> tuple[tuple[int, ...], ...]:
    """Returns the dimensions of input, kernel and output of the forward convolution that a cuDNN kernel belongs to."""
    first, second, result = given[0].dims, given[1].dims, results[0].dims
    if "BackwardFilter" in target:
        return first, result, second
    return (result, second, first) if "BackwardInput" in target else (first, second, result)


def _product_flops(instruction: Instruction, given: list[Array], out: Array) -> float:
    """Counts the FLOPs of a library's matrix product from the shapes of its operands and result."""
    # For A [.., m, k], B [.., k, n] and C [.., m, n] the sizes multiply to (m k)(k n)(m n) = (m n k)^2.
    batch = re.search(r'"lhs_batch_dimensions":\[([^\]]*)\]', instruction.attribute_text)
    dims = [int(d.strip('" ')) for d in batch[1].split(",") if d.strip('" ')] if batch else []
    batches = math.prod(given[0].dims[d] for d in dims)
    product = given[0].elements * given[1].elements * out.elements / batches**3
    return 2.0 * batches * math.sqrt(product)

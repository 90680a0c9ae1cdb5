"""FLOPs of a compiled program: of its matrix products, convolutions, and custom calls.

A program's text shows no computation of a custom call, a kernel or library routine. The FLOPs of
matrix products and of attention follow from the shapes of operands and results, those of other
Pallas kernels from the `cost_estimate` of their author. A custom call of neither kind is `unknown`:
it is named, not guessed.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from xlacensus.hlo.loops import ExecutionContext, branches_of, known_branch, trip_count, walk
from xlacensus.hlo.parser import Array, Computation, Instruction, Module, arrays_of
from xlacensus.hlo.scopes import Phase, phase_of, scopes_of

Rate = Literal["bf16", "fp8", "int8", "mxfp8"]
"""Peak of a chip at which a product runs;
wider types than bfloat16 count as bfloat16, which is never slower."""


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """Work of one execution of a custom call."""

    kind: Literal["matmul", "grouped matmul", "attention", "priced", "memory", "hint", "unknown"]
    """`priced`: FLOPs as its author estimates them; `memory`: no products;
    `hint`: costs nothing."""
    name: str
    flops: float = 0.0
    """FLOPs of the products, attention's over all pairs of query and key."""
    rate: Rate = "bf16"


_MOSAIC, _TRITON = "tpu_custom_call", "__gpu$xla.gpu.triton"
"""Targets of Pallas kernels, whose own name is in the scope of the call."""
_HINTS = re.compile(
    "AllocateBuffer|ConcatBitcast|Sharding|AssumeGatherIndicesInBound"
    "|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint|annotate_device_placement"
    "|MoveToHost|MoveToDevice|PinToDevice|X64SplitLow|X64SplitHigh"
    "|X64Combine|AsyncCollectiveStart|AsyncCollectiveDone"
)
"""Targets of custom calls that cost nothing."""
_NO_PRODUCTS = re.compile(
    r"topk|top_k|sort|threefry|rng|random|callback|infeed|outfeed|partialreduce", re.IGNORECASE
)
_ATTENTION = re.compile(r"splash|flash_attention|flash_mha")
_GROUPED = re.compile(r"gmm|grouped|ragged|megablox")
_FLOATING = re.compile(r"bf16|f16|f32|f64|f8\w+|f4\w+")


def kernel_work(instruction: Instruction) -> KernelWork:
    """Returns the work of a custom call."""
    target = instruction.target
    if _HINTS.fullmatch(target):
        return KernelWork("hint", target)
    name = re.sub(r"\.\d.*$", "", instruction.name) if target == _MOSAIC else target
    given = instruction.operand_arrays
    results = list(arrays_of(instruction.shape))
    if target.startswith("__cudnn$fmha"):
        # q [B, T, N, H] and k [B, S, K, H];
        # the forward kernel has two products, the backward kernel five.
        products = 5 if "Backward" in target else 2
        flops = products * 2.0 * given[0].elements * given[1].dims[1]
        return KernelWork("attention", name, flops, rate_of(given[:2]))
    if target.startswith("__cudnn$blockScaledDot"):
        return KernelWork("matmul", name, _product_flops(instruction, given, results[0]), "mxfp8")
    if (
        target.startswith("__cudnn$conv")
        and "dim_labels" in instruction.attributes
        and len(given) >= 2
    ):
        # Input, kernel and output of the forward convolution that the kernel belongs to.
        sides = given[0].dims, given[1].dims, results[0].dims
        if "BackwardFilter" in target:
            sides = sides[0], sides[2], sides[1]
        elif "BackwardInput" in target:
            sides = sides[2], sides[1], sides[0]
        convolved = convolution_flops(instruction, *sides)
        return KernelWork("matmul", name, convolved, rate_of(given[:2]))
    words = f"{instruction.op_name} {instruction.name}"
    factors = [
        a for a in given if (_is_floating(a) or a.dtype in ("s8", "u8")) and len(a.dims) >= 2
    ]
    if _GROUPED.search(words if target in (_MOSAIC, _TRITON) else target.lower()):
        grouped = _grouped_flops(factors, results)
        if grouped is not None:
            return KernelWork("grouped matmul", name, grouped, rate_of(factors[:2]))
    elif re.search("gemm|matmul", target) and len(given) >= 2:
        return KernelWork(
            "matmul", name, _product_flops(instruction, given, results[0]), rate_of(given[:2])
        )
    if target == _MOSAIC and _ATTENTION.search(words):
        blocks = [a for a in factors if len(a.dims) >= 3 and _is_floating(a)]
        attention = _attention_flops(instruction, blocks, results)
        if attention is not None:
            return KernelWork("attention", name, attention, rate_of(blocks[:2]))
    estimated = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attribute_text)
    if estimated:
        return KernelWork("priced", name, float(estimated[1]))
    if _NO_PRODUCTS.search(target) or not any(map(_is_floating, (*given, *results))):
        return KernelWork("memory", name)
    return KernelWork("unknown", name)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Parts of their operands that kernels skip, which the shapes do not show."""

    causal_fraction: float = 0.5
    """Fraction of the key positions that attention reads: 1/2 for causal attention, less
    with a sliding window.

    It is used where a kernel's own scope, `visible_FRACTION` in its name, states none.
    """
    group_fraction: float = 1.0
    """Fraction of the rows of a grouped matmul's buffer that belong to a group."""
    sent_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rows that a ragged all-to-all sends of its buffer, by the label of its axes;
    where there is none all."""


ALL_ROWS = Skipped()
"""Causal attention, and grouped matmuls of all rows of their buffers."""


def computed_flops(work: KernelWork, instruction: Instruction, skipped: Skipped) -> float:
    """Returns the FLOPs of a kernel without what it skips: hidden blocks
    of attention, rows that belong to no group."""
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


def is_call(instruction: Instruction) -> bool:
    """Whether an instruction runs code that the text does not contain: a custom call
    without a computation."""
    return instruction.opcode in ("custom-call", "custom-call-start") and not instruction.called


def _is_floating(array: Array) -> bool:
    return _FLOATING.fullmatch(array.dtype) is not None


def _grouped_flops(factors: list[Array], results: list[Array]) -> float | None:
    """Counts the FLOPs of a grouped matmul over all rows of its buffer;
    None if the shapes are of another operation.

    Rows [M, K] times the weights [E, K, N] or [E, N, K] of E groups give [M, N]; for the gradient
    of the weights, rows [M, K] or [K, M] and [M, N] give [E, K, N]. Every row belongs to one group,
    so that E does not enter.
    """
    if len(factors) < 2 or not results:
        return None
    (left, right), out = factors[:2], results[0]
    if len(left.dims) == 2 and len(right.dims) == 3 and len(out.dims) == 2:
        contracted = (
            set(right.dims[1:])
            if left.dims[1] == out.dims[1]
            else set(right.dims[1:]) - {out.dims[1]}
        )
        if (
            left.dims[0] == out.dims[0]
            and left.dims[1] in contracted
            and out.dims[1] in right.dims[1:]
        ):
            return 2.0 * left.elements * out.dims[1]
    if len(left.dims) == len(right.dims) == 2 and len(out.dims) == 3:
        rows = {left.elements / out.dims[1], right.elements / out.dims[2]}
        if len(rows) == 1 and rows & set(left.dims):
            return 2.0 * rows.pop() * out.dims[1] * out.dims[2]
    return None


_ATTENTION_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products in each kernel of splash and flash attention;
the backward kernels compute the scores again.

A fused backward kernel, named dkv, has a fifth for the gradients of the queries, its third result.
"""


def _attention_flops(
    instruction: Instruction, blocks: list[Array], results: list[Array]
) -> float | None:
    """Counts the FLOPs of a TPU attention kernel over all keys;
    None if the shapes are of another operation.

    blocks: its floating-point operands of rank three
    or more, first the queries [.., T, H], then the keys [.., S, H].
    """
    if len(blocks) < 2 or blocks[0].dims[-1] != blocks[1].dims[-1]:
        return None
    queries, keys = blocks[:2]
    kernel = next((k for k in ("dkv", "dq") if k in instruction.name), "fwd")
    products = _ATTENTION_PRODUCTS[kernel] + (kernel == "dkv" and len(results) == 3)
    return products * 2.0 * queries.elements * keys.dims[-2]


def _product_flops(instruction: Instruction, given: list[Array], out: Array) -> float:
    # For A [.., m, k], B [.., k, n] and C [.., m, n] the sizes multiply
    # to (m k)(k n)(m n) = (m n k)^2.
    batch = re.search(r'"lhs_batch_dimensions":\[([^\]]*)\]', instruction.attribute_text)
    batches = math.prod(
        given[0].dims[int(d)] for d in re.findall(r"\d+", batch[1] if batch else "")
    )
    product = given[0].elements * given[1].elements * out.elements / batches**3
    return 2.0 * batches * math.sqrt(product)


def convolution_flops(
    instruction: Instruction, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> float:
    """Counts the FLOPs of a convolution from its `dim_labels` and `window`: the positions
    at which a kernel meets data.

        FLOPs = 2 x batch x output features x input features x product
        over spatial dimensions of pairs(dimension)

    A TPU writes batched and per-head matrix products as convolutions in which most pairs of output
    and kernel positions read padding, or a hole of a dilation: those are not counted.

    left, right, out: dimensions of input, kernel and output.
    """
    # `dim_labels=b0f_0io->b0f` names the dimensions of input, kernel
    # and output: batch, features, spatial by number.
    operand_labels, _, out_labels = instruction.attributes["dim_labels"].partition("->")
    left_labels, right_labels = operand_labels.split("_")
    batch = out[out_labels.index("b")]
    out_features = out[out_labels.index("f")]
    in_features = right[right_labels.index("i")]
    flops = 2.0 * batch * out_features * in_features
    window = _window_of(instruction)
    for label in left_labels:
        if label.isdigit():
            flops *= _kernel_hits(
                window,
                int(label),
                size=left[left_labels.index(label)],
                kernel=right[right_labels.index(label)],
                positions=out[out_labels.index(label)],
            )
    return flops


def _window_of(instruction: Instruction) -> dict[str, list[int]]:
    """Parses a convolution's window, `{size=3x3 pad=1_1x1_1 stride=2x2}`;
    of paddings, the one before the data."""
    text = instruction.attributes.get("window", "{}").strip("{}")
    window: dict[str, list[int]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        window[name] = [int(value.split("_")[0]) for value in values.split("x")]
    return window


def _kernel_hits(
    window: Mapping[str, Sequence[int]], dimension: int, *, size: int, kernel: int, positions: int
) -> int:
    """Counts the pairs of an output and a kernel position that read an element
    of the input, along one dimension.

    Output position p and kernel position k read position

        p * stride + k * rhs_dilate - pad

    of the dilated input, in which element e is at e * lhs_dilate,
    and zeros are between and around the elements.
    """
    ones = [1] * (dimension + 1)
    zeros = [0] * (dimension + 1)
    stride = window.get("stride", ones)[dimension]
    pad = window.get("pad", zeros)[dimension]
    lhs_dilate = window.get("lhs_dilate", ones)[dimension]
    rhs_dilate = window.get("rhs_dilate", ones)[dimension]
    out_offsets = np.arange(positions)[:, None] * stride
    kernel_offsets = np.arange(kernel)[None] * rhs_dilate
    read = out_offsets + kernel_offsets - pad
    is_inside = (read >= 0) & (read <= (size - 1) * lhs_dilate)
    is_element = read % lhs_dilate == 0
    return int((is_inside & is_element).sum())


def matmul_flops(instruction: Instruction) -> float:
    """Counts the FLOPs of one execution of a `dot` or `convolution`."""
    left, right, out = *(operand.shape for operand in instruction.operands[:2]), instruction.shape
    if not (isinstance(left, Array) and isinstance(right, Array) and isinstance(out, Array)):
        return 0.0
    if instruction.opcode == "convolution":
        return convolution_flops(instruction, left.dims, right.dims, out.dims)
    contracted = re.findall(r"\d+", instruction.attributes["lhs_contracting_dims"])
    return 2.0 * out.elements * math.prod(left.dims[int(d)] for d in contracted)


def _price(instruction: Instruction, skipped: Skipped) -> tuple[float, Rate] | None:
    """Returns the FLOPs of one execution and their peak;
    None of an instruction without matrix products."""
    if instruction.opcode in ("dot", "convolution"):
        return matmul_flops(instruction), rate_of(instruction.operand_arrays[:2])
    work = kernel_work(instruction) if is_call(instruction) else None
    return (
        (computed_flops(work, instruction, skipped), work.rate)
        if work is not None and work.flops
        else None
    )


def _products(
    module: Module, skipped: Skipped, branch: Callable[..., Computation]
) -> Iterator[tuple[ExecutionContext, Instruction, float, Rate]]:
    """Yields every instruction with matrix products that one execution
    of the program runs, with its `_price`.

    branch: `max` or `min`: of the branches of a conditional that are not known, the one with the
    most or the fewest FLOPs counts, never the sum.
    """

    @functools.cache
    def total(computation: Computation) -> float:
        """Returns the FLOPs of one execution of a computation."""
        flops = 0.0
        for instruction in computation:
            priced = _price(instruction, skipped)
            flops += priced[0] if priced else 0.0
            if instruction.opcode == "conditional":
                known = [(b, known_branch(instruction, b)) for b in branches_of(instruction)]
                flops += sum(
                    total(b) * taken.taken / taken.executions
                    for b, taken in known
                    if taken is not None
                )
                flops += sum(map(total, choose([b for b, taken in known if taken is None])))
            else:
                trips = trip_count(instruction) if instruction.opcode == "while" else 1
                flops += (1 if trips is None else trips) * sum(map(total, instruction.called))
        return flops

    def choose(branches: Sequence[Computation]) -> Sequence[Computation]:
        return [branch(branches, key=total)] if branches else []

    for context, instruction in walk(module, choose):
        priced = _price(instruction, skipped)
        if priced is not None:
            yield context, instruction, *priced


@dataclasses.dataclass(frozen=True)
class CompiledMatmul:
    """Matrix products of one named scope in one phase of the step, on one device."""

    phase: Phase
    module: str
    """Outermost named scope; empty if there is none."""
    flops: float


def read_matmuls(module: Module, skipped: Skipped = ALL_ROWS) -> list[CompiledMatmul]:
    """Counts the FLOPs of every `dot`, `convolution` and kernel: 2 per multiply-add, times the
    trip counts of loops.

    Of a conditional whose branch is not known, the branch with the most FLOPs counts, and no other.
    A program without a backward pass is one forward pass.
    skipped: what kernels leave out of their operands.
    """
    totals: Counter[tuple[Phase, str]] = Counter()
    for context, instruction, flops, _ in _products(module, skipped, max):
        name = context.op_name(instruction)
        scopes = scopes_of(name, module.branches)
        totals[phase_of(name, module.branches), scopes[0] if scopes else ""] += int(
            flops * context.count
        )
    trained = any(phase == "backward" for phase, _ in totals)
    return [
        CompiledMatmul(phase if trained else "forward", scope, float(n))
        for (phase, scope), n in totals.items()
    ]


def least_flops(module: Module, skipped: Skipped = ALL_ROWS) -> dict[Rate, float]:
    """Returns the FLOPs that a step cannot avoid, by the peak they run at.

    Of a conditional whose branch is not known, the branch with the fewest counts; where the
    frequency of some branches is known, the others count as never taken.
    skipped: what kernels leave out of their operands.
    """
    totals: Counter[Rate] = Counter()
    for context, _, flops, rate in _products(module, skipped, min):
        conditionals = [caller for caller in context.callers if caller.opcode == "conditional"]
        known = [{known_branch(c, b) is not None for b in branches_of(c)} for c in conditionals]
        if not context.conditional or {True, False} not in known:
            totals[rate] += int(flops * context.count)
    return {rate: float(n) for rate, n in totals.items()}


def unpriced_kernels(module: Module) -> dict[str, int]:
    """Returns the executions of each custom call whose FLOPs are not known, by its name."""
    counts: Counter[str] = Counter()
    for context, instruction in walk(module):
        if is_call(instruction) and (work := kernel_work(instruction)).kind == "unknown":
            counts[work.name] += context.count
    return dict(counts)

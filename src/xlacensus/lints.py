"""Checks of a compiled program: what wastes memory, bytes or time, and what to change.

Each check yields findings of what it reads of a program; `census.census` runs those of every program.
A finding without a line is given that of the function's definition.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from xlacensus.compilation import CompiledProgram
from xlacensus.determinism import nondeterminism_of, sums_in_order
from xlacensus.errors import CensusError
from xlacensus.formatting import format_count
from xlacensus.hlo.flops import matmul_flops
from xlacensus.hlo.ledger import LedgerEntry
from xlacensus.hlo.loops import walk
from xlacensus.hlo.parser import (
    Array,
    Instruction,
    Module,
    arrays_of,
    bytes_of,
    closing,
    parse_shape,
)
from xlacensus.hlo.scopes import plain_path
from xlacensus.jaxprs import (
    all_jaxprs,
    lines_of,
    nested_jaxprs,
    product_flops,
    products_needed,
    user_frames,
)
from xlacensus.peak_memory import Argument

MIN_REPLICATED_BYTES = 2**20
"""Size from which a replicated array, or a parameter with padded tiles, is reported."""
_MAX_PADDING = 0.1
"""Fraction of padding from which an array is reported."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing to change in a program."""

    kind: str
    """layout, replicated, duplicated, rematerialised, unexpected, overlap, padding, precision, donation, experts,
    kernel, host, or determinism."""
    subject: str
    """Array or operation that it is about."""
    reason: str
    fix: str
    bytes: int
    """Bytes that a device stores or sends unnecessarily in one execution."""
    line: str = ""
    """FILE:LINE, if the program records it."""


def _spec_of(sharding: Any) -> PartitionSpec | None:
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _format_spec(spec: PartitionSpec | None) -> str:
    return "no NamedSharding" if spec is None else str(spec).replace("PartitionSpec", "P")


def _dim_axes(spec: PartitionSpec | None, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, those of degree 1 and trailing unsharded dimensions left out."""
    dims = [() if p is None else p if isinstance(p, tuple) else (p,) for p in spec or ()]
    kept = [tuple(axis for axis in axes if mesh.get(axis, 1) > 1) for axes in dims]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _num_shards(spec: PartitionSpec | None, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axes in _dim_axes(spec, mesh) for axis in axes)


def lint_layouts(
    program: CompiledProgram,
    leaves: Mapping[str, Any],
    declared: Mapping[str, PartitionSpec],
    mesh: Mapping[str, int],
) -> Iterator[Finding]:
    """Reports arguments and results not sharded as declared, and large undeclared ones that are replicated.

    leaves: arguments by path, in the program's order.  declared: sharding by path; the sharding of an argument that is
    given with one is declared as well.
    Raises CensusError if a declared path is neither an argument nor a result.
    """
    results = program.results("output_shardings")
    result_shapes = program.results("out_info")
    _check_paths(declared, [*leaves, *results])
    sizes: dict[str, int] = {}
    for path, array in {**leaves, **result_shapes}.items():
        if hasattr(array, "dtype"):
            sizes[path] = array.size * array.dtype.itemsize
    shardings: dict[str, Any] = {}
    for path, sharding in {**_argument_shardings(program, leaves), **results}.items():
        if path in sizes and hasattr(sharding, "device_set"):
            shardings[path] = sharding
    specs = {path: _spec_of(getattr(array, "sharding", None)) for path, array in leaves.items()}
    argument_specs = {path: spec for path, spec in specs.items() if spec is not None}
    expected = _replicated_results(leaves, argument_specs, result_shapes, shardings)
    expected |= {**argument_specs, **declared}
    for path, sharding in shardings.items():
        spec = _spec_of(sharding)
        shards = _num_shards(spec, mesh)
        devices = len(sharding.device_set)
        if path in expected:
            if _dim_axes(spec, mesh) != _dim_axes(expected[path], mesh):
                declared_bytes = sizes[path] // _num_shards(expected[path], mesh)
                yield Finding(
                    "layout",
                    path,
                    f"declared {_format_spec(expected[path])}, compiled {_format_spec(spec)}",
                    "pass the array in its declared sharding (jax.device_put, or in_shardings)",
                    max(sizes[path] // shards - declared_bytes, 0),
                )
        elif shards == 1 and sizes[path] >= MIN_REPLICATED_BYTES and devices > 1:
            yield Finding(
                "replicated",
                path,
                f"replicated on each of {devices} devices without a declaration",
                "shard it, or declare it as P() if it is meant to be replicated",
                sizes[path],
            )


def _check_paths(declared: Mapping[str, PartitionSpec], known: Sequence[str]) -> None:
    """Raises CensusError if a declared path is neither an argument nor a result."""
    unknown = sorted(set(declared) - set(known))
    if unknown:
        raise CensusError(
            f"a declared sharding of {unknown[0]}",
            "the function has no argument or result of that path",
            f"one of {', '.join(known[:6])}, ...",
        )


def _argument_shardings(program: CompiledProgram, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the compiled shardings of the arguments that the program uses, by path.

    Empty where the program has no tree of shardings (`Ref`), or not a path for each of them.
    """
    shardings = program.shardings("input_shardings")
    if len(shardings) != len(leaves):
        return {}
    used = {plain_path(i.op_name) for i in program.module.entry.parameters.values()}
    by_path = zip(leaves, shardings, strict=True)
    return {path: sharding for path, sharding in by_path if path in used}


def _replicated_results(
    leaves: Mapping[str, Any],
    argument_specs: Mapping[str, PartitionSpec],
    result_shapes: Mapping[str, Any],
    shardings: Mapping[str, Any],
) -> dict[str, PartitionSpec]:
    """Returns P() for each replicated result that has shape and type of an argument which is passed replicated.

    Such a result, an updated parameter for one, is meant to be replicated as the argument is.
    """
    replicated = {
        (leaves[path].shape, leaves[path].dtype)
        for path, spec in argument_specs.items()
        if not any(spec)
    }
    expected: dict[str, PartitionSpec] = {}
    for path, array in result_shapes.items():
        key = (getattr(array, "shape", None), getattr(array, "dtype", None))
        if key in replicated and path in shardings and shardings[path].is_fully_replicated:
            expected[path] = PartitionSpec()
    return expected


def _padded_dims(
    name: str,
    shape: Sequence[int],
    size: int,
    spec: PartitionSpec | None,
    mesh: Mapping[str, int],
    line: str,
) -> Iterator[Finding]:
    """Yields the dimensions that the mesh does not divide and of which a large fraction is padding."""
    for dim, axes in enumerate(_dim_axes(spec, mesh)):
        n, degree = shape[dim], math.prod(mesh[axis] for axis in axes)
        local = -(-n // degree)
        padded = local * degree
        if n and padded / n - 1 > _MAX_PADDING:
            yield Finding(
                "padding",
                name,
                f"dimension {dim} of {n} over {degree} is padded to {padded} = {degree} * {local}: "
                f"{padded / n - 1:.0%} padding",
                f"a dimension of {n // degree * degree or degree} or {padded}, or another axis",
                (padded - n) * size // n // degree,
                line,
            )


_REMATERIALISATION = re.compile(
    r"from sharding \{(.*?)\} to \{(.*?)\}(?: efficiently| without)?.*? for HLO operation %?(\S+) = (\S+)"
)


def lint_rematerialisation(module: Module, warnings: Sequence[str]) -> Iterator[Finding]:
    """Reports the partitioner's "involuntary full rematerialization" warnings with source line and bytes."""
    for text in dict.fromkeys(warnings):
        match = _REMATERIALISATION.search(text)
        if not match:
            continue
        tiles = re.match(r"devices=\[([\d,]+)\]", match[1])
        local = parse_shape(match[4])
        dims = getattr(local, "dims", ())
        shards = math.prod([int(n) for n in tiles[1].split(",")][: len(dims)]) if tiles else 1
        size = getattr(local, "bytes", 0) * shards
        frame = re.search(r"stack_frame_id=(\d+)", text)
        stack = module.frames.get(int(frame[1]), ()) if frame else ()
        yield Finding(
            "rematerialised",
            f"{match[3]}, {local} on each of {shards}",
            f"from {{{match[1]}}} to {{{match[2]}}} the partitioner can only gather the whole array: "
            f"{size} bytes on every device",
            "constrain the value once, to one of the two shardings, or go through one that differs in one axis",
            size,
            stack[0].location if stack else "",
        )


_HOST_OPCODES = ("infeed", "outfeed", "send", "recv")


def lint_host(module: Module) -> Iterator[Finding]:
    """Reports operations for which a device waits for its host."""
    for context, instruction in walk(module):
        host = instruction.opcode in _HOST_OPCODES or "callback" in instruction.target
        if not host or "_xla_megascale" in instruction.attribute_text:
            continue
        size = sum(i.shape.bytes for i in instruction.operands if isinstance(i.shape, Array))
        yield Finding(
            "host",
            instruction.op_name.rpartition("/")[2] or instruction.opcode,
            f"{instruction.target or instruction.opcode} runs on the host {context.count} x in a step; the device "
            "waits",
            "take the callback out of the step, and read its value from the results",
            size * context.count,
            instruction.line,
        )


_TUNED = re.compile(
    r'"kind":"__(?:triton_\w*gemm|cudnn\$fusion)|custom_call_target="__(?:cublas|cudnn\$conv)'
)
"""Matmuls and convolutions whose kernels XLA:GPU chooses by timing them."""
_EXACT = ("add", "multiply", "minimum", "maximum", "and", "or", "xor")
"""Combiners that give integers the same result in any order; of floats, `minimum` and `maximum` do."""
_MAY_DIFFER = {
    "scatter": "its updates may meet, and they are applied in another order in every run",
    "kernel": "it adds by atomics, in another order in every run",
    "autotuned": "its kernel is chosen by timing, anew in every process: another one adds in another order",
    "sum": "NCCL chooses the algorithm of the sum, and some add in another order in every run (NCCL_ALGO)",
}


def lint_determinism(
    module: Module, ledger: Sequence[LedgerEntry], options: Mapping[str, Any]
) -> Iterator[Finding]:
    """Reports the instructions of a program for GPUs whose results may differ between two runs, by cause and line.

    options: of the compilation.
    """
    atomics, tuned = nondeterminism_of(options)
    found, every = defaultdict[tuple[str, str], list[str]](list), {i.name: i for i in module}
    for i in every.values():
        cause = ""
        if i.opcode == "select-and-scatter":
            cause = "scatter"
        elif i.opcode == "scatter" and "unique_indices=true" not in i.attribute_text:
            cause = "scatter" if _depends_on_order(i) else ""
        elif i.opcode == "custom-call" and (
            "atomic" in i.attribute_text or _adds_by_atomics(i, atomics)
        ):
            cause = "kernel"
        elif tuned and _TUNED.search(i.attribute_text):
            cause = "autotuned"
        if cause:
            found[cause, i.line].append(i.name)
    for entry in () if sums_in_order() else ledger:
        # Two numbers have the same sum in either order.
        reduces = entry.kind in ("all-reduce", "reduce-scatter") and entry.group_size > 2
        if reduces and entry.instruction in every and _depends_on_order(every[entry.instruction]):
            found["sum", entry.line].append(entry.instruction)
    for (cause, line), names in found.items():
        yield Finding(
            "determinism",
            f"{cause}: {', '.join(names)}",
            _MAY_DIFFER[cause],
            "unique_indices=True where indices differ, XLA_FLAGS=--xla_gpu_deterministic_ops=true, and NCCL_ALGO=Ring",
            0,
            line,
        )


def _depends_on_order(instruction: Instruction) -> bool:
    """Whether an instruction that combines values by a computation gives another result in another order."""
    computations = instruction.computation.module.computations
    combiner = computations.get(instruction.attributes.get("to_apply", "").lstrip("%"))
    if combiner is None:
        return True
    exact = (
        _EXACT
        if all(a.dtype[0] in "sup" for a in arrays_of(combiner.root.shape))
        else ("minimum", "maximum")
    )
    return combiner.root.opcode not in exact


def _adds_by_atomics(call: Instruction, allowed: bool) -> bool:
    """Whether a call of cuDNN is attention's backward pass without its deterministic form."""
    backward = call.target.startswith("__cudnn$fmha") and call.target.endswith("Backward")
    return allowed and backward and '"force_deterministic":true' not in call.attribute_text


# The last two dimensions of an array in TPU memory are tiled by 8 x 128 words of 32 bits; narrower types pack more rows
# into a tile (OpenXLA, "Tiled layout").
_LANES, _SUBLANES = 128, 8


def lint_tiles(arguments: Sequence[Argument]) -> Iterator[Finding]:
    """Reports parameters whose local shards leave much of a TPU's tiles empty."""
    for a in arguments:
        if a.category != "parameters" or len(a.local_shape) < 2 or a.bytes < MIN_REPLICATED_BYTES:
            continue
        rows, cols = a.local_shape[-2:]
        sublanes = _SUBLANES * (4 // (a.bytes // math.prod(a.local_shape)) or 1)
        padded_rows, padded_cols = -(-rows // sublanes) * sublanes, -(-cols // _LANES) * _LANES
        padding = padded_rows * padded_cols / (rows * cols) - 1
        if padding > _MAX_PADDING:
            last = padded_cols / cols > padded_rows / rows
            yield Finding(
                "padding",
                a.path,
                f"local shards of {rows} x {cols} in tiles of {sublanes} x {_LANES} are padded to "
                f"{padded_rows} x {padded_cols}, {padding:.0%} padding",
                f"{'last' if last else 'second-last'} dimension on each device of "
                f"{_LANES if last else sublanes} or a multiple: a lower degree of the axis that divides it",
                int(a.bytes * padding),
            )


MIN_DONATED_BYTES = 2**18
"""Bytes on a device from which state that is not donated, or donated in vain, is reported."""
_STATE = ("parameters", "optimizer state")
_UPDATES = frozenset(
    {"add", "sub", "select_n", "convert_element_type", "sharding_constraint", "copy"}
)
"""Primitives through which an update passes its parameter: `w - rate * gradient`, but not a gradient itself."""
_NOT_DONATED = (
    "it is returned updated and not donated: a step holds it twice",
    "donate it: donate_argnums or donate_argnames={tree!r} of jax.jit",
)
_DONATED_IN_VAIN = (
    "it is donated, and no result has its shape, type and sharding: the donation is lost",
    "return it updated in its own type, or do not donate it",
)


def lint_donation(
    module: Module, jaxpr: Any, leaves: Mapping[str, Any], arguments: Sequence[Argument]
) -> Iterator[Finding]:
    """Reports arguments that are returned updated and not donated, and state that is donated and not returned.

    leaves: arguments by path, in the order of the closed jaxpr's inputs.
    """
    if len(leaves) != len(jaxpr.jaxpr.invars):
        return  # no path for every input
    aliased = {
        int(n) for n in re.findall(r": \((\d+),", _header_list(module, "input_output_alias"))
    }
    unused = {int(n) for n in re.findall(r"\((\d+),", _header_list(module, "buffer_donor"))}
    outputs, categories = _updated_inputs(jaxpr.jaxpr), {a.path: a.category for a in arguments}
    updated = {
        path
        for path, variable in zip(leaves, jaxpr.jaxpr.invars, strict=True)
        if variable in outputs
    }
    wasted, vain = Counter[str](), Counter[str]()
    for number, parameter in module.entry.parameters.items():
        path = plain_path(parameter.op_name)
        tree = path.partition(".")[0]
        if number in unused and categories.get(path) in _STATE:
            vain[tree] += bytes_of(parameter.shape)
        elif path != tree and path in updated and number not in aliased | unused:
            # An array on its own is as likely an activation with a residual connection as state.
            wasted[tree] += bytes_of(parameter.shape)
    for sizes, (reason, fix) in ((wasted, _NOT_DONATED), (vain, _DONATED_IN_VAIN)):
        for tree, size in sizes.items():
            if size >= MIN_DONATED_BYTES:
                yield Finding("donation", tree, reason, fix.format(tree=tree), size)


def _updated_inputs(jaxpr: Any) -> set[Any]:
    """Returns the inputs of an open jaxpr of which an output is a sum or difference, through calls."""
    reached = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    passed_on = set(reached)
    for equation in reversed(jaxpr.eqns):
        wanted = [i for i, v in enumerate(equation.outvars) if v in reached]
        if not wanted:
            continue
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        if equation.primitive.name in _UPDATES:
            sources = list(equation.invars)
        elif inner is not None and len(inner.invars) == len(equation.invars):
            found = _updated_inputs(inner)
            sources = [v for v, i in zip(equation.invars, inner.invars, strict=True) if i in found]
        else:
            sources = []
        shapes = {equation.outvars[i].aval.shape for i in wanted}
        reached |= {
            v
            for v in sources
            if isinstance(v, core.Var) and getattr(v.aval, "shape", None) in shapes
        }
    # An argument that is returned as it is was not updated.
    return {v for v in jaxpr.invars if v in reached and v not in passed_on}


def _header_list(module: Module, name: str) -> str:
    """Returns the text of a list in the program's header; empty if it has none."""
    start = module.header.find(f"{name}={{") + len(name) + 1
    return module.header[start : closing(module.header, start)] if start > len(name) else ""


_TWICE = 1.8
"""FLOPs of all devices over those of the function from which work counts as done more than once."""
_MIN_DUPLICATED_FLOPS = 2**30
"""FLOPs on all devices that are done more than once from which they are reported."""


def lint_whole_state(arguments: Sequence[Argument]) -> Iterator[Finding]:
    """Reports optimizer state that is less split than the parameter it belongs to, and batches that are not split.

    State belongs to the parameter of its shape.
    """
    split = {
        a.shape: a for a in arguments if a.category == "parameters" and a.local_shape != a.shape
    }
    for argument in arguments:
        owner = split.get(argument.shape)
        if argument.category == "optimizer state" and owner is not None:
            whole, part = math.prod(argument.local_shape), math.prod(owner.local_shape)
            excess = argument.bytes - argument.bytes * part // whole
            if excess >= MIN_REPLICATED_BYTES:
                yield Finding(
                    "replicated",
                    argument.path,
                    f"{list(argument.local_shape)} on a device, where the parameter {owner.path} has "
                    f"{list(owner.local_shape)}",
                    "give it the sharding of its parameter: initialise it from the sharded ones under jax.jit",
                    excess,
                )
        whole_batch = (
            argument.category == "batch"
            and argument.local_shape == argument.shape
            and argument.shape
        )
        if whole_batch and split and argument.bytes >= MIN_REPLICATED_BYTES:
            yield Finding(
                "replicated",
                argument.path,
                "every device has the whole batch, beside parameters that are split",
                "shard its first dimension over the axes of data parallelism",
                argument.bytes,
            )


def lint_duplicated_work(
    jaxpr: Any, flops: float, arguments: Sequence[Argument], mesh: Mapping[str, int]
) -> Iterator[Finding]:
    """Reports a program whose devices together multiply far more than its function has to.

    jaxpr: closed; None if there is none.  flops: matrix products of one device.
    """
    devices = math.prod(mesh.values())
    needed = None if jaxpr is None or devices == 1 else products_needed(jaxpr.jaxpr)
    if needed and devices * flops >= max(_TWICE * needed, needed + _MIN_DUPLICATED_FLOPS):
        axes = ", ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1)
        split = sorted({a.path for a in arguments if a.local_shape != a.shape})
        yield Finding(
            "duplicated",
            f"matrix products of {format_count(devices * flops)} FLOPs on all devices",
            f"the function has {format_count(needed)}: devices of {axes} compute the same products "
            f"{devices * flops / needed:.1f} times; "
            + (
                f"split over them are {', '.join(split[:3])}"
                if split
                else "no argument is split over them"
            ),
            "shard the batch, or a dimension of the weights, over every axis",
            0,
        )


_GROUPED = "ragged_dot_general"
_FAR_OVER = 1.5
"""FLOPs over those needed from which the grouped matmuls of a program are reported."""


@dataclasses.dataclass(frozen=True)
class GroupedProducts:
    """FLOPs of a program's grouped matmuls, in one execution on one device."""

    needed: float
    """FLOPs where each row is multiplied by the weights of its own group."""
    dense: float
    """FLOPs of the products of all groups with all rows; 0 where the backend has a kernel."""
    line: str
    """FILE:LINE of the first of those."""

    @property
    def excess(self) -> float:
        """FLOPs for rows of other groups."""
        return max(0.0, self.dense - self.needed) if self.dense else 0.0


def grouped_products(module: Module, jaxpr: Any) -> GroupedProducts:
    """Compares the grouped matmuls of a closed jaxpr with the products that the compiler made of them.

    TPUs run `jax.lax.ragged_dot` as a kernel that multiplies each row by the weights of its own group. On CPU and GPU
    it becomes one product of all rows with the weights of all E groups, and masks: E times the FLOPs. A product belongs
    to a grouped matmul if it has its name (GPU) or its source line (CPU).
    """
    needed, places = 0.0, set[tuple[str, int]]()
    for inner, times in all_jaxprs(jaxpr.jaxpr) if jaxpr is not None else ():
        for equation in inner.eqns:
            if equation.primitive.name == _GROUPED:
                # [M, K] x [E, K, N] -> [M, N], or [M, K] x [M, N] -> [E, K, N]: the sizes multiply to E (M K N)^2.
                sizes = math.prod(v.aval.size for v in (*equation.invars[:2], *equation.outvars))
                needed += times * 2.0 * math.sqrt(sizes / equation.invars[2].aval.shape[-1])
                places.update(user_frames(equation)[:1])
    dense, line = 0.0, ""
    for context, instruction in walk(module) if needed else ():
        if instruction.opcode in ("dot", "convolution"):
            is_same_line = any(
                (frame.file, frame.line) in places for frame in instruction.stack[:1]
            )
            if is_same_line or _GROUPED in instruction.op_name:
                dense += context.count * matmul_flops(instruction)
                line = line or instruction.line
    return GroupedProducts(needed, dense, line)


def lint_grouped_matmuls(products: GroupedProducts) -> Iterator[Finding]:
    """Reports grouped matmuls that multiply every row by the weights of every group."""
    if products.dense > _FAR_OVER * products.needed:
        factor = f"{products.dense / products.needed:.1f} times" if products.needed else "more than"
        yield Finding(
            "experts",
            f"ragged_dot, {format_count(products.dense)} FLOPs",
            f"this backend multiplies every row by every group's weights: {factor} the "
            f"{format_count(products.needed)} FLOPs that are needed",
            "a kernel for grouped matmuls, or a capacity for each expert, which makes them one batched matmul",
            0,
            products.line,
        )


_MIN_WIDE = 0.01
"""Fraction of a function's FLOPs from which wide products are reported."""


@dataclasses.dataclass(frozen=True)
class _Site:
    equation: Any
    times: int
    widened: tuple[bool, ...]
    """For each input, whether it comes from 16 bits through elementwise operations in this jaxpr or its callers."""

    @property
    def line(self) -> str:
        """FILE:LINE outside of JAX that traced it."""
        return next(iter(lines_of(self.equation)), "")


def _sites(jaxpr: Any, times: int = 1, widened: frozenset[Any] = frozenset()) -> Iterator[_Site]:
    """Yields all equations of an open jaxpr. widened: inputs that were converted from 16 bits to float32."""
    wide = set(widened)
    for equation in jaxpr.eqns:
        inputs = tuple(not isinstance(v, core.Literal) and v in wide for v in equation.invars)
        yield _Site(equation, times, inputs)
        if _widens(equation, inputs):
            wide |= set(equation.outvars)
        if equation.primitive.name == "pallas_call":
            continue  # a kernel has its own reasons
        for nested, n in nested_jaxprs(equation):
            same = len(nested.invars) == len(inputs)
            given = (
                frozenset(v for v, w in zip(nested.invars, inputs, strict=True) if w)
                if same
                else frozenset()
            )
            yield from _sites(nested, times * n, given)


def _widens(equation: Any, inputs: tuple[bool, ...]) -> bool:
    """Whether an equation converts 16 bits to float32, or passes such a value on in its shape."""
    out: Any = equation.outvars[0].aval if equation.outvars else None
    if getattr(out, "dtype", None) != jnp.float32:
        return False
    sources = [v.aval for v in equation.invars]
    if equation.primitive.name == "convert_element_type":
        return inputs[0] or (
            jnp.issubdtype(sources[0].dtype, jnp.floating) and sources[0].dtype.itemsize <= 2
        )
    return any(w and a.shape == out.shape for w, a in zip(inputs, sources, strict=True))


def lint_source(jaxpr: Any) -> Iterator[Finding]:
    """Reports the constraints of a closed jaxpr that do not divide, float32 products and float64 values that leak."""
    sites = list(_sites(jaxpr.jaxpr))
    for site in sites:
        if site.equation.primitive.name == "sharding_constraint":
            aval, sharding = site.equation.outvars[0].aval, site.equation.params["sharding"]
            mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
            if mesh is not None:
                name, size = f"constraint of {aval.str_short()}", aval.size * aval.dtype.itemsize
                yield from _padded_dims(name, aval.shape, size, spec, mesh.shape, site.line)
    yield from _wide_products(sites)
    yield from itertools.islice(_float64(jaxpr, sites), 1)


def _wide_products(sites: list[_Site]) -> Iterator[Finding]:
    """Reports float32 products of values that had 16 bits, beside products of 16 bits.

    Products of values that never had 16 bits, such as an optimizer's, and `precision=HIGHEST` are taken as meant.
    """
    narrow, wide, excess = 0.0, defaultdict[str, float](float), Counter[str]()
    for site in sites:
        if site.equation.primitive.name != "dot_general":
            continue
        operands = [v.aval for v in site.equation.invars]
        flops, sizes = (
            site.times * product_flops(site.equation),
            {a.dtype.itemsize for a in operands},
        )
        if max(sizes) <= 2:
            narrow += flops
        elif any(site.widened) and not _is_highest(site.equation.params["precision"]):
            wide[site.line] += flops
            excess[site.line] += site.times * sum(2 * a.size for a in operands)
    total = narrow + sum(wide.values())
    for line, flops in wide.items():
        if narrow and flops > _MIN_WIDE * total:
            yield Finding(
                "precision",
                f"float32 product of {format_count(flops)} FLOPs",
                f"{flops / total:.0%} of the FLOPs are of float32 operands, beside {format_count(narrow)} of 16 bits",
                "cast the operands, with preferred_element_type=float32 for the sums; or precision=HIGHEST if it is "
                "meant",
                excess[line],
                line,
            )


def _is_highest(precision: Any) -> bool:
    values = precision if isinstance(precision, tuple) else (precision,)
    return any(value not in (None, lax.Precision.DEFAULT) for value in values)


def _float64(jaxpr: Any, sites: list[_Site]) -> Iterator[Finding]:
    """Reports float64 in a function that is given none: a numpy array or a Python number in 64-bit mode."""
    given = any(getattr(v.aval, "dtype", None) == jnp.float64 for v in jaxpr.jaxpr.invars)
    for site in () if given else sites:
        avals = [
            v.aval for v in site.equation.outvars if getattr(v.aval, "dtype", None) == jnp.float64
        ]
        size = max((a.size * a.dtype.itemsize for a in avals), default=0)
        if size >= MIN_REPLICATED_BYTES and site.line:
            yield Finding(
                "precision",
                f"float64 of {size} bytes",
                "the function computes in float64, and none of its arguments is float64",
                "give constants the dtype of what they meet, such as jnp.asarray(x, y.dtype)",
                size // 2,
                site.line,
            )

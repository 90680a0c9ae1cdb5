"""Checks of a compiled program's layouts: arrays that are replicated, padded,
or not sharded as declared."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from xlacensus.compilation import CompiledProgram
from xlacensus.errors import CensusError
from xlacensus.findings import MAX_PADDING, MIN_REPLICATED_BYTES, Finding
from xlacensus.hlo.parser import Module, parse_shape
from xlacensus.hlo.scopes import plain_path
from xlacensus.peak_memory import Argument


def _spec_of(sharding: Any) -> PartitionSpec | None:
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _format_spec(spec: PartitionSpec | None) -> str:
    return "no NamedSharding" if spec is None else str(spec).replace("PartitionSpec", "P")


def _dim_axes(spec: PartitionSpec | None, mesh: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension, those of degree 1
    and trailing unsharded dimensions left out."""
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
    """Reports arguments and results not sharded as declared,
    and large undeclared ones that are replicated.

    leaves: arguments by path, in the program's order.
    declared: sharding by path; the sharding of an argument that is given with one is declared as
    well. Raises CensusError if a declared path is neither an argument nor a result.
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
    """Returns P() for each replicated result that has shape and type of an argument
    which is passed replicated.

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


def padded_dims(
    name: str,
    shape: Sequence[int],
    size: int,
    spec: PartitionSpec | None,
    mesh: Mapping[str, int],
    line: str,
) -> Iterator[Finding]:
    """Yields the dimensions that the mesh does not divide and of
    which a large fraction is padding."""
    for dim, axes in enumerate(_dim_axes(spec, mesh)):
        n, degree = shape[dim], math.prod(mesh[axis] for axis in axes)
        local = -(-n // degree)
        padded = local * degree
        if n and padded / n - 1 > MAX_PADDING:
            yield Finding(
                "padding",
                name,
                f"dimension {dim} of {n} over {degree} is padded to {padded} = {degree} * {local}: "
                f"{padded / n - 1:.0%} padding",
                f"a dimension of {n // degree * degree or degree} or {padded}, or another axis",
                (padded - n) * size // n // degree,
                line,
            )


# The last two dimensions of an array in TPU memory are tiled by 8 x 128 words of 32 bits; narrower
# types pack more rows into a tile (OpenXLA, "Tiled layout").
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
        if padding > MAX_PADDING:
            last = padded_cols / cols > padded_rows / rows
            yield Finding(
                "padding",
                a.path,
                f"local shards of {rows} x {cols} in tiles of {sublanes} x {_LANES} are padded to "
                f"{padded_rows} x {padded_cols}, {padding:.0%} padding",
                f"{'last' if last else 'second-last'} dimension on each device of "
                f"{_LANES if last else sublanes} or a multiple: a lower degree of the axis that "
                "divides it",
                int(a.bytes * padding),
            )


def lint_whole_state(arguments: Sequence[Argument]) -> Iterator[Finding]:
    """Reports optimizer state that is less split than the parameter it belongs to,
    and batches that are not split.

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
                    f"{list(argument.local_shape)} on a device, where the parameter {owner.path} "
                    f"has {list(owner.local_shape)}",
                    "give it the sharding of its parameter: initialise it from the sharded ones "
                    "under jax.jit",
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


_REMATERIALISATION = re.compile(
    r"from sharding \{(.*?)\} to \{(.*?)\}(?: efficiently| without)?.*?"
    r" for HLO operation %?(\S+) = (\S+)"
)


def lint_rematerialisation(module: Module, warnings: Sequence[str]) -> Iterator[Finding]:
    """Reports the partitioner's "involuntary full rematerialization" warnings
    with source line and bytes."""
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
            f"from {{{match[1]}}} to {{{match[2]}}} the partitioner can only gather the whole "
            f"array: {size} bytes on every device",
            "constrain the value once, to one of the two shardings, or go through one that differs "
            "in one axis",
            size,
            stack[0].location if stack else "",
        )

"""Compilation of a function: what the compiler reports about it,
and the paths and shardings of its arguments."""

import contextlib
import dataclasses
import inspect
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from xlacensus.errors import CensusError
from xlacensus.formatting import format_bytes
from xlacensus.hlo.buffers import BufferAssignment, read_assignment
from xlacensus.hlo.parser import Array, Module, parse_module
from xlacensus.hlo.scopes import Branches, plain_path
from xlacensus.jaxprs import all_jaxprs
from xlacensus.peak_memory import Argument, CompiledMemory


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program and everything the census reads of it."""

    executable: Any
    jaxpr: Any
    """Closed jaxpr of the function; None of one that was lowered before."""
    text: str
    """HLO text after all compiler passes."""
    module: Module
    assignment: BufferAssignment | None
    """XLA's buffer assignment; None if the backend does not provide it."""
    memory: CompiledMemory
    cost_analysis: dict[str, float]
    """The compiler's cost analysis; empty if it has none."""
    warnings: tuple[str, ...]
    compile_seconds: float
    """Time of lowering and compilation."""

    def shardings(self, which: str) -> list[Any]:
        """Lists the compiled `input_shardings` or `output_shardings`;
        empty where JAX cannot arrange them (`Ref`)."""
        try:
            return jax.tree.leaves(getattr(self.executable, which))
        except ValueError:
            return []

    def results(self, which: str) -> dict[str, Any]:
        """Returns `output_shardings` or `out_info` by path;
        empty where it has more than the function (`Ref`)."""
        try:
            leaves = jax.tree_util.tree_flatten_with_path(getattr(self.executable, which))[0]
        except ValueError:
            return {}
        return {plain_path("result" + jax.tree_util.keystr(path)): leaf for path, leaf in leaves}

    def mesh(self, arguments: Any) -> dict[str, int]:
        """Returns the mesh of several devices: of the arguments, the compiled shardings,
        or the source.

        Empty if none has a NamedSharding or a `shard_map`.
        """
        leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
        leaves += [*self.shardings("input_shardings"), *self.shardings("output_shardings")]
        meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)]
        for jaxpr, _ in all_jaxprs(self.jaxpr.jaxpr) if self.jaxpr is not None else ():
            for equation in jaxpr.eqns:
                mesh = equation.params.get(
                    "mesh", getattr(equation.params.get("sharding"), "mesh", None)
                )
                meshes += [mesh] if hasattr(mesh, "shape") else []
        return next((dict(mesh.shape) for mesh in meshes if mesh.size > 1), {})

    @property
    def device_kind(self) -> str:
        """Kind of the devices that it was compiled for."""
        for sharding in (*self.shardings("input_shardings"), *self.shardings("output_shardings")):
            devices = getattr(sharding, "_device_assignment", None) or tuple(sharding.device_set)
            if devices:
                return str(devices[0].device_kind)
        return jax.devices()[0].device_kind


# JAX does not compile a program twice, and then the compiler does not repeat its warnings. An
# option of its own (this one is on by default) gives the census a compilation of its own.
_RECOMPILE = {"xla_detailed_logging": True}
_warnings_by_program: dict[int, list[str]] = {}


class OutOfMemory(CensusError):
    """The compiler's refusal of a program that does not fit the device's memory."""

    def __init__(self, required: float, available: float):
        super().__init__(
            "compiling the program for this device",
            f"the compiler needs {format_bytes(required)} of HBM at the peak; "
            f"{format_bytes(available)} are available",
            "use a remat policy that saves less, more microbatches, or more devices",
        )
        self.required, self.available = required, available


_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NO_SPACE = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")


def compiler_error(error: Exception) -> CensusError:
    """Converts an error of XLA: OutOfMemory with its sizes,
    or CensusError with the beginning of the error."""
    match = _NO_SPACE.search(str(error))
    if match:
        return OutOfMemory(float(match[1]) * _SIZES[match[2]], float(match[3]) * _SIZES[match[4]])
    said = " ".join(str(error).split())[:600]
    return CensusError(
        "compiling the program", f"the compiler refuses it: {said}", "another mesh, batch or target"
    )


def compile_function(
    function: Any,
    *arguments: Any,
    compiler_options: Mapping[str, Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    branches: Branches | None = None,
) -> CompiledProgram:
    """Compiles `function` for `arguments`, which may be abstract. Nothing runs.

    function: jitted or not (`jax.jit`, `nnx.jit`, `equinox.filter_jit`), or what JAX makes of one
    on the way: a `Traced`, `Lowered` or `Compiled`, without arguments.
    compiler_options: XLA options by name.
    keywords: keyword arguments of the function.
    branches: how often the branches of conditionals are taken, as far as it is known.

    Raises OutOfMemory, or CensusError with the compiler's message.
    """
    traced, lowered = _stages_of(function, arguments, keywords or {})
    started = time.perf_counter()
    warnings: list[str] = []
    if lowered is None and traced is None:
        executable = function  # compiled already, with its own options
    else:
        with _capture_warnings() as warnings:
            lowered = traced.lower() if lowered is None else lowered
            try:
                executable = lowered.compile(
                    compiler_options={**_RECOMPILE, **(compiler_options or {})}
                )
            except jax.errors.JaxRuntimeError as error:
                raise compiler_error(error) from error
    seconds = time.perf_counter() - started
    text, stats = executable.as_text(), executable.memory_analysis()
    # A second census of the same program finds it compiled; the warnings of the first still apply.
    warnings = _warnings_by_program.setdefault(hash(text), warnings)
    return CompiledProgram(
        executable,
        None if traced is None else traced.jaxpr,
        text,
        parse_module(text, branches),
        _buffer_assignment(executable, stats),
        CompiledMemory.of(executable),
        dict(executable.cost_analysis() or {}),
        tuple(warnings),
        seconds,
    )


def _stages_of(
    function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns the `Traced` and the `Lowered` of a function, as far as there are any;
    neither of a `Compiled`.

    nnx.jit and equinox.filter_jit wrap those of the jax.jit that they contain.
    """
    if isinstance(function, jax.stages.Compiled):
        return None, None
    if isinstance(function, jax.stages.Lowered):
        return None, function
    if isinstance(function, jax.stages.Traced):
        return function, None
    if hasattr(function, "trace"):
        traced = function.trace(*arguments, **keywords)
        return getattr(traced, "traced", traced), None
    if hasattr(function, "lower"):
        wrapped = function.lower(*arguments, **keywords)
        return None, getattr(wrapped, "lowered", wrapped)
    return jax.jit(function).trace(*arguments, **keywords), None


def _buffer_assignment(executable: Any, stats: Any) -> BufferAssignment | None:
    """Reads XLA's buffer assignment;
    None if the backend gives none (TPU), or gives no instruction names."""
    data = getattr(stats, "serialized_buffer_assignment_proto", b"")
    if not data:
        return None
    modules = executable.runtime_executable().hlo_modules()
    assignment = read_assignment(data, modules[0].as_serialized_hlo_module_proto())
    return assignment if assignment.temporary == stats.temp_size_in_bytes else None


@contextlib.contextmanager
def _capture_warnings() -> Iterator[list[str]]:
    """Collects the rematerialisation warnings XLA writes to file descriptor 2;
    other lines are written there after."""
    warnings: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield warnings
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if "rematerialization" in line:
                    warnings.append(line)
                else:
                    with contextlib.suppress(OSError):
                        os.write(2, (line + "\n").encode())


ARGUMENT_CATEGORIES: dict[str, str] = {
    "params": "parameters",
    "parameters": "parameters",
    "weights": "parameters",
    "opt_state": "optimizer state",
    "optimizer": "optimizer state",
    "batch": "batch",
    "inputs": "batch",
    "targets": "batch",
    "labels": "batch",
}
"""Memory category of arguments with the usual names."""


def argument_leaves(jaxpr: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """Returns the arrays that a closed jaxpr takes,
    by the paths that the compiled program has for them.

    Static arguments are not among them, and a Python number is an array of no dimensions. Each is
    the leaf of `arguments` (positional ones, then a dictionary of keywords), or where these do not
    say, its abstract value.
    """
    names = [plain_path(name) for name in jaxpr.jaxpr.debug_info.arg_names]
    given = [
        leaf
        for leaf in jax.tree.leaves(arguments)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]
    leaves: dict[str, Any] = {}
    for name, variable in zip(names, jaxpr.jaxpr.invars, strict=False):
        wanted = (getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None))
        place = next(
            (i for i, leaf in enumerate(given) if (leaf.shape, leaf.dtype) == wanted), None
        )
        abstract = jax.ShapeDtypeStruct(
            getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", jnp.bool_)
        )
        leaves[name] = abstract if place is None else given.pop(place)
    return leaves


def definition_line(function: Any) -> str:
    """Returns FILE:LINE where a function is defined; empty if it is not a Python function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""


def program_arguments(
    module: Module, leaves: Mapping[str, Any], categories: Mapping[str, str]
) -> list[Argument]:
    """Lists the program's parameters; JAX drops arguments that the function does not use.

    leaves: arrays by path.  categories: beginning of a path -> memory category.
    """
    parameters = module.entry.parameters
    # A program that takes references (`Ref`) does not name its parameters, and keeps all of them.
    paths = {number: str(number) for number in parameters}
    paths |= dict(enumerate(leaves)) if len(leaves) == len(parameters) else {}
    paths |= {number: plain_path(i.op_name) for number, i in parameters.items() if i.op_name}
    located = {number: _categorise(paths[number], categories) for number in parameters}
    modules = {part for category, part in located.values() if category == "parameters"}
    arguments: list[Argument] = []
    for number, instruction in sorted(parameters.items()):
        local = instruction.shape
        if isinstance(local, Array):
            shape = tuple(leaves[paths[number]].shape) if paths[number] in leaves else local.dims
            category, part = located[number]
            part = part if part in modules else ""
            arguments.append(
                Argument(paths[number], category, part, shape, local.dims, local.bytes)
            )
    return arguments


def _categorise(path: str, categories: Mapping[str, str]) -> tuple[str, str]:
    prefixes = [known for known in categories if path == known or path.startswith(known + ".")]
    if not prefixes:
        return f"argument {path.partition('.')[0]}", ""
    longest = max(prefixes, key=len)
    parts = [p for p in path.removeprefix(longest).strip(".").split(".") if p]
    if categories[longest] == "optimizer state":
        # After the index and name of the moment, optax's state repeats the tree of parameters.
        parts = [
            p for p in parts if not p.isdigit() and p not in ("mu", "nu", "trace", "inner_states")
        ]
    return categories[longest], parts[0] if parts else ""

"""Arguments and results of a compiled program: their paths, memory categories and shardings."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.analysis.compile import CompiledProgram
from meshwright.analysis.lint import Finding, lint_layouts
from meshwright.analysis.memory import Argument
from meshwright.errors import CensusError
from meshwright.hlo.parser import Array, Module
from meshwright.hlo.scopes import plain_path

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
    """Returns the arrays that a closed jaxpr takes, by the paths that the compiled program has for them.

    Static arguments are not among them, and a Python number is an array of no dimensions. Each is the leaf of
    `arguments` (positional ones, then a dictionary of keywords), or where these do not say, its abstract value.
    """
    names = [plain_path(name) for name in jaxpr.jaxpr.debug_info.arg_names]
    given = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    leaves: dict[str, Any] = {}
    for name, variable in zip(names, jaxpr.jaxpr.invars, strict=False):
        wanted = (getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None))
        place = next((i for i, leaf in enumerate(given) if (leaf.shape, leaf.dtype) == wanted), None)
        abstract = jax.ShapeDtypeStruct(getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", jnp.bool_))
        leaves[name] = abstract if place is None else given.pop(place)
    return leaves


def definition_line(function: Any) -> str:
    """Returns FILE:LINE where a function is defined; empty if it is not a Python function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""


def mesh_of_program(arguments: Any, executable: Any, jaxpr: Any) -> dict[str, int]:
    """Returns the mesh of a program over several devices: of its arguments, its compiled shardings, or its source.

    Empty if none has a NamedSharding or a `shard_map`. jaxpr: closed; None where there is none.
    """
    leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    leaves += [*program_shardings(executable, "input_shardings"), *program_shardings(executable, "output_shardings")]
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)]
    meshes += [] if jaxpr is None else _written_meshes(jaxpr.jaxpr)
    return next((dict(mesh.shape) for mesh in meshes if mesh.size > 1), {})


def program_shardings(executable: Any, which: str) -> list[Any]:
    """Lists the compiled shardings of arguments or results; empty where JAX cannot arrange them in a tree (`Ref`)."""
    try:
        return jax.tree.leaves(getattr(executable, which))
    except ValueError:
        return []


def _results(executable: Any, which: str) -> dict[str, Any]:
    """Returns what the executable tells of its results by path; empty where it has more than the function (`Ref`)."""
    try:
        return leaves_by_path(["result"], [getattr(executable, which)])
    except ValueError:
        return {}


def _written_meshes(jaxpr: Any) -> list[Any]:
    """Lists the meshes of `shard_map`s and sharding constraints in an open jaxpr."""
    found: list[Any] = []
    for equation in jaxpr.eqns:
        mesh = equation.params.get("mesh", getattr(equation.params.get("sharding"), "mesh", None))
        found += [mesh] if hasattr(mesh, "shape") else []
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                nested = getattr(part, "jaxpr", part)
                found += _written_meshes(nested) if isinstance(nested, core.Jaxpr) else []
    return found


def leaves_by_path(names: Sequence[str], trees: Sequence[Any]) -> dict[str, Any]:
    """Maps paths such as `state.params.blocks.query` to the leaves of several named trees."""
    return {
        plain_path(name + jax.tree_util.keystr(path)): leaf
        for name, tree in zip(names, trees, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def program_arguments(module: Module, leaves: Mapping[str, Any], categories: Mapping[str, str]) -> list[Argument]:
    """Lists the program's parameters; JAX drops arguments that the function does not use.

    leaves: arrays by path.  categories: beginning of a path -> memory category.
    """
    parameters = module.entry.parameters
    # A program that takes references (`Ref`) does not name its parameters, and keeps all of them.
    paths = dict(enumerate(leaves)) if len(leaves) == len(parameters) else {}
    paths |= {number: plain_path(i.op_name) for number, i in parameters.items() if i.op_name}
    located = {number: _categorise(paths.get(number, ""), categories) for number in parameters}
    modules = {part for category, part in located.values() if category == "parameters"}
    arguments: list[Argument] = []
    for number in sorted(parameters):
        instruction = parameters[number]
        if not isinstance(instruction.shape, Array):
            continue
        path = paths.get(number, str(number))
        leaf = leaves.get(path)
        local_shape = instruction.shape.dims
        category, part = _categorise(path, categories)
        part = part if part in modules else ""
        shape = tuple(leaf.shape) if leaf is not None else local_shape
        arguments.append(Argument(path, category, part, shape, local_shape, instruction.shape.bytes))
    return arguments


def _categorise(path: str, categories: Mapping[str, str]) -> tuple[str, str]:
    """Returns the memory category of an argument and the part of the model it belongs to."""
    prefixes = [known for known in categories if path == known or path.startswith(known + ".")]
    if not prefixes:
        return f"argument {path.partition('.')[0]}", ""
    longest = max(prefixes, key=len)
    parts = [p for p in path.removeprefix(longest).strip(".").split(".") if p]
    if categories[longest] == "optimizer state":
        # After the index and name of the moment, optax's state repeats the tree of parameters.
        parts = [p for p in parts if not p.isdigit() and p not in ("mu", "nu", "trace", "inner_states")]
    return categories[longest], parts[0] if parts else ""


def layout_findings(
    leaves: Mapping[str, Any],
    program: CompiledProgram,
    declared: Mapping[str, PartitionSpec],
    mesh: Mapping[str, int],
    line: str,
) -> list[Finding]:
    """Compares the compiled shardings of arguments and results with the declared ones.

    leaves: arguments by path, in the program's order.  declared: sharding by path; the sharding of an argument that is
    given with one is declared as well.  line: where the function is defined.
    Raises CensusError if a declared path is neither an argument nor a result.
    """
    executable = program.executable
    used = {plain_path(i.op_name) for i in program.module.entry.parameters.values()}
    inputs = program_shardings(executable, "input_shardings")
    # Without a tree of shardings (`Ref`), or paths for all of them, those of the arguments are not compared.
    paths = zip(leaves, inputs, strict=True) if len(inputs) == len(leaves) else ()
    compiled = {path: sharding for path, sharding in paths if path in used}
    given = {p: s.spec for p, a in leaves.items() if isinstance(s := getattr(a, "sharding", None), NamedSharding)}
    results, shapes = _results(executable, "output_shardings"), _results(executable, "out_info")
    unknown = sorted(set(declared) - set(leaves) - set(results))
    if unknown:
        raise CensusError(
            f"a declared sharding of {unknown[0]}",
            "the function has no argument or result of that path",
            f"one of {', '.join([*leaves, *results][:6])}, ...",
        )
    sizes = {p: a.size * a.dtype.itemsize for p, a in {**leaves, **shapes}.items() if hasattr(a, "dtype")}
    shardings = {p: s for p, s in {**compiled, **results}.items() if p in sizes and hasattr(s, "device_set")}
    # A result that has the shape of an argument given whole, such as an updated parameter, is as whole as that is.
    whole = {(leaves[p].shape, leaves[p].dtype) for p, spec in given.items() if not any(spec)}
    expected = {
        p: PartitionSpec() for p, a in shapes.items() if (getattr(a, "shape", None), getattr(a, "dtype", None)) in whole
    }
    expected = {p: spec for p, spec in expected.items() if p in shardings and _is_whole(shardings[p])}
    return lint_layouts(shardings, {**expected, **given, **declared}, sizes, mesh, line)


def _is_whole(sharding: Any) -> bool:
    return bool(sharding.is_fully_replicated)

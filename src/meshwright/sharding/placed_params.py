"""Described parameters on a mesh: rows of stacks, placements, shardings, and all-gathers."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.errors import ConfigError
from meshwright.mesh_shape import MeshShape
from meshwright.sharding.params import (
    GatherParams,
    Param,
    ParamGathers,
    Stored,
    Tree,
    is_param,
    tree_map,
)
from meshwright.sharding.placement import Layout, Placements, notation, place_param, to_spec


def frozen_params(params: Tree, dtype: Stored) -> Tree:
    """Returns the descriptions of a copy that training does not change.

    It is kept in `dtype`, or float32 if it has to be.
    """
    return tree_map(
        lambda p: dataclasses.replace(
            p, frozen=True, stored="float32" if p.precision == "float32" else dtype
        ),
        params,
    )


REFERENCE = "reference"
"""Subtree of the parameters with a frozen copy of all others, of models that learn preferences."""


def with_reference(params: Tree, shardings: Tree, described: Tree) -> Tree:
    """Returns parameters with their copy, the reference.

    shardings, described: of all of them.
    """
    own = {path: tree for path, tree in params.items() if path != REFERENCE}
    types = tree_map(lambda p: p.stored, described[REFERENCE])
    copy = jax.jit(
        lambda own: jax.tree.map(lambda w, dtype: w.astype(dtype), own, types),
        out_shardings=shardings[REFERENCE],
    )
    return {**own, REFERENCE: copy(own)}


def reorder_stacks(params: Tree, orders: dict[str, tuple[int, ...]]) -> Tree:
    """Returns `params` with the rows of each stack in the order given for its subtree."""
    reordered = {}
    for path, tree in params.items():
        if path in orders:
            tree = tree_map(functools.partial(_reorder, orders[path]), tree)
        reordered[path] = tree
    return reordered


def _reorder(order: tuple[int, ...], p: Param) -> Param:
    """Returns a stacked parameter with its rows in this order."""
    if order == tuple(range(p.shape[0])):
        return p
    return dataclasses.replace(p, shape=(len(order), *p.shape[1:]), order=order)


def place_params(params: Tree, *, layout: Layout, mesh: MeshShape, min_size: int) -> Tree:
    """Returns the same tree of Placements.

    Raises ConfigError with the first tensor that does not divide.
    """
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)
    placements = []
    for keys, p in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        place = functools.partial(place_param, path, p.shape, p.dims, layout=layout, mesh=mesh)
        try:
            placements.append(place(min_size=min_size))
        except ConfigError:
            # Adapters and scales are small: if no dimension divides, they are replicated.
            if p.role != "adapter" and not path.endswith(".scales"):
                raise
            placements.append(place(min_size=p.size + 1))
    return treedef.unflatten(placements)


def shardings(mesh: Mesh, placed: Tree, which: Literal["at_rest", "optimizer"]) -> Tree:
    """Returns the same tree of NamedShardings. placed: tree of Placements; which: its field."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, to_spec(getattr(p, which))),
        placed,
        is_leaf=lambda x: isinstance(x, Placements),
    )


def plan_gathers(
    params: Tree,
    placed: Tree,
    *,
    compute_dtype: Any,
    reduce_dtype: Any,
    dcn: DcnAxis,
    summed: Tree | None = None,
) -> GatherParams:
    """Plans the all-gathers that lead from `at_rest` to `in_use`.

    There is one for each dimension that is sharded further.
    placed: tree of Placements.  summed: tree of the axes over which the backward pass sums a
    gradient; None sums over none. Raises ConfigError for placements that no all-gather connects.
    """

    def plan(path: Any, p: Param, placements: Placements, sum_over: Axes = ()) -> ParamGathers:
        gathers: list[tuple[Axes, int | None]] = []
        for i, (sharded, used) in enumerate(
            zip(placements.at_rest, placements.in_use, strict=True)
        ):
            if sharded[: len(used)] != used or (sharded != used and p.dims[i] == "L"):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"{name} as {notation('w', p.dims, placements.at_rest)} at rest and "
                    f"{notation('w', p.dims, placements.in_use)} in use",
                    f"an all-gather removes the last axes of a dimension, and not those of "
                    f"layers: {p.dims[i]}",
                    "a layout whose placement at rest adds axes to the one in use",
                )
            if sharded != used:
                gathers.append((sharded[len(used) :], i - p.dims.count("L")))
        # Over DCN first, while the array is small.
        gathers.sort(key=lambda gather: dcn.axis not in gather[0])
        # First forwards, last backwards: of the scattered gradient the sum moves least.
        gathers = [(sum_over, None), *gathers] if sum_over else gathers
        # Quantised weights travel as they are.
        dtype: Any = None if p.precision == "compute" else p.precision
        if p.stored in ("int8", "uint8"):
            dtype = p.stored
        return ParamGathers(tuple(gathers), dtype)

    trees = (placed,) if summed is None else (placed, summed)
    gathers = jax.tree_util.tree_map_with_path(plan, params, *trees, is_leaf=is_param)
    return GatherParams(gathers, compute_dtype, reduce_dtype, dcn)

"""Functions of somebody's own laid over a mesh: specs by rank, whole-mesh batches, dimensions that do not divide.

The partitioner of large-model trainers before there was `shard_map` worked this way (Praxis and Lingvo: train,
evaluate and decode functions, variables padded where they are kept and sliced where they are used).
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.errors import ConfigError


def by_rank(tree: Any, specs: Mapping[int, PartitionSpec]) -> Any:
    """A spec for each array of `tree`, by its rank. Raises ConfigError, naming the array, for a rank without one."""

    def spec(path: Any, x: Any) -> PartitionSpec:
        if x.ndim not in specs:
            known = ", ".join(map(str, sorted(specs)))
            raise ConfigError(
                f"a spec for {jax.tree_util.keystr(path) or 'the array'} of rank {x.ndim}",
                f"specs are given for rank {known or 'none'}", f"{x.ndim}: PartitionSpec(...)",
            )  # fmt: skip
        return specs[x.ndim]

    return jax.tree_util.tree_map_with_path(spec, tree)


def batch_over_mesh(tree: Any, mesh: Mesh) -> Any:
    """Specs that split the first dimension of each array over every axis of the mesh."""
    return jax.tree.map(lambda x: PartitionSpec(tuple(mesh.axis_names), *[None] * (x.ndim - 1)), tree)


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """`shape`, each dimension rounded up to what the axes that split it divide."""

    def degree(axes: Any) -> int:
        named = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        return math.prod(mesh.shape[axis] for axis in named)

    pairs = itertools.zip_longest(shape, spec[: len(shape)], fillvalue=None)
    return tuple(-(-n // degree(axes)) * degree(axes) for n, axes in pairs if n is not None)


def pad(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Each array with zeros behind it, so that its spec divides it."""

    def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        shape = padded_shape(x.shape, spec, mesh)
        behind = [(0, after - before) for before, after in zip(x.shape, shape, strict=True)]
        return jnp.pad(x, behind) if x.ndim else x

    return jax.tree.map(one, tree, specs)


def cut(tree: Any, shapes: Any) -> Any:
    """Each array without its padding. shapes: the same tree of arrays, abstract or not, as they really are."""
    return jax.tree.map(lambda x, real: x[tuple(slice(n) for n in real.shape)], tree, shapes)


def partition_state(state: Any, specs: Any, mesh: Mesh) -> Any:
    """The state at rest: padded and laid out by its specs."""
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    # A copy: a step that gives its state away must not take the caller's arrays with it.
    return jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), pad(state, specs, mesh)), where)


def partition_step(
    step: Callable[..., Any], state: Any, specs: Any, mesh: Mesh, *, updates: bool
) -> Callable[..., Any]:  # fmt: skip
    """`step(state, batch)` over the mesh, jitted: the padded state is cut before it runs.

    state: the state as it really is, abstract or not.  specs: the same tree of PartitionSpecs.
    updates: whether the step returns (new state, results), of which the state is padded again and the old one donated,
    rather than results alone. The batch is split over the whole mesh; results are whole.
    """
    spec_leaf = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    at_rest = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=spec_leaf)
    whole = NamedSharding(mesh, PartitionSpec())

    def run(held: Any, batch: Any) -> Any:
        split = jax.tree.map(lambda s: NamedSharding(mesh, s), batch_over_mesh(batch, mesh), is_leaf=spec_leaf)
        out = step(cut(held, state), jax.lax.with_sharding_constraint(batch, split))
        return (pad(out[0], specs, mesh), out[1]) if updates else out

    if updates:
        return jax.jit(run, out_shardings=(at_rest, whole), donate_argnums=(0,))
    return jax.jit(run, out_shardings=whole)


def take_microbatch(xs: jax.Array, ids: jax.Array, axis: str) -> jax.Array:
    """Inside a shard_map: the microbatch that this stage works on. xs: [M, ...], whole; ids: [P] int, one a stage."""
    return jnp.take(xs, ids[jax.lax.axis_index(axis)], axis=0)

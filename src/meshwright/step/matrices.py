"""Optimizers of unsharded matrices: every device gets some layers in full and computes their update.

A parameter of L layers is sharded like its optimizer state. Each of the n devices that share its layers owns L / n of
them: one all-to-all per sharded dimension brings the next n layers together, a full one on each device, and another
takes the results back. Axes that replicate a parameter split its layers too; there nothing is sent until the results
are gathered. A round moves n layers, so that a device never has more than one layer of one parameter.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.comm.collectives import all_gather, all_to_all, local_shard
from meshwright.comm.hierarchical import Axes
from meshwright.config import MeshShape
from meshwright.sharding.params import Tree, is_param
from meshwright.sharding.placement import Placement, axes_of, like_param, to_spec


@dataclasses.dataclass(frozen=True)
class Owners:
    """Devices that share the layers of a parameter; each owns as many as the others."""

    axes: Axes
    """Mesh axes of these devices: those that shard the parameter, then those that replicate it."""
    sizes: tuple[int, ...]
    """Degrees of these axes."""

    @property
    def count(self) -> int:
        """Number of devices n."""
        return math.prod(self.sizes)

    def of(self, axes: Axes) -> tuple[int, ...]:
        """Returns the degrees of `axes`."""
        return tuple(self.sizes[self.axes.index(axis)] for axis in axes)

    def unsplit(self, where: Placement) -> Axes:
        """Returns the axes that do not split the layers (dimension 0) of an array by owner already."""
        return tuple(axis for axis in self.axes if axis not in where[0])

    def fetch(self, x: jax.Array, where: Placement) -> jax.Array:
        """Returns the layers [k, ...] that this device owns, unsharded, from local blocks x of all layers [n k, ...].

        where: placement of x. Layers that it splits by owner already stay where they are, and of replicas each device
        takes its own layers. Sends v(n-1)/n for each sharded dimension, for v bytes of the result.
        """
        lead = list(self.unsplit(where))
        x = x.reshape(*self.of(tuple(lead)), -1, *x.shape[1:])
        replicated = tuple(axis for axis in lead if axis not in axes_of(where))
        if replicated:
            x, lead = _merge_in_front(x, lead, replicated)
            x = local_shard(x, replicated, 0)[0]
        for dim, axes in _sharded(where, lead):
            x, lead = _merge_in_front(x, lead, axes)
            x = all_to_all(x, axes, 0, 1 + len(lead) + dim)[0]
        return x

    def give_back(self, x: jax.Array, where: Placement) -> jax.Array:
        """Inverts `fetch`: returns local blocks of all layers from the full layers x [k, ...] of this device."""
        mine, lead = self.unsplit(where), list[str]()
        # Shards before replicas: what is gathered is then small.
        for dim, axes in reversed(_sharded(where, mine)):
            x = all_to_all(x[None], axes, 1 + len(lead) + dim, 0)
            x, lead = x.reshape(*self.of(axes), *x.shape[1:]), [*axes, *lead]
        replicated = tuple(axis for axis in mine if axis not in lead)
        if replicated:
            x = all_gather(x[None], replicated, 0)
            x, lead = x.reshape(*self.of(replicated), *x.shape[1:]), [*replicated, *lead]
        x = x.transpose(*(lead.index(axis) for axis in mine), *range(len(lead), x.ndim))
        return x.reshape(-1, *x.shape[len(lead) + 1 :])


def _sharded(where: Placement, among: Any) -> list[tuple[int, Axes]]:
    """Returns the dimensions after the layers that are sharded over some of the axes `among`, and over which."""
    found = [
        (dim, tuple(axis for axis in axes if axis in among))
        for dim, axes in enumerate(where[1:], 1)
    ]
    return [(dim, axes) for dim, axes in found if axes]


def _merge_in_front(x: jax.Array, lead: list[str], axes: Axes) -> tuple[jax.Array, list[str]]:
    """Merges the leading dimensions of `axes` into the first one; returns the array, and which others follow."""
    rest = [axis for axis in lead if axis not in axes]
    x = x.transpose(*(lead.index(axis) for axis in (*axes, *rest)), *range(len(lead), x.ndim))
    return x.reshape(-1, *x.shape[len(axes) :]), rest


def owners_of(where: Placement, split: Axes, mesh: MeshShape) -> Owners:
    """Returns the devices that share the layers of a parameter. split: axes along which other layers lie."""
    sharded = tuple(axis for axis in axes_of(where) if axis not in split)
    axes = (
        *sharded,
        *(a for a, n in mesh.degrees().items() if n > 1 and a not in sharded and a not in split),
    )
    return Owners(axes, tuple(mesh.degrees()[axis] for axis in axes))


LayerFunction = Callable[..., Any]
"""`(trees of full layers [k, ...]) -> tree of full layers [k, ...]`, each layer independently."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments and outputs of a function of layers, on this device: local blocks and their placements."""

    owners: Owners
    arguments: Any
    """Tree of arrays [L, ...]."""
    where: Any
    """The same tree of Placements."""
    where_out: Any
    """Tree of the outputs' Placements."""

    def flat(self) -> list[tuple[jax.Array, Placement]]:
        """Returns the arguments, each with its placement."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(self.arguments)
        return list(zip(leaves, treedef.flatten_up_to(self.where), strict=True))

    def rows(self, start: int, stop: int | None) -> "Job":
        """Returns the job of some of the layers."""
        return dataclasses.replace(
            self, arguments=jax.tree.map(lambda x: x[start:stop], self.arguments)
        )

    def in_rounds(self, function: LayerFunction, rounds: int, each: int = 1) -> Any:
        """Returns local blocks of the outputs for the first n * rounds * each layers, `each` of a device at a time."""
        owners, flat = self.owners, self.flat()
        split = [
            x.reshape(math.prod(owners.of(owners.unsplit(w))), rounds, -1, *x.shape[1:])
            for x, w in flat
        ]

        def one(i: Any) -> Any:
            taken = [jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in split]
            whole = [
                owners.fetch(x.reshape(-1, *x.shape[2:]), w)
                for x, (_, w) in zip(taken, flat, strict=True)
            ]
            found = function(*jax.tree.unflatten(jax.tree.structure(self.arguments), whole))
            treedef: Any
            leaves, treedef = jax.tree.flatten(found)
            back = [
                owners.give_back(x, w)
                for x, w in zip(leaves, treedef.flatten_up_to(self.where_out), strict=True)
            ]
            return treedef.unflatten([x.reshape(-1, each, *x.shape[1:]) for x in back])

        if rounds == 1:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), one(0))

        def add(i: Any, out: Any) -> Any:
            return jax.tree.map(
                lambda o, x: jax.lax.dynamic_update_index_in_dim(o, x, i, 1), out, one(i)
            )

        out = jax.tree.map(
            lambda x: jnp.zeros((x.shape[0], rounds, *x.shape[1:]), x.dtype), jax.eval_shape(one, 0)
        )
        out = jax.lax.fori_loop(0, rounds, add, out)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), out)


def pad_layers(x: jax.Array, rows: int) -> jax.Array:
    """Repeats the last layer of x [L, ...] up to `rows` layers: a layer of zeros may have no inverse."""
    return (
        jnp.concatenate([x, jnp.repeat(x[-1:], rows - x.shape[0], 0)]) if rows > x.shape[0] else x
    )


@dataclasses.dataclass(frozen=True)
class LayerMap:
    """Applies functions of full layers to parameters, gradients and optimizer state, each layer on one device.

    The step gives it to optimizers as the extra argument `layer_map` of optax's `update`.
    """

    mesh: Mesh
    shape: MeshShape
    params: Tree
    """Descriptions."""
    placements: Tree
    compute_dtype: Any
    """Type of the run's matmuls."""

    def __call__(self, function: LayerFunction, *trees: Tree) -> Tree:
        """Returns `function` of each stacked parameter's layers, placed like the optimizer state.

        trees: one tree per argument of `function`, with the structure of the parameters; at a parameter it has an
        array, or a tuple of arrays, that begin with the layers [L, ...], and in the first tree None at those that are
        left out. The result has a tuple of arrays, or an array, at each parameter, or None. Where the devices do not
        divide the layers, those that are left are computed with those of parameters of the same shapes.
        """
        treedef: Any
        leaves, treedef = jax.tree.flatten(self.params, is_leaf=is_param)
        columns = [treedef.flatten_up_to(tree) for tree in trees]
        chosen = [i for i, x in enumerate(columns[0]) if x is not None]
        flat_placements = treedef.flatten_up_to(self.placements)

        def place(i: int, tree: Any) -> Any:
            where = flat_placements[i].optimizer
            return jax.tree.map(
                lambda x: like_param(x.shape, leaves[i].shape, where, self.shape), tree
            )

        arguments = [tuple(column[i] for column in columns) for i in chosen]
        outputs = [jax.eval_shape(function, *args) for args in arguments]
        where_in, where_out = (
            [place(i, tree) for i, tree in zip(chosen, trees, strict=True)]
            for trees in (arguments, outputs)
        )
        owners = [
            owners_of(flat_placements[i].optimizer, flat_placements[i].optimizer[0], self.shape)
            for i in chosen
        ]

        def local(arguments: list[Any]) -> list[Any]:
            jobs = [Job(*each) for each in zip(owners, arguments, where_in, where_out, strict=True)]
            return _layers_of_all(function, jobs)

        specs = [
            [
                jax.tree.map(lambda _, w: to_spec(w), tree, where)
                for tree, where in zip(trees_, wheres, strict=True)
            ]
            for trees_, wheres in ((arguments, where_in), (outputs, where_out))
        ]
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False
        )
        found = dict(zip(chosen, mapped(arguments), strict=True))
        return treedef.unflatten([found.get(i) for i in range(len(leaves))])


def _layers_of_all(function: LayerFunction, jobs: list[Job]) -> list[Any]:
    """Returns the local outputs of all jobs: whole rounds of each, then what is left of those of the same shapes."""
    done: list[list[Any]] = [[] for _ in jobs]
    left: dict[Any, list[int]] = {}
    for i, job in enumerate(jobs):
        flat, own = job.flat(), job.owners
        rows = max(
            x.shape[0] * math.prod(own.of(tuple(a for a in w[0] if a in own.axes))) for x, w in flat
        )
        rounds = rows // own.count
        if rounds:
            whole = rounds * own.count
            # Where layers are split by owner, owners divide them.
            done[i].append(
                (job if whole == rows else job.rows(0, whole)).in_rounds(function, rounds)
            )
        if rows > rounds * own.count:
            key = (rows - rounds * own.count, own, *((x.shape[1:], x.dtype, w) for x, w in flat))
            left.setdefault(key, []).append(i)
    for (rows, own, *_), members in left.items():
        parts = [jobs[i].rows(-rows, None) for i in members]
        rounds = -(-rows * len(members) // own.count)
        padded = jax.tree.map(
            lambda *xs, n=rounds * own.count: pad_layers(jnp.concatenate(xs), n),
            *(part.arguments for part in parts),
        )
        found = dataclasses.replace(parts[0], arguments=padded).in_rounds(function, rounds)
        for number, i in enumerate(members):
            done[i].append(jax.tree.map(lambda x, n=number, r=rows: x[n * r : (n + 1) * r], found))
    return [
        parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        for parts in done
    ]

"""Optimizers that need whole matrices: a device gets some layers in full and updates them.

A parameter of L layers is sharded like its optimizer state. Each of the n devices that share its
layers owns L / n of them: one all-to-all per sharded dimension brings the next n layers together, a
full one on each device, and another takes the results back. Axes that replicate a parameter split
its layers too; there nothing is sent until the results are gathered. A round moves n layers, so
that a device never has more than one layer of one parameter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.comm.collectives import all_gather, all_to_all, local_shard
from meshwright.comm.hierarchical import Axes
from meshwright.mesh_shape import MeshShape
from meshwright.sharding.params import Param, Tree, is_param
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

    def unsplit(self, placement: Placement) -> Axes:
        """Returns the axes that do not split the layers of an array by owner already."""
        return tuple(axis for axis in self.axes if axis not in placement[0])

    def layers(self, block: jax.Array, placement: Placement) -> int:
        """Returns the layers that the owners have together, from one device's block of them."""
        split = tuple(axis for axis in placement[0] if axis in self.axes)
        return block.shape[0] * math.prod(self.of(split))

    def fetch(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Returns the full layers [k, ...] of this device, from local blocks of all [u k, ...].

        u: product of the owners' axes that do not shard dimension 0 already (`unsplit`).
        placement: of x. Layers that it splits by owner already stay where they are, and of replicas
        each device takes its own layers. Sends v(n-1)/n for each dimension sharded over n devices,
        for v bytes of the result.
        """
        lead = list(self.unsplit(placement))  # mesh axes, with one leading dimension each
        x = x.reshape(*self.of(tuple(lead)), -1, *x.shape[1:])  # [*lead, k, *local]
        replicated = tuple(axis for axis in lead if axis not in axes_of(placement))
        if replicated:  # nothing is sent
            x, lead = _merge_in_front(x, lead, replicated)  # [replicas, *lead, k, *local]
            x = local_shard(x, replicated, 0)[0]  # [*lead, k, *local]
        for dim, axes in _sharded(placement, lead):  # each makes dimension `dim` full
            x, lead = _merge_in_front(x, lead, axes)  # [shards, *lead, k, ...]
            x = all_to_all(x, axes, 0, 1 + len(lead) + dim)[0]
        return x

    def give_back(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Inverts `fetch`: returns local blocks of all layers from this device's full layers."""
        unsplit = self.unsplit(placement)
        lead: list[str] = []
        # Shards before replicas: what is gathered is then small.
        for dim, axes in reversed(_sharded(placement, unsplit)):
            x = all_to_all(x[None], axes, 1 + len(lead) + dim, 0)
            x = x.reshape(*self.of(axes), *x.shape[1:])
            lead = [*axes, *lead]
        replicated = tuple(axis for axis in unsplit if axis not in lead)
        if replicated:
            x = all_gather(x[None], replicated, 0)
            x = x.reshape(*self.of(replicated), *x.shape[1:])
            lead = [*replicated, *lead]
        order = [lead.index(axis) for axis in unsplit]
        x = x.transpose(*order, *range(len(lead), x.ndim))
        return x.reshape(-1, *x.shape[len(lead) + 1 :])


def _sharded(placement: Placement, among: Sequence[str]) -> list[tuple[int, Axes]]:
    """Returns the dimensions after the layers that are sharded over some axes, with these."""
    found = []
    for dim, sharded_over in enumerate(placement[1:], 1):
        axes = tuple(axis for axis in sharded_over if axis in among)
        if axes:
            found.append((dim, axes))
    return found


def _merge_in_front(x: jax.Array, lead: list[str], axes: Axes) -> tuple[jax.Array, list[str]]:
    """Merges the leading dimensions of `axes` into the first one.

    Returns the array, and which others follow.
    """
    others = [axis for axis in lead if axis not in axes]
    order = [lead.index(axis) for axis in (*axes, *others)]
    x = x.transpose(*order, *range(len(lead), x.ndim))
    return x.reshape(-1, *x.shape[len(axes) :]), others


def owners_of(placement: Placement, split: Axes, mesh: MeshShape) -> Owners:
    """Returns the devices that share the layers of a parameter.

    split: axes along which other layers lie.
    """
    sharded = [axis for axis in axes_of(placement) if axis not in split]
    replicated = [
        axis
        for axis, degree in mesh.degrees().items()
        if degree > 1 and axis not in sharded and axis not in split
    ]
    axes = (*sharded, *replicated)
    return Owners(axes, tuple(mesh.degrees()[axis] for axis in axes))


LayerFunction = Callable[..., Any]
"""`(trees of full layers [k, ...]) -> tree of full layers [k, ...]`, each layer independently."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments and outputs of a function of layers, for one parameter."""

    owners: Owners
    arguments: Any
    """Tree of arrays [L, ...]; on a device, of its blocks of them."""
    placements: Any
    """The same tree of Placements."""
    output_placements: Any
    """Tree of the outputs' Placements."""

    def blocks(self) -> list[tuple[jax.Array, Placement]]:
        """Returns the leaves of the arguments, each with its placement."""
        treedef: Any
        leaves, treedef = jax.tree.flatten(self.arguments)
        return list(zip(leaves, treedef.flatten_up_to(self.placements), strict=True))

    @property
    def layers(self) -> int:
        """Layers of the parameter, from the blocks of one device."""
        return max(self.owners.layers(block, placement) for block, placement in self.blocks())

    @property
    def remaining(self) -> int:
        """Layers that the owners do not divide."""
        return self.layers % self.owners.count

    def rows(self, start: int, stop: int | None) -> "Job":
        """Returns the job of some of the layers."""
        arguments = jax.tree.map(lambda x: x[start:stop], self.arguments)
        return dataclasses.replace(self, arguments=arguments)

    def in_rounds(self, function: LayerFunction, rounds: int, each: int = 1) -> Any:
        """Returns local blocks of the outputs, computed in rounds of `each` layers of a device.

        A block of layers is split by owner, round, and layer of a round. Round i takes row i of
        every owner, so that its results go to the same rows:

            blocks [n, rounds, each, ...]   --fetch-->      full layers [each, ...]
            full layers                     --function-->   outputs [each, ...]
            outputs                         --give_back-->  results [n, rounds, each, ...]
        """
        blocks = []
        for x, placement in self.blocks():
            owners = math.prod(self.owners.of(self.owners.unsplit(placement)))
            blocks.append(x.reshape(owners, rounds, -1, *x.shape[1:]))
        one_round = functools.partial(self._round, function, blocks, each)
        if rounds == 1:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), one_round(0))

        def add_round(i: Any, results: Any) -> Any:
            return jax.tree.map(functools.partial(_write_round, i), results, one_round(i))

        shapes = jax.eval_shape(one_round, 0)
        results = jax.tree.map(functools.partial(_empty_rounds, rounds), shapes)
        results = jax.lax.fori_loop(0, rounds, add_round, results)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), results)

    def _round(self, function: LayerFunction, blocks: list[jax.Array], each: int, i: Any) -> Any:
        """Returns local blocks of the outputs of round i, [n, each, ...]."""
        fetch = self.owners.fetch
        rows = [jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in blocks]
        layers = []
        for x, (_, placement) in zip(rows, self.blocks(), strict=True):
            layers.append(fetch(x.reshape(-1, *x.shape[2:]), placement))
        outputs = function(*jax.tree.unflatten(jax.tree.structure(self.arguments), layers))
        treedef: Any
        leaves, treedef = jax.tree.flatten(outputs)
        placements = treedef.flatten_up_to(self.output_placements)
        results = []
        for x, placement in zip(leaves, placements, strict=True):
            results.append(self.owners.give_back(x, placement))
        return treedef.unflatten([x.reshape(-1, each, *x.shape[1:]) for x in results])


def _empty_rounds(rounds: int, of_one: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros for the results of all rounds, [n, rounds, each, ...]."""
    owners, *rest = of_one.shape
    return jnp.zeros((owners, rounds, *rest), of_one.dtype)


def _write_round(i: Any, results: jax.Array, of_one: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(results, of_one, i, 1)


def pad_layers(x: jax.Array, rows: int) -> jax.Array:
    """Repeats the last layer up to `rows` layers: a layer of zeros may have no inverse."""
    if rows <= x.shape[0]:
        return x
    return jnp.concatenate([x, jnp.repeat(x[-1:], rows - x.shape[0], 0)])


@dataclasses.dataclass(frozen=True)
class LayerMap:
    """Applies functions of full layers to parameters and their state, each layer on one device.

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

        trees: one tree per argument of `function`, with the structure of the parameters; at a
        parameter it has an array, or a tuple of arrays, that begin with the layers [L, ...], and in
        the first tree None at those that are left out. The result has a tuple of arrays, or an
        array, at each parameter, or None. Where the devices do not divide the layers, those that
        remain are computed with those of parameters of the same shapes.
        """
        treedef: Any
        params, treedef = jax.tree.flatten(self.params, is_leaf=is_param)
        placements = treedef.flatten_up_to(self.placements)
        columns = [treedef.flatten_up_to(tree) for tree in trees]
        jobs: dict[int, Job] = {}
        for i, of_param in enumerate(zip(*columns, strict=True)):
            if of_param[0] is not None:
                jobs[i] = self._job(function, params[i], placements[i].optimizer, of_param)
        outputs = self._run(function, list(jobs.values()))
        results = dict(zip(jobs, outputs, strict=True))
        return treedef.unflatten([results.get(i) for i in range(len(params))])

    def _run(self, function: LayerFunction, jobs: list[Job]) -> list[Any]:
        """Returns the outputs of all jobs, computed in one `shard_map`."""

        def local(arguments: list[Any]) -> list[Any]:
            of_device = zip(jobs, arguments, strict=True)
            local_jobs = [dataclasses.replace(job, arguments=blocks) for job, blocks in of_device]
            return _layers_of_all(function, local_jobs)

        in_specs = []
        out_specs = []
        for job in jobs:
            outputs = jax.eval_shape(function, *job.arguments)
            in_specs.append(_specs(job.arguments, job.placements))
            out_specs.append(_specs(outputs, job.output_placements))
        mapped = jax.shard_map(
            local, mesh=self.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )
        results: list[Any] = mapped([job.arguments for job in jobs])
        return results

    def _job(
        self, function: LayerFunction, p: Param, placement: Placement, arguments: tuple[Any, ...]
    ) -> Job:
        """Returns the job of one parameter. placement: of its optimizer state."""

        def place(x: Any) -> Placement:
            return like_param(x.shape, p.shape, placement, self.shape)

        outputs = jax.eval_shape(function, *arguments)
        return Job(
            owners_of(placement, placement[0], self.shape),
            arguments,
            placements=jax.tree.map(place, arguments),
            output_placements=jax.tree.map(place, outputs),
        )


def _specs(tree: Any, placements: Any) -> Any:
    """Returns the PartitionSpec of every array of a tree."""
    return jax.tree.map(lambda _, placement: to_spec(placement), tree, placements)


def _layers_of_all(function: LayerFunction, jobs: list[Job]) -> list[Any]:
    """Returns the local outputs of all jobs: full rounds of each, then what remains, pooled."""
    results: list[list[Any]] = [[] for _ in jobs]
    groups: dict[Any, list[int]] = {}
    for i, job in enumerate(jobs):
        count = job.owners.count
        in_full_rounds = job.layers - job.remaining
        if in_full_rounds:
            # Where layers are split by owner, owners divide them.
            full = job.rows(0, in_full_rounds) if job.remaining else job
            results[i].append(full.in_rounds(function, in_full_rounds // count))
        if job.remaining:
            shapes = tuple((x.shape[1:], x.dtype, placement) for x, placement in job.blocks())
            groups.setdefault((job.remaining, job.owners, shapes), []).append(i)
    for members in groups.values():
        outputs = _pooled(function, [jobs[i] for i in members])
        for i, output in zip(members, outputs, strict=True):
            results[i].append(output)
    return [_concatenate(parts) for parts in results]


def _pooled(function: LayerFunction, jobs: list[Job]) -> list[Any]:
    """Returns the outputs of the layers that remain of jobs with the same shapes.

    Of n owners and r layers that remain of each of j parameters, every owner computes ceil(j r /
    n).
    """
    count = jobs[0].owners.count
    remaining = jobs[0].remaining
    rests = [job.rows(-remaining, None) for job in jobs]
    rounds = math.ceil(remaining * len(jobs) / count)

    def pool(*blocks: jax.Array) -> jax.Array:
        return pad_layers(jnp.concatenate(blocks), rounds * count)

    arguments = jax.tree.map(pool, *(rest.arguments for rest in rests))
    outputs = dataclasses.replace(rests[0], arguments=arguments).in_rounds(function, rounds)
    return [_rows_of(outputs, i * remaining, remaining) for i in range(len(jobs))]


def _rows_of(outputs: Any, start: int, count: int) -> Any:
    return jax.tree.map(lambda x: x[start : start + count], outputs)


def _concatenate(parts: list[Any]) -> Any:
    """Joins the outputs of consecutive layers."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *blocks: jnp.concatenate(blocks), *parts)

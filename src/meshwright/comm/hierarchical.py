"""Hierarchical collectives: one level of links after another, over ICI (or NVLink) and over DCN.

One mesh axis, the DCN axis, may span slices or nodes. Of its n devices in s slices, n/s neighbours at a time are in one
slice. Reductions are scattered inside a slice first, so that each device sends only its own part over DCN; all-gathers
cross DCN first, while the array is small.

Inside a TPU slice an axis may span several dimensions of the torus. XLA compiles a gather or scatter over a closed
three-dimensional torus to an all-reduce of the full array, so these go over one dimension after another (docs/log.md).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]
"""Mesh axes, outermost first."""


def nontrivial_axes(axes: Axes) -> Axes:
    """Returns the axes that have more than one device."""
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


@dataclasses.dataclass(frozen=True)
class DcnAxis:
    """Mesh axis that spans slices (of TPUs) or nodes (of GPUs), joined by the data-center network (DCN)."""

    slices: int
    """Slices or nodes of the mesh; 1 where all devices are in one."""
    axis: str
    """Mesh axis that crosses them; all others lie inside a slice."""
    torus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes that span several dimensions of a slice's torus, with their degree along each, outermost first."""


ONE_SLICE = DcnAxis(1, "data")


@dataclasses.dataclass(frozen=True)
class Level:
    """Part of mesh axes that one collective covers: devices inside a slice, or their counterparts between slices."""

    axes: Axes
    size: int
    """Devices that take part in one group."""
    groups: Any
    """`axis_index_groups` of the collective; None is all of the axes."""
    crosses_dcn: bool = False
    stride: int = 1
    """Distance along the axes between neighbours of a group."""

    def index(self) -> jax.Array:
        """Returns the place of this device in its group."""
        return lax.axis_index(self.axes) // self.stride % self.size


def levels_of(axes: Axes, dcn: DcnAxis) -> list[Level]:
    """Returns the levels of the nontrivial axes, outermost first: slices, dimensions of the torus, or one of all."""
    axes, levels = nontrivial_axes(axes), list[Level]()
    if not (dcn.slices > 1 and dcn.axis in axes) and not any(axis in axes for axis, _ in dcn.torus):
        return split_axes(axes, (1, lax.axis_size(axes))) if axes else levels
    for axis in axes:
        n = lax.axis_size(axis)
        slices = dcn.slices if axis == dcn.axis else 1
        levels += split_axes((axis,), (slices, *dict(dcn.torus).get(axis, (n // slices,))))
    return levels


def split_axes(axes: Axes, degrees: tuple[int, ...]) -> list[Level]:
    """Returns the levels of axes taken together, outermost first. degrees: of each level, slices or nodes first."""
    n, strides = math.prod(degrees), [math.prod(degrees[i + 1 :]) for i in range(len(degrees))]
    levels = [
        Level(axes, degree, None if degree == n else _groups(degrees, i), i == 0, strides[i])
        for i, degree in enumerate(degrees)
    ]
    return [level for level in levels if level.size > 1]


def _groups(degrees: tuple[int, ...], level: int) -> list[list[int]]:
    """Returns the groups of an axis along one of its levels. degrees: of every level, outermost first."""
    inner = math.prod(degrees[level + 1 :])
    starts = [i for i in range(math.prod(degrees)) if i // inner % degrees[level] == 0]
    return [[start + i * inner for i in range(degrees[level])] for start in starts]


def hierarchical_all_gather(x: jax.Array, axes: Axes, dim: int, dcn: DcnAxis) -> jax.Array:
    """Gathers the blocks of `dim` along `axes`, in order, over DCN first. Sends V(n-1)/n for a result of V bytes."""
    levels, gathered = levels_of(axes, dcn), list[int]()
    if not any(level.crosses_dcn for level in levels):
        # Blocks of the innermost level are neighbours, so each gather leaves the blocks in order.
        for level in reversed(levels):
            x = lax.all_gather(x, level.axes, axis=dim, axis_index_groups=level.groups, tiled=True)
        return x
    for i in sorted(range(len(levels)), key=lambda i: (not levels[i].crosses_dcn, -i)):
        new_dim = dim + sum(j < i for j in gathered)
        x = lax.all_gather(x, levels[i].axes, axis=new_dim, axis_index_groups=levels[i].groups)
        gathered.append(i)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + len(levels) + 1 :])


def hierarchical_reduce_scatter(x: jax.Array, axes: Axes, dim: int, dcn: DcnAxis) -> jax.Array:
    """Sums over `axes` and scatters `dim`, inside a slice first. Sends V(n-1)/n for an input of V bytes."""
    levels = levels_of(axes, dcn)
    if not any(level.crosses_dcn for level in levels):
        for level in levels:
            x = lax.psum_scatter(
                x, level.axes, scatter_dimension=dim, axis_index_groups=level.groups, tiled=True
            )
        return x
    x = x.reshape(*x.shape[:dim], *(level.size for level in levels), -1, *x.shape[dim + 1 :])
    remaining = list(range(len(levels)))
    for i in sorted(range(len(levels)), key=lambda i: levels[i].crosses_dcn):
        scatter_dim = dim + remaining.index(i)
        x = lax.psum_scatter(
            x, levels[i].axes, scatter_dimension=scatter_dim, axis_index_groups=levels[i].groups
        )
        remaining.remove(i)
    return x


def hierarchical_all_reduce(leaves: list[jax.Array], axes: Axes, dcn: DcnAxis) -> list[jax.Array]:
    """Sums arrays of one dtype over `axes`: reduce-scatter inside a slice, all-reduce over DCN, all-gather inside.

    Sends 2V(n-1)/n, of which only 1/m crosses DCN where a slice has m devices.
    """
    levels = levels_of(axes, dcn)
    inside = [level for level in levels if not level.crosses_dcn]
    between = next((level for level in levels if level.crosses_dcn), None)
    if between is None:
        return list(lax.psum(leaves, nontrivial_axes(axes))) if levels else leaves
    if not inside:
        return list(lax.psum(leaves, between.axes, axis_index_groups=between.groups))
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    devices = math.prod(level.size for level in inside)
    blocks = jnp.pad(flat, (0, -flat.size % devices)).reshape(*(level.size for level in inside), -1)
    for level in inside:
        blocks = lax.psum_scatter(
            blocks, level.axes, scatter_dimension=0, axis_index_groups=level.groups
        )
    blocks = lax.psum(blocks, between.axes, axis_index_groups=between.groups)
    for level in reversed(inside):
        blocks = lax.all_gather(blocks, level.axes, axis=0, axis_index_groups=level.groups)
    flat, sums, start = blocks.reshape(-1), [], 0
    for leaf in leaves:
        sums.append(flat[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return sums

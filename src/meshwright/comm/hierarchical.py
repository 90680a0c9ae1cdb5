"""Hierarchical collectives: one level of links after another, over ICI (or NVLink) and over DCN.

One mesh axis, the DCN axis, may span slices or nodes. Of its n devices in s slices, n/s neighbours
at a time are in one slice. Reductions are scattered inside a slice first, so that each device sends
only its own part over DCN; all-gathers cross DCN first, while the array is small.

Inside a TPU slice an axis may span several dimensions of the torus. XLA compiles a gather or
scatter over a closed three-dimensional torus to an all-reduce of the full array, so these go over
one dimension after another (docs/log.md).
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
    """Mesh axis that spans slices of TPUs or nodes of GPUs, joined by the data-center network."""

    slices: int
    """Slices or nodes of the mesh; 1 where all devices are in one."""
    axis: str
    """Mesh axis that crosses them; all others lie inside a slice."""
    torus: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes that span several dimensions of a slice's torus, with their degree along each, outermost
    first."""


ONE_SLICE = DcnAxis(1, "data")


@dataclasses.dataclass(frozen=True)
class Level:
    """Part of mesh axes that a collective covers: devices of a slice, or counterparts in slices."""

    axes: Axes
    size: int
    """Devices that take part in one group."""
    groups: Any
    """`axis_index_groups` of the collective; None is all of the axes."""
    crosses_dcn: bool = False
    stride: int = 1
    """Distance along the axes between neighbours of a group."""

    def index(self) -> jax.Array:
        """Returns the index of this device in its group, int32 scalar."""
        return lax.axis_index(self.axes) // self.stride % self.size


def levels_of(axes: Axes, dcn: DcnAxis) -> list[Level]:
    """Returns the levels of the axes, outermost first: slices, dimensions of the torus, or one."""
    axes = nontrivial_axes(axes)
    if not axes:
        return []
    torus = dict(dcn.torus)
    crosses_dcn = dcn.slices > 1 and dcn.axis in axes
    if not crosses_dcn and torus.keys().isdisjoint(axes):
        return split_axes(axes, (1, lax.axis_size(axes)))
    levels: list[Level] = []
    for axis in axes:
        slices = dcn.slices if axis == dcn.axis else 1
        in_slice = torus.get(axis, (lax.axis_size(axis) // slices,))
        levels += split_axes((axis,), (slices, *in_slice))
    return levels


def split_axes(axes: Axes, degrees: tuple[int, ...]) -> list[Level]:
    """Returns the levels of axes taken together, outermost first.

    degrees: of each level, slices or nodes first.
    """
    levels: list[Level] = []
    for i, degree in enumerate(degrees):
        if degree == 1:
            continue
        groups = None if degree == math.prod(degrees) else _groups(degrees, i)
        stride = math.prod(degrees[i + 1 :])
        levels.append(Level(axes, degree, groups, crosses_dcn=i == 0, stride=stride))
    return levels


def _groups(degrees: tuple[int, ...], level: int) -> list[list[int]]:
    """Returns the groups of devices along one level of an axis.

    degrees: of every level, outermost first.

    For degrees (2, 3), level 0 has the groups 03 | 14 | 25, and level 1 the groups 012 | 345.
    """
    degree = degrees[level]
    stride = math.prod(degrees[level + 1 :])
    groups: list[list[int]] = []
    for first in range(math.prod(degrees)):
        if first // stride % degree == 0:
            groups.append([first + i * stride for i in range(degree)])
    return groups


def hierarchical_all_gather(x: jax.Array, axes: Axes, dim: int, dcn: DcnAxis) -> jax.Array:
    """Gathers the blocks of `dim` along `axes`, in order, over DCN first.

    Sends V(n-1)/n for a result of V bytes.

    Two slices of two devices: the gather over DCN sends the small blocks, that inside a slice the
    larger ones:

        a | b   c | d   ->   ac | bd   ac | bd   ->   abcd | abcd   abcd | abcd
    """
    levels = levels_of(axes, dcn)
    between = [i for i, level in enumerate(levels) if level.crosses_dcn]
    inside = [i for i, level in enumerate(levels) if not level.crosses_dcn]
    if not between:
        # Blocks of the innermost level are neighbors, so each gather leaves the blocks in order.
        for level in reversed(levels):
            x = lax.all_gather(x, level.axes, axis=dim, axis_index_groups=level.groups, tiled=True)
        return x
    # Each gather adds a dimension; those of the levels stand in order before `dim`, which they are
    # merged into.
    gathered: list[int] = []
    for i in between + inside[::-1]:
        new_dim = dim + sum(outer < i for outer in gathered)
        x = lax.all_gather(x, levels[i].axes, axis=new_dim, axis_index_groups=levels[i].groups)
        gathered.append(i)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + len(levels) + 1 :])


def hierarchical_reduce_scatter(x: jax.Array, axes: Axes, dim: int, dcn: DcnAxis) -> jax.Array:
    """Sums over `axes` and scatters `dim`, inside a slice first.

    Sends V(n-1)/n for an input of V bytes.

    It is the transpose of `hierarchical_all_gather`: the same steps in reverse order, each a
    reduce-scatter.
    """
    levels = levels_of(axes, dcn)
    between = [i for i, level in enumerate(levels) if level.crosses_dcn]
    inside = [i for i, level in enumerate(levels) if not level.crosses_dcn]
    if not between:
        for level in levels:
            x = lax.psum_scatter(
                x, level.axes, scatter_dimension=dim, axis_index_groups=level.groups, tiled=True
            )
        return x
    sizes = [level.size for level in levels]
    x = x.reshape(*x.shape[:dim], *sizes, -1, *x.shape[dim + 1 :])
    remaining = list(range(len(levels)))
    for i in inside + between:
        x = lax.psum_scatter(
            x,
            levels[i].axes,
            scatter_dimension=dim + remaining.index(i),
            axis_index_groups=levels[i].groups,
        )
        remaining.remove(i)
    return x


def hierarchical_all_reduce(leaves: list[jax.Array], axes: Axes, dcn: DcnAxis) -> list[jax.Array]:
    """Sums arrays of one dtype: reduce-scatter in a slice, all-reduce over DCN, all-gather.

    Sends 2V(n-1)/n, of which only 1/m crosses DCN where a slice has m devices.
    """
    levels = levels_of(axes, dcn)
    if not levels:
        return leaves
    inside = [level for level in levels if not level.crosses_dcn]
    between = [level for level in levels if level.crosses_dcn]
    if not between:
        return list(lax.psum(leaves, nontrivial_axes(axes)))
    (slices,) = between
    if not inside:
        return list(lax.psum(leaves, slices.axes, axis_index_groups=slices.groups))

    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    sizes = [level.size for level in inside]
    padding = -flat.size % math.prod(sizes)
    blocks = jnp.pad(flat, (0, padding)).reshape(*sizes, -1)
    for level in inside:
        blocks = lax.psum_scatter(
            blocks, level.axes, scatter_dimension=0, axis_index_groups=level.groups
        )
    blocks = lax.psum(blocks, slices.axes, axis_index_groups=slices.groups)
    for level in reversed(inside):
        blocks = lax.all_gather(blocks, level.axes, axis=0, axis_index_groups=level.groups)
    return _split_like(blocks.reshape(-1), leaves)


def _split_like(flat: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
    """Splits a flat array into arrays of the shapes of `leaves`."""
    arrays = []
    start = 0
    for leaf in leaves:
        arrays.append(flat[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return arrays

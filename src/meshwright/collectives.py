"""Every movement of bytes between devices that the step makes, each named and differentiable.

All of it runs inside a `shard_map` that is manual over every axis, so what is written is what is sent.
Each function carries its own derivative (Megatron's f and g: Shoeybi et al. 2019, arXiv:1909.08053,
section 3; with the sequence: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2) under one convention:
the cotangent of a value that is whole over an axis is whole too, the cotangent of a shard is that shard's.
Results then do not hang on shard_map's `check_vma`. An axis of degree 1 sends nothing.

Costs are bytes sent per device for a whole array of V bytes over n devices, on a ring.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def alive(axes: Axes) -> Axes:
    """Those of `axes` that have more than one device."""
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def position(axes: Axes) -> jax.Array:
    """Index of this device along `axes` taken together, the first of them outermost; int32 scalar."""
    index = jnp.zeros((), jnp.int32)
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def _gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    axes = alive(axes)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    axes = alive(axes)
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def own_block(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """This device's block of `dim` of a value that is whole over `axes`; sends nothing."""
    axes = alive(axes)
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, position(axes) * size, size, dim)


def reduce_sum[T](tree: T, axes: Axes) -> T:
    """Sum over `axes` of every leaf, in one collective; not differentiated. Sends 2V(n-1)/n."""
    axes = alive(axes)
    return lax.psum(tree, axes) if axes else tree


def reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Largest value over `axes`; not differentiated. Sends 2V(n-1)/n."""
    axes = alive(axes)
    return lax.pmax(x, axes) if axes else x


def scatter_sum(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes`, of which each device keeps its block of `dim`; not differentiated. Sends V(n-1)/n."""
    return _scatter(x, axes, dim)


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """All blocks of `dim` along `axes`, in order; not differentiated. Sends V(n-1)/n."""
    return _gather(x, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_weight(w: jax.Array, axes: Axes, dim: int, compute_dtype: Any, reduce_dtype: Any) -> jax.Array:
    """The weight in use, whole along `axes`, of a parameter that is split over them at rest.

    Cast first, so the gather moves `compute_dtype`; the backward pass casts the gradient to `reduce_dtype`
    and reduce-scatters it. Forward sends V(n-1)/n, backward V(n-1)/n.
    """
    return _gather(w.astype(compute_dtype), axes, dim)


def _gather_weight_fwd(w: jax.Array, axes: Axes, dim: int, compute: Any, reduce: Any) -> tuple[jax.Array, jax.Array]:
    # An empty array carries the type of the parameter to the backward pass: residuals hold arrays alone.
    return gather_weight(w, axes, dim, compute, reduce), jnp.zeros((0,), w.dtype)


def _gather_weight_bwd(
    axes: Axes, dim: int, compute: Any, reduce: Any, like: jax.Array, g: jax.Array
) -> tuple[jax.Array]:
    return (_scatter(g.astype(reduce), axes, dim).astype(like.dtype),)


gather_weight.defvjp(_gather_weight_fwd, _gather_weight_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter_tensor(x_BTD: jax.Array, dim: int) -> jax.Array:
    """The whole sequence, for the columns of a Megatron pair: gathers `dim` over `tensor`.

    Backward: what the columns of all devices say of the input is summed and each keeps its part of the
    sequence (reduce-scatter). Forward sends V(n-1)/n, backward V(n-1)/n.
    """
    return _gather(x_BTD, ("tensor",), dim)


enter_tensor.defvjp(
    lambda x, dim: (_gather(x, ("tensor",), dim), None),
    lambda dim, _, g: (_scatter(g, ("tensor",), dim),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave_tensor(y_BTD: jax.Array, dim: int) -> jax.Array:
    """Closes a Megatron pair: sums `{U/tensor}` and keeps this device's part of `dim` (reduce-scatter).

    Backward gathers. Forward sends V(n-1)/n, backward V(n-1)/n.
    """
    return _scatter(y_BTD, ("tensor",), dim)


leave_tensor.defvjp(
    lambda y, dim: (_scatter(y, ("tensor",), dim), None),
    lambda dim, _, g: (_gather(g, ("tensor",), dim),),
)


def sum_gradients(grads: Any, lacking: Any) -> Any:
    """Each gradient summed over the axes its parameter lacks, one collective per set of axes.

    grads: tree of arrays.  lacking: the same tree of tuples of axes.
    """
    leaves: list[jax.Array]
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)
    groups: dict[Axes, list[int]] = {}
    for i, axes in enumerate(treedef.flatten_up_to(lacking)):
        groups.setdefault(alive(axes), []).append(i)
    for axes, members in groups.items():
        if axes:
            summed = reduce_sum([leaves[i] for i in members], axes)
            for i, leaf in zip(members, summed, strict=True):
                leaves[i] = leaf
    return treedef.unflatten(leaves)

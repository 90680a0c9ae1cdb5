"""Collectives of the step, each with an explicit derivative: what is written is what is sent.

They run inside a `shard_map` that is manual over every axis, with `check_vma=False`. Derivatives
follow one convention: the cotangent of a value that is replicated over an axis is replicated too,
and the cotangent of a shard belongs to that shard. The pair `sequence_all_gather` and
`sequence_reduce_scatter` is Megatron's g and g-bar: sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). `all_reduce` is the g of plain tensor parallelism, whose conjugate
f is the identity forward and an all-reduce backward (Shoeybi et al. 2019, arXiv:1909.08053, section
3). An axis of degree 1 sends nothing.

All are linear, so the derivative of each is its transpose. A docstring states it as a formula:
`grad_y` is the cotangent of the result, and `grad_x` that of the argument.

Costs are bytes sent per device on a ring of n devices, for an unsharded array of V bytes. The
pictures show four devices, one per column, before and after (docs/collectives.md).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshwright.comm.hierarchical import (
    ONE_SLICE,
    Axes,
    DcnAxis,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from meshwright.comm.hierarchical import nontrivial_axes as nontrivial_axes

TokenFunction = Callable[[jax.Array, Any], Any]
"""`(x [B, T, ...], weights) -> array or tree of arrays [B, T, ...]`, the same for each token:
matmuls."""

Gathers = tuple[tuple[Axes, int | None], ...]
"""Axes and dimension of each all-gather of a parameter, in order."""


def axis_index(axes: Axes) -> jax.Array:
    """Returns the index of this device along `axes` taken together, the first of them outermost.

    The index is an int32 scalar.
    """
    index = jnp.zeros((), jnp.int32)
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def local_shard(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Slices this device's block of `dim` from a value that is replicated over `axes`.

    Sends nothing.
    """
    axes = nontrivial_axes(axes)
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim)


def with_transpose[F: Callable[..., Any]](transpose: Callable[..., Any]) -> Callable[[F], F]:
    """Gives a linear function `(x, *static)` the derivative `transpose(cotangent, *static)`."""
    return functools.partial(_differentiable, transpose=transpose)


def transposes_itself[F: Callable[..., Any]](swap: Callable[..., Any]) -> Callable[[F], F]:
    """Gives a linear function `(x, *static)` its own derivative: itself, with `swap(*static)`."""
    return functools.partial(_self_transposed, swap=swap)


def _differentiable(linear: Callable[..., Any], transpose: Callable[..., Any]) -> Any:
    """Returns `linear` with the derivative `transpose`, both `(x, *static)`."""

    def forward(x: Any, *static: Any) -> tuple[Any, None]:
        return linear(x, *static), None

    def backward(*arguments: Any) -> tuple[Any]:
        *static, _, cotangent = arguments
        return (transpose(cotangent, *static),)

    count = len(inspect.signature(linear).parameters)
    differentiable: Any = jax.custom_vjp(linear, nondiff_argnums=tuple(range(1, count)))
    differentiable.defvjp(forward, backward)
    return differentiable


def _self_transposed(linear: Callable[..., Any], swap: Callable[..., Any]) -> Any:
    """Returns `linear` with the derivative `linear(cotangent, *swap(*static))`."""

    def transpose(cotangent: Any, *static: Any) -> Any:
        return linear(cotangent, *swap(*static))

    return _differentiable(linear, transpose)


_gather = functools.partial(hierarchical_all_gather, dcn=ONE_SLICE)
_scatter = functools.partial(hierarchical_reduce_scatter, dcn=ONE_SLICE)


@with_transpose(_scatter)
def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Gathers the blocks of `dim` along `axes`, in order.

        a | b | c | d   ->   abcd | abcd | abcd | abcd

        grad_x = reduce_scatter(grad_y, axes, dim)

    Each device uses the result in its own way, so the backward pass sums their cotangents. Forward
    sends V(n-1)/n, backward V(n-1)/n.
    """
    return _gather(x, axes, dim)


@with_transpose(_gather)
def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sums over `axes` and scatters the sum along `dim`.

        abcd | efgh | ijkl | mnop   ->   a+e+i+m | b+f+j+n | c+g+k+o | d+h+l+p

        grad_x = all_gather(grad_y, axes, dim)

    Forward sends V(n-1)/n, backward V(n-1)/n.
    """
    return _scatter(x, axes, dim)


@with_transpose(lambda g, axes: g)
def all_reduce[T](tree: T, axes: Axes) -> T:
    """Sums every leaf over `axes`, in one collective.

        a | b | c | d   ->   a+b+c+d | a+b+c+d | a+b+c+d | a+b+c+d

        grad_x = grad_y

    The sum and its cotangent are replicated, and each addend gets that cotangent: the backward pass
    sends nothing. Forward sends 2V(n-1)/n.
    """
    axes = nontrivial_axes(axes)
    return lax.psum(tree, axes) if axes else tree


def all_reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Takes the maximum over `axes`; not differentiated. Sends 2V(n-1)/n."""
    axes = nontrivial_axes(axes)
    return lax.pmax(x, axes) if axes else x


def _send_from(x: jax.Array, axes: Axes, source: int) -> jax.Array:
    """Returns x of the device with index `source`, as a sum with zeros of the others."""
    axes_used = nontrivial_axes(axes)
    if not axes_used:
        return x
    addend = jnp.where(axis_index(axes) == source, x, jnp.zeros_like(x))
    return lax.psum(addend, axes_used)


def _sum_at(x: jax.Array, axes: Axes, target: int) -> jax.Array:
    """Returns the sum of x at the device with index `target`, and zeros at the others."""
    axes_used = nontrivial_axes(axes)
    if not axes_used:
        return x
    is_target = axis_index(axes) == target
    total = lax.psum(x, axes_used)
    return jnp.where(is_target, total, jnp.zeros_like(x))


@with_transpose(_sum_at)
def broadcast(x: jax.Array, axes: Axes, source: int) -> jax.Array:
    """Broadcasts the value of the device with index `source` along `axes`.

        a | b | c | d   ->   b | b | b | b        (source 1)

        grad_x = reduce(grad_y, axes, source)

    Sends 2V(n-1)/n each way: it is an all-reduce to which the other devices add zeros, since
    XLA:CPU has no broadcast.
    """
    return _send_from(x, axes, source)


@with_transpose(_send_from)
def reduce(x: jax.Array, axes: Axes, target: int) -> jax.Array:
    """Sums over `axes`; the device with index `target` keeps the sum and the others get zeros.

        a | b | c | d   ->   0 | a+b+c+d | 0 | 0        (target 1)

        grad_x = broadcast(grad_y, axes, target)

    Sends 2V(n-1)/n each way.
    """
    return _sum_at(x, axes, target)


@transposes_itself(lambda axes, split, join: (axes, join, split))
def all_to_all(x: jax.Array, axes: Axes, split: int, join: int) -> jax.Array:
    """Splits dimension `split` into a block per device, and joins those received along `join`.

        abcd | efgh | ijkl | mnop   ->   aeim | bfjn | cgko | dhlp

        grad_x = all_to_all(grad_y, axes, join, split)

    Sends v(n-1)/n forward and backward, for v bytes on each device.
    """
    axes = nontrivial_axes(axes)
    if not axes:
        return x
    return lax.all_to_all(x, axes, split_axis=split, concat_axis=join, tiled=True)


@transposes_itself(lambda axis, group, split, join: (axis, group, join, split))
def grouped_all_to_all(x: jax.Array, axis: str, group: int, split: int, join: int) -> jax.Array:
    """Exchanges blocks like `all_to_all`, within each group of neighbouring devices of an axis.

        abcd | efgh | ijkl | mnop   ->   abef | cdgh | ijmn | klop        (group 2)

        grad_x = grouped_all_to_all(grad_y, axis, group, join, split)

    Sends v(g-1)/g forward and backward, for v bytes on each device and groups of g.
    """
    if group == 1:
        return x
    n = lax.axis_size(axis)
    groups = [list(range(first, first + group)) for first in range(0, n, group)]
    return lax.all_to_all(
        x, axis, split_axis=split, concat_axis=join, axis_index_groups=groups, tiled=True
    )


@transposes_itself(lambda axis, by: (axis, -by))
def ring_shift(x: jax.Array, axis: str, by: int) -> jax.Array:
    """Shifts values along a ring: device i receives from device i - by (collective permute).

        a | b | c | d   ->   d | a | b | c        (by 1)

        grad_x = ring_shift(grad_y, axis, -by)

    Sends v forward and backward, for v bytes on each device.
    """
    n = lax.axis_size(axis)
    if by % n == 0:
        return x
    source_and_target = [(i, (i + by) % n) for i in range(n)]
    return lax.ppermute(x, axis, source_and_target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather_param(
    w: jax.Array, gathers: Gathers, compute_dtype: Any, reduce_dtype: Any, dcn: DcnAxis
) -> jax.Array:
    """Gathers a sharded parameter in the compute dtype (FSDP, ZeRO-3).

    With gathers G_1 to G_m, and S_i the reduce-scatter that is the transpose of G_i:

        y = G_m ... G_1 cast(w, compute_dtype)
        grad_w = cast(S_1 ... S_m cast(grad_y, reduce_dtype), dtype of w)

    gathers: a dimension of None gathers nothing and only sums the gradient. The cast comes first,
    so the all-gathers move `compute_dtype`. The reduce-scatters go inside a slice before they cross
    DCN. Forward sends V(n-1)/n, backward V(n-1)/n.
    """
    w = row_major(w.astype(compute_dtype))
    for axes, dim in gathers:
        if dim is not None:
            w = hierarchical_all_gather(w, axes, dim, dcn)
    return w


def _gather_param_fwd(w: jax.Array, *static: Any) -> tuple[jax.Array, jax.Array]:
    # Residuals are arrays, so an empty array carries the parameter's dtype to the backward pass.
    return gather_param(w, *static), jnp.zeros((0,), w.dtype)


def _gather_param_bwd(
    gathers: Gathers,
    compute_dtype: Any,
    reduce_dtype: Any,
    dcn: DcnAxis,
    dtype_carrier: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array]:
    g = g.astype(reduce_dtype)
    for axes, dim in reversed(gathers):
        if dim is None:
            (g,) = hierarchical_all_reduce([g], axes, dcn)
        else:
            g = hierarchical_reduce_scatter(g, axes, dim, dcn)
    return (row_major(g.astype(dtype_carrier.dtype)),)


gather_param.defvjp(_gather_param_fwd, _gather_param_bwd)


def row_major(x: jax.Array) -> jax.Array:
    """Keeps the layout of an array in memory row-major.

    XLA:GPU gathers and scatters along the outermost dimension in memory. It would keep that layout
    for the weights and the gradients of all layers, and transpose them in one piece before and
    after the step: second copies of both.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def sequence_all_gather(x_BTD: jax.Array, dim: int) -> jax.Array:
    """Gathers the sequence over `tensor` before a column-parallel matmul: sequence parallelism's g.

        grad_x = sequence_reduce_scatter(grad_y, dim)

    dim: that of the sequence. It opens a Megatron pair that `sequence_reduce_scatter` closes.
    """
    return all_gather(x_BTD, ("tensor",), dim)


def sequence_reduce_scatter(y_BTD: jax.Array, dim: int) -> jax.Array:
    """Sums `{U/tensor}` after a row-parallel matmul and scatters the sequence: g-bar.

        grad_x = sequence_all_gather(grad_y, dim)

    dim: that of the sequence. It closes a Megatron pair that `sequence_all_gather` opens.
    """
    return reduce_scatter(y_BTD, ("tensor",), dim)


def sum_gradients(grads: Any, axes: Any, dcn: DcnAxis = ONE_SLICE) -> Any:
    """Sums each gradient over the axes that replicate its parameter, by sets of axes.

    grads: tree of arrays.  axes: the same tree of tuples of axes. Where one of them crosses DCN,
    the sum is hierarchical. Sends 2V(n-1)/n of each; not differentiated.
    """
    leaves: list[jax.Array]
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)
    by_axes: dict[Axes, list[int]] = {}
    for i, leaf_axes in enumerate(treedef.flatten_up_to(axes)):
        by_axes.setdefault(nontrivial_axes(leaf_axes), []).append(i)
    for reduced_axes, members in by_axes.items():
        if not reduced_axes:
            continue
        sums = hierarchical_all_reduce([leaves[i] for i in members], reduced_axes, dcn)
        for i, leaf in zip(members, sums, strict=True):
            leaves[i] = leaf
    return treedef.unflatten(leaves)

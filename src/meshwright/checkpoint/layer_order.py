"""Conversion of stacked tensors between the rows of a pipeline and the order of the layers.

Where a pipeline is uneven or interleaved, the rows of a stack are permuted, and padded with rows of
zeros, so that each stage's layers are contiguous (`Param.order`). A checkpoint has one row per
layer, in order, so that it can be restored on a mesh with other stages.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.sharding.params import Param, Tree, layers_to_rows, named_leaves, rows_to_layers


def abstract_in_layer_order(tensors: dict[str, Any], params: Tree) -> dict[str, Any]:
    """Returns shapes and shardings of `tensors` with one row per layer;
    tensors whose rows are in order stay as is.

    The layers stay sharded over `stage` where their number divides;
    otherwise another dimension that divides is.
    tensors: arrays or ShapeDtypeStructs by dotted name, params: descriptions of the parameters.
    """
    abstract = dict(tensors)
    for name, p in permuted_params(tensors, params).items():
        x = tensors[name]
        layers, *_ = p.logical_shape
        sharding = x.sharding
        if layers % _degree(sharding, 0):
            sharding = _without_sharded_rows(x.shape, sharding)
        shape = (layers, *x.shape[1:])
        abstract[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    return abstract


def _without_sharded_rows(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding whose axes of the rows are moved to another dimension
    that they divide, if there is one."""
    axes_by_dim = [_axes(sharding, dim) for dim in range(len(shape))]
    dim = _other_dimension(shape, sharding)
    if dim is not None:
        axes_by_dim[dim] += axes_by_dim[0]
    axes_by_dim[0] = ()
    spec = PartitionSpec(*(axes or None for axes in axes_by_dim))
    return NamedSharding(sharding.mesh, spec)


def permuted_in_layer_order(
    tensors: dict[str, jax.Array], params: Tree
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors whose rows are permuted with one row per layer, in order,
    on the device."""
    abstract = abstract_in_layer_order(tensors, params)
    for name, p in permuted_params(tensors, params).items():
        x = tensors[name]
        yield name, reordering(rows_to_layers, p, x.shape, x.sharding, abstract[name].sharding)(x)


def to_row_order(
    tensors: dict[str, jax.Array], like: dict[str, Any], params: Tree
) -> dict[str, jax.Array]:
    """Returns the inverse of `permuted_in_layer_order`,
    and takes the tensors out of `tensors` one by one.

    like: the tensors of the state, with their shapes and shardings.
    """
    permuted = permuted_params(like, params)
    converted: dict[str, jax.Array] = {}
    for name, x in like.items():
        tensor = tensors.pop(name)
        if name in permuted:
            tensor = reordering(
                layers_to_rows, permuted[name], x.shape, x.sharding, tensor.sharding
            )(tensor)
        converted[name] = tensor
    return converted


_PIECES = 8
"""Most pieces of a tensor that are converted one after the other."""


@functools.lru_cache(maxsize=1024)
def reordering(
    convert: Callable[[Param, Any], Any],
    p: Param,
    row_shape: tuple[int, ...],
    row_sharding: NamedSharding,
    layer_sharding: NamedSharding,
) -> Any:
    """Returns the jitted conversion of one tensor: `rows_to_layers` or `layers_to_rows`.

    Permuting rows that are sharded over `stage` would gather all of them on every device. So an
    all-to-all first moves `stage` from the rows to another dimension, and one moves it back
    afterwards, for a piece of the tensor at a time: the temporary memory is at most half of a local
    shard where a third dimension can be cut into eight. A tensor without a dimension that divides,
    such as a bias of few elements, is gathered.
    row_shape, row_sharding: of the tensor as its parameter's rows are.
    layer_sharding: in the order of the layers.
    """
    source = layer_sharding
    target = row_sharding
    if convert is rows_to_layers:
        source, target = target, source
    axes = _axes(row_sharding, 0)
    dim = _other_dimension(row_shape, row_sharding)
    if dim is None or not axes:
        return jax.jit(functools.partial(convert, p), out_shardings=target)

    permutation = _Permutation(
        functools.partial(convert, p), axes, dim, bool(_axes(source, 0)), bool(_axes(target, 0))
    )
    mapped = jax.shard_map(
        permutation.by_pieces,
        mesh=row_sharding.mesh,
        in_specs=source.spec,
        out_specs=target.spec,
        check_vma=False,
    )
    return jax.jit(mapped, out_shardings=target)


@dataclasses.dataclass(frozen=True)
class _Permutation:
    """Conversion of the local shard of a tensor, whose rows are sharded over `axes`.

    On two stages, with rows 0 2 | 1 3 that become 0 1 | 2 3, and halves a and b of dimension `dim`:

        stage  rows           all-to-all     convert        all-to-all
        0      0a 0b 2a 2b -> 0a 2a 1a 3a -> 0a 1a 2a 3a -> 0a 0b 1a 1b
        1      1a 1b 3a 3b -> 0b 2b 1b 3b -> 0b 1b 2b 3b -> 2a 2b 3a 3b
    """

    convert: Callable[[Any], Any]
    axes: tuple[str, ...]
    dim: int
    """Dimension over which `axes` lie while rows are converted."""
    source_is_sharded: bool
    """Whether the rows are sharded before."""
    target_is_sharded: bool
    """Whether the rows are sharded afterwards."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Converts all of the shard at once."""
        if self.source_is_sharded:
            x = lax.all_to_all(x, self.axes, self.dim, 0, tiled=True)
        x = self.convert(x)
        if self.target_is_sharded:
            x = lax.all_to_all(x, self.axes, 0, self.dim, tiled=True)
        return x

    def by_pieces(self, x: jax.Array) -> jax.Array:
        """Converts a piece of the shard at a time, along a third dimension that can be cut."""
        others = [dim for dim in range(1, x.ndim) if dim != self.dim]
        if not others:
            return self(x)
        cut_dim = max(others, key=lambda dim: _pieces(x.shape[dim]))
        pieces = _pieces(x.shape[cut_dim])
        if pieces == 1:
            return self(x)
        size = x.shape[cut_dim] // pieces

        def convert_piece(i: jax.Array, out: jax.Array) -> jax.Array:
            piece = self(lax.dynamic_slice_in_dim(x, i * size, size, cut_dim))
            return lax.dynamic_update_slice_in_dim(out, piece, i * size, cut_dim)

        after = jax.eval_shape(self, x)
        return lax.fori_loop(0, pieces, convert_piece, jnp.zeros(after.shape, after.dtype))


def _pieces(size: int) -> int:
    """Returns the largest divisor of a dimension that is at most `_PIECES`."""
    return max(n for n in range(1, _PIECES + 1) if size % n == 0)


def permuted_params(tensors: dict[str, Any], params: Tree) -> dict[str, Param]:
    """Returns the names of the tensors whose rows are permuted,
    with the parameter that they belong to."""
    by_path = {path: p for path, p in named_leaves(params).items() if p.order is not None}
    permuted: dict[str, Param] = {}
    for name, x in tensors.items():
        for path, p in by_path.items():
            if name.endswith(f".{path}") and x.shape and x.shape[0] == p.shape[0]:
                permuted[name] = p
    return permuted


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Returns the mesh axes over which a dimension is sharded."""
    axes = None
    if dim < len(sharding.spec):
        axes = sharding.spec[dim]
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def _degree(sharding: NamedSharding, dim: int) -> int:
    """Returns the devices over which a dimension is sharded."""
    return math.prod(sharding.mesh.shape[axis] for axis in _axes(sharding, dim))


def _other_dimension(shape: tuple[int, ...], sharding: NamedSharding) -> int | None:
    """Returns the first dimension after the rows that the axes
    of the rows divide further, None if there is none."""
    degree = _degree(sharding, 0)
    return next(
        (d for d in range(1, len(shape)) if shape[d] % (_degree(sharding, d) * degree) == 0), None
    )

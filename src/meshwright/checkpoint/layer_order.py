"""Conversion of stacked tensors between the rows of a pipeline and the order of the layers.

Where a pipeline is uneven or interleaved, the rows of a stack are permuted, and padded with rows of zeros, so that
each stage's layers are contiguous (`Param.order`). A checkpoint has one row per layer, in order, so that it can be
restored on a mesh with other stages.
"""

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
    """Returns shapes and shardings of `tensors` with one row per layer; tensors whose rows are in order stay as is.

    The layers stay sharded over `stage` where their number divides; otherwise another dimension that divides is.
    tensors: arrays or ShapeDtypeStructs by dotted name, params: descriptions of the parameters.
    """

    def abstract(x: Any, p: Param) -> Any:
        shape, sharding = (*p.logical_shape[:1], *x.shape[1:]), x.sharding
        if shape[0] % _degree(sharding, 0):
            spec, dim = (
                [_axes(sharding, d) for d in range(x.ndim)],
                _other_dimension(x.shape, sharding),
            )
            if dim is not None:
                spec[dim] += spec[0]
            spec[0] = ()
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*(axes or None for axes in spec)))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    permuted = permuted_params(tensors, params)
    return {
        name: abstract(x, permuted[name]) if name in permuted else x for name, x in tensors.items()
    }


def permuted_in_layer_order(
    tensors: dict[str, jax.Array], params: Tree
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors whose rows are permuted with one row per layer, in order, on the device."""
    abstract = abstract_in_layer_order(tensors, params)
    for name, p in permuted_params(tensors, params).items():
        x = tensors[name]
        yield name, reordering(rows_to_layers, p, x.shape, x.sharding, abstract[name].sharding)(x)


def to_row_order(
    tensors: dict[str, jax.Array], like: dict[str, Any], params: Tree
) -> dict[str, jax.Array]:
    """Returns the inverse of `permuted_in_layer_order`, and takes the tensors out of `tensors` one by one.

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

    Permuting rows that are sharded over `stage` would gather all of them on every device. So an all-to-all first moves
    `stage` from the rows to another dimension, and one moves it back afterwards, for a piece of the tensor at a time:
    the temporary memory is at most half of a local shard where a third dimension can be cut into eight. A tensor
    without a dimension that divides, such as a bias of few elements, is gathered.
    row_shape, row_sharding: of the tensor as its parameter's rows are.  layer_sharding: in the order of the layers.
    """
    source, target = (
        (row_sharding, layer_sharding)
        if convert is rows_to_layers
        else (layer_sharding, row_sharding)
    )
    axes, dim = _axes(row_sharding, 0), _other_dimension(row_shape, row_sharding)
    if dim is None or not axes:
        return jax.jit(functools.partial(convert, p), out_shardings=target)

    def permute(x: jax.Array) -> jax.Array:
        x = convert(p, lax.all_to_all(x, axes, dim, 0, tiled=True) if _axes(source, 0) else x)
        return lax.all_to_all(x, axes, 0, dim, tiled=True) if _axes(target, 0) else x

    def run(x: jax.Array) -> jax.Array:
        along = max(
            (d for d in range(1, x.ndim) if d != dim),
            key=lambda d: _pieces(x.shape[d]),
            default=dim,
        )
        pieces = _pieces(x.shape[along]) if along != dim else 1
        if pieces == 1:
            return permute(x)
        size = x.shape[along] // pieces

        def convert_piece(i: jax.Array, out: jax.Array) -> jax.Array:
            piece = permute(lax.dynamic_slice_in_dim(x, i * size, size, along))
            return lax.dynamic_update_slice_in_dim(out, piece, i * size, along)

        after = jax.eval_shape(permute, x)
        return lax.fori_loop(0, pieces, convert_piece, jnp.zeros(after.shape, after.dtype))

    mesh = row_sharding.mesh
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=source.spec, out_specs=target.spec, check_vma=False
    )
    return jax.jit(mapped, out_shardings=target)


def _pieces(size: int) -> int:
    """Returns the largest divisor of a dimension that is at most `_PIECES`."""
    return max(n for n in range(1, _PIECES + 1) if size % n == 0)


def permuted_params(tensors: dict[str, Any], params: Tree) -> dict[str, Param]:
    """Returns the names of the tensors whose rows are permuted, with the parameter that they belong to."""
    permuted = {path: p for path, p in named_leaves(params).items() if p.order is not None}
    return {
        name: p
        for name, x in tensors.items()
        for path, p in permuted.items()
        if name.endswith(f".{path}") and x.shape and x.shape[0] == p.shape[0]
    }


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    axes = sharding.spec[dim] if dim < len(sharding.spec) else None
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def _degree(sharding: NamedSharding, dim: int) -> int:
    return math.prod(sharding.mesh.shape[axis] for axis in _axes(sharding, dim))


def _other_dimension(shape: tuple[int, ...], sharding: NamedSharding) -> int | None:
    """Returns the first dimension after the rows that the axes of the rows divide further, None if there is none."""
    degree = _degree(sharding, 0)
    return next(
        (d for d in range(1, len(shape)) if shape[d] % (_degree(sharding, d) * degree) == 0), None
    )

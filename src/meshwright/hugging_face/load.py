"""Weights of a Hugging Face folder straight onto a mesh: each device reads the bytes of its own shard."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright.errors import WeightsError
from meshwright.hugging_face.folder import TensorReader, WeightsFolder, check_tied
from meshwright.hugging_face.names import Index, StoredTensor, read_block
from meshwright.sharding.params import Param, Tree, is_param, named_leaves
from meshwright.sharding.stages import NO_LAYER


def load_params(
    weights: WeightsFolder,
    params: Tree,
    shardings: Tree,
    dtype: Any,
    then: Callable[[str, jax.Array], Any] = lambda path, w: w,
) -> Tree:
    """Returns the weights as arrays in `shardings`: no host and no device ever has more than its shards.

    params: descriptions of the parameters, rows of stacks in the order of the stages.  dtype: of the arrays.
    then: makes of a weight, by its path, what is kept of it, before the next is loaded.
    Raises WeightsError where `params` are not those of the folder's model.
    """
    _check_params(weights, params)
    check_tied(weights)
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)
    where = named_leaves(shardings)
    with weights.reader() as reader:
        arrays = [
            then(path, _load(path, p, weights.stored[path], where[path], np.dtype(dtype), reader))
            for path, p in named_leaves(params).items()
        ]
    return treedef.unflatten(arrays)


def _load(
    path: str, p: Param, stored: StoredTensor, sharding: Sharding, dtype: np.dtype[Any], reader: TensorReader
) -> jax.Array:
    last: list[Any] = [None, None]

    def shard(index: Any) -> np.ndarray:
        whole = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, p.shape, strict=True))
        # Neighbouring devices often have the same block: replicas.
        if last[0] != whole:
            last[:] = [whole, _read_rows(p, stored, whole, reader, dtype)]
            reader.release()
        block: np.ndarray = last[1]
        return block

    return jax.make_array_from_callback(p.shape, sharding, shard)


def _read_rows(p: Param, stored: StoredTensor, index: Index, reader: TensorReader, dtype: Any) -> np.ndarray:
    """Reads a block of `p`, whose rows may be in the order of pipeline stages, with zeros in padding rows."""
    if p.order is None:
        return read_block(p, stored, index, reader, dtype)
    rows = p.order[index[0]]
    block = np.zeros([part.stop - part.start for part in index], dtype)
    for row, layer in enumerate(rows):
        if layer != NO_LAYER:
            at = (slice(layer, layer + 1), *index[1:])
            block[row : row + 1] = read_block(p, stored, at, reader, dtype)
    return block


def _check_params(weights: WeightsFolder, params: Tree) -> None:
    wanted, folder = named_leaves(params), weights.folder.path
    for path in sorted({*wanted, *weights.params}):
        p, own = wanted.get(path), weights.params.get(path)
        if p is None or own is None:
            has = ("the weights", "the model") if p is None else ("the model", "the weights")
            raise WeightsError(
                f"weights in {folder} for this model",
                f"{has[0]} have a parameter {path!r}, and {has[1]} do not",
                "the model of the folder's config.json: hf:PATH in the place of the recipe",
            )
        if (p.logical_shape[1:], p.rows) != (own.logical_shape[1:], own.rows) or (
            p.rows is None and p.logical_shape != own.logical_shape
        ):
            raise WeightsError(
                f"weights in {folder} for this model",
                f"{path!r} is {list(own.logical_shape)} in the weights and {list(p.logical_shape)} in the model"
                + (f", {own.rows} and {p.rows} rows of them used" if p.rows else ""),
                "the model of the folder's config.json: hf:PATH in the place of the recipe",
            )

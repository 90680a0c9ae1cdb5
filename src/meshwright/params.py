"""Parameters described before they exist.

Abstract arrays, shardings, initial values, counts and the checkpoint's manifest are maps over one tree of
`Param`s. Initial values depend on the seed, the path and the global index alone: the same bits on any mesh.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.collectives import Axes, gather_weight
from meshwright.config import MeshShape
from meshwright.layout import Layout, Placements, place, to_spec
from meshwright.mesh import kept

Tree = Any
"""A nested dictionary with the same keys everywhere: of Params, of arrays, of placements."""


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its shape, a letter per dimension (words.py), and how it begins."""

    shape: tuple[int, ...]
    dims: str
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02
    """Standard deviation of `normal`."""
    rows: int | None = None
    """Rows of the first dimension that mean something; the padding behind them is zero and stays zero."""

    @property
    def size(self) -> int:
        product = 1
        for n in self.shape:
            product *= n
        return product


def is_param(x: Any) -> bool:
    return isinstance(x, Param)


def tree_map(f: Callable[..., Any], params: Tree, *rest: Tree) -> Tree:
    """`f` over every Param of the tree (and the matching leaves of `rest`)."""
    return jax.tree.map(f, params, *rest, is_leaf=is_param)


def named(params: Tree) -> dict[str, Any]:
    """Leaves by dotted path: `blocks.query` -> leaf."""
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: is_param(x) or isinstance(x, Placements))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def count(params: Tree) -> int:
    """Parameters that mean something: the padding of the vocabulary is not counted."""
    return sum(
        p.size if p.rows is None else p.size // p.shape[0] * p.rows for p in jax.tree.leaves(params, is_leaf=is_param)
    )


def placements(params: Tree, *, layout: Layout, mesh: MeshShape, min_size: int) -> Tree:
    """The same tree of Placements. Raises ConfigError naming the first tensor that does not divide."""
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)
    placed = [
        place(
            jax.tree_util.keystr(path, simple=True, separator="."),
            p.shape,
            p.dims,
            layout=layout,
            mesh=mesh,
            min_size=min_size,
        )
        for path, p in flat
    ]
    return treedef.unflatten(placed)


def _initial(p: Param, words: jax.Array, dtype: Any) -> jax.Array:
    if p.init == "zeros":
        return jnp.zeros(p.shape, dtype)
    if p.init == "ones":
        return jnp.ones(p.shape, dtype)
    w = p.std * jax.random.normal(jax.random.wrap_key_data(words, impl="threefry2x32"), p.shape, jnp.float32)
    if p.rows is not None and p.rows < p.shape[0]:
        row = jax.lax.broadcasted_iota(jnp.int32, p.shape, 0)
        w = jnp.where(row < p.rows, w, 0.0)
    return w.astype(dtype)


def initialise(params: Tree, shardings: Tree, *, seed: int, dtype: Any) -> Tree:
    """Arrays of `params`, born in their placement: no device ever holds more than its blocks."""
    # Seed and path are the two words of a parameter's key. They are arguments, not constants: XLA would spend
    # 0.2 s a parameter on folding them.
    words = {path: np.array([seed % 2**32, zlib.crc32(path.encode())], np.uint32) for path in named(params)}
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)

    def build(words: dict[str, jax.Array]) -> Tree:
        return treedef.unflatten([_initial(p, words[path], dtype) for path, p in named(params).items()])

    # The value of an element must not depend on how many devices share the array.
    with jax.threefry_partitionable(True), kept():
        return jax.jit(build, out_shardings=shardings)(words)


def shardings(mesh: Mesh, placed: Tree, which: Literal["at_rest", "optimizer"]) -> Tree:
    """The same tree of NamedShardings."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, to_spec(getattr(p, which))), placed, is_leaf=lambda x: isinstance(x, Placements)
    )


@dataclasses.dataclass(frozen=True)
class Use:
    """How parameters at rest become weights in use, inside the step."""

    gathers: Tree
    """For each parameter: the dimension to gather (counted without the layers) and the axes to gather it over."""
    compute_dtype: Any
    reduce_dtype: Any

    def __call__(self, held: Tree, path: str) -> Tree:
        """Weights in use of the sub-tree `path` (one layer of it where it is stacked), of which `held` is at rest."""

        def use(at: Any, w: jax.Array, how: _Gather) -> jax.Array:
            # The scope is the parameter's name in the compiled program, by which the census finds it.
            with jax.named_scope(".".join((path, *(key.key for key in at)))):
                return gather_weight(w, how.axes, how.dim, self.compute_dtype, self.reduce_dtype)

        return jax.tree_util.tree_map_with_path(use, held, self.gathers[path])


@dataclasses.dataclass(frozen=True)
class _Gather:
    axes: Axes
    dim: int


def plan_use(params: Tree, placed: Tree, *, compute_dtype: Any, reduce_dtype: Any) -> Use:
    """The gathers that lead from `at_rest` to `in_use`."""

    def difference(p: Param, where: Placements) -> _Gather:
        for i, (rest, use) in enumerate(zip(where.at_rest, where.in_use, strict=True)):
            if rest != use:
                return _Gather(rest[len(use) :], i - p.dims.count("L"))
        return _Gather((), 0)

    return Use(tree_map(difference, params, placed), compute_dtype, reduce_dtype)

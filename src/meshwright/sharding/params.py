"""Parameters described before they exist: shape, dimension letters, initial values, role.

Abstract arrays, shardings, initial values, counts and the checkpoint's manifest are maps over one tree of `Param`s.
Initial values depend only on seed, path and global index: the same bits on any mesh.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding

from meshwright.comm.collectives import gather_param
from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import cache_on_simulated_devices
from meshwright.sharding.placement import Layout, Placements, notation, place_param, to_spec

Tree = Any
"""Nested dictionary of Params, of arrays, or of Placements; all have the same keys."""
Role = Literal["qkv", "attention_out", "ffn_in", "ffn_out", "router", "adapter", "projection"]
"""Matmul of a weight in its layer; planner, FLOPs and Muon read it. `projection` is any other."""
Stored = Literal["float32", "bfloat16", "int8", "uint8"]
LOW_PRECISION_ROLES: tuple[Role, ...] = ("qkv", "attention_out", "ffn_in", "ffn_out", "projection")
"""Roles of the weights that `--training.matmul-precision` is about."""


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its shape, a dimension letter for each dimension (words.py), and its initial values."""

    shape: tuple[int, ...]
    dims: str
    init: Literal["normal", "zeros", "ones", "log_uniform"] = "normal"
    """`log_uniform` is the logarithm of a number between 0.01 and 16 (decay rates of linear attention)."""
    std: float = 0.02
    """Standard deviation of `normal`."""
    rows: int | None = None
    """Rows of the first dimension without padding; padding rows are zero and stay zero. None has no padding."""
    precision: Literal["compute", "float32", "bfloat16", "float16"] = "compute"
    """Dtype of the gathered weight: the run's compute dtype, or always this one."""
    role: Role | None = None
    """Matmul that a stacked weight takes part in; None for norms, biases and tables."""
    contract: int = 1
    """Dimensions that the matmul contracts: the first ones after layers and experts."""
    frozen: bool = False
    """Whether training leaves it as it is: it has no gradient and no optimizer state."""
    stored: Stored | None = None
    """Type at rest; None is the run's `param_dtype`."""
    packed: int | None = None
    """Dimension of which an element at rest holds two (4 bits each); None where each holds one."""
    order: tuple[int, ...] | None = None
    """Layer in each row of a stack, where rows follow the pipeline stages; NO_LAYER is a padding row of zeros."""

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Shape with one row per layer, in order and without padding rows of layers."""
        return self.shape if self.order is None else (max(self.order) + 1, *self.shape[1:])

    @property
    def size(self) -> int:
        """Number of elements, padding included; of packed ones each counts."""
        return math.prod(self.shape) * (1 if self.packed is None else 2)


def is_param(x: Any) -> bool:
    """Returns whether `x` is a Param: a leaf of a description tree."""
    return isinstance(x, Param)


def is_low_precision(p: Param) -> bool:
    """Whether the matmuls of a weight are in low precision, in runs that have one."""
    return p.role in LOW_PRECISION_ROLES and "E" not in p.dims


def is_low_precision_expert(p: Param) -> bool:
    """Whether the grouped matmuls of a weight are in low precision, where the machine has a kernel for them."""
    return p.role in LOW_PRECISION_ROLES and "E" in p.dims


def tree_map(f: Callable[..., Any], params: Tree, *rest: Tree) -> Tree:
    """Maps `f` over every Param of a tree and the matching leaves of `rest`."""
    return jax.tree.map(f, params, *rest, is_leaf=is_param)


def frozen_params(params: Tree, dtype: Stored) -> Tree:
    """Returns the descriptions of a copy that training leaves as it is, kept in `dtype`, or float32 where it has to."""
    return tree_map(
        lambda p: dataclasses.replace(
            p, frozen=True, stored="float32" if p.precision == "float32" else dtype
        ),
        params,
    )


REFERENCE = "reference"
"""Subtree of the parameters with a frozen copy of all others, of models that learn preferences."""


def with_reference(params: Tree, shardings: Tree, described: Tree) -> Tree:
    """Returns parameters with the copy that is their reference. shardings, described: of all of them."""
    own = {path: tree for path, tree in params.items() if path != REFERENCE}
    types = tree_map(lambda p: p.stored, described[REFERENCE])
    copy = jax.jit(
        lambda own: jax.tree.map(lambda w, dtype: w.astype(dtype), own, types),
        out_shardings=shardings[REFERENCE],
    )
    return {**own, REFERENCE: copy(own)}


def trained_only(params: Tree, tree: Tree) -> Tree:
    """Returns `tree` with None at frozen parameters. params: descriptions.

    JAX takes None for a tree without leaves: gradients and optimizer state of the result have only the other leaves.
    """
    return tree_map(lambda p, x: None if p.frozen else x, params, tree)


def with_frozen(params: Tree, trained: Tree, all_params: Tree) -> Tree:
    """Returns `trained` with the frozen leaves of `all_params` where it has None. params: descriptions."""
    return tree_map(lambda p, new, old: old if p.frozen else new, params, trained, all_params)


def named_leaves(params: Tree) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path, such as `blocks.query`."""
    flat = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: is_param(x) or isinstance(x, Placements)
    )[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def count_params(params: Tree) -> int:
    """Counts parameters, without the padding of vocabulary and stacks, and without scales of quantised ones."""
    return sum(
        p.size // p.shape[0] * (p.logical_shape[0] if p.rows is None else p.rows)
        for path, p in named_leaves(params).items()
        if not path.endswith(".scales")
    )


def reorder_stacks(params: Tree, orders: dict[str, tuple[int, ...]]) -> Tree:
    """Returns `params` with the rows of each stack in the order given for its subtree."""

    def reorder(p: Param, order: tuple[int, ...]) -> Param:
        if order == tuple(range(p.shape[0])):
            return p
        return dataclasses.replace(p, shape=(len(order), *p.shape[1:]), order=order)

    def subtree(path: str, tree: Tree) -> Tree:
        return tree_map(lambda p: reorder(p, orders[path]), tree) if path in orders else tree

    return {path: subtree(path, tree) for path, tree in params.items()}


def place_params(params: Tree, *, layout: Layout, mesh: MeshShape, min_size: int) -> Tree:
    """Returns the same tree of Placements. Raises ConfigError with the first tensor that does not divide."""
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_param)

    def place(path: str, p: Param) -> Placements:
        try:
            return place_param(path, p.shape, p.dims, layout=layout, mesh=mesh, min_size=min_size)
        except ConfigError:
            # Adapters and scales are small: if no dimension divides, they are replicated.
            if p.role != "adapter" and not path.endswith(".scales"):
                raise
            return place_param(path, p.shape, p.dims, layout=layout, mesh=mesh, min_size=p.size + 1)

    placements = [
        place(jax.tree_util.keystr(path, simple=True, separator="."), p) for path, p in flat
    ]
    return treedef.unflatten(placements)


def rows_to_layers(p: Param, x: Any) -> Any:
    """Returns `x`, whose rows are those of `p`, with one row per layer in order. x: a NumPy or JAX array."""
    if p.order is None:
        return x
    return x[np.array([p.order.index(layer) for layer in range(max(p.order) + 1)])]


def layers_to_rows(p: Param, x: Any) -> Any:
    """Inverts `rows_to_layers`: returns the rows of `p`, with zeros in padding rows."""
    if p.order is None:
        return x
    order = np.array(p.order)
    return jnp.where(_row_mask(p).reshape(-1, *(1,) * (x.ndim - 1)), x[np.maximum(order, 0)], 0)


def _initial(p: Param, words: jax.Array, dtype: Any) -> jax.Array:
    if dtype in ("int8", "uint8"):
        truth = "quantised weights are read from weights, and not drawn"
        raise ConfigError(
            "random initial values of a quantised base",
            truth,
            "--init-from, or --finetune.base compute",
        )
    if p.init == "zeros":
        return jnp.zeros(p.shape, dtype)
    mask = _row_mask(p)
    if p.init == "ones":
        return jnp.broadcast_to(mask, p.shape).astype(dtype)
    if p.order is None:
        w = jax.random.normal(
            jax.random.wrap_key_data(words, impl="threefry2x32"), p.shape, jnp.float32
        )
    else:
        w = _normal_in_order(p.order, p.shape, words)
    if p.init == "log_uniform":
        w = jnp.log(0.01 + (16.0 - 0.01) * jax.scipy.special.ndtr(w))
        return jnp.where(mask, w, 0.0).astype(dtype)
    return jnp.where(mask, p.std * w, 0.0).astype(dtype)


def random_bits(
    words: jax.Array, shape: tuple[int, ...], order: tuple[int, ...] | None
) -> jax.Array:
    """Returns the uint32 numbers of a threefry key, the rows of a stack in a given order, each on its own device.

    words: data of the key.  order: layer in each row; None is the order of the layers. Indexing the whole array would
    materialise it on every device. Threefry hashes an element's index, so hashing the indices that the elements have in
    the whole array gives the same numbers (`jax_threefry_partitionable`).
    """
    if order is None:
        return jax.random.bits(jax.random.wrap_key_data(words, impl="threefry2x32"), shape)
    shape, given = (*shape, *(1,) * (2 - len(shape))), shape
    inner = shape[2:]
    layer = np.maximum(np.array(order), 0).astype(np.uint64)[:, None]
    # Indices have 64 bits, and JAX integers 32: the index is kept as two words, and the last dimensions fit in one.
    start = (layer * np.uint64(shape[1]) + np.arange(shape[1], dtype=np.uint64)) * np.uint64(
        math.prod(inner)
    )
    offset = jnp.zeros(inner, jnp.uint32)
    for dim, size in enumerate(inner):
        offset = offset * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, inner, dim)
    high, low = (
        jnp.asarray(word.astype(np.uint32)).reshape(*shape[:2], *(1,) * len(inner))
        for word in (start >> np.uint64(32), start & np.uint64(2**32 - 1))
    )
    low = jnp.broadcast_to(low + offset, shape)
    high = jnp.broadcast_to(high, shape) + (low < offset).astype(jnp.uint32)
    first_bits, second_bits = threefry2x32_p.bind(
        *(jnp.broadcast_to(w, shape) for w in words), high, low
    )
    return (first_bits ^ second_bits).reshape(given)


def _normal_in_order(order: tuple[int, ...], shape: tuple[int, ...], words: jax.Array) -> jax.Array:
    """Generates the rows of a stack of normal numbers in a given order, each on its own device."""
    # 23 random bits are the mantissa of a float32 in [1, 2).
    bits = random_bits(words, shape, order) >> 9
    unit = jax.lax.bitcast_convert_type(bits | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    least = np.nextafter(np.float32(-1.0), np.float32(0.0))
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(
        jnp.maximum(least, unit * (np.float32(1.0) - least) + least)
    )


def _row_mask(p: Param) -> jax.Array:
    rows = np.arange(p.shape[0]) if p.order is None else np.array(p.order)
    mask = (rows >= 0) & (rows < (p.shape[0] if p.rows is None else p.rows))
    return jnp.asarray(mask).reshape(-1, *(1,) * (len(p.shape) - 1))


# This program runs once. At full optimisation XLA:CPU compiles it for 7 of the 8 s that a small model takes to start.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 1}}


def init_params(params: Tree, shardings: Tree, *, seed: int, dtype: Any) -> Tree:
    """Creates the arrays of `params` in their shardings: no device ever holds more than its blocks."""
    draw, words = init_program(params, shardings, seed=seed, dtype=dtype)
    # The value of an element must not depend on how many devices share the array.
    with jax.threefry_partitionable(True), cache_on_simulated_devices():
        return draw(words)


def init_program(
    params: Tree, shardings: Tree, *, seed: int, dtype: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the jitted program of `init_params`, and its arguments."""
    # Seed and path are the two words of a parameter's key. They are arguments, not constants: XLA would take 0.2 s per
    # parameter to fold them.
    words = {
        path: np.array([seed, zlib.crc32(path.encode())], np.uint32)
        for path in named_leaves(params)
    }
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)

    def build(words: dict[str, jax.Array]) -> Tree:
        leaves: list[jax.Array] = []
        for path, p in named_leaves(params).items():
            # One parameter after another: the random bits of all of them would take more than the parameters.
            word, *leaves[-1:] = jax.lax.optimization_barrier((words[path], *leaves[-1:]))
            leaves.append(_initial(p, word, p.stored or dtype))
        return treedef.unflatten(leaves)

    options = _COMPILER_OPTIONS.get(jax.default_backend())
    return jax.jit(build, out_shardings=shardings, compiler_options=options), words


def shardings(mesh: Mesh, placed: Tree, which: Literal["at_rest", "optimizer"]) -> Tree:
    """Returns the same tree of NamedShardings. placed: tree of Placements; which: its field."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, to_spec(getattr(p, which))),
        placed,
        is_leaf=lambda x: isinstance(x, Placements),
    )


class RoundedParam(NamedTuple):
    """Parameter of one layer in low precision, rounded before the loop over layers."""

    param: jax.Array
    """The parameter, which takes the gradient."""
    values: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class GatherParams:
    """Gathers sharded parameters into weights in the compute dtype, inside the step."""

    gathers: Tree
    """All-gathers of each parameter, and the dtype of its weight."""
    compute_dtype: Any
    reduce_dtype: Any
    """Dtype in which gradients are reduce-scattered."""
    dcn: DcnAxis

    def __call__(self, params: Tree, path: str) -> Tree:
        """Returns the weights of the subtree `path`, of one layer of it where it is stacked.

        params: the sharded parameters of that subtree.
        """

        def gather(names: Any, w: jax.Array, how: _Gathers) -> jax.Array:
            # The scope is the parameter's name in the compiled program, by which the census finds it.
            with jax.named_scope(".".join((path, *(key.key for key in names)))):
                return gather_param(
                    w, how.gathers, how.dtype or self.compute_dtype, self.reduce_dtype, self.dcn
                )

        return jax.tree_util.tree_map_with_path(gather, params, self.gathers[path])

    def rounded(self, params: Tree, path: str) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns low-precision values and scales of a stack, by name, which layers get in a `RoundedParam`.

        Parameters that are gathered have none.
        """
        return {}

    def only(self, path: str, names: Iterable[str]) -> "GatherParams":
        """Returns only the gathers of the parameters `names` of the subtree `path`."""
        return dataclasses.replace(
            self, gathers={path: {name: self.gathers[path][name] for name in names}}
        )


@dataclasses.dataclass(frozen=True)
class _Gathers:
    gathers: tuple[tuple[Axes, int | None], ...]
    """Axes and dimension of each all-gather, in order; dimensions are counted without the layers. A dimension of None
    stands for the axes over which the backward pass sums the gradient."""
    dtype: Any
    """Dtype of the weight; None is the compute dtype."""


def plan_gathers(
    params: Tree,
    placed: Tree,
    *,
    compute_dtype: Any,
    reduce_dtype: Any,
    dcn: DcnAxis,
    summed: Tree | None = None,
) -> GatherParams:
    """Plans the all-gathers that lead from `at_rest` to `in_use`, one for each dimension that is sharded further.

    placed: tree of Placements.  summed: tree of the axes over which the backward pass sums a gradient; None sums over
    none. Raises ConfigError for placements that no all-gather connects.
    """

    def plan(path: Any, p: Param, placements: Placements, sum_over: Axes = ()) -> _Gathers:
        gathers: list[tuple[Axes, int | None]] = []
        for i, (sharded, used) in enumerate(
            zip(placements.at_rest, placements.in_use, strict=True)
        ):
            if sharded[: len(used)] != used or (sharded != used and p.dims[i] == "L"):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"{name} as {notation('w', p.dims, placements.at_rest)} at rest and "
                    f"{notation('w', p.dims, placements.in_use)} in use",
                    f"an all-gather removes the last axes of a dimension, and not those of layers: {p.dims[i]}",
                    "a layout whose placement at rest adds axes to the one in use",
                )
            if sharded != used:
                gathers.append((sharded[len(used) :], i - p.dims.count("L")))
        # Over DCN first, while the array is small.
        gathers.sort(key=lambda gather: dcn.axis not in gather[0])
        # First forwards, last backwards: of the scattered gradient the sum moves least.
        gathers = [(sum_over, None), *gathers] if sum_over else gathers
        # Quantised weights travel as they are.
        kept = (
            p.stored
            if p.stored in ("int8", "uint8")
            else None
            if p.precision == "compute"
            else p.precision
        )
        return _Gathers(tuple(gathers), kept)

    trees = (placed,) if summed is None else (placed, summed)
    gathers = jax.tree_util.tree_map_with_path(plan, params, *trees, is_leaf=is_param)
    return GatherParams(gathers, compute_dtype, reduce_dtype, dcn)

"""Parameters described before they exist: shape, dimension letters, initial values, role.

Abstract arrays, shardings, initial values (sharding/initial_values.py), counts and the checkpoint's
manifest are maps over one tree of `Param`s.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import gather_param
from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.sharding.placement import Placements

Tree = Any
"""Nested dictionary of Params, of arrays, or of Placements; all have the same keys."""
Role = Literal[
    "qkv", "attention_out", "ffn_in", "ffn_out", "router", "adapter", "expert_latent", "projection"
]
"""Matmul of a weight in its layer; planner, FLOPs and Muon read it. `expert_latent` is one into the
latent that experts read, or out of it; `projection` is any other."""
Stored = Literal["float32", "bfloat16", "int8", "uint8"]
LOW_PRECISION_ROLES: tuple[Role, ...] = (
    "qkv",
    "attention_out",
    "ffn_in",
    "ffn_out",
    "expert_latent",
    "projection",
)
"""Roles of the weights that `--training.matmul-precision` is about."""


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its shape, its dimension letters (words.py), and its initial values."""

    shape: tuple[int, ...]
    dims: str
    init: Literal["normal", "zeros", "ones", "log_uniform"] = "normal"
    """`log_uniform` is the logarithm of a number between 0.01 and 16 (decay rates of linear
    attention)."""
    std: float = 0.02
    """Standard deviation of `normal`."""
    rows: int | None = None
    """Rows of the first dimension without padding; padding rows are zero and stay zero. None has no
    padding."""
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
    """Layer in each row of a stack, where rows follow the pipeline stages; NO_LAYER is a padding
    row of zeros."""

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
    """Whether the grouped matmuls of a weight are in low precision.

    The machine needs a kernel for them.
    """
    return p.role in LOW_PRECISION_ROLES and "E" in p.dims


def tree_map(f: Callable[..., Any], params: Tree, *rest: Tree) -> Tree:
    """Maps `f` over every Param of a tree and the matching leaves of `rest`."""
    return jax.tree.map(f, params, *rest, is_leaf=is_param)


def trained_only(params: Tree, tree: Tree) -> Tree:
    """Returns `tree` with None at frozen parameters.

    params: descriptions.
    JAX takes None for a tree without leaves: gradients and optimizer state of the result have only
    the other leaves.
    """
    return tree_map(lambda p, x: None if p.frozen else x, params, tree)


def with_frozen(params: Tree, trained: Tree, all_params: Tree) -> Tree:
    """Returns `trained` with the frozen leaves of `all_params` where it has None.

    params: descriptions.
    """
    return tree_map(lambda p, new, old: old if p.frozen else new, params, trained, all_params)


def named_leaves(params: Tree) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path, such as `blocks.query`."""
    flat = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: is_param(x) or isinstance(x, Placements)
    )[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def count_params(params: Tree) -> int:
    """Counts parameters, without padding of vocabulary and stacks.

    Scales of quantized parameters do not count.
    """
    return sum(
        p.size // p.shape[0] * (p.logical_shape[0] if p.rows is None else p.rows)
        for path, p in named_leaves(params).items()
        if not path.endswith(".scales")
    )


def rows_to_layers(p: Param, x: Any) -> Any:
    """Returns `x`, whose rows are those of `p`, with one row per layer in order.

    x: NumPy or JAX array.
    """
    if p.order is None:
        return x
    return x[np.array([p.order.index(layer) for layer in range(max(p.order) + 1)])]


def layers_to_rows(p: Param, x: Any) -> Any:
    """Inverts `rows_to_layers`: returns the rows of `p`, with zeros in padding rows."""
    if p.order is None:
        return x
    order = np.array(p.order)
    return jnp.where(row_mask(p).reshape(-1, *(1,) * (x.ndim - 1)), x[np.maximum(order, 0)], 0)


def row_mask(p: Param) -> jax.Array:
    """Returns a mask of the rows of a parameter that are not padding.

    Its shape is one to multiply the array by.
    """
    rows = np.arange(p.shape[0]) if p.order is None else np.array(p.order)
    mask = (rows >= 0) & (rows < (p.shape[0] if p.rows is None else p.rows))
    return jnp.asarray(mask).reshape(-1, *(1,) * (len(p.shape) - 1))


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

        def gather(names: Any, w: jax.Array, how: ParamGathers) -> jax.Array:
            # The scope is the parameter's name in the compiled program, by which the census finds
            # it.
            with jax.named_scope(".".join((path, *(key.key for key in names)))):
                return gather_param(
                    w, how.gathers, how.dtype or self.compute_dtype, self.reduce_dtype, self.dcn
                )

        return jax.tree_util.tree_map_with_path(gather, params, self.gathers[path])

    def rounded(self, params: Tree, path: str) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns low-precision values and scales of a stack, by name.

        Layers get them in a `RoundedParam`.
        Parameters that are gathered have none.
        """
        return {}

    def only(self, path: str, names: Iterable[str]) -> "GatherParams":
        """Returns only the gathers of the parameters `names` of the subtree `path`."""
        return dataclasses.replace(
            self, gathers={path: {name: self.gathers[path][name] for name in names}}
        )


@dataclasses.dataclass(frozen=True)
class ParamGathers:
    """All-gathers that lead from a parameter at rest to its weight."""

    gathers: tuple[tuple[Axes, int | None], ...]
    """Axes and dimension of each all-gather, in order; dimensions are counted without the layers. A
    dimension of None stands for the axes over which the backward pass sums the gradient."""
    dtype: Any
    """Dtype of the weight; None is the compute dtype."""

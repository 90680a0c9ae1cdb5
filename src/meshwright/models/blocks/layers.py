"""Elementary layers: linear, vocabulary-parallel embedding, norms in float32, dropout
with one mask on any mesh."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from meshwright.comm.collectives import (
    all_gather,
    axis_index,
    local_shard,
    reduce,
    sequence_reduce_scatter,
)
from meshwright.errors import ConfigError
from meshwright.models.remat import recomputed
from meshwright.sharding.layouts import VOCAB_AXES
from meshwright.sharding.params import Param


class SelfMultiplying(abc.ABC):
    """Gathered weight that is not an array: quantised (quantisation.py),
    or with an adapter (adapters.py)."""

    option: ClassVar[str]
    """Option that made it such a weight."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""

    @abc.abstractmethod
    def linear(self, x: jax.Array, contract: int) -> jax.Array:
        """Multiplies `x` by this weight, contracting the last `contract` dimensions of x;
        result in x's dtype."""

    def __jax_array__(self) -> jax.Array:
        raise ConfigError(
            f"a weight of {self.option} used as an array",
            "only its matmul is defined",
            f"{linear.__module__}.linear(x, w), or {self.option} without this weight: a Param "
            "without a role",
        )


def linear(x: jax.Array, w: Any, *, contract: int = 1) -> jax.Array:
    """Multiplies `x` by `w`, contracting the last `contract` dimensions of x
    with the first ones of w.

    w: an array, or an object with a method `linear(x, contract)`, such
    as a `SelfMultiplying` weight.

    The tokens are one dimension of the product: XLA:CPU transposes a weight gradient that contracts
    batch and sequence as two by copies, which takes the step of a small GPT from 32 to 48 ms. The
    weight keeps its dimensions: with heads and their size as one, XLA:TPU copies the gradients of
    queries, keys and values three times each (docs/log.md).
    """
    if hasattr(w, "linear"):
        return w.linear(x, contract)
    by_token = x.reshape(-1, *w.shape[:contract])
    w_dims = tuple(range(contract))
    x_dims = tuple(1 + dim for dim in w_dims)
    out = jax.lax.dot_general(by_token, w, ((x_dims, w_dims), ((), ())))
    return out.reshape(*x.shape[: x.ndim - contract], *w.shape[contract:])


def linears(h_BTD: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """Returns the products of one input with several weights: queries, keys and values;
    gate and up."""
    return [linear(h_BTD, w) for w in weights]


def attention_projection(out_BTNH: jax.Array, w_NHD: Any) -> jax.Array:
    """Returns the attention output times its projection: heads and head size are contracted."""
    return linear(out_BTNH, w_NHD, contract=2)


SumRows = Callable[[jax.Array, jax.Array, int], jax.Array]
"""`(x [..., D], index [...], rows) -> sums [rows, D]`: adds each row of x, in float32,
to the sum of its index."""


def scatter_rows(x: jax.Array, index: jax.Array, rows: int) -> jax.Array:
    """Adds rows by one scatter: in order on CPUs and TPUs, and on GPUs by atomics,
    in another order in every run."""
    return jnp.zeros((rows, x.shape[-1]), jnp.float32).at[index].add(x.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_rows(table_VD: jax.Array, index: jax.Array, sum_rows: SumRows) -> jax.Array:
    """Returns rows of a table, [..., D].
    sum_rows: of the gradients of rows that are taken several times."""
    return table_VD[index]


def _take_rows_bwd(
    sum_rows: SumRows, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    # Accumulated in float32: a frequent token sums thousands of rows,
    # and bfloat16 would stop at 256 equal ones.
    table_VD, index = saved
    g_table_VD = sum_rows(g, index, table_VD.shape[0]).astype(table_VD.dtype)
    return g_table_VD, np.zeros(index.shape, jax.dtypes.float0)


take_rows.defvjp(
    lambda table_VD, index, sum_rows: (table_VD[index], (table_VD, index)), _take_rows_bwd
)


def embed(
    tokens_BT: jax.Array,
    table_VD: jax.Array,
    sum_rows: SumRows = scatter_rows,
    padding_BT: jax.Array | None = None,
) -> jax.Array:
    """Looks up token embeddings, [B, T/tensor, D], on the first pipeline stage;
    zeros at padding, whatever its token.

    table_VD: this device's block of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section
    3). A device takes zeros for the tokens of other blocks; `sequence_reduce_scatter` sums over
    `tensor` and `reduce` over `stage`.
    sum_rows: of the gradient.
    padding_BT: positions that are not text; None where all are.
    """
    rows = table_VD.shape[0]
    local_BT = tokens_BT - axis_index(VOCAB_AXES) * rows
    in_block_BT = (local_BT >= 0) & (local_BT < rows)
    if padding_BT is not None:
        in_block_BT &= ~padding_BT
    x_BTD = take_rows(table_VD, jnp.where(in_block_BT, local_BT, 0), sum_rows)
    x_BTD = jnp.where(in_block_BT[..., None], x_BTD, 0)
    return reduce(sequence_reduce_scatter(x_BTD, 1), ("stage",), 0)


def _normalised(x: jax.Array, epsilon: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon)


@recomputed
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divides x by its root mean square along the last dimension (Zhang
    and Sennrich 2019, arXiv:1910.07467)."""
    return _normalised(x, epsilon).astype(x.dtype) * scale.astype(x.dtype)


@recomputed
def _rms_norm_plus_one(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    return (_normalised(x, epsilon) * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _layer_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Standardises x along its last dimension and scales it (LayerNorm without its bias).

    scale: one number for each feature [H], or for each feature of each head [N, H].

    Of x itself, mean and inverse standard deviation the backward pass computes the standardised
    values again: plain differentiation saves them in float32, with the difference from the mean and
    its square.
    """
    return _layer_norm_fwd(x, scale, epsilon)[0]


# y = (x - mean) / sqrt(var + epsilon), and with g_y = g * scale
#
#   grad_x     = (g_y - mean(g_y) - y mean(g_y y)) / sqrt(var + epsilon)
#   grad_scale = sum over tokens of g y
def _layer_norm_fwd(x: jax.Array, scale: jax.Array, epsilon: float) -> tuple[jax.Array, Any]:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, -1, keepdims=True)
    centred = x32 - mean
    inverse_std = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + epsilon)
    y = (centred * inverse_std).astype(x.dtype)
    return y * scale.astype(x.dtype), (x, scale, mean, inverse_std)


def _layer_norm_bwd(epsilon: float, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, scale, mean, inverse_std = saved
    y = (x.astype(jnp.float32) - mean) * inverse_std
    tokens = tuple(range(g.ndim - scale.ndim))
    g_scale = (g * y.astype(g.dtype)).sum(tokens).astype(scale.dtype)
    g_y = (g * scale.astype(g.dtype)).astype(jnp.float32)
    means = jnp.mean(g_y, -1, keepdims=True) + y * jnp.mean(g_y * y, -1, keepdims=True)
    return (inverse_std * (g_y - means)).astype(x.dtype), g_scale


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)


@recomputed
def _sum_of_squares(x_BTNH: jax.Array) -> jax.Array:
    """Returns the sum of the squares of all heads, [B, T, 1], in float32."""
    return jnp.square(x_BTNH.astype(jnp.float32)).sum((-2, -1))[..., None]


@recomputed
def _scaled_heads(x_BTNH: jax.Array, inverse_rms_BT: jax.Array, scale_NH: jax.Array) -> jax.Array:
    x32 = x_BTNH.astype(jnp.float32) * inverse_rms_BT[..., None, None]
    return x32.astype(x_BTNH.dtype) * scale_NH.astype(x_BTNH.dtype)


@dataclasses.dataclass(frozen=True)
class Norm:
    """Normalisation with learned parameters, computed in float32."""

    kind: Literal["rms", "rms_plus_one", "rms_heads", "layer", "layer_heads"]
    """RMSNorm; with the scale 1 + w (Gemma); over all heads together (OLMo 2);
    LayerNorm (arXiv:1607.06450); LayerNorm of each head, with a scale of its own for each
    (Command R+)."""
    epsilon: float
    """Constant added to the mean square or the variance."""
    bias: bool = False
    """Whether a LayerNorm has a bias."""

    @property
    def scales_each_head(self) -> bool:
        """Whether the scale of heads has a number for every feature of every head,
        and not one for all heads."""
        return self.kind in ("rms_heads", "layer_heads")

    def params(self, name: str, shape: tuple[int, ...], dims: str) -> dict[str, Param]:
        """Returns the descriptions of the scale `name`, and of the bias."""
        params = {name: Param(shape, dims, "zeros" if self.kind == "rms_plus_one" else "ones")}
        if self.bias:
            params[f"{name}_bias"] = Param(shape, dims, "zeros")
        return params

    def without_scale(self, x: jax.Array) -> jax.Array:
        """Normalises x along its last dimension, without a learned scale."""
        return self(x, jnp.ones(x.shape[-1:], x.dtype))

    def __call__(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Normalises x along its last dimension, or over its heads."""
        if self.kind in ("layer", "layer_heads"):
            y = _layer_norm(x, scale, self.epsilon)
            return y if bias is None else y + bias.astype(x.dtype)
        if self.kind == "rms_heads":
            # Each device of `tensor` scales its own heads by the sum over all: the sum's cotangents
            # are summed in the backward pass.
            sums_BTP = all_gather(_sum_of_squares(x), ("tensor",), 2)
            mean_BT = sums_BTP.sum(-1) / (sums_BTP.shape[-1] * x.shape[-2] * x.shape[-1])
            return _scaled_heads(x, jax.lax.rsqrt(mean_BT + self.epsilon), scale)
        if self.kind == "rms_plus_one":
            return _rms_norm_plus_one(x, scale, self.epsilon)
        return rms_norm(x, scale, self.epsilon)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of the residual stream [B, T/tensor, D];
    its mask depends only on seed, step, site and global index."""

    rate: float
    """Fraction of activations set to zero."""
    key: jax.Array
    """Random key of seed and step, uint32[2]."""
    sequences_B: jax.Array
    """Index of each sequence in the global batch, uint32."""
    positions_T: jax.Array
    """Positions in the complete sequence that this device has, those of all devices
    of `tensor` together."""

    def split(self, count: int) -> "list[Dropout]":
        """Returns the dropout of each of `count` equal pieces of the batch."""
        if self.sequences_B.ndim == 0:  # of an evaluation
            return [self] * count
        return [
            dataclasses.replace(self, sequences_B=piece_B)
            for piece_B in jnp.split(self.sequences_B, count)
        ]

    def __call__(self, x_BTD: jax.Array, site: jax.Array | int) -> jax.Array:
        """Sets a fraction `rate` of x to zero and scales the rest up.
        site: a different number for each use."""
        if self.rate == 0.0:
            return x_BTD
        B, T, D = x_BTD.shape
        position_T = local_shard(self.positions_T, ("tensor",), 0).astype(jnp.uint32)
        index_TD = position_T[:, None] * jnp.uint32(D) + jnp.arange(D, dtype=jnp.uint32)
        key = (self.key[0], self.key[1] + jnp.asarray(site).astype(jnp.uint32))
        counter = (self.sequences_B[:, None, None], index_TD[None])
        words = [jnp.broadcast_to(word, (B, T, D)) for word in (*key, *counter)]
        bits, _ = threefry2x32_p.bind(*words)
        kept = bits >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(kept, x_BTD / (1.0 - self.rate), 0).astype(x_BTD.dtype)


def no_dropout() -> Dropout:
    """Returns a Dropout of rate 0, for evaluation and sampling."""
    empty = jnp.zeros((), jnp.uint32)
    return Dropout(0.0, empty, empty, empty)


def dropout_key(seed: int, step: jax.Array) -> jax.Array:
    """Returns the key of one step, uint32[2], with room for 4096 sites.
    Masks repeat after 2^20 steps.

    step: int32 scalar.
    """
    # The complement differs from the keys of the parameters, whose first word is the seed itself.
    return jnp.stack([jnp.uint32(~seed % 2**32), step.astype(jnp.uint32) * jnp.uint32(4096)])

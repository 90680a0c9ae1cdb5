"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1): keys
and values from one small latent.

Keys and values of all heads are projections of a latent per token, besides a rotary key that all
heads share. Training expands them: every head attends with its own keys and values. A cache holds
latent and rotary key instead, and decoding moves the projections to the other side:
`q (W c) = (W^T q) c`. Every head then attends to the same keys, the latents, which are also the
values. With latents c of width Z and N heads:

    c_q = rms_norm(h query_down);  c, k_rope = split(h kv_down);  c = rms_norm(c)
    c_q, c, k_rope = sequence_all_gather(c_q, c, k_rope)
    q = column_parallel(c_q query_up);  k, v = split(column_parallel(c kv_up))
    y = row_parallel(attention(q with its end rotated, [k, rope(k_rope)], v) o)

An indexer (blocks/indexer.py) may choose the keys that each query attends to.

The down projections are the same on every device of `tensor`: each computes them for its own
positions, and the gather moves the latents, a third of the width of DeepSeek-V3. The remat policies
keep the latents where they keep queries, keys and values of others, and the up projections are
recomputed (DeepSeek-V3, section 3.2.3).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.blocks.indexer import Indexer
from meshwright.models.blocks.layers import attention_projection, linear, rms_norm
from meshwright.models.blocks.rotary import Rotary, Temperature
from meshwright.models.blocks.yarn import LatentYarn
from meshwright.models.kernels.attention import Index, Scores
from meshwright.models.model import AttentionSpec, ForwardContext, Kind, LatentSpec
from meshwright.models.remat import QKV
from meshwright.sharding.params import Param

LATENT_EPSILON = 1e-6
"""Constant of the norms of latents;
the released code has it whatever that of the other norms is."""


def absorb_keys(q_BTNH: jax.Array, up_ZNH: Any) -> jax.Array:
    """Returns the queries times the keys' projection, as queries to latents: [B, T, N, Z].

    up_ZNH: an array, or an object that multiplies itself (blocks/layers.py).
    Its last dimension begins with the key.
    """
    up_ZNH, scale_NH = _values_and_scale(up_ZNH, q_BTNH.dtype)
    size = q_BTNH.shape[-1]
    if scale_NH is not None:
        q_BTNH = (q_BTNH * scale_NH[:, :size]).astype(q_BTNH.dtype)
    return jnp.einsum("btnh,znh->btnz", q_BTNH, up_ZNH[..., :size])


def absorb_values(out_BTNZ: jax.Array, up_ZNH: Any, size: int) -> jax.Array:
    """Returns the attention output of latents times the values' projection: [B, T, N, size].

    up_ZNH: as for `absorb_keys`; its last dimension ends with the value.
    """
    up_ZNH, scale_NH = _values_and_scale(up_ZNH, out_BTNZ.dtype)
    out_BTNH = jnp.einsum("btnz,znh->btnh", out_BTNZ, up_ZNH[..., -size:])
    return out_BTNH if scale_NH is None else (out_BTNH * scale_NH[:, -size:]).astype(out_BTNZ.dtype)


def _values_and_scale(weight: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns a weight as an array, and the scale of its output features, if any."""
    if not hasattr(weight, "linear"):
        return weight, None
    values, scale = getattr(weight, "values", None), getattr(weight, "scale", None)
    if values is None:
        # Other weights that multiply themselves, such as one
        # with its adapter, are their product with unit vectors.
        return linear(jnp.eye(weight.shape[0], dtype=dtype), weight), None
    if scale is None:
        return values.astype(dtype), None
    features = values.shape[1:]
    return values.astype(dtype), jnp.broadcast_to(
        scale.reshape(features if scale.size > 1 else (1, 1)), features
    )


class _OfPositions(NamedTuple):
    """Angles and factors of the positions of a step's tokens, computed once for all layers."""

    cos_sin: Any
    """Angles of the rotary embedding; None without one."""
    index_cos_sin: Any
    """Those of the indexer; None without one."""
    growth_BT11: jax.Array | None
    """Factor on the queries, which grows with the position; None without one."""


@dataclasses.dataclass(frozen=True)
class LatentAttention(Kind):
    """Latent attention of one kind of layers; every head has its own keys and values."""

    heads: int
    nope_size: int
    """Part of a query and a key without rotation."""
    latent: LatentSpec
    rotary: Rotary | None
    """Rotation of the rest of queries and keys; None for none (NoPE)."""
    out_std: float
    """Initial standard deviation of the output projection."""
    temperature: Temperature | None = None
    """Growth of queries with their position, after rotation."""
    indexer: Indexer | None = None
    """Chooses the keys of each query;
    it reads the latent of queries, so that there has to be one."""

    scope = "attention"

    @property
    def head_size(self) -> int:
        """Size of a query and a key."""
        return self.nope_size + self.latent.rope_size

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, N, H, F = layers, self.width, self.heads, self.head_size, self.latent.value_size
        rank, kv_rank = self.latent.query_rank, self.latent.kv_rank
        params = {
            "kv_down": Param((L, D, self.latent.cached), "LDZ", role="qkv"),
            "kv_norm": Param((L, kv_rank), "LZ", "ones"),
            "kv_up": Param((L, kv_rank, N, self.nope_size + F), "LZNH", role="projection"),
            "attention_out": Param(
                (L, N, F, D), "LNHD", std=self.out_std, role="attention_out", contract=2
            ),
        }
        if rank is None:
            return {**params, "query": Param((L, D, N, H), "LDNH", role="qkv")}
        if self.indexer is not None:
            params |= self.indexer.params(layers)
        return {
            **params,
            "query_down": Param((L, D, rank), "LDZ", role="qkv"),
            "query_norm": Param((L, rank), "LZ", "ones"),
            "query_up": Param((L, rank, N, H), "LZNH", role="projection"),
        }

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        spec = AttentionSpec(self.heads, self.heads, self.head_size, latent=self.latent)
        if self.indexer is not None:
            features = frozenset({"index"} if self._is_sparse else ())
            spec = dataclasses.replace(spec, features=features, indexer=self.indexer.spec)
        return {"attention": spec}

    @property
    def has_loss(self) -> bool:
        """Whether the indexer is trained."""
        return self.indexer is not None and self.indexer.training != "frozen"

    @property
    def _is_sparse(self) -> bool:
        return self.indexer is not None and self.indexer.training != "warmup"

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the attention of a step's tokens, `(h [B, T/tensor, D], weights) -> y`,
        with the loss of the indexer where it is trained."""
        growth_BT11 = None
        if self.temperature is not None:
            growth_BT11 = self.temperature.factor(ctx.tokens.positions)
        of_positions = _OfPositions(
            None if self.rotary is None else ctx.angles(self.rotary),
            None if self.indexer is None else ctx.angles(self.indexer.rotary),
            growth_BT11,
        )

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> Any:
            q_BTNH, rope_BTNH, latents_BTNH, index = self._project(ctx, of_positions, h_BTD, w)
            if ctx.attend_latent is not None:
                cached = (latents_BTNH, rope_BTNH)
                out_BTNH = self._attend_latents(ctx, q_BTNH, *cached, w["kv_up"], index)
                y_BTD = ctx.row_parallel(attention_projection, out_BTNH, w["attention_out"])
                return (y_BTD, {}) if self.has_loss else y_BTD
            k_BTNH, v_BTNH = self._keys_and_values(latents_BTNH, rope_BTNH)
            y_BTD = self._attend(ctx, (q_BTNH, k_BTNH, v_BTNH), w["attention_out"], index)
            if not self.has_loss:
                return y_BTD
            assert self.indexer is not None and index is not None
            return y_BTD, self.indexer.loss(index, q_BTNH, k_BTNH, ctx.tokens)

        return mix

    def _project(
        self, ctx: ForwardContext, of_positions: "_OfPositions", h_BTD: jax.Array, w: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array, jax.Array, Index | None]:
        """Returns queries and the rotary key, rotated; what `up` makes of the latents;
        and what the indexer compares."""
        up = self._expand_latents if ctx.attend_latent is None else self._keep_latents
        gathered, weights = self._down(h_BTD, w)
        if self.indexer is not None:
            weights = [*weights, w["index_query"]]
        projected = ctx.column_parallel(up, gathered, weights)
        q_BTNH, rope_BTNH, latents_BTNH, *index_queries = projected
        index: Index | None = None
        if self.indexer is not None:
            cos_sin = of_positions.index_cos_sin
            index = self.indexer.index(h_BTD, index_queries[0], w, cos_sin)
        if self.latent.query_rank is None:
            q_BTNH = checkpoint_name(q_BTNH, QKV)
        if self.rotary is not None:
            q_BTNH = self._rotated_queries(self.rotary, q_BTNH, of_positions.cos_sin, h_BTD.dtype)
        if of_positions.growth_BT11 is not None:
            q_BTNH = (q_BTNH * of_positions.growth_BT11).astype(q_BTNH.dtype)
        if self.rotary is not None:
            rope_BTNH = self.rotary.rotate(rope_BTNH, of_positions.cos_sin)
        return q_BTNH, rope_BTNH, latents_BTNH, index

    def _attend(
        self,
        ctx: ForwardContext,
        qkv: tuple[jax.Array, jax.Array, jax.Array],
        w_out: Any,
        index: Index | None,
    ) -> jax.Array:
        """Returns the projected output of attention to all keys,
        or to those that the indexer chooses."""
        if ctx.sequence.groups > 1:
            qkv = self._of_one_size(*qkv)
        scores = None
        if index is not None and self._is_sparse:
            scores = Scores(index=jax.lax.stop_gradient(index))
        return ctx.attend_row_parallel(self._project_out, qkv, w_out, window=None, scores=scores)

    def _expand_latents(self, gathered_BTZ: jax.Array, weights: list[Any]) -> list[jax.Array]:
        """Returns queries, the rotary key as one head, keys with values of all heads,
        and queries of the indexer.

        gathered_BTZ: what `_down` returns, of all positions.
        weights: up projections of queries and of keys,
        and that of the indexer's queries if there is one.
        """
        query_BTZ, latent_BTZ, rope_BTZ = self._split(gathered_BTZ)
        expanded_BTNH = linear(latent_BTZ, weights[1])
        queries = linear(query_BTZ, weights[0])
        return [queries, rope_BTZ[:, :, None], expanded_BTNH, *_index(query_BTZ, weights[2:])]

    def _keep_latents(self, gathered_BTZ: jax.Array, weights: list[Any]) -> list[jax.Array]:
        """Returns queries, as one head each the rotary key and the latent,
        which decoding caches, and index queries."""
        query_BTZ, latent_BTZ, rope_BTZ = self._split(gathered_BTZ)
        queries, latent_BTNZ = linear(query_BTZ, weights[0]), latent_BTZ[:, :, None]
        return [queries, rope_BTZ[:, :, None], latent_BTNZ, *_index(query_BTZ, weights[2:])]

    def _split(self, gathered_BTZ: jax.Array) -> list[jax.Array]:
        """Splits what `_down` joins: the input of the queries, the latent, the rotary key."""
        features = gathered_BTZ.shape[-1]
        ends = (features - self.latent.cached, features - self.latent.rope_size)
        return jnp.split(gathered_BTZ, ends, axis=-1)

    def _rotated_queries(
        self, rotary: Rotary, q_BTNH: jax.Array, cos_sin: Any, dtype: Any
    ) -> jax.Array:
        """Returns the queries with their ends rotated, times the factor of the scores
        that YaRN has."""
        nope = self.nope_size
        scaling = rotary.scaling
        # The kernels divide scores by the root of the head size.
        scale = scaling.score_scale if isinstance(scaling, LatentYarn) else 1.0
        rotated = rotary.rotate(q_BTNH[..., nope:], cos_sin) * scale
        return jnp.concatenate([q_BTNH[..., :nope] * scale, rotated], -1).astype(dtype)

    def _attend_latents(
        self,
        ctx: ForwardContext,
        q_BTNH: jax.Array,
        latents_BTNH: jax.Array,
        rope_BTNH: jax.Array,
        up_ZNH: Any,
        index: Index | None,
    ) -> jax.Array:
        """Returns the attention output of cached latents, [B, T, N, value size]:
        `q (W c) = (W' q) c`."""
        assert ctx.attend_latent is not None
        nope = self.nope_size
        absorbed = absorb_keys(q_BTNH[..., :nope], up_ZNH)
        # The cache divides scores by the root of the size of latents, not of queries and keys.
        factor = (self.latent.cached / self.head_size) ** 0.5
        q_BTNZ = jnp.concatenate([absorbed, q_BTNH[..., nope:]], -1) * factor
        q_BTNZ = q_BTNZ.astype(q_BTNH.dtype)
        cached_BTZ = jnp.concatenate([latents_BTNH[:, :, 0], rope_BTNH[:, :, 0]], -1)
        out_BTNZ = ctx.attend_latent(q_BTNZ, cached_BTZ, self.latent.kv_rank, index)
        return absorb_values(out_BTNZ, up_ZNH, self.latent.value_size)

    def _keys_and_values(
        self, expanded_BTNH: jax.Array, rope_BTNH: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the keys of all heads, each ending with the shared rotary key,
        and their values."""
        k_BTNH = expanded_BTNH[..., : self.nope_size]
        v_BTNH = expanded_BTNH[..., self.nope_size :]
        shared = jnp.broadcast_to(rope_BTNH, (*k_BTNH.shape[:3], rope_BTNH.shape[3]))
        return jnp.concatenate([k_BTNH, shared], -1), v_BTNH

    def _of_one_size(
        self, q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Pads queries, keys and values to one size: a ring or a gather moves keys
        and values as arrays of one shape."""
        longest = max(self.head_size, self.latent.value_size)
        v_BTNH = _padded(v_BTNH, longest)
        if longest > self.head_size:  # the kernels divide by the root of the padded size
            q_BTNH = _padded(q_BTNH * math.sqrt(longest / self.head_size), longest)
            k_BTNH = _padded(k_BTNH, longest)
        return q_BTNH, k_BTNH, v_BTNH

    def _project_out(self, out_BTNH: jax.Array, w_NHD: Any) -> jax.Array:
        """Returns the attention output without its padding, times its projection."""
        return attention_projection(out_BTNH[..., : self.latent.value_size], w_NHD)

    def _down(self, h_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, list[Any]]:
        """Returns latents and rotary keys of this device's positions, queries first,
        and the up projections."""
        rank = self.latent.kv_rank
        kv_BTZ = checkpoint_name(linear(h_BTD, w["kv_down"]), QKV)
        rest = [rms_norm(kv_BTZ[..., :rank], w["kv_norm"], LATENT_EPSILON), kv_BTZ[..., rank:]]
        if self.latent.query_rank is None:
            return jnp.concatenate([h_BTD, *rest], -1), [w["query"], w["kv_up"]]
        query_BTZ = checkpoint_name(linear(h_BTD, w["query_down"]), QKV)
        query_BTZ = rms_norm(query_BTZ, w["query_norm"], LATENT_EPSILON)
        return jnp.concatenate([query_BTZ, *rest], -1), [w["query_up"], w["kv_up"]]


def _index(query_BTZ: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
    """Returns the queries of an indexer, [] without one.
    Its input is detached: the choice of keys has no derivative."""
    return [linear(jax.lax.stop_gradient(query_BTZ), weight_ZIH) for weight_ZIH in weights]


def _padded(x_BTNH: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x_BTNH, ((0, 0), (0, 0), (0, 0), (0, size - x_BTNH.shape[-1])))

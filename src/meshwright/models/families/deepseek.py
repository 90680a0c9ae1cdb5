"""DeepSeek-V3 (arXiv:2412.19437), DeepSeek-V2-Lite (arXiv:2405.04434) and Kimi K2 (arXiv:2507.20534).

Multi-head latent attention (MLA), then the second half of a Mixtral layer: a SwiGLU in the first layers, routed and
shared experts after them. One attention half, latents c of width Z, N heads:

    h = rms_norm(x);  c_q = rms_norm(h query_down);  c, k_rope = split(h kv_down);  c = rms_norm(c)
    c_q, c, k_rope = sequence_all_gather(c_q, c, k_rope)
    q = column_parallel(c_q query_up);  k, v = split(column_parallel(c kv_up))
    x += row_parallel(attention(q with its end rotated, [k, rope(k_rope)], v) o)

The down projections are the same on every device of `tensor`: each computes them for its own positions, and the gather
that opens the half moves the latents, a third of the width of DeepSeek-V3. The remat policies keep the latents where
they keep queries, keys and values of others, and the up projections are recomputed (section 3.2.3).
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.latent import LatentSpec, absorb_keys, absorb_values, pad_values
from meshwright.models.blocks.linear import attention_projection, linear
from meshwright.models.blocks.norm import rms_norm
from meshwright.models.blocks.rotary import apply_rope_interleaved, rope_angles, rope_frequencies
from meshwright.models.blocks.yarn import LatentYarn, yarn_angles
from meshwright.models.families.llama import AttentionHalf, output_std
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.further_tokens import STACK as MTP
from meshwright.models.model import AttentionSpec, ForwardContext, Layer, Model, ModelSpec
from meshwright.models.remat import ATTN_RESIDUAL, QKV
from meshwright.sharding.params import Param, Tree
from meshwright.words import AXES

LATENT_EPSILON = 1e-6
"""Constant of the norms of latents; the released code has it whatever that of the other norms is."""


@dataclasses.dataclass(frozen=True)
class Deepseek(Mixtral):
    """Configuration of a mixture of experts with multi-head latent attention.

    Every head has its own keys and values, so `kv_heads` is 0 or `heads`. Of `Llama`, it has no sliding window, no
    norms or biases of queries and keys, and no Llama 3.1 scaling.

    Example:
        >>> model = mw.Deepseek(vocab=32000, width=512, layers=8, heads=8, experts=16, dense_layers=1)
        >>> attention = model.spec().layers[0].attention
        >>> attention.head_size, attention.value_size, attention.latent.cached
        (48, 32, 80)
    """

    kv_heads: int = 0
    """Key/value heads: 0 or `heads`, since all are projections of one latent."""
    q_lora_rank: int | None = 96
    """Width of the latent of queries; None projects queries from the layer's input (V2-Lite)."""
    kv_lora_rank: int = 64
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 32
    """Part of a query and a key without rotation."""
    qk_rope_head_dim: int = 16
    """Rotated part of a query, and of the key that all heads share."""
    v_head_dim: int = 32
    """Size of a value."""
    mtp_depth: Literal[0, 1] = 0
    """Further tokens that training predicts: 1 is the token after the next (MTP, section 2.2)."""
    mtp_weight: float = 0.3
    """Weight of the loss of the further token."""
    yarn: LatentYarn | None = None
    """Scaling of rotary frequencies and scores for long sequences (YaRN)."""
    norm_epsilon: float = 1e-6
    """Constant added to the mean square in RMSNorm."""

    _unused: ClassVar[dict[str, Any]] = {
        "head_size": None, "rope_scaling": None, "rope_factor": 1.0, "sliding_window": None, "qkv_bias": "none",
        "out_bias": "none", "qk_norm": "none",
    }  # fmt: skip

    @property
    def attention(self) -> AttentionSpec:
        """Attention of every layer. Raises ConfigError for a field that latent attention does not have."""
        for name, value in self._unused.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"model.{name} = {getattr(self, name)!r} with multi-head latent attention",
                    "its queries and keys are projections of latents, of the sizes qk_nope_head_dim + qk_rope_head_dim",
                    f"model.{name} = {value!r}",
                )
        if self.kv_heads not in (0, self.heads):
            raise ConfigError(
                f"{self.kv_heads} key/value heads with multi-head latent attention",
                f"every one of {self.heads} heads has its own key and value, from one latent",
                "--model.kv-heads 0",
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"a rotary key of {self.qk_rope_head_dim} features", "they rotate in pairs", "an even qk_rope_head_dim"
            )
        latent = LatentSpec(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim, self.v_head_dim)
        return AttentionSpec(self.heads, self.heads, self.qk_nope_head_dim + self.qk_rope_head_dim, latent=latent)

    @property
    def has_router_bias(self) -> bool:
        """Whether the router has a bias: with sigmoid scores, as the released weights of DeepSeek-V3 have it."""
        return self.router_score == "sigmoid" or super().has_router_bias

    def params(self) -> Tree:
        """Returns the parameter descriptions; `mtp` is the layer that predicts the token after the next."""
        tree: Tree = super().params()
        if self.mtp_depth:
            D = self.width
            inputs = {
                "embed_norm": Param((1, D), "LD", "ones"),
                "hidden_norm": Param((1, D), "LD", "ones"),
                "project": Param((1, 2 * D, D), "LZD", role="projection"),
                "final_norm": Param((1, D), "LD", "ones"),
            }
            tree[MTP] = {**inputs, **self.expert_params(1)}
        return tree

    def spec(self) -> ModelSpec:
        """Returns the layers, and that of multi-token prediction where there is one."""
        spec = super().spec()
        further = dataclasses.replace(spec.layers[-1], stack=MTP)
        return dataclasses.replace(spec, further=(further,) * self.mtp_depth)

    def further_layer(self, params: Tree, x_BTD: jax.Array, ctx: ForwardContext) -> tuple[jax.Array, Layer]:
        """Returns the input of the layer that predicts the token after the next, and the layer.

        x_BTD: hidden states after the last layer.  ctx: its tokens are those that follow each position.
        """
        h_BTD = rms_norm(x_BTD, ctx.gather_params(params["final_norm"], "final_norm"), self.norm_epsilon)
        embedded_BTD = self.embed(params, ctx)

        def join(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            embedded = rms_norm(embedded_BTD, w["embed_norm"], self.norm_epsilon)
            return linear(
                jnp.concatenate([embedded, rms_norm(h_BTD, w["hidden_norm"], self.norm_epsilon)], -1), w["project"]
            )

        return h_BTD, self.expert_layer(ctx, MTP, join)

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return super().features() | ({"multi-token prediction"} if self.mtp_depth else set())

    def half_params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of the attention half of `layers` layers, and the norms of both halves."""
        L, D, N, spec = layers, self.width, self.heads, self.attention
        H, rank, kv_rank = spec.head_size, self.q_lora_rank, self.kv_lora_rank
        params = {
            "attention_norm": Param((L, D), "LD", "ones"),
            "kv_down": Param((L, D, kv_rank + self.qk_rope_head_dim), "LDZ", role="qkv"),
            "kv_norm": Param((L, kv_rank), "LZ", "ones"),
            "kv_up": Param((L, kv_rank, N, self.qk_nope_head_dim + self.v_head_dim), "LZNH", role="projection"),
            "attention_out": Param(
                (L, N, self.v_head_dim, D), "LNHD", std=output_std(self), role="attention_out", contract=2
            ),
            "mlp_norm": Param((L, D), "LD", "ones"),
        }
        if rank is None:
            return {**params, "query": Param((L, D, N, H), "LDNH", role="qkv")}
        return {
            **params,
            "query_down": Param((L, D, rank), "LDZ", role="qkv"),
            "query_norm": Param((L, rank), "LZ", "ones"),
            "query_up": Param((L, rank, N, H), "LZNH", role="projection"),
        }

    def attention_half(self, ctx: ForwardContext) -> AttentionHalf:
        """Returns the attention half of a layer."""
        return _attention_half(self, ctx)

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with a dense layer where there is one."""
        small = super().shrunk(shape, layers)
        every = math.prod(shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context"))
        heads = math.lcm(shape.tensor * shape.context, 2)
        return dataclasses.replace(
            small, heads=heads, kv_heads=0, head_size=None, width=math.lcm(every, heads * 8), yarn=None,
            q_lora_rank=None if self.q_lora_rank is None else math.lcm(every, 8), kv_lora_rank=math.lcm(every, 8),
            qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        )  # type: ignore[call-arg]  # fmt: skip


def _attention_half(c: Deepseek, ctx: ForwardContext) -> AttentionHalf:
    spec, nope = c.attention, c.qk_nope_head_dim
    positions, size = ctx.tokens.positions, c.qk_rope_head_dim
    cos_sin = (
        yarn_angles(positions, size, c.rope_theta, c.yarn)
        if c.yarn
        else rope_angles(positions, rope_frequencies(size, c.rope_theta, None))
    )
    # The kernels divide scores by the root of the head size.
    scale = c.yarn.score_scale if c.yarn else 1.0

    def attention(x_BTD: jax.Array, w: dict[str, Any], index: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            h_BTD = rms_norm(x_BTD, w["attention_norm"], c.norm_epsilon)
            projected = ctx.column_parallel(functools.partial(_up, c, ctx.attend_latent is None), *_down(c, h_BTD, w))
            q_BTNH, rope_BTNH, latents_BTNH = projected
            if c.q_lora_rank is None:
                q_BTNH = checkpoint_name(q_BTNH, QKV)
            rotated = apply_rope_interleaved(q_BTNH[..., nope:], cos_sin) * scale
            q_BTNH = jnp.concatenate([q_BTNH[..., :nope] * scale, rotated], -1).astype(h_BTD.dtype)
            rope_BTNH = apply_rope_interleaved(rope_BTNH, cos_sin)
            if ctx.attend_latent is not None:
                out_BTNH = _attend_cached(c, ctx, q_BTNH, latents_BTNH, rope_BTNH, w["kv_up"])
                y_BTD = ctx.row_parallel(attention_projection, out_BTNH, w["attention_out"])
            else:
                k_BTNH, v_BTNH = latents_BTNH[..., :nope], latents_BTNH[..., nope:]
                shared = jnp.broadcast_to(rope_BTNH, (*k_BTNH.shape[:3], rope_BTNH.shape[3]))
                k_BTNH = jnp.concatenate([k_BTNH, shared], -1)
                if ctx.sequence.groups > 1:
                    # Keys and values go around a ring, or are gathered, as arrays of one shape.
                    longest = max(spec.head_size, c.v_head_dim)
                    v_BTNH = pad_values(v_BTNH, longest)
                    if longest > spec.head_size:  # the kernels divide by the root of the padded size
                        q_BTNH = pad_values(q_BTNH * math.sqrt(longest / spec.head_size), longest)
                        k_BTNH = pad_values(k_BTNH, longest)
                project = functools.partial(_project_values, c.v_head_dim)
                y_BTD = ctx.attend_row_parallel(project, q_BTNH, k_BTNH, v_BTNH, w["attention_out"], window=None)
            return checkpoint_name(x_BTD + ctx.dropout(y_BTD, 2 * index + 1), ATTN_RESIDUAL)

    return attention


def _down(c: Deepseek, h_BTD: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, list[Any]]:
    """Returns latents and rotary keys of this device's positions, queries first, and the up projections."""
    kv_BTZ = checkpoint_name(linear(h_BTD, w["kv_down"]), QKV)
    latent_BTZ = rms_norm(kv_BTZ[..., : c.kv_lora_rank], w["kv_norm"], LATENT_EPSILON)
    rest = [latent_BTZ, kv_BTZ[..., c.kv_lora_rank :]]
    if c.q_lora_rank is None:
        return jnp.concatenate([h_BTD, *rest], -1), [w["query"], w["kv_up"]]
    query_BTZ = checkpoint_name(linear(h_BTD, w["query_down"]), QKV)
    query_BTZ = rms_norm(query_BTZ, w["query_norm"], LATENT_EPSILON)
    return jnp.concatenate([query_BTZ, *rest], -1), [w["query_up"], w["kv_up"]]


def _up(c: Deepseek, expands: bool, gathered_BTZ: jax.Array, weights: list[Any]) -> list[jax.Array]:
    """Returns queries, the rotary key as one head, and keys with values of every head, or the latents as one head.

    gathered_BTZ: queries' latent, latent and rotary key.  expands: whether keys and values are projected.
    """
    ends = (gathered_BTZ.shape[-1] - c.kv_lora_rank - c.qk_rope_head_dim, gathered_BTZ.shape[-1] - c.qk_rope_head_dim)
    query_BTZ, latent_BTZ, rope_BTZ = jnp.split(gathered_BTZ, ends, axis=-1)
    latents = linear(latent_BTZ, weights[1]) if expands else latent_BTZ[:, :, None]
    return [linear(query_BTZ, weights[0]), rope_BTZ[:, :, None], latents]


def _project_values(size: int, out_BTNH: jax.Array, w_NHD: Any) -> jax.Array:
    """Returns the output projection of values of `size`, without their padding."""
    return attention_projection(out_BTNH[..., :size], w_NHD)


def _attend_cached(
    c: Deepseek, ctx: ForwardContext, q_BTNH: jax.Array, latent_BTNH: jax.Array, rope_BTNH: jax.Array, up_ZNH: Any
) -> jax.Array:
    """Returns the attention output [B, T, N, v_head_dim] of a decoding step: every head attends to the latents."""
    assert ctx.attend_latent is not None
    spec = c.attention
    assert spec.latent is not None
    absorbed = absorb_keys(q_BTNH[..., : c.qk_nope_head_dim], up_ZNH)
    # The cache's attention divides scores by the root of the latents' size, and they are those of queries and keys.
    scale = (spec.latent.cached / spec.head_size) ** 0.5
    q_BTNZ = (jnp.concatenate([absorbed, q_BTNH[..., c.qk_nope_head_dim :]], -1) * scale).astype(q_BTNH.dtype)
    cached_BTZ = jnp.concatenate([latent_BTNH[:, :, 0], rope_BTNH[:, :, 0]], -1)
    return absorb_values(ctx.attend_latent(q_BTNZ, cached_BTZ, c.kv_lora_rank), up_ZNH, c.v_head_dim)

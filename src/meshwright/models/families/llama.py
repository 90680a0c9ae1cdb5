"""Llama and its relatives: Llama 1 to 3.x, Mistral, Qwen2, Qwen3, OLMo 2 (Touvron et al. 2023, arXiv:2302.13971).

One layer, model width D, N query heads and K key/value heads of size H, feed-forward width F:

    h = rms_norm(x);  x += row_parallel(attention(column_parallel(h q, h k, h v)) o)
    h = rms_norm(x);  x += row_parallel((silu(column_parallel(h gate)) * column_parallel(h up)) down)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.embed import embed
from meshwright.models.blocks.head_size import even_head_size
from meshwright.models.blocks.linear import attention_projection, linear, linears
from meshwright.models.blocks.norm import rms_norm, rms_norm_heads
from meshwright.models.blocks.rotary import RopeScaling, apply_rope, rope_angles, rope_frequencies
from meshwright.models.blocks.yarn import Yarn, yarn_angles
from meshwright.models.model import (
    AttentionSpec,
    Aux,
    ForwardContext,
    Layer,
    LayerSpec,
    Model,
    ModelSpec,
    padded_vocab,
    vocab_size,
)
from meshwright.models.remat import ATTN_RESIDUAL, FFN_HIDDEN, QKV, recomputed
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.words import AXES

AttentionHalf = Callable[[jax.Array, dict[str, Any], jax.Array], jax.Array]
"""Attention half of a layer: `(x [B, T/tensor, D], weights, layer index) -> x`."""


@dataclasses.dataclass(frozen=True)
class Llama(Model):
    """Configuration of a Llama-like decoder.

    Example:
        >>> model = mw.Llama(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> model.attention.head_size, model.spec().kv_heads
        (64, 2)
    """

    width: int = 128
    """Model width D."""
    layers: int = 4
    """Layers L."""
    heads: int = 4
    """Query heads N."""
    kv_heads: int = 4
    """Key/value heads K; fewer than `heads` is grouped-query attention (GQA, arXiv:2305.13245)."""
    head_size: int | None = None
    """Head size H; None is width / heads."""
    mlp: int = 384
    """Feed-forward width F."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the low rotary frequencies (Llama 3.1 and later)."""
    rope_factor: float = 1.0
    """Factor by which all rotary frequencies are divided (linear position interpolation, arXiv:2306.15595)."""
    yarn: Yarn | None = None
    """Scaling of the low rotary frequencies for long contexts (YaRN; Qwen2.5 and Qwen3 beyond 32k tokens)."""
    norm_epsilon: float = 1e-5
    """Constant added to the mean square in RMSNorm."""
    sliding_window: int | None = None
    """Positions a token attends to, itself included (Mistral); None is all before it."""
    qkv_bias: Literal["none", "learned"] = "none"
    """Bias of the query, key and value projections (Qwen2)."""
    out_bias: Literal["none", "learned"] = "none"
    """Bias of the projection out of attention (`attention_bias` of Llama's and Qwen3's configurations)."""
    mlp_bias: Literal["none", "learned"] = "none"
    """Bias of the three projections of dense feed-forward layers (`mlp_bias` of Llama's configuration)."""
    qk_norm: Literal["none", "rms", "rms_heads"] = "none"
    """Normalisation of queries and keys: each head alone (rms: Qwen3), or all heads together (rms_heads: OLMo 2)."""
    norm_place: Literal["before", "after"] = "before"
    """Whether attention and feed-forward normalise what they read, or what they add (OLMo 2)."""
    embedding: Literal["untied", "tied"] = "untied"
    """Tied uses the embedding table as the unembedding."""

    @property
    def attention(self) -> AttentionSpec:
        """Attention of every layer."""
        _check_rope(self)
        size = even_head_size(self.width, self.heads) if self.head_size is None else self.head_size
        return AttentionSpec(self.heads, self.kv_heads, size, self.sliding_window, self.qk_norm != "none")

    def params(self) -> Tree:
        """Returns the parameter descriptions; `blocks` are stacked over layers."""
        D, V = self.width, padded_vocab(self)
        tree: Tree = {
            "embed": Param((V, D), "VD", rows=vocab_size(self)),
            "blocks": {**self.half_params(self.layers), **swiglu_params(self, self.layers)},
            "final_norm": Param((D,), "D", "ones"),
        }
        if self.embedding == "untied":
            tree["unembed"] = Param((V, D), "VD", rows=vocab_size(self))
        return tree

    def half_params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of the attention half of `layers` layers, and the norms of both halves."""
        return attention_params(self, layers)

    def attention_half(self, ctx: ForwardContext) -> AttentionHalf:
        """Returns the attention half of a layer."""
        return own_attention(self, ctx)

    def spec(self) -> ModelSpec:
        """Returns a dense attention layer for each of `layers`."""
        layers = (LayerSpec("blocks", self.attention),) * self.layers
        return ModelSpec(self.width, layers, embedding="embed" if self.embedding == "tied" else "unembed")

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        table_VD = ctx.gather_params(params["embed"], "embed")
        with jax.named_scope("embedding"):
            return ctx.dropout(embed(ctx.tokens.ids, table_VD), 0)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Layer]:
        """Returns the dense layer."""
        return {"blocks": dense_layer(self, ctx, "blocks", self.attention_half(ctx))}

    def unembed(self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the unembedding [V/stage+tensor, D]."""
        final_D = gather_params(params["final_norm"], "final_norm")
        name = self.spec().embedding
        table_VD = gather_params(params[name], name)
        with jax.named_scope("unembedding"):
            return sequence_all_gather(rms_norm(x_BTD, final_D, self.norm_epsilon), 1), table_VD

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these."""
        return dataclasses.replace(self, layers=layers, **shrunk_sizes(self, shape))

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return {"tied embeddings"} if self.embedding == "tied" else set()


_SHRUNK_HEAD, _SHRUNK_WINDOW = 8, 16


def shrunk_sizes(c: Llama, shape: MeshShape) -> dict[str, Any]:
    """Returns the fields of a small model that every axis divides as it divides `c`."""
    every = math.prod(shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context"))
    kv_heads = math.gcd(c.kv_heads, shape.tensor * shape.context)
    heads = kv_heads * (c.heads // c.kv_heads)
    width = math.lcm(every, heads * _SHRUNK_HEAD)
    return {
        "width": width,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": _SHRUNK_HEAD,
        "mlp": every * 2,
        "rope_scaling": None,
        "rope_factor": 1.0,
        "yarn": None,
        "sliding_window": None if c.sliding_window is None else _SHRUNK_WINDOW,
    }


def attention_params(c: Llama, layers: int) -> dict[str, Param]:
    """Returns the attention parameters of a stack of `layers` layers, with the norms before both halves."""
    L, D, N, K, H = layers, c.width, c.heads, c.kv_heads, c.attention.head_size
    params = {
        "attention_norm": Param((L, D), "LD", "ones"),
        "query": Param((L, D, N, H), "LDNH", role="qkv"),
        "key": Param((L, D, K, H), "LDKH", role="qkv"),
        "value": Param((L, D, K, H), "LDKH", role="qkv"),
        "attention_out": Param((L, N, H, D), "LNHD", std=output_std(c), role="attention_out", contract=2),
        "mlp_norm": Param((L, D), "LD", "ones"),
    }
    if c.qkv_bias == "learned":
        params["query_bias"] = Param((L, N, H), "LNH", "zeros")
        params["key_bias"] = Param((L, K, H), "LKH", "zeros")
        params["value_bias"] = Param((L, K, H), "LKH", "zeros")
    if c.out_bias == "learned":
        params["attention_out_bias"] = Param((L, D), "LD", "zeros")
    if c.qk_norm == "rms":
        params["query_norm"] = Param((L, H), "LH", "ones")
        params["key_norm"] = Param((L, H), "LH", "ones")
    if c.qk_norm == "rms_heads":
        params["query_norm"] = Param((L, N, H), "LNH", "ones")
        params["key_norm"] = Param((L, K, H), "LKH", "ones")
    return params


def swiglu_params(c: Llama, layers: int) -> dict[str, Param]:
    """Returns the SwiGLU parameters of a stack of `layers` layers."""
    L, D, F = layers, c.width, c.mlp
    params = {
        "gate": Param((L, D, F), "LDF", role="ffn_in"),
        "up": Param((L, D, F), "LDF", role="ffn_in"),
        "down": Param((L, F, D), "LFD", std=output_std(c), role="ffn_out"),
    }
    if c.mlp_bias == "learned":
        params["gate_bias"] = Param((L, F), "LF", "zeros")
        params["up_bias"] = Param((L, F), "LF", "zeros")
        params["down_bias"] = Param((L, D), "LD", "zeros")
    return params


def output_std(c: Llama) -> float:
    """Returns the initial standard deviation of projections into the residual stream (GPT-2: 0.02 / sqrt(2 L))."""
    return float(0.02 / (2 * c.layers) ** 0.5)


def dense_layer(c: Llama, ctx: ForwardContext, stack: str, attention: AttentionHalf) -> Layer:
    """Returns the layer whose parameters are the subtree `stack`."""

    def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
        weights = ctx.gather_params(params, stack)
        x_BTD = attention(x_BTD, weights, index)
        with jax.named_scope("feed-forward"):
            h_BTD = _norm_if(c, "before", x_BTD, weights["mlp_norm"])
            gate_BTF, up_BTF = ctx.column_parallel(linears, h_BTD, [weights["gate"], weights["up"]])
            if c.mlp_bias == "learned":
                gate_BTF, up_BTF = gate_BTF + weights["gate_bias"], up_BTF + weights["up_bias"]
            y_BTD = ctx.row_parallel(linear, silu_product(gate_BTF, up_BTF), weights["down"])
            y_BTD = y_BTD + weights["down_bias"] if c.mlp_bias == "learned" else y_BTD
            y_BTD = _norm_if(c, "after", y_BTD, weights["mlp_norm"])
            return x_BTD + ctx.dropout(y_BTD, 2 * index + 2), {}

    return layer


def own_attention(c: Llama, ctx: ForwardContext) -> AttentionHalf:
    """Returns the attention half of the layers of a model whose layers are of one kind."""
    return attention_half(c, ctx, c.sliding_window, rotary_angles(c, ctx.tokens.positions, c.attention.head_size))


def rotary_angles(c: Llama, positions_BT: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine [B, T, 1, H/2] of the rotation of `size` features of each head, scaled as `c` has it.

    positions_BT: positions within each document.
    """
    if c.yarn is not None:
        return yarn_angles(positions_BT, size, c.rope_theta, c.yarn)
    return rope_angles(positions_BT, rope_frequencies(size, c.rope_theta, c.rope_scaling) / np.float32(c.rope_factor))


def _check_rope(c: Llama) -> None:
    """Raises ConfigError for two scalings of the rotary frequencies, or one that does not lengthen a context."""
    given = {
        "rope_scaling": c.rope_scaling is not None, "rope_factor": c.rope_factor != 1.0, "yarn": c.yarn is not None,
    }  # fmt: skip
    found = [f"model.{name}" for name, is_given in given.items() if is_given]
    if len(found) > 1:
        raise ConfigError(
            " and ".join(found), "each of them scales the same rotary frequencies", f"one of them, such as {found[-1]}"
        )
    for name, value, fix in (("theta", c.rope_theta, 10000), ("factor", c.rope_factor, 1)):
        if not 0 < value < math.inf:
            truth = "rotary frequencies are made of it, and it must be positive"
            raise ConfigError(f"model.rope_{name} = {value:g}", truth, f"--model.rope-{name} {fix}")


def attention_half(
    c: Llama, ctx: ForwardContext, window: int | None, cos_sin: tuple[jax.Array, jax.Array]
) -> AttentionHalf:
    """Returns the attention half of layers with one window and rotation. cos_sin: as `rope_angles` returns them."""

    def attention(x_BTD: jax.Array, weights: dict[str, Any], index: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            h_BTD = _norm_if(c, "before", x_BTD, weights["attention_norm"])
            products = ctx.column_parallel(linears, h_BTD, [weights[name] for name in ("query", "key", "value")])
            qkv, w_NHD = _qkv(c, products, weights, cos_sin), weights["attention_out"]
            y_BTD = ctx.attend_row_parallel(attention_projection, *qkv, w_NHD, window=window)
            y_BTD = y_BTD + weights["attention_out_bias"] if c.out_bias == "learned" else y_BTD
            y_BTD = _norm_if(c, "after", y_BTD, weights["attention_norm"])
            return checkpoint_name(x_BTD + ctx.dropout(y_BTD, 2 * index + 1), ATTN_RESIDUAL)

    return attention


def _norm_if(c: Llama, place: str, x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    return rms_norm(x_BTD, scale_D, c.norm_epsilon) if c.norm_place == place else x_BTD


def _qkv(
    c: Llama, products: list[jax.Array], weights: dict[str, Any], cos_sin: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values with bias, norm and rotation. products: of the three projections."""
    q_BTNH, k_BTKH, v_BTKH = products
    if c.qkv_bias == "learned":
        q_BTNH, k_BTKH = q_BTNH + weights["query_bias"], k_BTKH + weights["key_bias"]
        v_BTKH = v_BTKH + weights["value_bias"]
    if c.qk_norm == "rms":
        norm = functools.partial(rms_norm, epsilon=c.norm_epsilon)
        q_BTNH, k_BTKH = norm(q_BTNH, weights["query_norm"]), norm(k_BTKH, weights["key_norm"])
    if c.qk_norm == "rms_heads":
        norm = functools.partial(rms_norm_heads, epsilon=c.norm_epsilon)
        q_BTNH, k_BTKH = norm(q_BTNH, weights["query_norm"]), norm(k_BTKH, weights["key_norm"])
    q_BTNH, k_BTKH = apply_rope(q_BTNH, cos_sin), apply_rope(k_BTKH, cos_sin)
    return checkpoint_name(q_BTNH, QKV), checkpoint_name(k_BTKH, QKV), checkpoint_name(v_BTKH, QKV)


def swiglu(h_BTD: jax.Array, weights: dict[str, Any]) -> jax.Array:
    """SiLU-gated MLP (SwiGLU, arXiv:2002.05202): (silu(h gate) * h up) down, unreduced over `tensor`."""
    gate_BTF, up_BTF = linear(h_BTD, weights["gate"]), linear(h_BTD, weights["up"])
    return linear(silu_product(gate_BTF, up_BTF), weights["down"])


def silu_product(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """Returns silu(gate) * up, the hidden features of SwiGLU; both factors are named for the remat policies."""
    return _silu_product(checkpoint_name(gate_BTF, FFN_HIDDEN), checkpoint_name(up_BTF, FFN_HIDDEN))


@recomputed
def _silu_product(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.silu(gate_BTF) * up_BTF

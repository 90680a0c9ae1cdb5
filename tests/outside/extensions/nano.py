"""Grouped-query transformer in the manner of modded-nanogpt, with field and parameter names of its own.

One layer: RMSNorm without scale, rotary grouped-query attention with normalised queries and keys, squared-ReLU MLP
(Primer, arXiv:2109.08668). Source: KellerJordan/modded-nanogpt.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.models.blocks.layers import embed, linear
from meshwright.models.blocks.rotary import apply_rope, rope_angles, rope_frequencies
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
from meshwright.models.remat import FFN_HIDDEN, QKV
from meshwright.sharding.params import GatherParams, Param, Tree


@dataclasses.dataclass(frozen=True)
class Nano(Model):
    """Configuration of a small grouped-query transformer."""

    n_embd: int = 64
    """Model width D."""
    depth: int = 2
    """Layers L."""
    n_head: int = 8
    """Query heads N."""
    n_kv: int = 4
    """Key/value heads K (GQA)."""
    d_head: int = 8
    """Head size H."""

    def params(self) -> Tree:
        """Returns the parameter descriptions: tables `wte` and `lm_head`, and the stack `h`."""
        L, D, N, K, H = self.depth, self.n_embd, self.n_head, self.n_kv, self.d_head
        layers = {
            "c_q": Param((L, D, N, H), "LDNH", role="qkv"),
            "c_k": Param((L, D, K, H), "LDKH", role="qkv"),
            "c_v": Param((L, D, K, H), "LDKH", role="qkv"),
            "c_proj": Param(
                (L, N, H, D), "LNHD", std=0.02 / (2 * L) ** 0.5, role="attention_out", contract=2
            ),
            "fc_in": Param((L, D, 4 * D), "LDF", role="ffn_in"),
            "fc_out": Param((L, 4 * D, D), "LFD", std=0.02 / (2 * L) ** 0.5, role="ffn_out"),
        }
        table = Param((padded_vocab(self), D), "VD", rows=vocab_size(self))
        return {"wte": table, "h": layers, "lm_head": table}

    def spec(self) -> ModelSpec:
        """Returns `depth` layers of grouped-query attention; the unembedding is `lm_head`."""
        attention = AttentionSpec(self.n_head, self.n_kv, self.d_head)
        return ModelSpec(
            self.n_embd, (LayerSpec("h", attention),) * self.depth, embedding="lm_head"
        )

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        return ctx.dropout(
            _norm(embed(ctx.tokens.ids, ctx.gather_params(params["wte"], "wte"), ctx.sum_rows)), 0
        )

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Layer]:
        """Returns the layer."""
        cos_sin = rope_angles(ctx.tokens.positions, rope_frequencies(self.d_head, 10_000.0, None))

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            w = ctx.gather_params(params, "h")
            h_BTD = sequence_all_gather(_norm(x_BTD), 1)
            q_BTNH, k_BTKH = (
                apply_rope(_norm(linear(h_BTD, w[name])), cos_sin) for name in ("c_q", "c_k")
            )
            q_BTNH, k_BTKH, v_BTKH = (
                checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, linear(h_BTD, w["c_v"]))
            )
            out_BTNH = ctx.attend(q_BTNH, k_BTKH, v_BTKH, window=None)
            y_BTD = sequence_reduce_scatter(linear(out_BTNH, w["c_proj"], contract=2), 1)
            x_BTD += ctx.dropout(y_BTD, 2 * index + 1)
            h_BTF = checkpoint_name(
                linear(sequence_all_gather(_norm(x_BTD), 1), w["fc_in"]), FFN_HIDDEN
            )
            y_BTD = sequence_reduce_scatter(linear(jnp.square(jax.nn.relu(h_BTF)), w["fc_out"]), 1)
            return x_BTD + ctx.dropout(y_BTD, 2 * index + 2), {}

        return {"h": layer}

    def unembed(
        self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the unembedding [V/stage+tensor, D]."""
        return sequence_all_gather(_norm(x_BTD), 1), gather_params(params["lm_head"], "lm_head")

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these."""
        every = shape.data * shape.fsdp * shape.expert * shape.tensor
        return dataclasses.replace(self, depth=layers, n_embd=8 * every)


def _norm(x: jax.Array) -> jax.Array:
    """Divides by the root mean square over the last dimension, in float32 (RMSNorm, arXiv:1910.07467)."""
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype)

"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, tied embeddings.

One layer, model width D, N heads of size H, feed-forward width F = 4 D:

    h = layer_norm(x);  x += row_parallel(attention(column_parallel(h q, h k, h v)) o)
    h = layer_norm(x);  x += row_parallel(gelu(column_parallel(h up)) down)
"""

import dataclasses
import math
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import local_shard, sequence_all_gather
from meshwright.config import MeshShape
from meshwright.models.blocks.embed import embed
from meshwright.models.blocks.head_size import even_head_size
from meshwright.models.blocks.linear import attention_projection, linear, linears
from meshwright.models.blocks.norm import layer_norm
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
from meshwright.models.remat import ATTN_RESIDUAL, FFN_HIDDEN, QKV
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.words import AXES


@dataclasses.dataclass(frozen=True)
class Gpt2(Model):
    """Configuration of a GPT-2 decoder.

    Example:
        >>> model = mw.Gpt2(vocab=50257, width=768, layers=12, heads=12)
        >>> model.spec().max_seq
        1024
    """

    width: int = 128
    """Model width D."""
    layers: int = 4
    """Layers L."""
    heads: int = 4
    """Query heads N."""
    positions: int = 1024
    """Longest sequence: rows of the table of positions."""
    bias: Literal["learned", "none"] = "learned"
    """Biases of projections and norms."""
    norm_epsilon: float = 1e-5
    """Constant added to the variance in LayerNorm."""

    def params(self) -> Tree:
        """Returns the parameter descriptions; `blocks` are stacked over layers."""
        L, D, F, N, V = self.layers, self.width, 4 * self.width, self.heads, padded_vocab(self)
        H, out = even_head_size(D, N), 0.02 / (2 * L) ** 0.5
        blocks = {
            "attention_norm": Param((L, D), "LD", "ones"),
            "query": Param((L, D, N, H), "LDNH", role="qkv"),
            "key": Param((L, D, N, H), "LDNH", role="qkv"),
            "value": Param((L, D, N, H), "LDNH", role="qkv"),
            "attention_out": Param((L, N, H, D), "LNHD", std=out, role="attention_out", contract=2),
            "mlp_norm": Param((L, D), "LD", "ones"),
            "up": Param((L, D, F), "LDF", role="ffn_in"),
            "down": Param((L, F, D), "LFD", std=out, role="ffn_out"),
        }
        final: Tree = {"scale": Param((D,), "D", "ones")}
        if self.bias == "learned":
            for name, shape, dims in (
                ("attention_norm_bias", (L, D), "LD"),
                ("query_bias", (L, N, H), "LNH"),
                ("key_bias", (L, N, H), "LNH"),
                ("value_bias", (L, N, H), "LNH"),
                ("attention_out_bias", (L, D), "LD"),
                ("mlp_norm_bias", (L, D), "LD"),
                ("up_bias", (L, F), "LF"),
                ("down_bias", (L, D), "LD"),
            ):
                blocks[name] = Param(shape, dims, "zeros")
            final["bias"] = Param((D,), "D", "zeros")
        return {
            "embed": Param((V, D), "VD", rows=vocab_size(self)),
            "positions": Param((self.positions, D), "TD"),
            "blocks": blocks,
            "final_norm": final,
        }

    def spec(self) -> ModelSpec:
        """Returns a dense attention layer for each of `layers`."""
        attention = AttentionSpec(self.heads, self.heads, even_head_size(self.width, self.heads))
        return ModelSpec(self.width, (LayerSpec("blocks", attention),) * self.layers, max_seq=self.positions)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens and positions [B, T/tensor, D], on the first stage."""
        table_VD = ctx.gather_params(params["embed"], "embed")
        positions_TD = ctx.gather_params(params["positions"], "positions")
        with jax.named_scope("embedding"):
            x_BTD = embed(ctx.tokens.ids, table_VD) + positions_TD[local_shard(ctx.tokens.positions, ("tensor",), 1)]
            return ctx.dropout(x_BTD, 0)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Layer]:
        """Returns the layer."""

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            w = ctx.gather_params(params, "blocks")
            with jax.named_scope("attention"):
                h_BTD = self._norm(x_BTD, w["attention_norm"], w.get("attention_norm_bias"))
                names = ("query", "key", "value")
                products = ctx.column_parallel(linears, h_BTD, [w[name] for name in names])
                q_BTNH, k_BTNH, v_BTNH = (
                    checkpoint_name(_add_bias(product, w.get(f"{name}_bias")), QKV)
                    for name, product in zip(names, products, strict=True)
                )
                y_BTD = ctx.attend_row_parallel(
                    attention_projection, q_BTNH, k_BTNH, v_BTNH, w["attention_out"], window=None
                )
                y_BTD = ctx.dropout(_add_bias(y_BTD, w.get("attention_out_bias")), 2 * index + 1)
                x_BTD = checkpoint_name(x_BTD + y_BTD, ATTN_RESIDUAL)
            with jax.named_scope("feed-forward"):
                h_BTD = self._norm(x_BTD, w["mlp_norm"], w.get("mlp_norm_bias"))
                up_BTF = _add_bias(ctx.column_parallel(linear, h_BTD, w["up"]), w.get("up_bias"))
                hidden_BTF = jax.nn.gelu(checkpoint_name(up_BTF, FFN_HIDDEN), approximate=True)
                y_BTD = ctx.row_parallel(linear, hidden_BTF, w["down"])
                return x_BTD + ctx.dropout(_add_bias(y_BTD, w.get("down_bias")), 2 * index + 2), {}

        return {"blocks": layer}

    def unembed(self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the embedding table [V/stage+tensor, D]."""
        table_VD = gather_params(params["embed"], "embed")
        final = gather_params(params["final_norm"], "final_norm")
        with jax.named_scope("unembedding"):
            return sequence_all_gather(self._norm(x_BTD, final["scale"], final.get("bias")), 1), table_VD

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these."""
        every = math.prod(shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context"))
        heads = math.gcd(self.heads, shape.tensor * shape.context)
        return dataclasses.replace(self, layers=layers, width=math.lcm(every, heads * 8), heads=heads)

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return {"tied embeddings"}

    def _norm(self, x_BTD: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        return layer_norm(x_BTD, scale, bias, self.norm_epsilon)


def _add_bias(x: jax.Array, bias: Any) -> jax.Array:
    return x if bias is None else x + bias

"""Gated short convolutions before every attention layer, in the manner of LFM2 (Liquid AI 2025): a layer kind.

First half of a convolution layer, of W taps, with F channels:

    h = rms_norm(x);  b, c, v = column_parallel(h)
    y_t = c_t * sum_k taps_k (b v)_{t-k};  x += row_parallel(y out)

A token reads the W - 1 tokens before it, of its own document: that is what a cache keeps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.blocks.layers import linear, linears
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.fields import GroupedQuery, TiedOrNot
from meshwright.models.model import ForwardContext, Kind, Recurrence, Widths
from meshwright.models.remat import ATTN_OUT, QKV
from meshwright.sharding.params import Param


@dataclasses.dataclass(frozen=True)
class ConvolutionSpec(Recurrence):
    """Facts of a gated short convolution."""

    channels: int
    """Channels F."""
    taps: int
    """Tokens W that a token reads, itself included."""

    item = "short convolution"
    formula = "no matmuls: 2 F W elementwise operations per token and layer are not counted"

    def widths(self, width: int, tensor: int) -> Widths:
        """Returns the widths on one of `tensor` devices: two gates and the value are saved."""
        local = self.channels / tensor
        return Widths(
            heads=0, query=0, kv=0, value=local, saved=3 * local, gathered=width, kept=local
        )

    def carried(self, batch: int) -> jax.ShapeDtypeStruct:
        """Returns the last inputs of the convolution, [F, B, W - 1]."""
        return jax.ShapeDtypeStruct((self.channels, batch, self.taps - 1), jnp.float32)


@dataclasses.dataclass(frozen=True)
class ShortConvolution(Kind):
    """Gated short convolution as the first half of a layer."""

    channels: int
    taps: int
    out_std: float
    """Initial standard deviation of the output projection."""

    scope = "short convolution"

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, F, W = layers, self.width, self.channels, self.taps
        names = ("gate_in", "gate_out", "value")
        return {
            **{name: Param((L, D, F), "LDF", role="qkv") for name in names},
            "taps": Param((L, F, W), "LFW"),
            "convolution_out": Param((L, F, D), "LFD", std=self.out_std, role="attention_out"),
        }

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        return {"recurrence": ConvolutionSpec(self.channels, self.taps)}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the convolution of a step's tokens, or of a decoding step's."""

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            weights = [w["gate_in"], w["gate_out"], w["value"]]
            gate_in, gate_out, value = ctx.column_parallel(linears, h_BTD, weights)
            gate_in = checkpoint_name(gate_in, QKV)
            gate_out = checkpoint_name(gate_out, QKV)
            value = checkpoint_name(value, QKV)

            def convolve(
                x_BTF: jax.Array, positions_BT: jax.Array, before_FBW: jax.Array | None
            ) -> tuple[jax.Array, jax.Array]:
                return causal_convolution(x_BTF, w["taps"], positions_BT, before_FBW)

            y_BTF = gate_out * ctx.recur(convolve, gate_in * value)
            return ctx.row_parallel(linear, checkpoint_name(y_BTF, ATTN_OUT), w["convolution_out"])

        return mix


def causal_convolution(
    x_BTF: jax.Array, taps_FW: jax.Array, positions_BT: jax.Array, before_FBW: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns each channel convolved with its own taps within documents, and the last W - 1 inputs [F, B, W - 1].

    before_FBW: inputs of the tokens before these; None where there are none.
    """
    B, T, F = x_BTF.shape
    W = taps_FW.shape[-1]
    if before_FBW is None:
        before_FBW = jnp.zeros((F, B, W - 1), jnp.float32)
    joined_BTF = jnp.concatenate([before_FBW.transpose(1, 2, 0).astype(x_BTF.dtype), x_BTF], 1)
    out_BTF = jnp.zeros_like(x_BTF)
    for back in range(W):
        first = W - 1 - back
        same_document_BT = positions_BT >= back
        earlier_BTF = joined_BTF[:, first : first + T]
        out_BTF += jnp.where(same_document_BT[..., None], earlier_BTF, 0) * taps_FW[:, first]
    return out_BTF, joined_BTF[:, T:].transpose(2, 0, 1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ShortConvModel(GroupedQuery, TiedOrNot):
    """Configuration of a decoder whose layers are a convolution and grouped-query attention by turns."""

    mlp: int = 256
    """Feed-forward width F."""
    taps: int = 3
    """Tokens W that a convolution reads."""

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        feed_forward = FeedForward(self.width, self.mlp, self.out_std)
        convolution = ShortConvolution(self.width, self.width, self.taps, self.out_std)
        return self.repeat(
            Block("convolution_blocks", convolution, feed_forward, self.norm),
            Block("blocks", self.attention(), feed_forward, self.norm),
        )

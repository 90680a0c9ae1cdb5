"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786) and Gemma 2 (2024, arXiv:2408.00118): local layers to one global, norms
before and after each half.

One layer, model width D, N query heads and K key/value heads of size H, feed-forward width F; every norm is RMSNorm
with the scale 1 + w:

    x += norm(row_parallel(attention(norm(column_parallel(h q)), norm(column_parallel(h k)), h v) o)),  h = norm(x)
    x += norm(row_parallel((gelu(column_parallel(h gate)) * column_parallel(h up)) down)),              h = norm(x)

Local layers attend within a sliding window. In Gemma 3 they have rotary frequencies of their own, in Gemma 2 attention
scores and logits have a soft cap, and queries and keys no norm.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.embed import embed
from meshwright.models.blocks.head_size import even_head_size
from meshwright.models.blocks.linear import attention_projection, linear, linears
from meshwright.models.blocks.norm import rms_norm_plus_one
from meshwright.models.blocks.rotary import apply_rope, rope_angles, rope_frequencies
from meshwright.models.kernels.scores import Scores
from meshwright.models.model import (
    AttentionSpec,
    Aux,
    ForwardContext,
    Layer,
    LayerSpec,
    Model,
    ModelSpec,
    Pattern,
    padded_vocab,
    vocab_size,
)
from meshwright.models.remat import ATTN_RESIDUAL, FFN_HIDDEN, QKV, recomputed
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.words import AXES


@dataclasses.dataclass(frozen=True)
class Gemma(Model):
    """Configuration that Gemma 2 and Gemma 3 have in common."""

    width: int = 128
    """Model width D."""
    layers: int = 6
    """Layers L."""
    heads: int = 4
    """Query heads N."""
    kv_heads: int = 2
    """Key/value heads K; fewer than `heads` is grouped-query attention (GQA)."""
    head_size: int | None = None
    """Head size H; None is width / heads."""
    mlp: int = 384
    """Feed-forward width F."""
    local_layers: int = 5
    """Layers with a sliding window before each layer without."""
    sliding_window: int = 512
    """Positions that a token attends to in local layers, itself included."""
    rope_theta: float = 1000000.0
    """Base of the rotary frequencies in global layers."""
    query_scale: float | None = None
    """Attention scores are divided by the root of this; None is the head size."""
    norm_epsilon: float = 1e-6
    """Constant added to the mean square in RMSNorm."""

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.local_layers + 1

    @property
    def size_of_head(self) -> int:
        """Head size H."""
        return even_head_size(self.width, self.heads) if self.head_size is None else self.head_size

    def params(self) -> Tree:
        """Returns the parameter descriptions; `blocks` are stacked over layers."""
        L, D, F, V = self.layers, self.width, self.mlp, padded_vocab(self)
        N, K, H, out = self.heads, self.kv_heads, self.size_of_head, 0.02 / (2 * self.layers) ** 0.5
        blocks = {
            "attention_norm": Param((L, D), "LD", "zeros"),
            "query": Param((L, D, N, H), "LDNH", role="qkv"),
            "key": Param((L, D, K, H), "LDKH", role="qkv"),
            "value": Param((L, D, K, H), "LDKH", role="qkv"),
            "attention_out": Param((L, N, H, D), "LNHD", std=out, role="attention_out", contract=2),
            "attention_out_norm": Param((L, D), "LD", "zeros"),
            "mlp_norm": Param((L, D), "LD", "zeros"),
            "gate": Param((L, D, F), "LDF", role="ffn_in"),
            "up": Param((L, D, F), "LDF", role="ffn_in"),
            "down": Param((L, F, D), "LFD", std=out, role="ffn_out"),
            "mlp_out_norm": Param((L, D), "LD", "zeros"),
        }
        return {
            "embed": Param((V, D), "VD", rows=vocab_size(self)),
            "blocks": blocks,
            "final_norm": Param((D,), "D", "zeros"),
        }

    def spec(self) -> ModelSpec:
        """Returns local and global layers by turns."""
        if self.local_layers < 0 or self.sliding_window < 1:
            raise ConfigError(
                f"{self.local_layers} local layers with a window of {self.sliding_window}",
                "there are none or more, and a token attends to itself at least",
                f"--model.local-layers {type(self).local_layers} --model.sliding-window {type(self).sliding_window}",
            )
        kinds = [LayerSpec("blocks", self._attention(i)) for i in range(self.period)]
        layers = tuple(kinds[i % self.period] for i in range(self.layers))
        return ModelSpec(self.width, layers, period=self.period)

    def _attention(self, place: int) -> AttentionSpec:
        """Attention of a layer by its place in the period: the last is global."""
        window = self.sliding_window if place < self.local_layers else None
        return AttentionSpec(self.heads, self.kv_heads, self.size_of_head, window)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens times the root of the width [B, T/tensor, D], on the first stage."""
        table_VD = ctx.gather_params(params["embed"], "embed")
        with jax.named_scope("embedding"):
            x_BTD = embed(ctx.tokens.ids, table_VD)
            return ctx.dropout(x_BTD * jnp.asarray(self.width**0.5, x_BTD.dtype), 0)

    def _layer(
        self, ctx: ForwardContext, place: int, cos_sin: tuple[jax.Array, jax.Array], scores: Scores | None = None
    ) -> Layer:
        """Returns the layer at a place of the period."""
        window, H = self._attention(place).window, self.size_of_head
        norm = functools.partial(rms_norm_plus_one, epsilon=self.norm_epsilon)
        # The kernels divide scores by the root of the head size.
        scale = (H / (self.query_scale or H)) ** 0.5

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            w = ctx.gather_params(params, "blocks")
            with jax.named_scope("attention"):
                names = ("query", "key", "value")
                products = ctx.column_parallel(linears, norm(x_BTD, w["attention_norm"]), [w[name] for name in names])
                q_BTNH, k_BTKH, v_BTKH = products
                if "query_norm" in w:
                    q_BTNH, k_BTKH = norm(q_BTNH, w["query_norm"]), norm(k_BTKH, w["key_norm"])
                q_BTNH, k_BTKH = apply_rope(scale * q_BTNH, cos_sin), apply_rope(k_BTKH, cos_sin)
                q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, v_BTKH))
                y_BTD = ctx.attend_row_parallel(
                    attention_projection, q_BTNH, k_BTKH, v_BTKH, w["attention_out"], window=window, scores=scores
                )
                y_BTD = ctx.dropout(norm(y_BTD, w["attention_out_norm"]), 2 * index + 1)
                x_BTD = checkpoint_name(x_BTD + y_BTD, ATTN_RESIDUAL)
            with jax.named_scope("feed-forward"):
                both = ctx.column_parallel(linears, norm(x_BTD, w["mlp_norm"]), [w["gate"], w["up"]])
                gate_BTF, up_BTF = (checkpoint_name(product, FFN_HIDDEN) for product in both)
                y_BTD = ctx.row_parallel(linear, _gelu_product(gate_BTF, up_BTF), w["down"])
                return x_BTD + ctx.dropout(norm(y_BTD, w["mlp_out_norm"]), 2 * index + 2), {}

        return layer

    def unembed(self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the embedding table [V/stage+tensor, D]."""
        final_D = gather_params(params["final_norm"], "final_norm")
        table_VD = gather_params(params["embed"], "embed")
        with jax.named_scope("unembedding"):
            return sequence_all_gather(rms_norm_plus_one(x_BTD, final_D, self.norm_epsilon), 1), table_VD

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with periods of two layers."""
        every = math.prod(shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context"))
        kv_heads = math.gcd(self.kv_heads, shape.tensor * shape.context)
        heads, local = kv_heads * (self.heads // self.kv_heads), min(1, self.local_layers)
        return dataclasses.replace(
            self, layers=layers * (local + 1), local_layers=local, heads=heads, kv_heads=kv_heads,
            width=math.lcm(every, heads * 8), head_size=8, mlp=every * 2, sliding_window=16, query_scale=None,
        )  # fmt: skip

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return {"tied embeddings"}


@dataclasses.dataclass(frozen=True)
class Gemma3(Gemma):
    """Configuration of a Gemma 3 decoder.

    Example:
        >>> model = mw.Gemma3(vocab=32000, width=512, layers=12, heads=4, kv_heads=2, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers[:6]]
        [512, 512, 512, 512, 512, None]
    """

    rope_factor: float = 1.0
    """Factor by which the positions of global layers are divided, for longer sequences than those of pre-training."""
    local_rope_theta: float = 10000.0
    """Base of the rotary frequencies in local layers."""

    def params(self) -> Tree:
        """Returns the parameter descriptions; `blocks` are stacked over layers."""
        tree, shape = super().params(), (self.layers, self.size_of_head)
        norms = {name: Param(shape, "LH", "zeros") for name in ("query_norm", "key_norm")}
        return {**tree, "blocks": {**tree["blocks"], **norms}}

    def _attention(self, place: int) -> AttentionSpec:
        return dataclasses.replace(super()._attention(place), normalises_qk=True)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:
        """Returns the layers of a period: local ones, then a global one."""
        frequencies = (
            rope_frequencies(self.size_of_head, self.local_rope_theta, None),
            rope_frequencies(self.size_of_head, self.rope_theta, None) / self.rope_factor,
        )
        angles = [rope_angles(ctx.tokens.positions, frequency_H) for frequency_H in frequencies]
        local, last = self._layer(ctx, 0, angles[0]), self._layer(ctx, self.local_layers, angles[1])
        return {"blocks": (local,) * self.local_layers + (last,)}


@dataclasses.dataclass(frozen=True)
class Gemma2(Gemma):
    """Configuration of a Gemma 2 decoder.

    Example:
        >>> model = mw.Gemma2(vocab=32000, width=512, layers=4, heads=4, kv_heads=2, mlp=1536)
        >>> [layer.attention.window for layer in model.spec().layers]
        [4096, None, 4096, None]
    """

    local_layers: int = 1
    """Layers with a sliding window before each layer without."""
    sliding_window: int = 4096
    """Positions that a token attends to in local layers, itself included."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    softcap: float | None = 50.0
    """Soft cap of the attention scores; None has none."""
    logit_softcap: float | None = 30.0
    """Soft cap of the logits; None has none."""

    def spec(self) -> ModelSpec:
        """Returns local and global layers by turns, and the soft cap of the logits."""
        return dataclasses.replace(super().spec(), logit_softcap=self.logit_softcap)

    def _attention(self, place: int) -> AttentionSpec:
        features = frozenset() if self.softcap is None else frozenset({"softcap"})
        return dataclasses.replace(super()._attention(place), features=features)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:
        """Returns the layers of a period: local ones, then a global one."""
        cos_sin = rope_angles(ctx.tokens.positions, rope_frequencies(self.size_of_head, self.rope_theta, None))
        scores = None if self.softcap is None else Scores(softcap=self.softcap)
        kinds = tuple(self._layer(ctx, place, cos_sin, scores) for place in range(self.period))
        return {"blocks": kinds if len(kinds) > 1 else kinds[0]}


@recomputed
def _gelu_product(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate_BTF, approximate=True) * up_BTF

"""GPT-OSS (OpenAI 2025, arXiv:2508.10925): local and global attention by turns, attention sinks, biased experts.

One layer, model width D, N query heads and K key/value heads of size H, E experts of width F of which a token uses k:

    h = rms_norm(x);  x += row_parallel(attention(column_parallel(h q, h k, h v) + biases; sinks) o) + bias
    h = sequence_all_gather(rms_norm(x));  x += sequence_reduce_scatter(sum_k weight_k expert_k(h))
    expert(h) = ((up + 1) gate sigmoid(alpha gate)) down + bias,  gate and up with biases and clamped

Every layer has the rotary frequencies of YaRN. The first layer of each two attends within a sliding window.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.blocks.embed import embed
from meshwright.models.blocks.experts import ExpertFunction, Routing, dropless_moe, route, router_losses
from meshwright.models.blocks.head_size import even_head_size
from meshwright.models.blocks.linear import attention_projection, linears
from meshwright.models.blocks.norm import rms_norm
from meshwright.models.blocks.rotary import apply_rope, rope_angles, rope_frequencies
from meshwright.models.blocks.yarn import Yarn, yarn_angles
from meshwright.models.families.mixtral import routing_metrics
from meshwright.models.kernels.scores import Scores
from meshwright.models.model import (
    AttentionSpec,
    Aux,
    ExpertSpec,
    ForwardContext,
    Layer,
    LayerSpec,
    Metrics,
    Model,
    ModelSpec,
    Pattern,
    padded_vocab,
    vocab_size,
)
from meshwright.models.remat import ATTN_RESIDUAL, QKV, recomputed
from meshwright.sharding.params import GatherParams, Param, Tree
from meshwright.words import AXES


@dataclasses.dataclass(frozen=True)
class GptOss(Model):
    """Configuration of a GPT-OSS decoder.

    Example:
        >>> model = mw.GptOss(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16)
        >>> [layer.attention.window for layer in model.spec().layers]
        [128, None, 128, None]
    """

    width: int = 128
    """Model width D."""
    layers: int = 4
    """Layers L."""
    heads: int = 4
    """Query heads N."""
    kv_heads: int = 2
    """Key/value heads K; fewer than `heads` is grouped-query attention (GQA)."""
    head_size: int | None = None
    """Head size H; None is width / heads."""
    local_layers: int = 1
    """Layers with a sliding window before each layer without."""
    sliding_window: int = 128
    """Positions that a token attends to in local layers, itself included."""
    rope_theta: float = 150000.0
    """Base of the rotary frequencies."""
    rope_scaling: Yarn | None = None
    """Scaling of the low rotary frequencies."""
    norm_epsilon: float = 1e-5
    """Constant added to the mean square in RMSNorm."""
    experts: int = 8
    """Experts E of a layer."""
    experts_per_token: int = 4
    """Experts that a token is routed to, k."""
    expert_mlp: int = 384
    """Feed-forward width F of an expert."""
    swiglu_alpha: float = 1.702
    """Factor of the gate inside of the sigmoid."""
    swiglu_limit: float = 7.0
    """Largest gate, and largest size of the other factor."""
    expert_buffer_factor: float = 0.0
    """Rows that a device of the mesh axis `expert` has room for, as a multiple of an even share. Rows beyond are
    dropped and counted as `choices dropped`. 0 has room for the most that can arrive."""
    aux_loss_weight: float = 0.001
    """Weight of the load-balancing loss, summed over layers."""
    router_z_loss_weight: float = 0.0
    """Weight of the router's z-loss, summed over layers (ST-MoE, arXiv:2202.08906, equation 5)."""

    @property
    def period(self) -> int:
        """Layers after which their kinds repeat."""
        return self.local_layers + 1

    @property
    def size_of_head(self) -> int:
        """Head size H."""
        return even_head_size(self.width, self.heads) if self.head_size is None else self.head_size

    @property
    def routing(self) -> Routing:
        """Routing of a layer: softmax over the logits of a token's experts."""
        return Routing(self.experts, self.experts_per_token, "softmax", True, 1.0, 1, 1)

    def params(self) -> Tree:
        """Returns the parameter descriptions; `blocks` are stacked over layers."""
        L, D, F, V, E = self.layers, self.width, self.expert_mlp, padded_vocab(self), self.experts
        N, K, H, out = self.heads, self.kv_heads, self.size_of_head, 0.02 / (2 * self.layers) ** 0.5
        blocks = {
            "attention_norm": Param((L, D), "LD", "ones"),
            "query": Param((L, D, N, H), "LDNH", role="qkv"),
            "key": Param((L, D, K, H), "LDKH", role="qkv"),
            "value": Param((L, D, K, H), "LDKH", role="qkv"),
            "query_bias": Param((L, N, H), "LNH", "zeros"),
            "key_bias": Param((L, K, H), "LKH", "zeros"),
            "value_bias": Param((L, K, H), "LKH", "zeros"),
            "sinks": Param((L, N), "LN", "zeros"),
            "attention_out": Param((L, N, H, D), "LNHD", std=out, role="attention_out", contract=2),
            "attention_out_bias": Param((L, D), "LD", "zeros"),
            "mlp_norm": Param((L, D), "LD", "ones"),
            "router": Param((L, D, E), "LDR", precision="float32", role="router"),
            "router_bias": Param((L, E), "LR", "zeros", precision="float32"),
            "expert_gate": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_gate_bias": Param((L, E, F), "LEF", "zeros"),
            "expert_up": Param((L, E, D, F), "LEDF", role="ffn_in"),
            "expert_up_bias": Param((L, E, F), "LEF", "zeros"),
            "expert_down": Param((L, E, F, D), "LEFD", std=out, role="ffn_out"),
            "expert_down_bias": Param((L, E, D), "LED", "zeros"),
        }
        return {
            "embed": Param((V, D), "VD", rows=vocab_size(self)),
            "blocks": blocks,
            "final_norm": Param((D,), "D", "ones"),
            "unembed": Param((V, D), "VD", rows=vocab_size(self)),
        }

    def spec(self) -> ModelSpec:
        """Returns local and global layers by turns, each with experts."""
        if self.local_layers < 0 or self.sliding_window < 1:
            raise ConfigError(
                f"{self.local_layers} local layers with a window of {self.sliding_window}",
                "there are none or more, and a token attends to itself at least",
                "--model.local-layers 1 --model.sliding-window 128",
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"{self.experts_per_token} experts per token of {self.experts} experts",
                "a token uses at least one expert, and each at most once",
                f"--model.experts-per-token {min(4, self.experts)}",
            )
        experts = ExpertSpec(self.experts, self.experts_per_token, self.expert_buffer_factor)
        kinds = [LayerSpec("blocks", self._attention(i), experts) for i in range(self.period)]
        layers = tuple(kinds[i % self.period] for i in range(self.layers))
        return ModelSpec(self.width, layers, embedding="unembed", period=self.period)

    def _attention(self, place: int) -> AttentionSpec:
        """Attention of a layer by its place in the period: the last is global."""
        window = self.sliding_window if place < self.local_layers else None
        return AttentionSpec(self.heads, self.kv_heads, self.size_of_head, window, features=frozenset({"sinks"}))

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        table_VD = ctx.gather_params(params["embed"], "embed")
        with jax.named_scope("embedding"):
            return ctx.dropout(embed(ctx.tokens.ids, table_VD), 0)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Pattern]:
        """Returns the layers of a period."""
        if self.rope_scaling is None:
            cos_sin = rope_angles(ctx.tokens.positions, rope_frequencies(self.size_of_head, self.rope_theta, None))
        else:
            cos_sin = yarn_angles(ctx.tokens.positions, self.size_of_head, self.rope_theta, self.rope_scaling)
        experts = _experts(self, ctx)
        kinds = tuple(self._layer(ctx, self._attention(i).window, cos_sin, experts) for i in range(self.period))
        return {"blocks": kinds if len(kinds) > 1 else kinds[0]}

    def _layer(
        self, ctx: ForwardContext, window: int | None, cos_sin: tuple[jax.Array, jax.Array], experts: "_Experts"
    ) -> Layer:
        norm = functools.partial(rms_norm, epsilon=self.norm_epsilon)

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            w = ctx.gather_params(params, "blocks")
            with jax.named_scope("attention"):
                names = ("query", "key", "value")
                products = ctx.column_parallel(linears, norm(x_BTD, w["attention_norm"]), [w[name] for name in names])
                q_BTNH, k_BTKH, v_BTKH = (x + w[f"{name}_bias"] for name, x in zip(names, products, strict=True))
                q_BTNH, k_BTKH = apply_rope(q_BTNH, cos_sin), apply_rope(k_BTKH, cos_sin)
                q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, v_BTKH))
                y_BTD = ctx.attend_row_parallel(
                    attention_projection, q_BTNH, k_BTKH, v_BTKH, w["attention_out"], window=window,
                    scores=Scores(sinks_N=w["sinks"]),
                )  # fmt: skip
                y_BTD = ctx.dropout(y_BTD + w["attention_out_bias"], 2 * index + 1)
                x_BTD = checkpoint_name(x_BTD + y_BTD, ATTN_RESIDUAL)
            with jax.named_scope("experts"):
                y_BTD, aux = experts(sequence_all_gather(norm(x_BTD, w["mlp_norm"]), 1), w)
                return x_BTD + ctx.dropout(sequence_reduce_scatter(y_BTD, 1), 2 * index + 2), aux

        return layer

    def unembed(self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the unembedding [V/stage+tensor, D]."""
        final_D = gather_params(params["final_norm"], "final_norm")
        table_VD = gather_params(params["unembed"], "unembed")
        with jax.named_scope("unembedding"):
            return sequence_all_gather(rms_norm(x_BTD, final_D, self.norm_epsilon), 1), table_VD

    def layer_metrics(self, aux: dict[str, Aux], sequences: int) -> Metrics:
        """Returns the routing metrics of a step, averaged over layers."""
        return routing_metrics(aux["blocks"], self.layers, sequences)

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these, with periods of two layers."""
        every = math.prod(shape.degrees()[axis] for axis in AXES if axis not in ("stage", "context"))
        kv_heads = math.gcd(self.kv_heads, shape.tensor * shape.context)
        heads, local = kv_heads * (self.heads // self.kv_heads), min(1, self.local_layers)
        return dataclasses.replace(
            self, layers=layers * (local + 1), local_layers=local, heads=heads, kv_heads=kv_heads,
            width=math.lcm(every, heads * 8), head_size=8, expert_mlp=every * 2, sliding_window=16,
        )  # fmt: skip

    def features(self) -> set[str]:
        """Returns the features that `runs.composition` lists."""
        return {"dispatch: dropless"}


_Experts = Callable[[jax.Array, dict[str, Any]], tuple[jax.Array, Aux]]
"""`(h, weights of a layer) -> (output of the routed experts [B, T, D], router statistics)`."""


def _experts(c: GptOss, ctx: ForwardContext) -> _Experts:
    function = ExpertFunction(functools.partial(_clamped_hidden, alpha=c.swiglu_alpha, limit=c.swiglu_limit))
    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")

    def experts(h_BTD: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, Aux]:
        with jax.named_scope("router"):
            routes = route(c.routing, h_BTD, weights["router"], None, weights["router_bias"])
            aux = router_losses(c.routing, routes, ctx.sequence.seq)
        aux["aux_loss"] = c.aux_loss_weight * aux["balance"] + c.router_z_loss_weight * aux["router z"]
        routed = {name: weights[f"expert_{name}"] for name in names}
        y_BTD, dropped = dropless_moe(
            c.routing, h_BTD, routes, routed, ctx.grouped_matmul, c.expert_buffer_factor, function=function
        )
        return y_BTD, aux if dropped is None else {**aux, "dropped": dropped}

    return experts


def _clamped_hidden(gate: jax.Array, up: jax.Array, weights: jax.Array, *, alpha: float, limit: float) -> jax.Array:
    """Returns the hidden layer of clamped SwiGLU times the routing weight of each row."""

    @recomputed
    def hidden(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
        gate32 = jnp.minimum(gate.astype(jnp.float32), limit)
        up32 = jnp.clip(up.astype(jnp.float32), -limit, limit)
        return ((up32 + 1) * gate32 * jax.nn.sigmoid(alpha * gate32) * weights).astype(up.dtype)

    return hidden(gate, up, weights)

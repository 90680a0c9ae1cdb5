"""Multi-head and grouped-query attention, with the biases, norms, windows, sinks
and gates that families add to it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import divisors, refuse
from meshwright.models.blocks.layers import Norm, attention_projection, linears
from meshwright.models.blocks.rotary import Rotary, Temperature
from meshwright.models.kernels.attention import Scores
from meshwright.models.model import AttentionSpec, ForwardContext, Kind
from meshwright.models.remat import QKV
from meshwright.sharding.params import Param


@dataclasses.dataclass(frozen=True)
class Attention(Kind):
    """Softmax attention of one kind of layers; `AttentionSpec` explains the first fields."""

    heads: int
    kv_heads: int | None
    """None: each query head has its own."""
    head_size: int
    out_std: float
    """Initial standard deviation of the output projection."""
    rotary: Rotary | None = None
    window: int | None = None
    chunk: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    """Learned norm of queries and keys, before their rotation."""
    norm_after_rotation: bool = False
    """Whether this norm comes after the rotation (Hunyuan)."""
    qk_l2_epsilon: float | None = None
    """Queries and keys are divided by their root mean square after rotation,
    with this constant (Llama 4)."""
    keys_are_values: bool = False
    """Whether values are the products of keys,
    before the norm and the rotation of keys (Gemma 4)."""
    value_norm: Norm | None = None
    """Norm of values without a learned scale (Gemma 4)."""
    query_factor: float | None = None
    temperature: Temperature | None = None
    """Growth of queries with their position, after rotation."""
    softcap: float | None = None
    sinks: bool = False
    """Soft cap and sinks of the scores (kernels/attention.py)."""
    gated: bool = False
    """Whether the sigmoid of a projection as wide
    as the queries multiplies the output (Qwen3-Next)."""

    scope = "attention"

    def __post_init__(self) -> None:
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        groups, over = divmod(self.heads, kv_heads)
        legal = min(divisors(self.heads), key=lambda degree: abs(degree - kv_heads))
        rotated = 0 if self.rotary is None else self.rotary.size
        refuse(
            (
                over != 0,
                f"{kv_heads} key/value heads for {self.heads} query heads",
                f"each key/value head serves as many query heads, and {self.heads} = "
                f"{groups} * {kv_heads} + {over}",
                f"--model.kv-heads {legal}",
            ),
            (
                rotated > self.head_size,
                f"a rotation of {rotated} features of a head",
                f"a head has {self.head_size} features",
                f"--model.head-size {rotated}",
            ),
        )

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, N, H = layers, self.width, self.heads, self.head_size
        keys = (N, "N") if self.kv_heads is None else (self.kv_heads, "K")
        heads = {"query": (N, "N"), "key": keys}
        if not self.keys_are_values:
            heads["value"] = keys
        gate = {"query_gate": (N, "N")} if self.gated else {}
        params = {
            name: Param((L, D, n, H), f"LD{x}H", role="qkv")
            for name, (n, x) in (heads | gate).items()
        }
        params["attention_out"] = Param(
            (L, N, H, D), "LNHD", std=self.out_std, role="attention_out", contract=2
        )
        if self.qkv_bias:
            params |= {
                f"{name}_bias": Param((L, n, H), f"L{x}H", "zeros")
                for name, (n, x) in heads.items()
            }
        if self.out_bias:
            params["attention_out_bias"] = Param((L, D), "LD", "zeros")
        if self.sinks:
            params["sinks"] = Param((L, N), "LN", "zeros")
        if self.qk_norm is not None:
            for name, (n, x) in (("query_norm", heads["query"]), ("key_norm", heads["key"])):
                shape, dims = (
                    ((L, n, H), f"L{x}H") if self.qk_norm.scales_each_head else ((L, H), "LH")
                )
                params |= self.qk_norm.params(name, shape, dims)
        return params

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `LayerSpec`."""
        features = {"softcap": self.softcap is not None, "sinks": self.sinks}
        spec = AttentionSpec(
            self.heads,
            self.kv_heads or self.heads,
            self.head_size,
            self.window,
            normalises_qk=self.qk_norm is not None or self.qk_l2_epsilon is not None,
            gates_output=self.gated,
            normalises_v=self.value_norm is not None and not self.keys_are_values,
            chunk=self.chunk,
            features=frozenset(name for name, needed in features.items() if needed),
        )
        return {"attention": spec}

    def build(self, ctx: ForwardContext) -> Callable[..., Any]:
        """Returns the attention of a step's tokens."""
        names = ["query", "query_gate", "key", "value"]
        if not self.gated:
            names.remove("query_gate")
        if self.keys_are_values:
            names.remove("value")
        cos_sin = ctx.angles(self.rotary) if self.rotary is not None else None
        growth_BT11 = None
        if self.temperature is not None:
            growth_BT11 = self.temperature.factor(ctx.tokens.positions)

        def mix(h_BTD: jax.Array, w: dict[str, Any]) -> jax.Array:
            products = dict(
                zip(
                    names,
                    ctx.column_parallel(linears, h_BTD, [w[name] for name in names]),
                    strict=True,
                )
            )
            if self.qkv_bias:
                products |= {
                    name: products[name] + w[f"{name}_bias"]
                    for name in names
                    if name != "query_gate"
                }
            q_BTNH, k_BTKH = products["query"], products["key"]
            v_BTKH = k_BTKH if self.keys_are_values else products["value"]
            if self.value_norm is not None:
                v_BTKH = self.value_norm.without_scale(v_BTKH)
            if self.qk_norm is not None and not self.norm_after_rotation:
                q_BTNH, k_BTKH = self._normalised(q_BTNH, k_BTKH, w)
            if self.query_factor is not None:
                q_BTNH = self.query_factor * q_BTNH
            if cos_sin is not None:
                q_BTNH, k_BTKH = self._rotated(q_BTNH, cos_sin), self._rotated(k_BTKH, cos_sin)
            if self.qk_norm is not None and self.norm_after_rotation:
                q_BTNH, k_BTKH = self._normalised(q_BTNH, k_BTKH, w)
            if growth_BT11 is not None:
                q_BTNH = (q_BTNH * growth_BT11).astype(q_BTNH.dtype)
            q_BTNH, k_BTKH, v_BTKH = (checkpoint_name(x, QKV) for x in (q_BTNH, k_BTKH, v_BTKH))
            factor = (
                jax.nn.sigmoid(checkpoint_name(products["query_gate"], QKV)) if self.gated else None
            )
            plain = self.softcap is None and self.chunk is None and not self.sinks
            scores = None if plain else Scores(w.get("sinks"), self.softcap, self.chunk)
            qkv = (q_BTNH, k_BTKH, v_BTKH)
            y_BTD = ctx.attend_row_parallel(
                attention_projection, qkv, w["attention_out"], self.window, scores, factor
            )
            return y_BTD + w["attention_out_bias"] if self.out_bias else y_BTD

        return mix

    def _normalised(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, w: dict[str, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys after their learned norm."""
        assert self.qk_norm is not None
        return self.qk_norm(q_BTNH, w["query_norm"]), self.qk_norm(k_BTKH, w["key_norm"])

    def _rotated(self, x_BTNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
        assert self.rotary is not None
        x_BTNH = self.rotary.rotate(x_BTNH, cos_sin)
        if self.qk_l2_epsilon is None:
            return x_BTNH
        return Norm("rms", self.qk_l2_epsilon).without_scale(x_BTNH)

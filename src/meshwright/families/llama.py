"""Llama and its relatives: Llama 1 to 3.x, Mistral, Qwen2, Qwen3 (Touvron et al. 2023, arXiv:2302.13971).

One layer, D wide, N query heads and K key/value heads of size H, feed-forward width F:

    h = enter_tensor(rms_norm(x));  x += leave_tensor(attention(h q, h k, h v) o)
    h = enter_tensor(rms_norm(x));  x += leave_tensor((silu(h gate) * h up) down)
"""

import dataclasses
import functools
from typing import Any, Literal

import jax

from meshwright.blocks.context import Attend
from meshwright.blocks.dropout import Dropout
from meshwright.blocks.embed import embed
from meshwright.blocks.linear import linear
from meshwright.blocks.norm import rms_norm
from meshwright.blocks.rotary import RopeScaling, angles, frequencies, rotate
from meshwright.collectives import enter_tensor, leave_tensor
from meshwright.config import Model
from meshwright.families.family import Family, OverLayers, Text, head_size, padded_vocab, vocab_of
from meshwright.memory import PROJECTION, save_as
from meshwright.params import Param, Tree, Use


@dataclasses.dataclass(frozen=True)
class Llama(Model):
    """Configuration of the family."""

    kv_heads: int = 4
    """Key/value heads K; fewer than `heads` is grouped-query attention (Ainslie et al. 2023)."""
    head_size: int | None = None
    """Head size H; None is width / heads."""
    mlp: int = 384
    """Feed-forward width F."""
    theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretch of the low frequencies (Llama 3.1 and later)."""
    norm_epsilon: float = 1e-5
    """Added to the mean square."""
    window: int | None = None
    """Positions a token sees, itself included (Mistral's sliding window); None sees all before it."""
    qkv_bias: Literal["none", "learned"] = "none"
    """Bias of query, key and value projections (Qwen2)."""
    query_key_norm: Literal["none", "rms"] = "none"
    """Normalisation of each query and key head (Qwen3)."""
    embedding: Literal["untied", "tied"] = "untied"
    """Tied uses the embedding as the unembedding."""

    @property
    def head(self) -> int:
        return head_size(self) if self.head_size is None else self.head_size


def params(c: Llama) -> Tree:
    """Descriptions of all parameters; `blocks` are stacked over layers."""
    L, D, F, N, K, H, V = c.layers, c.width, c.mlp, c.heads, c.kv_heads, c.head, padded_vocab(c)
    out = 0.02 / (2 * L) ** 0.5
    blocks = {
        "attention_norm": Param((L, D), "LD", "ones"),
        "query": Param((L, D, N, H), "LDNH"),
        "key": Param((L, D, K, H), "LDKH"),
        "value": Param((L, D, K, H), "LDKH"),
        "attention_out": Param((L, N, H, D), "LNHD", std=out),
        "mlp_norm": Param((L, D), "LD", "ones"),
        "gate": Param((L, D, F), "LDF"),
        "up": Param((L, D, F), "LDF"),
        "down": Param((L, F, D), "LFD", std=out),
    }
    if c.qkv_bias == "learned":
        blocks["query_bias"] = Param((L, N, H), "LNH", "zeros")
        blocks["key_bias"] = Param((L, K, H), "LKH", "zeros")
        blocks["value_bias"] = Param((L, K, H), "LKH", "zeros")
    if c.query_key_norm == "rms":
        blocks["query_norm"] = Param((L, H), "LH", "ones")
        blocks["key_norm"] = Param((L, H), "LH", "ones")
    tree: Tree = {
        "embed": Param((V, D), "VD", rows=vocab_of(c)),
        "blocks": blocks,
        "final_norm": Param((D,), "D", "ones"),
    }
    if c.embedding == "untied":
        tree["unembed"] = Param((V, D), "VD", rows=vocab_of(c))
    return tree


def forward(
    c: Llama, held: Tree, text: Text, use: Use, drop: Dropout, attend: Attend, over_layers: OverLayers
) -> tuple[jax.Array, jax.Array]:
    """Hidden states [B, T, D] and the unembedding [V/tensor, D]."""
    cos_sin = angles(text.positions, frequencies(c.head, c.theta, c.rope_scaling))
    table_VD = use(held["embed"], "embed")
    with jax.named_scope("embedding"):
        x_BTD = drop(embed(text.tokens, table_VD), 0)

    def block(x_BTD: jax.Array, held: Tree, layer: jax.Array) -> jax.Array:
        w = use(held, "blocks")
        with jax.named_scope("attention"):
            h_BTD = enter_tensor(rms_norm(x_BTD, w["attention_norm"], c.norm_epsilon), 1)
            attended_BTNH = _attend(c, h_BTD, w, attend, cos_sin)
            y_BTD = leave_tensor(linear(attended_BTNH, w["attention_out"], contract=2), 1)
            x_BTD = x_BTD + drop(y_BTD, 2 * layer + 1)
        with jax.named_scope("feed-forward"):
            h_BTD = enter_tensor(rms_norm(x_BTD, w["mlp_norm"], c.norm_epsilon), 1)
            gate_BTF = save_as(linear(h_BTD, w["gate"]), PROJECTION)
            up_BTF = save_as(linear(h_BTD, w["up"]), PROJECTION)
            y_BTD = leave_tensor(linear(jax.nn.silu(gate_BTF) * up_BTF, w["down"]), 1)
            return x_BTD + drop(y_BTD, 2 * layer + 2)

    x_BTD = over_layers(block, x_BTD, held["blocks"], layers=c.layers)
    final_D = use(held["final_norm"], "final_norm")
    with jax.named_scope("unembedding"):
        x_BTD = enter_tensor(rms_norm(x_BTD, final_D, c.norm_epsilon), 1)
    return x_BTD, table_VD if c.embedding == "tied" else use(held["unembed"], "unembed")


def _attend(
    c: Llama, h_BTD: jax.Array, w: dict[str, Any], attend: Attend, cos_sin: tuple[jax.Array, jax.Array]
) -> jax.Array:
    q_BTNH, k_BTKH, v_BTKH = (linear(h_BTD, w[name]) for name in ("query", "key", "value"))
    if c.qkv_bias == "learned":
        q_BTNH, k_BTKH, v_BTKH = q_BTNH + w["query_bias"], k_BTKH + w["key_bias"], v_BTKH + w["value_bias"]
    if c.query_key_norm == "rms":
        norm = functools.partial(rms_norm, epsilon=c.norm_epsilon)
        q_BTNH, k_BTKH = norm(q_BTNH, w["query_norm"]), norm(k_BTKH, w["key_norm"])
    q_BTNH, k_BTKH = rotate(q_BTNH, cos_sin), rotate(k_BTKH, cos_sin)
    q_BTNH, k_BTKH, v_BTKH = (save_as(x, PROJECTION) for x in (q_BTNH, k_BTKH, v_BTKH))
    return save_as(attend(q_BTNH, k_BTKH, v_BTKH, window=c.window), PROJECTION)


def flops(c: Llama, seq: int) -> dict[str, float]:
    """FLOPs of one token's forward pass by item (scaling-book, transformers.md: 2 per multiply-add).

    Attention counts the positions a causal token sees on average, within the window if there is one.
    """
    D, F, N, K, H = c.width, c.mlp, c.heads, c.kv_heads, c.head
    window = min(c.window or seq, seq)
    seen = (window * (window + 1) / 2 + (seq - window) * window) / seq
    return {
        "attention projections": c.layers * 2.0 * D * H * (2 * N + 2 * K),
        "attention": c.layers * 4.0 * seen * N * H,
        "feed-forward": c.layers * 6.0 * D * F,
        "unembedding": 2.0 * D * vocab_of(c),
    }


FAMILY = Family(Llama, params, forward, flops, longest=lambda c: None)

"""Sparse indexer (lightning indexer: DeepSeek-V3.2-Exp, section 2.1): a light scorer chooses
the keys of each query.

With the normalised input h, the latent of queries c_q and few heads of its own:

    q = c_q index_query
    k = layer_norm(h index_key), one key for all heads
    weights = h index_weights
    I[t, s] = sum over heads of weights[t] * relu(rope(q)[t] . rope(k)[s])

Attention sees the `top_k` keys with the highest I. Every device of `tensor` has the complete
indexer, so that all choose the same keys. The choice has no derivative, and h and c_q are detached:
the loss of the text trains none of these parameters. They are frozen, or have a loss of their own
(equations 3 and 4). With p[t] the attention weights of query t, added over the main heads and
divided by their sum, and S[t] the keys that it attends to:

    loss = mean over t of sum over s in S[t] of p[t, s] (log p[t, s] - log softmax(I[t, S[t]])[s])
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshwright.comm.collectives import (
    all_reduce,
    local_shard,
    sequence_all_gather,
    sequence_reduce_scatter,
)
from meshwright.errors import refuse
from meshwright.models.blocks.layers import Norm, linear
from meshwright.models.blocks.rotary import Rotary
from meshwright.models.kernels.attention import Index, sequence_positions, visible_keys
from meshwright.models.layer_facts import IndexerSpec, IndexTraining
from meshwright.models.model import Aux, Metrics, Tokens
from meshwright.sharding.params import Param, Tree

_NORM = Norm("layer", 1e-6, bias=True)
"""Norm of the keys; its constant is that of the released code, whatever that
of the other norms is."""


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Chooses the keys that each query of a layer attends to."""

    width: int
    """Model width D."""
    query_rank: int
    """Width of the latent of queries, which its own queries are projections of;
    0 where there is no such latent."""
    heads: int
    head_size: int
    top_k: int
    """Keys that a query attends to."""
    rotary: Rotary
    """Rotation of the first features of its queries and keys."""
    training: IndexTraining = "frozen"

    def __post_init__(self) -> None:
        rotated = self.rotary.size
        refuse(
            (
                self.query_rank == 0,
                "an indexer without a latent of queries (q_lora_rank)",
                "its queries are projections of that latent",
                "--model.q-lora-rank 96",
            ),
            (
                self.head_size < rotated,
                f"--model.index-head-dim {self.head_size}",
                f"{rotated} features of a head of the indexer rotate (qk_rope_head_dim)",
                f"--model.index-head-dim {rotated}",
            ),
        )

    @property
    def spec(self) -> IndexerSpec:
        """Its sizes, for FLOPs, the planner and the cache."""
        queries = self.query_rank * self.heads * self.head_size
        weights = queries + self.width * (self.head_size + self.heads)
        return IndexerSpec(self.heads, self.head_size, self.top_k, weights, self.training)

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, Z, N, H = layers, self.width, self.query_rank, self.heads, self.head_size
        params = {
            "index_query": Param((L, Z, N, H), "LZIH"),
            "index_key": Param((L, D, H), "LDH"),
            **_NORM.params("index_key_norm", (L, H), "LH"),
            # The released models keep this one in float32.
            "index_weights": Param((L, D, N), "LDI", precision="float32"),
        }
        frozen = self.training == "frozen"
        return {name: dataclasses.replace(p, frozen=frozen) for name, p in params.items()}

    def index(
        self, h_BTD: jax.Array, q_BTIH: jax.Array, w: Tree, cos_sin: tuple[jax.Array, jax.Array]
    ) -> Index:
        """Returns what the keys of a step's queries are chosen by.

        h_BTD: normalised input of the layer, this device's positions.
        q_BTIH: the indexer's queries, all positions.
        cos_sin: angles of its rotary.
        """
        h_BTD = jax.lax.stop_gradient(h_BTD)
        key_BTH = linear(h_BTD, w["index_key"])
        key_BTH = _NORM(key_BTH, w["index_key_norm"], w["index_key_norm_bias"])
        weights_BTI = linear(h_BTD.astype(jnp.float32), w["index_weights"])
        key_BTH = sequence_all_gather(key_BTH, 1)
        weights_BTI = sequence_all_gather(weights_BTI, 1)
        q_BTIH = self.rotary.rotate(q_BTIH, cos_sin)
        key_BTH = self.rotary.rotate(key_BTH[:, :, None], cos_sin)[:, :, 0]
        return Index(q_BTIH, key_BTH, weights_BTI, self.top_k)

    def loss(self, index: Index, q_BTNH: jax.Array, k_BSNH: jax.Array, tokens: Tokens) -> Aux:
        """Returns the loss of the indexer, summed over sequences, the mean over the text of each.

        q_BTNH, k_BSNH: queries and keys of this device's main heads, all positions. Each device of
        `tensor` compares the queries of its own positions, so the gradients of the indexer are
        partial over `tensor`.
        """
        assert tokens.segments is not None and tokens.padding is not None
        positions = sequence_positions(tokens.segments)
        seen_BTS = visible_keys(positions, positions, None)
        if self.training == "sparse":
            detached = jax.lax.stop_gradient(index)
            seen_BTS = index.chosen(detached.scores(detached.k_BSH), seen_BTS)
        target_BTS = _summed_attention(q_BTNH, k_BSNH, seen_BTS)
        seen_BTS = local_shard(seen_BTS, ("tensor",), 1)
        local = dataclasses.replace(
            index,
            q_BTIH=local_shard(index.q_BTIH, ("tensor",), 1),
            weights_BTI=local_shard(index.weights_BTI, ("tensor",), 1),
        )
        scores_BTS = jnp.where(seen_BTS, local.scores(local.k_BSH), -1e30)
        log_ratio_BTS = jnp.log(jnp.maximum(target_BTS, 1e-30)) - jax.nn.log_softmax(scores_BTS)
        divergence_BT = jnp.where(seen_BTS, target_BTS * log_ratio_BTS, 0.0).sum(-1)
        text_BT = ~tokens.padding
        weights_BT = text_BT / jnp.maximum(text_BT.sum(1, keepdims=True), 1)
        local_weights_BT = local_shard(weights_BT, ("tensor",), 1)
        divergence = all_reduce((divergence_BT * local_weights_BT).sum(), ("tensor",))
        return {"aux_loss": divergence, "index divergence": jax.lax.stop_gradient(divergence)}


def divergence_metric(aux: dict[str, Aux], sequences: int) -> Metrics:
    """Returns the metric of the indexers' losses, the mean over layers;
    {} where none is trained."""
    found = [part["index divergence"] for part in aux.values() if "index divergence" in part]
    if not found:
        return {}
    total_L = jnp.concatenate(found)
    return {"index divergence": (total_L.sum() / sequences, jnp.float32(len(total_L)))}


def _summed_attention(q_BTNH: jax.Array, k_BSNH: jax.Array, seen_BTS: jax.Array) -> jax.Array:
    """Returns the attention weights added over all main heads and divided by their sum,
    [B, T/tensor, S], detached."""
    q_BTNH = jax.lax.stop_gradient(q_BTNH) * q_BTNH.shape[-1] ** -0.5
    scores_BNTS = jnp.einsum(
        "btnh,bsnh->bnts",
        q_BTNH,
        jax.lax.stop_gradient(k_BSNH),
        preferred_element_type=jnp.float32,
    )
    scores_BNTS = jnp.where(seen_BTS[:, None], scores_BNTS, -1e30)
    summed_BTS = sequence_reduce_scatter(jax.nn.softmax(scores_BNTS).sum(1), 1)
    return summed_BTS / summed_BTS.sum(-1, keepdims=True)

"""minGRU: a language model without attention (Feng et al. 2024, "Were RNNs all we needed?", arXiv:2410.01201).

One layer, model width D, recurrent width F:

    h = sequence_all_gather(rms_norm(x));  z = sigmoid(h gate)
    s_t = (1 - z_t) s_{t-1} + z_t (h candidate)_t;  x += sequence_reduce_scatter(s out)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import all_gather, sequence_all_gather, sequence_reduce_scatter
from meshwright.config import MeshShape, Optimizer, Training
from meshwright.models.blocks.layers import embed, linear, rms_norm
from meshwright.models.model import (
    Aux,
    ForwardContext,
    Layer,
    LayerSpec,
    Model,
    ModelSpec,
    padded_vocab,
    vocab_size,
)
from meshwright.models.remat import FFN_HIDDEN
from meshwright.runs.run import Run
from meshwright.sharding.params import GatherParams, Param, Tree


@dataclasses.dataclass(frozen=True)
class MinGru(Model):
    """Configuration of a stack of minimal gated recurrent units."""

    width: int = 64
    """Model width D."""
    depth: int = 2
    """Layers L."""
    recurrent: int = 128
    """Recurrent width F: channels of the state, split over `tensor`."""

    def params(self) -> Tree:
        """Returns the parameter descriptions; `layers` are stacked, the unembedding is the embedding."""
        L, D, F, V = self.depth, self.width, self.recurrent, padded_vocab(self)
        layers = {
            "norm": Param((L, D), "LD", "ones"),
            "gate": Param((L, D, F), "LDF", role="ffn_in"),
            "candidate": Param((L, D, F), "LDF", role="ffn_in"),
            "out": Param((L, F, D), "LFD", std=0.02 / (2 * L) ** 0.5, role="ffn_out"),
        }
        embedding = Param((V, D), "VD", rows=vocab_size(self))
        return {"embed": embedding, "layers": layers, "final_norm": Param((D,), "D", "ones")}

    def spec(self) -> ModelSpec:
        """Returns `depth` layers without attention."""
        return ModelSpec(self.width, (LayerSpec("layers"),) * self.depth)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        table_VD = ctx.gather_params(params["embed"], "embed")
        return ctx.dropout(embed(ctx.tokens.ids, table_VD, ctx.sum_rows), 0)

    def layer_functions(self, ctx: ForwardContext) -> dict[str, Layer]:
        """Returns the recurrent layer."""
        starts_BT = _whole_sequence(ctx.tokens.positions, ctx) == 0

        def layer(x_BTD: jax.Array, params: Tree, index: jax.Array) -> tuple[jax.Array, Aux]:
            w = ctx.gather_params(params, "layers")
            h_BTD = sequence_all_gather(rms_norm(x_BTD, w["norm"], 1e-5), 1)
            gate_BTF = checkpoint_name(linear(h_BTD, w["gate"]), FFN_HIDDEN)
            candidate_BTF = checkpoint_name(linear(h_BTD, w["candidate"]), FFN_HIDDEN)
            gate_BTF, candidate_BTF = (_whole_sequence(x, ctx) for x in (gate_BTF, candidate_BTF))
            state_BTF = _recurrence(jax.nn.sigmoid(gate_BTF), candidate_BTF, starts_BT)
            if ctx.sequence.shards > 1:
                state_BTF = state_BTF[:, ctx.sequence.local_positions()]
            y_BTD = sequence_reduce_scatter(linear(state_BTF, w["out"]), 1)
            return x_BTD + ctx.dropout(y_BTD, index + 1), {}

        return {"layers": layer}

    def unembed(
        self, params: Tree, x_BTD: jax.Array, gather_params: GatherParams
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the normalised hidden states [B, T, D] and the embedding table [V/stage+tensor, D]."""
        scale_D = gather_params(params["final_norm"], "final_norm")
        return sequence_all_gather(rms_norm(x_BTD, scale_D, 1e-5), 1), gather_params(
            params["embed"], "embed"
        )

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns the least sizes that `shape` divides as it divides these."""
        every = shape.data * shape.fsdp * shape.expert * shape.tensor
        return dataclasses.replace(self, depth=layers, width=8 * every, recurrent=8 * every)


def _whole_sequence(x: jax.Array, ctx: ForwardContext) -> jax.Array:
    """Gathers [B, T/context, ...] over `context` into [B, T, ...], in the order of the sequence."""
    if ctx.sequence.shards == 1:
        return x
    return all_gather(x, ("context",), 1)[:, np.argsort(ctx.sequence.position_order())]


def _recurrence(z_BTF: jax.Array, candidate_BTF: jax.Array, starts_BT: jax.Array) -> jax.Array:
    """Computes s_t = (1 - z_t) s_{t-1} + z_t candidate_t in O(log T) steps; the state is zero before each document."""
    keep_BTF = jnp.where(starts_BT[..., None], 0.0, 1.0 - z_BTF.astype(jnp.float32))

    def compose(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], then[0] * first[1] + then[1]

    state_BTF = jax.lax.associative_scan(
        compose, (keep_BTF, (z_BTF * candidate_BTF).astype(jnp.float32)), axis=1
    )[1]
    return state_BTF.astype(candidate_BTF.dtype)


def min_gru() -> Run:
    """minGRU of 0.4 M parameters on the source of Python's standard library."""
    model = MinGru(width=128, depth=4, recurrent=256)
    return Run(
        model, training=Training(steps=300), optimizer=Optimizer(learning_rate=2e-3), name="min-gru"
    )

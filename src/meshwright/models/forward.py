"""Forward pass of a run's model on one device: its part of the batch, its gathered weights, the scan over its layers.

The parts are those that a pipeline holds apart: the embedding, the layers of a virtual stage, the loss. Without a
pipeline they follow each other in `loss_fn`.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.comm.collectives import axis_index, broadcast
from meshwright.config import Training
from meshwright.data.batch import PADDING, Batch
from meshwright.models.blocks.context import build_attend, with_own_kv_head
from meshwright.models.blocks.layers import Dropout
from meshwright.models.execution import Execution
from meshwright.models.further_loss import further_loss
from meshwright.models.gather_ahead import run_layers_ahead
from meshwright.models.layer_scan import join, scan_layers, sections
from meshwright.models.loss import chunk_tokens, token_losses
from meshwright.models.model import (
    Attend,
    Aux,
    ForwardContext,
    Layer,
    Metrics,
    Model,
    Tokens,
    vocab_size,
)
from meshwright.models.padding_rows import read_inside, with_padding
from meshwright.models.period_scan import ReadRow
from meshwright.sharding.params import Tree
from meshwright.sharding.stages import NO_LAYER, StageAssignment


@dataclasses.dataclass(frozen=True)
class LocalModel:
    """The model on one device, inside the step's `shard_map`.

    `params` is always the tree of all sharded parameters. `batch` holds complete sequences; each device takes its own
    positions of them.
    """

    model: Model
    training: Training
    stages: StageAssignment
    """Layers of each pipeline stage."""
    execution: Execution

    @functools.cached_property
    def stacks(self) -> dict[str, int]:
        """Layers of each stack, in order."""
        return self.model.spec().stacks

    def context(self, batch: Batch, dropout: Dropout) -> ForwardContext:
        """Returns the inputs that every layer needs besides its parameters."""
        count = math.gcd(self.execution.exchange_pieces, batch.segments.shape[0])
        if count == 1:
            return self._context(batch, dropout)
        pieces = [jax.tree.map(lambda x, i=i: jnp.split(x, count)[i], batch) for i in range(count)]
        parts = tuple(
            self._context(piece, part)
            for piece, part in zip(pieces, dropout.split(count), strict=True)
        )
        return dataclasses.replace(self._context(batch, dropout), batch_pieces=parts)

    def _context(self, batch: Batch, dropout: Dropout) -> ForwardContext:
        """Returns the inputs of all sequences of `batch` together."""

        def attend(segments_BT: jax.Array) -> Attend:
            built = build_attend(self.execution.sequence, segments_BT, self.execution.kernels)
            fewer = (self.model.spec().kv_heads or math.inf) < jax.lax.axis_size("tensor")
            return with_own_kv_head(built) if fewer else built

        local = self.local_positions(batch)
        count = math.gcd(self.execution.attention_pieces, batch.segments.shape[0])
        pieces: tuple[Attend, ...] = ()
        if count > 1:
            pieces = tuple(map(attend, jnp.split(batch.segments, count)))
        return ForwardContext.of(
            self.execution,
            tokens=Tokens(local.inputs, local.positions, local.segments == PADDING),
            dropout=dropout,
            attend=attend(batch.segments),
            attend_pieces=pieces,
        )

    def local_positions(self, batch: Batch) -> Batch:
        """This device's positions of every sequence."""
        if self.execution.sequence.shards == 1:
            return batch
        positions_T = self.execution.sequence.local_positions()
        return jax.tree.map(lambda field: field[:, positions_T], batch)

    def layers(
        self,
        params: dict[str, Tree] | ReadRow,
        x_BTD: jax.Array,
        ctx: ForwardContext,
        virtual_stage: Any = 0,
    ) -> tuple[jax.Array, dict[str, Aux]]:
        """Runs the layers of one virtual stage; returns the hidden states and each stack's aux, [rows, ...].

        params: of that virtual stage, by stack, or what reads their rows.
        """
        spec, functions, outputs = (
            self.model.spec(),
            self.model.layer_functions(ctx),
            list[dict[str, Aux]](),
        )
        # Layer in each row: [stages, virtual stages, rows].
        rows = {stack: self.stages.rows(spec.layers_of(stack)) for stack in spec.stacks}
        index: dict[str, Any] = {stack: layers[0, 0] for stack, layers in rows.items()}
        if self.stages.stages * self.stages.virtual_stages > 1:
            index = {
                s: jnp.asarray(layers)[axis_index(("stage",)), virtual_stage]
                for s, layers in rows.items()
            }

        def wrap(stack: str, layer: Layer) -> Layer:
            if callable(params):
                layer = read_inside(layer)
            if (rows[stack] == NO_LAYER).any():
                layer = with_padding(layer, stack, self.execution.permutes)
            return layer

        for section in sections(spec, functions, wrap):
            saved = min(max(self.training.saved_layers - section.first, 0), section.layers)
            parts = [
                (slice(0, saved), "projections"),
                (slice(saved, section.layers), self.training.remat),
            ]
            for part, remat in parts:
                if part.start == part.stop:
                    continue
                stack, own = section.stacks[0], section.rows(spec, part)
                if stack in self.execution.gathered_ahead and not callable(params):
                    p, i = (
                        jax.tree.map(operator.itemgetter(own[stack]), tree[stack])
                        for tree in (params, index)
                    )
                    x_BTD, aux = run_layers_ahead(self, stack, x_BTD, ctx, p, i, remat)
                else:
                    # A part may start in the middle of a period.
                    at, unroll = part.start % len(section.period), self.training.unroll
                    period = section.period[at:] + section.period[:at]
                    x_BTD, aux = scan_layers(
                        period,
                        x_BTD,
                        params,
                        index,
                        rows=own,
                        remat=remat,
                        unroll=unroll,
                        saves_weights=self.execution.saves_weights,
                    )
                outputs.append(aux)
        return x_BTD, join(outputs)

    def loss(
        self, params: Tree, x_BTD: jax.Array, batch: Batch, total: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Returns this device's share of the loss, and its metrics.

        The sum over the token axes is the mean over `total` weights.
        """
        batch, z_loss = self.local_positions(batch), self.training.z_loss
        nll_T, lse_T = self.score_targets(params, x_BTD, batch)
        weights_T = batch.weights.reshape(-1)
        nll, weight = (nll_T * weights_T).sum(), weights_T.sum()
        loss, metrics = nll / total, {"loss": (nll, weight)}
        if z_loss:
            squared = (lse_T * lse_T * weights_T).sum()
            loss += z_loss * squared / total
            metrics["squared lse"] = (squared, weight)
        return loss, metrics

    def unembed(self, params: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the final hidden states [B, T/context, D] on every stage, and the unembedding [V/stage+tensor, D]."""
        x_BTD = broadcast(x_BTD, ("stage",), self.stages.last_stage)
        return self.model.unembed(params, x_BTD, self.execution.gather_params)

    def score_targets(
        self, params: Tree, x_BTD: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns negative log-likelihood and log-sum-exp, both [B T/context]. batch: this device's positions."""
        x_BTD, table_VD = self.unembed(params, x_BTD)
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        chunk = chunk_tokens(x_TD.shape[0], table_VD.shape[0], self.training.logits_mib)
        with jax.named_scope("unembedding"):
            vocab, softcap = vocab_size(self.model), self.model.spec().logit_softcap
            return token_losses(x_TD, table_VD, batch.targets.reshape(-1), vocab, chunk, softcap)

    def weight(self, batch: Batch) -> jax.Array:
        """Returns the weight of this device's sequences in the mean loss: their tokens, or their preferences."""
        return (
            batch.weights
            if self.execution.preferences is None
            else self.execution.preferences.pairs(batch)
        ).sum()

    def hidden(
        self, params: Tree, batch: Batch, dropout: Dropout
    ) -> tuple[jax.Array, dict[str, Aux]]:
        """Returns the hidden states after the last layer and each stack's aux, for a model on one pipeline stage."""
        ctx = self.context(batch, dropout)
        return self.layers(
            {stack: params[stack] for stack in self.stacks}, self.model.embed(params, ctx), ctx
        )

    def loss_fn(
        self, params: Tree, batch: Batch, dropout: Dropout, total: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, dict[str, Aux]]]:
        """Returns `(loss, (metrics, aux))` of this device's shard, for a model on one pipeline stage."""
        x_BTD, aux = self.hidden(params, batch, dropout)
        if self.execution.preferences is not None:
            loss, metrics = self.execution.preferences.loss(self, params, x_BTD, batch, total)
        else:
            loss, metrics = self.loss(params, x_BTD, batch, total)
            if self.model.spec().further:
                more, more_metrics, more_aux = further_loss(
                    self, params, x_BTD, batch, dropout, total
                )
                loss, metrics, aux = loss + more, metrics | more_metrics, aux | more_aux
        return loss + self.aux_loss(aux), (metrics, aux)

    def aux_loss(self, aux: dict[str, Aux]) -> jax.Array | float:
        """Returns the auxiliary losses of all layers, averaged over the sequences of the global batch."""
        total = sum((a["aux_loss"].sum() for a in aux.values() if "aux_loss" in a), start=0.0)
        return (1.0 / self.training.batch) * total

"""Forward pass of a run's model on one device: its part
of the batch, its gathered weights, the scan over its layers.

The parts are those that a pipeline holds apart: the embedding, the layers of a virtual stage, the
loss. Without a pipeline they follow each other in `loss_fn`.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import axis_index, broadcast
from meshwright.config import Training
from meshwright.data.batch import PADDING, Batch
from meshwright.models.blocks.context import build_attend, with_own_kv_head
from meshwright.models.blocks.layers import Dropout
from meshwright.models.execution import Execution
from meshwright.models.further_loss import further_loss
from meshwright.models.gather_ahead import run_layers_ahead
from meshwright.models.layer_health import with_health
from meshwright.models.layer_scan import Section, join, scan_layers, sections
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
from meshwright.models.recording import EMBEDDING, FINAL_NORM, LOG_SUM_EXP, TOKEN_LOSS, Tap
from meshwright.sharding.layouts import VOCAB_AXES
from meshwright.sharding.params import Tree
from meshwright.sharding.stages import NO_LAYER, StageAssignment


@dataclasses.dataclass(frozen=True)
class LocalModel:
    """The model on one device, inside the step's `shard_map`.

    `params` is always the tree of all sharded parameters. `batch` holds complete sequences; each
    device takes its own positions of them.
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
        dropouts = dropout.split(count)
        contexts = tuple(map(self._context, pieces, dropouts))
        return dataclasses.replace(self._context(batch, dropout), batch_pieces=contexts)

    def _context(self, batch: Batch, dropout: Dropout) -> ForwardContext:
        """Returns the inputs of all sequences of `batch` together."""
        local = self.local_positions(batch)
        count = math.gcd(self.execution.attention_pieces, batch.segments.shape[0])
        pieces: tuple[Attend, ...] = ()
        observed: list[jax.Array] = []
        if count > 1:
            parts = jnp.split(batch.segments, count)
            pieces = tuple(self._attend(part, observed) for part in parts)
        return ForwardContext.of(
            self.execution,
            tokens=Tokens(local.inputs, local.positions, local.segments == PADDING, local.segments),
            dropout=dropout,
            attend=self._attend(batch.segments, observed),
            attend_pieces=pieces,
            observed=observed,
            tap=self._tap(dropout),
        )

    def _tap(self, dropout: Dropout) -> Tap | None:
        """Returns what records the tensors of a microbatch's tokens."""
        tap = self.execution.tap
        return None if tap is None else tap.of_tokens(dropout)

    def _attend(self, segments_BT: jax.Array, observed: list[jax.Array]) -> Attend:
        """Returns attention to earlier positions of the same document.
        segments_BT: of complete sequences."""
        attend = build_attend(
            self.execution.sequence, segments_BT, self.execution.kernels, observed
        )
        kv_heads = self.model.spec().kv_heads
        # With fewer key/value heads than devices of `tensor`, each device has a copy
        # of the one that it needs.
        if kv_heads and kv_heads < jax.lax.axis_size("tensor"):
            return with_own_kv_head(attend)
        return attend

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
        """Runs the layers of one virtual stage;
        returns the hidden states and each stack's aux, [rows, ...].

        params: of that virtual stage, by stack, or what reads their rows.
        """
        spec = self.model.spec()
        # Layer in each row: [stages, virtual stages, rows].
        rows = {stack: self.stages.rows(spec.layers_of(stack)) for stack in spec.stacks}
        index = {stack: self._local_rows(layers, virtual_stage) for stack, layers in rows.items()}

        def without_padding(stack: str, layer: Layer) -> Layer:
            if self.training.health:
                layer = with_health(layer, ctx)
            if callable(params):
                layer = read_inside(layer)
            if (rows[stack] == NO_LAYER).any():
                layer = with_padding(layer, stack, self.execution.permutes)
            return layer

        outputs: list[dict[str, Aux]] = []
        for section in sections(spec, self.model.layer_functions(ctx), without_padding):
            for layers, remat in self._remat_parts(section):
                part_rows = section.rows(spec, layers)
                stack = section.stacks[0]
                if stack in self.execution.gathered_ahead and not callable(params):
                    take = functools.partial(jax.tree.map, operator.itemgetter(part_rows[stack]))
                    x_BTD, aux = run_layers_ahead(
                        self, stack, x_BTD, ctx, take(params[stack]), take(index[stack]), remat
                    )
                else:
                    # A part may start in the middle of a period.
                    first = layers.start % len(section.period)
                    x_BTD, aux = scan_layers(
                        section.period[first:] + section.period[:first],
                        x_BTD,
                        params,
                        index,
                        rows=part_rows,
                        remat=remat,
                        unroll=self.training.unroll,
                        saves_weights=self.execution.saves_weights,
                    )
                outputs.append(aux)
        return x_BTD, join(outputs)

    def _local_rows(self, layers: np.ndarray, virtual_stage: Any) -> Any:
        """Returns the layer in each row of this device's stage. layers:
        [stages, virtual stages, rows]."""
        if self.stages.stages * self.stages.virtual_stages == 1:
            return layers[0, 0]
        return jnp.asarray(layers)[axis_index(("stage",)), virtual_stage]

    def _remat_parts(self, section: Section) -> list[tuple[slice, str]]:
        """Returns the parts of a section that have layers, each
        with its remat policy: the first layers save more."""
        saved = min(max(self.training.saved_layers - section.first, 0), section.layers)
        parts: list[tuple[slice, str]] = []
        if saved > 0:
            parts.append((slice(0, saved), "projections"))
        if saved < section.layers:
            parts.append((slice(saved, section.layers), self.training.remat))
        return parts

    def recorded(self, dropout: Dropout) -> "LocalModel":
        """Returns the model whose loss records its tensors as those of a microbatch,
        where tensors are recorded."""
        if self.execution.tap is None:
            return self
        execution = dataclasses.replace(self.execution, tap=self._tap(dropout))
        return dataclasses.replace(self, execution=execution)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the embedded tokens [B, T/tensor, D], on the first stage."""
        x_BTD = self.model.embed(params, ctx)
        if ctx.tap is None:
            return x_BTD
        return ctx.tap.where(axis_index(("stage",)) == 0)(EMBEDDING, x_BTD)

    def loss(
        self, params: Tree, x_BTD: jax.Array, batch: Batch, total: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Returns this device's share of the loss, and its metrics.

        The sum over the token axes is the mean over `total` weights.
        """
        batch = self.local_positions(batch)
        z_loss = self.training.z_loss
        nll_T, lse_T = self.score_targets(params, x_BTD, batch)
        weights_T = batch.weights.reshape(-1)
        nll = (nll_T * weights_T).sum()
        weight = weights_T.sum()
        loss = nll / total
        metrics = {"loss": (nll, weight)}
        if z_loss:
            squared = (lse_T * lse_T * weights_T).sum()
            loss += z_loss * squared / total
            metrics["squared lse"] = (squared, weight)
        return loss, metrics

    def unembed(self, params: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the final hidden states [B, T/context, D] on every stage,
        and the unembedding [V/stage+tensor, D]."""
        x_BTD = broadcast(x_BTD, ("stage",), self.stages.last_stage)
        return self.model.unembed(params, x_BTD, self.execution.gather_params)

    def score_targets(
        self, params: Tree, x_BTD: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns negative log-likelihood and log-sum-exp, both [B T/context].
        batch: this device's positions."""
        x_BTD, table_VD = self.unembed(params, x_BTD)
        tap = self.execution.tap
        if tap is not None:
            x_BTD = tap(FINAL_NORM, x_BTD, partial=VOCAB_AXES)
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        chunk = chunk_tokens(x_TD.shape[0], table_VD.shape[0], self.training.logits_mib)
        with jax.named_scope("unembedding"):
            nll_T, lse_T = token_losses(
                x_TD,
                table_VD,
                batch.targets.reshape(-1),
                vocab_size(self.model),
                chunk,
                self.model.spec().logit_softcap,
            )
        if tap is not None:
            lse_T = tap(LOG_SUM_EXP, lse_T.reshape(batch.targets.shape)).reshape(-1)
            nll_T = tap(TOKEN_LOSS, nll_T.reshape(batch.targets.shape)).reshape(-1)
        return nll_T, lse_T

    def weight(self, batch: Batch) -> jax.Array:
        """Returns the weight of this device's sequences in the mean loss: their tokens,
        or their preferences."""
        if self.execution.preferences is not None:
            return self.execution.preferences.pairs(batch).sum()
        return batch.weights.sum()

    def hidden(
        self, params: Tree, batch: Batch, dropout: Dropout
    ) -> tuple[jax.Array, dict[str, Aux]]:
        """Returns the hidden states after the last layer and each stack's aux,
        for a model on one pipeline stage."""
        ctx = self.context(batch, dropout)
        stacks = {stack: params[stack] for stack in self.stacks}
        return self.layers(stacks, self.embed(params, ctx), ctx)

    def loss_fn(
        self, params: Tree, batch: Batch, dropout: Dropout, total: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, dict[str, Aux]]]:
        """Returns `(loss, (metrics, aux))` of this device's shard,
        for a model on one pipeline stage."""
        x_BTD, aux = self.hidden(params, batch, dropout)
        if self.execution.preferences is not None:
            loss, metrics = self.execution.preferences.loss(self, params, x_BTD, batch, total)
        else:
            loss, metrics = self.recorded(dropout).loss(params, x_BTD, batch, total)
            if self.model.spec().further:
                more, more_metrics, more_aux = further_loss(
                    self, params, x_BTD, batch, dropout, total
                )
                loss += more
                metrics |= more_metrics
                aux |= more_aux
        return loss + self.aux_loss(aux), (metrics, aux)

    def aux_loss(self, aux: dict[str, Aux]) -> jax.Array | float:
        """Returns the auxiliary losses of all layers, averaged over the sequences
        of the global batch."""
        losses = [stack_aux["aux_loss"] for stack_aux in aux.values() if "aux_loss" in stack_aux]
        total = sum((loss.sum() for loss in losses), start=0.0)
        return (1.0 / self.training.batch) * total

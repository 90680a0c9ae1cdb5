"""Forward pass of a run's model on one device: its part of the batch, its gathered weights, its layers.

The parts are those that a pipeline holds apart: `embed`, the layers of a virtual stage, `loss`. Without a pipeline they
follow each other in `loss_fn`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import axis_index, broadcast
from meshwright.config import Training
from meshwright.data.batch import Batch
from meshwright.models.blocks.context import Attend, build_attend, with_own_kv_head
from meshwright.models.blocks.dropout import Dropout
from meshwright.models.kernels.choose import Kernels
from meshwright.models.loss import chunk_tokens, token_losses
from meshwright.models.model import Aux, ForwardContext, Metrics, Model, Tokens, vocab_size
from meshwright.models.remat import scan_layers
from meshwright.sharding.params import GatherParams, Tree
from meshwright.sharding.sequence import SequenceSplit
from meshwright.sharding.stages import NO_LAYER, StageAssignment

if TYPE_CHECKING:
    from meshwright.models.preferences import Preferences


@dataclasses.dataclass(frozen=True)
class LocalModel:
    """The model on one device, inside the step's `shard_map`.

    `params` is always the whole tree of sharded parameters. `batch` holds whole sequences; each device takes its own
    positions of them.
    """

    model: Model
    training: Training
    gather_params: GatherParams
    sequence: SequenceSplit
    stages: StageAssignment
    kernels: Kernels
    grouped_matmul: Callable[..., jax.Array] = jax.lax.ragged_dot
    """Grouped matmul of experts (kernels/grouped.py)."""
    ahead: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Parameters that are gathered one layer ahead, by stack; other stacks gather all in their own layer."""
    tensor_ring: tuple[int, ...] = ()
    """Ring of collective matmuls over `tensor` (models/model.py); () has none."""
    attention_pieces: int = 1
    """Most pieces of the batch in which attention and its output projection are computed; 1 is all at once."""
    preferences: "Preferences | None" = None
    """Loss of preferences in the place of that of tokens (models/preferences.py)."""

    @functools.cached_property
    def stacks(self) -> dict[str, int]:
        """Layers of each stack, in order."""
        return self.model.spec().stacks

    @property
    def permutes(self) -> bool:
        """Whether a layer sends values around a ring of devices: attention in a ring, collective matmuls."""
        return self.sequence.is_ring or bool(self.tensor_ring)

    def context(self, batch: Batch, dropout: Dropout) -> ForwardContext:
        """Returns what every layer needs besides its parameters."""
        attend = self._build_attend(batch.segments)
        local = self.local_positions(batch)
        tokens = Tokens(local.inputs, local.positions)
        pieces: tuple[Attend, ...] = ()
        count = math.gcd(self.attention_pieces, batch.segments.shape[0])
        if count > 1:
            segments = jnp.split(batch.segments, count)
            pieces = tuple(self._build_attend(part_BT) for part_BT in segments)
        kernels = (attend, self.sequence, self.grouped_matmul)
        return ForwardContext(tokens, self.gather_params, dropout, *kernels, self.tensor_ring, pieces)

    def _build_attend(self, segments_BT: jax.Array) -> Attend:
        attend = build_attend(self.sequence, segments_BT, self.kernels)
        if (self.model.spec().kv_heads or math.inf) >= jax.lax.axis_size("tensor"):
            return attend
        return with_own_kv_head(attend)

    def local_positions(self, batch: Batch) -> Batch:
        """This device's positions of every sequence."""
        if self.sequence.shards == 1:
            return batch
        positions_T = self.sequence.local_positions()
        return jax.tree.map(lambda field: field[:, positions_T], batch)

    def embed(self, params: Tree, ctx: ForwardContext) -> jax.Array:
        """Returns the hidden states [B, T/context+tensor, D] before the first layer, on the first stage."""
        return self.model.embed(params, ctx)

    def layers(
        self, params: dict[str, Tree], x_BTD: jax.Array, ctx: ForwardContext, virtual_stage: jax.Array | int = 0
    ) -> tuple[jax.Array, dict[str, Aux]]:
        """Runs the layers of one virtual stage; returns the hidden states and each stack's aux, [rows, ...].

        params: the parameters of that virtual stage alone, by stack.
        """
        first, aux, spec = 0, {}, self.model.spec()
        functions: Mapping[str, Any] = self.model.layer_functions(ctx)
        rows = {stack: self.stages.rows(spec.layers_of(stack)) for stack in self.stacks}
        periods: dict[str, tuple[Any, ...]] = {}
        for stack, given in functions.items():
            period = given if isinstance(given, tuple) else (given,)
            if (rows[stack] == NO_LAYER).any():
                from meshwright.models.padding_rows import drop_padding, skip_padding  # most stacks have none

                period = tuple(map(drop_padding if self.permutes else skip_padding, period))
            periods[stack] = period
        layers = {stack: _local_rows(rows[stack], virtual_stage) for stack in self.stacks}
        if spec.interleaved:
            from meshwright.models.periods import scan_stacks_in_parts

            chosen = self._policies(0, len(spec.layers))
            return scan_stacks_in_parts(spec, periods, x_BTD, params, layers, chosen, self.training.unroll)
        for stack, count in self.stacks.items():
            period, index_L, parts = periods[stack], layers[stack], list[Aux]()
            for part, remat in self._policies(first, count):
                chosen, index = (jax.tree.map(operator.itemgetter(part), tree) for tree in (params[stack], index_L))
                if stack in self.ahead:
                    x_BTD, part_aux = self._layers_ahead(stack, chosen, x_BTD, ctx, index, remat)
                else:
                    # A part that does not begin with a period begins inside of one.
                    at, unroll = (part.start or 0) % len(period), self.training.unroll
                    kinds = period[at:] + period[:at]
                    x_BTD, part_aux = scan_layers(kinds, x_BTD, chosen, index, remat=remat, unroll=unroll)
                parts.append(part_aux)
            first += count
            aux[stack] = parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
        return x_BTD, aux

    def _policies(self, first: int, count: int) -> list[tuple[Any, str]]:
        """Returns the rows of a stack with one remat policy each, as slices. first: the stack's first layer."""
        remat, saved = self.training.remat, min(max(self.training.saved_layers - first, 0), count)
        if not saved:
            return [(slice(None), remat)]
        return [(slice(0, saved), "projections"), *([(slice(saved, count), remat)] if saved < count else [])]

    def _layers_ahead(
        self, stack: str, params: Tree, x_BTD: jax.Array, ctx: ForwardContext, index_L: Any, remat: str
    ) -> tuple[jax.Array, Aux]:
        """Runs a stack whose first weights are gathered one layer ahead."""
        from meshwright.models.gather_ahead import scan_layers_ahead  # not needed on one device

        first = {name: p for name, p in params.items() if name in self.ahead[stack]}
        rest = {name: p for name, p in params.items() if name not in first}
        gather_first, gather_rest = (
            functools.partial(self.gather_params.only(stack, names), path=stack) for names in (first, rest)
        )

        def gather(given: Tree, path: str) -> Tree:
            return given if path == stack else self.gather_params(given, path)

        layer: Any = self.model.layer_functions(dataclasses.replace(ctx, gather_params=gather))[stack]
        return scan_layers_ahead(layer, (gather_first, gather_rest), x_BTD, (first, rest), index_L, remat=remat)

    def unembed(self, params: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the final hidden states [B, T/context, D] on every stage, and the unembedding [V/stage+tensor, D]."""
        x_BTD = broadcast(x_BTD, ("stage",), self.stages.last_stage)
        return self.model.unembed(params, x_BTD, self.gather_params)

    def loss(self, params: Tree, x_BTD: jax.Array, batch: Batch, total: jax.Array) -> tuple[jax.Array, Metrics]:
        """Returns this device's share of the loss, and its metrics.

        The sum over the token axes is the mean over `total` weights.
        """
        batch, z_loss = self.local_positions(batch), self.training.z_loss
        nll_T, lse_T = self.token_losses(params, x_BTD, batch)
        weights_T = batch.weights.reshape(-1)
        nll, weight = (nll_T * weights_T).sum(), weights_T.sum()
        loss, metrics = nll / total, {"loss": (nll, weight)}
        if z_loss:
            squared = (lse_T * lse_T * weights_T).sum()
            loss += z_loss * squared / total
            metrics["squared lse"] = (squared, weight)
        return loss, metrics

    def token_losses(self, params: Tree, x_BTD: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns negative log-likelihood and log-sum-exp, both [B T/context]. batch: this device's positions."""
        x_BTD, table_VD = self.unembed(params, x_BTD)
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        chunk = chunk_tokens(x_TD.shape[0], table_VD.shape[0], self.training.logits_mib)
        with jax.named_scope("unembedding"):
            vocab, softcap = vocab_size(self.model), self.model.spec().logit_softcap
            return token_losses(x_TD, table_VD, batch.targets.reshape(-1), vocab, chunk, softcap)

    def weight(self, batch: Batch) -> jax.Array:
        """Returns what this device's sequences weigh in the mean loss: their tokens, or their preferences."""
        if self.preferences is None:
            return batch.weights.sum()
        return self.preferences.pairs(batch).sum()

    def hidden(self, params: Tree, batch: Batch, dropout: Dropout) -> tuple[jax.Array, dict[str, Aux]]:
        """Returns the hidden states after the last layer and each stack's aux, for a model on one pipeline stage."""
        ctx = self.context(batch, dropout)
        return self.layers({stack: params[stack] for stack in self.stacks}, self.embed(params, ctx), ctx)

    def loss_fn(
        self, params: Tree, batch: Batch, dropout: Dropout, total: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, dict[str, Aux]]]:
        """Returns `(loss, (metrics, aux))` of this device's shard, for a model on one pipeline stage."""
        x_BTD, aux = self.hidden(params, batch, dropout)
        if self.preferences is None:
            loss, metrics = self.loss(params, x_BTD, batch, total)
        else:
            loss, metrics = self.preferences.loss(self, params, x_BTD, batch, total)
        if self.model.spec().further and self.preferences is None:
            from meshwright.models.further_tokens import further_loss  # most models predict the next token alone

            more, more_metrics, more_aux = further_loss(self, params, x_BTD, batch, dropout, total)
            loss, metrics, aux = loss + more, metrics | more_metrics, aux | more_aux
        return loss + self.aux_loss(aux), (metrics, aux)

    def aux_loss(self, aux: dict[str, Aux]) -> jax.Array | float:
        """Returns the auxiliary losses of all layers, averaged over the sequences of the global batch."""
        total = sum((a["aux_loss"].sum() for a in aux.values() if "aux_loss" in a), start=0.0)
        return (1.0 / self.training.batch) * total


def _local_rows(rows: np.ndarray, virtual_stage: jax.Array | int) -> Any:
    """Layer indices in the rows of this stage's virtual stage. rows: [stages, virtual stages, rows]."""
    if rows.shape[:2] == (1, 1):
        return rows[0, 0]
    return jnp.asarray(rows)[axis_index(("stage",)), virtual_stage]

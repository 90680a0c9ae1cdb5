"""Direct preference optimisation (DPO): the loss of preferring one answer
to another (arXiv:2305.18290).

    loss = -log sigmoid(beta ((log p(chosen) - log q(chosen)) - (log p(rejected) -
    log q(rejected))))

p is the model that is trained, q the reference: the model that it started from. log p of an answer
is the sum over its tokens. With adapters the reference is the frozen base, computed without them;
otherwise it is a frozen copy of all parameters in the compute dtype, the subtree `reference`. It is
a second forward pass, without dropout or gradient.

A sequence holds complete pairs, the chosen answer with its prompt in an even segment and the
rejected one in the odd segment after it (data/packing.py), so a pair is never on two devices of the
batch. With `context` the sums over positions are one all-reduce of a number per pair.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.comm.collectives import all_reduce
from meshwright.data.batch import Batch
from meshwright.models.adapters import AdapterGather
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.blocks.row_sums import sorted_rows
from meshwright.models.model import Metrics
from meshwright.sharding.params import Tree
from meshwright.sharding.placed_params import REFERENCE

if TYPE_CHECKING:
    from meshwright.models.forward import LocalModel


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Loss of preferences."""

    beta: float

    def pairs(self, batch: Batch) -> jax.Array:
        """Returns 1 for each pair of the sequences
        that has both answers, float32 [B, pairs]. batch: [B, T]."""
        odd_BT = batch.segments % 2
        chosen = _by_pair(batch, batch.weights * (odd_BT == 0))
        rejected = _by_pair(batch, batch.weights * (odd_BT == 1))
        return ((chosen > 0) & (rejected > 0)).astype(jnp.float32)

    def loss(
        self, model: "LocalModel", params: Tree, x_BTD: jax.Array, batch: Batch, total: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss whose gradient is this device's, and its metrics.

        x_BTD: hidden states after the last layer.
        batch: complete sequences.
        total: pairs of the global batch. Metrics summed over the token axes are over all pairs;
        rewards are beta (log p - log q).
        """
        local = model.local_positions(batch)
        other, frozen = reference_of(model, params)
        reference_BTD, _ = other.hidden(frozen, batch, no_dropout())
        nll_T = model.score_targets(params, x_BTD, local)[0]
        reference_T = jax.lax.stop_gradient(other.score_targets(frozen, reference_BTD, local)[0])
        # +1 for tokens of the chosen answer and -1 for those of the rejected one.
        sign_BT = local.weights * (1 - 2 * (local.segments % 2))
        ratio_BT = (reference_T - nll_T).reshape(local.segments.shape) * sign_BT
        exists = self.pairs(batch)
        # Equal on the devices of `context`, as is its cotangent: each differentiates the loss
        # by its own positions.
        margin = self.beta * all_reduce(_by_pair(local, ratio_BT, exists.shape[1]), ("context",))
        losses = -jax.nn.log_sigmoid(margin) * exists
        weight = _over_context(exists)
        metrics = {
            "loss": (_over_context(losses), weight),
            "reward margin": (_over_context(margin * exists), weight),
            "preference accuracy": (_over_context((margin > 0) * exists), weight),
        }
        return losses.sum() / total, metrics


def _over_context(values: jax.Array) -> jax.Array:
    """Returns this device's part of a sum that all devices of `context` have."""
    return values.sum() / jax.lax.axis_size("context")


def _by_pair(batch: Batch, values_BT: jax.Array, pairs: int | None = None) -> jax.Array:
    """Returns sums over the positions of each pair, float32 [B, pairs];
    a pair takes two positions at least.

    Its work and memory are linear in the positions.
    """
    pairs = pairs or batch.segments.shape[1] // 2 + 1
    sequences = batch.segments.shape[0]
    pair_BT = batch.segments // 2
    # Padding is in no pair.
    index_BT = jnp.arange(sequences)[:, None] * pairs + pair_BT
    index_BT = jnp.where(pair_BT < pairs, index_BT, sequences * pairs)
    values = values_BT.reshape(-1).astype(jnp.float32)
    sums = _sum_by(values, index_BT.reshape(-1), sequences * pairs)
    return sums.reshape(sequences, pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _sum_by(values: jax.Array, index: jax.Array, groups: int) -> jax.Array:
    """Returns the sums of the values of each index, [groups], added in one order
    on every platform."""
    return sorted_rows(values[:, None], index, groups)[:, 0]


def _sum_by_bwd(groups: int, index: jax.Array, g: jax.Array) -> tuple[jax.Array, np.ndarray]:
    no_gradient = np.zeros(index.shape, jax.dtypes.float0)
    return g.at[index].get(mode="fill", fill_value=0), no_gradient


_sum_by.defvjp(lambda values, index, groups: (_sum_by(values, index, groups), index), _sum_by_bwd)


def reference_of(model: "LocalModel", params: Tree) -> tuple["LocalModel", Tree]:
    """Returns the model that computes the reference, and its parameters."""
    gather: Any = model.execution.gather_params
    if isinstance(gather, AdapterGather):
        without_adapters = dataclasses.replace(gather, scale=None)
        return _with_gather(model, without_adapters), params
    plain = dataclasses.replace(gather, gathers=gather.gathers[REFERENCE])
    return _with_gather(model, plain), params[REFERENCE]


def _with_gather(model: "LocalModel", gather: Any) -> "LocalModel":
    """Returns the model with other gathers, each within its own layer."""
    execution = dataclasses.replace(model.execution, gather_params=gather, gathered_ahead={})
    return dataclasses.replace(model, execution=execution)

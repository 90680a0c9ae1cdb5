"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a layer that predicts the token after the next.

The layer reads the last hidden state of a position and the embedding of the token that follows it, and shares embedding
and unembedding with the model. Its loss is added with a weight; decoding does without it.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.data.batch import Batch
from meshwright.models.blocks.dropout import Dropout
from meshwright.models.model import Aux, Metrics
from meshwright.models.remat import scan_layers
from meshwright.sharding.params import Tree

if TYPE_CHECKING:
    from meshwright.models.forward import LocalModel

STACK = "mtp"
"""Subtree of the layer's parameters, with a leading dimension of one layer."""


def further_loss(
    local: "LocalModel", params: Tree, x_BTD: jax.Array, batch: Batch, dropout: Dropout, total: jax.Array
) -> tuple[jax.Array, Metrics, dict[str, Aux]]:
    """Returns this device's share of the weighted loss, its metrics and aux, of a model without pipeline stages.

    x_BTD: hidden states after the last layer.  total: weights of the next tokens, over which the loss is averaged, so
    that a token has one weight in both losses.
    """
    shifted, model = shift(batch), local.model
    ctx = local.context(shifted, dropout)
    further: Any = model
    h_BTD, layer = further.further_layer(params, x_BTD, ctx)
    index_L = np.array([len(model.spec().layers)], np.int32)
    with jax.named_scope("further tokens"):
        h_BTD, aux = scan_layers((layer,), h_BTD, params[STACK], index_L, remat=local.training.remat, unroll=1)
    own = {**params, "final_norm": params[STACK]["final_norm"][0]}
    loss, metrics = local.loss(own, h_BTD, shifted, total)
    return further.mtp_weight * loss, {"further token loss": metrics["loss"]}, {STACK: aux}


def shift(batch: Batch) -> Batch:
    """Returns whole sequences moved by one token: its input is the next token, its target the one after it.

    A target has the weight that it has for the position before it; those of other documents have none.
    """
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    weights = jnp.where(same, batch.weights[:, 1:], 0)
    last = ((0, 0), (0, 1))
    return Batch(
        batch.targets, jnp.pad(batch.targets[:, 1:], last), batch.segments, batch.positions, jnp.pad(weights, last)
    )

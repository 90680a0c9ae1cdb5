"""Loss of the token after the next: multi-token prediction (DeepSeek-V3, arXiv:2412.19437,
section 2.2)."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.data.batch import Batch
from meshwright.models.blocks.layers import Dropout
from meshwright.models.layer_scan import scan_layers
from meshwright.models.model import MTP, Aux, Metrics
from meshwright.sharding.params import Tree

if TYPE_CHECKING:
    from meshwright.models.forward import LocalModel


def further_loss(
    model: "LocalModel",
    params: Tree,
    x_BTD: jax.Array,
    batch: Batch,
    dropout: Dropout,
    total: jax.Array,
) -> tuple[jax.Array, Metrics, dict[str, Aux]]:
    """Returns the weighted loss of the token after the next, its metrics and aux.

    The further layer reads the last hidden state of a position and the embedding of the token that
    follows it, and shares embedding and unembedding with the model. Decoding omits it.
    total: weights of the next tokens, so that a token has one weight in both losses.
    """
    shifted = shift(batch)
    family: Any = model.model
    h_BTD, layer = family.further_layer(params, x_BTD, model.context(shifted, dropout))
    index = {MTP: np.array([len(family.spec().layers)], np.int32)}
    with jax.named_scope("further tokens"):
        h_BTD, aux = scan_layers(
            [(MTP, layer)],
            h_BTD,
            params,
            index,
            remat=model.training.remat,
            saves_weights=model.execution.saves_weights,
        )
    with_own_norm = {**params, "final_norm": params[MTP]["final_norm"][0]}
    loss, metrics = model.loss(with_own_norm, h_BTD, shifted, total)
    return family.mtp_weight * loss, {"further token loss": metrics["loss"]}, aux


def shift(batch: Batch) -> Batch:
    """Returns sequences moved by one token: the input is the next token, the target the one
    after it.

    A target has the weight that it has for the position before it; 0 in another document.
    """
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    weights = jnp.where(same, batch.weights[:, 1:], 0)
    last = ((0, 0), (0, 1))
    return Batch(
        batch.targets,
        jnp.pad(batch.targets[:, 1:], last),
        batch.segments,
        batch.positions,
        jnp.pad(weights, last),
    )

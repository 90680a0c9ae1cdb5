"""Muon as a rule of optax; its matrices are in muon.py, which needs no optax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.config import Optimizer
from meshwright.sharding.params import Tree, is_param, named_leaves, tree_map
from meshwright.step.matrices import LayerMap
from meshwright.step.muon import orthogonalise, orthogonalised


def muon(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    """Returns Muon for the matrices of layers, and AdamW for all other parameters. params: descriptions."""
    matrices = optax.chain(
        _scale_by_muon(o, params), optax.add_decayed_weights(o.weight_decay), optax.scale_by_learning_rate(rate)
    )
    mask = tree_map(lambda p: optax.MaskedNode() if orthogonalised(p) else p.init == "normal", params)
    others = optax.adamw(
        rate, o.beta1, o.beta2, eps=o.epsilon, mu_dtype=o.moment_dtype, weight_decay=o.weight_decay, mask=mask
    )
    labels = tree_map(lambda p: "matrices" if orthogonalised(p) else "others", params)
    return optax.partition({"matrices": matrices, "others": others}, labels)


class MuonState(NamedTuple):
    """State of Muon's matrices."""

    step: jax.Array
    """Updates so far; int32 scalar."""
    mu: Tree
    """Momentum, like the parameters."""


def _scale_by_muon(o: Optimizer, params: Tree) -> optax.GradientTransformationExtraArgs:
    """Returns the orthogonalised Nesterov momentum, scaled to AdamW's size.

    params: descriptions. Its `update` takes the `layer_map` of the step.
    """
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)
    matrices = [path for path, p in named_leaves(params).items() if orthogonalised(p)]

    def init(arrays: Tree) -> MuonState:
        mu = jax.tree.map(lambda x: jnp.zeros(x.shape, o.moment_dtype), arrays)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(
        grads: Tree, state: MuonState, arrays: Tree = None, *, layer_map: LayerMap, **_: Any
    ) -> tuple[Tree, MuonState]:
        count = state.step + 1
        mu = jax.tree.map(lambda m, g: o.beta1 * m.astype(jnp.float32) + (1 - o.beta1) * g, state.mu, grads)
        # Bias of the momentum one step ahead, which is Nesterov's, as in optax.contrib.muon.
        ahead, now = 1 - o.beta1 ** (count + 1), 1 - o.beta1**count
        nesterov = jax.tree.map(lambda m, g: o.beta1 * m / ahead + (1 - o.beta1) * g / now, mu, grads)
        leaves = dict(zip(named_leaves(params), treedef.flatten_up_to(nesterov), strict=True))
        found = orthogonalise({path: leaves[path] for path in matrices}, layer_map, o.muon_heads)
        updates = treedef.unflatten([found.get(path, leaf) for path, leaf in leaves.items()])
        mu = jax.tree.map(lambda m: m.astype(o.moment_dtype), mu)
        return updates, MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)

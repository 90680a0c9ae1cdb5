"""Rules of optax that take layers one by one: Adafactor, and Muon, whose matrices are in muon.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Rule

from meshwright.config import Optimizer
from meshwright.sharding.params import Tree, is_param, named_leaves, tree_map
from meshwright.step.matrices import LayerMap
from meshwright.step.muon import orthogonalise, orthogonalised
from meshwright.step.optimizers import decays


def adafactor(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns Adafactor (arXiv:1804.04235) of every layer. params: descriptions.

    Row and column means, and clipping by a root mean square of 1, go over one layer of a stack, never over all of them:
    the numbers are those of `optax.adafactor` applied to the layers one by one.
    """
    one = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    # One label for each stack, the same on every mesh: checkpoints know the state by it.
    labels = jax.tree.unflatten(
        jax.tree.structure(params, is_leaf=is_param),
        [
            f"{path.partition('.')[0]}-{p.logical_shape[0]}" if "L" in p.dims else "tables"
            for path, p in named_leaves(params).items()
        ],
    )
    by_layer = {
        label: one if label == "tables" else _by_layer(one) for label in jax.tree.leaves(labels)
    }
    return optax.chain(
        optax.partition(by_layer, labels),
        optax.add_decayed_weights(o.weight_decay, mask=decays(params)),
        optax.scale_by_learning_rate(rate),
    )


def _by_layer(rule: Rule) -> Rule:
    """Applies a rule to each layer of stacks [L, ...]. What does not depend on the layer, a count, is kept once."""

    def axes(params: Tree) -> Any:
        state = jax.eval_shape(
            rule.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        )
        return jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)

    def init(params: Tree) -> Any:
        return jax.vmap(rule.init, out_axes=axes(params))(params)

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        state_axes = axes(params)
        return jax.vmap(rule.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))(
            grads, state, params
        )

    return Rule(init, update)


def muon(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns Muon for the matrices of layers, and AdamW for all other parameters. params: descriptions."""
    matrices = optax.chain(
        _scale_by_muon(o, params),
        optax.add_decayed_weights(o.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    mask = tree_map(
        lambda p: optax.MaskedNode() if orthogonalised(p) else p.init == "normal", params
    )
    others = optax.adamw(
        rate,
        o.beta1,
        o.beta2,
        eps=o.epsilon,
        mu_dtype=o.moment_dtype,
        weight_decay=o.weight_decay,
        mask=mask,
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
        mu = jax.tree.map(
            lambda m, g: o.beta1 * m.astype(jnp.float32) + (1 - o.beta1) * g, state.mu, grads
        )
        # Bias of the momentum one step ahead, which is Nesterov's, as in optax.contrib.muon.
        ahead, now = 1 - o.beta1 ** (count + 1), 1 - o.beta1**count
        nesterov = jax.tree.map(
            lambda m, g: o.beta1 * m / ahead + (1 - o.beta1) * g / now, mu, grads
        )
        leaves = dict(zip(named_leaves(params), treedef.flatten_up_to(nesterov), strict=True))
        found = orthogonalise({path: leaves[path] for path in matrices}, layer_map, o.muon_heads)
        updates = treedef.unflatten([found.get(path, leaf) for path, leaf in leaves.items()])
        mu = jax.tree.map(lambda m: m.astype(o.moment_dtype), mu)
        return updates, MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)

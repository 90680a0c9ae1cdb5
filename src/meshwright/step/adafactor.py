"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), layer by layer of a stack."""

from typing import Any

import jax
import optax

from meshwright.config import Optimizer
from meshwright.sharding.params import Tree, is_param, named_leaves
from meshwright.step.optimizers import decays


def adafactor(o: Optimizer, rate: optax.Schedule, params: Tree) -> optax.GradientTransformation:
    """Returns Adafactor of every layer. params: descriptions.

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
    by_layer = {label: one if label == "tables" else _by_layer(one) for label in jax.tree.leaves(labels)}
    return optax.chain(
        optax.partition(by_layer, labels),
        optax.add_decayed_weights(o.weight_decay, mask=decays(params)),
        optax.scale_by_learning_rate(rate),
    )


def _by_layer(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a rule to each layer of stacks [L, ...]. What does not depend on the layer, a count, is kept once."""

    def axes(params: Tree) -> Any:
        state = jax.eval_shape(rule.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params))
        return jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)

    def init(params: Tree) -> Any:
        return jax.vmap(rule.init, out_axes=axes(params))(params)

    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        state_axes = axes(params)
        return jax.vmap(rule.update, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))(grads, state, params)

    return optax.GradientTransformation(init, update)

"""Rules of optax that take layers one by one: Adafactor and Muon (its matrices: muon.py)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Rule

from meshwright.config import Optimizer
from meshwright.sharding.params import Param, Tree, is_param, named_leaves, tree_map
from meshwright.step.matrices import LayerMap
from meshwright.step.muon import orthogonalise, orthogonalised
from meshwright.step.optimizers import decays


def adafactor(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns Adafactor (arXiv:1804.04235) of every layer. params: descriptions.

    Row and column means, and clipping by a root mean square of 1, go over one layer [...] of a
    stack, never over the stack [L, ...]: as `optax.scale_by_factored_rms` and `clip_by_block_rms`
    layer by layer. Unlike `optax.adafactor`, updates are not scaled by the parameter's root mean
    square, and weight decay is multiplied by the rate.
    """
    one_layer = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    by_layer = _ByLayer(one_layer)
    rules: dict[str, Rule] = {}
    labels = []
    for path, p in named_leaves(params).items():
        if "L" in p.dims:
            # One label for each stack, the same on every mesh: checkpoints know the state by it.
            label = f"{path.partition('.')[0]}-{p.logical_shape[0]}"
            rules[label] = Rule(by_layer.init, by_layer.update)
        else:
            label = "tables"
            rules[label] = one_layer
        labels.append(label)
    label_tree = jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_param), labels)
    return optax.chain(
        optax.partition(rules, label_tree),
        optax.add_decayed_weights(o.weight_decay, mask=decays(params)),
        optax.scale_by_learning_rate(rate),
    )


@dataclasses.dataclass(frozen=True)
class _ByLayer:
    """A rule applied to each layer of stacks [L, ...].

    What does not depend on the layer, a count, is kept once.
    """

    rule: Rule

    def init(self, params: Tree) -> Any:
        """Returns the state of all layers."""
        return jax.vmap(self.rule.init, out_axes=self._axes(params))(params)

    def update(self, grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        """Returns the updates of all layers, and their state."""
        axes = self._axes(params)
        update = jax.vmap(self.rule.update, in_axes=(0, axes, 0), out_axes=(0, axes))
        return update(grads, state, params)

    def _axes(self, params: Tree) -> Any:
        """Returns the dimension of the layers in arrays of the state: 0, or None for a scalar."""
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        state = jax.eval_shape(self.rule.init, layer)
        return jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)


def muon(o: Optimizer, rate: optax.Schedule, params: Tree) -> Rule:
    """Returns Muon for the matrices of layers, and AdamW for all other parameters.

    params: descriptions.
    """
    momentum = _MuonMomentum(o, params)
    matrices = optax.chain(
        optax.GradientTransformationExtraArgs(momentum.init, momentum.update),
        optax.add_decayed_weights(o.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    others = optax.adamw(
        rate,
        o.beta1,
        o.beta2,
        eps=o.epsilon,
        mu_dtype=o.moment_dtype,
        weight_decay=o.weight_decay,
        mask=tree_map(_decays_with_adamw, params),
    )
    labels = tree_map(lambda p: "matrices" if orthogonalised(p) else "others", params)
    return optax.partition({"matrices": matrices, "others": others}, labels)


def _decays_with_adamw(p: Param) -> Any:
    """Returns whether AdamW decays a parameter; a MaskedNode for one that Muon updates."""
    return optax.MaskedNode() if orthogonalised(p) else p.init == "normal"


class MuonState(NamedTuple):
    """State of Muon's matrices."""

    step: jax.Array
    """Updates so far; int32 scalar."""
    mu: Tree
    """Momentum, like the parameters."""


@dataclasses.dataclass(frozen=True)
class _MuonMomentum:
    """The orthogonalised Nesterov momentum of matrices, scaled to AdamW's size, as a rule of optax.

    In update t = 1, 2, ..., with the momentum's decay beta and both terms corrected for the bias of
    their first steps, as in optax.contrib.muon:

        m       =  beta m + (1 - beta) g
        n       =  beta m / (1 - beta^(t+1)) + (1 - beta) g / (1 - beta^t)
        update  =  orthogonalise(n)
    """

    config: Optimizer
    params: Tree
    """Descriptions."""

    def init(self, arrays: Tree) -> MuonState:
        """Returns a momentum of zero."""
        mu = jax.tree.map(lambda x: jnp.zeros(x.shape, self.config.moment_dtype), arrays)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(
        self, grads: Tree, state: MuonState, arrays: Tree = None, *, layer_map: LayerMap, **_: Any
    ) -> tuple[Tree, MuonState]:
        """Returns the updates and the state. layer_map: of the step."""
        beta = self.config.beta1
        step = state.step + 1

        def mean(m: jax.Array, g: jax.Array) -> jax.Array:
            return beta * m.astype(jnp.float32) + (1 - beta) * g

        mu = jax.tree.map(mean, state.mu, grads)
        unbias_momentum = 1 - beta ** (step + 1)
        unbias_gradient = 1 - beta**step

        def nesterov(m: jax.Array, g: jax.Array) -> jax.Array:
            return beta * m / unbias_momentum + (1 - beta) * g / unbias_gradient

        updates = self._orthogonalise(jax.tree.map(nesterov, mu, grads), layer_map)
        mu = jax.tree.map(lambda m: m.astype(self.config.moment_dtype), mu)
        return updates, MuonState(step, mu)

    def _orthogonalise(self, tree: Tree, layer_map: LayerMap) -> Tree:
        """Returns the orthogonal factors of the matrices of a tree; what else is in it stays."""
        treedef: Any = jax.tree.structure(self.params, is_leaf=is_param)
        described = named_leaves(self.params)
        leaves = dict(zip(described, treedef.flatten_up_to(tree), strict=True))
        matrices = {path: leaves[path] for path, p in described.items() if orthogonalised(p)}
        leaves |= orthogonalise(matrices, layer_map, self.config.muon_heads)
        return treedef.unflatten(leaves.values())

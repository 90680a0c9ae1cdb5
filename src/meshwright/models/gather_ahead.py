"""Scan over layers in which weights and gradients travel during the computation of another layer.

Most gathers of a layer overlap with the matmuls before them. Those of the weights that a pass needs
first have nothing before them, and the gradients that a layer's backward pass computes last have
nothing after them. Here the carry of each pass holds the first weights of its next layer, gathered,
and that of the backward pass the last gradients of the layer above, not yet reduced: both travel
during a layer's computation. Other gradients are reduced in their own layer, during the rest of its
backward pass: carried they would be copied.

    forward    links    | gather layer 1 | gather layer 2 | ...
               compute  | layer 0        | layer 1        | ...

    backward   links    | gather layer 1 | gather layer 0, reduce layer 2 | reduce layer 1 |
               compute  | layer 2        | layer 1                        | layer 0        |

Plain autodiff would save the gathered weights of every layer. This scan has a derivative of its
own, which gathers them again and saves what the remat policy names. Its price is memory for weights
and gradients of another layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.layer_health import with_health
from meshwright.models.model import Aux, ForwardContext
from meshwright.models.remat import REMAT_POLICIES, checkpoint_layer
from meshwright.sharding.params import Tree

if TYPE_CHECKING:
    from meshwright.models.forward import LocalModel


@dataclasses.dataclass(frozen=True)
class GatheredAhead:
    """Names of a layer's parameters that each pass gathers one layer ahead."""

    forward: Collection[str]
    """Those that the forward pass needs first; the backward pass computes their gradients last."""
    backward: Collection[str]
    """Those that the backward pass needs first."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["activations"],
    meta_fields=["treedef", "weight_of"],
)
@dataclasses.dataclass(frozen=True)
class Residuals:
    """Arrays that the backward pass of a layer reads, without the gathered weights among them.

    A layer's vector-Jacobian product is a tree of arrays. Some of them *are* gathered weights;
    these are gathered again and put back, so that only the others are saved.
    """

    activations: list[jax.Array]
    """Leaves that are not weights, in order."""
    treedef: Any
    """Structure of the vector-Jacobian product."""
    weight_of: tuple[int | None, ...]
    """For each of its leaves the position of the weight that it is; None for an activation."""

    @classmethod
    def of(cls, vjp: Any, weights: Tree) -> "Residuals":
        """Takes a layer's vector-Jacobian product apart.
        weights: the tree that the layer was called with."""
        leaves, treedef = jax.tree.flatten(vjp)
        positions = {id(weight): i for i, weight in enumerate(jax.tree.leaves(weights))}
        weight_of = tuple(positions.get(id(leaf)) for leaf in leaves)
        pairs = zip(leaves, weight_of, strict=True)
        activations = [leaf for leaf, position in pairs if position is None]
        return cls(activations, treedef, weight_of)

    def vjp(self, weights: Tree) -> Callable[[Any], Any]:
        """Puts the vector-Jacobian product together again, with these weights."""
        gathered = jax.tree.leaves(weights)
        activations = iter(self.activations)
        leaves = []
        for position in self.weight_of:
            leaves.append(next(activations) if position is None else gathered[position])
        return jax.tree.unflatten(self.treedef, leaves)


def run_layers_ahead(
    model: "LocalModel",
    stack: str,
    x_BTD: jax.Array,
    ctx: ForwardContext,
    params: Tree,
    index: Tree,
    remat: str,
) -> tuple[jax.Array, dict[str, Aux]]:
    """Runs a stack whose first weights are gathered one layer ahead;
    returns x and the aux of the stack.

    params, index: the rows of the stack that are run.
    """
    execution = model.execution

    def gather_some(some: Tree) -> Tree:
        return execution.gather_params.only(stack, some)(some, path=stack)

    def gather(params: Tree, path: str) -> Tree:
        return params if path == stack else execution.gather_params(params, path)

    functions = model.model.layer_functions(dataclasses.replace(ctx, gather_params=gather))
    layer: Any = functions[stack]
    if model.training.health:
        layer = with_health(layer, ctx)
    at_start, inside = execution.gathered_ahead[stack]
    needed_first = inside if REMAT_POLICIES[remat].begins_inside else at_start
    ahead = GatheredAhead(forward=at_start, backward=needed_first)
    x_BTD, aux = scan_layers_ahead(layer, gather_some, x_BTD, params, ahead, index, remat=remat)
    return x_BTD, {stack: aux}


def scan_layers_ahead(
    layer: Callable[..., tuple[jax.Array, Any]],
    gather: Callable[[Tree], Tree],
    x: jax.Array,
    params: Tree,
    ahead: GatheredAhead,
    index_L: jax.Array,
    *,
    remat: str,
) -> tuple[jax.Array, Any]:
    """Scans `layer` over stacked layers; returns x and the stacked aux, [L, ...].

    layer: `(x, weights, layer index) -> (x, aux)`.
    gather: `parameters of one layer -> weights`, of any of them.
    params: sharded, by name, with a leading dimension L.
    index_L: index of each layer in the model, int32.
    remat: a policy that recomputes (models/remat.py).
    """
    scan = _AheadScan(checkpoint_layer(layer, remat), gather, ahead, jnp.asarray(index_L))
    run = jax.custom_vjp(scan.run)
    run.defvjp(scan.forward, scan.backward)
    return run(x, params)


@dataclasses.dataclass(frozen=True)
class _AheadScan:
    """The three functions of `scan_layers_ahead`: the scan, its forward pass
    and its backward pass."""

    layer: Callable[..., tuple[jax.Array, Any]]
    gather: Callable[[Tree], Tree]
    ahead: GatheredAhead
    index_L: jax.Array

    @property
    def length(self) -> int:
        """Layers."""
        return self.index_L.shape[0]

    def run(self, x: jax.Array, params: Tree) -> tuple[jax.Array, Any]:
        """Returns x after all layers and their aux, without residuals."""
        return self._scan(self.layer, x, params)

    def forward(self, x: jax.Array, params: Tree) -> tuple[Any, Any]:
        """Returns what `run` does, and what the backward pass needs: parameters
        and each layer's `Residuals`."""

        def layer_with_residuals(x: jax.Array, weights: Tree, index: jax.Array) -> Any:
            (x, aux), vjp = jax.vjp(lambda x, weights: self.layer(x, weights, index), x, weights)
            return x, (aux, Residuals.of(vjp, weights))

        x, (aux, residuals) = self._scan(layer_with_residuals, x, params)
        return (x, aux), (params, residuals)

    def _scan(self, layer: Callable[..., Any], x: jax.Array, params: Tree) -> tuple[Any, Any]:
        """Returns x after all layers, and what `layer(x, weights, index) -> (x, outputs)`
        returns of each."""
        first, rest = _split(params, self.ahead.forward)

        def step(carry: Any, inputs: Any) -> Any:
            x, weights = carry
            row, index, rest = inputs
            next_weights = self.gather(_row_of(first, (row + 1) % self.length))
            x, outputs = layer(x, {**weights, **self.gather(rest)}, index)
            return (x, next_weights), outputs

        carry = (x, self.gather(_row_of(first, 0)))
        (x, _), outputs = lax.scan(step, carry, (jnp.arange(self.length), self.index_L, rest))
        return x, outputs

    def backward(self, saved: Any, cotangents: Any) -> tuple[jax.Array, Tree]:
        """Returns the gradients of x and of the parameters.

        The gradients of the parameters in `ahead.forward` are the late ones: a layer's are complete
        at the end of its iteration, and are reduced during the next, which is that of the layer
        below.
        """
        params, residuals = saved
        g_x, g_aux = cotangents
        first, rest = _split(params, self.ahead.backward)
        late, early = _split(params, self.ahead.forward)
        # Not before this pass: the weights would be there while the layers after these have theirs.
        g_x, last = lax.optimization_barrier((g_x, _row_of(first, self.length - 1)))
        late_gradients = _LateGradients(*jax.vjp(self.gather, _row_of(late, 0)))
        layers = _BackwardLayers(self.gather, self.ahead, self.length, first, early, late_gradients)
        inputs = _LayerInputs(jnp.arange(self.length), rest, residuals, g_aux)
        nothing_above = late_gradients.zeros()
        start = _BackwardCarry(g_x, self.gather(last), nothing_above)
        end, (g_late, g_early) = lax.scan(layers.step, start, inputs, reverse=True)
        # Row l of the scan has reduced the late gradients of row l + 1;
        # those of row 0 are still to be reduced.
        lowest = late_gradients.reduce(end.g_above)
        g_late = jax.tree.map(_shift_rows, lowest, g_late)
        return end.g_x, {**g_late, **g_early}


class _BackwardCarry(NamedTuple):
    """Values that the backward pass hands from a layer to the layer below."""

    g_x: jax.Array
    """Gradient of the layer's output."""
    weights: Tree
    """Weights that the pass needs first, gathered while the layer above computed."""
    g_above: list[jax.Array]
    """Late gradients of the layer above, not yet reduced."""


class _LayerInputs(NamedTuple):
    """Arrays of one layer that its backward pass reads: a row of what is scanned."""

    row: jax.Array
    rest: Tree
    """Parameters that are gathered within the layer."""
    residuals: Residuals
    g_aux: Any
    """Gradient of the layer's auxiliary outputs."""


@dataclasses.dataclass(frozen=True)
class _LateGradients:
    """Gradients that the backward pass of a layer computes last,
    which are reduced during that of the layer below."""

    weights: Tree
    """Gathered weights of some layer, for their shapes."""
    scatter: Callable[[Tree], tuple[Tree]]
    """Transpose of the gather of that layer.
    A gather is linear, so that of any layer reduces the gradients of all."""

    def zeros(self) -> list[jax.Array]:
        """Returns the gradients above the last layer."""
        return _without_integers(jax.tree.map(jnp.zeros_like, self.weights))

    def reduce(self, gradients: list[jax.Array]) -> Tree:
        """Returns the gradients of sharded parameters from those of gathered weights."""
        (reduced,) = self.scatter(_with_integers(self.weights, gradients))
        return reduced


@dataclasses.dataclass(frozen=True)
class _BackwardLayers:
    """Backward pass of one layer after another, the last one first (picture: above)."""

    gather: Callable[[Tree], Tree]
    ahead: GatheredAhead
    length: int
    """Layers."""
    first: Tree
    """Parameters, [L, ...], that the backward pass of a layer needs first."""
    early: Tree
    """Parameters whose gradients are reduced in their own layer."""
    late: _LateGradients

    def step(self, carry: _BackwardCarry, layer: _LayerInputs) -> tuple[_BackwardCarry, Any]:
        """Computes the gradients of a layer;
        returns the reduced ones: late of the layer above, early of this one."""
        row_below = (layer.row - 1) % self.length
        weights_below = self.gather(_row_of(self.first, row_below))
        reduced_above = self.late.reduce(carry.g_above)
        vjp = layer.residuals.vjp({**carry.weights, **self.gather(layer.rest)})
        g_x, g_weights = vjp((carry.g_x, layer.g_aux))
        g_late, g_early = _split(g_weights, self.ahead.forward)
        reduced_early = self._reduce(_row_of(self.early, layer.row), g_early)
        below = _BackwardCarry(g_x, weights_below, _without_integers(g_late))
        return below, (reduced_above, reduced_early)

    def _reduce(self, params: Tree, gradients: Tree) -> Tree:
        """Returns the gradients of sharded parameters from those of gathered weights."""
        _, scatter = jax.vjp(self.gather, params)
        (reduced,) = scatter(gradients)
        return reduced


def _row_of(stacked: Tree, row: Any) -> Tree:
    """Returns one layer's parameters of a stack."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), stacked)


def _shift_rows(first: jax.Array, rows: jax.Array) -> jax.Array:
    """Puts a row before the others and drops the last of them."""
    return jnp.concatenate([first[None], rows[:-1]])


def _split(tree: Tree, names: Collection[str]) -> tuple[Tree, Tree]:
    """Returns the entries of these names, and the others."""
    chosen = {name: value for name, value in tree.items() if name in names}
    others = {name: value for name, value in tree.items() if name not in names}
    return chosen, others


def _without_integers(gradients: Tree) -> list[jax.Array]:
    """Returns the gradients of weights that have one: quantised weights in integers do not,
    and a scan carries none."""
    return [g for g in jax.tree.leaves(gradients) if jnp.issubdtype(g.dtype, jnp.inexact)]


def _with_integers(weights: Tree, gradients: Sequence[jax.Array]) -> Tree:
    """Inverts `_without_integers`: weights in integers get the gradient of type float0
    that JAX expects of them."""
    remaining = iter(gradients)

    def gradient_of(weight: jax.Array) -> Any:
        if jnp.issubdtype(weight.dtype, jnp.inexact):
            return next(remaining)
        return np.zeros(weight.shape, jax.dtypes.float0)

    return jax.tree.map(gradient_of, weights)

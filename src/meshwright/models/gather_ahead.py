"""Scan over layers in which weights and gradients travel during the computation of another layer.

Most gathers of a layer overlap with the matmuls before them. Those of the weights that a layer needs first have nothing
before them, and the gradients that its backward pass computes last have nothing after them. Here the scan's carry holds
the first weights of the next layer, already gathered, and in the backward pass the gradients of the layer above, not
yet reduced: both travel during the computation of a layer.

Plain autodiff would save the gathered weights of every layer. This scan has a derivative of its own, which gathers them
again and saves what the remat policy names. Its price is memory for the gradients of one layer, unreduced, and for the
first weights of another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.config import Training
from meshwright.models.remat import REMAT_POLICIES, checkpoint_layer
from meshwright.sharding.params import Param, Tree

Gather = Callable[[Tree], Tree]
"""`sharded parameters of one layer -> weights`."""
WeightsLayer = Callable[[jax.Array, Tree, jax.Array], tuple[jax.Array, Any]]
"""`(x, weights, layer index) -> (x, aux)`."""


def gathered_ahead(params: dict[str, Param]) -> tuple[str, ...]:
    """Returns the parameters of a layer that it needs first: all except its feed-forward half."""
    later = ("ffn_in", "ffn_out")
    return tuple(name for name, p in params.items() if getattr(p, "role", None) not in later)


def gathered_within_reason(training: Training, stages: int, period: int, frozen: str) -> str | None:
    """Returns why a run's weights are gathered within their own layer, None where they can be gathered ahead.

    frozen: `lora` where the weights are frozen (`FineTune.method`).
    """
    if frozen == "lora":
        return "its backward pass computes the gradients of all weights, and under adapters they are frozen"
    if period > 1:
        return f"it gathers for the next layer of one kind, and the model's layers repeat with a period of {period}"
    if REMAT_POLICIES[training.remat].saved is None:
        return f"it gathers weights again in the backward pass, and remat {training.remat} recomputes no layer"
    if stages > 1:
        return f"each of {stages} pipeline stages runs its layers tick by tick, with gathers of their own"
    if training.unroll > 1:
        return f"its loop has one layer per iteration, and unroll is {training.unroll}"
    return None


def scan_layers_ahead(
    layer: WeightsLayer,
    gathers: tuple[Gather, Gather],
    x: jax.Array,
    params: tuple[Tree, Tree],
    index_L: jax.Array,
    *,
    remat: str,
) -> tuple[jax.Array, Any]:
    """Scans `layer` over stacked layers; returns x and the stacked aux, [L, ...].

    params: two dictionaries of the layers' sharded parameters, with a leading dimension L: those that are gathered one
    layer ahead, and the others.  gathers: of each of the two.  index_L: index of each layer in the model, int32.
    remat: a policy that recomputes (models/remat.py).
    """
    scan = _Scan(layer, gathers, index_L, remat)

    @jax.custom_vjp
    def run(x: jax.Array, params: tuple[Tree, Tree]) -> tuple[jax.Array, Any]:
        return scan.forward(x, params)

    run.defvjp(scan.forward_and_saved, scan.backward)
    return run(x, params)


def _layer_of(stacked: Tree, row: Any) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), stacked)


def _without_integers(weights: Tree, gradients: Tree) -> list[jax.Array]:
    """Returns the gradients of weights that have one: quantised weights in integers do not, and a scan carries none."""
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(gradients), strict=True)
    return [g for w, g in pairs if jnp.issubdtype(w.dtype, jnp.inexact)]


def _with_integers(weights: Tree, gradients: list[jax.Array]) -> Tree:
    """Inverts `_without_integers`."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(weights)
    rest = iter(gradients)
    no_gradient = jax.dtypes.float0
    return treedef.unflatten(
        [next(rest) if jnp.issubdtype(w.dtype, jnp.inexact) else np.zeros(w.shape, no_gradient) for w in leaves]
    )


class _Scan:
    """Forward and backward pass of one stack."""

    def __init__(self, layer: WeightsLayer, gathers: tuple[Gather, Gather], index_L: jax.Array, remat: str):
        self.layer = checkpoint_layer(lambda x, first, rest, index: layer(x, {**first, **rest}, index), remat)
        self.gather_first, self.gather_rest = gathers
        self.index_L, self.length = jnp.asarray(index_L), index_L.shape[0]
        # Structure of a layer's residuals: the forward pass is traced first.
        self.residuals: Any = None
        self.sources: list[int | None] = []

    def _rows(self, *stacked: Tree) -> Any:
        return (jnp.arange(self.length), self.index_L, *stacked)

    def _scan(self, run_layer: Callable[..., Any], x: jax.Array, params: tuple[Tree, Tree]) -> tuple[Any, Any]:
        """Returns x after all layers, and what `run_layer(x, first, rest, index) -> (x, outputs)` returns of each."""
        first, rest = params

        def step(carry: Any, inputs: Any) -> Any:
            (x, weights), (row, index, rest) = carry, inputs
            following = self.gather_first(_layer_of(first, (row + 1) % self.length))
            x, outputs = run_layer(x, weights, self.gather_rest(rest), index)
            return (x, following), outputs

        (x, _), outputs = lax.scan(step, (x, self.gather_first(_layer_of(first, 0))), self._rows(rest))
        return x, outputs

    def forward(self, x: jax.Array, params: tuple[Tree, Tree]) -> tuple[jax.Array, Any]:
        return self._scan(self.layer, x, params)

    def forward_and_saved(self, x: jax.Array, params: tuple[Tree, Tree]) -> tuple[Any, Any]:
        def run_layer(x: jax.Array, first: Tree, rest: Tree, index: jax.Array) -> Any:
            (x, aux), vjp = jax.vjp(lambda *args: self.layer(*args, index), x, first, rest)
            return x, (aux, self._take_residuals(vjp, (first, rest)))

        x, (aux, saved) = self._scan(run_layer, x, params)
        return (x, aux), (params, saved)

    def _take_residuals(self, vjp: Any, weights: Any) -> list[jax.Array]:
        """Returns the residuals of a layer without its weights, which the backward pass gathers again."""
        leaves, self.residuals = jax.tree.flatten(vjp)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(weights))}
        self.sources = [places.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def _give_residuals(self, saved: list[jax.Array], weights: Any) -> Any:
        known, rest = jax.tree.leaves(weights), iter(saved)
        leaves = [next(rest) if source is None else known[source] for source in self.sources]
        return jax.tree.unflatten(self.residuals, leaves)

    def backward(self, kept: Any, g: Any) -> tuple[jax.Array, tuple[Tree, Tree]]:
        ((first, rest), saved), (g_x, g_aux) = kept, g

        def step(carry: Any, inputs: Any) -> Any:
            (g_x, weights, g_above), (row, _, rest, saved, g_aux) = carry, inputs
            following, scatter_first = jax.vjp(self.gather_first, _layer_of(first, (row - 1) % self.length))
            others, scatter_rest = jax.vjp(self.gather_rest, rest)
            # A gather is linear, so that of any layer reduces the gradients of the layer above.
            g_first, g_rest = _with_integers((weights, others), g_above)
            reduced = (scatter_first(g_first)[0], scatter_rest(g_rest)[0])
            g_x, *g_weights = self._give_residuals(saved, (weights, others))((g_x, g_aux))
            return (g_x, following, _without_integers((weights, others), tuple(g_weights))), reduced

        last = (_layer_of(first, self.length - 1), _layer_of(rest, self.length - 1))
        weights, scatter_first = jax.vjp(self.gather_first, last[0])
        others, scatter_rest = jax.vjp(self.gather_rest, last[1])
        zeros = _without_integers((weights, others), jax.tree.map(jnp.zeros_like, (weights, others)))
        start = (g_x, weights, zeros)
        (g_x, _, g_below), g_params = lax.scan(step, start, self._rows(rest, saved, g_aux), reverse=True)
        # Row l of the scan has reduced the gradients of row l + 1; row 0 is still to be reduced.
        g_first, g_rest = _with_integers((weights, others), g_below)
        row_0 = (scatter_first(g_first)[0], scatter_rest(g_rest)[0])
        shifted = jax.tree.map(lambda row, rows: jnp.concatenate([row[None], rows[:-1]]), row_0, g_params)
        return g_x, shifted

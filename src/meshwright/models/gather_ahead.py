"""Scan over layers in which weights and gradients travel during the computation of another layer.

Most gathers of a layer overlap with the matmuls before them. Those of the weights that a layer needs first have nothing
before them, and their gradients, which its backward pass computes last, have nothing after them. Here the scan's carry
holds the first weights of the next layer, already gathered, and in the backward pass the gradients of those of the
layer above, not yet reduced: both travel during the computation of a layer. Other gradients are reduced in their own
layer, during the rest of its backward pass: carried they would be copied, a layer's gradients once more.

Plain autodiff would save the gathered weights of every layer. This scan has a derivative of its own, which gathers them
again and saves what the remat policy names. Its price is memory for the first weights of another layer, and for their
gradients.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.params import Tree

Gather = Callable[[Tree], Tree]
"""`sharded parameters of one layer -> weights`."""


def scan_layers_ahead(
    layer: Callable[..., tuple[jax.Array, Any]],
    gathers: tuple[Gather, Gather],
    x: jax.Array,
    params: tuple[Tree, Tree],
    index_L: jax.Array,
    *,
    remat: str,
) -> tuple[jax.Array, Any]:
    """Scans `layer` over stacked layers; returns x and the stacked aux, [L, ...].

    layer: `(x, weights, layer index) -> (x, aux)`.  params: two dictionaries of the layers' sharded parameters, with a
    leading dimension L: those that are gathered one layer ahead, and the others.  gathers: of each of the two.
    index_L: index of each layer in the model, int32.  remat: a policy that recomputes (models/remat.py).
    """
    gather_first, gather_rest = gathers
    index_L, length = jnp.asarray(index_L), index_L.shape[0]
    body = checkpoint_layer(lambda x, first, rest, index: layer(x, {**first, **rest}, index), remat)
    # Structure of a layer's residuals, and for each the weight that it is: the forward pass is traced first.
    structure: list[Any] = []

    def row_of(stacked: Tree, row: Any) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), stacked)

    def scan(run_layer: Callable[..., Any], x: jax.Array, params: tuple[Tree, Tree]) -> tuple[Any, Any]:
        """Returns x after all layers, and what `run_layer(x, first, rest, index) -> (x, outputs)` returns of each."""
        first, rest = params

        def step(carry: Any, inputs: Any) -> Any:
            (x, weights), (row, index, rest) = carry, inputs
            following = gather_first(row_of(first, (row + 1) % length))
            x, outputs = run_layer(x, weights, gather_rest(rest), index)
            return (x, following), outputs

        (x, _), outputs = lax.scan(step, (x, gather_first(row_of(first, 0))), (jnp.arange(length), index_L, rest))
        return x, outputs

    def forward(x: jax.Array, params: tuple[Tree, Tree]) -> tuple[Any, Any]:
        def run_layer(x: jax.Array, first: Tree, rest: Tree, index: jax.Array) -> Any:
            (x, aux), vjp = jax.vjp(lambda *args: body(*args, index), x, first, rest)
            leaves, treedef = jax.tree.flatten(vjp)
            # The backward pass gathers the weights again: of a layer's residuals the others are saved.
            places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((first, rest)))}
            sources = [places.get(id(leaf)) for leaf in leaves]
            structure[:] = treedef, sources
            return x, (aux, [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None])

        x, (aux, saved) = scan(run_layer, x, params)
        return (x, aux), (params, saved)

    def backward(kept: Any, g: Any) -> tuple[jax.Array, tuple[Tree, Tree]]:
        ((first, rest), saved), (g_x, g_aux) = kept, g
        treedef, sources = structure

        def step(carry: Any, inputs: Any) -> Any:
            (g_x, weights, g_above), (row, _, rest, saved, g_aux) = carry, inputs
            following, scatter_first = jax.vjp(gather_first, row_of(first, (row - 1) % length))
            others, scatter_rest = jax.vjp(gather_rest, rest)
            # A gather is linear, so that of any layer reduces the gradients of the layer above.
            (above,) = scatter_first(_with_integers(weights, g_above))
            known, own = jax.tree.leaves((weights, others)), iter(saved)
            leaves = [next(own) if source is None else known[source] for source in sources]
            g_x, g_first, g_rest = jax.tree.unflatten(treedef, leaves)((g_x, g_aux))
            return (g_x, following, _without_integers(weights, g_first)), (above, scatter_rest(g_rest)[0])

        weights, scatter_first = jax.vjp(gather_first, row_of(first, length - 1))
        zeros = _without_integers(weights, jax.tree.map(jnp.zeros_like, weights))
        rows = (jnp.arange(length), index_L, rest, saved, g_aux)
        (g_x, _, g_below), (g_first, g_rest) = lax.scan(step, (g_x, weights, zeros), rows, reverse=True)
        # Row l of the scan has reduced the first gradients of row l + 1; those of row 0 are still to be reduced.
        (row_0,) = scatter_first(_with_integers(weights, g_below))
        return g_x, (jax.tree.map(lambda row, rows: jnp.concatenate([row[None], rows[:-1]]), row_0, g_first), g_rest)

    run = jax.custom_vjp(lambda x, params: scan(body, x, params))
    run.defvjp(forward, backward)
    return run(x, params)


def _without_integers(weights: Tree, gradients: Tree) -> list[jax.Array]:
    """Returns the gradients of weights that have one: quantised weights in integers do not, and a scan carries none."""
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(gradients), strict=True)
    return [g for w, g in pairs if jnp.issubdtype(w.dtype, jnp.inexact)]


def _with_integers(weights: Tree, gradients: list[jax.Array]) -> Tree:
    """Inverts `_without_integers`."""
    rest, none = iter(gradients), jax.dtypes.float0
    return jax.tree.map(
        lambda w: next(rest) if jnp.issubdtype(w.dtype, jnp.inexact) else np.zeros(w.shape, none), weights
    )

"""Scan over layers in which weights and gradients travel during the computation of another layer.

Most gathers of a layer overlap with the matmuls before them. Those of the weights that a pass needs first have nothing
before them, and the gradients that a layer's backward pass computes last have nothing after them. Here the carry of
each pass holds the first weights of its next layer, gathered, and that of the backward pass the last gradients of the
layer above, not yet reduced: both travel during a layer's computation. Other gradients are reduced in their own layer,
during the rest of its backward pass: carried they would be copied.

Plain autodiff would save the gathered weights of every layer. This scan has a derivative of its own, which gathers them
again and saves what the remat policy names. Its price is memory for weights and gradients of another layer.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.params import Tree


def scan_layers_ahead(
    layer: Callable[..., tuple[jax.Array, Any]],
    gather: Callable[[Tree], Tree],
    x: jax.Array,
    params: Tree,
    ahead: tuple[Collection[str], Collection[str]],
    index_L: jax.Array,
    *,
    remat: str,
) -> tuple[jax.Array, Any]:
    """Scans `layer` over stacked layers; returns x and the stacked aux, [L, ...].

    layer: `(x, weights, layer index) -> (x, aux)`.  gather: `parameters of one layer -> weights`, of any of them.
    params: sharded, by name, with a leading dimension L.  ahead: names of those that the forward pass gathers one layer
    ahead, whose gradients are the last, and of those that the backward pass gathers ahead.  index_L: index of each
    layer in the model, int32.  remat: a policy that recomputes (models/remat.py).
    """
    index_L, length = jnp.asarray(index_L), index_L.shape[0]
    forward_names, backward_names = ahead
    body = checkpoint_layer(layer, remat)
    # Structure of a layer's residuals, and for each the weight that it is: the forward pass is traced first.
    structure: list[Any] = []

    def row_of(stacked: Tree, row: Any) -> Tree:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), stacked)

    def scan(run_layer: Callable[..., Any], x: jax.Array, params: Tree) -> tuple[Any, Any]:
        """Returns x after all layers, and what `run_layer(x, weights, index) -> (x, outputs)` returns of each."""
        first, rest = _split(params, forward_names)

        def step(carry: Any, inputs: Any) -> Any:
            (x, weights), (row, index, rest) = carry, inputs
            following = gather(row_of(first, (row + 1) % length))
            x, outputs = run_layer(x, {**weights, **gather(rest)}, index)
            return (x, following), outputs

        (x, _), outputs = lax.scan(
            step, (x, gather(row_of(first, 0))), (jnp.arange(length), index_L, rest)
        )
        return x, outputs

    def forward(x: jax.Array, params: Tree) -> tuple[Any, Any]:
        def run_layer(x: jax.Array, weights: Tree, index: jax.Array) -> Any:
            (x, aux), vjp = jax.vjp(lambda x, weights: body(x, weights, index), x, weights)
            leaves, treedef = jax.tree.flatten(vjp)
            # The backward pass gathers the weights again: of a layer's residuals the others are saved.
            places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(weights))}
            sources = [places.get(id(leaf)) for leaf in leaves]
            structure[:] = treedef, sources
            return x, (
                aux,
                [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None],
            )

        x, (aux, saved) = scan(run_layer, x, params)
        return (x, aux), (params, saved)

    def backward(kept: Any, g: Any) -> tuple[jax.Array, Tree]:
        (params, saved), (g_x, g_aux) = kept, g
        treedef, sources = structure
        (first, rest), (late, early) = _split(params, backward_names), _split(params, forward_names)
        # Not before this pass: the weights would be there while the layers after these have theirs.
        g_x, last = lax.optimization_barrier((g_x, row_of(first, length - 1)))
        like, scatter = jax.vjp(gather, row_of(late, 0))

        def reduced(late: list[jax.Array]) -> Tree:
            # A gather is linear, so that of any layer reduces the gradients of all.
            return scatter(_with_integers(like, late))[0]

        def step(carry: Any, inputs: Any) -> Any:
            (g_x, weights, g_above), (row, rest, saved, g_aux) = carry, inputs
            following = gather(row_of(first, (row - 1) % length))
            above = reduced(g_above)
            known, own = jax.tree.leaves({**weights, **gather(rest)}), iter(saved)
            leaves = [next(own) if source is None else known[source] for source in sources]
            g_x, g = jax.tree.unflatten(treedef, leaves)((g_x, g_aux))
            g_late, g_early = _split(g, forward_names)
            g_early = jax.vjp(gather, row_of(early, row))[1](g_early)[0]
            return (g_x, following, _without_integers(g_late)), (above, g_early)

        rows = (jnp.arange(length), rest, saved, g_aux)
        carry = (g_x, gather(last), _without_integers(jax.tree.map(jnp.zeros_like, like)))
        (g_x, _, g_below), (g_late, g_early) = lax.scan(step, carry, rows, reverse=True)
        # Row l of the scan has reduced the late gradients of row l + 1; those of row 0 are still to be reduced.
        g_late = jax.tree.map(
            lambda row, rows: jnp.concatenate([row[None], rows[:-1]]), reduced(g_below), g_late
        )
        return g_x, {**g_late, **g_early}

    run = jax.custom_vjp(lambda x, params: scan(body, x, params))
    run.defvjp(forward, backward)
    return run(x, params)


def _split(tree: Tree, names: Collection[str]) -> tuple[Tree, Tree]:
    """Returns the entries of these names, and the others."""
    return {n: v for n, v in tree.items() if n in names}, {
        n: v for n, v in tree.items() if n not in names
    }


def _without_integers(gradients: Tree) -> list[jax.Array]:
    """Returns the gradients of weights that have one: quantised weights in integers do not, and a scan carries none."""
    return [g for g in jax.tree.leaves(gradients) if jnp.issubdtype(g.dtype, jnp.inexact)]


def _with_integers(weights: Tree, gradients: list[jax.Array]) -> Tree:
    """Inverts `_without_integers`."""
    rest, none = iter(gradients), jax.dtypes.float0
    return jax.tree.map(
        lambda w: next(rest) if jnp.issubdtype(w.dtype, jnp.inexact) else np.zeros(w.shape, none),
        weights,
    )

"""Scan over layers that gathers ahead: the next layer's first weights travel while this layer computes.

Most gathers of a layer overlap with the matmuls before them. Those of the weights that a layer needs first have nothing
before them, and the gradients that its backward pass computes last have nothing after them. Here the scan's carry holds
the first weights of the next layer, already gathered, and in the backward pass the last gradients of the layer above,
not yet reduced: both travel beside a whole layer of computation.

Plain autodiff would save the gathered weights of every layer. This scan has a derivative of its own, which gathers them
again and saves what the remat policy names.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.params import Param, Tree

Gather = Callable[[Tree], Tree]
"""`sharded parameters of one layer -> weights`."""
AheadLayer = Callable[[jax.Array, Tree, Tree, jax.Array], tuple[jax.Array, Any]]
"""`(x, weights gathered ahead, other sharded parameters, layer index) -> (x, aux)`."""


def gathered_ahead(params: dict[str, Param]) -> tuple[str, ...]:
    """Returns the parameters of a layer that it needs first: all but those of its later matmuls."""
    later = ("attention_out", "ffn_in", "ffn_out")
    return tuple(name for name, p in params.items() if getattr(p, "role", None) not in later)


def scan_layers_ahead(
    layer: AheadLayer, gather: Gather, x: jax.Array, ahead: Tree, rest: Tree, index_L: jax.Array, *, remat: str
) -> tuple[jax.Array, Any]:
    """Scans `layer` over stacked layers; returns x and the stacked aux, [L, ...].

    gather: of the parameters `ahead`.  ahead, rest: the layers' sharded parameters with a leading dimension L.
    index_L: index of each layer in the model, int32.  remat: a policy that recomputes (models/remat.py).
    """
    scan = _Scan(layer, gather, index_L, remat)

    @jax.custom_vjp
    def run(x: jax.Array, ahead: Tree, rest: Tree) -> tuple[jax.Array, Any]:
        return scan.forward(x, ahead, rest)

    run.defvjp(scan.forward_and_saved, scan.backward)
    return run(x, ahead, rest)


def _layer_of(stacked: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), stacked)


class _Scan:
    """Forward and backward pass of one stack."""

    def __init__(self, layer: AheadLayer, gather: Gather, index_L: jax.Array, remat: str):
        self.layer, self.gather = checkpoint_layer(layer, remat), gather
        self.index_L, self.length = jnp.asarray(index_L), index_L.shape[0]
        # Structure of a layer's residuals: the forward pass is traced first.
        self.residuals: Any = None
        self.sources: list[int | None] = []

    def forward(self, x: jax.Array, ahead: Tree, rest: Tree) -> tuple[jax.Array, Any]:
        def step(carry: Any, inputs: Any) -> Any:
            (x, weights), (row, index, rest) = carry, inputs
            following = self.gather(_layer_of(ahead, (row + 1) % self.length))
            x, aux = self.layer(x, weights, rest, index)
            return (x, following), aux

        (x, _), aux = lax.scan(step, (x, self.gather(_layer_of(ahead, 0))), self._rows(rest))
        return x, aux

    def _rows(self, *stacked: Tree) -> Any:
        return (jnp.arange(self.length), self.index_L, *stacked)

    def forward_and_saved(self, x: jax.Array, ahead: Tree, rest: Tree) -> tuple[Any, Any]:
        def step(carry: Any, inputs: Any) -> Any:
            (x, weights), (row, index, rest) = carry, inputs
            following = self.gather(_layer_of(ahead, (row + 1) % self.length))
            (x, aux), vjp = jax.vjp(lambda *args: self.layer(*args, index), x, weights, rest)
            return (x, following), (aux, self._take_residuals(vjp, (weights, rest)))

        (x, _), (aux, saved) = lax.scan(step, (x, self.gather(_layer_of(ahead, 0))), self._rows(rest))
        return (x, aux), (ahead, rest, saved)

    def _take_residuals(self, vjp: Any, given: Any) -> list[jax.Array]:
        """Returns the residuals of a layer, without weights and parameters, which the backward pass has anyway."""
        leaves, self.residuals = jax.tree.flatten(vjp)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(given))}
        self.sources = [places.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, source in zip(leaves, self.sources, strict=True) if source is None]

    def _give_residuals(self, saved: list[jax.Array], given: Any) -> Any:
        known, rest = jax.tree.leaves(given), iter(saved)
        leaves = [next(rest) if source is None else known[source] for source in self.sources]
        return jax.tree.unflatten(self.residuals, leaves)

    def backward(self, kept: Any, g: Any) -> tuple[jax.Array, Tree, Tree]:
        (ahead, rest, saved), (g_x, g_aux) = kept, g

        def step(carry: Any, inputs: Any) -> Any:
            (g_x, weights, g_above), (row, _, rest, saved, g_aux) = carry, inputs
            following, scatter = jax.vjp(self.gather, _layer_of(ahead, (row - 1) % self.length))
            # A gather is linear, so that of any layer reduces the gradients of the layer above.
            (g_ahead,) = scatter(g_above)
            g_x, g_weights, g_rest = self._give_residuals(saved, (weights, rest))((g_x, g_aux))
            return (g_x, following, g_weights), (g_ahead, g_rest)

        weights, scatter = jax.vjp(self.gather, _layer_of(ahead, self.length - 1))
        start = (g_x, weights, jax.tree.map(jnp.zeros_like, weights))
        (g_x, _, g_first), (g_ahead, g_rest) = lax.scan(step, start, self._rows(rest, saved, g_aux), reverse=True)
        # Row l of the scan has reduced the gradients of row l + 1.
        first = scatter(g_first)[0]
        g_ahead = jax.tree.map(lambda f, g: jnp.concatenate([f[None], g[:-1]]), first, g_ahead)
        return g_x, g_ahead, g_rest

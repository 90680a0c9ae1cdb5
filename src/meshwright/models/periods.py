"""Scan over layers of several kinds that repeat: local and global attention, rotary or none.

An iteration of the loop is one period, its layers written out one after another. So every layer is compiled with its
own mask and frequencies, and computes nothing of another kind; kernels, census and planner see it as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.remat import checkpoint_layer

KindOfLayer = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""`(x, params, index) -> (x, aux)`."""


def scan_periods(
    period: Sequence[KindOfLayer], x: jax.Array, stacked: Any, index_L: Any, *, remat: str, unroll: int
) -> tuple[jax.Array, Any]:
    """Scans layers whose kinds repeat; returns x and the stacked aux, [L, ...].

    period: the kinds, in order.  stacked: the layers' parameters with a leading dimension L.  index_L: index of each
    layer in the model, int32.  remat: a row of REMAT_POLICIES.
    unroll: layers per iteration, of which there is a period at least. Layers after the last whole period are one more
    iteration.
    """
    bodies = [checkpoint_layer(layer, remat) for layer in period]
    inputs = (stacked, jnp.asarray(index_L))
    rows, size = inputs[1].shape[0], len(bodies)
    whole = rows - rows % size
    outputs = []
    for part, kinds in ((slice(0, whole), bodies), (slice(whole, rows), bodies[: rows - whole])):
        if part.stop > part.start:
            x, aux = _scan_whole(kinds, x, jax.tree.map(lambda a, part=part: a[part], inputs), max(1, unroll // size))
            outputs.append(aux)
    return x, outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *outputs)


def _scan_whole(bodies: Sequence[KindOfLayer], x: jax.Array, inputs: Any, unroll: int) -> tuple[jax.Array, Any]:
    """Scans whole periods. inputs: what each layer takes besides x, [L, ...]."""
    size = len(bodies)

    def step(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        outputs = []
        for i, body in enumerate(bodies):
            x, aux = body(x, *jax.tree.map(lambda a, i=i: a[i], inputs))
            outputs.append(aux)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *outputs)

    x, aux = jax.lax.scan(step, x, jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), inputs), unroll=unroll)
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)

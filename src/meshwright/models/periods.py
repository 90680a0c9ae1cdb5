"""Scan over layers of several kinds that repeat: local and global attention, rotary or none, dense or with experts.

An iteration of the loop is one period, its layers written out one after another. So every layer is compiled with its
own mask and frequencies, and computes nothing of another kind; kernels, census and planner see it as it is. Kinds with
the same parameters are rows of one stack; those with other parameters are rows of another, which takes turns with it.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.model import ModelSpec
from meshwright.models.remat import checkpoint_layer

KindOfLayer = Callable[[jax.Array, Any, Any], tuple[Any, Any]]
"""`(x, params, index) -> (x, aux)`."""
Kind = tuple[str, KindOfLayer]
"""Stack of a layer, and its function."""


def scan_periods(
    period: Sequence[KindOfLayer], x: Any, stacked: Any, index_L: Any, *, remat: str, unroll: int
) -> tuple[Any, Any]:
    """Scans layers of one stack whose kinds repeat; returns x and the stacked aux, [L, ...].

    period: the kinds, in order.  stacked: the layers' parameters with a leading dimension L.  index_L: index of each
    layer in the model, int32.  remat: a row of REMAT_POLICIES.
    unroll: layers per iteration, of which there is a period at least. Layers after the last whole period are one more
    iteration.
    """
    kinds = [("", layer) for layer in period]
    x, aux = scan_stacks(kinds, x, {"": stacked}, {"": index_L}, remat=remat, unroll=unroll)
    return x, aux[""]


def kinds_of(spec: ModelSpec, functions: Mapping[str, Sequence[Any]]) -> list[Kind]:
    """Returns stack and function of each layer of a period. functions: of each stack, those of its own turns."""
    turns = {stack: iter(functions[stack]) for stack in spec.stacks}
    return [(layer.stack, next(turns[layer.stack])) for layer in spec.layers[: spec.period]]


def scan_stacks(
    period: Sequence[Kind], x: Any, stacked: Mapping[str, Any], index: Mapping[str, Any], *, remat: str, unroll: int
) -> tuple[Any, dict[str, Any]]:
    """Scans layers of stacks that take turns; returns x and the stacked aux of each stack.

    period: stack and function of each layer, in order.  stacked: parameters of each stack, rows in the order of its
    layers.  index: index of each row's layer in the model, or a tree of such arrays.  remat, unroll: as `scan_periods`.
    """
    bodies = [(stack, checkpoint_layer(layer, remat)) for stack, layer in period]
    inputs = {stack: (stacked[stack], jax.tree.map(jnp.asarray, index[stack])) for stack in stacked}
    rows = {stack: jax.tree.leaves(both)[0].shape[0] for stack, both in inputs.items()}
    turns = collections.Counter(stack for stack, _ in period)
    periods = min(rows[stack] // count for stack, count in turns.items())
    left = {stack: rows[stack] - periods * count for stack, count in turns.items()}
    last = []
    for stack, body in bodies:
        if left[stack]:
            left[stack] -= 1
            last.append((stack, body))
    assert not any(left.values()), f"{rows} rows are no periods of {dict(turns)} and a part of one"
    outputs: list[dict[str, Any]] = []
    for kinds, first, count in ((bodies, 0, periods), (last, periods, 1)):
        if kinds and count:
            starts = {stack: first * turns[stack] for stack in inputs}
            x, aux = _scan_whole(kinds, x, inputs, starts, count, max(1, unroll // len(bodies)))
            outputs.append(aux)
    return x, _join(outputs)


def scan_stacks_in_parts(
    spec: ModelSpec,
    functions: Mapping[str, Sequence[Any]],
    x: Any,
    stacked: Mapping[str, Any],
    index: Mapping[str, Any],
    parts: Sequence[tuple[slice, str]],
    unroll: int,
) -> tuple[Any, dict[str, Any]]:
    """Scans stacks that take turns as `scan_stacks` does, in parts with a remat policy each.

    functions: as `kinds_of` takes them.  parts: layers of each part, in order, and its policy.
    """
    kinds, outputs = kinds_of(spec, functions), []
    for part, remat in parts:
        # A part that does not begin with a period begins inside of one.
        at = (part.start or 0) % spec.period
        here = ({stack: _rows_of(spec, stack, part, tree[stack]) for stack in spec.stacks} for tree in (stacked, index))
        x, aux = scan_stacks(kinds[at:] + kinds[:at], x, *here, remat=remat, unroll=unroll)
        outputs.append(aux)
    return x, _join(outputs)


def _rows_of(spec: ModelSpec, stack: str, part: slice, tree: Any) -> Any:
    """Returns the rows of a stack whose layers are in a part of the model."""
    start, stop = (
        None if end is None else sum(layer < end for layer in spec.layers_of(stack)) for end in (part.start, part.stop)
    )
    return jax.tree.map(lambda a: a[start:stop], tree)


def _join(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the aux of each stack over all parts that have some."""
    found = {}
    for stack in dict.fromkeys(stack for aux in outputs for stack in aux):
        parts = [aux[stack] for aux in outputs if stack in aux]
        found[stack] = parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return found


def _scan_whole(
    bodies: Sequence[Kind], x: Any, inputs: Mapping[str, Any], starts: Mapping[str, int], count: int, unroll: int
) -> tuple[Any, dict[str, Any]]:
    """Scans `count` iterations. inputs: what each layer of a stack takes besides x.  starts: first row of each."""
    turns = collections.Counter(stack for stack, _ in bodies)

    def iterations(stack: str, a: jax.Array) -> jax.Array:
        rows = a[starts[stack] : starts[stack] + count * turns[stack]]
        return rows.reshape(count, turns[stack], *a.shape[1:])

    def step(x: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs: dict[str, list[Any]] = {stack: [] for stack in turns}
        for stack, body in bodies:
            i = len(outputs[stack])
            x, aux = body(x, *jax.tree.map(lambda a, i=i: a[i], inputs[stack]))
            outputs[stack].append(aux)
        return x, {stack: jax.tree.map(lambda *a: jnp.stack(a), *aux) for stack, aux in outputs.items()}

    by_iteration = {stack: jax.tree.map(lambda a, s=stack: iterations(s, a), inputs[stack]) for stack in turns}
    x, aux = jax.lax.scan(step, x, by_iteration, unroll=unroll)
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)

"""Scan over the layers of a model: stacks, kinds of layers that repeat, and padding rows of uneven pipeline stages.

An iteration of the loop is one period of layers, written out one after another: every layer is compiled with its own
mask and frequencies. Kinds with the same parameters are rows of one stack; kinds with other parameters are rows of
another stack, which takes turns with it.
"""

import collections
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.model import Aux, Layer, ModelSpec
from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.stages import NO_LAYER

Kind = tuple[str, Callable[..., tuple[Any, Any]]]
"""Stack of a layer, and its function `(x, params, index) -> (x, aux)`."""


def sections(spec: ModelSpec, functions: Mapping[str, Any]) -> list[list[Kind]]:
    """Returns the periods of layers that follow each other: one of all stacks if these take turns, else one per stack.

    functions: of each stack, as `Model.layer_functions` returns them.
    """
    periods = {stack: given if isinstance(given, Sequence) else (given,) for stack, given in functions.items()}
    if not spec.interleaved:
        return [[(stack, layer) for layer in periods[stack]] for stack in spec.stacks]
    turns = {stack: iter(period) for stack, period in periods.items()}
    return [[(layer.stack, next(turns[layer.stack])) for layer in spec.layers[: spec.period]]]


def layers_in(spec: ModelSpec, section: Sequence[Kind]) -> tuple[int, int]:
    """Returns the first layer of a section and the number of its layers."""
    layers = [layer for stack in {stack for stack, _ in section} for layer in spec.layers_of(stack)]
    return min(layers), len(layers)


def rows_in(spec: ModelSpec, first: int, part: slice, trees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rows of each stack that belong to a part of a section. first: the section's first layer."""

    def rows(stack: str) -> slice:
        layers, ends = spec.layers_of(stack), (part.start, part.stop)
        return slice(*(None if end is None else sum(layer < first + end for layer in layers) for end in ends))

    return {stack: jax.tree.map(operator.itemgetter(rows(stack)), tree) for stack, tree in trees.items()}


def scan_layers(
    period: Sequence[Kind],
    x: Any,
    stacked: Mapping[str, Any],
    index: Mapping[str, Any],
    *,
    remat: str = "none",
    unroll: int = 1,
) -> tuple[Any, dict[str, Any]]:
    """Scans layers whose kinds repeat; returns x and the aux of each stack, [L, ...].

    stacked: parameters of each stack, with a leading dimension of rows.  index: index of each row's layer in the model,
    int32, or a tree of such arrays.  remat: a row of REMAT_POLICIES.  unroll: layers per iteration, at least a period.
    Layers after the last complete period are one more iteration.
    """
    bodies = [(stack, checkpoint_layer(layer, remat)) for stack, layer in period]
    if len(bodies) == 1:
        ((stack, body),) = bodies
        x, aux = jax.lax.scan(lambda x, rest: body(x, *rest), x, (stacked[stack], index[stack]), unroll=unroll)
        return x, {stack: aux}
    turns = collections.Counter(stack for stack, _ in period)
    inputs = {stack: (stacked[stack], jax.tree.map(jnp.asarray, index[stack])) for stack in turns}
    rows = {stack: jax.tree.leaves(both)[0].shape[0] for stack, both in inputs.items()}
    periods = min(rows[stack] // count for stack, count in turns.items())
    left = {stack: rows[stack] - periods * count for stack, count in turns.items()}
    last = []
    for stack, body in bodies:
        if left[stack]:
            left[stack] -= 1
            last.append((stack, body))
    assert not any(left.values()), f"{rows} rows are not periods of {dict(turns)} and a part of one"
    outputs: list[dict[str, Any]] = []
    for kinds, first, count in ((bodies, 0, periods), (last, periods, 1)):
        if kinds and count:
            starts = {stack: first * turns[stack] for stack in inputs}
            x, found = _scan_periods(kinds, x, inputs, starts, count, max(1, unroll // len(bodies)))
            outputs.append(found)
    return x, join(outputs)


def _scan_periods(
    bodies: Sequence[Kind], x: Any, inputs: Mapping[str, Any], starts: Mapping[str, int], count: int, unroll: int
) -> tuple[Any, dict[str, Any]]:
    """Scans `count` periods. inputs: arguments of a stack's layers besides x.  starts: first row of each stack."""
    turns = collections.Counter(stack for stack, _ in bodies)

    def by_period(stack: str, a: jax.Array) -> jax.Array:
        rows = a[starts[stack] : starts[stack] + count * turns[stack]]
        return rows.reshape(count, turns[stack], *a.shape[1:])

    def step(x: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs: dict[str, list[Any]] = {stack: [] for stack in turns}
        for stack, body in bodies:
            i = len(outputs[stack])
            x, aux = body(x, *jax.tree.map(lambda a, i=i: a[i], inputs[stack]))
            outputs[stack].append(aux)
        return x, {stack: jax.tree.map(lambda *a: jnp.stack(a), *aux) for stack, aux in outputs.items()}

    x, aux = jax.lax.scan(
        step, x, {s: jax.tree.map(lambda a, s=s: by_period(s, a), inputs[s]) for s in turns}, unroll=unroll
    )
    return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)


def join(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the aux of each stack over all parts that have some."""
    parts: dict[str, list[Any]] = {}
    for aux in outputs:
        for stack, value in aux.items():
            parts.setdefault(stack, []).append(value)
    return {s: v[0] if len(v) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *v) for s, v in parts.items()}


def skip_padding(layer: Layer) -> Layer:
    """Returns `layer` for a stack with padding rows: these are the identity and return zero aux."""

    def maybe(x_BTD: jax.Array, params: Any, index: jax.Array) -> tuple[jax.Array, Aux]:
        aux = jax.eval_shape(layer, x_BTD, params, index)[1]
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
        return jax.lax.cond(index == NO_LAYER, lambda: (x_BTD, zeros), lambda: layer(x_BTD, params, index))

    return maybe


def drop_padding(layer: Layer) -> Layer:
    """Returns `layer` as `skip_padding` does, computed in padding rows too and dropped there.

    For layers that send values around a ring, in which the devices of all stages have to take part.
    """

    def dropped(x_BTD: jax.Array, params: Any, index: jax.Array) -> tuple[jax.Array, Aux]:
        y_BTD, aux = layer(x_BTD, params, index)
        padding = index == NO_LAYER
        return jnp.where(padding, x_BTD, y_BTD), jax.tree.map(lambda a: jnp.where(padding, jnp.zeros_like(a), a), aux)

    return dropped

"""Scan over the layers of a model: stacks, kinds of layers that repeat, and padding rows of uneven pipeline stages.

An iteration of the loop is one period of layers, written out one after another: every layer is compiled with its own
mask and frequencies. Kinds with the same parameters are rows of one stack; kinds with other parameters are rows of
another stack, which takes turns with it.
"""

import collections
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models.model import Aux, Layer, ModelSpec
from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.stages import NO_LAYER

Turn = tuple[str, Callable[..., tuple[Any, Any]]]
"""Stack of a layer, and its function `(x, params, index) -> (x, aux)`."""


class Section(NamedTuple):
    """Layers that repeat one period."""

    period: list[Turn]
    first: int
    """First layer of the section in the model."""
    layers: int

    @property
    def stacks(self) -> list[str]:
        """Stacks that hold its layers."""
        return list(dict.fromkeys(stack for stack, _ in self.period))

    def rows(self, spec: ModelSpec, part: slice, trees: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the rows of its stacks that belong to a part of its layers."""

        def rows(stack: str) -> slice:
            layers, ends = spec.layers_of(stack), (part.start, part.stop)
            return slice(*(None if end is None else sum(layer < self.first + end for layer in layers) for end in ends))

        return {stack: jax.tree.map(operator.itemgetter(rows(stack)), trees[stack]) for stack in self.stacks}


def sections(
    spec: ModelSpec, functions: Mapping[str, Any], wrap: Callable[[str, Layer], Any] = lambda stack, layer: layer
) -> list[Section]:
    """Returns the sections of a model in order: one of all stacks if these take turns, else one per stack.

    functions: of each stack, as `Model.layer_functions` returns them.  wrap: applied to each.
    """
    periods = {
        stack: [(stack, wrap(stack, layer)) for layer in (given if isinstance(given, Sequence) else (given,))]
        for stack, given in functions.items()
    }
    if spec.period > 1 and len(spec.stacks) > 1:
        turns = {stack: iter(period) for stack, period in periods.items()}
        return [Section([next(turns[layer.stack]) for layer in spec.layers[: spec.period]], 0, len(spec.layers))]
    return [Section(periods[stack], min(spec.layers_of(stack)), count) for stack, count in spec.stacks.items()]


def scan_layers(
    period: Sequence[Turn],
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

    def scan(bodies: Sequence[Turn], x: Any, first: int, count: int) -> tuple[Any, dict[str, Any]]:
        """Scans `count` periods of `bodies` after the first ones."""
        here = collections.Counter(stack for stack, _ in bodies)

        def by_period(stack: str, a: jax.Array) -> jax.Array:
            start = first * turns[stack]
            return a[start : start + count * here[stack]].reshape(count, here[stack], *a.shape[1:])

        def step(x: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            outputs: dict[str, list[Any]] = {stack: [] for stack in here}
            for stack, body in bodies:
                i = len(outputs[stack])
                x, aux = body(x, *jax.tree.map(lambda a, i=i: a[i], inputs[stack]))
                outputs[stack].append(aux)
            return x, {stack: jax.tree.map(lambda *a: jnp.stack(a), *aux) for stack, aux in outputs.items()}

        grouped = {stack: jax.tree.map(lambda a, s=stack: by_period(s, a), inputs[stack]) for stack in here}
        x, aux = jax.lax.scan(step, x, grouped, unroll=max(1, unroll // len(bodies)))
        return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)

    outputs: list[dict[str, Any]] = []
    for part, first, count in ((bodies, 0, periods), (last, periods, 1)):
        if part and count:
            x, aux = scan(part, x, first, count)
            outputs.append(aux)
    return x, join(outputs)


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

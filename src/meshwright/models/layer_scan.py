"""Scans over the layers of a model: equal layers, layers of several kinds that repeat,
and those after the last period.

A stack holds the parameters of layers with equal shapes, one row for each layer. An iteration of
the loop is one period, written out one layer after another, so every layer is compiled with its own
mask and frequencies. Kinds with the same parameters are rows of one stack; kinds with other
parameters are rows of another stack, which takes turns with it.

    layers    a a b | a a b | a          period a a b, and a part of one
    stack a   0 1     2 3     4          rows, in order
    stack b       0       1
"""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models.model import Layer, ModelSpec
from meshwright.models.period_scan import PeriodScan, ReadRow, StackLayer
from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.params import Tree


class Section(NamedTuple):
    """Layers that repeat one period."""

    period: list[StackLayer]
    first: int
    """First layer of the section in the model."""
    layers: int

    @property
    def stacks(self) -> list[str]:
        """Stacks that hold its layers."""
        return list(dict.fromkeys(stack for stack, _ in self.period))

    def rows(self, spec: ModelSpec, part: slice) -> dict[str, slice]:
        """Returns the rows of its stacks that belong to a part of its layers."""
        start, stop = self.first + part.start, self.first + part.stop
        rows = {}
        for stack in self.stacks:
            layers = spec.layers_of(stack)
            before = sum(layer < start for layer in layers)
            until = sum(layer < stop for layer in layers)
            rows[stack] = slice(before, until)
        return rows


def sections(
    spec: ModelSpec,
    functions: Mapping[str, Any],
    wrap: Callable[[str, Layer], Any] = lambda stack, layer: layer,
) -> list[Section]:
    """Returns the sections of a model in order: its runs,
    or one of all stacks if these take turns, or one per stack.

    functions: of each stack, as `Model.layer_functions` returns them.  wrap: applied to each.
    """
    periods: dict[str, list[StackLayer]] = {}
    for stack, function in functions.items():
        layers = function if isinstance(function, Sequence) else (function,)
        periods[stack] = [(stack, wrap(stack, layer)) for layer in layers]
    result = list[Section]()
    if spec.runs:
        for run in spec.runs:
            layers_of_period = spec.layers[run.first : run.first + run.period]
            period = [periods[layer.stack][0] for layer in layers_of_period]
            result.append(Section(period, run.first, run.layers))
    elif spec.period > 1 and len(spec.stacks) > 1:
        following = {stack: iter(period) for stack, period in periods.items()}
        period = [next(following[layer.stack]) for layer in spec.layers[: spec.period]]
        result.append(Section(period, 0, len(spec.layers)))
    else:
        for stack, count in spec.stacks.items():
            result.append(Section(periods[stack], min(spec.layers_of(stack)), count))
    return result


def scan_layers(
    period: Sequence[StackLayer],
    x: Any,
    stacked: Mapping[str, Any] | ReadRow,
    index: Mapping[str, Any],
    *,
    rows: Mapping[str, slice] | None = None,
    remat: str = "none",
    unroll: int = 1,
    saves_weights: bool = True,
) -> tuple[Any, dict[str, Any]]:
    """Scans layers whose kinds repeat; returns x and the aux of each stack, [L, ...].

    stacked: parameters of each stack, with a leading dimension of rows, or what reads them.
    index: index of each row's layer in the model, int32, or a tree of such arrays.
    rows: of each stack that are scanned, all by default. remat: a row of REMAT_POLICIES.
    unroll: layers per iteration, at least a period; those after the last period are one more.
    saves_weights: whether a policy that saves everything saves weights too (`checkpoint_layer`).
    """
    per_period = collections.Counter(stack for stack, _ in period)
    ranges = {}
    for stack in per_period:
        every_row = range(_rows_of(index[stack]))
        ranges[stack] = every_row if rows is None else every_row[rows[stack]]
    if callable(stacked):
        # A function that reads parameters may read trained ones, whose gradients go through it.
        read_row = stacked
        params = None
        constants = {}
        checkpoint = functools.partial(checkpoint_layer, remat=remat)
    else:
        read_row = None
        checkpoint = functools.partial(checkpoint_layer, remat=remat, saves_weights=saves_weights)
        stack, layer = period[0]
        if len(period) == 1 and len(ranges[stack]) == _rows_of(index[stack]):
            body = checkpoint(layer, prevent_cse=len(ranges[stack]) == 1)
            return _scan_equal_layers(stack, body, x, stacked[stack], index[stack], unroll)
        params = {stack: stacked[stack] for stack in per_period}
        constants = jax.lax.stop_gradient(params)
    scan = PeriodScan(
        params=params,
        constants=constants,
        read_row=read_row,
        index=index,
        rows=ranges,
        per_period=per_period,
        checkpoint=checkpoint,
        unroll=unroll,
    )
    x, outputs = scan.run(period, x)
    return x, join(outputs)


def _rows_of(index: Any) -> int:
    """Returns the rows of a stack, from the index of each row's layer."""
    rows: int = jax.tree.leaves(index)[0].shape[0]
    return rows


def _scan_equal_layers(
    stack: str, body: Callable[..., Any], x: Any, params: Tree, index: Any, unroll: int
) -> tuple[Any, dict[str, Any]]:
    """Scans all rows of one stack: the loop reads its parameters row by row."""

    def step(x: Any, inputs: Any) -> tuple[Any, Any]:
        params, index = inputs
        return body(x, params, index)

    x, aux = jax.lax.scan(step, x, (params, index), unroll=unroll)
    return x, {stack: aux}


def join(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the aux of each stack over all parts that have some."""
    joined = {}
    for stack in dict.fromkeys(itertools.chain.from_iterable(outputs)):
        parts = [aux[stack] for aux in outputs if stack in aux]
        if len(parts) == 1:
            joined[stack] = parts[0]
        else:
            joined[stack] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return joined

"""Scans over the layers of a model: equal layers, layers of several kinds that repeat, and those after the last period.

A stack holds the parameters of layers with equal shapes, one row for each layer. An iteration of the loop is one period,
written out one layer after another, so every layer is compiled with its own mask and frequencies. Kinds with the same
parameters are rows of one stack; kinds with other parameters are rows of another stack, which takes turns with it.

    layers    a a b | a a b | a          period a a b, and a part of one
    stack a   0 1     2 3     4          rows, in order
    stack b       0       1
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models.model import Layer, ModelSpec
from meshwright.models.remat import checkpoint_layer
from meshwright.sharding.params import Tree

StackLayer = tuple[str, Callable[..., tuple[Any, Any]]]
"""Stack of a layer, and its function `(x, params, index) -> (x, aux)`."""
ReadRow = Callable[[str, Any], Callable[[], Tree]]
"""`(stack, number) -> what reads the parameters` of a row of the part of the stack that is run."""


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
    """Returns the sections of a model in order: one of all stacks if these take turns, else one per stack.

    functions: of each stack, as `Model.layer_functions` returns them.  wrap: applied to each.
    """
    periods: dict[str, list[StackLayer]] = {}
    for stack, function in functions.items():
        layers = function if isinstance(function, Sequence) else (function,)
        periods[stack] = [(stack, wrap(stack, layer)) for layer in layers]
    if spec.period > 1 and len(spec.stacks) > 1:
        following = {stack: iter(period) for stack, period in periods.items()}
        period = [next(following[layer.stack]) for layer in spec.layers[: spec.period]]
        return [Section(period, 0, len(spec.layers))]
    return [
        Section(periods[stack], min(spec.layers_of(stack)), count)
        for stack, count in spec.stacks.items()
    ]


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

    stacked: parameters of each stack, with a leading dimension of rows, or what reads them.  index: index of each row's
    layer in the model, int32, or a tree of such arrays.  rows: of each stack that are scanned, all by default.  remat:
    a row of REMAT_POLICIES.  unroll: layers per iteration, at least a period; those after the last period are one more.
    saves_weights: whether a policy that saves everything saves weights too (`checkpoint_layer`).
    """
    per_period = collections.Counter(stack for stack, _ in period)
    ranges = {}
    for stack in per_period:
        every = range(jax.tree.leaves(index[stack])[0].shape[0])
        ranges[stack] = every if rows is None else every[rows[stack]]
    scan = functools.partial(
        _PeriodScan, index=index, rows=ranges, per_period=per_period, unroll=unroll
    )
    if callable(stacked):
        # A function that reads parameters may read trained ones, whose gradients go through it.
        checkpoint = functools.partial(checkpoint_layer, remat=remat)
        return scan(params=None, constants={}, read_row=stacked, checkpoint=checkpoint).run(
            period, x
        )
    checkpoint = functools.partial(checkpoint_layer, remat=remat, saves_weights=saves_weights)
    if len(period) == 1:
        ((stack, layer),) = period
        if len(ranges[stack]) == jax.tree.leaves(index[stack])[0].shape[0]:
            body = checkpoint(layer, prevent_cse=len(ranges[stack]) == 1)
            return _scan_equal_layers(stack, body, x, stacked[stack], index[stack], unroll)
    params = {stack: stacked[stack] for stack in per_period}
    constants = jax.lax.stop_gradient(params)
    return scan(params=params, constants=constants, read_row=None, checkpoint=checkpoint).run(
        period, x
    )


def _scan_equal_layers(
    stack: str, body: Callable[..., Any], x: Any, params: Tree, index: Any, unroll: int
) -> tuple[Any, dict[str, Any]]:
    """Scans all rows of one stack: the loop reads its parameters row by row."""

    def step(x: Any, inputs: Any) -> tuple[Any, Any]:
        params, index = inputs
        return body(x, params, index)

    x, aux = jax.lax.scan(step, x, (params, index), unroll=unroll)
    return x, {stack: aux}


@jax.custom_vjp
def with_gradient_of(of: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, and in the backward pass its gradient as that of `of`, in its type, which is not read."""
    return value


with_gradient_of.defvjp(
    lambda of, value: (value, jnp.zeros((0,), of.dtype)),
    lambda like, g: (g.astype(like.dtype), None),
)


@dataclasses.dataclass(frozen=True)
class _PeriodScan:
    """Scan over periods of layers, whose rows may be a part of their stacks.

    A scan over rows of a stack, or over groups of them, would copy what it reads. So a layer reads its row of the
    whole stack, by number, and the rows that are scanned are there for their gradients alone (`with_gradient_of`).
    """

    params: Mapping[str, Any] | None
    """Parameters of each stack; None where `read_row` reads them."""
    constants: Mapping[str, Any]
    """The same without gradient, as layers read them."""
    read_row: ReadRow | None
    index: Mapping[str, Any]
    rows: Mapping[str, range]
    """Rows of each stack that are scanned."""
    per_period: Mapping[str, int]
    """Layers of each stack in a period."""
    checkpoint: Callable[..., Any]
    """`checkpoint_layer` with the remat policy."""
    unroll: int

    def run(self, period: Sequence[StackLayer], x: Any) -> tuple[Any, dict[str, Any]]:
        """Scans whole periods, then the layers after the last one; returns x and the aux of each stack."""
        periods = min(len(self.rows[stack]) // n for stack, n in self.per_period.items())
        remaining = collections.Counter(
            {stack: len(self.rows[stack]) - periods * n for stack, n in self.per_period.items()}
        )
        last = period[: remaining.total()]
        assert collections.Counter(stack for stack, _ in last) == remaining, (
            f"{self.rows} are not periods and a part of one"
        )
        outputs = []
        if periods:
            x, aux = self._scan(period, x, first=0, count=periods)
            outputs.append(aux)
        if last:
            x, aux = self._scan(last, x, first=periods, count=1)
            outputs.append(aux)
        return x, join(outputs)

    def _scan(
        self, layers: Sequence[StackLayer], x: Any, *, first: int, count: int
    ) -> tuple[Any, dict[str, Any]]:
        """Scans `count` iterations of `layers`, after `first` periods."""
        per_iteration = collections.Counter(stack for stack, _ in layers)
        # One iteration is inlined, and other layers of the body are recomputed beside each.
        prevent_cse = len(layers) > 1 or count == 1

        def step(x: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            outputs: dict[str, list[Any]] = {stack: [] for stack in per_iteration}
            for stack, layer in layers:
                run_row = self._layer_of_row(stack, layer, len(outputs[stack]))
                body = self.checkpoint(run_row, prevent_cse=prevent_cse)
                x, aux = body(x, inputs[stack])
                outputs[stack].append(aux)
            return x, {stack: _stack_trees(aux) for stack, aux in outputs.items()}

        grouped = {
            stack: self._iterations(stack, n, first, count) for stack, n in per_iteration.items()
        }
        x, aux = jax.lax.scan(step, x, grouped, unroll=max(1, self.unroll // len(layers)))
        return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)

    def _iterations(self, stack: str, per_iteration: int, first: int, count: int) -> Any:
        """Returns the inputs of `count` iterations after `first` periods, [count, per_iteration, ...]."""
        start = self.rows[stack].start + first * self.per_period[stack]
        group = functools.partial(
            _group_rows, start=start, count=count, per_iteration=per_iteration
        )
        return jax.tree.map(group, self._inputs(stack))

    def _inputs(self, stack: str) -> tuple[Any, Any, jax.Array]:
        """Returns a stack's parameters, the index of each row's layer, and the number of each row."""
        params = None if self.params is None else self.params[stack]
        index = jax.tree.map(jnp.asarray, self.index[stack])
        return params, index, jnp.arange(jax.tree.leaves(index)[0].shape[0])

    def _layer_of_row(self, stack: str, layer: Callable[..., Any], i: int) -> Callable[..., Any]:
        """Returns `(x, rows of an iteration) -> (x, aux)` of the i-th row of a stack among them.

        The row is taken inside: rows taken before would be saved for the backward pass, a copy of all parameters.
        """

        def run_row(x: Any, inputs: Any) -> Any:
            params, index, number = jax.tree.map(lambda a: a[i], inputs)
            return layer(x, self._read(stack, params, number), index)

        return run_row

    def _read(self, stack: str, params: Any, number: Any) -> Any:
        """Returns the parameters of a row. params: the row as it is scanned, which takes the gradient."""
        if self.read_row is not None:
            return self.read_row(stack, number)
        row_of = functools.partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        return jax.tree.map(with_gradient_of, params, jax.tree.map(row_of, self.constants[stack]))


def _group_rows(a: jax.Array, *, start: int, count: int, per_iteration: int) -> jax.Array:
    """Returns rows of a stack by iteration: [count, per_iteration, ...]."""
    rows = a[start : start + count * per_iteration]
    return rows.reshape(count, per_iteration, *a.shape[1:])


def _stack_trees(trees: Sequence[Any]) -> Any:
    """Stacks equal trees leaf by leaf."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


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

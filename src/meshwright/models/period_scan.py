"""Scan over periods of layers of several kinds,
or over a part of a stack (picture: models/layer_scan.py)."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.sharding.params import Tree

StackLayer = tuple[str, Callable[..., tuple[Any, Any]]]
"""Stack of a layer, and its function `(x, params, index) -> (x, aux)`."""
ReadRow = Callable[[str, Any], Callable[[], Tree]]
"""`(stack, number) -> what reads the parameters` of a row of the part of the stack that is run."""


@jax.custom_vjp
def with_gradient_of(of: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, and in the backward pass its gradient as that of `of`, in its type,
    which is not read."""
    return value


with_gradient_of.defvjp(
    lambda of, value: (value, jnp.zeros((0,), of.dtype)),
    lambda like, g: (g.astype(like.dtype), None),
)


@dataclasses.dataclass(frozen=True)
class PeriodScan:
    """Scan over periods of layers, whose rows may be a part of their stacks.

    A scan over rows of a stack, or over groups of them, would copy what it reads. So a layer reads
    its row of the whole stack, by number, and the rows that are scanned are there for their
    gradients alone (`with_gradient_of`).
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

    def run(self, period: Sequence[StackLayer], x: Any) -> tuple[Any, list[dict[str, Any]]]:
        """Scans whole periods, then the layers after the last one;
        returns x and the aux of each stack in both."""
        periods = min(len(self.rows[stack]) // n for stack, n in self.per_period.items())
        remaining: collections.Counter[str] = collections.Counter()
        for stack, count in self.per_period.items():
            remaining[stack] = len(self.rows[stack]) - periods * count
        last = period[: remaining.total()]
        assert collections.Counter(stack for stack, _ in last) == remaining, (
            f"{self.rows} are not periods and a part of one"
        )
        outputs: list[dict[str, Any]] = []
        if periods:
            x, aux = self._scan(period, x, first=0, count=periods)
            outputs.append(aux)
        if last:
            x, aux = self._scan(last, x, first=periods, count=1)
            outputs.append(aux)
        return x, outputs

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

        grouped = {}
        for stack, rows in per_iteration.items():
            grouped[stack] = self._iterations(stack, rows, first, count)
        unroll = max(1, self.unroll // len(layers))
        x, aux = jax.lax.scan(step, x, grouped, unroll=unroll)
        return x, jax.tree.map(_join_iterations, aux)

    def _iterations(self, stack: str, per_iteration: int, first: int, count: int) -> Any:
        """Returns the inputs of `count` iterations after `first` periods,
        [count, per_iteration, ...]."""
        start = self.rows[stack].start + first * self.per_period[stack]
        group = functools.partial(
            _group_rows, start=start, count=count, per_iteration=per_iteration
        )
        return jax.tree.map(group, self._inputs(stack))

    def _inputs(self, stack: str) -> tuple[Any, Any, jax.Array]:
        """Returns a stack's parameters, the index of each row's layer,
        and the number of each row."""
        params = None if self.params is None else self.params[stack]
        index = jax.tree.map(jnp.asarray, self.index[stack])
        return params, index, jnp.arange(jax.tree.leaves(index)[0].shape[0])

    def _layer_of_row(self, stack: str, layer: Callable[..., Any], i: int) -> Callable[..., Any]:
        """Returns `(x, rows of an iteration) -> (x, aux)` of the i-th row of a stack among them.

        The row is taken inside: rows taken before would be saved
        for the backward pass, a copy of all parameters.
        """

        def run_row(x: Any, inputs: Any) -> Any:
            params, index, number = jax.tree.map(lambda a: a[i], inputs)
            return layer(x, self._read(stack, params, number), index)

        return run_row

    def _read(self, stack: str, params: Any, number: Any) -> Any:
        """Returns the parameters of a row.
        params: the row as it is scanned, which takes the gradient."""
        if self.read_row is not None:
            return self.read_row(stack, number)
        row_of = functools.partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        row = jax.tree.map(row_of, self.constants[stack])
        return jax.tree.map(with_gradient_of, params, row)


def _group_rows(a: jax.Array, *, start: int, count: int, per_iteration: int) -> jax.Array:
    """Returns rows of a stack by iteration: [count, per_iteration, ...]."""
    rows = a[start : start + count * per_iteration]
    return rows.reshape(count, per_iteration, *a.shape[1:])


def _join_iterations(a: jax.Array) -> jax.Array:
    """Inverts `_group_rows`: returns [count * per_iteration, ...]."""
    return a.reshape(-1, *a.shape[2:])


def _stack_trees(trees: Sequence[Any]) -> Any:
    """Stacks equal trees leaf by leaf."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

"""Expected shardings of intermediate values, checked against what the compiler chose."""

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class ExpectedSharding:
    """An intermediate value, the sharding its author expects, and the one that the compiler chose."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    declared: PartitionSpec
    compiled: Any
    """Sharding that the compiler chose, a `jax.sharding.Sharding`."""
    line: str
    """FILE:LINE of the call to `expect_sharding`."""


_collecting: contextvars.ContextVar[list[ExpectedSharding] | None] = contextvars.ContextVar("collecting", default=None)


def expect_sharding(x: jax.Array, name: str, declared: PartitionSpec) -> jax.Array:
    """Declares that `x` should be sharded as `declared`; a census reports where the compiler chose otherwise.

    Returns `x`. Unlike `jax.lax.with_sharding_constraint` it constrains nothing, and costs nothing when the program
    runs. It is for values under `jit` whose sharding the compiler chooses; inside a `shard_map` shardings are explicit.
    """

    caller = sys._getframe(1)
    line = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"

    def record(sharding: Any) -> None:
        expected = _collecting.get()
        if expected is not None:
            expected.append(ExpectedSharding(name, x.shape, x.dtype.itemsize, declared, sharding, line))

    jax.debug.inspect_array_sharding(x, callback=record)
    return x


@contextlib.contextmanager
def collect_expected_shardings() -> Iterator[list[ExpectedSharding]]:
    """Collects the expected shardings of the programs compiled inside the `with` block."""
    expected: list[ExpectedSharding] = []
    token = _collecting.set(expected)
    try:
        yield expected
    finally:
        _collecting.reset(token)

"""Cache of what the planner computes from the layout of a run alone: parameters, placements and pipeline stages."""

import functools
from collections.abc import Callable
from typing import Any

from meshwright.runs.placed_run import Leaves, PlacedRun

_MAX_LAYOUTS = 4096


def cached_by_layout[Value](function: Callable[[PlacedRun], Value]) -> Callable[[PlacedRun], Value]:
    """Caches a function of a placed run that reads only its parameters, placements, stages and mesh.

    A search prices a layout with many remat policies and numbers of microbatches; `place_run` gives all of them the
    same `leaves` object, which is the key.
    """
    return cached_by_layout_and()(function)


def cached_by_layout_and[Value](
    *options: str,
) -> Callable[[Callable[[PlacedRun], Value]], Callable[[PlacedRun], Value]]:
    """Caches a function that reads, besides what `cached_by_layout` lists, these fields of `Training`."""

    def decorate(function: Callable[[PlacedRun], Value]) -> Callable[[PlacedRun], Value]:
        return _cached(function, options)

    return decorate


def _cached[Value](function: Callable[[PlacedRun], Value], options: tuple[str, ...]) -> Callable[[PlacedRun], Value]:
    values: dict[tuple[Any, ...], tuple[Leaves, Value]] = {}

    @functools.wraps(function)
    def cached(placed: PlacedRun) -> Value:
        training = placed.run.training
        key = (id(placed.leaves), *(getattr(training, option) for option in options))
        if key not in values:
            if len(values) >= _MAX_LAYOUTS:
                values.clear()
            # The leaves are kept, so that no other object can have their id.
            values[key] = (placed.leaves, function(placed))
        return values[key][1]

    return cached

"""Runs of layers that repeat, in a model whose kinds of layers have no common period.

    layers    M E M E M * E   M E M E M * E   M E M E
    runs      [M E M E M * E] twice           [M E] twice

A run is one loop, whose body has the layers of its period,
so the fewest layers in all bodies compile fastest.
"""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that repeat a period a whole number of times."""

    first: int
    """First layer of the run in the model."""
    layers: int
    period: int
    """Layers of the period."""


def shortest_runs(kinds: Sequence[Hashable]) -> tuple[LayerRun, ...]:
    """Returns the runs of layers whose periods have the fewest layers in all;
    of equal ones the fewest runs.

        bodies(n) = min over the last run of p layers, r times:  bodies(n - p r) + p

    kinds: kind of each layer.
    """
    best: list[tuple[int, tuple[LayerRun, ...]]] = [(0, ())]
    for end in range(1, len(kinds) + 1):
        candidates = []
        for period in range(1, end + 1):
            for first in range(end - period, -1, -period):
                if kinds[first : first + period] != kinds[end - period : end]:
                    break
                bodies, before = best[first]
                run = LayerRun(first, end - first, period)
                candidates.append((bodies + period, (*before, run)))
        best.append(min(candidates, key=lambda candidate: (candidate[0], len(candidate[1]))))
    return best[-1][1]

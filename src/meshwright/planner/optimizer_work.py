"""Work of an optimizer that multiplies matrices: FLOPs, traffic and temporaries of its update, on one device.

Muon alone is known; the matrix products of a rule from outside are not.
"""

import dataclasses

import jax.numpy as jnp

from meshwright.planner.work import Matmul
from meshwright.runs.placed_run import PlacedRun
from meshwright.step.muon import STEPS, Exchange, Rest, Stack, exchanges, orthogonalised, plan_muon, temporaries
from meshwright.words import AXES

_COPIES = 3
"""Whole matrices of a round at once: the iterate, its successor, and the product on the way."""


def plan_of(placed: PlacedRun) -> tuple[list[Stack], list[Rest]]:
    """Returns the division of Muon's matrices."""
    return plan_muon(placed.params, placed.placements, placed.shape, placed.run.optimizer.muon_heads)


def update_matmuls(placed: PlacedRun) -> list[Matmul]:
    """Returns the matrix products of an update; none for rules without them."""
    if placed.run.optimizer.name != "muon":
        return []
    stacks, rests = plan_of(placed)
    found: list[Matmul] = []
    for stack in stacks:
        found += _newton_schulz(stack, stack.whole * stack.heads, 1)
    for rest in rests:
        first = rest.members[0]
        found += _newton_schulz(first, rest.rounds, 1) + _newton_schulz(first, rest.split, first.owners.count)
    return found


def _newton_schulz(stack: Stack, matrices: int, parts: int) -> list[Matmul]:
    """Three products of every iteration, each split in `parts`."""
    short, long = sorted((stack.rows, stack.columns))
    if not matrices:
        return []
    count = float(STEPS * matrices)
    return [
        Matmul("optimizer", short, long // parts, short, count),
        Matmul("optimizer", short / parts, short, short, count),
        Matmul("optimizer", short, short, long // parts, count),
    ]


def update_exchanges(placed: PlacedRun) -> list[tuple[Exchange, float]]:
    """Returns the collectives of an update, each with the bytes of its array; none for rules without matrices."""
    if placed.run.optimizer.name != "muon":
        return []
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    outermost = list(AXES).index
    return [
        (dataclasses.replace(e, axes=tuple(sorted(e.axes, key=outermost))), e.elements * (4 if e.float32 else compute))
        for e in exchanges(*plan_of(placed))
    ]


def update_temporaries(placed: PlacedRun) -> float:
    """Returns the bytes that an update needs besides state and gradients.

    A device's momentum with Nesterov's step and the update itself, in float32 and in the compute dtype, and the
    matrices of a round.
    """
    if placed.run.optimizer.name != "muon":
        return 0.0
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    copied, largest = temporaries(*plan_of(placed))
    return copied * (4 + compute) + _COPIES * largest * compute


def muon_moments(placed: PlacedRun) -> float:
    """Returns the elements of Muon's second moments on a device: AdamW's, of what is not orthogonalised."""
    return sum(
        p.size / placed.shape.over(tuple(axis for axes in where.optimizer for axis in axes))
        for _, p, where in placed.leaves
        if not orthogonalised(p)
    )

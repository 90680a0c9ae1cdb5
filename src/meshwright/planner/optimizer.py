"""Optimizers as the planner prices them: state, HBM traffic, matrix products, collectives
and temporaries of an update.

The matrix products of a rule from outside the package are not known.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.config import Optimizer, Training
from meshwright.planner.work import Matmul
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.sharding.params import Param, trained_only, tree_map
from meshwright.sharding.placement import Placement, local_shape
from meshwright.step.muon import STEPS, Exchange, MuonPlan, Stack, orthogonalised, plan_muon
from meshwright.update_rules import UPDATE_RULES
from meshwright.words import AXES

_OTHERS_MOVE = 16
"""HBM bytes per parameter of any other update, without its state,
which is read and written on top."""
_ROUND_COPIES = 3
"""Full matrices of a round at once: the iterate, its successor, and an intermediate product."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Array of a checkpoint."""

    shape: tuple[int, ...]
    """Shape with the rows of the pipeline's stages."""
    rows: int | None
    """First dimension in the order of the layers; None where the rows are in order."""
    itemsize: int
    placement: Placement


StateOf = tuple[ModelLayout, Optimizer, Any, Any]
"""What determines the state: layout, optimizer, `param_dtype`, `param_rounding`."""


def state_of(placed: PlacedRun) -> StateOf:
    """Returns what determines the optimizer state of a run."""
    training = placed.run.training
    return placed.layout, placed.run.optimizer, training.param_dtype, training.param_rounding


def state_arrays(
    layout: ModelLayout, optimizer: Optimizer, dtype: Any, rounding: Any
) -> tuple[StoredArray, ...]:
    """Returns the arrays of the optimizer state,
    without counters of steps where the rule is built in."""
    row = UPDATE_RULES.get(optimizer.name)
    if row is None or row.moments is None:
        return _arrays_of_rule(
            layout, optimizer, Training(param_dtype=dtype, param_rounding=rounding)
        )
    arrays: list[StoredArray] = []
    for _, p, where in layout.leaves:
        low_bits = [2] if (p.stored or dtype) == "bfloat16" and rounding == "master" else []
        moments = 2 if row.matrices and not orthogonalised(p) else row.moments
        moment_sizes = [jnp.dtype(optimizer.moment_dtype).itemsize, *[4] * (moments - 1)]
        sizes = [*moment_sizes[:moments], *low_bits]
        arrays += [] if p.frozen else [stored_array(p, size, where.optimizer) for size in sizes]
    return tuple(arrays)


def _arrays_of_rule(
    layout: ModelLayout, optimizer: Optimizer, training: Training
) -> tuple[StoredArray, ...]:
    """Returns the arrays that optax would make."""
    from meshwright.step.optimizers import build_update_rule, place_optimizer_state  # loads optax

    params, placements = (
        trained_only(layout.params, tree) for tree in (layout.params, layout.placements)
    )
    abstract = tree_map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.stored or training.param_dtype)), params
    )
    rule = build_update_rule(optimizer, training, params)
    state, where = place_optimizer_state(rule, abstract, placements, layout.shape)
    arrays = zip(jax.tree.leaves(state), where, strict=True)
    return tuple(StoredArray(x.shape, None, x.dtype.itemsize, placement) for x, placement in arrays)


def stored_array(p: Param, itemsize: int, placement: Placement) -> StoredArray:
    """Returns an array of a parameter's shape."""
    return StoredArray(
        p.shape, None if p.order is None else p.logical_shape[0], itemsize, placement
    )


def state_bytes(placed: PlacedRun) -> int:
    """Returns the bytes of the optimizer state on a device."""
    return _state_bytes(*state_of(placed))


@functools.lru_cache(maxsize=4096)
def _state_bytes(layout: ModelLayout, *rest: Any) -> int:
    arrays = state_arrays(layout, *rest)
    return sum(
        math.prod(local_shape(x.shape, x.placement, layout.shape)) * x.itemsize for x in arrays
    )


def update_bytes_moved(placed: PlacedRun, trained: float) -> float:
    """Returns the HBM bytes that an update reads and writes.
    trained: trained elements of a device."""
    row = UPDATE_RULES.get(placed.run.optimizer.name)
    return (
        trained * _OTHERS_MOVE + 2 * state_bytes(placed)
        if row is None
        else trained * row.bytes_moved
    )


def _matrices_of(placed: PlacedRun) -> MuonPlan | None:
    """Returns the division of the update's matrices among devices;
    None for a rule without matrix products."""
    row = UPDATE_RULES.get(placed.run.optimizer.name)
    if row is None or not row.matrices:
        return None
    return plan_muon(
        placed.layout.params,
        placed.layout.placements,
        placed.layout.shape,
        placed.run.optimizer.muon_heads,
    )


def update_matmuls(placed: PlacedRun) -> list[Matmul]:
    """Returns the matrix products of an update; none for rules without them."""
    plan, found = _matrices_of(placed), list[Matmul]()
    for stack in plan.stacks if plan else ():
        found += _newton_schulz(stack, stack.entries_owned * stack.matrices_per_entry, 1)
    for rest in plan.rests if plan else ():
        first = rest.members[0]
        found += _newton_schulz(first, rest.rounds, 1) + _newton_schulz(
            first, rest.split, first.owners.count
        )
    return found


def _newton_schulz(stack: Stack, matrices: int, parts: int) -> list[Matmul]:
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
    """Returns the collectives of an update, each with the bytes of its array;
    none for rules without matrices."""
    matrices = _matrices_of(placed)
    if matrices is None:
        return []
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    outermost = list(AXES).index
    return [
        (
            dataclasses.replace(e, axes=tuple(sorted(e.axes, key=outermost))),
            e.elements * (4 if e.float32 else compute),
        )
        for e in matrices.exchanges()
    ]


def update_temporaries(placed: PlacedRun) -> float:
    """Returns the bytes that an update needs besides state and gradients.

    A device's momentum with Nesterov's step and the update itself, in float32 and in the compute
    dtype, and the matrices of a round.
    """
    matrices = _matrices_of(placed)
    if matrices is None:
        return 0.0
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    copied, largest = matrices.temporaries()
    return copied * (4 + compute) + _ROUND_COPIES * largest * compute

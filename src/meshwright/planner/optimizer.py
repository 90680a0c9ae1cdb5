"""Optimizers as the planner prices them: state, HBM traffic, matrix products, collectives and temporaries of an update.

The matrix products of a rule from outside the package are not known.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from meshwright.planner.work import Matmul
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.sharding.params import trained_only, tree_map
from meshwright.sharding.placement import axes_of, local_shape
from meshwright.step.muon import STEPS, Exchange, MuonPlan, Stack, orthogonalised, plan_muon
from meshwright.words import AXES


@dataclasses.dataclass(frozen=True)
class UpdateCost:
    """Cost of a built-in update per parameter."""

    moments: float
    """Float32 copies of the parameters in the state (Adafactor: row and column means)."""
    bytes_moved: int
    """HBM bytes read and written, with gradients, norm and clipping."""
    matrices: bool = False
    """Whether it multiplies matrices, of the parameters that `orthogonalised` names; the others have AdamW's state."""


UPDATE_COSTS = {
    "adamw": UpdateCost(2, 32),
    "lion": UpdateCost(1, 24),
    "sgd": UpdateCost(1, 24),
    "muon": UpdateCost(1, 40, matrices=True),
    "adafactor": UpdateCost(0.02, 24),
}
_OTHERS_MOVE = 16
"""HBM bytes per parameter of any other update, without its state, which is read and written on top."""
_ROUND_COPIES = 3
"""Full matrices of a round at once: the iterate, its successor, and an intermediate product."""


def state_bytes(placed: PlacedRun) -> float:
    """Returns the bytes of the optimizer state on a device."""
    training, optimizer = placed.run.training, placed.run.optimizer
    cost = UPDATE_COSTS.get(optimizer.name)
    if cost is None:
        return optimizer_state_bytes(placed)
    bytes_each = 4 * cost.moments
    if optimizer.moment_dtype == "bfloat16":
        bytes_each -= 2
    if training.param_dtype == "bfloat16" and training.param_rounding == "master":
        bytes_each += 2
    second = 0.0
    if cost.matrices:
        second = 4 * sum(
            p.size / placed.shape.over(tuple(axis for axes in where.optimizer for axis in axes))
            for _, p, where in placed.leaves
            if not orthogonalised(p)
        )
    return optimizer_elements(placed.layout) * bytes_each + second


@functools.lru_cache(maxsize=4096)
def optimizer_elements(layout: ModelLayout) -> float:
    """Returns the elements of the trained parameters whose optimizer state a device keeps."""
    return sum(p.size / layout.shape.over(axes_of(where.optimizer)) for _, p, where in layout.leaves if not p.frozen)


def optimizer_state_bytes(placed: PlacedRun) -> int:
    """Returns the bytes of the state of any update rule on a device, from the arrays that optax would make."""
    from meshwright.step.optimizers import build_update_rule, place_optimizer_state  # loads optax

    training, shape = placed.run.training, placed.shape
    params, placements = trained_only(placed.params, placed.params), trained_only(placed.params, placed.placements)
    abstract = tree_map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.stored or training.param_dtype)), params)
    rule = build_update_rule(placed.run.optimizer, training, params)
    state, where = place_optimizer_state(rule, abstract, placements, shape)
    return sum(
        math.prod(local_shape(leaf.shape, placement, shape)) * leaf.dtype.itemsize
        for leaf, placement in zip(jax.tree.leaves(state), where, strict=True)
    )


def update_bytes_moved(placed: PlacedRun, trained: float) -> float:
    """Returns the HBM bytes that an update reads and writes. trained: trained elements of a device."""
    cost = UPDATE_COSTS.get(placed.run.optimizer.name)
    return trained * _OTHERS_MOVE + 2 * state_bytes(placed) if cost is None else trained * cost.bytes_moved


def _matrices_of(placed: PlacedRun) -> MuonPlan | None:
    """Returns the division of the update's matrices among devices; None for a rule without matrix products."""
    cost = UPDATE_COSTS.get(placed.run.optimizer.name)
    if cost is None or not cost.matrices:
        return None
    return plan_muon(placed.params, placed.placements, placed.shape, placed.run.optimizer.muon_heads)


def update_matmuls(placed: PlacedRun) -> list[Matmul]:
    """Returns the matrix products of an update; none for rules without them."""
    plan, found = _matrices_of(placed), list[Matmul]()
    for stack in plan.stacks if plan else ():
        found += _newton_schulz(stack, stack.whole * stack.heads, 1)
    for rest in plan.rests if plan else ():
        first = rest.members[0]
        found += _newton_schulz(first, rest.rounds, 1) + _newton_schulz(first, rest.split, first.owners.count)
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
    """Returns the collectives of an update, each with the bytes of its array; none for rules without matrices."""
    matrices = _matrices_of(placed)
    if matrices is None:
        return []
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    outermost = list(AXES).index
    return [
        (dataclasses.replace(e, axes=tuple(sorted(e.axes, key=outermost))), e.elements * (4 if e.float32 else compute))
        for e in matrices.exchanges()
    ]


def update_temporaries(placed: PlacedRun) -> float:
    """Returns the bytes that an update needs besides state and gradients.

    A device's momentum with Nesterov's step and the update itself, in float32 and in the compute dtype, and the
    matrices of a round.
    """
    matrices = _matrices_of(placed)
    if matrices is None:
        return 0.0
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    copied, largest = matrices.temporaries()
    return copied * (4 + compute) + _ROUND_COPIES * largest * compute

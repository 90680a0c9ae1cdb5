"""The layout of a run from abstract shapes alone: no device, no array, no data."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from meshwright.check import describe
from meshwright.config import MeshShape, Run
from meshwright.layout import local_shape, notation
from meshwright.optimizers import build_optimizer, state_placements
from meshwright.params import Param, Tree, count, named, tree_map


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    at_rest: str
    in_use: str
    parameters: int
    bytes_at_rest: int
    """On one device."""
    bytes_in_use: int
    """On one device, of one layer where it is stacked, in the compute type."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A run's parameters on its mesh."""

    mesh: MeshShape
    rows: tuple[Row, ...]
    parameters: int
    bytes_parameters: int
    """On one device, at rest."""
    bytes_optimizer: int
    """On one device."""


def picture(run: Run) -> Picture:
    """Lays `run` on its mesh. Raises ConfigError where it does not fit."""
    params, placed = describe(run)
    mesh = run.mesh or MeshShape()
    flat, where = named(params), named(placed)
    rest = jnp.dtype(run.training.param_dtype).itemsize
    use = jnp.dtype(run.training.compute_dtype).itemsize

    def row(name: str, p: Param) -> Row:
        at = where[name]
        layers = p.shape[0] if p.dims.startswith("L") else 1
        return Row(
            name,
            p.shape,
            notation("w", p.dims, at.at_rest),
            notation("w", p.dims, at.in_use),
            p.size,
            math.prod(local_shape(p.shape, at.at_rest, mesh)) * rest,
            math.prod(local_shape(p.shape, at.in_use, mesh)) * use // layers,
        )

    rows = tuple(row(name, p) for name, p in flat.items())
    return Picture(mesh, rows, count(params), sum(r.bytes_at_rest for r in rows), _optimizer_bytes(run, params, placed))


def _optimizer_bytes(run: Run, params: Tree, placed: Tree) -> int:
    """Bytes of the optimizer's state on one device, from the state optax itself would make."""
    dtype, mesh = jnp.dtype(run.training.param_dtype), run.mesh or MeshShape()
    abstract = tree_map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    state, where = state_placements(build_optimizer(run.optimizer, run.training.steps, params), abstract, placed)
    return sum(
        math.prod(local_shape(leaf.shape, at, mesh)) * leaf.dtype.itemsize
        for leaf, at in zip(jax.tree.leaves(state), where, strict=True)
    )

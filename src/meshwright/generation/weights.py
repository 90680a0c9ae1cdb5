"""Weights as the decode loop reads them: as the training step keeps them, or gathered once.

A training step gathers a layer's weights over `fsdp` for thousands of tokens. A decode step would
gather them for one token of each sequence, which takes longer than the token. Where the weights fit
they are gathered once, in the compute dtype, and stay so.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.params import Param, Tree
from meshwright.sharding.placement import local_shape
from meshwright.step.device_run import DeviceRun, param_specs

WeightsLayout = Literal["gathered", "sharded"]
"""`sharded` keeps the layout and dtype of training and gathers each layer for each token;
`gathered` gathers all of them once, in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """Parameters of a model in a layout for decoding."""

    params: Tree
    specs: Tree
    """`PartitionSpec` of every array."""
    gather: Any
    """`(params, path) -> weights` inside a `shard_map`, for `ForwardContext.gather_params`."""


def weight_bytes(placed: PlacedRun, layout: WeightsLayout) -> int:
    """Returns the bytes of the weights on one device in a layout."""
    training, total = placed.run.training, 0
    for _, p, where in placed.layout.leaves:
        if layout == "sharded":
            dtype, placement = p.stored or training.param_dtype, where.at_rest
        else:
            dtype, placement = (
                "float32" if p.precision == "float32" else training.compute_dtype,
                where.in_use,
            )
        total += (
            math.prod(local_shape(p.shape, placement, placed.layout.shape))
            * jnp.dtype(dtype).itemsize
        )
    return total


def lay_out(device_run: DeviceRun, params: Tree, layout: WeightsLayout) -> LaidOut:
    """Returns `params` in a layout; nothing is copied where it is that of training."""
    if layout == "sharded":
        return LaidOut(
            params,
            param_specs(device_run.layout.placements, "at_rest"),
            device_run.local_model.execution.gather_params,
        )
    program, specs = _gathered(device_run)
    return LaidOut(program(params), specs, lambda params, path: params)


def _gathered(device_run: DeviceRun) -> tuple[Any, Tree]:
    """Returns the program that gathers all weights once, and the specs of what it returns."""

    def gather(params: Tree) -> Tree:
        return {path: _gather_stack(device_run, params[path], path) for path in params}

    own, specs = (
        param_specs(device_run.layout.placements, which) for which in ("at_rest", "in_use")
    )
    mapped = jax.shard_map(
        gather, mesh=device_run.mesh, in_specs=(own,), out_specs=specs, check_vma=False
    )
    return jax.jit(mapped), specs


def _gather_stack(device_run: DeviceRun, params: Tree, path: str) -> Tree:
    """Gathers a subtree: one layer after another where it is stacked, since gathers are those
    of one layer."""
    gather = device_run.local_model.execution.gather_params
    leaves = jax.tree.leaves(device_run.layout.params[path], is_leaf=lambda x: isinstance(x, Param))
    if not any("L" in p.dims for p in leaves):
        return gather(params, path)
    return jax.lax.map(lambda layer: gather(layer, path), params)

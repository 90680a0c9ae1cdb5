"""Weights as the decode loop reads them: as the training step keeps them, gathered once, or gathered in int8.

A training step gathers a layer's weights over `fsdp` for thousands of tokens. A decode step would gather them for one
token of each sequence, which takes longer than the token. Where the weights fit they are gathered once, in the compute
dtype, and stay so.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.comm.collectives import all_reduce_max
from meshwright.generation.weight_sizes import WeightsLayout, is_int8
from meshwright.sharding.params import Param, Tree, tree_map
from meshwright.sharding.placement import Placements, to_spec
from meshwright.step.device_run import DeviceRun, param_specs


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """Weight in int8, one float32 scale for each output feature; multiplies itself (blocks/layers.py)."""

    values: Any
    """int8, with the shape of the weight."""
    scale: Any
    """float32; the dimensions that the matmul contracts are left out."""

    def linear(self, x: jax.Array, contract: int) -> jax.Array:
        """Returns the product of x and the weight, in the dtype of x."""
        lead = x.shape[: x.ndim - contract]
        dims = tuple(range(contract))
        rows = x.reshape(-1, *self.values.shape[:contract])
        contracted = (tuple(1 + dim for dim in dims), dims)
        out = jax.lax.dot_general(
            rows, self.values.astype(x.dtype), (contracted, ((), ())), preferred_element_type=jnp.float32
        )
        return (out * self.scale).astype(x.dtype).reshape(*lead, *self.values.shape[contract:])


@dataclasses.dataclass(frozen=True)
class LaidOut:
    """Parameters of a model in a layout for decoding."""

    params: Tree
    specs: Tree
    """`PartitionSpec` of every array."""
    gather: Any
    """`(params, path) -> weights` inside a `shard_map`, for `ForwardContext.gather_params`."""


def lay_out(device_run: DeviceRun, params: Tree, layout: WeightsLayout) -> LaidOut:
    """Returns `params` in a layout; nothing is copied where it is that of training."""
    if layout == "sharded":
        return LaidOut(params, param_specs(device_run.placements, "at_rest"), device_run.local_model.gather_params)
    program, specs = _gathered(device_run, layout)
    return LaidOut(program(params), specs, lambda params, path: params)


def abstract_layout(device_run: DeviceRun, layout: WeightsLayout) -> LaidOut:
    """Returns a layout with `ShapeDtypeStruct`s instead of arrays, to compile for hardware that is not here."""
    if layout == "sharded":
        return lay_out(device_run, device_run.abstract.params, layout)
    program, specs = _gathered(device_run, layout)
    arrays = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(device_run.mesh, spec)),
        jax.eval_shape(program, device_run.abstract.params),
        specs,
    )
    return LaidOut(arrays, specs, lambda params, path: params)


def _gathered(device_run: DeviceRun, layout: WeightsLayout) -> tuple[Any, Tree]:
    """Returns the program that gathers all weights once, and the specs of what it returns."""

    def spec(p: Param, where: Placements) -> Any:
        values = to_spec(where.in_use)
        if layout != "int8" or not is_int8(p):
            return values
        return Int8Weight(values, PartitionSpec(values[0], *values[1 + p.contract :]))

    def gather(params: Tree) -> Tree:
        paths = {path: _gather_stack(device_run, params[path], path) for path in params}
        if layout == "int8":
            return tree_map(_quantise, device_run.params, paths, device_run.placements)
        return paths

    specs = tree_map(spec, device_run.params, device_run.placements)
    own = param_specs(device_run.placements, "at_rest")
    mapped = jax.shard_map(gather, mesh=device_run.mesh, in_specs=(own,), out_specs=specs, check_vma=False)
    return jax.jit(mapped), specs


def _gather_stack(device_run: DeviceRun, params: Tree, path: str) -> Tree:
    """Gathers a subtree: one layer after another where it is stacked, since gathers are those of one layer."""
    gather = device_run.local_model.gather_params
    leaves = jax.tree.leaves(device_run.params[path], is_leaf=lambda x: isinstance(x, Param))
    if not any("L" in p.dims for p in leaves):
        return gather(params, path)
    return jax.lax.map(lambda layer: gather(layer, path), params)


def _quantise(p: Param, w: jax.Array, where: Placements) -> Any:
    """Quantises a stacked weight, with scales that do not depend on how `tensor` splits what is contracted."""
    if not is_int8(p):
        return w
    dims = tuple(range(1, 1 + p.contract))
    axes = tuple(axis for dim in dims for axis in where.in_use[dim])
    w = w.astype(jnp.float32)
    largest = all_reduce_max(jnp.abs(w).max(dims, keepdims=True), axes)
    scale = jnp.maximum(largest, 1e-30) / 127.0
    return Int8Weight(jnp.round(w / scale).astype(jnp.int8), scale.reshape(w.shape[0], *w.shape[1 + p.contract :]))

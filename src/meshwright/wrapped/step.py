"""Gradients and evaluation of a wrapped model.

`data` and `fsdp` are manual: a `shard_map` in which each device computes the loss of its own examples. Parameters are
gathered over `fsdp` before the loss, and gathered again for the backward pass (ZeRO-3), which reduce-scatters their
gradients; `data` sums them. `tensor` is the compiler's: it sees the whole arrays, split as rules or annotations state,
and inserts what the module's own operations need.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_reduce, axis_index, gather_param, sum_gradients
from meshwright.comm.hierarchical import hierarchical_reduce_scatter
from meshwright.models.model import Metrics
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import Placement, Placements, axes_of, to_spec
from meshwright.step.gradients import clip
from meshwright.step.train_step import matmuls_of
from meshwright.words import AXES
from meshwright.wrapped.keys import Draws, step_key
from meshwright.wrapped.losses import Arrays
from meshwright.wrapped.placing import WrappedRun

_GATHERED = "gathered parameter"
_EVALUATION = 0x7FFFFFFF
"""Step of the keys of an evaluation."""


def _manual(placement: Placement) -> Placement:
    """Returns the axes of a placement that the step handles itself."""
    return tuple(tuple(axis for axis in axes if axis != "tensor") for axes in placement)


def _specs(wrapped_run: WrappedRun, which: str) -> Any:
    return {name: to_spec(_manual(getattr(p, which))) for name, p in wrapped_run.placements.items()}


def _over_mesh(wrapped_run: WrappedRun, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`shard_map` over all axes; `tensor` stays with the compiler where it has several devices."""
    manual = set(AXES) - ({"tensor"} if wrapped_run.shape.tensor > 1 else set())
    mesh = wrapped_run.mesh
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
    )  # fmt: skip


def _gather(wrapped_run: WrappedRun, params: Arrays) -> Arrays:
    """Gathers every parameter over `fsdp`, in the type in which the loss gets it."""
    dcn, reduce_dtype = wrapped_run.settled.links, jnp.dtype(wrapped_run.run.training.reduce_dtype)

    def gather_one(name: str, w: jax.Array) -> jax.Array:
        where: Placements = wrapped_run.placements[name]
        dims = [
            (tuple(a for a in rest if a not in used), dim)
            for dim, (rest, used) in enumerate(zip(where.at_rest, where.in_use, strict=True))
        ]
        gathers = tuple((axes, dim) for axes, dim in dims if axes)
        with jax.named_scope(name):
            dtype = wrapped_run.own_dtypes[name]
            return gather_param(w, gathers, dtype, reduce_dtype, dcn) if gathers else w.astype(dtype)

    def gather(params: Arrays) -> Arrays:
        return {name: gather_one(name, w) for name, w in params.items()}

    whole = _by_tensor(wrapped_run, gather)(params)
    return {name: checkpoint_name(w, _GATHERED) for name, w in whole.items()}


def _by_tensor(wrapped_run: WrappedRun, function: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    """Applies a function with collectives to this device's part of each parameter (or gradient) over `tensor`.

    The compiler does not split the operand of a collective over an axis of its own: it would gather it first.
    """
    specs = {}
    for name, where in wrapped_run.placements.items():
        if "tensor" in axes_of(where.in_use):
            specs[name] = to_spec(tuple(tuple(a for a in axes if a == "tensor") for axes in where.in_use))
    if not specs:
        return function

    def apply(arrays: Arrays) -> Arrays:
        split = {name: x for name, x in arrays.items() if name in specs}
        mesh = jax.sharding.get_abstract_mesh()
        own = jax.shard_map(
            function, mesh=mesh, in_specs=(specs,), out_specs=specs, axis_names={"tensor"}, check_vma=False
        )  # fmt: skip
        # The others are whole over `tensor`: inside, their gradients would be summed over it once more.
        return own(split) | function({name: x for name, x in arrays.items() if name not in specs})

    return apply


def _saved(wrapped_run: WrappedRun, function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies the run's rematerialisation to the loss with its gathers."""
    remat = wrapped_run.run.training.remat
    if remat == "full":
        return jax.checkpoint(function)
    if wrapped_run.shape.fsdp == 1 or remat == "none":
        return function
    policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    return jax.checkpoint(function, policy=policy)


def build_wrapped_gradients(wrapped_run: WrappedRun) -> Callable[..., tuple[Arrays, Metrics, tuple[Arrays, ...]]]:
    """Returns `(params, step, batch, *variables) -> (gradients, metrics, variables)`.

    Gradients are those of the mean over the whole batch, clipped, in the optimizer's placement. Floating-point
    variables are averaged over the devices; of others every device has the same.
    """
    run, replicated = wrapped_run.run, PartitionSpec()

    def local(params: Arrays, step: jax.Array, batch: Any, variables: Arrays) -> Any:
        grads, sums, variables = _accumulate(wrapped_run, params, step, batch, variables)
        sums = all_reduce(sums, BATCH_AXES)
        with jax.named_scope("gradients"):
            total = jnp.maximum(sums["loss"][1], 1e-9)
            grads = _by_tensor(wrapped_run, functools.partial(_reduce, wrapped_run))(grads)
            grads = {name: g / total.astype(g.dtype) for name, g in grads.items()}
        return grads, sums, _averaged(variables)

    sharded = _over_mesh(
        wrapped_run,
        local,
        (_specs(wrapped_run, "at_rest"), replicated, PartitionSpec(BATCH_AXES), replicated),
        (_specs(wrapped_run, "optimizer"), replicated, replicated),
    )

    def gradients(params: Arrays, step: jax.Array, batch: Any, *variables: Arrays) -> Any:
        grads, metrics, after = sharded(params, step, batch, variables[0] if variables else {})
        norm = optax.tree.norm({name: g.astype(jnp.float32) for name, g in grads.items()})
        grads = clip(grads, norm, run.optimizer.grad_clip_norm)
        return grads, {**metrics, "gradient norm": (norm, jnp.ones(()))}, (after,)

    return gradients


def _accumulate(wrapped_run: WrappedRun, params: Arrays, step: jax.Array, batch: Any, variables: Arrays) -> Any:
    """This device's gradients, metrics (sum, weight) and variables, over its microbatches one after another."""
    training, parts = wrapped_run.run.training, wrapped_run.parts
    count = training.microbatches
    total = wrapped_run.shape.over(BATCH_AXES) * count

    def loss(params: Arrays, variables: Arrays, batch: Any, key: jax.Array) -> Any:
        result = parts.loss((_gather(wrapped_run, params), variables), batch, key, True)
        weight = jax.lax.stop_gradient(jnp.asarray(result.metrics.get("weight", 1.0), jnp.float32))
        values = {"loss": result.loss, **{k: v for k, v in result.metrics.items() if k != "weight"}}
        sums = {name: (jnp.asarray(v, jnp.float32) * weight, weight) for name, v in values.items()}
        return sums["loss"][0], (sums, result.variables)

    gradient = jax.grad(_saved(wrapped_run, loss), has_aux=True)

    def one(variables: Arrays, batch: Any, number: Any) -> Any:
        part = axis_index(BATCH_AXES) * count + number
        grads, (sums, variables) = gradient(
            params, variables, batch, step_key(training.seed, step, part, total, parts.draws)
        )
        dtype = jnp.promote_types(training.reduce_dtype, jnp.dtype(training.reduce_dtype))
        return {name: g.astype(dtype) for name, g in grads.items()}, sums, variables

    if count == 1:
        return one(variables, batch, 0)
    parts_M = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

    def add(carry: Any, part: Any) -> Any:
        (grads, sums), variables = carry
        number, batch = part
        *more, variables = one(variables, batch, number)
        return (jax.tree.map(jnp.add, (grads, sums), tuple(more)), variables), None

    first = jax.tree.map(lambda x: x[0], parts_M)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: one(variables, first, jnp.int32(0))[:2])
    )
    (sums, variables), _ = jax.lax.scan(add, (zeros, variables), (jnp.arange(count), parts_M))
    return (*sums, variables)


def _reduce(wrapped_run: WrappedRun, grads: Arrays) -> Arrays:
    """Sums gradients over the batch axes into the optimizer's placement, which may split more than the parameter's."""

    def scatter(name: str, grad: jax.Array) -> jax.Array:
        where: Placements = wrapped_run.placements[name]
        for dim, (sharded, end) in enumerate(zip(where.at_rest, where.optimizer, strict=True)):
            grad = hierarchical_reduce_scatter(grad, end[len(sharded) :], dim, wrapped_run.settled.links)
        return grad

    lacking = {
        name: tuple(a for a in BATCH_AXES if a not in axes_of(p.optimizer))
        for name, p in wrapped_run.placements.items()
        if name in grads
    }
    return sum_gradients({name: scatter(name, g) for name, g in grads.items()}, lacking, wrapped_run.settled.links)


def _averaged(variables: Arrays) -> Arrays:
    """Averages floating-point variables over the devices, each of which has seen its own examples."""
    means = {name: x for name, x in variables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    count = all_reduce(jnp.ones(()), BATCH_AXES)
    summed = all_reduce({name: x.astype(jnp.float32) for name, x in means.items()}, BATCH_AXES)
    return {**variables, **{name: (x / count).astype(means[name].dtype) for name, x in summed.items()}}


def build_wrapped_evaluation(wrapped_run: WrappedRun) -> Callable[..., Metrics]:
    """Returns `(params, batch, *variables) -> metrics`, jitted, each metric (sum, weight) over the whole batch."""
    training, parts = wrapped_run.run.training, wrapped_run.parts
    total = wrapped_run.shape.over(BATCH_AXES)

    def local(params: Arrays, batch: Any, variables: Arrays) -> Metrics:
        draws: Draws = parts.eval_draws
        key = step_key(training.seed, _EVALUATION, axis_index(BATCH_AXES), total, draws)
        with matmuls_of(training.compute_dtype):
            result = parts.loss((_gather(wrapped_run, params), variables), batch, key, False)
        weight = jnp.asarray(result.metrics.get("weight", 1.0), jnp.float32)
        values = {"loss": result.loss, **{k: v for k, v in result.metrics.items() if k != "weight"}}
        return all_reduce({k: (jnp.asarray(v, jnp.float32) * weight, weight) for k, v in values.items()}, BATCH_AXES)

    specs = (_specs(wrapped_run, "at_rest"), PartitionSpec(BATCH_AXES), PartitionSpec())
    sharded = _over_mesh(wrapped_run, local, specs, PartitionSpec())
    return jax.jit(
        lambda params, batch, *variables: sharded(params, batch, variables[0] if variables else {}),
        compiler_options=wrapped_run.compiler_options() or None,
    )

"""Gradients of one step: forward, backward, reduction over the mesh, clipping.

All of it is one `shard_map`, manual over every mesh axis, so that every collective is one that is
written here or in `comm`.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_gather, all_reduce, axis_index, sum_gradients
from meshwright.comm.hierarchical import DcnAxis, hierarchical_reduce_scatter
from meshwright.data.batch import Batch
from meshwright.models.blocks.layers import Dropout, dropout_key
from meshwright.models.layer_health import HEALTH, add_aux, split_health
from meshwright.models.model import Aux, Metrics, Model
from meshwright.models.period_scan import with_gradient_of
from meshwright.sharding.layouts import BATCH_AXES, TOKEN_AXES
from meshwright.sharding.params import Tree, is_param, rows_to_layers, trained_only, with_frozen
from meshwright.sharding.placement import Placements, axes_of
from meshwright.step.device_run import DeviceRun
from meshwright.step.health import gradient_figures
from meshwright.step.state import BATCH_SPEC, specs_of
from meshwright.words import AXES

Sums = tuple[Metrics, dict[str, Aux]]
"""Metrics and the aux of each stack."""


def matmuls_of(compute_dtype: str) -> Any:
    """Returns the context to trace a step in: float32 means float32 on accelerators too.

    By default TPUs multiply float32 in one pass of bfloat16, and NVIDIA GPUs in TF32.
    """
    if compute_dtype == "float32":
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def build_gradients(device_run: DeviceRun) -> Callable[..., tuple[Tree, Metrics, Any]]:
    """Returns `(params, step, batch, *variables) -> (gradients, metrics, aux)`.

    Gradients are those of trained parameters, clipped and in the optimizer's placement. Metrics and
    aux are summed over all devices, aux in the rows of the parameters; of a model with variables,
    aux is a tuple of the new ones. Matmuls have the precision of the compute dtype, whoever traces
    it.
    """
    compute_dtype = device_run.run.training.compute_dtype
    by_model = device_run.run.model.gradients(device_run, _gradients_by_layers)

    def gradients(*args: Any) -> tuple[Tree, Metrics, Any]:
        with matmuls_of(compute_dtype):
            found: tuple[Tree, Metrics, Any] = by_model(*args)
        return found

    return gradients


def _gradients_by_layers(
    model: Model, device_run: DeviceRun
) -> Callable[..., tuple[Tree, Metrics, Any]]:
    """Returns the gradients of a model made of layers, as `build_gradients` does."""
    run = device_run.run

    def gradients(
        params: Tree, step: jax.Array, batch: Batch
    ) -> tuple[Tree, Metrics, dict[str, Aux]]:
        grads, (metrics, aux) = _accumulate(device_run, params, step, batch)
        aux, health = split_health(aux)
        with jax.named_scope("gradients"):
            grads = _reduce(device_run, grads)
            norm = _global_norm(device_run, grads)
            unclipped = grads
            metrics = all_reduce(metrics, TOKEN_AXES)
            grads = clip(grads, norm, run.optimizer.grad_clip_norm)
            aux = jax.tree.map(_sum_aux, aux)
        metrics = {**metrics, "gradient norm": (norm, jnp.ones(()))}
        by_layer = _by_layer(device_run, aux)
        metrics |= model.layer_metrics(by_layer, run.training.batch)
        if run.training.health:
            figures: Any = gradient_figures(device_run, unclipped, batch.inputs, health, by_layer)
            metrics[HEALTH] = figures
        return grads, metrics, aux

    return jax.shard_map(
        gradients,
        mesh=device_run.mesh,
        in_specs=(
            specs_of(device_run.abstract.shardings.params),
            PartitionSpec(),
            BATCH_SPEC,
        ),
        out_specs=(specs_of(device_run.update_shardings), PartitionSpec(), PartitionSpec()),
        check_vma=False,
    )


def _sum_aux(rows: jax.Array) -> jax.Array:
    """Sums auxiliary outputs over all tokens.

    Returns the rows of all stages, [rows, ...], on every device.
    """
    return all_gather(all_reduce(rows, TOKEN_AXES), ("stage",), 0)


def _by_layer(device_run: DeviceRun, aux: dict[str, Aux]) -> dict[str, Aux]:
    """Returns auxiliary outputs with one row per layer, from those in the rows of the stacks."""
    by_layer = {}
    for stack in device_run.local_model.stacks:
        # Any parameter of a stack knows in which rows its layers are.
        p = jax.tree.leaves(device_run.layout.params[stack], is_leaf=is_param)[0]
        by_layer[stack] = jax.tree.map(functools.partial(rows_to_layers, p), aux[stack])
    return by_layer


@dataclasses.dataclass(frozen=True, eq=False)
class _DeviceLoss:
    """Loss of this device's sequences as a function of the trained parameters.

    The sum over the batch axes is the mean loss over the weights of the global batch.
    """

    device_run: DeviceRun
    params: Tree
    """All sharded parameters, frozen ones included."""
    dropout_key: jax.Array
    total: jax.Array
    """Weight of the global batch."""

    def __call__(self, trained: Tree, sequences_B: jax.Array, batch: Batch) -> Any:
        """Returns `(loss, (metrics, aux))` of some sequences. sequences_B: in the global batch."""
        params = with_frozen(self.device_run.layout.params, trained, self.params)
        dropout = self.dropout(sequences_B)
        return self.device_run.local_model.loss_fn(params, batch, dropout, self.total)

    def dropout(self, sequences_B: jax.Array) -> Dropout:
        """Returns the dropout of these sequences."""
        # Made inside: before the pipeline's loop, it would be a constant that the loop carries.
        positions_T = self.device_run.local_model.execution.sequence.local_positions()
        rate = self.device_run.run.training.dropout
        return Dropout(rate, self.dropout_key, sequences_B, positions_T)


def _accumulate(
    device_run: DeviceRun, params: Tree, step: jax.Array, batch: Batch
) -> tuple[Tree, Sums]:
    """Returns this device's gradients and sums, of microbatches if there are several."""
    training = device_run.run.training
    described = device_run.layout.params
    model = device_run.local_model
    local = batch.inputs.shape[0]
    sequences_B = (axis_index(BATCH_AXES) * local + jnp.arange(local)).astype(jnp.uint32)
    key = dropout_key(training.seed, step)
    total = jnp.maximum(all_reduce(model.weight(batch), BATCH_AXES), 1e-9)
    loss = _DeviceLoss(device_run, params, key, total)
    trained = trained_only(described, params)
    stages = device_run.layout.shape.stage
    if training.microbatches == 1 and stages == 1:
        return jax.grad(loss, has_aux=True)(trained, sequences_B, batch)

    microbatches = split_batch((sequences_B, batch), training.microbatches)
    if stages == 1:
        return _add_microbatches(loss, trained, microbatches)
    from meshwright.step.pipeline import PipelineModel

    pipeline = PipelineModel(model, microbatches, loss.dropout, total, (described, params))
    return pipeline.gradients(device_run.schedule_table, trained)


def split_batch(batch: Any, microbatches: int) -> Any:
    """Returns arrays [B, ...] as [M, B/M, ...]."""
    return jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)


def _add_microbatches(
    loss_fn: Callable[[Tree, jax.Array, Batch], Any], params: Tree, microbatches: Any
) -> tuple[Tree, Sums]:
    """Sums the gradients of the microbatches in float32, layer by layer as they are known.

        sum of a layer's gradients   <-  sum + d loss(m) / d params of the layer,   m = 0 ... M - 1

    microbatches: sequence indices and batch, with a leading dimension of microbatches. The sums are
    references (`jax.new_ref`), to which the backward pass adds. Otherwise all gradients of a
    microbatch would exist before they are added: a second copy of the model's gradients.
    """
    zeros = jax.tree.map(_float32_zeros, params)
    sums = jax.tree.map(jax.new_ref, zeros)
    primals = jax.tree.map(_primal, params, zeros)

    def add(totals: Any, microbatch: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        loss_of = functools.partial(_loss_of_primals, loss_fn, params, microbatch)
        vjp: Any
        loss, vjp, more = jax.vjp(loss_of, primals, has_aux=True)
        vjp.with_refs(sums)(jnp.ones_like(loss))
        return add_aux(totals, more), None

    first = jax.tree.map(operator.itemgetter(0), microbatches)
    _, shapes = jax.eval_shape(loss_fn, params, *first)
    totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    totals, _ = jax.lax.scan(add, totals, microbatches)
    return jax.tree.map(jax.freeze, sums), totals


def _float32_zeros(p: jax.Array) -> jax.Array:
    return jnp.zeros(p.shape, jnp.float32)


# The gradients of bfloat16 parameters are bfloat16, and a reference cannot change the type of what
# is added to it. The loss is therefore a function of float32 numbers, of which `_weight_of` passes
# only the gradient on: the zeros are not read.
def _primal(p: jax.Array, zeros: jax.Array) -> jax.Array:
    """Returns what the loss is differentiated by: a float32 parameter, or zeros for another."""
    return p if p.dtype == zeros.dtype else zeros


def _weight_of(primal: jax.Array, p: jax.Array) -> jax.Array:
    """Returns the parameter, whose gradient goes to its primal."""
    if primal.dtype == p.dtype:
        return primal
    return with_gradient_of(primal.astype(p.dtype), p)


def _loss_of_primals(
    loss_fn: Callable[..., Any], params: Tree, microbatch: tuple[jax.Array, Batch], primals: Tree
) -> Any:
    """Returns the loss of a microbatch as a function of the primals of its parameters."""
    return loss_fn(jax.tree.map(_weight_of, primals, params), *microbatch)


def _reduce(device_run: DeviceRun, grads: Tree) -> Tree:
    """Sums gradients over devices into the optimizer's placement.

    A parameter's gradient is partial over every axis that does not split it: over the batch axes
    because each device has its own sequences, over `tensor` because it has its own part of the
    sequence or of the heads. Over some of them the backward pass has summed already.
    """
    described = device_run.layout.params
    execution = device_run.local_model.execution
    placements = trained_only(described, device_run.layout.placements)
    summed = trained_only(described, execution.summed_in_backward)
    partial_over = jax.tree.map(_axes_to_sum_over, placements, summed)
    dtype = jnp.dtype(device_run.run.training.reduce_dtype)
    return sum_over_devices(grads, placements, partial_over, execution.links, dtype)


def _axes_to_sum_over(placements: Placements, summed: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes over which a gradient is still partial.

    summed: those over which it has been summed.
    """
    done = (*axes_of(placements.optimizer), *summed)
    return tuple(axis for axis in AXES if axis not in done)


def _global_norm(device_run: DeviceRun, grads: Tree) -> jax.Array:
    """Returns the norm of all gradients together, from reduced ones.

    norm² = sum over devices and elements g of  g² / (number of devices that have g)
    """
    placements = trained_only(device_run.layout.params, device_run.layout.placements)
    devices = jax.lax.axis_size(tuple(AXES))
    treedef: Any
    leaves, treedef = jax.tree.flatten(grads)
    squares: Any = 0
    for g, placement in zip(leaves, treedef.flatten_up_to(placements), strict=True):
        shards = jax.lax.axis_size(axes_of(placement.optimizer))
        fraction = shards / devices
        squares = squares + jnp.sum(jnp.square(g.astype(jnp.float32))) * fraction
    return jnp.sqrt(all_reduce(jnp.asarray(squares), tuple(AXES)))


def sum_over_devices(
    grads: Tree, placements: Tree, partial_over: Tree, links: DcnAxis, dtype: Any
) -> Tree:
    """Sums gradients over the axes over which each is partial, into the optimizer's placement.

    ZeRO-1: the optimizer's placement may split what the parameter's leaves whole.
    """

    def scatter(grad: jax.Array, where: Placements) -> jax.Array:
        grad = grad.astype(dtype)
        for dim, (sharded, end) in enumerate(zip(where.at_rest, where.optimizer, strict=True)):
            grad = hierarchical_reduce_scatter(grad, end[len(sharded) :], dim, links)
        return grad

    return sum_gradients(jax.tree.map(scatter, grads, placements), partial_over, links)


def clip(grads: Tree, norm: jax.Array, limit: float) -> Tree:
    """Scales gradients so that their global norm is at most `limit`; 0 leaves them as they are."""
    if not limit:
        return grads
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-16))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)

"""Gradients of one step: forward, backward, reduction over the mesh, clipping.

All of it is one `shard_map`, manual over every mesh axis, so that every collective is one that is written here or in
`comm`.
"""

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
from meshwright.step.device_run import BATCH_SPEC, DeviceRun, specs_of
from meshwright.step.health import (
    GRADIENT,
    gradient_sums,
    layer_figures,
    layer_sums,
    over_devices,
)
from meshwright.words import AXES

Sums = tuple[Metrics, dict[str, Aux]]
"""Metrics and the aux of each stack."""


def build_gradients(device_run: DeviceRun) -> Callable[..., tuple[Tree, Metrics, Any]]:
    """Returns `(params, step, batch, *variables) -> (gradients, metrics, aux)`.

    Gradients are those of trained parameters, clipped and in the optimizer's placement. Metrics and aux are summed over
    all devices, aux in the rows of the parameters; of a model with variables, aux is a tuple of the new ones.
    """
    return device_run.run.model.gradients(device_run, _gradients_by_layers)


def _gradients_by_layers(
    model: Model, device_run: DeviceRun
) -> Callable[..., tuple[Tree, Metrics, Any]]:
    run = device_run.run
    stacks = device_run.local_model.stacks
    # Any parameter of a stack knows in which rows its layers are.
    stacked = {
        path: jax.tree.leaves(device_run.layout.params[path], is_leaf=is_param)[0]
        for path in stacks
    }

    def gradients(
        params: Tree, step: jax.Array, batch: Batch
    ) -> tuple[Tree, Metrics, dict[str, Aux]]:
        grads, (metrics, aux) = _accumulate(device_run, params, step, batch)
        aux, health = split_health(aux)
        with jax.named_scope("gradients"):
            grads, norm, sums = _reduce(device_run, grads, health)
            metrics = all_reduce(metrics, TOKEN_AXES)
            grads = clip(grads, norm, run.optimizer.grad_clip_norm)
            aux = jax.tree.map(lambda a: all_gather(all_reduce(a, TOKEN_AXES), ("stage",), 0), aux)
        metrics = {**metrics, "gradient norm": (norm, jnp.ones(()))}
        by_layer = {
            path: jax.tree.map(lambda a, p=p: rows_to_layers(p, a), aux[path])
            for path, p in stacked.items()
        }
        metrics |= model.layer_metrics(by_layer, run.training.batch)
        if run.training.health:
            metrics[HEALTH] = {
                GRADIENT: sums[GRADIENT],
                **layer_figures(sums[HEALTH], by_layer, run.training.batch),
            }
        return grads, metrics, aux

    return jax.shard_map(
        gradients,
        mesh=device_run.mesh,
        in_specs=(
            specs_of(device_run.state_shardings.params),
            PartitionSpec(),
            BATCH_SPEC,
        ),
        out_specs=(specs_of(device_run.update_shardings), PartitionSpec(), PartitionSpec()),
        check_vma=False,
    )


def _accumulate(
    device_run: DeviceRun, params: Tree, step: jax.Array, batch: Batch
) -> tuple[Tree, Sums]:
    training = device_run.run.training
    model = device_run.local_model
    local = batch.inputs.shape[0]
    sequences_B = (axis_index(BATCH_AXES) * local + jnp.arange(local)).astype(jnp.uint32)
    key = dropout_key(training.seed, step)
    total = jnp.maximum(all_reduce(model.weight(batch), BATCH_AXES), 1e-9)

    def dropout(sequences_B: jax.Array) -> Dropout:
        # Made inside: before the pipeline's loop, it would be a constant that the loop carries.
        positions_T = model.execution.sequence.local_positions()
        return Dropout(training.dropout, key, sequences_B, positions_T)

    def loss_fn(trained: Tree, sequences_B: jax.Array, batch: Batch) -> Any:
        return model.loss_fn(
            with_frozen(device_run.layout.params, trained, params),
            batch,
            dropout(sequences_B),
            total,
        )

    trained = trained_only(device_run.layout.params, params)
    if training.microbatches == 1 and device_run.layout.shape.stage == 1:
        return jax.grad(loss_fn, has_aux=True)(trained, sequences_B, batch)
    parts: Any = jax.tree.map(
        lambda x: x.reshape(training.microbatches, -1, *x.shape[1:]), (sequences_B, batch)
    )
    if device_run.layout.shape.stage > 1:
        from meshwright.step.pipeline import PipelineModel

        pipeline = PipelineModel(model, parts, dropout, total, (device_run.layout.params, params))
        return pipeline.gradients(device_run.schedule_table, trained)
    return _add_microbatches(loss_fn, trained, parts)


def _add_microbatches(
    loss_fn: Callable[[Tree, jax.Array, Batch], Any], params: Tree, parts: Any
) -> tuple[Tree, Sums]:
    """Sums the gradients of the microbatches in float32, each layer's into the sum as soon as it is known.

    parts: sequence indices and batch, with a leading dimension of microbatches. Without references all gradients of
    a microbatch would exist before they are added: a second copy of the model's gradients.
    """
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    references = jax.tree.map(jax.new_ref, zeros)
    # The gradients of bfloat16 parameters are bfloat16, and a reference cannot change the type of what is added to it.
    given = jax.tree.map(lambda p, zero: p if p.dtype == zero.dtype else zero, params, zeros)

    def read(of: jax.Array, p: jax.Array) -> jax.Array:
        return of if of.dtype == p.dtype else with_gradient_of(of.astype(p.dtype), p)

    def add(more: Any, part: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        vjp: Any
        value, vjp, sums = jax.vjp(
            lambda of: loss_fn(jax.tree.map(read, of, params), *part), given, has_aux=True
        )
        vjp.with_refs(references)(jnp.ones_like(value))
        return add_aux(more, sums), None

    more = jax.eval_shape(
        lambda part: loss_fn(params, *part)[1], jax.tree.map(lambda x: x[0], parts)
    )
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), more)
    sums = jax.lax.scan(add, zeros, parts)[0]
    return jax.tree.map(jax.freeze, references), sums


def _reduce(
    device_run: DeviceRun, grads: Tree, health: dict[str, Aux]
) -> tuple[Tree, jax.Array, dict[str, Any]]:
    """Sums gradients over devices into the optimizer's placement.

    Returns them, their global norm, and the sums of health over all devices. health: of the layers of this device.
    """
    shape = device_run.layout.shape
    placements, summed = (
        trained_only(device_run.layout.params, t)
        for t in (device_run.layout.placements, device_run.local_model.execution.summed_in_backward)
    )
    # A parameter's gradient is partial over every axis that does not split it: over the batch axes because each device
    # has its own sequences, over `tensor` because it has its own part of the sequence or of the heads. Over some the
    # backward pass has summed already.
    lacking = jax.tree.map(
        lambda where, summed: tuple(
            a for a in AXES if a not in axes_of(where.optimizer) and a not in summed
        ),
        placements,
        summed,
    )
    links = device_run.local_model.execution.links
    dtype = jnp.dtype(device_run.run.training.reduce_dtype)
    grads = sum_over_devices(grads, placements, lacking, links, dtype)
    treedef: Any = jax.tree.structure(grads)
    # An element that several devices have counts once: each adds its square divided by the number of holders.
    squares = sum(
        jnp.sum(jnp.square(g.astype(jnp.float32)))
        * (shape.over(axes_of(where.optimizer)) / shape.size)
        for g, where in zip(jax.tree.leaves(grads), treedef.flatten_up_to(placements), strict=True)
    )
    sums: dict[str, Any] = {"squares": jnp.asarray(squares)}
    if device_run.run.training.health:
        sums[GRADIENT] = gradient_sums(device_run, grads)
        sums[HEALTH] = layer_sums(device_run, health)
    sums = over_devices(sums)
    return grads, jnp.sqrt(sums["squares"]), sums


def sum_over_devices(
    grads: Tree, placements: Tree, lacking: Tree, links: DcnAxis, dtype: Any
) -> Tree:
    """Sums gradients in `dtype` over the axes that each is `lacking`, into the optimizer's placement.

    ZeRO-1: the optimizer's placement may split what the parameter's leaves whole.
    """

    def scatter(grad: jax.Array, where: Placements) -> jax.Array:
        grad = grad.astype(dtype)
        for dim, (sharded, end) in enumerate(zip(where.at_rest, where.optimizer, strict=True)):
            grad = hierarchical_reduce_scatter(grad, end[len(sharded) :], dim, links)
        return grad

    return sum_gradients(jax.tree.map(scatter, grads, placements), lacking, links)


def clip(grads: Tree, norm: jax.Array, limit: float) -> Tree:
    """Scales gradients so that their global norm is at most `limit`; 0 leaves them as they are."""
    if not limit:
        return grads
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-16))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)

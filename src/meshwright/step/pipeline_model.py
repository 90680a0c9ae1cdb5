"""The model as a pipeline runs it: functions of a microbatch's index, for gradients, evaluation and sampling."""

from collections.abc import Callable

import jax

from meshwright.data.batch import Batch
from meshwright.models.blocks.dropout import Dropout, no_dropout
from meshwright.models.forward import LocalModel
from meshwright.models.model import Aux, ForwardContext, Metrics
from meshwright.sharding.params import Tree
from meshwright.sharding.schedule_table import ScheduleTable
from meshwright.step.pipeline import PipelineModel, run_forward, run_schedule


def pipeline_gradients(
    table: ScheduleTable,
    model: LocalModel,
    params: Tree,
    microbatches: tuple[jax.Array, Batch],
    dropout: Callable[[jax.Array], Dropout],
    total: jax.Array,
) -> tuple[Tree, tuple[Metrics, dict[str, Aux]]]:
    """Returns this device's gradients, metrics and aux. microbatches: sequence indices [M, B] and batches [M, B, T]."""
    pipeline = pipeline_model(model, *microbatches, dropout, total)
    grads, metrics, aux = run_schedule(table, pipeline, params)
    return grads, (metrics, aux)


def pipeline_metrics(
    table: ScheduleTable, model: LocalModel, params: Tree, batch_M: Batch, total: jax.Array
) -> Metrics:
    """Returns the metrics of a forward pass without dropout. batch_M: batches [M, B, T]."""
    pipeline = pipeline_model(model, batch_M.positions[:, :, 0], batch_M, lambda _: no_dropout(), total)
    metrics: Metrics = run_forward(table, pipeline, params)
    return metrics


def pipeline_model(
    model: LocalModel,
    sequences_MB: jax.Array,
    batch_M: Batch,
    dropout: Callable[[jax.Array], Dropout],
    total: jax.Array,
) -> PipelineModel:
    """Returns the model as functions of a microbatch's index. sequences_MB, batch_M: of all microbatches."""

    def take(m: jax.Array) -> tuple[jax.Array, Batch]:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, keepdims=False), (sequences_MB, batch_M))

    def context(m: jax.Array) -> ForwardContext:
        sequences_B, batch = take(m)
        return model.context(batch, dropout(sequences_B))

    return PipelineModel(
        embed=lambda params, m: model.embed(params, context(m)),
        layers=lambda params, x, virtual_stage, m: model.layers(params, x, context(m), virtual_stage),
        loss=lambda params, x, m: model.loss(params, x, take(m)[1], total),
        aux_loss=model.aux_loss,
        stacks=tuple(model.stacks),
        reduce_dtype=model.training.reduce_dtype,
        keeps=model.training.stage_saves == "layers",
        together=model.permutes,
    )

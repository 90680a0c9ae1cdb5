"""The model as a pipeline runs it: functions of a microbatch's index, for gradients, evaluation and sampling."""

import dataclasses
from collections.abc import Callable

import jax

from meshwright.data.batch import Batch
from meshwright.models.blocks.dropout import Dropout, no_dropout
from meshwright.models.forward import LocalModel
from meshwright.models.model import Aux, ForwardContext, Metrics
from meshwright.sharding.params import Tree, with_frozen
from meshwright.sharding.schedule_table import ScheduleTable
from meshwright.step.pipeline import PipelineModel, run_forward, run_schedule
from meshwright.step.pipeline_buffers import part_rows


@dataclasses.dataclass(frozen=True)
class Whole:
    """Adds the frozen parameters to trained ones, by which the pipeline differentiates."""

    described: Tree
    """Descriptions of all parameters."""
    params: Tree
    """All parameters of this stage."""
    virtual_stages: int

    def __call__(self, trained: dict[str, Tree]) -> dict[str, Tree]:
        """Returns whole subtrees of the parameters. trained: some of the subtrees, None for what is frozen."""
        return {path: with_frozen(self.described[path], tree, self.params[path]) for path, tree in trained.items()}

    def part(self, trained: dict[str, Tree], virtual_stage: jax.Array) -> dict[str, Tree]:
        """Returns whole stacks of one virtual stage. trained: the rows of its layers."""
        rows = part_rows({path: self.params[path] for path in trained}, virtual_stage, self.virtual_stages)
        return dataclasses.replace(self, params=rows)(trained)


def pipeline_gradients(
    table: ScheduleTable,
    model: LocalModel,
    params: Tree,
    microbatches: tuple[jax.Array, Batch],
    dropout: Callable[[jax.Array], Dropout],
    total: jax.Array,
    whole: Whole,
) -> tuple[Tree, tuple[Metrics, dict[str, Aux]]]:
    """Returns this device's gradients, metrics and aux. microbatches: sequence indices [M, B] and batches [M, B, T].

    params: those that are trained.  whole: adds the others.
    """
    pipeline_of_all = pipeline_model(model, *microbatches, dropout, total)
    pipeline = dataclasses.replace(
        pipeline_of_all,
        embed=lambda params, m: pipeline_of_all.embed(whole(params), m),
        layers=lambda params, x, virtual_stage, m: pipeline_of_all.layers(
            whole.part(params, virtual_stage), x, virtual_stage, m
        ),
        loss=lambda params, x, m: pipeline_of_all.loss(whole(params), x, m),
    )
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

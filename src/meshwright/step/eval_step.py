"""The evaluation step: the loss of a batch without dropout and without gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_reduce
from meshwright.data.batch import Batch
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.model import Metrics
from meshwright.sharding.layouts import TOKEN_AXES
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import matmuls_of, split_batch
from meshwright.step.state import BATCH_SPEC, specs_of
from meshwright.step.train_step import compile_on_devices


def build_eval_step(device_run: DeviceRun) -> Any:
    """Returns the evaluation step `(params, batch) -> metrics`, jitted: the loss without dropout.

    It takes the microbatches of training one after another, so that it needs no more memory than a
    train step.
    """

    def evaluate(params: Tree, batch: Batch) -> Metrics:
        total = jnp.ones(())
        with matmuls_of(device_run.run.training.compute_dtype):
            return all_reduce(_evaluated(device_run, params, batch, total), TOKEN_AXES)

    return jax.jit(
        jax.shard_map(
            evaluate,
            mesh=device_run.mesh,
            in_specs=(specs_of(device_run.abstract.shardings.params), BATCH_SPEC),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def _evaluated(device_run: DeviceRun, params: Tree, batch: Batch, total: jax.Array) -> Metrics:
    """Returns the metrics of this device's sequences, summed.

    total: 1, by which losses are divided.
    """
    model = device_run.local_model
    microbatches = device_run.run.training.microbatches
    stages = device_run.layout.shape.stage

    def metrics_of(batch: Batch) -> Metrics:
        _, (metrics, _) = model.loss_fn(params, batch, no_dropout(), total)
        return metrics

    if stages == microbatches == 1:
        return metrics_of(batch)
    batch_M = split_batch(batch, microbatches)
    if stages == 1:
        return jax.tree.map(lambda x: x.sum(0), jax.lax.map(metrics_of, batch_M))
    from meshwright.step.pipeline import PipelineModel

    sequences_MB = batch_M.positions[:, :, 0]  # unused without dropout
    pipeline = PipelineModel(model, (sequences_MB, batch_M), lambda _: no_dropout(), total)
    return pipeline.sums(device_run.forward_table(microbatches), params)


def compile_eval_step(device_run: DeviceRun, resident: int = 0) -> Callable[[Tree, Batch], Metrics]:
    """Returns the evaluation step, compiled once. resident: as of `check_memory`.

    Raises OutOfDeviceMemory.
    """
    lowered = build_eval_step(device_run).lower(
        device_run.abstract.params, device_run.abstract_batch
    )
    return compile_on_devices(device_run, lowered, "an evaluation step", resident)

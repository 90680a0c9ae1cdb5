"""The train step and the evaluation step: the last functions before `jit`.

The gradients are one `shard_map`. The update that follows is optax under `jit`, elementwise for most optimizers and
left to the compiler, between shardings given here.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_reduce
from meshwright.data.batch import Batch
from meshwright.errors import TrainingError
from meshwright.hardware.agreement import agree_on_program
from meshwright.models.blocks.layers import no_dropout
from meshwright.models.layer_health import HEALTH
from meshwright.models.model import Metrics
from meshwright.sharding.layouts import TOKEN_AXES
from meshwright.sharding.params import Tree, trained_only, with_frozen
from meshwright.step.device_memory import check_memory
from meshwright.step.device_run import BATCH_SPEC, DeviceRun, State, specs_of
from meshwright.step.gradients import build_gradients
from meshwright.step.health import GRADIENT, tensor_figures


def matmuls_of(compute_dtype: str) -> Any:
    """Returns the context to trace a step in: float32 means float32 on accelerators too.

    By default TPUs multiply float32 in one pass of bfloat16, and NVIDIA GPUs in TF32.
    """
    return (
        jax.default_matmul_precision("highest")
        if compute_dtype == "float32"
        else contextlib.nullcontext()
    )


def build_train_step(device_run: DeviceRun) -> Any:
    """Returns the train step `(state, batch) -> (state, metrics)`, jitted, its state donated.

    A step whose mean loss or gradient is not finite leaves the state unchanged, except for `healthy`.
    """
    model = device_run.run.model
    gradients = build_gradients(device_run)
    described = device_run.layout.params

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        with matmuls_of(device_run.run.training.compute_dtype):
            grads, metrics, aux = gradients(state.params, state.step, batch, *state.variables)
        params = jax.lax.with_sharding_constraint(
            trained_only(described, state.params), device_run.update_shardings
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        with matmuls_of(device_run.run.training.compute_dtype):
            updated, optimizer = device_run.optimizer.update(
                grads, state.optimizer, params, state.step
            )
        updated = model.post_update(with_frozen(described, updated, state.params), aux)
        updated = with_frozen(described, updated, state.params)
        if device_run.run.training.health:
            after = trained_only(described, updated)
            health = metrics[HEALTH]
            figures = tensor_figures(device_run, health[GRADIENT], params, after)
            metrics = {**metrics, HEALTH: {**health, **figures}}
        finite = (
            jnp.isfinite(jnp.divide(*metrics["loss"]))
            & jnp.isfinite(metrics["gradient norm"][0])
            & state.healthy
        )
        new = State(
            state.step + 1,
            jnp.ones_like(finite),
            updated,
            optimizer,
            aux if state.variables else (),
        )
        new = jax.tree.map(
            # Frozen parameters are the arrays that came in.
            lambda new, old: old if new is old else jnp.where(finite, new, old),
            new,
            dataclasses.replace(state, healthy=finite),
        )
        rate = jnp.asarray(device_run.learning_rate(_updates(state)), jnp.float32)
        return new, {**metrics, "learning rate": (rate, jnp.ones(()))}

    return jax.jit(
        train_step, donate_argnums=(0,), out_shardings=(device_run.state_shardings, None)
    )


def _updates(state: State) -> jax.Array:
    """Updates so far by the count of the rule's own schedule, which skipped steps do not advance; else steps."""
    nodes = jax.tree.leaves(
        state.optimizer, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState)
    )
    counts = [node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    return counts[0] if counts else state.step


class CompiledTrainStep:
    """The train step, compiled once; it refuses to compile again and names the array that changed."""

    def __init__(self, device_run: DeviceRun, like: Batch):
        self._expected = (device_run.abstract, like)
        self._compiled = compile_on_devices(
            device_run, build_train_step(device_run).lower(*self._expected), "a step"
        )

    def program_text(self) -> str:
        """Returns the compiled program (HLO)."""
        return str(self._compiled.as_text())

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        try:
            return self._compiled(state, batch)
        except (TypeError, ValueError) as error:
            changed = _changed_array(self._expected, (state, batch))
            if changed is None:
                raise
            raise TrainingError(
                "the train step, compiled once",
                f"{changed}; it would be compiled again",
                "the same shapes every step",
            ) from error


def compile_on_devices(device_run: DeviceRun, lowered: Any, what: str, resident: int = 0) -> Any:
    """Compiles a step; all processes must have the same one. Raises OutOfDeviceMemory where it does not fit.

    what: its name in the error.  resident: as of `check_memory`.
    """
    if not device_run.batch_sharding.is_fully_addressable:
        agree_on_program(lowered.as_text())
    options, training = device_run.accepted_compiler_options(), device_run.run.training
    compiled = lowered.compile(
        compiler_options={**options, **device_run.profile_of(device_run, lowered)}
    )
    asked = f"{what} of {training.batch} sequences of {training.seq} tokens on mesh {device_run.layout.shape}"
    check_memory(compiled, list(device_run.mesh.devices.flat), asked, resident)
    return compiled


def _changed_array(expected: Any, given: Any) -> str | None:
    """Describes the first array whose shape, type or sharding is not what the step was compiled for."""
    want, got = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (expected, given))
    if len(want) != len(got):
        return f"{len(want)} arrays became {len(got)}"
    for (path, before), (_, after) in zip(want, got, strict=True):
        name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            return f"{name} was {before.dtype}{list(before.shape)} and is {after.dtype}{list(after.shape)}"
        if not before.sharding.is_equivalent_to(after.sharding, len(before.shape)):
            return f"{name} was sharded as {before.sharding.spec} and is {after.sharding}"
    return None


def build_eval_step(device_run: DeviceRun) -> Any:
    """Returns the evaluation step `(params, batch) -> metrics`, jitted: the same loss without dropout.

    It takes the microbatches of training one after another, so that it needs no more memory than a train step.
    """
    training = device_run.run.training
    model = device_run.local_model

    def evaluate(params: Tree, batch: Batch) -> Metrics:
        total = jnp.ones(())

        def sums(batch: Batch) -> Metrics:
            return model.loss_fn(params, batch, no_dropout(), total)[1][0]

        with matmuls_of(training.compute_dtype):
            if device_run.layout.shape.stage == training.microbatches == 1:
                return all_reduce(sums(batch), TOKEN_AXES)
            batch_M = jax.tree.map(
                lambda x: x.reshape(training.microbatches, -1, *x.shape[1:]), batch
            )
            if device_run.layout.shape.stage == 1:
                return all_reduce(
                    jax.tree.map(lambda x: x.sum(0), jax.lax.map(sums, batch_M)), TOKEN_AXES
                )
            sequences_MB = batch_M.positions[:, :, 0]  # unused without dropout
            from meshwright.step.pipeline import PipelineModel

            pipeline = PipelineModel(model, (sequences_MB, batch_M), lambda _: no_dropout(), total)
            return all_reduce(
                pipeline.sums(device_run.forward_table(training.microbatches), params), TOKEN_AXES
            )

    return jax.jit(
        jax.shard_map(
            evaluate,
            mesh=device_run.mesh,
            in_specs=(specs_of(device_run.state_shardings.params), BATCH_SPEC),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def compile_eval_step(device_run: DeviceRun, resident: int = 0) -> Callable[[Tree, Batch], Metrics]:
    """Returns the evaluation step, compiled once. resident: as of `check_memory`. Raises OutOfDeviceMemory."""
    lowered = build_eval_step(device_run).lower(
        device_run.abstract.params, device_run.abstract_batch
    )
    return compile_on_devices(device_run, lowered, "an evaluation step", resident)

"""The train step: the last function before `jit`, and its compilation.

The gradients are one `shard_map`. The update that follows is optax under `jit`, elementwise for
most optimizers and left to the compiler, between shardings given here.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.data.batch import Batch
from meshwright.errors import TrainingError
from meshwright.hardware.agreement import agree_on_program
from meshwright.models.model import Metrics
from meshwright.sharding.params import trained_only, with_frozen
from meshwright.step.device_memory import check_memory, step_bytes
from meshwright.step.device_run import DeviceRun
from meshwright.step.gradients import build_gradients, matmuls_of
from meshwright.step.health import with_tensor_figures
from meshwright.step.state import State


def build_train_step(device_run: DeviceRun) -> Any:
    """Returns the train step `(state, batch) -> (state, metrics)`, jitted, its state donated.

    A step whose mean loss or gradient is not finite leaves the state unchanged, except for
    `healthy`.
    """
    model = device_run.run.model
    training = device_run.run.training
    described = device_run.layout.params
    gradients = build_gradients(device_run)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        grads, metrics, aux = gradients(state.params, state.step, batch, *state.variables)
        params = jax.lax.with_sharding_constraint(
            trained_only(described, state.params), device_run.update_shardings
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        with matmuls_of(training.compute_dtype):
            updated, optimizer = device_run.optimizer.update(
                grads, state.optimizer, params, state.step
            )
        updated = model.post_update(with_frozen(described, updated, state.params), aux)
        # post_update may make frozen leaves anew; `_choose` needs the ones that came in.
        updated = with_frozen(described, updated, state.params)
        if training.health:
            after = trained_only(described, updated)
            states = (state.optimizer, optimizer)
            metrics = with_tensor_figures(device_run, metrics, params, after, states)
        finite = _is_finite(metrics) & state.healthy
        variables = aux if state.variables else ()
        new = State(state.step + 1, jnp.ones_like(finite), updated, optimizer, variables)
        new = _unless_bad(finite, new, state)
        rate = jnp.asarray(device_run.learning_rate(_updates(state)), jnp.float32)
        return new, {**metrics, "learning rate": (rate, jnp.ones(()))}

    return jax.jit(
        train_step, donate_argnums=(0,), out_shardings=(device_run.abstract.shardings, None)
    )


def _is_finite(metrics: Metrics) -> jax.Array:
    """Returns whether the mean loss and the gradient norm of a step are numbers, bool scalar."""
    norm, _ = metrics["gradient norm"]
    return jnp.isfinite(jnp.divide(*metrics["loss"])) & jnp.isfinite(norm)


def _unless_bad(finite: jax.Array, new: State, old: State) -> State:
    """Returns the new state after a finite step, else the old one, no longer healthy.

    It stays so: the steps after it change nothing either until the host has read the bad one.
    """
    unchanged = dataclasses.replace(old, healthy=finite)
    return jax.tree.map(functools.partial(_choose, finite), new, unchanged)


def _choose(finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new array after a finite step, else the old one.

    Frozen parameters are the arrays that came in.
    """
    return old if new is old else jnp.where(finite, new, old)


def _updates(state: State) -> jax.Array:
    """Updates so far by the count of the rule's own schedule, which skipped steps do not advance.

    Else steps.
    """
    nodes = jax.tree.leaves(
        state.optimizer, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState)
    )
    counts = [node.count for node in nodes if isinstance(node, optax.ScaleByScheduleState)]
    return counts[0] if counts else state.step


class CompiledTrainStep:
    """The train step, compiled once.

    It refuses to compile again and names the array that changed.
    """

    def __init__(self, device_run: DeviceRun, like: Batch):
        self._expected = (device_run.abstract, like)
        self._compiled = compile_on_devices(
            device_run, build_train_step(device_run).lower(*self._expected), "a step"
        )

    @property
    def device_bytes(self) -> int | None:
        """Bytes of a device that the step takes by its compiler, its arguments among them;
        None where it does not say."""
        return step_bytes(self._compiled)

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
    """Compiles a step; all processes must have the same one.

    Raises OutOfDeviceMemory where it does not fit.

    what: its name in the error.  resident: as of `check_memory`.
    """
    if not device_run.batch_sharding.is_fully_addressable:
        agree_on_program(lowered.as_text())
    options = {
        **device_run.accepted_compiler_options(),
        **device_run.profile_of(device_run, lowered),
    }
    compiled = lowered.compile(compiler_options=options)
    training = device_run.run.training
    size = f"{training.batch} sequences of {training.seq} tokens"
    asked = f"{what} of {size} on mesh {device_run.layout.shape}"
    check_memory(compiled, list(device_run.mesh.devices.flat), asked, resident)
    return compiled


def _changed_array(expected: Any, given: Any) -> str | None:
    """Describes the first array that is not what the step was compiled for."""
    expected_leaves, _ = jax.tree_util.tree_flatten_with_path(expected)
    given_leaves = jax.tree.leaves(given)
    if len(expected_leaves) != len(given_leaves):
        return f"{len(expected_leaves)} arrays became {len(given_leaves)}"
    for (path, before), after in zip(expected_leaves, given_leaves, strict=True):
        name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
        old = f"{before.dtype}{list(before.shape)}"
        new = f"{after.dtype}{list(after.shape)}"
        if old != new:
            return f"{name} was {old} and is {new}"
        if not before.sharding.is_equivalent_to(after.sharding, len(before.shape)):
            return f"{name} was sharded as {before.sharding.spec} and is {after.sharding}"
    return None

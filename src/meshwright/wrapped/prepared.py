"""A run of a wrapped model as the trainer's loop takes it, and its evaluation."""

import collections
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.analysis import run_census
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import build_mesh
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.step.device_memory import shard_bytes
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep, compile_on_devices
from meshwright.storage.paths import path_of
from meshwright.trainer.evaluation import BatchEvaluation
from meshwright.trainer.prepare import Position, Trainable
from meshwright.wrapped import step
from meshwright.wrapped.batches import BatchFeed, read_epoch
from meshwright.wrapped.parts import WrappedParts, check_rows
from xlacensus.program_census import ProgramFacts


@dataclasses.dataclass(frozen=True)
class PreparedModel(Trainable):
    """A wrapped model on its devices."""

    @property
    def parts(self) -> WrappedParts:
        """Module, loss and data."""
        return step.parts_of(self.device_run)

    def feed(self, start: Position) -> BatchFeed:
        """Returns the batches from a step on."""
        return BatchFeed(self.parts.source, start.step, start.data, self.device_run.batch_sharding)

    def compile(self, batch: Any) -> CompiledTrainStep:
        """Compiles the train step for batches of this shape.
        Raises ConfigError where the loss is not a mean."""
        step.check_mean(self.device_run, batch)
        return CompiledTrainStep(self.device_run, batch)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprints of the loss, with the version of JAX that traced it,
        and of the batches."""
        return {
            "loss": [jax.__version__, self.parts.fingerprint],
            "batches": self.parts.source.fingerprint,
        }

    def evaluator(self) -> Callable[[State], float] | None:
        """Compiles the mean loss over the held-out batches as a function of the state."""
        if self.parts.held_out is None:
            return None
        evaluate = held_out_metrics(self.device_run)
        return lambda state: evaluate(state.params, state.variables)["loss"]


def prepare_wrapped(model: Any, run: Run, devices: list[jax.Device]) -> PreparedModel:
    """Places a wrapped model on the devices here,
    as `fsdp` over all of them where the run names no mesh."""
    if run.faults.bad_step == "roll_back":
        raise ConfigError(
            "--faults.bad-step roll_back with a wrapped model",
            "its batches have no index by which their samples could be left out",
            "--faults.bad-step skip, or stop",
        )
    mesh = run.mesh or MeshShape(fsdp=len(devices))
    prepared = PreparedModel(
        place_on_devices(dataclasses.replace(run, mesh=mesh), build_mesh(mesh, devices))
    )
    parts = prepared.parts
    device_run = prepared.device_run
    count = device_run.layout.shape.over(BATCH_AXES) * device_run.run.training.microbatches
    if count > 1:
        pieces = device_run.layout.shape.over(BATCH_AXES) * step.evaluation_parts(device_run)
        held_out = 0
        if parts.held_out is not None:
            held_out = parts.held_out.batch_size // pieces
        check_rows(parts, parts.source.batch_size // count, held_out)
    return prepared


def held_out_metrics(device_run: DeviceRun) -> Callable[[Any, Any], dict[str, float]]:
    """Compiles `(params, variables) -> mean of each metric over all held-out batches`, beside
    the optimizer state."""
    source = step.parts_of(device_run).held_out
    state = device_run.abstract
    if source is None:
        raise ConfigError(
            "evaluating a wrapped model",
            "it has no held-out batches",
            "mw.wrap(..., held_out=batches)",
        )
    batch = source.abstract(sharding=device_run.batch_sharding)
    lowered = step.build_evaluation(device_run).lower(state.params, batch, *state.variables)
    evaluation = compile_on_devices(
        device_run, lowered, "an evaluation step", shard_bytes(state.optimizer)
    )

    def evaluate(params: Any, variables: Any) -> dict[str, float]:
        totals: dict[str, float] = collections.defaultdict(float)
        weights: dict[str, float] = collections.defaultdict(float)
        for batch in read_epoch(source, device_run.batch_sharding):
            metrics = jax.device_get(evaluation(params, batch, *variables))
            for name, (total, weight) in metrics.items():
                totals[name] += float(total)
                weights[name] += float(weight)
        return {
            name: total / weights[name] if weights[name] else math.nan
            for name, total in totals.items()
        }

    return evaluate


def evaluate_wrapped(
    prepared: PreparedModel, source: str | Path, whole: bool, at: int | None
) -> BatchEvaluation:
    """Evaluates a checkpoint of a wrapped model on its held-out batches;
    `whole` is of text, which its run refuses.

    Raises CheckpointError, or ConfigError without such batches.
    """
    evaluate = held_out_metrics(prepared.device_run)
    with Checkpoints(path_of(source) / "checkpoints", max_to_keep=None) as checkpoints:
        state, manifest = checkpoints.restore(prepared.device_run, at)
    metrics = evaluate(state.params, state.variables)
    return BatchEvaluation(manifest.step, metrics["loss"], metrics)


def train_step_facts(model: Any, device_run: DeviceRun) -> ProgramFacts:
    """Returns what the census knows of the train step: the FLOPs of the loss's matmuls."""
    return ProgramFacts(
        name="train step",
        model_flops=run_census.model_flops(device_run, 3.0),
        library_files=(*run_census.LIBRARY_FILES, str(step.__file__)),
    )

"""A run of a wrapped model as the trainer's loop takes it, and its evaluation."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import build_mesh, enable_compilation_cache
from meshwright.plugins import Shown
from meshwright.report import Reporter
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.trainer.meter import Meter
from meshwright.trainer.prepare import Position
from meshwright.wrapped.batches import BatchFeed
from meshwright.wrapped.flops import training_flops
from meshwright.wrapped.model import Wrapped, check_rows
from meshwright.wrapped.placing import WrappedRun, put_on_devices
from meshwright.wrapped.step import build_wrapped_evaluation, build_wrapped_gradients


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A wrapped model on its devices: a `trainer.loop.Trainable`."""

    device_run: WrappedRun

    def write_files(self, out: Path) -> None:
        """Writes nothing: the module is a program."""

    def meter(self, reporters: list[Reporter]) -> Meter:
        """Returns a meter of examples."""
        training, parts = self.device_run.run.training, self.device_run.parts
        flops = training_flops(parts) / parts.source.batch_size
        return Meter(reporters, training, self.device_run.mesh, unit="examples", per_sample=1, flops=flops,
                     spike=self.device_run.run.faults.spike)  # fmt: skip

    def feed(self, start: Position) -> BatchFeed:
        """Returns the batches from a step on."""
        return BatchFeed(self.device_run.parts.source, start.step, start.data, self.device_run.batch_sharding)

    def fingerprint(self) -> None:
        """Returns nothing: what the author's batches hold is not known here."""

    def compile(self, batch: Any) -> CompiledTrainStep:
        """Compiles the train step for batches of this shape."""
        return CompiledTrainStep(self.device_run, batch, build_wrapped_gradients(self.device_run))

    def evaluator(self) -> Callable[[State], float] | None:
        """Returns the mean loss over the held-out batches as a function of the state."""
        if self.device_run.parts.held_out is None:
            return None
        evaluate = held_out_metrics(self.device_run)
        return lambda state: evaluate(state.params, state.variables)["loss"]

    def sample(self, state: State, out: Path) -> str:
        """Samples nothing: what a wrapped model generates is known to its author."""
        return ""


def prepare_wrapped(run: Run, *, cache: Path, devices: int | None = None) -> PreparedModel:
    """Places a wrapped model on the devices here, as `fsdp` over all of them where the run names no mesh."""
    if run.faults.bad_step == "roll_back":
        raise ConfigError(
            "--faults.bad-step roll_back with a wrapped model",
            "its batches have no index by which their samples could be left out",
            "--faults.bad-step skip, or stop",
        )
    enable_compilation_cache(cache / "compiled")
    available = jax.devices()[:devices]
    run = dataclasses.replace(
        run, model=cast(Wrapped, run.model).named(), mesh=run.mesh or MeshShape(fsdp=len(available))
    )
    prepared = PreparedModel(put_on_devices(run, build_mesh(cast(MeshShape, run.mesh), available)))
    parts, degree = prepared.device_run.parts, prepared.device_run.shape.over(BATCH_AXES)
    if degree * run.training.microbatches > 1:
        held_out = parts.held_out.batch_size // degree if parts.held_out is not None else 0
        check_rows(parts, parts.source.batch_size // (degree * run.training.microbatches), held_out)
    return prepared


def held_out_metrics(wrapped_run: WrappedRun) -> Callable[[Any, Any], dict[str, float]]:
    """Returns `(params, variables) -> mean of each metric over all held-out batches`."""
    source = wrapped_run.parts.held_out
    if source is None:
        raise ConfigError("evaluating a wrapped model", "it has no held-out batches", "mw.wrap(..., held_out=batches)")
    step = build_wrapped_evaluation(wrapped_run)

    def evaluate(params: Any, variables: Any) -> dict[str, float]:
        totals: dict[str, list[float]] = {}
        feed = BatchFeed(source, 0, None, wrapped_run.batch_sharding)
        for batch in feed.epoch():
            for name, (total, weight) in jax.device_get(step(params, batch, *variables)).items():
                kept = totals.setdefault(name, [0.0, 0.0])
                kept[0], kept[1] = kept[0] + float(total), kept[1] + float(weight)
        return {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}

    return evaluate


@dataclasses.dataclass(frozen=True)
class WrappedEvaluation(Shown):
    """Metrics of a checkpoint of a wrapped model on its held-out batches."""

    step: int
    """Step of the checkpoint."""
    loss: float
    metrics: dict[str, float]
    """Mean of each metric that the loss returns."""


def evaluate_wrapped(out: Path, run: Run, *, cache: Path, at: int | None = None) -> WrappedEvaluation:
    """Evaluates a checkpoint of a wrapped model. Raises CheckpointError, or ConfigError without held-out batches."""
    prepared = prepare_wrapped(run, cache=cache)
    evaluate = held_out_metrics(prepared.device_run)
    with Checkpoints(out / "checkpoints", max_to_keep=None) as checkpoints:
        state, manifest = checkpoints.restore(prepared.device_run, at)
    metrics = evaluate(state.params, state.variables)
    return WrappedEvaluation(manifest.step, metrics["loss"], metrics)


def restore_model(model: Wrapped, out: Path, at: int | None) -> Any:
    """Returns the model of a checkpoint on the first device, its parameters in the module's own types."""
    run = dataclasses.replace(run_in_folder(out), model=model, mesh=MeshShape())
    wrapped_run = put_on_devices(run, build_mesh(MeshShape(), jax.devices()[:1]))
    with Checkpoints(out / "checkpoints", max_to_keep=None) as checkpoints:
        state, _ = checkpoints.restore(wrapped_run, at)
    params = {name: x.astype(wrapped_run.parts.params[name].dtype) for name, x in state.params.items()}
    return wrapped_run.parts.adapter.made_of(params, state.variables[0] if state.variables else {})

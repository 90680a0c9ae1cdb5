"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from meshwright.checkpoint.checkpoints import Checkpoints, check_disk_space, committed_steps
from meshwright.data.ramp import BatchRamp, ramp_of
from meshwright.errors import CheckpointError, ConfigError
from meshwright.report import Reporter
from meshwright.report.files import JsonLines
from meshwright.runs.write_run import write_run
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.trainer.meter import Meter
from meshwright.trainer.preemption import Preemption
from meshwright.trainer.prepare import Position, PreparedRun, Trainable, prepare_run

__all__ = ["PreparedRun", "Summary", "Trainable", "prepare_run", "train"]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Result of a training run.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=1, sample=0, eval_samples=16)
        >>> summary = mw.train(run, out=tmp / "summary", progress="none", cache=tmp, devices=1)
        >>> summary.steps, summary.tokens, summary.interrupted_by
        (1, 2048, 0)
    """

    out: Path
    steps: int
    """Steps taken so far, earlier parts of a resumed run included."""
    loss: float
    """Mean of the last steps' losses (up to 20)."""
    held_out_loss: float | None
    """Mean loss per token on held-out text."""
    steps_taken: int
    """Steps since the start or the resume."""
    tokens: int
    """Tokens trained on, since the start or the resume."""
    seconds: float
    data_wait_seconds: float
    """Seconds that the loop waited for data."""
    start_seconds: float
    """Seconds from the beginning to the end of the first step: initial values or restore, compilation, that step."""
    compile_seconds: float
    """Seconds that compiling the train step took."""
    save_seconds: float
    """Seconds that the loop waited for checkpoints."""
    step_seconds: float
    """Median seconds from one step to the next, waiting for data included."""
    interrupted_by: int
    """Number of the signal that ended the run early; 0 where it came to its end."""
    sample: str
    """Text sampled from the model at the end."""


def train(
    prepared: Trainable,
    out: Path,
    *,
    start: Literal["fresh", "resume"] = "fresh",
    at: int | None = None,
    data: Literal["same", "new"] = "same",
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the last checkpoint in `out`, or from that of step `at`.
    data: `new` resumes on data, or in an order, that differ from those of the checkpoint.
    reporters: called with the number of steps already taken, returns further reporters.
    Raises CheckpointError, TrainingError, DataError.
    """
    device_run, began = prepared.device_run, time.perf_counter()
    run = device_run.run
    _check_folder(out, start)
    check_disk_space(out, device_run, run.training.max_to_keep)
    with contextlib.ExitStack() as stack:
        preemption = stack.enter_context(Preemption().listening())
        chief = jax.process_index() == 0
        if chief:
            from meshwright.trainer.lock import locked  # process 0 alone takes it

            stack.enter_context(locked(out))
        checkpoints = stack.enter_context(Checkpoints(out / "checkpoints", max_to_keep=run.training.max_to_keep))
        if start == "fresh":
            state, position = _first_state(device_run, out), Position(0, 0)
        else:
            from meshwright.trainer.resume import resume  # a new run has nothing to resume

            state, position = resume(device_run, checkpoints, at, prepared.fingerprint(), data)
        if chief:
            write_run(run, out / "run.json")
            prepared.write_files(out)
        sinks = list(reporters(position.step))
        if chief and run.reporters:
            from meshwright.report.reporters import build_reporters  # most runs name none

            sinks += build_reporters(out, run)
        if chief:
            sinks += [JsonLines(out / "metrics.jsonl", upto=position.step)]
        for sink in sinks:
            stack.callback(sink.close)
        meter = prepared.meter(sinks)
        return _Loop(prepared, out, checkpoints, meter, preemption, position, position, began).run(state)


def _check_folder(out: Path, start: str) -> None:
    steps = committed_steps(out / "checkpoints")
    if start == "fresh" and steps:
        raise ConfigError(
            f"a new run in {out}",
            f"it holds the checkpoint of step {steps[-1]} of another",
            "--resume to continue that one, or another --out",
        )
    if start == "resume" and not steps:
        raise CheckpointError(
            f"resuming the run in {out}", "no checkpoint was committed there", "leave --resume out, or another --out"
        )


def _first_state(device_run: DeviceRun, out: Path) -> State:
    """Initial values, or the weights that the run starts from."""
    if device_run.run.init_from is None:
        return device_run.initial_state()
    from meshwright.checkpoint.initial_weights import load_initial_weights  # most runs start from initial values

    return device_run.state_of(load_initial_weights(device_run, out))


@dataclasses.dataclass
class _Loop:
    """The training loop and what it measures."""

    prepared: Trainable
    out: Path
    checkpoints: Checkpoints
    meter: Meter
    preemption: Preemption
    started: Position
    """Place at which this start of the run began."""
    origin: Position
    """Place from which the feed counts: that, or the checkpoint that the run returned to."""
    began: float
    """Time at which `train` was called."""
    compile_seconds: float = 0.0
    save_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    held_out_loss: float | None = None
    bad_steps: int = 0

    @property
    def ramp(self) -> BatchRamp:
        return ramp_of(self.prepared.device_run.run.training)

    def run(self, state: State) -> Summary:
        held_out_loss, began = self.prepared.evaluator(), time.perf_counter()
        compiled: dict[int, CompiledTrainStep] = {}
        reached, step, saved = self._take_steps(state, held_out_loss, compiled)
        while isinstance(reached, Position):
            reached, step, saved = self._take_steps(self._roll_back(reached), held_out_loss, compiled)
        state = reached
        if step > saved:
            self._save(step, state)
        sample = ""
        if not self.preemption.signal and step > self.started.step:
            self._evaluate(step, state, held_out_loss)
            sample = self.prepared.sample(state, self.out)
        self.checkpoints.wait()
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.started.step,
            tokens=(self._samples_read(step) - self.started.cursor) * self.meter.per_sample,
            seconds=time.perf_counter() - began,
            data_wait_seconds=self.data_wait_seconds,
            start_seconds=(self.meter.first_read_at or began) - self.began,
            compile_seconds=self.compile_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.meter.step_seconds,
            interrupted_by=self.preemption.signal,
            sample=sample,
        )

    def _take_steps(
        self, state: State, held_out_loss: Callable[[State], float] | None, compiled: dict[int, CompiledTrainStep]
    ) -> tuple[State | Position, int, int]:
        """Trains to the end, a signal, or a step that has to be undone.

        Returns the state, or the place to roll back to; the steps taken; and the step of the last checkpoint.
        """
        training = self.prepared.device_run.run.training
        self.feed = feed = self.prepared.feed(self.origin)
        saved = step = self.origin.step
        batch: Any = None
        reached: State | Position = state
        while step < training.steps and not self.preemption.stops_before(step):
            previous, batch = batch, next(feed)
            size = jax.tree.leaves(batch)[0].shape[0]
            if size not in compiled:
                compiled[size] = self._compile(batch)
            state, metrics = compiled[size](state, batch)
            step += 1
            # While this step runs, the metrics of the previous one are read: the device never waits for the host.
            reached = self._settle(state, previous)
            if isinstance(reached, Position):
                break
            if reached is not state:  # the step before was left out, and this one with it
                state, metrics = compiled[size](reached, batch)
            self.meter.push(step, metrics)
            if training.eval_every and step % training.eval_every == 0 and step < training.steps:
                self._evaluate(step, state, held_out_loss)
            if training.save_every and step % training.save_every == 0 and step < training.steps:
                reached = self._settle(state, batch)
                if isinstance(reached, Position):
                    break
                state, saved = reached, step
                self._save(step, state)
        else:
            reached = self._settle(state, batch)
        self.data_wait_seconds += feed.wait_seconds
        return reached, step, saved

    def _settle(self, state: State, batch: Any) -> State | Position:
        """Reads the pending step, whose batch is `batch`. Returns the state to go on with, or the place to return to.

        A step that has to be undone stops the run unless its policy is another.
        """
        bad = self.meter.read()
        if bad is None:
            return state
        from meshwright.trainer.evidence import handle  # loaded for a run with a bad step

        self.bad_steps += 1
        place = Position(bad.step - 1, self._samples_read(bad.step - 1), self.origin.skipped)
        return handle(self.out, self.prepared.device_run, bad, state, batch, place, self.bad_steps)

    def _roll_back(self, place: Position) -> State:
        """Returns the state of the last checkpoint, or the first state. place: has the samples that are left out."""
        self.checkpoints.wait()
        if committed_steps(self.checkpoints.folder):
            state, manifest = self.checkpoints.restore(self.prepared.device_run)
            self.origin = Position(manifest.step, manifest.cursor, place.skipped, manifest.data)
        else:
            state, self.origin = _first_state(self.prepared.device_run, self.out), Position(0, 0, place.skipped)
        self.meter.rewind(self.origin.step)
        return state

    def _compile(self, batch: Any) -> CompiledTrainStep:
        began = time.perf_counter()
        compiled = self.prepared.compile(batch)
        self.compile_seconds += time.perf_counter() - began
        return compiled

    def _samples_read(self, step: int) -> int:
        return self.origin.cursor + self.ramp.read_before(step) - self.ramp.read_before(self.origin.step)

    def _save(self, step: int, state: State) -> None:
        began = time.perf_counter()
        self.checkpoints.save(
            state, self.prepared.device_run, step=step, cursor=self._samples_read(step),
            skipped=self.origin.skipped, data=self.feed.position, corpus=self.prepared.fingerprint(),
        )  # fmt: skip
        self.save_seconds += time.perf_counter() - began

    def _evaluate(self, step: int, state: State, held_out_loss: Callable[[State], float] | None) -> None:
        if held_out_loss is not None:
            self.held_out_loss = held_out_loss(state)
            self.meter.report(step, {"held-out loss": self.held_out_loss})

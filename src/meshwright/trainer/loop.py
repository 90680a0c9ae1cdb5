"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from meshwright.activity import activity, watched_by
from meshwright.checkpoint.checkpoints import Checkpoints, check_room
from meshwright.checkpoint.steps import committed_steps
from meshwright.data.ramp import BatchRamp, ramp_of
from meshwright.errors import CheckpointError, ConfigError
from meshwright.report import Reporter
from meshwright.report.files import EventLog, JsonLines
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.step.device_run import DeviceRun, State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.storage.paths import path_of
from meshwright.trainer.meter import Meter
from meshwright.trainer.phases import BEATS, Phases
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

    In a notebook it shows the run's page:
        >>> summary._repr_html_()[:7]
        '<iframe'
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

    def _repr_html_(self) -> str:
        from meshwright import view  # a notebook shows the run's page

        return view(self.out)._repr_html_()


def train(
    prepared: Trainable,
    out: Path,
    *,
    start: Literal["fresh", "resume"] = "fresh",
    at: int | None = None,
    data: Literal["same", "new"] = "same",
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
    watchdog: Any = None,
    page: Callable[[], Path] | None = None,
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the last checkpoint in `out`, or from that of step `at`.
    data: `new` resumes on data, or in an order, that differ from those of the checkpoint.
    reporters: called with the number of steps already taken, returns further reporters.
    page: writes the run's page and returns its file, for reporters that keep it.  watchdog: a `Watchdog`.
    Raises CheckpointError, TrainingError, DataError, ConfigError, HostError.
    """
    device_run, began, phases = prepared.device_run, time.perf_counter(), Phases()
    run, out = device_run.run, path_of(out)
    with contextlib.ExitStack() as stack:
        if jax.process_count() > 1 or BEATS in os.environ:
            from meshwright.trainer.same_hosts import watched  # not for a process that is alone

            stack.enter_context(watched(prepared, out, phases, watchdog))
        _check_folder(out, start, run.local_checkpoints.path)
        check_room(out, device_run, run.training.max_to_keep)
        preemption = stack.enter_context(Preemption().listening())
        if chief := jax.process_index() == 0:
            from meshwright.trainer.lock import locked  # process 0 alone takes it

            stack.enter_context(locked(out))
            stack.enter_context(watched_by(events := EventLog(out / "events.jsonl")))
        checkpoints = stack.enter_context(_open_checkpoints(device_run, out))
        if start == "fresh":
            checkpoints.forget_local()
            state, position = _first_state(device_run, out), Position(0, 0)
        else:
            from meshwright.trainer.resume import resume  # a new run has nothing to resume

            with activity("restore", "restoring the last checkpoint", "restored the last checkpoint"):
                state, position = resume(device_run, checkpoints, at, prepared.fingerprint(), data)
        if chief:
            write_run(run, out / "run.json")
            prepared.write_files(out)
        sinks = list(reporters(position.step)) + (_named_reporters(out, run) if chief else [])
        if chief:
            sinks += [JsonLines(out / "metrics.jsonl", upto=position.step), events]
            events.start(
                position.step, mesh=str(device_run.shape), devices=device_run.mesh.size, processes=jax.process_count(),
                kind=device_run.mesh.devices.flat[0].device_kind, how=start,
            )  # fmt: skip
        for sink in sinks:
            stack.callback(sink.close)
        meter = prepared.meter(sinks)
        summary = _Loop(prepared, out, checkpoints, meter, preemption, position, position, began, phases).run(state)
        for sink in sinks if page is not None else ():
            getattr(sink, "keep_page", lambda page: None)(page)
        return summary


def _named_reporters(out: Path, run: Run) -> list[Reporter]:
    if not run.reporters:
        return []
    from meshwright.report.reporters import build_reporters  # most runs name none

    return build_reporters(out, run)


def _open_checkpoints(device_run: DeviceRun, out: Path) -> Checkpoints:
    run = device_run.run
    if run.local_checkpoints.path is None:
        return Checkpoints(out / "checkpoints", max_to_keep=run.training.max_to_keep)
    from meshwright.trainer.tiers import Tiers  # most runs have one tier

    return Tiers(out, device_run, max_to_keep=run.training.max_to_keep, local=run.local_checkpoints)


def _check_folder(out: Path, start: str, local: str | None) -> None:
    steps = committed_steps(out / "checkpoints")
    if start == "fresh" and steps:
        raise ConfigError(
            f"a new run in {out}",
            f"it holds the checkpoint of step {steps[-1]} of another",
            "--resume to continue that one, or another --out",
        )
    if start == "resume" and not steps and local is None:
        raise CheckpointError(
            f"resuming the run in {out}", "no checkpoint was committed there", "leave --resume out, or another --out"
        )


def _first_state(device_run: DeviceRun, out: Path) -> State:
    """Initial values, or the weights that the run starts from."""
    with activity("initialise", "making the first state", "made the first state"):
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
    phases: Phases
    compile_seconds: float = 0.0
    save_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    held_out_loss: float | None = None
    bad_steps: int = 0

    @property
    def ramp(self) -> BatchRamp:
        return ramp_of(self.prepared.device_run.run.training)

    def run(self, state: State) -> Summary:
        held_out_loss, began = self.prepared.evaluator(), time.perf_counter()
        compiled: dict[int, Any] = {}
        reached, step, saved = self._take_steps(state, held_out_loss, compiled)
        while isinstance(reached, Position):
            reached, step, saved = self._take_steps(self._roll_back(reached), held_out_loss, compiled)
        state = reached
        if step > saved:
            self._save(step, state, self.checkpoints.save)
        sample = ""
        if not self.preemption.signal and step > self.started.step:
            self._evaluate(step, state, held_out_loss)
            sample = self._sample(step, state)
        self.phases.enter("save", step)
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
        training, sample_every = self.prepared.device_run.run.training, self.prepared.device_run.run.data.sample_every
        self.feed = feed = self.prepared.feed(self.origin)
        saved = step = self.origin.step
        batch: Any = None
        reached: State | Position = state
        while step < training.steps and not self.preemption.stops_before(step):
            self.checkpoints.check()
            self.phases.enter("data", step)
            previous, batch = batch, next(feed)
            size = jax.tree.leaves(batch)[0].shape[0]
            if size not in compiled:
                compiled[size] = self._compile(batch)
            self.phases.enter("step", step + 1)
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
            if sample_every and step % sample_every == 0 and step < training.steps:
                self._sample(step, state)
            save = self._save_due(step)
            if save is not None:
                reached = self._settle(state, batch)
                if isinstance(reached, Position):
                    break
                state, saved = reached, step if save == self.checkpoints.save else saved
                self._save(step, state, save)
        else:
            reached = self._settle(state, batch)
        self.data_wait_seconds += feed.wait_seconds
        return reached, step, saved

    def _save_due(self, step: int) -> Callable[..., None] | None:
        """Returns where the state of this step is saved: in the output folder, on the hosts' disks, or not at all."""
        run = self.prepared.device_run.run
        if step >= run.training.steps:
            return None
        if run.training.save_every and step % run.training.save_every == 0:
            return self.checkpoints.save
        every = run.local_checkpoints.every
        return self.checkpoints.save_locally if every and step % every == 0 else None

    def _settle(self, state: State, batch: Any) -> State | Position:
        """Reads the pending step, whose batch is `batch`. Returns the state to go on with, or the place to return to.

        A step that has to be undone stops the run unless its policy is another.
        """
        bad = self.meter.read(
            {"input wait": self.data_wait_seconds + self.feed.wait_seconds, "compiling": self.compile_seconds,
             "saving": self.save_seconds, "evaluating": self.evaluation_seconds}
        )  # fmt: skip
        if bad is None:
            return state
        from meshwright.trainer.evidence import handle  # loaded for a run with a bad step

        self.bad_steps += 1
        place = Position(bad.step - 1, self._samples_read(bad.step - 1), self.origin.skipped)
        return handle(self.out, self.prepared, bad, state, batch, place, self.bad_steps)

    def _roll_back(self, place: Position) -> State:
        """Returns the state of the last checkpoint, or the first state. place: has the samples that are left out."""
        self.checkpoints.wait()
        if self.checkpoints.steps():
            state, manifest = self.checkpoints.restore(self.prepared.device_run)
            self.origin = Position(manifest.step, manifest.cursor, place.skipped, manifest.data)
        else:
            state, self.origin = _first_state(self.prepared.device_run, self.out), Position(0, 0, place.skipped)
        self.meter.rewind(self.origin.step)
        return state

    def _compile(self, batch: Any) -> Any:
        self.phases.enter("compile")
        with activity("compile", "compiling the train step", "compiled the train step") as work:
            compiled = self.prepared.compile(batch)
        self.compile_seconds += work.seconds
        from meshwright.trainer.silent import checked  # compares in runs that ask for it

        return checked(compiled, self.prepared.device_run.run.faults.check_every, self.phases)

    def _samples_read(self, step: int) -> int:
        return self.origin.cursor + self.ramp.read_before(step) - self.ramp.read_before(self.origin.step)

    def _save(self, step: int, state: State, save: Callable[..., None]) -> None:
        self.phases.enter("save", step)
        with activity("save", f"saving the checkpoint of step {step}", "saved a checkpoint", step) as work:
            save(
                state, self.prepared.device_run, step=step, cursor=self._samples_read(step),
                skipped=self.origin.skipped, data=self.feed.position, corpus=self.prepared.fingerprint(),
            )  # fmt: skip
        self.save_seconds += work.seconds

    def _sample(self, step: int, state: State) -> str:
        """Samples from the model, where the run asks for it, and passes the text on."""
        self.phases.enter("sample", step)
        text = self.prepared.sample(state, self.out)
        if text:
            self.meter.sample(step, text)
        return text

    def _evaluate(self, step: int, state: State, held_out_loss: Callable[[State], float] | None) -> None:
        if held_out_loss is not None:
            self.phases.enter("evaluate", step)
            with activity("evaluate", "evaluating on held-out text", "evaluated", step) as work:
                self.held_out_loss = held_out_loss(state)
                work.result = f"held-out loss {self.held_out_loss:.4f}"
            self.evaluation_seconds += work.seconds
            self.meter.report(step, {"held-out loss": self.held_out_loss})

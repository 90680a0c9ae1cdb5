"""Training: prepare and restore, then feed, step, report, save, evaluate."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax

from meshwright.activity import Activity, activity, watched_by
from meshwright.checkpoint.checkpoints import check_room
from meshwright.checkpoint.steps import committed_steps, explained_writing
from meshwright.data.batch import ramp_of
from meshwright.errors import Closing
from meshwright.formatting import Shown, format_step, format_time
from meshwright.hardware.agreement import agree, answer_of_the_first, choose_together
from meshwright.reporters import BETWEEN, Reporter, build_reporters
from meshwright.reporters.files import EventLog, JsonLines, last_start
from meshwright.runs.run_file import write_run
from meshwright.signs import NOBODY, PREPARING, Phases, end_with, in_phases, waiting
from meshwright.step.device_run import DeviceRun, State
from meshwright.storage.paths import path_of
from meshwright.trainer.heartbeat import beating
from meshwright.trainer.lock import locked
from meshwright.trainer.meter import Meter
from meshwright.trainer.preemption import Preemption
from meshwright.trainer.prepare import Position, PreparedRun, Trainable, prepare_run
from meshwright.trainer.recovery import (
    Resumed,
    begin,
    handle_bad_step,
    resume,
    run_identity,
)
from meshwright.trainer.relations import check_new
from meshwright.trainer.tiers import Tiers
from meshwright.trainer.watchdog import Watchdog

Start = Literal["fresh", "resume", "resume if exists"]
"""How a run begins; the last resumes where all hosts can read a checkpoint, and is fresh where there is none."""
__all__ = ["PreparedRun", "Start", "Summary", "Trainable", "prepare_run", "train"]


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(Shown):
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
    """Seconds that the loop waited for data, on the host that waited most: the others wait for it."""
    data_wait_host: int
    """Process that waited most for its data."""
    start_seconds: float
    """Seconds from the beginning to the end of the first step: initial values or restore, compilation, that step."""
    compile_seconds: float
    """Seconds that compiling the train step and the evaluation took."""
    save_seconds: float
    """Seconds that the loop waited for checkpoints."""
    step_seconds: float
    """Median seconds from one step to the next, waiting for data included."""
    interrupted_by: int
    """Number of the signal that ended the run early; 0 where it came to its end."""
    sample: str
    """Text sampled from the model at the end."""

    def brief(self) -> str:
        """Returns the step, the losses, the time and the folder."""
        lines = [f"{self.steps:,} steps, loss {self.loss:.4f}"]
        if self.held_out_loss is not None:
            lines[0] += f", held-out loss {self.held_out_loss:.4f}"
        speed = f", {format_step(self.step_seconds)} per step" if self.steps_taken else ""
        lines.append(f"{format_time(self.seconds)}{speed}")
        if self.interrupted_by:
            lines.append(f"ended by signal {self.interrupted_by}")
        lines.append(f"in {self.out}")
        return "; ".join(lines)


def train(
    prepared: Trainable,
    out: Path,
    *,
    start: Start = "fresh",
    at: int | None = None,
    accept: Sequence[str] = (),
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
    watchdog: Watchdog | None = None,
    preemption: Preemption | None = None,
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the newest checkpoint that all hosts can read, or from that of step `at`.
    accept: names of differences from the checkpoint with which it resumes although they change the model or its data.
    reporters: called with the number of steps already taken, returns further reporters.
    preemption: signals for which this process listens already.
    Raises CheckpointError, TrainingError, DataError, ConfigError, HostError.
    """
    device_run, began, phases = prepared.device_run, time.perf_counter(), Phases()
    run, out, chief = device_run.run, path_of(out), jax.process_index() == 0
    with Closing() as stack:
        stack.enter_context(in_phases(phases))
        if (hosts := hosts_module()) is not None:
            stack.enter_context(hosts.watching(out, phases, watchdog or Watchdog()))
            agree("run, versions, data or tokenizer", hosts.same_fields(prepared))
        answer_of_the_first(lambda: _check_folder(out, device_run, start, at))
        if hosts is not None:
            hosts.check_shared(out)
        if preemption is None:
            preemption = stack.enter_context(Preemption().listening())
        answer_of_the_first(
            lambda: stack.enter_context(locked(out))
        )  # if another run holds it, all stop alike
        if chief:
            events = EventLog(out / "events.jsonl")
            stack.callback(events.release)
            stack.enter_context(watched_by(events))
        keep, local = run.training.max_to_keep, run.local_checkpoints
        checkpoints = Tiers(
            out,
            device_run,
            max_to_keep=keep,
            local=local,
            saves=phases.saves,
            patience=(watchdog or Watchdog()).patience,
            identity=answer_of_the_first(lambda: run_identity(out)),
        )
        stack.enter_context(contextlib.closing(checkpoints))
        stack.enter_context(beating(checkpoints.look, "identity of the output folder"))
        if start == "resume if exists":
            start = "resume" if checkpoints.steps() else "fresh"
        if start == "fresh":
            checkpoints.forget_local()
            resumed = Resumed(_first_state(device_run, out), begin(out), {}, 0)
        else:
            with activity(
                "restore", "restoring the last checkpoint", "restored the last checkpoint"
            ) as work:
                work.record = {"left out": checkpoints.left_out}
                resumed = resume(prepared, checkpoints, at, accept, work.record)
        position = resumed.position
        checkpoints.identity = position.identity
        sinks = list(reporters(position.step))
        if chief:
            with explained_writing(out):
                write_run(run, out / "run.json")
                prepared.write_files(out)
            # Before a file is open, as names may be refused.
            trackers = build_reporters(out, run)
            if start != "fresh":
                for tracker in trackers:
                    getattr(tracker, "rewind", lambda step: None)(position.step)
            sinks += [*trackers, events]
            with explained_writing(out):
                lines = JsonLines(
                    out / "metrics.jsonl",
                    upto=position.step,
                    every=resumed.log_every,
                    since=last_start(out).get("checked"),
                )
            sinks.append(lines)
            events.start(
                position.step,
                mesh=str(device_run.layout.shape),
                devices=device_run.mesh.size,
                processes=jax.process_count(),
                kind=device_run.mesh.devices.flat[0].device_kind,
                how=start,
                identity=position.identity,
                checked=lines.checked,
                **({"changes": resumed.changes} if resumed.changes else {}),
                **({"metrics": lines.hole} if lines.hole else {}),
            )
        for sink in sinks:
            stack.callback(sink.close)
        meter = prepared.meter(sinks)
        return _Loop(prepared, out, checkpoints, meter, preemption, phases, began, position).train(
            resumed.state
        )


def hosts_module() -> ModuleType | None:
    """Returns `trainer.hosts`, which a process needs that has others; None in one that is alone."""
    if jax.process_count() == 1:
        return None
    from meshwright.trainer import hosts  # most runs have one process

    return hosts


@contextlib.contextmanager
def to_the_end(out: Path, watchdog: Watchdog | None) -> Iterator[None]:
    """Holds the processes of a run together while the context is open: they are watched, and leave together.

    For a program that ends with the run; what it prints at the end belongs inside.
    """
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(in_phases(Phases(PREPARING)))
        hosts = hosts_module()
        if hosts is not None:
            stack.enter_context(hosts.watching(out, phases, watchdog or Watchdog()))
        yield
        if hosts is not None:
            hosts.leave_together()


def _check_folder(out: Path, device_run: DeviceRun, start: str, at: int | None) -> None:
    """Raises ConfigError for a new run where another has checkpoints, and RoomError where there is no room."""
    steps = committed_steps(out / "checkpoints")
    if start == "fresh":
        check_new(out)
    replaced = sum(at is None or step <= at for step in steps)
    check_room(out, device_run, device_run.run.training.max_to_keep, replaced)


def _first_state(device_run: DeviceRun, out: Path) -> State:
    with activity("initialise", "making the first state", "made the first state") as work:
        if device_run.run.init_from is None:
            return device_run.initial_state()
        from meshwright.checkpoint.initial_weights import (
            describe_initial_weights,
            load_initial_weights,
        )

        work.result = describe_initial_weights(device_run.run)
        return device_run.state_of(load_initial_weights(device_run, out))


def _longest(seconds: list[float]) -> dict[str, Any]:
    """Returns the longest of the hosts' waits, and the host that waited."""
    host = max(range(len(seconds)), key=seconds.__getitem__)
    return {"seconds": seconds[host], "host": host}


class _RollBack(Exception):
    """A step has to be undone; its argument is the place before it, with the samples that are left out."""


@dataclasses.dataclass
class _Loop:
    prepared: Trainable
    out: Path
    checkpoints: Tiers
    meter: Meter
    preemption: Preemption
    phases: Phases
    began: float
    """Time at which `train` was called."""
    started: Position
    """Place at which this start of the run begins."""

    def __post_init__(self) -> None:
        # Place from which the feed counts: where this start began, or the checkpoint that the run returned to.
        self.origin = self.started
        self.run, self.ramp = (
            self.prepared.device_run.run,
            ramp_of(self.prepared.device_run.run.training),
        )
        self.evaluator: Callable[[State], float] | None = None
        self.meter.norms.extend(self.started.norms)
        self.compiled: dict[int, Any] = {}
        self.fingerprint = self.prepared.fingerprint()
        self.spent = dict.fromkeys(("input wait", *BETWEEN), 0.0)
        self.held_out_loss: float | None = None
        self.bad_steps = 0

    def _compile(self) -> None:
        """Compiles every program of the training: what does not fit is refused before the first step."""
        for batch in self.prepared.abstract_batches(self.started.step):
            self._compiled_for(batch)
        with self._spending(
            "compiling", "compile", "compiling the evaluation", "compiled the evaluation"
        ):
            self.evaluator = self.prepared.evaluator()

    def train(self, state: State) -> Summary:
        began = time.perf_counter()
        if self.started.step < self.run.training.steps and not self.preemption.stops():
            self._compile()
        while True:
            try:
                state, step, saved = self._take_steps(state)
                break
            except _RollBack as back:
                state = self._roll_back(back.args[0])
        if step > saved:
            self._save(step, state, self.checkpoints.save)
        sample = ""
        if step > self.started.step and not self.preemption.stops():
            self._evaluate(step, state)
        if step > self.started.step and not self.preemption.stops():
            sample = self._sample(step, state)
        self.phases.enter("save", step)
        self.checkpoints.wait()
        self.checkpoints.check_folder("ending the run")
        waits = choose_together("seconds waited for data", self.spent["input wait"], _longest)
        # What is left each host does alone: none of it makes the run less.
        end_with(128 + self.preemption.stopped_by if self.preemption.stopped_by else 0)
        self.phases.enter("leave", step)
        self.checkpoints.forget_local()  # the output folder has the last state
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.started.step,
            tokens=(self._samples_read(step) - self.started.cursor) * self.meter.per_sample,
            seconds=time.perf_counter() - began,
            data_wait_seconds=waits["seconds"],
            data_wait_host=waits["host"],
            start_seconds=(self.meter.first_read_at or began) - self.began,
            compile_seconds=self.spent["compiling"],
            save_seconds=self.spent["saving"],
            step_seconds=self.meter.step_seconds,
            interrupted_by=self.preemption.stopped_by,
            sample=sample,
        )

    def _take_steps(self, state: State) -> tuple[State, int, int]:
        """Trains to the end or a signal. Returns the state, the steps taken, and the step of the last checkpoint."""
        training, sample_every = self.run.training, self.run.data.sample_every
        self.feed = feed = self.prepared.feed(self.origin)
        saved = step = self.origin.step
        batch: Any = None
        try:
            while step < training.steps and not self.preemption.stops():
                self.checkpoints.check()
                self.phases.enter("data", step)
                previous = batch
                with waiting("its data", NOBODY):
                    batch = next(feed)
                train_step = self._compiled_for(batch)
                self.phases.waited = self.spent["input wait"] + feed.wait_seconds
                self.phases.enter("step", step + 1)
                with waiting("the devices"):
                    new, metrics = train_step(state, batch)
                step += 1
                # While this step runs, the metrics of the previous one are read: the device never waits for the host.
                state = self._settle(new, previous)
                if state is not new:  # the step before was left out, and this one with it
                    with waiting("the devices"):
                        state, metrics = train_step(state, batch)
                self.meter.push(step, metrics)
                if step == training.steps:
                    break
                # What comes between two steps begins when the step before has ended: its time is its own.
                if training.eval_every and step % training.eval_every == 0:
                    state = self._settle(state, batch)
                    self._evaluate(step, state)
                if sample_every and step % sample_every == 0:
                    state = self._settle(state, batch)
                    self._sample(step, state)
                shared, local = training.save_every, self.run.local_checkpoints.every
                if shared and step % shared == 0:
                    state, saved = self._settle(state, batch), step
                    self._save(step, state, self.checkpoints.save)
                elif local and step % local == 0:
                    state = self._settle(state, batch)
                    self._save(step, state, self.checkpoints.save_locally)
            return self._settle(state, batch), step, saved
        finally:
            self.spent["input wait"] += feed.wait_seconds

    def _settle(self, state: State, batch: Any) -> State:
        """Reads the pending step, whose batch is `batch`; returns the state to continue with.

        A step that has to be undone stops the run, unless its policy is to skip it or to roll back.
        """
        bad = self.meter.read(
            {**self.spent, "input wait": self.spent["input wait"] + self.feed.wait_seconds}
        )
        if bad is None:
            return state
        self.bad_steps += 1
        self.checkpoints.check_folder(f"keeping the evidence of step {bad.step}")
        place = self.origin._replace(
            step=bad.step - 1, cursor=self._samples_read(bad.step - 1), data=None
        )
        reached = handle_bad_step(self.out, self.prepared, bad, state, batch, place, self.bad_steps)
        if isinstance(reached, Position):
            raise _RollBack(reached)
        return reached

    def _roll_back(self, place: Position) -> State:
        self.checkpoints.wait()
        if self.checkpoints.steps():
            state, manifest = self.checkpoints.restore(self.prepared.device_run)
            self.origin = place._replace(
                step=manifest.step, cursor=manifest.cursor, data=manifest.data, norms=manifest.norms
            )
        else:
            state, self.origin = (
                _first_state(self.prepared.device_run, self.out),
                place._replace(step=0, cursor=0),
            )
        self.meter.rewind(self.origin.step, self.origin.norms)
        return state

    def _samples_read(self, step: int) -> int:
        return (
            self.origin.cursor
            + self.ramp.read_before(step)
            - self.ramp.read_before(self.origin.step)
        )

    @contextlib.contextmanager
    def _spending(
        self, on: str, phase: str, doing: str, done: str, step: int | None = None
    ) -> Iterator[Activity]:
        self.phases.enter(phase, step)
        with activity(phase, doing, done, step) as work:
            yield work
        self.spent[on] += work.seconds

    def _compiled_for(self, batch: Any) -> Any:
        size = jax.tree.leaves(batch)[0].shape[0]
        if size not in self.compiled:
            with self._spending(
                "compiling", "compile", "compiling the train step", "compiled the train step"
            ):
                compiled: Any = self.prepared.compile(batch)
            if every := self.run.faults.check_every:
                from meshwright.trainer.silent import checked

                compiled = checked(compiled, every, self.phases)
            self.compiled[size] = compiled
        return self.compiled[size]

    def _save(self, step: int, state: State, save: Callable[..., None]) -> None:
        with self._spending(
            "saving", "save", f"saving the checkpoint of step {step}", "saved a checkpoint", step
        ):
            save(
                state,
                self.prepared.device_run,
                step=step,
                cursor=self._samples_read(step),
                skipped=self.origin.skipped,
                data=self.feed.position,
                corpus=self.fingerprint,
                norms=tuple(self.meter.norms),
                identity=self.origin.identity,
                began=(self.origin.step, self.origin.cursor),
            )

    def _sample(self, step: int, state: State) -> str:
        self.phases.enter("sample", step)
        self.checkpoints.check_folder(f"sampling after step {step}")
        began = time.perf_counter()
        text = self.prepared.sample(state, self.out)
        self.spent["sampling"] += time.perf_counter() - began
        if text:
            self.meter.sample(step, text)
        return text

    def _evaluate(self, step: int, state: State) -> None:
        if self.evaluator is not None:
            with self._spending(
                "evaluating", "evaluate", "evaluating on held-out text", "evaluated", step
            ) as work:
                self.held_out_loss = self.evaluator(state)
                work.result = f"held-out loss {self.held_out_loss:.4f}"
            self.meter.report(step, {"held-out loss": self.held_out_loss})

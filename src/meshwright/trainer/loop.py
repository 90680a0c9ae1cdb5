"""The training loop: prepare and restore, then feed, step, report, evaluate, sample, save.

The device never waits for the host. While it computes a step, the host reads the metrics of the
step before, hands them to the reporters, and fetches the next batch:

    device   | step 1              | step 2              | step 3              |
    host     | read 0 | batch 2 |   | read 1 | batch 3 |   | read 2 | batch 4 |

What happens between two steps (evaluation, a sample, a checkpoint) begins when the step before has
been read.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.activity import Activity, activity
from meshwright.data.batch import ramp_of
from meshwright.errors import Closing
from meshwright.hardware.agreement import answer_of_the_first, choose_together
from meshwright.models.model import Metrics
from meshwright.reporters import BETWEEN, Reporter
from meshwright.reporters.files import EventLog
from meshwright.signs import NOBODY, Phases, end_with, in_phases, waiting
from meshwright.step.state import State
from meshwright.storage.paths import path_of
from meshwright.trainer.alarms import BAD_STEP, AlarmOptions, Alarms, tell
from meshwright.trainer.explain_step import MOST_RECORDED, explain_step
from meshwright.trainer.first_tensor import Alarm
from meshwright.trainer.meter import Meter
from meshwright.trainer.opening import (
    Start,
    begin_or_resume,
    check_folder,
    first_state,
    hosts_module,
    keep_processes,
    lock_folder,
    open_checkpoints,
    open_events,
    open_reporters,
    to_the_end,
    watch_hosts,
    watch_machine,
    watch_steps,
)
from meshwright.trainer.preemption import Preemption
from meshwright.trainer.prepare import Batches, Position, PreparedRun, Trainable, prepare_run
from meshwright.trainer.recovery import handle_bad_step, index_in_stream
from meshwright.trainer.replicas import Replicas, have_replicas
from meshwright.trainer.summary import Summary
from meshwright.trainer.tiers import Tiers, say
from meshwright.trainer.watchdog import Watchdog

__all__ = [
    "PreparedRun",
    "Start",
    "Summary",
    "Trainable",
    "hosts_module",
    "prepare_run",
    "to_the_end",
    "train",
]


def train(
    prepared: Trainable,
    out: Path,
    *,
    start: Start = "fresh",
    at: int | None = None,
    accept: Sequence[str] = (),
    reporters: Callable[[int], list[Reporter]] = lambda first: [],
    watchdog: Watchdog | None = None,
    alarms: Alarms | None = None,
    preemption: Preemption | None = None,
) -> Summary:
    """Trains a prepared run, writing checkpoints, metrics, the Run and a text sample into `out`.

    start: `resume` continues from the newest checkpoint that all hosts can read, or from that of
    step `at`.
    accept: names of differences from the checkpoint with which it resumes although they change the
    model or its data.
    reporters: called with the number of steps already taken, returns further reporters.
    alarms: those of this process, which the caller sends; None sends none.
    preemption: signals for which this process listens already.
    Raises CheckpointError, TrainingError, DataError, ConfigError, HostError.
    """
    began = time.perf_counter()
    out = path_of(out)
    device_run = prepared.device_run
    watchdog = watchdog or Watchdog()
    phases = Phases()
    with Closing() as stack:
        stack.enter_context(in_phases(phases))
        watch_hosts(stack, prepared, out, phases, watchdog)
        check_folder(out, device_run, start, at)
        if preemption is None:
            preemption = stack.enter_context(Preemption().listening())
        lock_folder(stack, out)
        events = open_events(stack, out)
        watch_steps(stack, alarms or Alarms(AlarmOptions(), out), phases, events)
        watch_machine(stack, out, events)
        checkpoints = open_checkpoints(stack, device_run, out, phases, watchdog)
        keep_processes(stack, out, phases, checkpoints)
        if start == "resume if exists":
            start = "resume" if checkpoints.steps() else "fresh"
        resumed = begin_or_resume(
            prepared, out, checkpoints, resumes=start == "resume", at=at, accept=accept
        )
        sinks = open_reporters(stack, prepared, out, events, resumed, start, reporters)
        loop = _Loop(
            prepared,
            out,
            checkpoints,
            prepared.meter(sinks),
            preemption,
            phases,
            resumed.position,
            events,
        )
        return loop.train(resumed.state, began)


_GOODPUT_PERIOD = 60.0
"""Seconds between two lines of metrics with the goodput of the run so far."""


class _RollBack(Exception):
    """A step has to be undone.

    Its argument is the place before it, with the samples that are left out.
    """


class _Loop:
    """Steps of a run from `started` on, and what happens between them."""

    def __init__(
        self,
        prepared: Trainable,
        out: Path,
        checkpoints: Tiers,
        meter: Meter,
        preemption: Preemption,
        phases: Phases,
        started: Position,
        events: EventLog | None,
    ) -> None:
        self.prepared = prepared
        self.device_run = prepared.device_run
        self.run = prepared.device_run.run
        self.ramp = ramp_of(self.run.training)
        self.fingerprint = prepared.fingerprint()
        self.out = out
        self.checkpoints = checkpoints
        self.meter = meter
        self.meter.norms.extend(started.norms)
        self.preemption = preemption
        self.phases = phases
        self.events = events
        """Log of the run, in process 0."""
        self.goodput_due = time.monotonic() + _GOODPUT_PERIOD
        self.started = started
        """Place at which this start of the run begins."""
        self.origin = started
        """Place from which the feed counts: where this start began, or the checkpoint that the run
        returned to."""
        self.feed: Batches
        self.compiled: dict[int, Any] = {}
        """Train step for each number of sequences in a batch."""
        self.evaluator: Callable[[State], float] | None = None
        self.held_out_loss: float | None = None
        self.spent = dict.fromkeys(("input wait", *BETWEEN), 0.0)
        """Seconds that the loop spent outside the steps, by what on."""
        self.bad_steps = 0
        self.batch: Any = None
        """Last batch that was read."""
        self.explained = 0
        """Bad steps whose first tensor was looked for."""
        self.replicas = Replicas(started.step)

    def train(self, state: State, began: float) -> Summary:
        """Trains to the end of the run or a signal.

        began: time at which the opening of the run began.
        """
        loop_began = time.perf_counter()
        self._note_replicas(state)
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
        waits = self._end(step)
        return Summary(
            out=self.out,
            steps=step,
            loss=self.meter.recent_loss,
            held_out_loss=self.held_out_loss,
            steps_taken=step - self.started.step,
            tokens=(self._samples_read(step) - self.started.cursor) * self.meter.per_sample,
            seconds=time.perf_counter() - loop_began,
            data_wait_seconds=waits["seconds"],
            data_wait_host=waits["host"],
            start_seconds=(self.meter.first_read_at or loop_began) - began,
            compile_seconds=self.spent["compiling"],
            save_seconds=self.spent["saving"],
            step_seconds=self.meter.step_seconds,
            goodput=waits["goodput"],
            interrupted_by=self.preemption.stopped_by,
            sample=sample,
        )

    def _take_steps(self, state: State) -> tuple[State, int, int]:
        """Trains from `origin` to the end of the run or a signal.

        Returns the state, the steps that the run has taken, and the step of the last of these
        states that the output folder has; 0 where it has none of them.
        """
        training = self.run.training
        self.feed = self.prepared.feed(self.origin)
        step = self.origin.step
        saved = step if self._output_has(step) else 0
        batch: Any = None
        try:
            while step < training.steps and not self.preemption.stops():
                self.checkpoints.check()
                previous = batch
                batch = self._next_batch(step)
                state, metrics = self._take_step(step + 1, state, batch, previous)
                step += 1
                if time.monotonic() > self.goodput_due:
                    self._report_goodput(step - 1)
                self.meter.push(step, metrics, self._samples_read(step))
                if step == training.steps:
                    break

                if self._compares_replicas_after(step):
                    state = self._with_equal_replicas(step, self._settle(state, batch))
                if _is_due(training.eval_every, step):
                    state = self._settle(state, batch)
                    self._evaluate(step, state)
                if _is_due(self.run.data.sample_every, step):
                    state = self._settle(state, batch)
                    self._sample(step, state)
                if _is_due(training.save_every, step):
                    state = self._settle(state, batch)
                    self._save(step, state, self.checkpoints.save)
                    saved = step
                elif _is_due(self.run.local_checkpoints.every, step):
                    state = self._settle(state, batch)
                    self._save(step, state, self.checkpoints.save_locally)
            state = self._settle(state, batch)
            if self._compares_replicas and step > self.replicas.compared:
                state = self._with_equal_replicas(step, state)
            return state, step, saved
        finally:
            self.spent["input wait"] += self.feed.wait_seconds

    def _output_has(self, step: int) -> bool:
        """Returns whether the output folder has the state after a step, from which the run goes on.

        The hosts' own disks may have it alone, and these are forgotten when the run ends.
        """
        return self.run.local_checkpoints.path is None or self.checkpoints.output_has(step)

    @property
    def _compares_replicas(self) -> bool:
        """Whether replicas are compared at all."""
        return bool(self.run.faults.check_replicas or self.run.faults.check_every)

    def _compares_replicas_after(self, step: int) -> bool:
        """Whether replicas are compared after a step: where asked for, and before every save."""
        faults = self.run.faults
        saves = (self.run.training.save_every, self.run.local_checkpoints.every)
        return (
            _is_due(faults.check_replicas, step)
            or _is_due(faults.check_every, step)
            or (self._compares_replicas and any(_is_due(every, step) for every in saves))
        )

    def _with_equal_replicas(self, step: int, state: State) -> State:
        """Returns the state after a step, whose replicas are compared and,
        where they differ, replaced.

        Raises _RollBack where no majority of them is equal: a checkpoint has no replicas that
        differ.
        """
        if self.phases.now[:2] != (step, "step"):  # else the step goes on, and is timed as one
            self.phases.enter("step", step)
        settled = self.replicas.make_equal(state, step)
        if settled is None:
            place = self.origin._replace(step=step, cursor=self._samples_read(step), data=None)
            raise _RollBack(place)
        if settled is not state:
            self.meter.replaced()
        return settled

    def _note_replicas(self, state: State) -> None:
        """Says where the comparison that is asked for has nothing to compare."""
        if self._compares_replicas and not have_replicas(state):
            say(
                f"replicas are not compared: on mesh {self.device_run.layout.shape} no tensor is "
                "on several devices"
            )

    def _next_batch(self, step: int) -> Any:
        """Waits for the next batch."""
        self.phases.enter("data", step)
        with waiting("its data", NOBODY):
            self.batch = next(self.feed)
        return self.batch

    def _take_step(
        self, step: int, state: State, batch: Any, previous: Any
    ) -> tuple[State, Metrics]:
        """Dispatches a step, and while it runs reads the one before, whose batch is `previous`."""
        train_step = self._compiled_for(batch)
        self.phases.waited = self._seconds_waited()
        self.phases.enter("step", step)
        with waiting("the devices"):
            new, metrics = train_step(state, batch)
        state = self._settle(new, previous)
        if state is not new:  # the step before was left out, and this one with it
            with waiting("the devices"):
                state, metrics = train_step(state, batch)
        return state, metrics

    def _settle(self, state: State, batch: Any) -> State:
        """Reads the pending step, whose batch is `batch`; returns the state to continue with.

        A step that has to be undone stops the run, unless its policy is to skip it or to roll back.
        """
        bad = self.meter.read({**self.spent, "input wait": self._seconds_waited()})
        if self.meter.alarm is not None:
            self._explain(self.meter.alarm, state, batch)
        if bad is None:
            return state
        self.bad_steps += 1
        tell(BAD_STEP, f"step {bad.step}: {bad.reason}", step=bad.step)
        self.checkpoints.check_folder(f"keeping the evidence of step {bad.step}")
        before = bad.step - 1
        place = self.origin._replace(step=before, cursor=self._samples_read(before), data=None)
        reached = handle_bad_step(self.out, self.prepared, bad, state, batch, place, self.bad_steps)
        if isinstance(reached, Position):
            raise _RollBack(reached)
        return reached

    def _explain(self, alarm: Alarm, state: State, batch: Any) -> None:
        """Says which tensor was first in a bad step, whose batch is `batch`."""
        self.explained += 1
        before = alarm.step - 1
        place = self.origin._replace(step=before, cursor=self._samples_read(before))
        reference = None if self.batch is batch else self.batch
        self.phases.enter("compile", alarm.step)
        explain_step(
            self.prepared,
            self.out,
            alarm,
            state,
            batch,
            reference,
            index_in_stream(place),
            records=self.explained <= MOST_RECORDED,
        )

    def _report_goodput(self, step: int) -> dict[str, float]:
        """Reports the shares of the time so far, and returns them. step: the last that was read."""
        self.goodput_due = time.monotonic() + _GOODPUT_PERIOD
        good = self.events.goodput(step) if self.events is not None else None
        if good is None:
            return {}
        values = good.metrics()
        self.meter.report(step, values)
        return values

    def _roll_back(self, place: Position) -> State:
        """Returns the state of the last checkpoint, or the first state, from which the run goes on.

        place: before the bad step, with the samples that are left out from now on.
        """
        self.checkpoints.wait()
        if self.checkpoints.steps():
            state, manifest = self.checkpoints.restore(self.device_run)
            self.origin = place._replace(
                step=manifest.step, cursor=manifest.cursor, data=manifest.data, norms=manifest.norms
            )
        else:
            state = first_state(self.device_run, self.out)
            self.origin = place._replace(step=0, cursor=0)
        self.meter.rewind(self.origin.step, self.origin.norms)
        self.replicas.compared = self.origin.step
        return state

    def _end(self, step: int) -> dict[str, Any]:
        """Waits for the last save, states the exit code, and drops local checkpoints.

        Returns the longest of the hosts' waits for data, and the goodput of the run.
        """
        self.phases.enter("save", step)
        self.checkpoints.wait()
        self.checkpoints.check_folder("ending the run")
        waits = choose_together("seconds waited for data", self.spent["input wait"], _longest)
        goodput = answer_of_the_first(lambda: self._report_goodput(step))
        # From here on no host waits for another: the run is complete even if one of them dies.
        signal = self.preemption.stopped_by
        end_with(128 + signal if signal else 0)
        self.phases.enter("leave", step)
        self.checkpoints.forget_local()  # the output folder has the last state
        return {**waits, "goodput": goodput}

    def _compile(self) -> None:
        """Compiles every program of the training, so that what does not fit is refused at once."""
        for batch in self.prepared.abstract_batches(self.started.step):
            self._compiled_for(batch)
        with self._spending(
            "compiling", "compile", "compiling the evaluation", "compiled the evaluation"
        ):
            self.evaluator = self.prepared.evaluator()

    def _compiled_for(self, batch: Any) -> Any:
        """Returns the train step for batches of this size, compiled for the first of them."""
        size = jax.tree.leaves(batch)[0].shape[0]
        if size not in self.compiled:
            with self._spending(
                "compiling", "compile", "compiling the train step", "compiled the train step"
            ) as work:
                compiled: Any = self.prepared.compile(batch)
                work.record = {"bytes": compiled.device_bytes}
            every = self.run.faults.check_every
            if every:
                from meshwright.trainer.silent import checked

                compiled = checked(compiled, every, self.phases)
            self.compiled[size] = compiled
        return self.compiled[size]

    def _evaluate(self, step: int, state: State) -> None:
        """Reports the loss on held-out text, if there is any."""
        if self.evaluator is None:
            return
        with self._spending(
            "evaluating", "evaluate", "evaluating on held-out text", "evaluated", step
        ) as work:
            self.held_out_loss = self.evaluator(state)
            work.result = f"held-out loss {self.held_out_loss:.4f}"
        self.meter.report(step, {"held-out loss": self.held_out_loss})

    def _sample(self, step: int, state: State) -> str:
        """Returns text sampled from the model, and reports it; "" where the run asks for none."""
        self.phases.enter("sample", step)
        self.checkpoints.check_folder(f"sampling after step {step}")
        began = time.perf_counter()
        text = self.prepared.sample(state, self.out)
        self.spent["sampling"] += time.perf_counter() - began
        if text:
            self.meter.sample(step, text)
        return text

    def _save(self, step: int, state: State, save: Callable[..., None]) -> None:
        """Starts to write a checkpoint. save: `save` or `save_locally` of the checkpoints."""
        with self._spending(
            "saving", "save", f"saving the checkpoint of step {step}", "saved a checkpoint", step
        ):
            save(
                state,
                self.device_run,
                step=step,
                cursor=self._samples_read(step),
                skipped=self.origin.skipped,
                data=self.feed.position,
                corpus=self.fingerprint,
                norms=tuple(self.meter.norms),
                identity=self.origin.identity,
                began=(self.origin.step, self.origin.cursor),
            )

    @contextlib.contextmanager
    def _spending(
        self, on: str, phase: str, doing: str, done: str, step: int | None = None
    ) -> Iterator[Activity]:
        """Enters a phase and adds the seconds until it ends to those spent `on` it."""
        self.phases.enter(phase, step)
        with activity(phase, doing, done, step) as work:
            yield work
        self.spent[on] += work.seconds

    def _seconds_waited(self) -> float:
        """Returns the seconds that the loop has waited for data."""
        return self.spent["input wait"] + self.feed.wait_seconds

    def _samples_read(self, step: int) -> int:
        """Returns the samples read before the end of a step, without those that were left out."""
        since_origin = self.ramp.read_before(step) - self.ramp.read_before(self.origin.step)
        return self.origin.cursor + since_origin


def _is_due(every: int, step: int) -> bool:
    """Returns whether something happens after a step that happens after `every` steps.

    0 is never.
    """
    return bool(every) and step % every == 0


def _longest(seconds: list[float]) -> dict[str, Any]:
    """Returns the longest of the hosts' waits, and the host that waited."""
    host = max(range(len(seconds)), key=seconds.__getitem__)
    return {"seconds": seconds[host], "host": host}

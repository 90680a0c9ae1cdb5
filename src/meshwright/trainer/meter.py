"""Metrics of the training loop, read one step late so that the device never waits for the host."""

import collections
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.data.batch import Epochs, ramp_of
from meshwright.hardware.chips import find_chip
from meshwright.models.flops import mfu
from meshwright.models.layer_health import HEALTH
from meshwright.models.model import Metrics
from meshwright.reporters import BETWEEN, Reporter, Values
from meshwright.reporters.health import HealthRecord
from meshwright.runs.run import Run
from meshwright.signs import waiting
from meshwright.step.health import HealthReader
from meshwright.trainer.first_tensor import Alarm, Watch


class BadStep(NamedTuple):
    """Step after which a run cannot simply continue."""

    step: int
    values: Values
    finite: bool
    """Whether its update was made: that of a step that is not finite is left out."""
    reason: str


class Meter:
    """Reads each step's metrics while the next step runs, and passes them to the reporters."""

    _RECENT = 20
    """Steps whose losses are averaged for the summary."""
    _TIMED = 500
    """Steps whose times are kept for the median."""
    _FEWEST = 20
    """Gradient norms of which a median is taken."""

    def __init__(
        self,
        reporters: list[Reporter],
        run: Run,
        mesh: Mesh,
        *,
        per_sample: int,
        flops: float,
        health: HealthReader | None = None,
        epochs: Epochs | None = None,
    ):
        """Counts `per_sample` units (tokens, examples) in a sample, of `flops` model FLOPs each.

        health: reads the health of steps; without it that is not reported.  epochs: passes over the
        text, for which a batch that comes again is no fault.
        """
        self._health = health
        self._watch = Watch(epochs)
        self.alarm: Alarm | None = None
        """What is bad of the step that was read last; None where it is as the steps before."""
        self._reporters, self._run, self.per_sample, self._flops = reporters, run, per_sample, flops
        device, self._ramp = mesh.devices.flat[0], ramp_of(run.training)
        chip = None if device.platform == "cpu" else find_chip(device.device_kind)
        self._peak = None if chip is None else chip.flops_bf16 * mesh.size
        self.norms: collections.deque[float] = collections.deque(maxlen=100)
        """Gradient norms of the last steps that were no spikes; empty where the run does not look
        for these."""
        self._pending: tuple[int, Metrics, int] | None = None
        self._losses: list[float] = []
        self._intervals: collections.deque[float] = collections.deque(maxlen=self._TIMED)
        self._read_at: float | None = None
        self._spent: dict[str, float] = {}
        self.first_read_at: float | None = None
        """Time at which the first step was known to have ended."""

    @property
    def recent_loss(self) -> float:
        """Mean loss of the last steps."""
        return float(np.mean(self._losses[-self._RECENT :])) if self._losses else float("nan")

    @property
    def step_seconds(self) -> float:
        """Median time of a step, without what the loop does between steps."""
        return float(np.median(self._intervals)) if self._intervals else float("nan")

    def push(self, step: int, metrics: Metrics, samples: int) -> None:
        """Keeps the metrics of a step that was just dispatched.
        samples: read before its end since the run began."""
        self._pending = (step, metrics, samples)

    def report(self, step: int, values: Values) -> None:
        """Passes values to every reporter."""
        for reporter in self._reporters:
            reporter.write(step, values)

    def sample(self, step: int, text: str) -> None:
        """Passes text sampled from the model to every reporter that takes it."""
        for reporter in self._reporters:
            getattr(reporter, "sample", lambda step, text: None)(step, text)

    def rewind(self, step: int, norms: Sequence[float]) -> None:
        """Forgets the pending step, because the run returned to the state after `step`.

        norms: those before it.
        """
        self._pending = self._read_at = None
        self._watch.rewind()
        self.norms.clear()
        self.norms.extend(norms)
        for reporter in self._reporters:
            getattr(reporter, "rewind", lambda step: None)(step)

    def replaced(self) -> None:
        """Notes that the state was changed between two steps."""
        self._watch.replaced()

    def read(self, spent: Mapping[str, float] | None = None) -> BadStep | None:
        """Waits for the pending step and reports it; returns it where it is bad.

        spent: seconds since the start of the run that the loop spent outside the steps, by name
        (`input wait` and those of `BETWEEN`); the increase since the step before is among its
        metrics. The step's own time, and with it its rate and MFU, is without what the loop did
        between the steps. Rate and MFU count every position of the batch, padding included, as
        those of torchtitan (`labels.numel()`) and MaxText (batch times sequence length) do.
        """
        self.alarm = None
        if self._pending is None:
            return None
        step, metrics, samples = self._pending
        self._pending = None
        with waiting("the devices"):
            on_host = jax.device_get(metrics)
        health = on_host.pop(HEALTH, None)
        sums = {name: (float(total), float(count)) for name, (total, count) in on_host.items()}
        values = {
            name: total / count if count else math.nan for name, (total, count) in sums.items()
        }
        values[self._run.model.unit] = float(samples * self.per_sample)
        if self._ramp.parts:
            values["batch"] = float(self._ramp.batch(step - 1))
        now = time.perf_counter()
        if self._read_at is not None:
            outside = {
                name: seconds - self._spent.get(name, 0.0)
                for name, seconds in (spent or {}).items()
            }
            between = sum(outside.get(name, 0.0) for name in BETWEEN)
            step_seconds = now - self._read_at - between
            self._intervals.append(step_seconds)
            values["step seconds"] = step_seconds
            values |= {
                f"{name} seconds": seconds for name, seconds in outside.items() if seconds > 0
            }
            speed = self._ramp.batch(step - 1) * self.per_sample / step_seconds
            values[f"{self._run.model.unit}/s"] = speed
            if self._peak is not None:
                values["MFU"] = mfu(self._flops, speed, self._peak)
        self._read_at, self._spent = now, dict(spent or {})
        self.first_read_at = self.first_read_at or now
        finite = bool(np.isfinite(values["loss"]) and np.isfinite(values["gradient norm"]))
        if finite:
            self._losses = [*self._losses[-self._RECENT :], values["loss"]]
        if not finite or step % self._run.training.log_every == 0:
            self.report(step, values)
        if health is not None and self._health is not None:
            record = self._health.read(health)
            self._report_health(step, record, finite)
            self.alarm = self._watch.look(
                step, values["loss"], values["gradient norm"], record, finite
            )
        reason = "" if finite else "its loss or gradient is not finite"
        if not sums["loss"][1]:
            reason = "the total weight of its batch is 0, and a mean over nothing is no loss"
        if finite and self._run.faults.spike:
            reason = self._note_norm(values["gradient norm"])
        return BadStep(step, values, finite, reason) if reason else None

    def _report_health(self, step: int, record: HealthRecord, finite: bool) -> None:
        """Passes the health of a step to every reporter that takes it.

        That of the first step, of those that are due, and of those that are not finite.
        """
        is_due = step == 1 or step % self._run.training.health_every == 0
        if finite and not is_due:
            return
        for reporter in self._reporters:
            getattr(reporter, "health", lambda step, record: None)(step, record)

    def _note_norm(self, norm: float) -> str:
        """Adds a gradient norm to those of the last steps, unless it is a spike.

        Returns how far a spike is above the median of those before it; "" for any other norm.
        """
        if len(self.norms) >= self._FEWEST:
            median = float(np.median(self.norms))
            if norm > self._run.faults.spike * median:
                return (
                    f"its gradient norm is {norm:.4g}, {norm / median:.3g} times the median of the "
                    "steps before it"
                )
        self.norms.append(norm)
        return ""

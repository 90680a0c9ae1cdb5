"""Cost of the training loop: steps dispatched alone against steps with feed and metrics, by turns."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.data.batch import BatchRamp
from meshwright.data.feed import Feed, Windows, build_stream
from meshwright.data.tokenizers import Bytes
from meshwright.data.tokens import TokenArray, TokenFile
from meshwright.errors import TrainingError
from meshwright.models.flops import training_flops_per_token
from meshwright.models.model import vocab_size
from meshwright.reporters import Reporter
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.trainer.meter import BadStep, Meter

_DISPATCHES = 8
"""Calls of which the dispatch time is the median."""
_WINDOWS = 64
"""Windows of random text."""


@dataclasses.dataclass(frozen=True)
class LoopCost:
    """Seconds per step; medians over rounds."""

    bare_seconds: float
    """Steps dispatched back to back on one batch."""
    loop_seconds: float
    """Steps with their input and metrics, as `train` runs them."""
    blocked_seconds: float
    """Steps of which each is awaited before the next: back to back, plus what the host takes in between."""
    dispatch_seconds: float
    """Duration of the call that starts a step on an idle device: the host's own work."""
    data_wait_seconds: float
    """Waiting for input, per step of the loop."""
    overhead_seconds: float
    """Seconds by which the loop makes a step longer: median of the differences, round by round."""
    host_seconds: float
    """Processor time of the loop's own thread per step: its dispatches, input, metrics. Other processes that share the
    machine do not change it."""
    steps: int


class StepRunner:
    """A compiled step with its state and its input of random tokens."""

    def __init__(self, device_run: DeviceRun, steps: int):
        """steps: most steps that the input is for."""
        self.device_run = device_run
        self.feed = random_feed(device_run, steps)
        self.batch = next(self.feed)
        self._step: Any = None
        self._state: State | None = None

    def start(self, step: Callable[..., Any], state: State) -> None:
        """Takes the compiled step and the first state, and takes a step."""
        self._step, self._state = step, state
        jax.block_until_ready(self._advance())

    def _advance(self) -> Any:
        self._state, metrics = self._step(self._state, self.batch)
        return metrics

    def bare(self, steps: int) -> float:
        """Returns seconds per step of `steps` steps that are dispatched back to back."""
        return self._timed(steps, lambda metrics: None)

    def blocked(self, steps: int) -> float:
        """Returns seconds per step of `steps` steps, each awaited."""
        return self._timed(steps, jax.block_until_ready)

    def _timed(self, steps: int, after_each: Callable[[Any], Any]) -> float:
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            metrics = self._advance()
            after_each(metrics)
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - began) / steps

    def dispatch(self) -> float:
        """Returns the median duration of the call that starts a step, on an idle device."""
        times = []
        for _ in range(_DISPATCHES):
            jax.block_until_ready(self._state)
            began = time.perf_counter()
            self._advance()
            times.append(time.perf_counter() - began)
        jax.block_until_ready(self._state)
        return statistics.median(times)

    def loop(self, steps: int, reporters: list[Reporter]) -> float:
        """Returns seconds per step of `steps` steps with feed and metrics, in the order of `trainer/loop.py`."""
        run = self.device_run.run
        seq, flops = run.training.seq, training_flops_per_token(run.model, run.training.seq)
        meter = Meter(reporters, run, self.device_run.mesh, per_sample=seq, flops=flops)
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for number in range(1, steps + 1):
            self.batch = next(self.feed)
            metrics = self._advance()
            _check(meter.read())
            meter.push(number, metrics, number * run.training.batch)
        _check(meter.read())
        return (time.perf_counter() - began) / steps


def _check(bad: BadStep | None) -> None:
    if bad is not None:
        raise TrainingError(f"step {bad.step}", bad.reason, "a lower --lr")


def measure_loop(
    runner: StepRunner, *, steps: int, rounds: int, reporters: list[Reporter]
) -> LoopCost:
    """Runs `rounds` rounds of `steps` steps of each kind by turns, so that a slow moment meets all kinds."""
    bare, loop, blocked = list[float](), list[float](), list[float]()
    waited, host = 0.0, list[float]()
    for _ in range(rounds):
        bare.append(runner.bare(steps))
        before, used = runner.feed.wait_seconds, time.thread_time()
        loop.append(runner.loop(steps, reporters))
        host.append((time.thread_time() - used) / steps)
        waited += runner.feed.wait_seconds - before
        blocked.append(runner.blocked(steps))
    median = statistics.median
    return LoopCost(
        bare_seconds=median(bare),
        loop_seconds=median(loop),
        blocked_seconds=median(blocked),
        dispatch_seconds=runner.dispatch(),
        data_wait_seconds=waited / (rounds * steps),
        overhead_seconds=median(b - a for a, b in zip(bare, loop, strict=True)),
        host_seconds=median(host),
        steps=rounds * steps,
    )


def random_feed(device_run: DeviceRun, steps: int) -> Feed:
    """Returns the trainer's feed over random tokens, for `steps` batches."""
    training, vocab = device_run.run.training, vocab_size(device_run.run.model)
    count = max(_WINDOWS, training.batch) * training.seq + 1
    tokens = np.random.default_rng(0).integers(0, vocab, count).astype(np.uint32)
    file = TokenFile(TokenArray.of(tokens, np.array([count])), vocab, Bytes(), Path())
    stream = build_stream([Windows(file, training.seq, 0, count)], [1.0], training.seed)
    sharding = device_run.batch_sharding
    return Feed(
        stream,
        BatchRamp((), training.batch),
        seq=training.seq,
        taken=0,
        cursor=0,
        steps=steps,
        sharding=sharding,
    )

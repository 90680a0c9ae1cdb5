"""Two steps of a run traced when its steps have become slow: which device
of this host computes longer than the others.

seconds of a step   1.0 1.1 1.0 ... 1.0 | 1.4 1.3 1.4 ...  | traced     | an hour without
                                        | ten steps        | two steps  | a trace
"""

import collections
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright import last_words
from meshwright.analysis.programs import parse_module
from meshwright.bench.device_trace import read_trace
from meshwright.bench.observed_step import ObservedStep
from meshwright.bench.slow_devices import (
    FACTOR,
    FEWEST,
    computations,
    devices_have_equal_work,
    name_slow_devices,
)
from meshwright.errors import reason_of
from meshwright.step.state import State
from meshwright.step.train_step import CompiledTrainStep
from meshwright.storage.removing import remove_tree
from meshwright.trainer import alarms
from meshwright.trainer.loop import Trainable

SLOW_DEVICE = "slow device"
"""Kind of the alarm."""
_STEPS, _KEPT, _LEAST = 10, 100, 50
"""Steps that have to be slow, and steps before them whose median is the usual time: at most,
and at least."""
_TRACED = 2
_PERIOD = 3600.0
"""Seconds between two traces."""
_NEWEST = 3
"""Traces that are kept besides the first, which has the change from the usual steps."""


class SlowSteps:
    """Times of a run's steps, by which it tells that the last ten are slow."""

    def __init__(self) -> None:
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT + _STEPS)
        self.recent = 0.0
        """Median seconds of the last ten steps."""
        self.usual = 0.0
        """Median seconds of those before them."""

    def add(self, seconds: float) -> bool:
        """Adds a step; returns whether the last ten took more than 1.2 times as long
        as those before, by medians."""
        self._seconds.append(seconds)
        if len(self._seconds) < _LEAST + _STEPS:
            return False
        steps = list(self._seconds)
        self.recent = statistics.median(steps[-_STEPS:])
        self.usual = statistics.median(steps[:-_STEPS])
        return self.recent > FACTOR * self.usual


class WatchedRun:
    """A run as the training loop takes it (`Trainable`),
    of which two steps are traced when its steps are slow.

    Every process looks at its own devices, so no process waits for another's trace.
    """

    def __init__(
        self, prepared: Trainable, folder: Path, clock: Callable[[], float] = time.perf_counter
    ):
        """Begins without a history.

        folder: for the traces of this process, each in a folder 1, 2, ...
        """
        self._prepared = prepared
        self._folder = folder
        self._clock = clock
        self._slow_steps = SlowSteps()
        self._called_at: float | None = None
        """Time at which the last step was begun; None where the time since then is no step's."""
        self._due_at = clock()
        """Time from which another trace may be taken."""
        self._trace = folder
        """Folder of the last trace."""
        self._untraced = 0
        """Steps that the present trace still takes."""
        self._reader: threading.Thread | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)

    def compile(self, batch: Any) -> Any:
        """Compiles the train step and returns it with a look at the clock before it."""
        return ObservedStep(self._prepared.compile(batch), self._take)

    def _take(self, step: CompiledTrainStep, state: State, batch: Any) -> tuple[State, Any]:
        """Takes a step, and begins or ends a trace around it."""
        if not self._untraced and self._is_slow():
            self._begin(state)
        result = step(state, batch)
        if self._untraced:
            self._untraced -= 1
            if not self._untraced:
                self._end(result, step.program_text)
        return result

    def _is_slow(self) -> bool:
        """Notes that a step begins; returns whether a trace is to be taken."""
        now = self._clock()
        before, self._called_at = self._called_at, now
        if before is None:
            return False
        return self._slow_steps.add(now - before) and now >= self._due_at

    def _begin(self, state: State) -> None:
        jax.block_until_ready(state)
        self._due_at = self._clock() + _PERIOD
        try:
            number = max(numbers_of_traces(self._folder), default=0) + 1
            self._trace = self._folder / str(number)
            jax.profiler.start_trace(str(self._trace))
        except (RuntimeError, OSError) as error:  # another trace of this process is under way
            last_words.say(f"slow steps: no trace was taken: {reason_of(error)}")
            return
        self._untraced = _TRACED

    def _end(self, result: Any, program_text: Callable[[], str]) -> None:
        jax.block_until_ready(result)
        self._called_at = None
        if not _stop_trace():
            return
        times = f"{self._slow_steps.recent:.3g} s, {self._slow_steps.usual:.3g} s before"
        self._reader = threading.Thread(
            target=self._read_or_say,
            args=(program_text, times),
            daemon=True,
            name="slow steps: trace",
        )
        self._reader.start()

    def _read_or_say(self, program_text: Callable[[], str], times: str) -> None:
        kept = ""
        if remove_old_traces(self._folder):
            kept = f"; the first and the newest {_NEWEST} are kept"
        try:
            self._read(program_text, times, kept)
        except Exception as error:  # the run is not about its trace
            last_words.say(f"slow steps ({times}): {self._trace} was not read: {reason_of(error)}")

    def _read(self, program_text: Callable[[], str], times: str, kept: str) -> None:
        """Reads the trace and names what it shows. kept: what is said of earlier traces."""
        trace = read_trace(self._trace, parse_module(program_text()))
        process = jax.process_index()
        devices = computations(trace, steps=_TRACED, process=process, host=socket.gethostname())
        comparable = devices_have_equal_work(self._prepared.device_run)
        slow = name_slow_devices(devices) if comparable else []
        for sentence in slow:
            alarms.tell(SLOW_DEVICE, sentence)
        found = "; ".join(slow)
        if not slow:
            found = (
                f"none of the {len(devices)} devices of process {process} computes {FACTOR:g} "
                "times as long as most: communication, the host, or a device of another process"
            )
        if len(devices) < FEWEST:
            found = f"the trace of process {process} has {len(devices)} devices, too few to compare"
        elif not comparable:
            found = "stages have different work, so their devices are not compared"
        last_words.say(f"slow steps ({times}): {found}; trace in {self._trace}{kept}")

    def stop(self) -> None:
        """Ends a trace where the run ends within it,
        and waits a little for the reading of the last."""
        if self._untraced:
            self._untraced = 0
            _stop_trace()
        if self._reader is not None:
            self._reader.join(10.0)


def remove_old_traces(folder: Path) -> int:
    """Removes the traces of a process but the first and the newest; returns how many it removed.

    A run of weeks would fill its disk with a trace an hour, each of which was read and reported.
    folder: with a folder 1, 2, ... for each trace; times would mislead where a clock was set back.
    """
    removed = numbers_of_traces(folder)[1:-_NEWEST]
    for number in removed:
        remove_tree(folder / str(number), below=folder, ignore_errors=True)
    return len(removed)


def numbers_of_traces(folder: Path) -> list[int]:
    """Returns the numbers of the traces in a folder, also of earlier starts, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def _stop_trace() -> bool:
    """Ends a trace; returns whether it was written. A full disk loses it, and ends no run."""
    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        last_words.say(f"slow steps: the trace was not written: {reason_of(error)}")
        return False
    return True

"""Table of the processes of a run: what each does, its usual seconds, and its memory.

    process 0   --- row --------------------> OUT/processes.json, written again every 10 s
    process 1   --- row --> key-value store --> process 0

The file has one row for each process and does not grow with the run. `view` shows it.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.monitoring.host import process_memory
from meshwright.signs import WORK, Phases
from meshwright.storage.paths import in_bucket
from meshwright.storage.writing import write_atomically

NAME = "processes.json"
"""File of the output folder."""
PERIOD = 10.0
"""Seconds between two rows of a process, and between two writes of the table."""
_BUCKET_PERIOD = 60.0
"""Seconds between two writes of the table into a bucket,
where each is a request that is paid for."""
_LAST = 5.0
"""Seconds that the end of a run waits for the last table."""
_FOLDER = "meshwright/processes"
TIMED = ("step", WORK, "data", "save")
"""Phases, and the work in a step, whose usual seconds a row has."""


def read_row(phases: Phases, beat: int) -> dict[str, Any]:
    """Returns the row of this process. beat: number of its rows so far."""
    step, phase, since = phases.place
    seconds = {}
    for name in TIMED:
        usual = phases.usual_seconds(name)
        if usual is not None:
            seconds[name] = round(usual, 6)
    return {
        "process": jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "beat": beat,
        "step": step,
        "phase": phase,
        "in phase": round(time.monotonic() - since, 3),
        "seconds": seconds,
        "memory": process_memory(),
        "devices": [_read_device(device) for device in jax.local_devices()],
    }


def _read_device(device: Any) -> dict[str, Any]:
    """Returns the most bytes that a device has had in use, and those that JAX may use of it;
    null on a CPU."""
    stats: dict[str, int] = {}
    with contextlib.suppress(jax.errors.JaxRuntimeError, NotImplementedError):
        stats = device.memory_stats() or {}
    return {
        "device": device.id,
        "kind": device.device_kind,
        "peak": stats.get("peak_bytes_in_use"),
        "limit": stats.get("bytes_limit"),
    }


class _Table:
    """Rows of all processes, in process 0; in the others their own row."""

    def __init__(self, out: Path, phases: Phases, client: Any, check: Callable[[str], None]):
        self._file = out / NAME
        self._phases = phases
        self._client = client
        self._check = check
        self._beat = 0
        self._rows: dict[int, dict[str, Any]] = {}
        self._write_period = _BUCKET_PERIOD if in_bucket(out) else PERIOD
        self._write_due = 0.0
        self.stopped = threading.Event()
        """Set when the run ends: one more row is written."""

    def run(self) -> None:
        """Publishes a row at once, every `PERIOD` seconds, and when the run ends."""
        while True:
            is_last = self.stopped.is_set()
            self.publish()
            now = time.monotonic()
            if jax.process_index() == 0 and (is_last or now >= self._write_due):
                self._write_due = now + self._write_period
                self.write()
            if is_last:
                return
            self.stopped.wait(PERIOD)

    def publish(self) -> None:
        """Reads the row of this process, and sends it to process 0."""
        self._beat += 1
        row = read_row(self._phases, self._beat)
        if self._client is None:
            self._rows[0] = {**row, "seen": time.time()}
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
            self._client.key_value_set(f"{_FOLDER}/{row['process']}", json.dumps(row), True)

    def write(self) -> None:
        """Writes the table. A disk without room,
        or a folder that is gone, loses it: the run is not about it."""
        if self._client is not None:
            self._gather(time.time())
        rows = [self._rows[process] for process in sorted(self._rows)]
        table = {"time": time.time(), "processes": rows}
        with contextlib.suppress(OSError, MeshwrightError):
            self._check(f"writing {NAME}")
            write_atomically(self._file, json.dumps(table) + "\n")

    def _gather(self, now: float) -> None:
        """Reads the rows of all.
        Each gets the time, by the clock of process 0, at which it was first seen."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for _, text in self._client.key_value_dir_get(f"{_FOLDER}/"):
                row = json.loads(text)
                before = self._rows.get(row["process"])
                if before is None or before["beat"] != row["beat"]:
                    self._rows[row["process"]] = {**row, "seen": now}


@contextlib.contextmanager
def keeping_processes(
    out: Path, phases: Phases, client: Any, check: Callable[[str], None]
) -> Iterator[None]:
    """Publishes what this process does while the context is open;
    process 0 writes the table of all.

    client: of the key-value store; None in a run of one process.
    check: raises where the path leads to another folder than the run has opened.
    """
    table = _Table(out, phases, client, check)
    thread = threading.Thread(target=table.run, daemon=True, name="table of the processes")
    thread.start()
    try:
        yield
    finally:
        table.stopped.set()
        with contextlib.suppress(RuntimeError):
            thread.join(_LAST)

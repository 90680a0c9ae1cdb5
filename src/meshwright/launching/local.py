"""Processes of one run on this machine, over localhost: started, shown, stopped and started again together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from meshwright.errors import ConfigError
from meshwright.hardware.hosts import has_tpu
from meshwright.launching.restarts import restarts
from meshwright.launching.schedulers import Job

NOTICE_SECONDS = 60
"""Seconds that processes have to end by themselves after the first has failed: they say what they waited for."""
_END_SECONDS = 15
"""Seconds between SIGTERM and SIGKILL for those that do not."""
_GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected .*: \1$")
"""Line that Gloo prints for every group of every process once it is complete; it comes on standard error
(`cli.main` leaves standard output to the program)."""


def numbered(process: int) -> bytes | None:
    """Shows the lines of every process after its number, for a person."""
    return f"[{process}] ".encode()


def of_the_first(process: int) -> bytes | None:
    """Shows the lines of process 0 as they are and no other's, for a program that reads them."""
    return None if process else b""


def run_local(job: Job, output: Callable[[int], bytes | None] = numbered) -> int:
    """Runs the job's processes on this machine; returns the exit code of the first that failed, 0 where none did.

    Lines of standard error are prefixed by the number of their process. A signal to this process is passed on to all.
    output: returns the prefix of a process's lines of standard output, None to hide them: `numbered`, `of_the_first`.
    Raises ConfigError where this machine cannot run several processes.
    """
    if job.hosts != 1:
        raise ConfigError(f"--on local --hosts {job.hosts}", "it is one host", "--processes N")
    for option, value in (("--image", job.image), ("--mount", job.mounts), ("--set", job.fields)):
        if value:
            raise ConfigError(f"--on local {option}", "processes run here, without a container", f"no {option}")
    if job.processes_per_host > 1 and has_tpu() and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise ConfigError(
            f"--processes {job.processes_per_host} on a TPU host",
            "one process has all TPU chips of a host",
            "--processes 1, or JAX_PLATFORMS=cpu for simulated devices",
        )
    code = 0
    for start in range(job.restarts + 1):
        processes = _Processes(job, output)
        code = processes.wait()
        if not restarts(code) or processes.signalled or start == job.restarts:
            break
        _say(f"start {start + 2} of at most {job.restarts + 1}")
    return code


def _environments(job: Job) -> list[dict[str, str]]:
    """Returns the environment of every process: how to find the others, and its own part of the GPUs."""
    count = job.processes_per_host
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {**os.environ, **dict(job.environment), "PYTHONUNBUFFERED": "1"}
    # The GPUs that processes may use, as CUDA_VISIBLE_DEVICES names them.
    visible = ",".join(str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))
    visible = "" if common.get("JAX_PLATFORMS") == "cpu" else common.get("CUDA_VISIBLE_DEVICES", visible)
    gpus = [name for name in visible.split(",") if name]
    if gpus and len(gpus) % count:
        raise ConfigError(
            f"--processes {count} with {len(gpus)} GPUs",
            "each process has the same number of GPUs",
            f"CUDA_VISIBLE_DEVICES={','.join(gpus[: len(gpus) // count * count])}, or --processes {len(gpus)}",
        )
    each = len(gpus) // count
    return [
        {
            **common,
            "MESHWRIGHT_COORDINATOR": address,
            "MESHWRIGHT_PROCESSES": str(count),
            "MESHWRIGHT_PROCESS": str(i),
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])} if gpus else {}),
        }
        for i in range(count)
    ]


class _Processes:
    def __init__(self, job: Job, output: Callable[[int], bytes | None]):
        environments = _environments(job)
        self.signalled = 0
        """Number of the last signal that was passed on; 0 for none."""
        self._previous = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        # In sessions of their own: a Ctrl-C of the terminal reaches only this process, which passes it on once.
        pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._every = [subprocess.Popen(job.command, env=env, start_new_session=True, **pipes) for env in environments]
        self._running, self._lock = list(self._every), threading.Lock()
        copies = []
        for i, process in enumerate(self._every):
            copies += [(process.stdout, sys.stdout, output(i)), (process.stderr, sys.stderr, numbered(i))]
        self._readers = [threading.Thread(target=self._copy, args=copy, daemon=True) for copy in copies]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Waits for all processes; returns the exit code of the first that failed, or 0."""
        first, began, asked = 0, time.monotonic(), None
        while self._running:
            time.sleep(0.05)
            for index, process in enumerate(self._every):
                if process.poll() is None or process not in self._running:
                    continue
                self._running.remove(process)
                if process.returncode and not first:
                    code = process.returncode
                    first = 128 - code if code < 0 else code
                    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                    _say(f"process {index} ended first, {how} after {time.monotonic() - began:.0f} s")
                    asked = time.monotonic() + NOTICE_SECONDS
            if asked is not None and time.monotonic() > asked and self._running:
                self._end_others()
        for reader in self._readers:
            reader.join(timeout=5)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        return first

    def _end_others(self) -> None:
        numbers = [str(i) for i, process in enumerate(self._every) if process in self._running]
        _say(f"process {', '.join(numbers)} still runs {NOTICE_SECONDS} s later, and is ended")
        for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 5)):
            for process in self._running:
                process.send_signal(number)
            deadline = time.monotonic() + seconds
            while any(p.poll() is None for p in self._running) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.signalled = number
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def _copy(self, pipe: IO[bytes], target: TextIO, prefix: bytes | None) -> None:
        """Copies whole lines with a prefix, so that processes do not mix theirs."""
        with pipe:
            for line in pipe:
                if prefix is None or _GLOO.match(line):
                    continue
                try:
                    with self._lock:
                        target.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                        target.flush()
                except BrokenPipeError:  # the reader has gone; the processes work on
                    prefix = None


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)

"""Child processes that train together on simulated devices, for rehearsals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from meshwright.checkpoint.steps import committed_steps
from meshwright.errors import TrainingError
from meshwright.plugins import options_of_child


class TrainingProcesses:
    """Processes of one training run. count: of processes.  devices: of the run.  limit: most seconds of a part."""

    def __init__(self, count: int, devices: int, limit: int):
        self._count, self._devices, self._limit = count, devices, limit
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> None:
        """Starts `meshwright train` with `options` in every process."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        together = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(self._count)] if self._count > 1 else []
        words = [*options, "--devices", str(self._devices), "--json", *options_of_child()]
        command = [sys.executable, "-m", "meshwright", "train", *words]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._running = [
            subprocess.Popen(
                [*command, *together, *(["--process", str(i)] if together else [])],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for i in range(self._count)
        ]  # fmt: skip

    def wait_for_checkpoint(self, out: Path) -> None:
        """Waits until a checkpoint is committed in `out`. Raises TrainingError where a process ends before."""
        deadline = time.monotonic() + self._limit
        while not committed_steps(out / "checkpoints"):
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._running):
                self._fail("no checkpoint was committed")
            time.sleep(0.2)

    def kill_last(self) -> None:
        """Sends SIGKILL to the last process."""
        self._running[-1].send_signal(signal.SIGKILL)

    def wait_for_failure(self) -> str:
        """Waits until all processes but the last have stopped. Raises TrainingError where one hangs or succeeds."""
        codes = []
        for process in self._running[:-1]:
            try:
                process.communicate(timeout=self._limit)
            except subprocess.TimeoutExpired:
                self._fail("a process was killed, and another still waits for it")
            codes.append(process.returncode)
        self._running[-1].communicate()
        if any(code == 0 for code in codes):
            self._fail("a process was killed, and another ended with exit code 0")
        return f"the others stopped (exit code {', '.join(map(str, codes))})"

    def wait(self) -> dict[str, Any]:
        """Waits for the end and returns the summary of process 0. Raises TrainingError where a process fails."""
        outputs = []
        for process in self._running:
            try:
                outputs.append(process.communicate(timeout=self._limit))
            except subprocess.TimeoutExpired:
                self._fail(f"it took more than {self._limit} s")
        for process, (_, errors) in zip(self._running, outputs, strict=True):
            if process.returncode:
                self._fail(errors.strip()[-1500:])
        return dict(json.loads(outputs[0][0].strip().splitlines()[-1]))

    def _fail(self, reason: str) -> NoReturn:
        for process in self._running:
            process.kill()
            process.wait()
        raise TrainingError("the rehearsal", reason, "the fix named above; the real run would fail alike")


def read_losses(out: Path) -> dict[int, float]:
    """Reads the loss of every step from the metrics of an output folder."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}

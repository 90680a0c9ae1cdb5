"""Runs of `chaos.py`: two supervised processes, what they leave, and how two results compare."""

import contextlib
import json
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
from typing import Any

from two_hosts import TwoHosts

STEPS, SAVE = 12, 3
LIMIT = 600
"""Seconds after which a run has not ended by itself."""
SILENCE = "10"
MODEL = [
    "--model.width", "16", "--model.layers", "1", "--model.heads", "1", "--model.kv-heads", "1", "--model.mlp", "16",
    "--data.tokenizer", "bytes", "--data.held-out", "0", "--data.sample", "0", "--training.seq", "16", "--batch", "8",
    "--training.eval-every", "0", "--devices", "8", "--mesh", "data=4,fsdp=2", "--steps", str(STEPS),
    "--training.save-every", str(SAVE), "--training.max-to-keep", "3",
]  # fmt: skip


class Pair:
    """Two supervisors of one run, each on a host of its own where this machine can have two (`TwoHosts`)."""

    made = 0
    apart = ""
    """Reason for which both are on one host, where they are."""

    def __init__(self, folder: Path, *, more: tuple[str, ...] = (), **environment: str):
        self.out, self.folder = folder / "out", folder
        folder.mkdir(parents=True)
        self.hosts: TwoHosts | None = None
        Pair.made += 1
        try:
            self.hosts = TwoHosts(folder, f"chaos{os.getpid()}n{Pair.made}")
        except RuntimeError as error:
            Pair.apart = Pair.apart or str(error)
        address = f"{self.hosts.addresses[0]}:29500" if self.hosts else f"127.0.0.1:{free_port()}"
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            **environment,
        }
        self.processes, self.logs = [], []
        for i in range(2):
            words = [
                "--data", str(text(folder.parent)), *MODEL, "--out", str(self.out), "--processes", "2",
                "--process", str(i), "--coordinator", address, "--supervise",
                "--restarts.backoff", "0.5", "--watchdog.silence", SILENCE, *more,
            ]  # fmt: skip
            command = [sys.executable, "-m", "meshwright", "train", *words]
            command = self.hosts.on(i, command) if self.hosts else command
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**env, "CHAOS_PROCESS": str(i)},
            )
            # Through a pipe: a full disk of the run is not one of its log.
            log = threading.Thread(
                target=_copy, args=(process.stdout, folder / f"log-{i}"), daemon=True
            )
            log.start()
            self.processes.append(process)
            self.logs.append(log)

    def child(self, i: int) -> int:
        """Process id of the training process of host `i`."""
        file = Path(f"/proc/{self.processes[i].pid}/task/{self.processes[i].pid}/children")
        # The supervisor may start it from any thread.
        found = [
            int(word)
            for task in file.parents[1].iterdir()
            for word in (task / "children").read_text().split()
        ]
        return found[0]

    def steps(self) -> int:
        """Steps that process 0 has reported."""
        try:
            return max((line["step"] for line in metrics(self.out)), default=0)
        except OSError:
            return 0

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Waits until a condition holds. Raises TimeoutError, or RuntimeError where a supervisor has ended."""
        until = time.monotonic() + LIMIT
        while not condition():
            if any(p.poll() is not None for p in self.processes):
                raise RuntimeError("a supervisor ended before the fault")
            if time.monotonic() > until:
                raise TimeoutError("the run did not come so far")
            time.sleep(0.02)

    def finish(self) -> list[int | None]:
        """Waits for the end; returns the exit codes, None for a supervisor that had to be killed."""
        until = time.monotonic() + LIMIT
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(1.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for i, process in enumerate(self.processes):
            if process.poll() is None:
                with contextlib.suppress(OSError, IndexError):
                    os.kill(self.child(i), signal.SIGKILL)
                process.kill()
                process.wait()
        for log in self.logs:
            log.join(10)
        if self.hosts:
            self.hosts.close()
        return codes

    def committed(self) -> bool:
        """Whether a checkpoint of the output folder is whole."""
        return any((self.out / "checkpoints").glob("[0-9]*/manifest/metadata"))

    def says(self, host: int, pattern: str) -> bool:
        """Whether the output of a host has a text."""
        log = (self.folder / f"log-{host}").read_text(errors="replace")
        return re.search(pattern, log) is not None

    def names(self, victim: int) -> bool:
        """Whether the other host's error names the process `victim`."""
        log = (self.folder / f"log-{1 - victim}").read_text(errors="replace")
        return bool(
            re.search(rf"seen by process {1 - victim} .*\n +because: .*process {victim}\b", log)
        )

    def events(self) -> list[dict[str, Any]]:
        """The journals of both supervisors, in order of time."""
        found = []
        for file in sorted((self.out / ".supervise").glob("journal-*.jsonl")):
            found += [json.loads(line) for line in file.read_text().splitlines()]
        return sorted(found, key=lambda event: event["time"])


def _copy(source: Any, file: Path) -> None:
    with source, file.open("wb") as log:
        for line in source:
            log.write(line)
            log.flush()


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def text(folder: Path) -> Path:
    """Returns a small text file in `folder`."""
    file = folder / "text.txt"
    if not file.is_file():
        file.write_text("She sells sea shells by the sea shore. " * 200)
    return file


def metrics(out: Path) -> list[dict[str, Any]]:
    """Returns the lines of the metrics that have a loss."""
    lines = (
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text().splitlines()
        if line.endswith("}")
    )
    return [line for line in lines if "loss" in line]


def result(out: Path) -> dict[str, Any]:
    """Fingerprints of all tensors after the last step, the place in the data, and the loss of every step."""
    manifest = json.loads((out / "checkpoints" / str(STEPS) / "manifest" / "metadata").read_text())
    prints = {name: record["fingerprint"] for name, record in manifest["tensors"].items()}
    losses = [(line["step"], line["loss"]) for line in metrics(out)]
    return {"out": out, "tensors": prints, "cursor": manifest["cursor"], "losses": losses}


def compare(
    found: dict[str, Any], expected: dict[str, Any], *, shrunk: bool
) -> tuple[bool, str, str]:
    """Returns whether two results are equal, and how far their tensors and their losses are.

    shrunk: the mesh did, so sums are in another order. Losses are then equal within the tolerance of `parity`; of the
    tensors the largest difference is told, which AdamW has made of rounding errors of small gradients.
    """
    same = found["cursor"] == expected["cursor"]
    bitwise = found["tensors"] == expected["tensors"], found["losses"] == expected["losses"]
    if all(bitwise) or not shrunk:
        words = ["bitwise" if equal else "no" for equal in bitwise]
        return same and all(bitwise), words[0], words[1]
    from meshwright.trainer.parity import TOLERANCE

    steps = [[step for step, _ in each["losses"]] for each in (found, expected)]
    apart = [
        abs(a - b) / b for (_, a), (_, b) in zip(found["losses"], expected["losses"], strict=False)
    ]
    equal = same and steps[0] == steps[1] and max(apart) <= TOLERANCE
    return (
        equal,
        f"{scaled_difference(found['out'], expected['out']):.0e} of its scale",
        f"{max(apart):.0e}",
    )


def scaled_difference(out: Path, other: Path) -> float:
    """Largest difference of two runs' parameters after the last step, in units of their tensor's largest value."""
    from meshwright.checkpoint.blocks import StoredTensors
    from meshwright.checkpoint.manifest import manifest_of

    folders = [folder / "checkpoints" for folder in (out, other)]
    a, b = (StoredTensors(folder / str(STEPS), manifest_of(folder, STEPS)) for folder in folders)
    names = [name for name in a.manifest.tensors if name.startswith("params.")]
    pairs = ((a.read(name), b.read(name)) for name in names)
    return max(float(abs(x - y).max() / abs(y).max()) for x, y in pairs)

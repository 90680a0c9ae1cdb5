"""`train --supervise`: a parent process that starts the training again from its last good checkpoint.

Each host has a supervisor of its own. They find each other in the folder `.supervise` of the output folder, which all
of them reach: nothing of a training process is left when that is killed, and a supervisor computes nothing. A new start
begins when every supervisor has seen its process end, so that no process joins a neighbour that is about to stop.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.checkpoint.steps import committed_steps
from meshwright.errors import CheckpointError, HostError, StorageError
from meshwright.hardware.hosts import Hosts
from meshwright.launching.restarts import Restarts
from meshwright.launching.supervisors import Start, Supervisors
from meshwright.plugins import options_of_child
from meshwright.runs.run import Run
from meshwright.storage.paths import bucket_path, in_bucket
from meshwright.trainer.watchdog import BEATS, Watchdog

_PREEMPTED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
_AGAIN = {1, HostError.exit_code, CheckpointError.exit_code, StorageError.exit_code, *_PREEMPTED}
"""Exit codes after which another start may help, besides those of a signal: an exception from outside the package, a
host that was gone, a checkpoint that cannot be written or read, a bucket that is away, a preemption of the child."""
_LEAVING = 300.0
"""Seconds that JAX gives all hosts to leave together."""
_LONGEST = 300.0
"""Most seconds of a back-off."""


def supervise(
    verb: str,
    args: Sequence[str],
    run: Run,
    out: Path,
    hosts: Hosts,
    devices: int | None,
    limits: tuple[Restarts, Watchdog],
) -> int:
    """Runs `meshwright VERB ARGS` in a child process, again and again until it ends well; returns its exit code.

    run, out, hosts, devices: what the arguments say, for a start on fewer hosts.  Raises HostError where the limit of
    restarts is reached, or hosts stay away.
    """
    return _Supervisor(verb, list(args), run, out, hosts, devices, *limits).run_to_the_end()


@dataclasses.dataclass
class _Supervisor:
    verb: str
    args: list[str]
    run: Run
    out: Path
    hosts: Hosts
    devices: int | None
    restarts: Restarts
    watchdog: Watchdog
    received: int = 0
    """Signal that this process was sent: the child gets it too, and is not started again."""
    child: subprocess.Popen[bytes] | None = None
    reached: int = -1
    """Steps that the child has taken, by its own signs; -1 before the first."""
    printed: str = ""
    """Standard output of the last child with --json: one that is preempted prints a summary, the next another, and a
    program reads one."""

    def run_to_the_end(self) -> int:
        """Starts the child until it ends well, or for good."""
        if in_bucket(self.out):
            bucket_path(self.out).check_writable()
        others = Supervisors(self.out, self.hosts, self.restarts)
        start = Start(0, tuple(range(self.hosts.processes)), self.hosts.coordinator, None, self._resumes_from())
        damaged: set[int] = set()
        failures = 0
        with others.counting(), self._forwarding():
            while True:
                began = time.monotonic()
                code = self._attempt(start)
                self._note("ended", start.attempt, code=code, step=self.reached, seconds=time.monotonic() - began)
                if code == 0 or self.received or (code > 0 and code not in _AGAIN):
                    others.leave("done" if code == 0 else "gone")
                    return self._ended(code if code >= 0 else 128 - code)
                # A start that made progress clears what went before.
                failures = 1 if self.reached > (start.step or 0) + 1 else failures + 1
                if code == CheckpointError.exit_code and start.step is not None and self.reached <= start.step:
                    damaged.add(start.step)
                if start.attempt + 1 > self.restarts.most:
                    others.leave("gone")
                    raise HostError(
                        f"{self.verb} --supervise, after exit code {code}",
                        f"it was started again {self.restarts.most} times",
                        f"look at the errors above; then meshwright {self.verb} --out {self.out} --resume, or a higher "
                        "--restarts.most",
                    )
                wait = min(self.restarts.backoff * 2 ** (failures - 1), _LONGEST)
                which = f"restart {start.attempt + 1} of {self.restarts.most}"
                self._say(f"exit code {code}; starting again in {wait:.0f} s, {which}")
                if self._pause(wait):
                    others.leave("gone")
                    return self._ended(128 + self.received)
                start = others.next_start(start, damaged, self.run, self.devices)
                where = "from the beginning" if start.step is None else f"from the checkpoint of step {start.step}"
                mesh = f", on mesh {start.why}" if start.why else ""
                self._say(f"starting {where} on {len(start.members)} of {self.hosts.processes} hosts{mesh}")

    def _ended(self, code: int) -> int:
        """Prints the JSON of the last start, where one was asked for; returns the exit code."""
        with contextlib.suppress(BrokenPipeError):  # the reader has gone
            print(self.printed, end="", flush=True)
        return code

    def _resumes_from(self) -> int | None:
        """Step of the checkpoint that the first start resumes from, where the arguments ask for one."""
        steps = committed_steps(self.out / "checkpoints")
        asked = {"--resume", "--resume-if-exists", "--at"} & {word.partition("=")[0] for word in self.args}
        return steps[-1] if steps and asked else None

    def _attempt(self, start: Start) -> int:
        """Runs the child once; returns its exit code, negative for a signal."""
        reader, writer = os.pipe()
        words = self.args if start.attempt == 0 else self._arguments(start)
        command = [sys.executable, "-m", "meshwright", self.verb, *words, *options_of_child()]
        self.reached = -1
        self._note("starting", start.attempt, step=start.step)
        with open(reader, "rb", buffering=0) as signs, tempfile.TemporaryFile() as printed:
            output = printed if "--json" in self.args else sys.stdout
            # The process's own standard output, which is no longer file descriptor 1 (cli/main.py).
            self.child = subprocess.Popen(
                command, stdout=output.fileno(), pass_fds=(writer,), env={**os.environ, BEATS: str(writer)}
            )
            os.close(writer)
            self._watch(signs, start)
            code = self.child.wait()
            printed.seek(0)
            self.printed = printed.read().decode()
            return code

    def _watch(self, signs: Any, start: Start) -> None:
        """Reads the child's signs until it ends; kills it where they stop, as those of a stopped process do."""
        assert self.child is not None
        last: float | None = None
        leaving: float | None = None
        since, place, alone = time.monotonic(), "", len(start.members) == 1
        while self.child.poll() is None:
            ready, _, _ = select.select([signs], [], [], 0.25)
            now = time.monotonic()
            lines = signs.read(65536).splitlines() if ready else []
            if ready and not lines:
                return  # the child has closed its end
            for line in lines:
                last = now
                with contextlib.suppress(ValueError):
                    step, phase, left = json.loads(line)
                    if self.reached <= (start.step or 0) < step:
                        self._note("training", start.attempt, step=step)
                    self.reached = max(self.reached, step)
                    leaving = (leaving or now) if left else None
                    if f"{step} {phase}" != place:
                        since, place = now, f"{step} {phase}"
            # A child that has left gives no more signs: it prints its summary and waits for the other hosts to leave.
            patience = self.watchdog.silence if leaving is None else _LEAVING + self.watchdog.silence
            silent = last is not None and now - last > patience
            # With other hosts, it is process 0 that knows which of them stalls.
            stalled = alone and self.watchdog.stall and last is not None and now - since > 10 * self.watchdog.stall
            if silent or stalled:
                what = f"no sign for {now - last:.0f} s" if silent and last else f"{now - since:.0f} s in one place"
                self._say(f"process {self.child.pid} gave {what}, last at {place}: it is killed")
                self._note("killed", start.attempt, step=self.reached)
                self.child.kill()
                return

    def _arguments(self, start: Start) -> list[str]:
        """The arguments of another start: from a checkpoint, and on the hosts that are left."""
        words = _without(self.args, {"--at": 1, "--resume": 0, "--resume-if-exists": 0, "--new-data": 0})
        if start.step is not None:
            words += ["--resume", "--at", str(start.step)]
        if len(start.members) < self.hosts.processes:
            names = ("--coordinator", "--processes", "--process", "--devices", "--mesh", *start.options[::2])
            gone = dict.fromkeys(names, 1)
            words = [*_without(words, gone), "--processes", str(len(start.members))]
            if len(start.members) > 1:
                rank = start.members.index(self.hosts.process)
                words += ["--coordinator", str(start.coordinator), "--process", str(rank)]
            words += ["--mesh", str(start.mesh), *start.options]
            if self.devices is not None:
                words += ["--devices", str(self.devices * len(start.members) // self.hosts.processes)]
        return words

    @contextlib.contextmanager
    def _forwarding(self) -> Any:
        """Passes signals that ask to stop on to the child."""

        def forward(number: int, frame: FrameType | None) -> None:
            self.received = number
            # The terminal sends Ctrl-C to the child as well; `launch` and `kill -INT` send it to this process alone.
            if self.child is not None and self.child.poll() is None:
                if number != signal.SIGINT or not _in_the_foreground():
                    self.child.send_signal(number)
            elif number == signal.SIGINT:
                self._say("Ctrl-C: it starts nothing more")

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        previous = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pause(self, seconds: float) -> bool:
        """Waits; returns whether a signal asked to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.received:
            time.sleep(0.1)
        return bool(self.received)

    def _note(self, event: str, attempt: int, **values: Any) -> None:
        """Adds a line to the journal of this host's supervisor."""
        record = {"time": time.time(), "process": self.hosts.process, "event": event, "attempt": attempt, **values}
        file = self.out / ".supervise" / f"journal-{self.hosts.process}.jsonl"
        # A full disk ends no supervisor.
        with contextlib.suppress(OSError, StorageError), file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(record) + "\n")

    def _say(self, text: str) -> None:
        print(f"supervisor of process {self.hosts.process}: {text}", file=sys.stderr, flush=True)


def _in_the_foreground() -> bool:
    """Whether this process and its child have a terminal whose Ctrl-C reaches both."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _without(args: Sequence[str], names: dict[str, int]) -> list[str]:
    """Returns the arguments without some options, spelt with `-` or `_`. names: option -> number of its values."""
    words, skip = [], 0
    for word in args:
        if skip:
            skip -= 1
            continue
        name, equals, _ = word.partition("=")
        known = name.replace("_", "-")
        if known not in names:
            words.append(word)
        elif not equals:
            skip = names[known]
    return words

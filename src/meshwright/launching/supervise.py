"""`train --supervise`: a parent process that starts the training again from its last good checkpoint.

Each host has a supervisor of its own, with a file in the folder `.supervise` of the output folder, which all of them
reach. The file counts up while the supervisor lives: a training process that was killed leaves nothing behind, and a
supervisor computes nothing. A new start begins when every supervisor has seen its process end, so that no process joins
a neighbour that is about to stop.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from meshwright.checkpoint.steps import committed_steps, unwritable
from meshwright.documents import LARGE, parse_json, read_json, read_text, write_atomically
from meshwright.errors import CheckpointError, HostError, StorageError
from meshwright.hardware.hosts import PORT, Hosts
from meshwright.heartbeat import beating
from meshwright.launching.restarts import Restarts, restarts
from meshwright.runs.run import Run
from meshwright.storage.paths import bucket_path, in_bucket
from meshwright.trainer.watchdog import BEATS, Watchdog
from meshwright.trust import trust_options

_BEAT, _BUCKET_BEAT = 1.0, 5.0
"""Seconds between two counts of a supervisor, on a file system and in a bucket: there each count is a request."""
_SILENT, _BUCKET_SILENT = 15, 4
"""Counts that a supervisor misses before it is taken for gone."""
_LEAVING = 300.0
"""Seconds that JAX gives all hosts to leave together."""
_LONGEST = 300.0
"""Most seconds of a back-off."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the training, the same on all hosts."""

    attempt: int
    members: tuple[int, ...]
    """Hosts that take part, by their number in the whole run; the first is process 0."""
    coordinator: str | None
    mesh: str | None
    """Mesh of fewer devices; None where all hosts take part."""
    step: int | None
    """Step of the checkpoint to resume from; None where there is none."""
    options: tuple[str, ...] = ()
    """Options that change with the mesh, where the planner chose them."""
    why: str = ""
    """Why that mesh."""


@dataclasses.dataclass
class _Record:
    state: str = "gone"
    """`running` or `waiting`; `done` or `gone` where it starts nothing more."""
    attempt: int = -1
    count: int = -1
    damaged: tuple[int, ...] = ()
    """Steps whose checkpoint it could not restore."""
    address: str = "127.0.0.1"


def _read[T](file: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(read_json(file), kind)
    except (OSError, ValueError, msgspec.ValidationError, StorageError):
        return None


class Supervisors:
    """The supervisors of a run, as one of them sees them."""

    def __init__(self, out: Path, hosts: Hosts, restarts: Restarts):
        """Raises CheckpointError where `out` cannot be written."""
        self.out, self.hosts, self.restarts = out, hosts, restarts
        self.folder = out / ".supervise"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(out, error) from error
        self.beat, silent = (_BUCKET_BEAT, _BUCKET_SILENT) if in_bucket(out) else (_BEAT, _SILENT)
        self.silence, self.own = silent * self.beat, _Record("running", 0, 0)
        # Starts of an earlier job must not be taken for those of this one.
        if hosts.process == 0:
            for file in self.folder.glob("start-*.json"):
                file.unlink(missing_ok=True)

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Counts up in this supervisor's file while the context is open."""
        return beating(self._write, self.beat, "supervisor")

    def leave(self, state: str) -> None:
        """States that this supervisor starts nothing more: `done` or `gone`."""
        self.own.state = state
        self._write()

    def next_start(self, last: Start, damaged: set[int], run: Run, devices: int | None) -> Start:
        """Waits for the other supervisors, and returns what all of them start next.

        damaged: steps whose checkpoint could not be restored.  Raises HostError where hosts are missing that must not
        be, CheckpointError where no good checkpoint is left.
        """
        process, processes = self.hosts.process, self.hosts.processes
        self.own.attempt, self.own.state, self.own.damaged = last.attempt + 1, "waiting", tuple(sorted(damaged))
        self._write()
        file = self.folder / f"start-{self.own.attempt}.json"
        seen: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + self.restarts.wait
        while True:
            now = time.monotonic()
            records = {i: self.own if i == process else self._record(i) for i in range(processes)}
            for i, record in records.items():
                if i not in seen or seen[i][0] != record.count:
                    seen[i] = (record.count, now)
            alive = [
                i
                for i, record in records.items()
                if i == process or (now - seen[i][1] < self.silence and record.state in ("running", "waiting"))
            ]
            ready = [i for i in alive if records[i].attempt >= self.own.attempt]
            late = now > until
            complete = len(ready) == processes or (late and self.restarts.hosts == "left" and ready == alive)
            start = _read(file, Start) if processes > 1 else None
            if start is not None and process in start.members:
                break
            if complete and ready[0] == process:
                try:
                    start = self._choose({i: records[i] for i in ready}, run, devices)
                    if processes > 1:
                        write_atomically(file, json.dumps(dataclasses.asdict(start)))
                    break
                except StorageError:  # the bucket is away for longer than requests are sent again
                    if late:
                        raise
            # Choosing takes as long as planning does, and the one that chooses counts up meanwhile.
            choosing = complete and ready[0] != process
            if not choosing and now > until + (0 if self.restarts.hosts == "all" else self.restarts.wait):
                self.leave("gone")
                raise HostError(
                    f"starting the run in {self.out} again on {processes} hosts",
                    f"after {self.restarts.wait:.0f} s the supervisors of {sorted({*records} - {*ready})} are missing",
                    "the same command on those hosts, or --restarts.hosts left, which goes on without them",
                )
            time.sleep(self.beat / 4)
        self.own.state = "running"
        self._write()
        return start

    def _choose(self, members: dict[int, _Record], run: Run, devices: int | None) -> Start:
        """Returns the next start on `members`; on fewer hosts than before, on a mesh that the planner chooses."""
        steps, damaged = committed_steps(self.out / "checkpoints"), {s for m in members.values() for s in m.damaged}
        good = [step for step in steps if step not in damaged]
        if steps and not good:
            raise CheckpointError(
                f"starting the run in {self.out} again",
                f"none of the checkpoints of steps {steps} can be restored",
                "meshwright checkpoint verify, or another --out",
            )
        start = Start(self.own.attempt, tuple(members), self.hosts.coordinator, None, good[-1] if good else None)
        if len(members) == self.hosts.processes:
            return start
        if start.members[0] and start.coordinator is not None:
            port = start.coordinator.rpartition(":")[2] or PORT
            start = dataclasses.replace(start, coordinator=f"{members[start.members[0]].address}:{port}")
        before = self._last_start()
        total = int(devices or (run.mesh.size if run.mesh else 0) or before.get("devices", 0))
        from meshwright.planner.fewer_devices import plan_for_fewer

        plan = plan_for_fewer(run, len(members), total // self.hosts.processes, str(before.get("kind", "")))
        changed = {f"--training.{name.replace('_', '-')}": str(value) for name, value in plan.training.items()}
        changed |= {} if plan.layout is None else {"--layout": plan.layout}
        options = tuple(word for pair in changed.items() for word in pair)
        return dataclasses.replace(start, mesh=str(plan.mesh), options=options, why=plan.why)

    def _last_start(self) -> dict[str, Any]:
        """Returns what the training noted of its devices when it last started; nothing where it never did."""
        with contextlib.suppress(OSError, ValueError, StorageError):
            for line in reversed(read_text(self.out / "events.jsonl", LARGE).splitlines()):
                with contextlib.suppress(ValueError):
                    record = parse_json(line)
                    if isinstance(record, dict) and record.get("event") == "start":
                        return record
        return {}

    def _record(self, process: int) -> _Record:
        return _read(self.folder / f"host-{process}.json", _Record) or _Record()

    def _write(self) -> None:
        self.own.count += 1
        self.own.address = _own_address(self.hosts.coordinator)
        with contextlib.suppress(OSError, StorageError):
            write_atomically(self.folder / f"host-{self.hosts.process}.json", json.dumps(dataclasses.asdict(self.own)))


def _own_address(coordinator: str | None) -> str:
    """Returns the address of this host towards the coordinator; nothing is sent."""
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()


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
    if in_bucket(out):
        bucket_path(out).check_writable()
    supervisor = _Supervisor(verb, list(args), out, hosts, devices, *limits)
    others = Supervisors(out, hosts, supervisor.restarts)
    steps = committed_steps(out / "checkpoints")
    resumes = {"--resume", "--resume-if-exists", "--at"} & {word.partition("=")[0] for word in args}
    first = Start(0, tuple(range(hosts.processes)), hosts.coordinator, None, steps[-1] if steps and resumes else None)
    with others.counting(), supervisor.forwarding():
        return supervisor.run_to_the_end(first, others, run)


@dataclasses.dataclass
class _Supervisor:
    verb: str
    args: list[str]
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

    def run_to_the_end(self, start: Start, others: Supervisors, run: Run) -> int:
        """Starts the child until it ends well, or for good."""
        damaged: set[int] = set()
        failures = 0
        while True:
            began = time.monotonic()
            code = self._attempt(start)
            self._note("ended", start.attempt, code=code, step=self.reached, seconds=time.monotonic() - began)
            # After a checkpoint that failed, the next start takes another, or writes it again.
            again = code < 0 or code == CheckpointError.exit_code or restarts(code)
            if self.received or not again:
                others.leave("gone" if code else "done")
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
            start = others.next_start(start, damaged, run, self.devices)
            where = "from the beginning" if start.step is None else f"from the checkpoint of step {start.step}"
            mesh = f", on mesh {start.why}" if start.why else ""
            self._say(f"starting {where} on {len(start.members)} of {self.hosts.processes} hosts{mesh}")

    def _ended(self, code: int) -> int:
        """Prints the JSON of the last start, where one was asked for; returns the exit code."""
        with contextlib.suppress(BrokenPipeError):  # the reader has gone
            print(self.printed, end="", flush=True)
        return code

    def _attempt(self, start: Start) -> int:
        """Runs the child once; returns its exit code, negative for a signal."""
        reader, writer = os.pipe()
        words = self.args if start.attempt == 0 else self._arguments(start)
        command = [sys.executable, "-P", "-m", "meshwright", self.verb, *words, *trust_options()]
        self.reached = -1
        self._note("starting", start.attempt, step=start.step)
        with open(reader, "rb", buffering=0) as signs, tempfile.TemporaryFile() as printed:
            output = printed if "--json" in self.args else sys.stdout
            # The process's own standard output, which is no longer file descriptor 1 (cli/main.py).
            self.child = subprocess.Popen(
                command, stdout=output.fileno(), pass_fds=(writer,), env={**os.environ, BEATS: str(writer)}
            )
            os.close(writer)
            self._watch(self.child, signs, start)
            code = self.child.wait()
            printed.seek(0)
            self.printed = printed.read().decode()
            return code

    def _watch(self, child: subprocess.Popen[bytes], signs: Any, start: Start) -> None:
        """Reads the child's signs until it ends; kills it where they stop, as those of a stopped process do."""
        last: float | None = None
        leaving: float | None = None
        since, place = time.monotonic(), ""
        while child.poll() is None:
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
            if last is None:
                continue
            # A child that has left gives no more signs: it prints its summary and waits for the other hosts to leave.
            silent = now - last > self.watchdog.silence + (0 if leaving is None else _LEAVING)
            # With other hosts, it is process 0 that knows which of them stalls.
            stalled = len(start.members) == 1 and self.watchdog.stall and now - since > 10 * self.watchdog.stall
            if silent or stalled:
                what = f"no sign for {now - last:.0f} s" if silent else f"{now - since:.0f} s in one place"
                self._say(f"process {child.pid} gave {what}, last at {place}: it is killed")
                self._note("killed", start.attempt, step=self.reached)
                child.kill()
                return

    def _arguments(self, start: Start) -> list[str]:
        words = _without(self.args, {"--at": 1, "--resume": 0, "--resume-if-exists": 0, "--new-data": 0})
        if start.step is not None:
            words += ["--resume", "--at", str(start.step)]
        if len(start.members) < self.hosts.processes:
            names = ("--coordinator", "--processes", "--process", "--devices", "--mesh", *start.options[::2])
            words = [*_without(words, dict.fromkeys(names, 1)), "--processes", str(len(start.members))]
            if len(start.members) > 1:
                rank = start.members.index(self.hosts.process)
                words += ["--coordinator", str(start.coordinator), "--process", str(rank)]
            words += ["--mesh", str(start.mesh), *start.options]
            if self.devices is not None:
                words += ["--devices", str(self.devices * len(start.members) // self.hosts.processes)]
        return words

    @contextlib.contextmanager
    def forwarding(self) -> Any:
        """Passes signals that ask to stop on to the child."""

        def forward(number: int, frame: FrameType | None) -> None:
            self.received = number
            # The terminal sends Ctrl-C to the child as well; `launch` and `kill -INT` send it to this process only.
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
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.received:
            time.sleep(0.1)
        return bool(self.received)

    def _note(self, event: str, attempt: int, **values: Any) -> None:
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

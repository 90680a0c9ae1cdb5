"""`train --supervise`: a parent process that starts the training again when it has ended
before its time.

Each host has a supervisor of its own, which starts its child again, with a limit and a back-off.
The children meet in `jax.distributed`, and choose together the checkpoint that they go on from
(`trainer.tiers`): supervisors read nothing of each other while a run goes well. Only with
`--restarts.hosts left` do they meet themselves (`Meeting`), once for each restart, since a child
needs the number of hosts that are left, and their mesh.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from meshwright.checkpoint.steps import committed_steps, unwritable
from meshwright.documents import read_json, read_text
from meshwright.errors import HostError, MeshwrightError, StorageError, shell_word
from meshwright.hardware.hosts import JOIN_SECONDS, PORT, Hosts
from meshwright.launching import LIMIT
from meshwright.launching.restarts import NoProgressError, Restarts, Tally, restarts
from meshwright.reporters.files import last_start
from meshwright.runs.run import Run
from meshwright.signs import BEATS, LOADING, PREPARING
from meshwright.storage.removing import remove_file
from meshwright.storage.writing import make_folder_below, open_file, refuse_links, write_atomically
from meshwright.trainer.alarms import KILLED, AlarmOptions, Alarms, tell
from meshwright.trainer.heartbeat import LockError
from meshwright.trainer.preemption import PERIOD, announced, has_metadata_server
from meshwright.trainer.watchdog import Watchdog
from meshwright.trust import accept, derive, foreign, references_in, trust_options

_SUPERVISE = ".supervise"
"""Folder of the output folder in which supervisors write."""
_POLL = 1.0
"""Seconds between two looks of a supervisor that waits for the others."""
_TURN = 5.0
"""Seconds after which the next host leads a meeting, where those before it have not come."""
_LEAVING = 300.0
"""Seconds that JAX gives all hosts to leave together."""
_STARTING = 10
"""Times the watchdog's silence that a child may take to its first sign."""
_PREEMPTED = (138, 143)
"""Exit codes of a child that saved and stopped after SIGUSR1 or SIGTERM."""
_LONGEST = 300.0
"""Most seconds of a back-off."""


@dataclasses.dataclass(frozen=True)
class Start:
    """How the training starts: the same on all hosts."""

    members: tuple[int, ...]
    """Hosts that take part, by their number in the whole run; the first is process 0."""
    coordinator: str | None
    mesh: str | None = None
    """Mesh of fewer devices; None where all hosts take part."""
    options: tuple[str, ...] = ()
    """Options that change with the mesh, where the planner chose them."""
    why: str = ""
    """Why that mesh."""


class Meeting:
    """Hosts whose training has ended, and which of them start it again,
    in `.supervise` of the output folder.

    Each writes one small file, `meeting-N/HOST`, and then looks only for `start-N.json`. The first
    host lists the folder until all have come, or those that are left after `Restarts.wait`, and
    writes that file, once. Where the first host is gone, the next one does so `_TURN` seconds
    later, and so on.
    """

    def __init__(self, out: Path, hosts: Hosts, limits: Restarts):
        refuse_links(out, depth=3)
        self.out, self.hosts, self.limits, self.folder = out, hosts, limits, out / _SUPERVISE
        # Meetings of an earlier job in this folder are not this one's.
        earlier = [path.stem.removeprefix("start-") for path in self.folder.glob("start-*.json")]
        self.number = max((int(number) for number in earlier if number.isdigit()), default=0)
        with contextlib.suppress(OSError, MeshwrightError):
            mine = self.folder / f"meeting-{self.number + 1}" / str(hosts.process)
            remove_file(mine, below=out, missing_ok=True)

    def next_start(self, run: Run, devices: int | None) -> Start:
        """Waits for the others, and returns what those that came start.

        Raises HostError where the others went on without this host, or none leads.
        """
        process, began, wait = self.hosts.process, time.monotonic(), self.limits.wait
        self.number += 1
        file, folder = (
            self.folder / f"start-{self.number}.json",
            self.folder / f"meeting-{self.number}",
        )
        try:
            make_folder_below(self.out, self.folder.name, folder.name)
            write_atomically(folder / str(process), _own_address(self.hosts.coordinator))
        except OSError as error:
            raise unwritable(folder, error) from error
        while (start := _read(file)) is None and (
            waited := time.monotonic() - began
        ) < 2 * wait + process * _TURN:
            if process == 0 or waited > wait + process * _TURN:
                came = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
                if len(came) == self.hosts.processes or waited > wait:
                    _put_once(
                        file,
                        json.dumps(dataclasses.asdict(self._choose(came, folder, run, devices))),
                    )
                    continue
            time.sleep(_POLL)
        if start is None or process not in start.members:
            truth = (
                "no other host came"
                if start is None
                else f"hosts {start.members} went on without this one"
            )
            fix = "the same command on all hosts, or a longer --restarts.wait"
            raise HostError(f"starting the run in {self.out} again", truth, fix)
        return start

    def _choose(self, members: list[int], folder: Path, run: Run, devices: int | None) -> Start:
        """Returns the start on `members`;
        on fewer hosts than before, on a mesh that the planner chooses."""
        start = Start(tuple(members), self.hosts.coordinator)
        if len(members) == self.hosts.processes:
            return start
        if members[0] and start.coordinator is not None:
            port = start.coordinator.rpartition(":")[2] or PORT
            address = read_text(folder / str(members[0]))
            start = dataclasses.replace(start, coordinator=f"{address}:{port}")
        before = last_start(self.out)
        total = int(devices or (run.mesh.size if run.mesh else 0) or before.get("devices", 0))
        from meshwright.planner.fewer_devices import plan_for_fewer

        plan = plan_for_fewer(
            run, len(members), total // self.hosts.processes, str(before.get("kind", ""))
        )
        changed = {
            f"--training.{name.replace('_', '-')}": str(value)
            for name, value in plan.training.items()
        }
        changed |= {} if plan.layout is None else {"--layout": plan.layout}
        options = tuple(word for pair in changed.items() for word in pair)
        return dataclasses.replace(start, mesh=str(plan.mesh), options=options, why=plan.why)


def _read(file: Path) -> Start | None:
    """Returns the start that a file states; None where there is none, or it is of another form.

    Raises ConfigError where its options, which the child is given as
    if they were typed, name code of no user's.
    """
    try:
        start = msgspec.convert(foreign(read_json(file), str(file)), Start)
    except (OSError, ValueError, StorageError):
        return None
    for word in start.options:
        for reference in references_in(word):
            accept("option", derive(word, reference))
    return start


def _put_once(file: Path, text: str) -> None:
    """Writes a file, unless it is there, or its store takes none: who reads it waits,
    and who waits writes it again."""
    with contextlib.suppress(OSError, StorageError), open_file(file, "x") as opened:
        opened.write(text)


class AlarmClaims:
    """Alarms of a run whose supervisors share an output folder: of each kind one of them sends one.

        .supervise/alarm-failed-1    the time at which the first was sent
        .supervise/alarm-failed-2    of the next one, `--alarm.every` seconds later or more

    Who makes the file sends. A number is never used again, so of several hosts that find the newest
    file old one makes the next.
    """

    def __init__(self, out: Path, every: float):
        self._out = out
        self._every = every

    def forget(self) -> None:
        """Removes the files of an earlier job in this folder."""
        with contextlib.suppress(OSError, StorageError):
            for file in (self._out / _SUPERVISE).glob("alarm-*"):
                remove_file(file, below=self._out, missing_ok=True)

    def take(self, kind: str) -> bool:
        """Returns whether this host sends an alarm of a kind;
        also where the folder takes no file."""
        try:
            make_folder_below(self._out, _SUPERVISE)
            number, sent = self._newest(kind)
            if abs(time.time() - sent) < self._every:  # else its maker's clock was set back since
                return False
            with open_file(self._file(kind, number + 1), "x") as file:
                file.write(f"{time.time():.3f}")
        except FileExistsError:
            return False
        except (OSError, MeshwrightError):
            return True  # twice is better than never
        return True

    def _newest(self, kind: str) -> tuple[int, float]:
        """Returns the number of the newest file of a kind and its time;
        (0, 0) where there is none."""
        prefix = self._file(kind, 0).name.removesuffix("0")
        files = (self._out / _SUPERVISE).glob(f"{prefix}*")
        numbers = [int(n) for file in files if (n := file.name.removeprefix(prefix)).isdigit()]
        if not numbers:
            return 0, 0.0
        newest = max(numbers)
        text = read_text(self._file(kind, newest))
        try:
            return newest, float(text)
        except ValueError:
            return newest, time.time()  # its maker is about to write it

    def _file(self, kind: str, number: int) -> Path:
        return self._out / _SUPERVISE / f"alarm-{kind.replace(' ', '-')}-{number}"


def _own_address(coordinator: str | None) -> str:
    """Returns the address of this host towards the coordinator; nothing is sent."""
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()


@dataclasses.dataclass
class Supervisor:
    """Process that runs `meshwright VERB ARGS` in a child process, again and again
    until it ends well.

    run, out, hosts, devices: what the arguments say, for a start on fewer hosts.
    """

    verb: str
    args: Sequence[str]
    run: Run
    out: Path
    hosts: Hosts
    devices: int | None
    restarts: Restarts
    watchdog: Watchdog
    alarm: AlarmOptions = AlarmOptions()
    received: int = 0
    """Signal that this process was sent: the child gets it too, and is not started again."""
    child: subprocess.Popen[bytes] | None = None
    first: int = 0
    """First step of which the child gave a sign; 0 before that."""
    reached: int = 0
    """Last step of which it did."""
    printed: str = ""
    """Standard output of the last child with --json: one that is preempted prints a summary, the
    next another, and a program reads one."""

    def supervise(self) -> int:
        """Starts the child until it ends well, or for good;
        returns its exit code, and passes signals on to it.

        Raises NoProgressError after too many starts without progress, HostError
        where hosts stay away.
        """
        refuse_links(self.out)
        claims = AlarmClaims(self.out, self.alarm.every)
        several = self.hosts.processes > 1
        if self.hosts.process == 0:
            claims.forget()
        alarms = Alarms(self.alarm, self.out, claims.take if several else lambda kind: True)
        with alarms.sending(), self._forwarding():
            return self._run_to_the_end()

    def _run_to_the_end(self) -> int:
        start, failures, several = (
            Start(tuple(range(self.hosts.processes)), None),
            0,
            self.hosts.processes > 1,
        )
        meeting = (
            Meeting(self.out, self.hosts, self.restarts)
            if several and self.restarts.hosts == "left"
            else None
        )
        stopped = self.out / _SUPERVISE / "stopped"
        with contextlib.suppress(OSError, StorageError):
            self.out.mkdir(parents=True, exist_ok=True)
            if self.hosts.process == 0:
                remove_file(stopped, below=self.out, missing_ok=True)
        tally = Tally(self.restarts.most)
        for attempt in itertools.count():
            began = time.monotonic()
            code = self._attempt(start, attempt)
            self._note(
                "ended", attempt, code=code, step=self.reached, seconds=time.monotonic() - began
            )
            if code < 0 and not self.received:
                # A child that ends by itself has sent an alarm.
                text = f"the training was killed by signal {-code}, in step {self.reached}"
                tell(KILLED, text, step=self.reached, process=self.hosts.process)
            code = code if code >= 0 else 128 - code
            if self.received or not restarts(code):
                # Another run has the folder: what stands there is for its supervisors.
                is_ours = code != LockError.exit_code
                ends_all = code or self.hosts.process == 0
                if several and is_ours and ends_all and not self.received:
                    _put_once(stopped, f"process {self.hosts.process} ended with exit code {code}")
                return self._ended(code)
            preempted = code in _PREEMPTED and self._notice() is not None
            reason = tally.add(code, self._newest(), preempted=preempted)
            if reason is not None:
                _put_once(stopped, f"process {self.hosts.process} ended for good: {reason}")
                raise NoProgressError(
                    f"{self.verb} --supervise, after exit code {code}",
                    reason,
                    f"look at the errors above; then meshwright {self.verb} --out "
                    f"{shell_word(self.out)} "
                    "--resume, or a higher --restarts.most",
                )
            # A start that made progress clears what went before.
            failures = 1 if self.reached > self.first + 1 else failures + 1
            wait = min(self.restarts.backoff * 2 ** (failures - 1), _LONGEST)
            count = (
                f"restart {attempt + 1}, {tally.starts} of {self.restarts.most} without progress"
            )
            self._say(f"exit code {code}; starting again in {wait:.0f} s, {count}")
            if self._pause(wait) or self._wait_for_machine():
                return self._ended(128 + self.received)
            with contextlib.suppress(OSError, ValueError, StorageError):
                self._say(f"it starts nothing more: {read_text(stopped)}")
                return self._ended(code)
            if meeting is not None:
                start = meeting.next_start(self.run, self.devices)
                mesh = f", on mesh {start.why}" if start.why else ""
                self._say(f"starting on {len(start.members)} of {self.hosts.processes} hosts{mesh}")
        raise AssertionError("unreachable")

    def _newest(self) -> int:
        """Returns the step of the newest checkpoint: in the output folder,
        or the one from which the child went on."""
        shared = 0
        with contextlib.suppress(OSError, MeshwrightError):
            shared = max(committed_steps(self.out / "checkpoints"), default=0)
        return max(shared, self.first - 1)

    def _notice(self) -> str | None:
        """Returns what the machine's provider announces: that it is to be stopped;
        None where nothing."""
        return announced() if has_metadata_server() else None

    def _wait_for_machine(self) -> bool:
        """Waits while this machine is announced to be stopped: a start would save
        at once, and train nothing.

        Returns whether a signal has come meanwhile.
        """
        notice = self._notice()
        if notice is not None:
            self._say(f"the metadata server announces {notice}: it starts again when that is over")
            self._note("waiting", 0, notice=notice)
        while notice is not None:
            if self._pause(PERIOD):
                return True
            notice = self._notice()
        return bool(self.received)

    def _ended(self, code: int) -> int:
        """Prints the JSON of the last start, where one was asked for; returns the exit code."""
        with contextlib.suppress(BrokenPipeError):  # the reader has gone
            print(self.printed, end="", flush=True)
        return code

    def _attempt(self, start: Start, attempt: int) -> int:
        """Runs the child once; returns its exit code, negative for a signal."""
        reader, writer = os.pipe()
        words = self.args if attempt == 0 else self._arguments(start)
        command = [sys.executable, "-P", "-m", "meshwright", self.verb, *words, *trust_options()]
        self.first = self.reached = 0
        self._note("starting", attempt)
        with open(reader, "rb", buffering=0) as signs, tempfile.TemporaryFile() as printed:
            environment = {**os.environ, BEATS: str(writer)}
            environment.pop(LIMIT, None)  # the starts are counted here
            output = printed if "--json" in self.args else sys.stdout
            # The process's own standard output, which is no longer file descriptor 1 (cli/main.py).
            self.child = subprocess.Popen(
                command,
                stdout=output.fileno(),
                pass_fds=(writer,),
                env=environment,
            )
            os.close(writer)
            self._watch(self.child, signs, attempt, several=len(start.members) > 1)
            code = self.child.wait()
            printed.seek(0)
            self.printed = printed.read().decode()
            return code

    def _watch(
        self, child: subprocess.Popen[bytes], signs: Any, attempt: int, *, several: bool
    ) -> None:
        """Reads the child's signs until it ends;
        kills it where they stop, as those of a stopped process do."""
        last = began = time.monotonic()
        leaving: float | None = None
        seconds, phase, place = 0.0, LOADING, "its start"
        while child.poll() is None:
            ready, _, _ = select.select([signs], [], [], 0.25)
            now = time.monotonic()
            lines = signs.read(65536).splitlines() if ready else []
            if ready and not lines:
                return  # the child has closed its end
            for line in lines:
                last = now
                with contextlib.suppress(ValueError):
                    step, phase, seconds, left = json.loads(line)
                    if step and not self.first:
                        self.first = step
                        self._note("training", attempt, step=step)
                    self.reached = step
                    leaving, place = (leaving or now) if left else None, f"{step} {phase}"
            # Python starts and reads its first modules before it gives a sign.
            allowed = self.watchdog.silence * (_STARTING if last == began else 1)
            # A child that has left prints its summary and waits for the other hosts to leave.
            silent = now - last > allowed + (0 if leaving is None else _LEAVING)
            stalled = seconds > self._limit(phase, several)
            if silent or stalled:
                what = (
                    f"no sign for {now - last:.0f} s" if silent else f"{seconds:.0f} s in one place"
                )
                self._say(f"process {child.pid} gave {what}, last at {place}: it is killed")
                self._note("killed", attempt, step=self.reached)
                child.kill()
                return

    def _limit(self, phase: str, several: bool) -> float:
        """Returns the seconds that a child may spend in one phase."""
        if phase == LOADING:
            return JOIN_SECONDS  # for which the other hosts wait
        # Among several hosts it is process 0 that knows which of them stalls.
        limited = self.watchdog.stall and phase != PREPARING and not several
        return 10 * self.watchdog.stall if limited else math.inf

    def _arguments(self, start: Start) -> list[str]:
        words = [
            *_without(self.args, {"--at": 1, "--resume": 0, "--resume-if-exists": 0}),
            "--resume-if-exists",
        ]
        if len(start.members) < self.hosts.processes:
            names = (
                "--coordinator",
                "--processes",
                "--process",
                "--devices",
                "--mesh",
                *start.options[::2],
            )
            words = [
                *_without(words, dict.fromkeys(names, 1)),
                "--processes",
                str(len(start.members)),
            ]
            if len(start.members) > 1:
                rank = start.members.index(self.hosts.process)
                words += ["--coordinator", str(start.coordinator), "--process", str(rank)]
            words += ["--mesh", str(start.mesh), *start.options]
            if self.devices is not None:
                words += [
                    "--devices",
                    str(self.devices * len(start.members) // self.hosts.processes),
                ]
        return words

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Passes signals that ask to stop on to the child."""

        def forward(number: int, frame: FrameType | None) -> None:
            self.received = number
            # The terminal sends Ctrl-C to the child as well;
            # `launch` and `kill -INT` send it to this process only.
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
        record = {
            "time": time.time(),
            "process": self.hosts.process,
            "event": event,
            "attempt": attempt,
            **values,
        }
        file = self.out / _SUPERVISE / f"journal-{self.hosts.process}.jsonl"
        with contextlib.suppress(OSError, StorageError):  # a full disk ends no supervisor
            make_folder_below(
                self.out, file.parent.name
            )  # an output folder that is gone is not made again
            with open_file(file, "a") as opened:
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
    """Returns the arguments without some options, spelt with `-` or `_`.
    names: option -> number of its values."""
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

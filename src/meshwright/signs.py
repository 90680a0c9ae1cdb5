"""Signs of this process: its step and phase, what its main thread waits for, and since when.

They are given from the process's first line to its last: to a supervisor through a pipe
(`give_signs`), and to the other hosts of a run through their store (`trainer.hosts`).

A wait for other hosts or for the devices that compute with them is announced (`waiting`). Whatever
else a main thread stands in is its own: a disk, a pipe, data, its own computation. What that is
comes from the system, which knows in which call a thread is and on which file, and from the line of
Python that called it.
"""

import collections
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BEATS = "MESHWRIGHT_BEATS"
"""Variable with the number of an open file that takes a process's signs,
for the one that supervises it."""
LOADING = "load"
"""Phase from the first line of a process until it knows what to do."""
PREPARING = "prepare"
"""Phase before training, without a limit: text may be tokenised for hours."""
PERIOD = 1.0
"""Seconds between two signs to a supervisor."""
NOBODY, EVERYBODY = -2, -1
"""Host that a main thread waits for: none at all, or all that take part;
else the index of a process."""
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_LONGEST = 4096
"""Bytes of a path."""
WORK = "work"
"""Seconds of a step in which a process waits neither for others nor for the devices."""
_TIMED = 100
"""Last times in a phase of which a median is taken."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait of a thread: for other hosts, for another thread, or for what is its own."""

    what: str
    """In words: `the devices`, `/shared/out/metrics.jsonl`."""
    host: int = NOBODY
    """Process that has to come first;
    `EVERYBODY` of a barrier or a collective, `NOBODY` of what is this host's own."""
    thread: int | None = None
    """Thread of this process that has to come first."""


_waits: dict[int, list[Wait]] = {}


class _Stopwatch:
    """Seconds that the main thread has waited for other hosts,
    or for the devices that compute with them."""

    def __init__(self) -> None:
        self._now: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that are over; time at which the present one began."""

    @property
    def seconds(self) -> float:
        total, since = self._now
        return total if since is None else total + time.monotonic() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the context, once where it is inside another."""
        total, since = self._now
        if since is not None:
            yield
            return
        began = time.monotonic()
        self._now = (total, began)
        try:
            yield
        finally:
            self._now = (total + time.monotonic() - began, None)


_for_others = _Stopwatch()


@contextlib.contextmanager
def waiting(what: str, host: int = EVERYBODY, thread: int | None = None) -> Iterator[None]:
    """States what this thread waits for while the context is open. host, thread: as of `Wait`."""
    stack = _waits.setdefault(threading.get_ident(), [])
    stack.append(Wait(what, host, thread))
    is_counted = host != NOBODY and threading.current_thread() is threading.main_thread()
    try:
        with _for_others.running() if is_counted else contextlib.nullcontext():
            yield
    finally:
        stack.pop()


def wait_of_main_thread(*, detailed: bool = True) -> Wait:
    """Returns what the main thread waits for; of a thread of this process what that one waits for.

    detailed: whether to look for the line and the file where it was not stated.
    """
    thread: int | None = threading.main_thread().ident
    stack: list[Wait] = []
    while thread is not None:
        stack = _waits.get(thread, [])
        follows = stack[-1].thread if stack else None
        if follows is None or follows == thread:
            break
        thread = follows
    wait = Wait("")
    if stack and stack[-1].thread is None:
        wait = stack[-1]
    if wait.host != NOBODY or not detailed:
        return wait
    where = _where(thread)
    return Wait(f"{wait.what}: {where}" if wait.what else where)


def _where(thread: int | None) -> str:
    """Describes where a thread of this process is: the file or pipe of its system call,
    and its line of Python."""
    frame = sys._current_frames().get(thread or 0)
    line = ""
    while frame is not None:
        file = frame.f_code.co_filename
        line = line or f"{file}, line {frame.f_lineno}"
        if file.startswith(_PACKAGE):
            line = f"{file.removeprefix(_PACKAGE)}, line {frame.f_lineno}"
            break
        frame = frame.f_back
    natives = {each.ident: each.native_id for each in threading.enumerate()}
    target = _target_of_call(natives.get(thread)) or _file_of_other_threads()
    return f"{target} ({line})" if target and line else target or line


_BY_DESCRIPTOR = {0, 1, 3, 5, 8, 16, 17, 18, 19, 20, 73, 74, 75, 77, 217, 295, 296}
"""System calls of x86-64 whose first argument is a file descriptor: read, write, close,
fstat, flock, fsync, ..."""
_BY_PATH = {
    **dict.fromkeys((2, 4, 6, 21, 82, 83, 84, 87, 137), 0),
    **dict.fromkeys((257, 258, 262, 263, 264, 269, 316, 332), 1),
}
"""System calls of x86-64 -> argument with a path: open, stat, rename, mkdir, unlink,
statfs, openat, ..."""


def _target_of_call(native: int | None) -> str:
    """Returns the file, or the pipe, of the system call that a thread is in;
    "" where the system does not say."""
    if native is None or platform.machine() != "x86_64":
        return ""
    try:
        number, *arguments = Path(f"/proc/self/task/{native}/syscall").read_text().split()
        call, values = int(number), [int(word, 16) for word in arguments]
        if call in _BY_DESCRIPTOR:
            return _name_of(values[0])
        if call not in _BY_PATH:
            return ""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            start = values[_BY_PATH[call]]
            content = os.pread(memory.fileno(), _LONGEST - start % _LONGEST, start)
        return os.fsdecode(content.split(b"\0")[0])
    except (OSError, ValueError, IndexError, OverflowError):
        return ""


def _file_of_other_threads() -> str:
    """Returns the file of a system call in which another thread of this process is: one
    that reads or writes for it."""
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError:
        return ""
    targets = (_target_of_call(int(task)) for task in tasks)
    system = ("/proc/", "/sys/", "/dev/")
    files = (target for target in targets if target.startswith("/"))
    return next((file for file in files if not file.startswith(system)), "")


def _name_of(descriptor: int) -> str:
    target = os.readlink(f"/proc/self/fd/{descriptor}")
    if not target.startswith("pipe:"):
        return target
    names = {1: "standard output", 2: "standard error"}
    streams = {1: sys.stdout, 2: sys.stderr}
    for number, stream in streams.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if stream.fileno() == descriptor:
                return f"the pipe of {names[number]}, which is not read"
    return "a pipe"


class Phases:
    """Step and phase of a process, set by the training loop in one assignment and read
    by other threads."""

    def __init__(self, phase: str = "start") -> None:
        self.now: tuple[int, str, float] = (0, phase, time.monotonic())
        self.waited = 0.0
        """Seconds that this process has waited for its data."""
        self._saving = ("save", 0.0)
        self._seconds: dict[str, collections.deque[float]] = {}
        """Phase, or `WORK` -> how long the last ones took."""
        self._work: tuple[float, float | None] = (0.0, None)
        """Seconds of its own work in the steps that are over;
        in a step, `_progress` at its beginning."""

    @property
    def worked(self) -> float:
        """Seconds in phase `step` in which this process waited neither for others nor
        for the devices."""
        total, start = self._work
        return total if start is None else total + _progress() - start

    @property
    def place(self) -> tuple[int, str, float]:
        """Step, phase, and since when;
        of a save since it last wrote something, or waits for other hosts (`commit`)."""
        step, phase, since = self.now
        if phase != "save":
            return step, phase, since
        return step, self._saving[0], max(since, self._saving[1])

    def saves(self, phase: str) -> None:
        """Called by a save when it has written another part (`save`),
        or waits for the other hosts (`commit`)."""
        self._saving = (phase, time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase: start, data, compile, step, save, evaluate, sample.
        step: None stays in the same one."""
        last_step, last_phase, since = self.now
        now = time.monotonic()
        self._note(last_phase, now - since)
        worked = self.worked
        if last_phase == "step":
            self._note(WORK, worked - self._work[0])
        self._work = (worked, _progress() if phase == "step" else None)
        self.now = (last_step if step is None else step, phase, now)

    def _note(self, phase: str, seconds: float) -> None:
        self._seconds.setdefault(phase, collections.deque(maxlen=_TIMED)).append(seconds)

    def usual_seconds(self, phase: str) -> float | None:
        """Returns the median seconds of the last times in a phase that are over;
        None before the first.

        phase: or `WORK`, of the work of its own in a step.
        """
        times = self._seconds.get(phase)
        return statistics.median(times.copy()) if times else None


def _progress() -> float:
    """Returns a time that stands still while the main thread waits for others."""
    return time.monotonic() - _for_others.seconds


@dataclasses.dataclass
class _Here:
    phases: Phases
    left: str = ""
    whole: int | None = None


_here = _Here(Phases(LOADING))


def here() -> Phases:
    """Returns the phases of this process."""
    return _here.phases


@contextlib.contextmanager
def in_phases(phases: Phases) -> Iterator[Phases]:
    """Makes `phases` those of this process while the context is open."""
    before, _here.phases = _here.phases, phases
    try:
        yield phases
    finally:
        _here.phases = before


def leave(how: str) -> None:
    """Notes that the process has done its work,
    or why it ends: a supervisor then waits for its exit."""
    _here.left = _here.left or how


def end_with(code: int) -> None:
    """Notes that the run is whole and ends with `code`: nothing is left to do
    that all hosts do together."""
    _here.whole = code


def whole() -> int | None:
    """Returns the exit code of a run that is whole; None while it is not."""
    return _here.whole


def give_signs() -> None:
    """Gives signs to the supervisor of this process, where it has one, from now to its end,
    in a thread."""
    file = os.environ.get(BEATS, "")
    if not file.isdigit():
        return
    with contextlib.suppress(OSError):
        os.set_blocking(int(file), False)  # a supervisor that was stopped does not stop this thread
    threading.Thread(target=_beat, args=(int(file),), daemon=True, name="signs").start()


def _beat(file: int) -> None:
    while not _unsupervised.is_set():
        step, phase, since = _here.phases.place
        sign = [step, phase, time.monotonic() - since, _here.left]
        try:
            os.write(file, f"{json.dumps(sign)}\n".encode())
        except BrokenPipeError:
            _unsupervised.set()
        except OSError:  # a supervisor that was stopped reads nothing
            pass
        time.sleep(PERIOD)


_unsupervised = threading.Event()


def supervisor_has_gone() -> bool:
    """Returns whether this process had a supervisor, and has none any more."""
    return _unsupervised.is_set()

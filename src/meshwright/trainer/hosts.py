"""Hosts of one run: compared before anything is compiled, and watched while they train.

Every host publishes its step and phase; where one dies, stops or falls behind, all say which, and
leave. A thread publishes through the key-value store of JAX's coordination service, which runs in
process 0; process 0 reads all hosts and publishes what it finds, and the others read only that.
Another thread judges, because a call to a process that was stopped does not return. Where process 0
dies, JAX aborts all others from a thread of its own: its SIGABRT is answered here, so that the last
word is ours and the exit code one that schedulers restart on.
"""

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import hashlib
import json
import operator
import os
import secrets
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright import last_words, signs
from meshwright.checkpoint.steps import committed_steps
from meshwright.errors import ConfigError, HostError, StorageError, reason_of, shell_word
from meshwright.hardware.agreement import (
    agree,
    answer_of_the_first,
    choose_together,
    digest,
    flatten,
    versions_of_program,
)
from meshwright.hardware.hosts import store
from meshwright.monitoring.watch import keep_last_minutes
from meshwright.runs.run import Run
from meshwright.runs.run_file import fields_to_compare
from meshwright.signs import EVERYBODY, NOBODY, PREPARING, Phases
from meshwright.statuses import statuses_of
from meshwright.storage.removing import remove_file
from meshwright.storage.writing import make_folder_below, write_text
from meshwright.trainer import alarms
from meshwright.trainer.prepare import Trainable
from meshwright.trainer.watchdog import Watchdog

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that change what a program computes, besides those of `jax.config`."""
_OF_A_HOST = (
    "address",
    "cache",
    "dump",
    "log_",
    "logging",
    "mtls",
    "platform",
    "traceback",
    "visible_devices",
)
"""Words in the names of JAX's settings that may differ between hosts: they change no number."""
_CAUGHT_UP = 10.0
"""Seconds in which a network file system shows a new file to every host."""
_FOLDER = "meshwright/watchdog"
_SLOW = 10
"""Times the limit for phases that compile, restore or evaluate."""
_SLOW_PHASES = ("prepare", "start", "compile", "evaluate", "sample")
_IN_STEPS = ("step", "data")
_GRACE = 3.0
"""Seconds in which process 0 publishes its verdict before it leaves, and with it the key-value
store."""
_DELAYS, _TIMES, _LATE = 30, 4.0, 0.02
"""Signs over which the delay of a host is averaged; how many times the median, and how many
seconds, make it slow."""
_WORK = bytes(2**18)
_SHARE, _STEPS, _WINDOW, _LEAST = 0.2, 10, 2.0, 0.05
"""Share of the time that a host waits for its data, or does work of its own in its steps, over so
many steps and seconds, above which it is slow; least seconds of work of its own in a step."""
_LASTING = 3.0
"""Seconds in one phase after which a sign has the line, and the file, in which the main thread
is."""
_ENDED = 1.0
"""Seconds in which the other hosts read that all have come to the end."""
_silence = threading.Lock()


def agree_on(run: Run) -> None:
    """Compares the Run and versions before anything is read: other sources would not answer."""
    agree("run or versions", _fields_of(run))


def _fields_of(run: Run) -> dict[str, str]:
    """Returns the fields of the Run, JAX's settings, and the versions of libraries and driver."""
    found = versions_of_program()
    device = jax.local_devices()[0]
    found["the device's runtime"] = (
        f"{device.device_kind}, {device.client.platform_version}".replace("\n", ", ")
    )
    names = [
        name for name in sorted(jax.config.values) if not any(word in name for word in _OF_A_HOST)
    ]
    settings = {f"jax.config.{name}": str(jax.config.values[name]) for name in names}
    return (
        flatten(fields_to_compare(run))
        | {f"version of {name}": version for name, version in found.items()}
        | settings
    )


def same_fields(prepared: Trainable) -> dict[str, str]:
    """Returns what all hosts must have in common: the Run's fields, versions, data, tokenizer."""
    fields = _fields_of(prepared.device_run.run)
    flags = {name: os.environ[name].split() for name in _FLAGS if name in os.environ}
    fields |= {
        name: " ".join(w for w in words if not w.startswith("--xla_dump"))
        for name, words in flags.items()
    }
    data: dict[str, Any] = dict(prepared.fingerprint() or {})
    fields["tokenizer"] = digest(str(data.pop("tokenizer", "")))
    fields |= {f"tokens: {name}": value for name, value in flatten(data).items()}
    return fields


def check_shared(out: Path) -> None:
    """Raises ConfigError where a process does not see what process 0 writes into the folder."""

    def mark() -> str:
        name = f".seen-by-all-{secrets.token_hex(4)}"  # a name that no host has asked for before
        write_text(out / name, name)
        return name

    def judge(seen: list[bool]) -> None:
        if blind := [i for i, sees in enumerate(seen) if not sees]:
            which = ", ".join(map(str, blind[:8])) + (
                f" and {len(blind) - 8} more" if len(blind) > 8 else ""
            )
            raise ConfigError(
                f"training on {len(seen)} hosts in {out}",
                f"processes {which} do not see the file that process 0 wrote there: the folder "
                "is another on that host",
                "an --out that all hosts share, or in a bucket",
            )

    if jax.process_count() == 1:
        return
    file, until = out / answer_of_the_first(mark), time.monotonic() + _CAUGHT_UP
    while not (there := file.is_file()) and time.monotonic() < until:
        time.sleep(0.2)
    try:
        choose_together("output folder", there, judge)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError, StorageError):
                remove_file(file, below=out, missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Sign:
    """Latest sign of a host, and when it came (`time.monotonic` of the one that reads it)."""

    process: int
    name: str
    pid: int
    beat: int
    step: int
    phase: str
    seconds: float
    """Time in this phase of this step when it was sent."""
    at: float
    left: str
    """Reason for which the host has left; `done` where it has come to its end."""
    delay: float = 0.0
    """Mean seconds, over its last signs in steps, that a small computation took and that its thread
    woke too late; 0 before there are enough."""
    what: str = ""
    """What its main thread waits for: devices, a barrier, a file, a pipe; and the line of
    Python."""
    host: int = NOBODY
    """Process that it waits for; `EVERYBODY` of a barrier or a collective, `NOBODY` of what is its
    own."""
    waited: float = 0.0
    """Seconds that it has waited for data since its start."""
    worked: float = 0.0
    """Seconds in its steps in which it has waited neither for others nor for the devices."""

    def describe(self, now: float) -> str:
        """Where the host was: `process 1 (node7, pid 4), step 12, data since 14:03:05`."""
        age = now - self.at + self.seconds
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - age))
        where = (
            f"{self.phase} after step {self.step}" if self.phase != "step" else f"step {self.step}"
        )
        wait = f", waiting for {self.what}" if self.what else ""
        return (
            f"process {self.process} ({self.name}, pid {self.pid}): {where} since {since}, "
            f"{age:.0f} s ago{wait}"
        )


def verdict(signs: Mapping[int, Sign], limits: Watchdog, now: float) -> str | None:
    """Returns which host died, stopped or fell behind, and where; None where none did."""
    gone = [sign for sign in signs.values() if sign.left not in ("", "done")]
    if gone:
        return "; ".join(f"process {s.process} ({s.name}) has left: {s.left}" for s in gone[:4])
    running = [s for s in signs.values() if not s.left]
    silent = [s for s in running if now - s.at > limits.silence]
    if silent:
        texts = (f"no sign for {now - s.at:.0f} s of {s.describe(now)}" for s in silent[:4])
        return "; ".join(texts) + (f"; and of {len(silent) - 4} more" if len(silent) > 4 else "")
    if not limits.stall or not running:
        return None
    last = waited_for(running)
    if last.phase == PREPARING and last.process == 0:
        return None  # it tokenises for all
    limit = limits.stall * (_SLOW if last.phase in _SLOW_PHASES else 1)
    waited = now - last.at + last.seconds
    if waited <= limit:
        return None
    text = f"{last.describe(now)}: over the limit of {limit:g} s"
    alike = [s for s in running if (s.host, s.step, s.phase) == (EVERYBODY, last.step, last.phase)]
    if len(alike) == len(running) > 1:
        text = (
            f"all {len(running)} processes wait alike, so none is named: a device or a link does "
            f"not answer (meshwright doctor on each host reads their counters); {text}"
        )
    return text


def waited_for(running: list[Sign]) -> Sign:
    """Returns the host that the others wait for.

    A host that waits for no other comes first: whatever it is doing, the others cannot go on
    without it. Where all wait, each edge leads to the next host. Where those lead nowhere, all wait
    for the devices or at a barrier: the host with the fewest steps has not come there.
    """
    own = [s for s in running if s.host == NOBODY]
    if not own:
        by_process = {s.process: s for s in running}
        sign, passed = running[0], set[int]()
        while sign.host in by_process and sign.process not in passed:
            passed.add(sign.process)
            sign = by_process[sign.host]
        others = [s for s in running if s.host == EVERYBODY]
        own = [sign] if sign.host == EVERYBODY and passed else others or running
    return min(own, key=lambda s: (s.step, s.phase in ("step", "commit"), s.at - s.seconds))


def slow_data(before: Mapping[int, Sign], now: Mapping[int, Sign]) -> dict[int, str]:
    """Returns the hosts whose data comes slowly, by what they have waited between two times.

    All others wait for them.
    """
    shares = _shares(before, now, operator.attrgetter("waited"))
    return {
        process: f"process {process} ({now[process].name}, pid {now[process].pid}) "
        f"waits for its data "
        f"{100 * share:.0f} % of the time, most other hosts {100 * median:.0f} %, and they wait "
        "for it in every step"
        for process, (share, median) in _stragglers(shares).items()
    }


def slow_work(before: Mapping[int, Sign], now: Mapping[int, Sign]) -> dict[int, str]:
    """Returns the hosts that work in their steps while the others wait for them.

    That is Python, files, or a processor shared with other work: not the devices, for which all
    hosts wait alike.
    """
    shares = _shares(before, now, operator.attrgetter("worked"))
    found = {}
    for process, (share, median) in _stragglers(shares).items():
        sign = now[process]
        worked = sign.worked - before[process].worked
        a_step = worked / max(1, sign.step - before[process].step)
        if a_step < _LEAST:
            continue
        place = f" ({sign.what})" if sign.what and sign.host == NOBODY else ""
        found[process] = (
            f"process {process} ({sign.name}, pid {sign.pid}) takes {a_step:.2g} s of each step "
            f"for itself{place}, {100 * share:.0f} % of the time, most other hosts "
            f"{100 * median:.0f} %: they wait for it in every step"
        )
    return found


def _shares(
    before: Mapping[int, Sign], now: Mapping[int, Sign], seconds: Callable[[Sign], float]
) -> dict[int, float]:
    """Returns the share of the time between two times that each host spent on something."""
    return {
        process: (seconds(sign) - seconds(before[process])) / (sign.at - before[process].at)
        for process, sign in now.items()
        if process in before and sign.at > before[process].at
    }


def _stragglers(shares: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """Returns the hosts whose share is far above that of most, with theirs and the median."""
    if not shares:
        return {}
    median = statistics.median_low(shares.values())
    return {
        process: (share, median)
        for process, share in shares.items()
        if share > max(_SHARE, _TIMES * median)
    }


def _steps_between(before: Mapping[int, Sign], now: Mapping[int, Sign]) -> int:
    """Returns the fewest steps that a host has begun between two times."""
    steps = [sign.step - before[process].step for process, sign in now.items() if process in before]
    return min(steps, default=0)


def slow_hosts(signs: Mapping[int, Sign]) -> dict[int, str]:
    """Returns the hosts that are several times slower than most, for which others wait.

    Hosts of which nothing is known yet are left out.
    """
    signs = {process: sign for process, sign in signs.items() if sign.delay}
    if not signs:
        return {}
    median = statistics.median_low([sign.delay for sign in signs.values()])
    return {
        process: f"process {process} ({s.name}, pid {s.pid}) is slow: "
        f"{1000 * s.delay:.0f} ms for what takes other "
        f"hosts {1000 * median:.1f} ms, and they wait for it in every step"
        for process, s in signs.items()
        if s.delay > max(_LATE, _TIMES * median)
    }


_watches: list["_Watch"] = []
"""The watch of this process, where one is running."""


@contextlib.contextmanager
def watching(out: Path, phases: Phases, limits: Watchdog) -> Iterator[None]:
    """Watches the other processes of the run while the context is open.

    out: output folder, which gets the stacks.  phases: what this process does. Where a host dies,
    stops or falls behind, every process prints which, writes its stacks, and exits with 75. Inside
    another `watching`, as of the verb that trains, it only states what this process does.
    """
    with signs.in_phases(phases), contextlib.ExitStack() as stack:
        if jax.process_count() > 1 and not _watches:
            stack.enter_context(_Watch(out, phases, limits, store()).running())
        watch = _watches[-1] if _watches else None
        if watch is not None:
            before, watch.phases = watch.phases, phases
            stack.callback(setattr, watch, "phases", before)
        yield


def leave_together() -> None:
    """Waits until every process has done its work, so that none takes another's end for a failure.

    The coordination service is in process 0, which leaves last. A host that hangs on its way is
    named by the watch, and the others leave without it.
    """
    watch = _watches[-1]
    watch.phases.enter("leave")
    watch.leave_together()
    last_words.wait_for_nothing()


class _Watch:
    """The threads of one process, and what they know of the others."""

    def __init__(self, out: Path, phases: Phases, limits: Watchdog, client: Any):
        self.out, self.phases, self.limits, self.client = out, phases, limits, client
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.period = min(1.0, limits.silence / 8)
        self.signs: dict[int, Sign] = {}
        self.found: str | None = None
        self.left = ""
        self.beat = 0
        self.worked = 0.0
        """Seconds of its own work at the last sign."""
        self.stopped = threading.Event()
        self.delays: collections.deque[float] = collections.deque(maxlen=_DELAYS)
        self.named: set[str] = set()
        self.earlier: tuple[float, dict[int, Sign]] = (0.0, {})
        self.is_alone = False
        """Whether it was said that the supervisor of this process has gone."""
        self.judged_at = time.monotonic()
        self.pause = (0.0, 0.0)
        """Time at which this process last went on after it was stopped, and the seconds of that."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the threads, and tells the others how this process has ended."""
        threads = [
            threading.Thread(target=self._publish, daemon=True, name="watchdog: signs"),
            threading.Thread(target=self._judge, daemon=True, name="watchdog: verdict"),
        ]
        _watches.append(self)
        with self._answering_abort():
            for thread in threads:
                thread.start()
            try:
                yield
                self.left = "done"
            except BaseException as error:
                self._explain(error)
                raise
            finally:
                self.left = self.left or "an error"
                signs.leave(self.left)
                self.stopped.set()
                _watches.remove(self)
                with contextlib.suppress(Exception):
                    self._sign()
                if self.left != "done" and self.process == 0:
                    # The store ends with this process: the others read first why.
                    self._tell(f"process 0 ({socket.gethostname()}) has left: {self.left}")
                    time.sleep(min(_GRACE, 2.5 * self.period))

    def leave_together(self) -> None:
        """Waits until all processes have left, as `leave_together` does."""
        self.left = "done"
        signs.leave(self.left)
        key = f"{_FOLDER}/ended"
        # Where the store does not answer, process 0 has gone: no process is left to wait for.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._sign()
            if self.process:
                with signs.waiting("process 0, to leave together", 0):
                    while not _there(self.client, key):
                        time.sleep(self.period / 8)
                return
            with signs.waiting("the other processes, to leave together"):
                while not self._all_have_left():
                    time.sleep(self.period / 8)
            self.client.key_value_set(key, "", True)
            time.sleep(_ENDED)

    def _all_have_left(self) -> bool:
        self._read()
        return len(self.signs) == self.processes and all(s.left for s in self.signs.values())

    def _explain(self, error: BaseException) -> None:
        """Leaves a word on why this process ends.

        Where it is a collective that failed, waits for the verdict.
        """
        failed = _collective(error)
        if failed is None:
            self.left = f"{type(error).__name__}: {reason_of(error)}"
            return
        # Nothing is wrong here: a neighbour closed its connections. The threads find out which.
        until = time.monotonic() + self.limits.silence + 3 * self.period + _GRACE
        while time.monotonic() < until:
            time.sleep(self.period / 4)
        self._leave(
            f"a collective failed, and every host gives signs: {str(failed).splitlines()[0]}"
        )

    def _publish(self) -> None:
        while True:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._sign()
                self._read()
            if self.process and signs.supervisor_has_gone() and not self.is_alone:
                self.is_alone = True  # process 0 has an alarm
                last_words.say(f"process {self.process}: {alarms.WITHOUT_SUPERVISOR}")
            due = time.monotonic() + self.period
            if self.stopped.wait(self.period):
                return
            hashlib.sha256(_WORK).digest()
            # A compilation keeps all processors busy, and no other host waits for it.
            if self.phases.now[1] in _IN_STEPS:
                self.delays.append(time.monotonic() - due)

    def _sign(self) -> None:
        self.beat += 1
        step, phase, since = self.phases.place
        seconds = time.monotonic() - since
        delay = sum(self.delays) / _DELAYS if len(self.delays) == _DELAYS else 0.0
        worked = self.phases.worked
        is_busy = worked - self.worked > _SHARE * self.period
        self.worked = worked
        wait = signs.wait_of_main_thread(detailed=is_busy or seconds > _LASTING)
        values = [
            socket.gethostname(),
            os.getpid(),
            self.beat,
            step,
            phase,
            seconds,
            self.left,
            delay,
            wait.what,
            wait.host,
            self.phases.waited,
            worked,
        ]
        if self.client is not None:
            self.client.key_value_set(f"{_FOLDER}/signs/{self.process}", json.dumps(values), True)

    def _read(self) -> None:
        """Reads the signs of the others: all in process 0, its sign and verdict elsewhere."""
        if self.client is None:
            return
        if self.process == 0:
            found = self.client.key_value_dir_get(f"{_FOLDER}/signs/")
            texts = {int(key.rpartition("/")[2]): text for key, text in found}
        else:
            texts = {0: self.client.key_value_try_get(f"{_FOLDER}/signs/0")}
        now = time.monotonic()
        for process, text in texts.items():
            name, pid, beat, step, phase, seconds, left, *more = json.loads(text)
            sign = Sign(process, name, pid, beat, step, phase, seconds, now, left, *more)
            last = self.signs.get(process)
            if last is None or (last.beat, last.left) != (sign.beat, sign.left):
                self.signs[process] = sign
        if self.process == 0:
            self._name_slow_hosts(now)
        else:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is none
                self.found = self.client.key_value_try_get(f"{_FOLDER}/verdict")

    def _name_slow_hosts(self, now: float) -> None:
        """Names each host once that others wait for in every step: a processor or data is slow."""
        slow = [(f"host {process}", text) for process, text in slow_hosts(self.signs).items()]
        since, before = self.earlier
        if not before or any(
            sign.step < before[p].step for p, sign in self.signs.items() if p in before
        ):
            self.earlier = (now, dict(self.signs))  # the first, or the run went back
        elif now - since > _WINDOW and _steps_between(before, self.signs) >= _STEPS:
            slow += [(f"data {p}", text) for p, text in slow_data(before, self.signs).items()]
            slow += [(f"work {p}", text) for p, text in slow_work(before, self.signs).items()]
            self.earlier = (now, dict(self.signs))
        for name, text in slow:
            if name not in self.named:
                self.named.add(name)
                last_words.say(text)
                alarms.tell(alarms.SLOW_HOST, text)

    def _judge(self) -> None:
        self.judged_at = time.monotonic()
        while not self.stopped.wait(self.period / 2):
            now = time.monotonic()
            if now - self.judged_at > self.limits.silence / 2:
                # This process was itself stopped, and has not heard of the others yet.
                self.signs = {
                    process: dataclasses.replace(s, at=now) for process, s in self.signs.items()
                }
                self.pause = (now, now - self.judged_at)
            self.judged_at = now
            others = {
                process: sign for process, sign in self.signs.items() if process != self.process
            }
            found = self.found or verdict(
                self.signs if self.process == 0 else others, self.limits, now
            )
            # A host that stalls here is seen by process 0, which knows where the others are.
            if self.process and not self.found and found and "over the limit" in found:
                continue
            if found:
                self._leave(found)

    def _own_pause(self, now: float) -> str:
        """Says that this process was itself stopped a moment ago; "" where it was not."""
        since, seconds = self.pause
        if now - self.judged_at > self.limits.silence / 2:  # the thread that judges still sleeps
            since, seconds = now, now - self.judged_at
        if not seconds or now - since > self.limits.silence:
            return ""
        return f"this process was itself stopped for {seconds:.0f} s, and "

    def _leave(self, found: str) -> None:
        if not _silence.acquire(blocking=False):
            time.sleep(60)  # another thread is leaving
        sender = threading.Thread(target=self._tell, args=(found,), daemon=True)
        if tells := self.process == 0:
            sender.start()
        file = self._stacks()
        _soon(keep_last_minutes)
        steps = _soon(lambda: committed_steps(self.out / "checkpoints"))
        kept = (
            f"the checkpoint of step {steps[-1]} is the last whole one"
            if steps
            else f"{self.out} does not answer"
        )
        again = f"meshwright train --out {shell_word(self.out)} --resume: {kept}"
        if steps == []:
            again = "the same command again: no checkpoint was committed"
        step, phase, _ = self.phases.now
        whole = signs.whole()
        if whole is None:
            alarms.tell(alarms.FAILED, found, fix=again, error=HostError.__name__)
        error = HostError(
            f"training on {self.processes} hosts, seen by process {self.process} in phase "
            f"{phase}, step {step}",
            found,
            again + (f"; stacks of this process: {file}" if file else ""),
        )
        text = f"error: {error}\n"
        code = HostError.exit_code
        if whole is not None:
            text = f"the run has come to its end, and nothing of it is missing: {found}\n"
            code = whole
        if tells:
            last_words.say(text.rstrip("\n"))
            sender.join(_GRACE)
            time.sleep(min(_GRACE, 2.5 * self.period))  # in which the others read it
            with contextlib.suppress(RuntimeError):  # this host starts no further thread
                alarms.finish()
            text = ""
        last_words.leave(code, text)

    def _tell(self, found: str) -> None:
        with contextlib.suppress(Exception):
            self.client.key_value_set(f"{_FOLDER}/verdict", found, True)

    def _stacks(self) -> Path | None:
        """Writes the stacks into the output folder.

        Where that does not take them, they stay on this host.
        """
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile(
                "w+", prefix="meshwright-stacks-", delete=False
            ) as stream:
                faulthandler.dump_traceback(stream, all_threads=True)
                stream.seek(0)
                text = stream.read()
            file, here = (
                self.out / "watchdog" / f"stacks-process-{self.process}.txt",
                Path(stream.name),
            )

            def keep() -> Path:
                make_folder_below(self.out, file.parent.name)
                write_text(file, text)
                remove_file(here, below=here.parent)
                return file

            return _soon(keep) or here
        return None

    @contextlib.contextmanager
    def _answering_abort(self) -> Iterator[None]:
        """Answers SIGABRT, which JAX raises when process 0 is gone, with our error and code."""

        def answer(number: int) -> None:
            # It runs in the thread that aborts, which never returns to what it did.
            now = time.monotonic()
            soon = dataclasses.replace(self.limits, silence=max(2.0, 5 * self.period))
            found = self.found or verdict(
                {p: s for p, s in self.signs.items() if p != self.process}, soon, now
            )
            if not found and self.process:
                where = f": {self.signs[0].describe(now)}" if 0 in self.signs else ""
                found = f"{self._own_pause(now)}the connection to process 0 has ended{where}"
            absent = [i for i in range(self.processes) if i not in self.signs]
            self._leave(
                found or f"JAX misses a process; of {absent} none has come as far as training"
            )

        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(answer)
        libc = ctypes.CDLL(None)
        libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
        previous = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
        try:
            yield
        finally:
            libc.signal(signal.SIGABRT, previous)


def _soon[T](ask: Callable[[], T]) -> T | None:
    """Returns what `ask` does.

    The result is None where a bucket or a network file system does not answer within seconds.

    It is asked in a thread of its own: the one that leaves may be waited for by others, or be the
    one that aborts.
    """
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_GRACE)
    return answers[0] if answers else None


def _there(client: Any, key: str) -> bool:
    """Returns whether the store has a key. Raises JaxRuntimeError where the store has gone."""
    try:
        client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in statuses_of(error):
            raise
        return False
    return True


def _collective(error: BaseException | None) -> BaseException | None:
    """Returns the error of a collective or of the store that this error is, or comes from."""
    while error is not None:
        raised_by_jax = isinstance(error, jax.errors.JaxRuntimeError)
        if raised_by_jax and "RESOURCE_EXHAUSTED" not in statuses_of(error):
            return error
        error = error.__cause__ or error.__context__
    return None

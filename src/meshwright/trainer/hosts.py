"""Hosts of one run: compared before anything is compiled, and watched while they train.

Every host publishes its step and phase; where one dies, stops or falls behind, all say which, and leave. A thread
publishes through the key-value store of JAX's coordination service, which runs in process 0; process 0 reads all hosts
and publishes what it finds, and the others read only that. Another thread judges, because a call to a process that was
stopped does not return. Where process 0 dies, JAX aborts all others from a thread of its own: its SIGABRT is answered
here, so that the last word is ours and the exit code one that schedulers restart on.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.steps import committed_steps
from meshwright.errors import HostError
from meshwright.hardware.agreement import agree, digest, flatten
from meshwright.hardware.hosts import installed_versions, store
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.trainer.prepare import Trainable
from meshwright.trainer.watchdog import BEATS, PREPARING, Phases, Watchdog

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
"""Variables that change what a program computes."""
_FOLDER = "meshwright/watchdog"
_SLOW = 10
"""Times the limit for phases that compile, restore or evaluate."""
_SLOW_PHASES = ("start", "compile", "evaluate", "sample")
_GRACE = 3.0
"""Seconds in which process 0 publishes its verdict before it leaves, and with it the key-value store."""
_silence = threading.Lock()


def agree_on(run: Run) -> None:
    """Compares the Run and the versions before anything is read: hosts with other sources would wait for each other."""
    agree("run or versions", _fields_of(run))


def agree_on_data(prepared: Trainable, out: Path) -> None:
    """Compares what determines the numbers of a run, once its data are read."""
    agree("run, versions, data or tokenizer", same_fields(prepared, out))


def _fields_of(run: Run) -> dict[str, str]:
    """Returns the fields of the Run, and the versions of what decides on numbers: libraries and the devices' driver."""
    # The package's files: an installation in place has no version that tells changes.
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    sources = digest(b"".join(str(file.relative_to(root)).encode() + file.read_bytes() for file in files))
    found = {**installed_versions(), "meshwright's source": sources}
    device = jax.local_devices()[0]
    found["the device's runtime"] = f"{device.device_kind}, {device.client.platform_version}".replace("\n", ", ")
    return flatten(run_to_dict(run)) | {f"version of {name}": version for name, version in found.items()}


def same_fields(prepared: Trainable, out: Path) -> dict[str, str]:
    """Returns what all hosts must have in common, by name: the Run's fields, versions, data and tokenizer."""
    fields = _fields_of(prepared.device_run.run)
    flags = {name: os.environ[name].split() for name in _FLAGS if name in os.environ}
    fields |= {name: " ".join(w for w in words if not w.startswith("--xla_dump")) for name, words in flags.items()}
    data: dict[str, Any] = dict(prepared.fingerprint() or {})
    fields["tokenizer"] = digest(str(data.pop("tokenizer", "")))
    fields |= {f"tokens: {name}": value for name, value in flatten(data).items()}
    # A folder that is not shared, or one that has not caught up, has other checkpoints.
    fields["checkpoints in --out"] = str(committed_steps(out / "checkpoints"))
    return fields


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

    def describe(self, now: float) -> str:
        """Where the host was: `process 1 (node7, pid 4103), step 12, data since 14:03:05, 21 s ago`."""
        age = now - self.at + self.seconds
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - age))
        where = f"{self.phase} after step {self.step}" if self.phase != "step" else f"step {self.step}"
        return f"process {self.process} ({self.name}, pid {self.pid}): {where} since {since}, {age:.0f} s ago"


def verdict(signs: Mapping[int, Sign], limits: Watchdog, now: float) -> str | None:
    """Returns which host died, stopped or fell behind, and where; None where none did.

    Of hosts in the same step, those that wait in a collective are in phase `step`: one that is elsewhere keeps them.
    """
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
    # The host that all wait for is the one with the fewest steps, and of those the one that is in no collective.
    last = min(running, key=lambda s: (s.step, s.phase == "step", s.at - s.seconds))
    if last.phase == PREPARING:
        return None
    limit = limits.stall * (_SLOW if last.phase in _SLOW_PHASES else 1)
    waited = now - last.at + last.seconds
    return f"{last.describe(now)}: over the limit of {limit:g} s" if waited > limit else None


def watching(out: Path, phases: Phases, limits: Watchdog) -> contextlib.AbstractContextManager[None]:
    """Watches the other processes of the run while the context is open; does nothing in a single process.

    out: output folder, which gets the stacks.  phases: what this process does. Where a host dies, stops or falls
    behind, every process prints which, writes its stacks, and exits with 75. A supervised process gives signs too.
    """
    if jax.process_count() == 1 and BEATS not in os.environ:
        return contextlib.nullcontext()
    return _Watch(out, phases, limits, store() if jax.process_count() > 1 else None).running()


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
        self.stopped = threading.Event()
        self.beats = int(os.environ[BEATS]) if BEATS in os.environ else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the threads, and tells the others how this process has ended."""
        threads = [threading.Thread(target=self._publish, daemon=True, name="watchdog: signs")]
        if self.client is not None:
            threads.append(threading.Thread(target=self._judge, daemon=True, name="watchdog: verdict"))
        with self._answering_abort() if self.client is not None else contextlib.nullcontext():
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
                self.stopped.set()
                with contextlib.suppress(Exception):
                    self._sign()
                if self.left != "done" and self.client is not None and self.process == 0:
                    # The store ends with this process: the others read first why.
                    self._tell(f"process 0 ({socket.gethostname()}) has left: {self.left}")
                    time.sleep(min(_GRACE, 2.5 * self.period))

    def _explain(self, error: BaseException) -> None:
        """Leaves a word on why this process ends; where it is a collective that failed, waits for the verdict."""
        failed = _collective(error)
        if failed is None or self.client is None:
            self.left = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return
        # Nothing is wrong here: a neighbour closed its connections. The threads find out which.
        until = time.monotonic() + self.limits.silence + 3 * self.period + _GRACE
        while time.monotonic() < until:
            time.sleep(self.period / 4)
        self._leave(f"a collective failed, and every host gives signs: {str(failed).splitlines()[0]}")

    def _publish(self) -> None:
        while True:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._sign()
                self._read()
            if self.stopped.wait(self.period):
                return

    def _sign(self) -> None:
        self.beat += 1
        step, phase, since = self.phases.now
        if self.beats is not None:
            with contextlib.suppress(OSError):
                os.write(self.beats, f"{json.dumps([step, phase, self.left])}\n".encode())
        if self.client is not None:
            values = [socket.gethostname(), os.getpid(), self.beat, step, phase, time.monotonic() - since, self.left]
            self.client.key_value_set(f"{_FOLDER}/signs/{self.process}", json.dumps(values), True)

    def _read(self) -> None:
        """Reads the signs of the others: all of them in process 0, its sign and verdict elsewhere."""
        if self.client is None:
            return
        if self.process == 0:
            found = self.client.key_value_dir_get(f"{_FOLDER}/signs/")
            texts = {int(key.rpartition("/")[2]): text for key, text in found}
        else:
            texts = {0: self.client.key_value_try_get(f"{_FOLDER}/signs/0")}
        now = time.monotonic()
        for process, text in texts.items():
            name, pid, beat, step, phase, seconds, left = json.loads(text)
            sign, last = Sign(process, name, pid, beat, step, phase, seconds, now, left), self.signs.get(process)
            if last is None or (last.beat, last.left) != (sign.beat, sign.left):
                self.signs[process] = sign
        if self.process:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is none
                self.found = self.client.key_value_try_get(f"{_FOLDER}/verdict")

    def _judge(self) -> None:
        last = time.monotonic()
        while not self.stopped.wait(self.period / 2):
            now = time.monotonic()
            if now - last > self.limits.silence / 2:
                # This process was itself stopped, and has not heard of the others yet.
                self.signs = {process: dataclasses.replace(s, at=now) for process, s in self.signs.items()}
            last = now
            others = {process: sign for process, sign in self.signs.items() if process != self.process}
            found = self.found or verdict(self.signs if self.process == 0 else others, self.limits, now)
            # A host that stalls here is seen by process 0, which knows where the others are.
            if self.process and not self.found and found and "over the limit" in found:
                continue
            if found:
                self._leave(found)

    def _leave(self, found: str) -> None:
        if not _silence.acquire(blocking=False):
            time.sleep(60)  # another thread is leaving
        sender = threading.Thread(target=self._tell, args=(found,), daemon=True)
        if tells := self.process == 0 and self.client is not None:
            sender.start()
        file = self._stacks()
        steps = _soon(lambda: committed_steps(self.out / "checkpoints"))
        kept = f"the checkpoint of step {steps[-1]} is the last whole one" if steps else f"{self.out} does not answer"
        again = f"meshwright train --out {self.out} --resume: {kept}"
        if steps == []:
            again = "the same command again: no checkpoint was committed"
        step, phase, _ = self.phases.now
        error = HostError(
            f"training on {self.processes} hosts, seen by process {self.process} in phase {phase}, step {step}",
            found,
            again + (f"; stacks of this process: {file}" if file else ""),
        )
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.write(2, f"error: {error}\n".encode())
        if tells:
            sender.join(_GRACE)
            time.sleep(min(_GRACE, 2.5 * self.period))  # in which the others read it
        os._exit(HostError.exit_code)

    def _tell(self, found: str) -> None:
        with contextlib.suppress(Exception):
            self.client.key_value_set(f"{_FOLDER}/verdict", found, True)

    def _stacks(self) -> Path | None:
        """Writes the stacks into the output folder; where that does not take them, they stay on this host."""
        with contextlib.suppress(OSError):
            with tempfile.NamedTemporaryFile("w+", prefix="meshwright-stacks-", delete=False) as stream:
                faulthandler.dump_traceback(stream, all_threads=True)
                stream.seek(0)
                text = stream.read()
            file, here = self.out / "watchdog" / f"stacks-process-{self.process}.txt", Path(stream.name)

            def keep() -> Path:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
                here.unlink()
                return file

            return _soon(keep) or here
        return None

    @contextlib.contextmanager
    def _answering_abort(self) -> Iterator[None]:
        """Answers SIGABRT, which JAX's own thread raises as soon as process 0 is gone, with our error and exit code."""

        def answer(number: int) -> None:
            # It runs in the thread that aborts, which never returns to what it did.
            now = time.monotonic()
            soon = dataclasses.replace(self.limits, silence=max(2.0, 5 * self.period))
            found = self.found or verdict({p: s for p, s in self.signs.items() if p != self.process}, soon, now)
            if not found and self.process:
                where = f": {self.signs[0].describe(now)}" if 0 in self.signs else ""
                found = f"the connection to process 0 has ended{where}"
            absent = [i for i in range(self.processes) if i not in self.signs]
            self._leave(found or f"JAX misses a process; of {absent} none has come as far as training")

        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(answer)
        libc = ctypes.CDLL(None)
        libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
        previous = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
        try:
            yield
        finally:
            libc.signal(signal.SIGABRT, previous)


def _soon[T](ask: Callable[[], T]) -> T | None:
    """Returns what `ask` does; None where a bucket or a network file system does not answer within seconds.

    It is asked in a thread of its own: the one that leaves may be waited for by others, or be the one that aborts.
    """
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_GRACE)
    return answers[0] if answers else None


def _collective(error: BaseException | None) -> BaseException | None:
    """Returns the error of a collective or of the store that this error is, or comes from."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None

"""Alarms of a run: a command or a webhook of the user's is called when something is wrong.

    events of the run ---------+              +--> thread "alarms: no step" ---> command, webhook
    failure, verdict of hosts -+--> Alarms ---+--> thread "alarms: failed"  ---> command, webhook
    step and phase, each second+              +--> ...

The training never waits for it, and no kind waits for the hook of another. A step that does not
come is seen by a thread of process 0, whatever its main thread hangs in; a process that was stopped
or killed is seen by its supervisor (`launching.supervise`).
"""

import collections
import contextlib
import dataclasses
import functools
import http.client
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from meshwright import last_words
from meshwright.errors import ConfigError, MeshwrightError, reason_of
from meshwright.ranges import NonNegativeFloat, Ranged, Seconds
from meshwright.signs import PREPARING, Phases, supervisor_has_gone, wait_of_main_thread

EVENT = "alarm"
"""Kind of the event that a run writes for a step that does not come."""
NO_STEP, BAD_STEP, FAILED, KILLED = "no step", "bad step", "failed", "killed"
NO_SUPERVISOR = "no supervisor"
WITHOUT_SUPERVISOR = (
    "the supervisor of this process has gone: the training goes on, and is not started again where "
    "it ends; stop it (SIGTERM saves a checkpoint), then give the same command with --resume"
)
SLOW_HOST = "slow host"
_EVENTS = ("machine", "first tensor", "replica", "roll back")
"""Kinds of events that are alarms."""
_PERIOD = 1.0
"""Seconds between two looks at the step."""
_EXPECTED, _SHORTEST, _UNKNOWN = 20.0, 60.0, 1800.0
"""Medians of a step after which it is missed, and seconds that it is given in any case; seconds for
what has no median: the first steps, compiling, saving."""
_COMMAND_LIMIT, _WEBHOOK_LIMIT = 30.0, 10.0
"""Seconds after which a command is killed, and a webhook given up."""
_LAST = 5.0
"""Seconds that the end of a process waits for its last alarms; a command goes on without it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlarmOptions(Ranged, part="alarm"):
    """Command and webhook that get the alarms of a run. Both get a JSON document
    (docs/faults.md#alarms)."""

    command: str = ""
    """Command that is run for each alarm, with the document as a line on its standard input.
    It is not run by a shell."""
    webhook: str = ""
    """URL of yours to which the document is posted."""
    step_age: NonNegativeFloat = 0.0
    """Seconds without a step that are an alarm; 0: 20 times the median of the steps, at least a
    minute. One compilation, save, restore or evaluation has half an hour."""
    every: Seconds = 600.0
    """Seconds in which no second alarm of the same kind is sent: the next one has the number of
    those that were suppressed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command:
            _check_command(self.command)
        if self.webhook:
            _check_webhook(self.webhook)


def _check_command(command: str) -> None:
    """Raises ConfigError for a command that cannot be run."""
    asked = f"--alarm.command {command!r}"
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(asked, reason_of(error), "a command with closed quotes") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise ConfigError(
            asked,
            f"there is no program {program!r} in PATH that this user may run",
            "--alarm.command \"sh -c 'cat >> alarms.jsonl'\", or another program with its path",
        )


def _check_webhook(url: str) -> None:
    """Raises ConfigError for what is not the URL of a web server."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"--alarm.webhook {url!r}",
            "it is not the URL of a web server: http or https, and a host",
            "--alarm.webhook https://HOST/PATH",
        )


class Alarms:
    """Sender of the alarms of one process, and the watch of its step."""

    def __init__(
        self, options: AlarmOptions, out: Path, claim: Callable[[str], bool] = lambda kind: True
    ):
        """Begins without alarms.

        claim: whether this process sends an alarm of this kind, of several that have the same to
        tell; asked in the thread that sends.
        """
        self._options = options
        self._out = out
        self._claim = claim
        self._senders: dict[str, _Sender] = {}
        """Kind of an alarm -> its sender."""
        self._lock = threading.Lock()
        self._sent: dict[str, float] = {}
        """Kind of an alarm -> time of `time.monotonic` at which the last was sent."""
        self._suppressed: collections.Counter[str] = collections.Counter()
        self._stopped = threading.Event()

    def tell(self, kind: str, text: str, **values: Any) -> None:
        """Sends an alarm, unless one of its kind was sent a short time ago. Returns at once."""
        if not self._options.command and not self._options.webhook:
            return
        document = {
            "alarm": kind,
            "text": text,
            "run": str(self._out),
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
            **values,
        }
        with self._lock:
            now = time.monotonic()
            last = self._sent.get(kind)
            if last is not None and now - last < self._options.every:
                self._suppressed[kind] += 1
                if self._suppressed[kind] == 1:
                    last_words.say(
                        f"alarm {kind!r}: suppressed, as one was sent {now - last:.0f} s ago "
                        f"(--alarm.every {self._options.every:g})"
                    )
                return
            self._sent[kind] = now
            document["suppressed"] = self._suppressed.pop(kind, 0)
            with contextlib.suppress(RuntimeError):  # this host starts no further thread
                if kind not in self._senders:
                    self._senders[kind] = _Sender(kind, self._send)
                self._senders[kind].put(document)

    def note(self, event: Mapping[str, Any]) -> None:
        """Takes an event of the run, and sends it where it is an alarm."""
        kind = str(event.get("event", ""))
        if kind not in _EVENTS:
            return
        lines = event.get("lines")
        text = str(event.get("warning") or event.get("reason") or "")
        if isinstance(lines, list):
            text = "; ".join(map(str, lines))
        values = {name: value for name, value in event.items() if name not in ("event", "time")}
        self.tell(kind, text or f"{kind} in step {event.get('step')}", **values)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Takes the alarms of this process while the context is open.

        Waits a few seconds for the last.
        """
        _running.append(self)
        try:
            yield
        except MeshwrightError as error:
            kind = type(error).__name__
            self.tell(FAILED, f"{error.asked}: {error.truth}", fix=error.fix, error=kind)
            raise
        except Exception as error:
            self.tell(FAILED, reason_of(error), error=type(error).__name__)
            raise
        finally:
            _running.remove(self)
            self._stopped.set()
            with contextlib.suppress(RuntimeError):
                self.finish()

    def finish(self) -> None:
        """Waits a few seconds until the alarms are taken, and prints which are not."""
        until = time.monotonic() + _LAST
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.put(None)
        late = [sender.kind for sender in senders if not sender.ends(until)]
        if late:
            kinds = ", ".join(map(repr, late))
            last_words.say(f"alarm {kinds}: the last was not taken within {_LAST:g} s")

    @contextlib.contextmanager
    def watching(self, phases: Phases, record: Callable[..., None]) -> Iterator[None]:
        """Looks once a second whether steps come, and whether a supervisor is there.

        record: takes an event, `EventLog.add`.
        """
        watch = StepWatch(self._options.step_age)

        def alarm(kind: str, text: str, **values: Any) -> None:
            self.tell(kind, text, **values)
            last_words.say(f"alarm: {text}")
            record(EVENT, alarm=kind, said=text, **values)  # last: the disk may be what hangs

        def run() -> None:
            is_alone = False
            while not self._stopped.wait(_PERIOD):
                missed = watch.look(phases, time.monotonic())
                if missed is not None:
                    alarm(NO_STEP, **missed)
                if supervisor_has_gone() and not is_alone:
                    is_alone = True
                    alarm(NO_SUPERVISOR, WITHOUT_SUPERVISOR)

        watcher = threading.Thread(target=run, daemon=True, name="alarms: age of the step")
        watcher.start()
        try:
            yield
        finally:
            self._stopped.set()
            with contextlib.suppress(RuntimeError):
                watcher.join(2 * _PERIOD)

    def _send(self, document: dict[str, Any]) -> None:
        kind = document["alarm"]
        if not self._claim(kind):
            last_words.say(
                f"alarm {kind!r}: another host has sent one (--alarm.every {self._options.every:g})"
            )
            return
        text = json.dumps(document).encode()
        for name, failure in _call_hooks(self._options, text).items():
            last_words.say(f"alarm {kind!r} was not taken by {name}: {failure}")


class _Sender:
    """Thread that sends the alarms of one kind in their order."""

    def __init__(self, kind: str, send: Callable[[dict[str, Any]], None]):
        """Starts the thread. Raises RuntimeError where this host starts none."""
        self.kind = kind
        self._send = send
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"alarms: {kind}")
        self._thread.start()

    def put(self, document: dict[str, Any] | None) -> None:
        """Adds an alarm, or None after the last."""
        self._queue.put(document)

    def ends(self, until: float) -> bool:
        """Waits until the last is sent; returns whether it was. until: time of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (document := self._queue.get()) is not None:
            self._send(document)


_running: list[Alarms] = []
"""Alarms of this process, where they are sent."""


def tell(kind: str, text: str, **values: Any) -> None:
    """Sends an alarm of this process, where a run sends any. Returns at once."""
    if _running:
        _running[-1].tell(kind, text, **values)


def finish() -> None:
    """Waits a few seconds for the last alarms of this process, which is about to end."""
    if _running:
        _running[-1].finish()


def _call_hooks(options: AlarmOptions, document: bytes) -> dict[str, str]:
    """Gives a document to command and webhook; returns why one of them did not take it.

    The command is started first: it goes on by itself, while the webhook has its time.
    """
    failures = {}
    command = _start(options.command, document) if options.command else None
    if options.webhook:
        failure = _post(options.webhook, document)
        if failure:
            # The path of a webhook is often a secret.
            host = urllib.parse.urlsplit(options.webhook).hostname
            failures[f"--alarm.webhook at {host}"] = failure
    if command is not None:
        failure = command()
        if failure:
            failures[f"--alarm.command {options.command!r}"] = failure
    return failures


def _start(command: str, document: bytes) -> Callable[[], str]:
    """Starts a command in a session of its own, which neither Ctrl-C nor our end reaches.

    Returns a function that waits for it and returns its failure, or "".
    """
    try:
        with tempfile.TemporaryFile() as given, contextlib.ExitStack() as stack:
            given.write(document + b"\n")
            given.seek(0)
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                shlex.split(command),
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            stack.pop_all()  # `_wait` closes them
    except OSError as error:
        reason = reason_of(error)
        return lambda: reason
    return functools.partial(_wait, process, errors)


def _wait(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Waits for a command; returns its failure, or "". errors: its standard error."""
    with errors:
        try:
            code = process.wait(_COMMAND_LIMIT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {_COMMAND_LIMIT:g} s"
        if not code:
            return ""
        errors.seek(0)
        said = errors.read(4096).decode("utf-8", "replace").strip().splitlines()
    return f"exit code {code}" + (f", {said[-1]}" if said else "")


def _post(url: str, document: bytes) -> str:
    """Posts a document; returns the failure, or ""."""
    request = urllib.request.Request(url, document, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_WEBHOOK_LIMIT):
            return ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        return reason_of(error)


class StepWatch:
    """Age of the last step of a process, and how old it may be."""

    def __init__(self, step_age: float):
        self._step_age = step_age
        self._step = 0
        self._began: float | None = None
        """Time at which this step began; None before the first look."""
        self._others = 0.0
        """Seconds of this step in other phases than steps and data."""
        self._looked = 0.0
        self._intervals: collections.deque[float] = collections.deque(maxlen=100)
        self._told = False

    def look(self, phases: Phases, now: float) -> dict[str, Any] | None:
        """Returns what is known of a step that does not come, once; None else.
        now: of `time.monotonic`."""
        step, phase, since = phases.place
        if self._began is None or step != self._step:
            if self._began is not None and step > self._step and not self._told:
                seconds = max(0.0, now - self._began - self._others)
                self._intervals.append(seconds / (step - self._step))
            self._step, self._began, self._others, self._told = step, now, 0.0, False
            self._looked = now
            return None
        in_step = phase in ("step", "data")
        if not in_step:
            self._others += now - self._looked
        self._looked = now
        age = now - since if not in_step else now - self._began - self._others
        limit = self._limit(in_step)
        if self._told or phase == PREPARING or age <= limit:
            return None
        self._told = True
        what = wait_of_main_thread().what
        usual = statistics.median(self._intervals) if self._intervals else None
        expected = "" if usual is None else f", a step takes {usual:.3g} s"
        waits = f"; it waits for {what}" if what else ""
        where = f"in step {step}" if phase == "step" else f"{phase} after step {step}"
        return {
            "text": f"no step for {age:.0f} s: {where}{expected}{waits}",
            "age": round(age, 1),
            "usual": usual,
            "phase": phase,
            "step": step,
            "waits for": what,
        }

    def _limit(self, in_step: bool) -> float:
        if not in_step:
            return _UNKNOWN
        if self._step_age:
            return self._step_age
        if len(self._intervals) < 2:
            return _UNKNOWN
        return max(_SHORTEST, _EXPECTED * statistics.median(self._intervals))

"""Preemption: SIGTERM, SIGUSR1 and Ctrl-C, acknowledged at once, and obeyed between two steps.

On machines of Google Cloud a thread asks the metadata server, which announces maintenance and
preemption beforehand.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax
from jax.experimental import multihost_utils

from meshwright import last_words
from meshwright.hardware.agreement import choose_together
from meshwright.hardware.hosts import metadata

_PATIENCE = 3.0
"""Seconds after a second Ctrl-C in which the process may end in its own way."""
_PRODUCT = Path("/sys/class/dmi/id/product_name")
PERIOD = 5.0
"""Seconds between two questions to the metadata server: a spot machine is stopped 30 s after its
notice, others an hour or minutes after."""


class Preemption:
    """Signals that ask a run to stop.

    All of its processes stop at the same place, by the same signal.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the last signal that this process was sent; the others may know nothing of
        it."""
        self.stopped_by = 0
        """Number of the signal by which the run stops, the same in all processes; 0 while it goes
        on."""
        self._asked = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A second Ctrl-C raises KeyboardInterrupt at once."""
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if number != signal.SIGTERM and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX passes on to the other processes

    def stops(self) -> bool:
        """Returns whether the run stops here.

        The answer is the same in all processes, which all have to ask.

        It stays the same once it is yes. A signal that comes after one process has asked counts at
        the next question.
        """
        if self.stopped_by:
            return True
        self._asked += 1
        if jax.process_count() == 1:
            self.stopped_by = self.received
        # JAX's own SIGTERM handler agrees on a question that no process has asked yet.
        elif multihost_utils.reached_preemption_sync_point(self._asked):
            # Signals that only JAX's handler has seen are SIGTERM.
            number = choose_together("signals", self.received, max)
            self.stopped_by = number or signal.SIGTERM
        return bool(self.stopped_by)

    @contextlib.contextmanager
    def listening(self) -> Iterator["Preemption"]:
        """Installs the signal handlers, and restores the previous ones at the end."""
        numbers = (signal.SIGINT, signal.SIGUSR1) + (
            (signal.SIGTERM,) if jax.process_count() == 1 else ()
        )
        with contextlib.ExitStack() as stack:
            # Python allows signal handlers in the main thread only.
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(_acknowledged())
                for number in numbers:
                    stack.callback(signal.signal, number, signal.signal(number, self))
                stack.enter_context(_maintenance_announced())
            yield self


@contextlib.contextmanager
def _acknowledged() -> Iterator[None]:
    """Says at once that a signal has arrived.

    A handler in Python runs when the call returns that is in progress, which for a compilation
    takes minutes. The system's own handler writes the signal's number into a socket instead, from
    which a thread reads.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    forced: list[threading.Timer] = []
    thread = threading.Thread(
        target=_acknowledge, args=(reader, forced), daemon=True, name="signals"
    )
    thread.start()
    try:
        yield
    finally:
        for timer in forced:
            timer.cancel()
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()


def _acknowledge(reader: socket.socket, forced: list[threading.Timer]) -> None:
    received: list[int] = []
    while number := reader.recv(1):
        received.append(number[0])
        if received.count(signal.SIGINT) > 1:
            last_words.say("leaving without another checkpoint; the last one is whole")
            forced.append(threading.Timer(_PATIENCE, last_words.leave, (128 + signal.SIGINT,)))
            forced[-1].daemon = True
            forced[-1].start()
        elif number[0] in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            name = "Ctrl-C" if number[0] == signal.SIGINT else signal.Signals(number[0]).name
            hint = "; Ctrl-C again leaves at once" if number[0] == signal.SIGINT else ""
            text = f"{name}: the run saves a checkpoint after the step in progress and stops{hint}"
            last_words.say(text)


@contextlib.contextmanager
def _maintenance_announced() -> Iterator[None]:
    """Sends this process SIGTERM when its machine is to be stopped, while the context is open.

    `GCE_METADATA_IP` names another server. Does nothing on machines outside Google Cloud.
    """
    stopped = threading.Event()
    if has_metadata_server():
        threading.Thread(
            target=_ask, args=(stopped,), daemon=True, name="maintenance notices"
        ).start()
    try:
        yield
    finally:
        stopped.set()


def has_metadata_server() -> bool:
    """Whether this is a machine of Google Cloud, or `GCE_METADATA_IP` names such a server."""
    if "GCE_METADATA_IP" in os.environ:
        return True
    try:
        return "Google" in _PRODUCT.read_text(errors="replace")
    except OSError:
        return False


def announced() -> str | None:
    """Returns what the metadata server announces of this machine: that it is to be stopped.

    The result is None where nothing is announced.
    """
    for name in ("preempted", "maintenance-event"):
        answer = metadata(os.environ, name)
        # A machine that is migrated keeps running.
        if answer in (None, "", "NONE", "FALSE") or str(answer).startswith("MIGRATE"):
            continue
        return f"{name} {answer}"
    return None


def _ask(stopped: threading.Event) -> None:
    """Asks for `preempted` (spot machines) and `maintenance-event` (no accelerator migrates)."""
    while True:
        notice = announced()
        if notice is not None:
            last_words.say(f"the metadata server announces {notice}")
            if not stopped.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if stopped.wait(PERIOD):
            return

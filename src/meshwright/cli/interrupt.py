"""Ctrl-C in every verb: acknowledged at once, and never lost.

Python runs a signal's handler when the call returns that is in progress, which for a compilation
takes minutes, and an exception raised inside a callback of the garbage collector is printed and
dropped. A thread therefore reads the signals as well: it acknowledges them, and ends the process
where that does not end by itself.
"""

import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from meshwright import last_words

_PATIENCE = 5.0
"""Seconds after Ctrl-C in which the process may end in its own way: temporary files removed, child
processes ended."""
EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C has ended."""


def acknowledge_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, and acknowledges it at once.

    The process ends in any case.
    While a verb has a handler of its own (a training step, `--supervise`), this one does nothing.
    Where the shell has SIGINT ignored, as for a job in the background, it stays ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGINT, _interrupt)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # The thread holds both ends: the descriptor stays open as long as signals write to it.
    threading.Thread(target=_read, args=(reader, writer), daemon=True, name="interrupts").start()
    sys.unraisablehook = _unraisable


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _read(reader: socket.socket, writer: socket.socket) -> None:
    pressed = 0
    while number := reader.recv(1):
        if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not _interrupt:
            continue
        pressed += 1
        if pressed > 1:
            _leave_now()
        # A line of progress may stand where the cursor is.
        start = "\r\033[K" if sys.stderr.isatty() else ""
        last_words.say(f"{start}Ctrl-C: stopping; Ctrl-C again leaves at once")
        timer = threading.Timer(_PATIENCE, _leave_now)
        timer.daemon = True
        timer.start()


def _leave_now() -> None:
    # The cursor, which a line of progress hides.
    last_words.leave(EXIT_CODE, "\033[?25h" if sys.stderr.isatty() else "")


def _unraisable(dropped: Any) -> None:
    """Ends the process where a callback would drop the interrupt."""
    if dropped.exc_type is KeyboardInterrupt:
        _leave_now()
    sys.__unraisablehook__(dropped)

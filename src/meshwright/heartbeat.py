"""Heartbeat: a thread that counts, signs or renews something while a block runs, so that others see it lives."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def beating(beat: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Calls `beat` in a thread, at once and then every `seconds`, until the block ends; the last call is waited for.

    name: of the thread, as stacks show it.
    """
    stopped = threading.Event()

    def run() -> None:
        beat()
        while not stopped.wait(seconds):
            beat()

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()

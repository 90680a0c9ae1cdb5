"""Maintenance and preemption of a machine of Google's, which its metadata server announces beforehand."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from meshwright.hardware.hosts import metadata

_PRODUCT = Path("/sys/class/dmi/id/product_name")
PERIOD = 5.0
"""Seconds between two questions: a spot machine is stopped 30 s after its notice, others an hour or minutes after."""
_HARMLESS = (None, "", "NONE", "FALSE")


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Sends this process SIGTERM as soon as its machine is to be stopped, while the context is open.

    Asked are `preempted` (spot machines) and `maintenance-event` (machines with GPUs or TPUs are not migrated).
    `GCE_METADATA_IP` names another server. Does nothing on other machines.
    """
    if not _on_google():
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(target=_ask, args=(stopped,), daemon=True, name="maintenance notices")
    thread.start()
    try:
        yield
    finally:
        stopped.set()


def _on_google() -> bool:
    with contextlib.suppress(OSError):
        return "GCE_METADATA_IP" in os.environ or "Google" in _PRODUCT.read_text(encoding="utf-8", errors="replace")
    return False


def _ask(stopped: threading.Event) -> None:
    while True:
        for name in ("preempted", "maintenance-event"):
            answer = metadata(os.environ, name)
            # A machine that is migrated goes on.
            if answer in _HARMLESS or str(answer).startswith("MIGRATE"):
                continue
            print(f"the metadata server announces {name} {answer}", file=sys.stderr, flush=True)
            if not stopped.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if stopped.wait(PERIOD):
            return

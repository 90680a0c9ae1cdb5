"""Watch of the machines of a run: a thread of one process
on each host reads the counters once a minute.

host 0   process 0 --- read --- warnings --> events.jsonl, console
host 1   process 8 --- read --- warnings --> key-value store --> process 0; console of its host
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright import last_words
from meshwright.errors import CheckpointError, StorageError
from meshwright.monitoring.counters import Counter, NotThere, Source
from meshwright.monitoring.history import History, Warning
from meshwright.monitoring.host import open_host
from meshwright.monitoring.nvidia import open_nvidia
from meshwright.monitoring.tpu import open_tpu
from meshwright.storage.folder_identity import FolderIdentity
from meshwright.storage.paths import in_bucket
from meshwright.storage.writing import write_text

PERIOD = 60.0
"""Seconds between two readings."""
_FOLDER = "meshwright/machines"
Record = Callable[..., None]
"""Takes the name of an event and its values: `EventLog.add`."""


def open_sources(out: Path) -> tuple[list[Source], dict[str, str]]:
    """Opens every interface that this host has.

    Returns them, and what is missing of those whose hardware is here.
    out: folder whose disk is watched.
    """
    folder = None if in_bucket(out) else out
    openers: dict[str, Callable[[], Source]] = {
        "NVIDIA GPUs": open_nvidia,
        "TPUs": open_tpu,
        "host": lambda: open_host(folder),
    }
    sources: list[Source] = []
    missing: dict[str, str] = {}
    for name, opened in openers.items():
        try:
            sources.append(opened())
        except NotThere as error:
            if str(error):
                missing[name] = str(error)
    return sources, missing


def read_all(sources: Sequence[Source]) -> list[Counter]:
    """Reads the counters of every interface."""
    return [counter for source in sources for counter in source.read()]


class MachineWatch:
    """Watch of one host: its readings, and what it tells."""

    def __init__(self, out: Path, sources: Sequence[Source], tell: Callable[[Warning], None]):
        self._folder = FolderIdentity(out)
        self._sources = sources
        self._tell = tell
        self._history = History()
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def running(self, period: float) -> Iterator[None]:
        """Reads at once and then every `period` seconds while the context is open;
        keeps the last where it fails."""
        thread = threading.Thread(
            target=self._run, args=(period,), daemon=True, name="counters of the machine"
        )
        _watches.append(self)
        thread.start()
        try:
            yield
        except Exception:
            self.keep()
            raise
        finally:
            _watches.remove(self)
            self._stopped.set()
            self._folder.close()

    def _run(self, period: float) -> None:
        while True:
            self.look(time.time())
            if self._stopped.wait(period):
                return

    def look(self, now: float) -> None:
        """Reads once, and tells what is a warning. now: Unix seconds."""
        for warning in self._history.add(now, read_all(self._sources)):
            self._tell(warning)

    def keep(self) -> Path | None:
        """Writes the readings of the last ten minutes below the output folder;
        None where it takes no file."""
        name = f"machine-process-{jax.process_index()}.json"
        readings = [
            {"time": round(at, 3), "counters": _by_part(values)}
            for at, values in self._history.recent()
        ]
        record = {"host": socket.gethostname(), "readings": readings}
        folder = self._folder.folder / "watchdog"
        with contextlib.suppress(OSError, StorageError, CheckpointError):
            self._folder.check("keeping the last readings")
            self._folder.make(folder)
            write_text(folder / name, json.dumps(record) + "\n")
            return folder / name
        return None


_watches: list[MachineWatch] = []
"""The watch of this process, where one is running."""


def keep_last_minutes() -> Path | None:
    """Writes the last readings of this host, for the report of a failure;
    None where nothing is watched."""
    return _watches[-1].keep() if _watches else None


def _by_part(values: dict[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = {}
    for (part, name), value in values.items():
        parts.setdefault(part, {})[name] = value
    return parts


@contextlib.contextmanager
def watching_machines(
    out: Path, record: Record | None, client: Any, *, is_first_on_host: bool
) -> Iterator[None]:
    """Watches the machine of this process, and in process 0 gathers what the others tell,
    while the context is open.

    record: takes the events, in process 0.
    client: of the key-value store; None in a run of one process.
    """
    teller = _Teller(record, client)
    with contextlib.ExitStack() as stack:
        if is_first_on_host:
            sources, missing = open_sources(out)
            watch = MachineWatch(out, sources, teller.tell)
            stack.enter_context(watch.running(PERIOD))
            for name, what in missing.items():
                last_words.say(f"{socket.gethostname()}: no counters of {name}: {what}")
        if record is not None and client is not None:
            stack.enter_context(teller.gathering(PERIOD))
        yield


class _Teller:
    """Way of warnings: to the console of their host, and to the events that process 0 writes."""

    def __init__(self, record: Record | None, client: Any):
        self._record = record
        self._client = client
        self._host = socket.gethostname()
        self._count = 0
        self._recorded: set[str] = set()

    def tell(self, warning: Warning) -> None:
        """Prints a warning, and records it or sends it to process 0."""
        last_words.say(f"{self._host}, {warning.text}")
        event = {
            "host": self._host,
            "part": warning.part,
            "counter": warning.name,
            "value": warning.value,
            "warning": warning.text,
        }
        if self._record is not None:
            self._record("machine", **event)
            return
        self._count += 1
        key = f"{_FOLDER}/{jax.process_index()}/{self._count}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 has gone
            self._client.key_value_set(key, json.dumps(event), True)

    @contextlib.contextmanager
    def gathering(self, period: float) -> Iterator[None]:
        """Records what the other hosts send while the context is open."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(period):
                self.gather()

        threading.Thread(target=run, daemon=True, name="counters of other machines").start()
        try:
            yield
        finally:
            stopped.set()

    def gather(self) -> None:
        """Records the warnings of other hosts that were not recorded yet."""
        assert self._record is not None
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            for key, text in self._client.key_value_dir_get(f"{_FOLDER}/"):
                if key not in self._recorded:
                    self._recorded.add(key)
                    self._record("machine", **json.loads(text))

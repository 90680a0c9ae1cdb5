"""What 2,048 hosts ask of process 0, of the store of JAX's coordination service and of the output folder.

Runs the package's own code of a start, a resume, the watchdog, a save, an end and a meeting of supervisors in a thread
for each host, with a store in memory that counts. A host's cost must not depend on the number of hosts, and that of
process 0 may grow with it, not with its square. Prints a table; `--table` writes it into docs/faults.md:

    python bench/budgets.py --hosts 2048

`--steps` counts what one run of so many steps asks for instead, of its bucket and of its token shards (`run_costs`):

    python bench/budgets.py --steps 1000000
"""

import argparse
import collections
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from page_table import put_table

from meshwright.checkpoint.manifest import manifest_of
from meshwright.hardware import agreement
from meshwright.hardware.hosts import Hosts
from meshwright.launching import supervise
from meshwright.launching.restarts import Restarts
from meshwright.runs.recipe import find_recipe
from meshwright.signs import Phases
from meshwright.trainer import hosts
from meshwright.trainer.tiers import Tiers
from meshwright.trainer.watchdog import Watchdog

COUNTED = ("requests", "bytes", "opens", "listings")
_PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
_thread = threading.local()


class Costs:
    """What each host has asked for in one phase."""

    def __init__(self) -> None:
        self.of_host: dict[int, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    def add(self, **counts: int) -> None:
        """Adds to the host of this thread."""
        if (process := getattr(_thread, "process", None)) is not None:
            self.of_host[process].update(counts)


class CountingStore:
    """The calls of JAX's key-value store that the package makes."""

    def __init__(self, costs: Costs, processes: int):
        self.costs, self.processes, self.values = costs, processes, dict[str, str]()
        self.lock, self.waiting = threading.Lock(), collections.Counter[str]()
        self.events: dict[str, threading.Event] = collections.defaultdict(threading.Event)
        self.failed: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends all that wait."""
        with self.lock:
            self.failed = self.failed or error
            for event in self.events.values():
                event.set()

    def _event(self, key: str) -> threading.Event:
        with self.lock:
            event = self.events[key]
            if self.failed:
                event.set()
            return event

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a key."""
        self.costs.add(requests=1, bytes=len(value))
        self.values[key] = value
        self._event(key).set()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """Waits for a key."""
        self._event(key).wait()
        value = self.values[key]
        self.costs.add(requests=1, bytes=len(value))
        return value

    def key_value_try_get(self, key: str) -> str:
        """Returns a value that may not be there."""
        self.costs.add(requests=1, bytes=len(self.values.get(key, "")))
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        """Returns all keys of a folder."""
        found = [(key, value) for key, value in list(self.values.items()) if key.startswith(folder)]
        self.costs.add(requests=1, bytes=sum(len(value) for _, value in found))
        return found

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        """Waits until all are here."""
        self.costs.add(requests=1)
        with self.lock:
            self.waiting[name] += 1
            complete = self.waiting[name] == self.processes
        if complete:
            self._event(name).set()
        self._event(name).wait()


class PerHost(collections.Counter[Any]):
    """Counts of each host, as each process has its own."""

    def __getitem__(self, key: Any) -> int:
        return super().__getitem__((_thread.process, key))

    def __setitem__(self, key: Any, value: int) -> None:
        super().__setitem__((_thread.process, key), value)

    def __missing__(self, key: Any) -> int:
        return 0


@contextlib.contextmanager
def simulated(store: CountingStore) -> Iterator[None]:
    """Makes each thread a process of its own."""
    with contextlib.ExitStack() as stack:
        for target, value in (
            ("jax.process_count", lambda: store.processes),
            ("jax.process_index", lambda: _thread.process),
            ("meshwright.hardware.agreement.store", lambda: store),
            ("meshwright.checkpoint.checkpoints.store", lambda: store),
            ("meshwright.hardware.agreement._rounds", PerHost()),
        ):
            stack.enter_context(mock.patch(target, value))
        yield


def phases(folder: Path, processes: int) -> dict[str, Callable[[int], Any]]:
    """The phases by name, each as a function of the process."""
    fields, tiny = hosts._fields_of(find_recipe("llama3-70b")), find_recipe("tiny")
    watches: dict[int, Any] = {}

    def tiers() -> Tiers:
        found = Tiers.__new__(Tiers)
        found.folder, found._local, found._reach, found._saves = (
            folder / "checkpoints",
            None,
            "shared",
            lambda _: None,
        )
        return found

    def start(process: int) -> None:
        agreement.agree("run or versions", fields)
        agreement.agree("run, versions, data or tokenizer", fields)
        agreement.answer_of_the_first(lambda: None)  # folder and room
        hosts.check_shared(folder)
        agreement.answer_of_the_first(lambda: None)  # lock
        agreement.agree_on_program("program")

    def resume(process: int) -> None:
        checkpoints = tiers()
        step = checkpoints._choices(None, strict=True)[0][0]
        manifest = manifest_of(checkpoints.folder, step, agreement.answer_of_the_first)
        checkpoints._fail_together(manifest, None)
        checkpoints._fail_together(manifest, None)

    def watch(process: int) -> None:
        watches[process]._sign()
        watches[process]._read()

    def make_watch(process: int) -> None:
        watches[process] = hosts._Watch(folder, Phases(), Watchdog(), agreement.store())
        watches[process]._sign()

    def save(process: int) -> None:
        for name in ("begun", "written", "committed"):
            tiers()._barrier(name)

    def end(process: int) -> None:
        # Its last sign. A supervisor adds a line to its own journal.
        watches[process].left = "done"
        watches[process]._sign()

    def meeting(process: int) -> None:
        meet = supervise.Meeting(
            folder, Hosts("test", processes, process, "127.0.0.1:8476"), Restarts(wait=120)
        )
        meet.next_start(tiny, processes)

    return {
        "start": start, "resume": resume, "": make_watch, "watchdog, a second": watch, "save": save, "end": end,
        "meeting of supervisors": meeting,
    }  # fmt: skip


def measure(processes: int) -> dict[str, dict[str, Any]]:
    """Returns for each phase what process 0 and the most expensive of the others asked for, and its seconds."""
    found: dict[str, dict[str, Any]] = {}
    counting: list[Costs] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if counting and event == "open":
            counting[0].add(opens=1)
        elif counting and event in ("os.listdir", "os.scandir"):
            counting[0].add(listings=1)

    sys.addaudithook(hook)
    # Thousands of threads look for one file on two cores: less often than the hosts do.
    with tempfile.TemporaryDirectory() as name, mock.patch.object(supervise, "_POLL", 5.0):
        _checkpoint(Path(name))
        store = CountingStore(Costs(), processes)
        with simulated(store):
            for phase, run in phases(Path(name), processes).items():
                store.costs = Costs()
                counting[:] = [store.costs]
                began = time.monotonic()
                _on_all(store, run)
                counting.clear()
                costs = store.costs.of_host
                others = [costs[i] for i in range(1, processes)]
                most = {kind: max(each[kind] for each in others) for kind in COUNTED}
                if phase:
                    found[phase] = {
                        "process 0": dict(costs[0]),
                        "others": most,
                        "seconds": time.monotonic() - began,
                    }
    return found


def _on_all(store: CountingStore, run: Callable[[int], Any]) -> None:
    def one(process: int) -> None:
        _thread.process = process
        try:
            run(process)
        except BaseException as error:
            store.fail(error)

    before = threading.stack_size(256 * 1024)
    try:
        threads = [
            threading.Thread(target=one, args=(process,), daemon=True)
            for process in range(store.processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.stack_size(before)
    if store.failed:
        raise store.failed


def _checkpoint(folder: Path) -> None:
    """A committed checkpoint with the manifest of a model of 80 layers' worth of tensors."""
    from meshwright.checkpoint.manifest import Manifest, TensorRecord

    tensors = {
        f"params.blocks.tensor_{i}": TensorRecord((80, 8192, 8192), "float32", (i, i))
        for i in range(40)
    }
    Manifest(600, 0, find_recipe("llama3-70b"), tensors).write(folder / "checkpoints" / "600")


def table(found: dict[str, dict[str, Any]]) -> str:
    """Returns the table of the page."""
    lines = [
        "| phase | a host: requests | bytes | opens | listings | process 0: requests | bytes | opens | listings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase, costs in found.items():
        cells = [
            f"{costs[who].get(kind, 0):,}" for who in ("others", "process 0") for kind in COUNTED
        ]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2048)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--steps", type=int, help="steps of one run, whose costs are counted")
    parser.add_argument("--save-every", type=int, default=20)
    options = parser.parse_args()
    if options.steps:
        import run_costs

        shown = run_costs.tables(options.steps, options.save_every, [1, 128, 203, 512], 4096)
        text = f"`python bench/budgets.py --steps {options.steps}`\n\n{shown}"
        print(text)
        if options.table:
            put_table(_PAGE, "budgets.py --steps", text)
        return
    found = measure(options.hosts)
    text = f"`python bench/budgets.py --hosts {options.hosts}`\n\n{table(found)}"
    print(text)
    print({phase: round(costs["seconds"], 1) for phase, costs in found.items()})
    if options.table:
        put_table(_PAGE, "budgets.py", text)


if __name__ == "__main__":
    main()

"""Supervisors of one run on several hosts: who is there, and what they start together."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwright.checkpoint.steps import committed_steps, unwritable
from meshwright.documents import LARGE, parse_json, read_json, read_text, write_atomically
from meshwright.errors import CheckpointError, HostError, StorageError
from meshwright.hardware.hosts import PORT, Hosts
from meshwright.heartbeat import beating
from meshwright.launching.restarts import Restarts
from meshwright.runs.run import Run
from meshwright.storage.paths import in_bucket

_BEAT, _BUCKET_BEAT = 1.0, 5.0
"""Seconds between two counts of a supervisor, on a file system and in a bucket: there each count is a request."""
_SILENT, _BUCKET_SILENT = 15, 4
"""Counts that a supervisor misses before it is taken for gone."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the training, the same on all hosts."""

    attempt: int
    members: tuple[int, ...]
    """Hosts that take part, by their number in the whole run; the first is process 0."""
    coordinator: str | None
    mesh: str | None
    """Mesh of fewer devices; None where all hosts take part."""
    step: int | None
    """Step of the checkpoint to resume from; None where there is none."""
    options: tuple[str, ...] = ()
    """Options that change with the mesh, where the planner chose them."""
    why: str = ""
    """Why that mesh."""


class Supervisors:
    """The supervisors of a run, each with a file in the output folder that counts up while it lives."""

    def __init__(self, out: Path, hosts: Hosts, restarts: Restarts):
        """Raises CheckpointError where `out` cannot be written."""
        self.out, self.hosts, self.restarts = out, hosts, restarts
        self.folder = out / ".supervise"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(out, error) from error
        self.beat, silent = (_BUCKET_BEAT, _BUCKET_SILENT) if in_bucket(out) else (_BEAT, _SILENT)
        self.silence = silent * self.beat
        self.attempt, self.state, self.count = 0, "running", 0
        self.damaged: set[int] = set()
        # Starts of an earlier job must not be taken for those of this one.
        if hosts.process == 0:
            for file in self.folder.glob("start-*.json"):
                file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts up in this supervisor's file while the context is open."""
        with beating(self._write, self.beat, "supervisor"):
            yield

    def leave(self, state: str) -> None:
        """States that this supervisor starts nothing more: `done` or `gone`."""
        self.state = state
        self._write()

    def next_start(self, last: Start, damaged: set[int], run: Run, devices: int | None) -> Start:
        """Waits for the other supervisors, and returns what all of them start next.

        damaged: steps whose checkpoint could not be restored.  Raises HostError where hosts are missing that must not
        be, CheckpointError where no good checkpoint is left.
        """
        self.attempt, self.state, self.damaged = last.attempt + 1, "waiting", damaged
        self._write()
        file = self.folder / f"start-{self.attempt}.json"
        seen: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + self.restarts.wait
        while True:
            now = time.monotonic()
            ready, alive = [], []
            for process in range(self.hosts.processes):
                record = self._record() if process == self.hosts.process else self._read(process)
                count = int(record.get("count", -1))
                if process not in seen or seen[process][0] != count:
                    seen[process] = (count, now)
                living = now - seen[process][1] < self.silence and record.get("state") in ("running", "waiting")
                if living or process == self.hosts.process:
                    alive.append(process)
                    if int(record.get("attempt", -1)) >= self.attempt:
                        ready.append(process)
            late = now > until
            whole = len(ready) == self.hosts.processes
            left = late and self.restarts.hosts == "left" and ready == alive
            start = self._kept(file) if self.hosts.processes > 1 else None
            if start is not None and self.hosts.process in start.members:
                return self._begin(start)
            if (whole or left) and ready[0] == self.hosts.process:
                try:
                    start = self._chosen(tuple(ready), damaged | self._damaged(ready), run, devices)
                    if self.hosts.processes > 1:
                        write_atomically(file, json.dumps(dataclasses.asdict(start)))
                    return self._begin(start)
                except StorageError:  # the bucket is away for longer than requests are sent again
                    if late:
                        raise
            # Choosing takes as long as planning does, and the one that chooses counts up meanwhile.
            choosing = (whole or left) and ready[0] != self.hosts.process
            if not choosing and now > until + (0 if self.restarts.hosts == "all" else self.restarts.wait):
                missing = sorted({*range(self.hosts.processes)} - {*ready})
                self.leave("gone")
                raise HostError(
                    f"starting the run in {self.out} again on {self.hosts.processes} hosts",
                    f"after {self.restarts.wait:.0f} s the supervisors of {missing} are not there",
                    "the same command on those hosts, or --restarts.hosts left, which goes on without them",
                )
            time.sleep(self.beat / 4)

    def _begin(self, start: Start) -> Start:
        self.state = "running"
        self._write()
        return start

    def _chosen(self, members: tuple[int, ...], damaged: set[int], run: Run, devices: int | None) -> Start:
        """Returns the next start on `members`."""
        steps = committed_steps(self.out / "checkpoints")
        good = [step for step in steps if step not in damaged]
        if steps and not good:
            raise CheckpointError(
                f"starting the run in {self.out} again",
                f"none of the checkpoints of steps {steps} can be restored",
                "meshwright checkpoint verify, or another --out",
            )
        mesh: str | None = None
        options: tuple[str, ...] = ()
        why, coordinator = "", self.hosts.coordinator
        if len(members) < self.hosts.processes:
            mesh, options, why = self._fewer(run, len(members), devices)
            if members[0] and coordinator is not None:
                port = coordinator.rpartition(":")[2]
                coordinator = f"{self._read(members[0]).get('address', '127.0.0.1')}:{port or PORT}"
        return Start(self.attempt, members, coordinator, mesh, good[-1] if good else None, options, why)

    def _fewer(self, run: Run, hosts: int, devices: int | None) -> tuple[str, tuple[str, ...], str]:
        """Returns the mesh on the devices of `hosts` hosts, the options that change with it, and why it was chosen."""
        from meshwright.planner.fewer_devices import plan_for_fewer  # most restarts are on all hosts

        started = self._last_start()
        total = int(devices or (run.mesh.size if run.mesh else 0) or started.get("devices", 0))
        plan = plan_for_fewer(run, hosts, total // self.hosts.processes, str(started.get("kind", "")))
        changed = {f"--training.{name.replace('_', '-')}": str(value) for name, value in plan.training.items()}
        changed |= {} if plan.layout is None else {"--layout": plan.layout}
        return str(plan.mesh), tuple(word for pair in changed.items() for word in pair), plan.why

    def _last_start(self) -> dict[str, Any]:
        """Returns what the training noted of its devices when it last started; nothing where it never did."""
        try:
            lines = read_text(self.out / "events.jsonl", LARGE).splitlines()
        except (OSError, ValueError, StorageError):
            return {}
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                record = parse_json(line)
                if isinstance(record, dict) and record.get("event") == "start":
                    return record
        return {}

    def _damaged(self, members: list[int]) -> set[int]:
        """Steps that any member could not restore."""
        return {int(step) for process in members for step in self._read(process).get("damaged", ())}

    def _kept(self, file: Path) -> Start | None:
        try:
            return msgspec.convert(read_json(file), Start)
        except (OSError, ValueError, msgspec.ValidationError, StorageError):
            return None

    def _record(self) -> dict[str, Any]:
        counted = {"state": self.state, "attempt": self.attempt, "count": self.count}
        return {**counted, "damaged": sorted(self.damaged), "address": own_address(self.hosts.coordinator)}

    def _write(self) -> None:
        self.count += 1
        with contextlib.suppress(OSError, StorageError):
            write_atomically(self.folder / f"host-{self.hosts.process}.json", json.dumps(self._record()))

    def _read(self, process: int) -> dict[str, Any]:
        try:
            return dict(read_json(self.folder / f"host-{process}.json"))
        except (OSError, ValueError, TypeError, StorageError):
            return {}


def own_address(coordinator: str | None) -> str:
    """Returns the address of this host towards the coordinator; nothing is sent."""
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()

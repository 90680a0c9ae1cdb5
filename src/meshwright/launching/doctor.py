"""Checks between hosts: who came, clocks, shared storage, bandwidth, and whether all are alike.

Process 0 listens on the port that training will use, so that a port which is taken or cannot be reached shows here.
Nothing of JAX is needed between the hosts: it is what is checked.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.formatting import format_bytes
from meshwright.hardware.hosts import Hosts
from meshwright.launching.findings import Finding, fault, ok, read_findings
from meshwright.launching.messages import DataServer, Deadline, Line, bandwidth, reach

_SKEW = 1.0
"""Seconds by which a host's clock may differ."""
_ROUNDS = 8
_STREAM = 2**25
"""Bytes that each host sends to the next."""
_SLOWEST = 12.5e6
"""Bytes/s below which a link is a fault: 100 Mbit/s, at which a checkpoint of 1 GB takes 80 s."""
_STRAGGLER = 5
"""A host that is slower than the median by this factor is named."""
_APPEARS = 10.0
"""Seconds in which a file must be seen by the other hosts; NFS may cache an absent one for a few."""

_GATHER = 0.75
"""Part of the time for the others to come."""

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class HostReport:
    """Findings of one host."""

    process: int
    """Index of its process."""
    name: str
    """Host name."""
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        """The worst of its findings."""
        verdicts = {finding.verdict for finding in self.findings}
        return next((v for v in ("fault", "warning") if v in verdicts), "ok")


Local = tuple[list[Finding], dict[str, Any]]
"""Findings of this host, and what hosts compare: versions and devices."""


def examine(hosts: Hosts, folder: Path, local: Local, seconds: float, clock: Clock = time.time) -> list[HostReport]:
    """Checks this host with the others; returns the reports of all on process 0, elsewhere that of this host.

    folder: output folder, which all must share.  local: what `check_host` returns.  seconds: until the others are given
    up.  clock: time of this host.
    """
    if hosts.processes == 1:
        return [HostReport(0, socket.gethostname(), local[0])]
    deadline = Deadline(seconds)
    if hosts.coordinator is None:
        found = Finding("coordinator", "warning", f"{hosts.source} tells JAX alone where process 0 is",
                        "MESHWRIGHT_COORDINATOR, MESHWRIGHT_PROCESSES and MESHWRIGHT_PROCESS check more")  # fmt: skip
        return [HostReport(hosts.process, socket.gethostname(), [*local[0], found])]
    if hosts.process == 0:
        return _Chief(hosts, folder, local, deadline, seconds).examine(clock)
    return [HostReport(hosts.process, socket.gethostname(), _follow(hosts, folder, local, deadline, clock))]


@dataclasses.dataclass
class _Member:
    """A host as process 0 sees it."""

    line: Line
    name: str
    address: str
    data_port: int
    findings: list[Finding] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    gone: bool = False


class _Chief:
    """Process 0: asks the others one after the other."""

    def __init__(self, hosts: Hosts, folder: Path, local: Local, deadline: Deadline, seconds: float):
        self._hosts, self._folder, self._deadline, self._seconds = hosts, folder, deadline, seconds
        self._own, self._facts = list(local[0]), local[1]
        self._members: dict[int, _Member] = {}

    def examine(self, clock: Clock) -> list[HostReport]:
        host, _, port = str(self._hosts.coordinator).rpartition(":")
        try:
            listener = socket.create_server(("", int(port)), backlog=self._hosts.processes)
        except OSError as error:
            self._own.append(fault(
                "coordinator", f"port {port} of {host}: {os.strerror(error.errno or 0)}",
                f"another port in --coordinator, or end the process that has it (ss -ltnp 'sport = :{port}')",
            ))  # fmt: skip
            return [HostReport(0, socket.gethostname(), self._own)]
        data = DataServer()
        with listener, contextlib.closing(data):
            self._gather(listener)
            self._check_clocks(clock)
            self._check_storage()
            self._check_bandwidth(data)
            self._check_alike()
            reports = self._reports()
            for process, member in self._members.items():
                with contextlib.suppress(OSError, ValueError):
                    report = next(r for r in reports if r.process == process)
                    member.line.send({"done": [dataclasses.asdict(finding) for finding in report.findings]})
                member.line.connection.close()
        return reports

    def _gather(self, listener: socket.socket) -> None:
        """Waits for the other processes."""
        until = Deadline(self._seconds * _GATHER)
        while len(self._members) < self._hosts.processes - 1:
            try:
                listener.settimeout(until.left())
                connection, address = listener.accept()
            except (TimeoutError, OSError):
                return
            line = Line(connection, self._deadline)
            try:
                hello = line.receive()
                process, count = int(hello["doctor"]), int(hello["processes"])
                member = _Member(line, str(hello["name"])[:80], address[0], int(hello["data_port"]))
                member.findings, member.facts = read_findings(hello["findings"]), dict(hello["facts"])
            except (OSError, ValueError, KeyError, TypeError):
                connection.close()  # a stranger at the port
                continue
            if process in self._members or not 0 < process < self._hosts.processes or count != self._hosts.processes:
                self._own.append(fault(
                    "coordinator", f"{member.name} came as process {process} of {count}, and there are "
                    f"{self._hosts.processes}", "each process its own index, and the same number everywhere",
                ))  # fmt: skip
                connection.close()
                continue
            self._members[process] = member

    def _guarded(self, member: _Member, ask: Callable[[], None], check: str) -> None:
        if member.gone:
            return
        try:
            ask()
        except (OSError, ValueError, KeyError, TypeError) as error:
            member.gone = True
            member.findings.append(fault(check, f"it stopped answering: {error}", "see its own output"))

    def _check_clocks(self, clock: Clock) -> None:
        for member in self._members.values():
            self._guarded(member, lambda member=member: self._check_clock(member, clock), "clock")  # type: ignore[misc]

    def _check_clock(self, member: _Member, clock: Clock) -> None:
        rounds = []
        for _ in range(_ROUNDS):
            before = clock()
            member.line.send({"ask": "clock"})
            theirs = float(member.line.receive()["clock"])
            after = clock()
            rounds.append((after - before, theirs - (before + after) / 2))
        trip, offset = min(rounds)
        member.findings.append(judge_clock(offset, trip))

    def _check_storage(self) -> None:
        """Every host writes a file into the folder, and sees those of process 0."""
        token = secrets.token_hex(8)
        mine, made = self._folder / f".doctor-{token}-0", list(_missing(self._folder))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            mine.write_text(token, encoding="utf-8")
        except OSError as error:
            self._own.append(fault("storage", f"{self._folder} cannot be written: {error.strerror}",
                                     "another --out, or its rights"))  # fmt: skip
            return
        try:
            for process, member in self._members.items():
                self._guarded(member, lambda m=member, i=process: self._check_shared(m, i, token), "storage")  # type: ignore[misc]
            self._own.append(ok("storage", f"{self._folder} can be written"))
        finally:
            mine.unlink(missing_ok=True)
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _check_shared(self, member: _Member, process: int, token: str) -> None:
        member.line.send({"ask": "storage", "token": token})
        answer = member.line.receive()
        theirs = self._folder / f".doctor-{token}-{process}"
        there = bool(answer["seen"])
        try:
            there = there and not answer["error"] and _appears(theirs, token, self._deadline)
        finally:
            theirs.unlink(missing_ok=True)
        if there:
            member.findings.append(ok("storage", "shared"))
        elif answer["error"]:
            where, why = str(answer["folder"])[:200], str(answer["error"])[:200]
            fix = "rights or mount options of that host"
            member.findings.append(fault("storage", f"it cannot write {where}: {why}", fix))
        else:
            member.findings.append(fault(
                "storage", f"its {str(answer['folder'])[:200]} is not that of process 0, {self._folder}",
                "an --out on storage that every host mounts at the same path",
            ))  # fmt: skip

    def _check_bandwidth(self, data: DataServer) -> None:
        """Each host sends to the next one, all at once, the last one to process 0."""
        present = [0, *sorted(i for i, m in self._members.items() if not m.gone)]
        if len(present) < 2:
            return
        host = str(self._hosts.coordinator).rpartition(":")[0]
        places = {i: (m.address, m.data_port) for i, m in self._members.items()} | {0: (host, data.port)}
        rates: dict[int, float] = {}
        following = dict(zip(present, [*present[1:], present[0]], strict=True))
        for i in present[1:]:
            member, (address, port) = self._members[i], places[following[i]]
            self._guarded(
                member, lambda m=member, a=address, p=port: m.line.send({"ask": "stream", "host": a, "port": p}),  # type: ignore[misc]
                "bandwidth",
            )  # fmt: skip
        try:
            rates[0] = bandwidth(*places[following[0]], _STREAM, self._deadline)
        except OSError as error:
            self._own.append(_unreached(places[following[0]], error))
        for i in present[1:]:
            self._guarded(self._members[i], lambda i=i: self._collect_rate(i, places[following[i]], rates), "bandwidth")  # type: ignore[misc]
        for i, finding in judge_bandwidths(rates).items():
            (self._own if i == 0 else self._members[i].findings).append(finding)

    def _collect_rate(self, process: int, place: tuple[str, int], rates: dict[int, float]) -> None:
        answer = self._members[process].line.receive()
        if answer.get("error"):
            self._members[process].findings.append(_unreached(place, str(answer["error"])[:200]))
        else:
            rates[process] = float(answer["rate"])

    def _check_alike(self) -> None:
        for member in self._members.values():
            member.findings += compare_facts(self._facts, member.facts)

    def _reports(self) -> list[HostReport]:
        reports = [HostReport(0, socket.gethostname(), self._own)]
        for process in range(1, self._hosts.processes):
            member = self._members.get(process)
            if member is None:
                seconds = f"{self._seconds * _GATHER:.0f} s"
                absent = fault(
                    "coordinator", f"it did not come to {self._hosts.coordinator} in {seconds}",
                    "see its own output: not started, another address, or a firewall between them",
                )  # fmt: skip
                reports.append(HostReport(process, "?", [absent]))
            else:
                reports.append(HostReport(process, member.name, member.findings))
        return reports


def _follow(hosts: Hosts, folder: Path, local: Local, deadline: Deadline, clock: Clock) -> list[Finding]:
    """Answers process 0; returns the findings about this host, by process 0 where it could say."""
    address = str(hosts.coordinator)
    data = DataServer()
    with contextlib.closing(data):
        try:
            line = Line(reach(address, deadline), deadline)
        except OSError as error:
            reason = error.strerror or str(error)
            return [*local[0], fault(
                "coordinator", f"{address} cannot be reached: {reason}",
                "start process 0, check --coordinator, and open the port between the hosts",
            )]  # fmt: skip
        with line.connection:
            try:
                line.send({
                    "doctor": hosts.process, "processes": hosts.processes, "name": socket.gethostname(),
                    "data_port": data.port, "findings": [dataclasses.asdict(f) for f in local[0]], "facts": local[1],
                })  # fmt: skip
                return _answer(line, hosts, folder, deadline, clock)
            except (OSError, ValueError, KeyError, TypeError) as error:
                return [*local[0], fault("coordinator", f"process 0 at {address} stopped answering: {error}",
                                           "see the output of process 0")]  # fmt: skip


def _answer(line: Line, hosts: Hosts, folder: Path, deadline: Deadline, clock: Clock) -> list[Finding]:
    while True:
        asked = line.receive()
        if "done" in asked:
            return read_findings(asked["done"])
        if asked["ask"] == "clock":
            line.send({"clock": clock()})
        elif asked["ask"] == "storage":
            line.send(_share(folder, str(asked["token"]), hosts.process, deadline))
        else:
            try:
                line.send({"rate": bandwidth(str(asked["host"]), int(asked["port"]), _STREAM, deadline)})
            except OSError as error:
                line.send({"error": error.strerror or str(error)})


def _share(folder: Path, token: str, process: int, deadline: Deadline) -> Mapping[str, Any]:
    """Looks for the file of process 0 and writes one of this host."""
    answer = {"folder": str(folder.absolute()), "error": ""}
    if not token.isalnum():
        return {**answer, "seen": False}
    if not _appears(folder / f".doctor-{token}-0", token, deadline):
        return {**answer, "seen": False}
    try:
        (folder / f".doctor-{token}-{process}").write_text(token, encoding="utf-8")
    except OSError as error:
        return {**answer, "seen": True, "error": error.strerror or str(error)}
    return {**answer, "seen": True}


def _appears(file: Path, text: str, deadline: Deadline) -> bool:
    until = time.monotonic() + deadline.left(_APPEARS)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # asks the server of a network file system
            if file.read_text(encoding="utf-8") == text:
                return True
        time.sleep(0.1)
    return False


def _missing(folder: Path) -> Iterator[Path]:
    """Yields the folders that would be made for `folder`, innermost first."""
    while not folder.exists():
        yield folder
        folder = folder.parent


def _unreached(place: tuple[str, int], error: object) -> Finding:
    return fault("bandwidth", f"the next host, {place[0]}, cannot be reached: {error}",
                   "open all ports between the hosts: collectives use any of them")  # fmt: skip


def judge_clock(offset: float, trip: float) -> Finding:
    """Judges how far a clock is from that of process 0. offset, trip: seconds; half of the trip is its uncertainty."""
    if abs(offset) - trip / 2 > _SKEW:
        return fault("clock", f"{offset:+.1f} s from process 0", "chronyc makestep, or a running chronyd")
    return ok("clock", f"{offset * 1e3:+.0f} ms")


def judge_bandwidths(rates: Mapping[int, float]) -> dict[int, Finding]:
    """Judges the rate at which each host sends, in bytes/s, against the least and against the median."""
    median, found = statistics.median(rates.values()) if rates else 0.0, {}
    for process, rate in rates.items():
        text = f"{format_bytes(rate)}/s to the next host"
        if rate < _SLOWEST:
            found[process] = fault("bandwidth", text, "the host's network: link speed (ethtool), cable, route")
        elif rate < median / _STRAGGLER:
            found[process] = fault("bandwidth", f"{text}, the median is {format_bytes(median)}/s",
                                     "leave this host out, or repair its link")  # fmt: skip
        else:
            found[process] = ok("bandwidth", f"{format_bytes(rate)}/s")
    return found


def compare_facts(chief: Mapping[str, Any], other: Mapping[str, Any]) -> list[Finding]:
    """Compares versions and devices of a host with those of process 0."""
    mine, theirs = dict(chief["versions"]), dict(other.get("versions", {}))
    found = [
        fault("versions", f"{name} {str(theirs.get(name))[:40]}, process 0 has {mine.get(name)}",
                f"pip install {name}=={mine[name]}" if name in mine and name != "python" else "one image for all hosts")
        for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)
    ]  # fmt: skip
    if list(other.get("devices", [])) != list(chief["devices"]):
        text = f"{_devices(other.get('devices', []))}, process 0 has {_devices(chief['devices'])}"
        found.append(fault("devices", text, "hosts of one kind, with all of their chips"))
    return found


def _devices(kinds: Sequence[Any]) -> str:
    return f"{len(kinds)} x {str(kinds[0])[:40]}" if kinds else "none"

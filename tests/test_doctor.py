"""Planted faults of hosts, each found and named with its fix."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.hardware.hosts import Hosts
from meshwright.launching import doctor
from meshwright.launching.doctor import HostReport, examine, judge_bandwidths, judge_clock
from meshwright.launching.findings import Finding, read_findings
from meshwright.launching.host_checks import (
    ask_devices,
    check_devices,
    check_limits,
    check_room,
    check_shared_memory,
    check_variables,
    check_versions,
    installed_versions,
)
from meshwright.launching.messages import DataServer, Deadline, bandwidth

JAX = ["jaxlib<=0.12.0,>=0.11.2", "jaxlib==0.11.2; extra == 'ci'", 'libtpu==0.0.50.*; extra == "tpu"']
GOOD = {"python": "3.12.1", "jax": "0.12.0", "jaxlib": "0.12.0"}
FACTS = {"versions": GOOD, "devices": ["cpu", "cpu"]}


def faults(found: list[Finding]) -> list[str]:
    assert all(bool(finding.fix) == (finding.verdict != "ok") for finding in found)
    return [f"{finding.verdict} {finding.check}: {finding.found}" for finding in found if finding.verdict != "ok"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("changes", "accelerator", "expected"),
    [
        ({}, "", []),
        ({"jaxlib": "0.11.0"}, "", ["fault versions: jax 0.12.0 with jaxlib 0.11.0"]),
        ({"jaxlib": "0.12.1"}, "", ["fault versions: jax 0.12.0 with jaxlib 0.12.1"]),
        ({"python": "3.11.9"}, "", ["fault versions: Python 3.11.9"]),
        ({"jax-cuda13-plugin": "0.11.2"}, "gpu", ["fault versions: jax-cuda13-plugin 0.11.2 with jaxlib 0.12.0"]),
        ({"jax-cuda13-plugin": "0.11.2"}, "", ["warning versions: jax-cuda13-plugin 0.11.2 with jaxlib 0.12.0"]),
        ({}, "gpu", ["fault versions: GPUs, and no CUDA plugin of JAX"]),
        ({}, "tpu", ["fault versions: TPUs, and no libtpu"]),
        ({"libtpu": "0.0.52"}, "tpu", ["warning versions: libtpu 0.0.52 with jax 0.12.0"]),
        ({"libtpu": "0.0.50.1"}, "tpu", []),
    ],
)
def test_versions(changes: dict[str, str], accelerator: str, expected: list[str]) -> None:
    assert faults(check_versions({**GOOD, **changes}, JAX, accelerator)) == expected


def test_versions_installed_here_belong_together() -> None:
    from importlib import metadata

    assert faults(check_versions(installed_versions(), metadata.requires("jax") or [], "")) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (check_limits(256, -1, infiniband=False), "256 open files"),
        (check_limits(65536, 65536, infiniband=True), "64 KiB of locked memory with InfiniBand"),
        (check_limits(65536, 65536, infiniband=False), None),
        (check_shared_memory(64 * 2**20, 8), "64 MiB for 8 GPUs"),
        (check_shared_memory(64 * 2**20, 0), None),
        (check_room(Path("/no/such/folder"), 10**18, "checkpoints"), "for checkpoints"),
        (check_room(Path("/no/such/folder"), 1, "checkpoints"), None),
        (check_devices("JAX did not list them in 3 s", "tpu"), "did not list them"),
        (check_devices([{"kind": "cpu", "platform": "cpu", "memory": None}], "gpu"), "JAX finds a CPU alone"),
        (check_devices([{"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "memory": 20 * 10**9}] * 8, "gpu"),
         "18.6 GiB of 74.5 GiB"),
        (check_devices([{"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "memory": 60 * 10**9}] * 8, "gpu"), None),
        (check_variables({"JAX_PLATFORMS": "cpu"}, "tpu", []), "JAX_PLATFORMS=cpu on a host with TPUs"),
        (check_variables({"CUDA_VISIBLE_DEVICES": ""}, "gpu", []), "hides every GPU"),
        (check_variables({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}, "gpu", []), "another CUDA"),
        (check_variables({"NCCL_SOCKET_IFNAME": "ib0"}, "gpu", ["eth0", "lo"]), "names no interface"),
        (check_variables({"NCCL_SOCKET_IFNAME": "^lo,eth"}, "gpu", ["eth0", "lo"]), None),
        (check_variables({"WORLD_SIZE": "4", "RANK": "1"}, "", []), "one process of 4"),
        (check_variables({"MASTER_ADDR": "h", "WORLD_SIZE": "4", "RANK": "1", "http_proxy": "http://p"}, "", []),
         "asks the proxy for h:8476"),
        (check_variables({"MASTER_ADDR": "h", "WORLD_SIZE": "4", "RANK": "1", "JAX_NUM_PROCESSES": "2"}, "", []),
         "WORLD_SIZE=4 and JAX_NUM_PROCESSES=2"),
        (check_variables({}, "", []), None),
    ],
)  # fmt: skip
def test_a_host_alone(found: list[Finding], says: str | None) -> None:
    listed = faults(found)
    assert listed == [] if says is None else says in listed[0]


def test_devices_are_asked_in_a_process_of_their_own() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    found = ask_devices(120, environment)
    assert isinstance(found, str) and "nonsense" in found
    assert ask_devices(0.01, environment) == "JAX did not list them in 0 s"


def together(tmp_path: Path, count: int, seconds: float = 30, **faulty: Any) -> list[HostReport]:
    """Examines hosts in threads over real sockets. faulty: `facts`, `folder` and `clock` of the last one."""
    address, found = f"127.0.0.1:{free_port()}", {}

    def run(process: int) -> None:
        mine = faulty if process == count - 1 else {}
        folder, facts = mine.get("folder", tmp_path / "out"), mine.get("facts", FACTS)
        hosts = Hosts("test", count, process, address)
        found[process] = examine(hosts, folder, ([], facts), seconds, mine.get("clock", time.time))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not list(tmp_path.rglob(".doctor-*"))
    for process in range(1, count):
        assert found[process][0].findings == found[0][process].findings
    return found[0]


def test_hosts_that_are_well(tmp_path: Path) -> None:
    reports = together(tmp_path, 4)
    assert [report.verdict for report in reports] == ["ok"] * 4
    assert {f.check for f in reports[3].findings} == {"clock", "storage", "bandwidth"}
    assert not (tmp_path / "out").exists()  # the folder that was made for it is gone again


def test_hosts_that_differ_are_named(tmp_path: Path) -> None:
    reports = together(
        tmp_path, 3, folder=tmp_path / "elsewhere", clock=lambda: time.time() + 7,
        facts={"versions": {**GOOD, "jaxlib": "0.11.3"}, "devices": ["cpu"]},
    )  # fmt: skip
    assert [report.verdict for report in reports] == ["ok", "ok", "fault"]
    text = "\n".join(faults(reports[2].findings))
    assert "clock: +7.0 s from process 0" in text and "elsewhere is not that of process 0" in text
    assert "versions: jaxlib 0.11.3, process 0 has 0.12.0" in text and "1 x cpu, process 0 has 2 x cpu" in text


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = examine(Hosts("test", 2, 0, f"127.0.0.1:{free_port()}"), tmp_path / "file" / "out", ([], FACTS), 1)
    assert "cannot be written" in faults(found[0].findings)[0]
    assert "did not come" in faults(found[1].findings)[0]  # and nobody else was started


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [report] = examine(Hosts("test", 2, 0, f"127.0.0.1:{port}"), Path("x"), ([], FACTS), 5)
    assert faults(report.findings) == [f"fault coordinator: port {port} of 127.0.0.1: Address already in use"]


@pytest.mark.parametrize(("host", "says"), [("127.0.0.1", "refused"), ("no-such-host.invalid", "not known")])
def test_a_coordinator_that_cannot_be_reached(host: str, says: str) -> None:
    [report] = examine(Hosts("test", 2, 1, f"{host}:{free_port()}"), Path("x"), ([], FACTS), 1.5)
    assert "cannot be reached" in faults(report.findings)[0]
    # Without a name server the name is not refused, but unknown for now.
    assert says in report.findings[-1].found or "resolution" in report.findings[-1].found


def test_strangers_at_the_port_are_sent_away(tmp_path: Path) -> None:
    port, found = free_port(), []
    hosts = Hosts("test", 2, 0, f"127.0.0.1:{port}")
    chief = threading.Thread(target=lambda: found.extend(examine(hosts, tmp_path / "out", ([], FACTS), 8)))
    chief.start()
    for message in (b"GET / HTTP/1.1\r\n\r\n", b'{"doctor": 1}\n', b"[" * 3000 + b"\n", b'{"doctor": "x"}\n'):
        for _ in range(50):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(message)
                break
            time.sleep(0.05)
    chief.join()
    assert "did not come" in faults(found[1].findings)[0]


@contextlib.contextmanager
def slow_link(rate: float) -> Iterator[int]:
    """Reads what is sent to its port at a rate in bytes/s."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(65536):
                time.sleep(65536 / rate)
            connection.sendall(b".")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_slow_link() -> None:
    with slow_link(4e6) as port:
        rate = bandwidth("127.0.0.1", port, 2**23, Deadline(30))
    with contextlib.closing(DataServer()) as server:
        fast = bandwidth("127.0.0.1", server.port, 2**23, Deadline(30))
    assert rate < 8e6 < doctor._SLOWEST < fast
    found = judge_bandwidths({0: fast, 1: rate, 2: fast})
    assert [found[i].verdict for i in range(3)] == ["ok", "fault", "ok"]
    assert "the median is" in judge_bandwidths({0: 1e9, 1: 1e8, 2: 1e9})[1].found


def test_a_clock_within_the_uncertainty_is_no_fault() -> None:
    assert judge_clock(1.4, 1.0).verdict == "ok" and judge_clock(-1.6, 1.0).verdict == "fault"


def test_findings_of_others_are_data() -> None:
    with pytest.raises(ValueError, match="no verdict"):
        read_findings([{"check": "x", "verdict": "fine", "found": "", "fix": ""}])


def test_two_processes_of_the_verb(tmp_path: Path) -> None:
    """One is well; the other has few files, another folder, a device that is not there, and a contradiction."""
    port = free_port()
    words = [sys.executable, "-m", "meshwright", "doctor", "--json", "--deadline", "240", "--processes", "2",
             "--coordinator", f"127.0.0.1:{port}"]  # fmt: skip
    bad = ["bash", "-c", 'ulimit -n 256; exec "$@"', "-", *words, "--process", "1", "--out", str(tmp_path / "other")]
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense", "WORLD_SIZE": "4"}
    with subprocess.Popen(bad, stdout=subprocess.PIPE, text=True, env=environment) as other:
        chief = subprocess.run(
            [*words, "--process", "0", "--out", str(tmp_path / "out")], text=True, capture_output=True, timeout=300
        )
        shown = other.communicate()[0]
    assert chief.returncode == other.returncode == 1, chief.stderr
    assert shown == ""  # process 0 shows both
    report = json.loads(chief.stdout)
    first, second = report["hosts"]
    assert report["verdict"] == "fault" and first["verdict"] == "ok" and second["verdict"] == "fault"
    checks = {finding["check"] for finding in second["findings"] if finding["verdict"] == "fault"}
    assert checks == {"limits", "storage", "devices", "variables"}


def test_one_host_needs_room(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "meshwright", "doctor", "llama3-405b", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, text=True, capture_output=True, timeout=300)
    assert done.returncode == 1 and "TiB for the checkpoints of the run" in done.stdout, done.stdout + done.stderr
    assert "fix: a folder with more room" in done.stdout and "1 fault on 1 host" in done.stdout

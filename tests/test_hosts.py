"""Processes of several hosts, as each scheduler's variables describe them."""

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import ranks

from meshwright.api.verb import HostOptions, start_devices
from meshwright.cli.main import run
from meshwright.errors import ConfigError, HostError
from meshwright.hardware import hosts
from meshwright.hardware.hosts import ALONE, Hosts, first_host, hosts_of, join, tpu_environment
from meshwright.hardware.roll_call import AbsentError, answer_roll, call_roll

SLURM = {"SLURM_JOB_ID": "4103", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2",
         "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[003-006]", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}  # fmt: skip
GKE = {"TPU_WORKER_HOSTNAMES": "w-0.svc,w-1.svc", "TPU_WORKER_ID": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}  # fmt: skip
TORCHRUN = {
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "10",
    "LOCAL_RANK": "2",
}

CASES: list[tuple[str, Mapping[str, str], Hosts]] = [
    ("nothing", {"PATH": "/bin"}, ALONE),
    ("Slurm, one task on a node: all of its GPUs", SLURM, Hosts("Slurm", 4, 2, "gpu003:61447")),
    ("Slurm, a task for each GPU", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"},
     Hosts("Slurm", 4, 2, "gpu003:61447", 1)),
    ("Slurm's step in a script that sets WORLD_SIZE alone", {**SLURM, "WORLD_SIZE": "4"},
     Hosts("Slurm", 4, 2, "gpu003:61447")),
    ("Slurm's shell of one task", {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "1"}, ALONE),
    ("GKE", GKE, Hosts("Cloud TPU", 2, 1, "w-0.svc:8476")),
    ("GKE, one host", {"TPU_WORKER_HOSTNAMES": "w-0.svc", "TPU_WORKER_ID": "0"}, ALONE),
    ("GKE, two slices",
     {**GKE, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a.svc:80"},
     Hosts("Cloud TPU", 4, 3, "a.svc:8476")),
    ("Open MPI", MPI, Hosts("Open MPI", 16, 9, None, 1)),
    ("Open MPI inside Slurm", {**SLURM, **MPI}, Hosts("Open MPI", 16, 9, None, 1)),
    ("SkyPilot", {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"},
     Hosts("SkyPilot", 2, 1, "10.0.0.1:8476")),
    ("torchrun, a process on each host", TORCHRUN, Hosts("MASTER_ADDR and RANK", 16, 10, "node7:29500")),
    ("torchrun, a process for each GPU", {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"},
     Hosts("MASTER_ADDR and RANK", 16, 10, "node7:29500", 2)),
    ("a job file",
     {"MESHWRIGHT_COORDINATOR": "h:1", "MESHWRIGHT_PROCESSES": "3", "MESHWRIGHT_PROCESS": "2"},
     Hosts("MESHWRIGHT_COORDINATOR", 3, 2, "h:1")),
    ("first pod of an indexed Job", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, ALONE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_scheduler(environment: Mapping[str, str], expected: Hosts) -> None:
    assert hosts_of(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "started without srun"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, "address of pod 0"),
        ({"SKYPILOT_NODE_IPS": "a\nb"}, "SKYPILOT_NODE_RANK"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "a"}, "SKYPILOT_NUM_NODES"),
        ({"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}, "job 9 of 4 tasks"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID"),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID"),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"},
         "MEGASCALE_COORDINATOR_ADDRESS"),
        ({"WORLD_SIZE": "8", "RANK": "3"}, "one process of 8"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({"MESHWRIGHT_PROCESSES": "4", "MESHWRIGHT_PROCESS": "3"}, "one process of 4"),
        ({"MESHWRIGHT_COORDINATOR": "h:1", "MESHWRIGHT_PROCESSES": "4"}, "MESHWRIGHT_PROCESS"),
        ({**TORCHRUN, "RANK": "sixteen"}, "sixteen"),
        ({**TORCHRUN, "RANK": "16"}, "process 16 of 16"),
    ],
)  # fmt: skip
def test_a_worker_that_was_started_alone_says_so(
    environment: Mapping[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        hosts_of(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a1,b2", "a1"),
        ("gpu[3,5-9]", "gpu3"),
        ("a[01-04],b1", "a01"),
        ("r[1-2]n,x", "r1n"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


class Metadata(http.server.BaseHTTPRequestHandler):
    """Google's metadata server on the third host of four in the second slice of two."""

    def do_GET(self) -> None:
        answers = {
            "worker-network-endpoints": "w:1:10.0.0.4,w:2:10.0.0.5,w:3:10.0.0.6,w:4:10.0.0.7",
            "agent-worker-number": "2",
            "tpu-env": "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.0'",
        }
        answer = answers.get(self.path.rsplit("/", 1)[1])
        self.send_response(200 if answer and self.headers["Metadata-Flavor"] == "Google" else 404)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *_: object) -> None:
        pass


def test_cloud_tpu_hosts_from_the_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "has_tpu", lambda: True)
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = hosts_of({"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"})
        server.shutdown()
    assert found == Hosts("Cloud TPU", 8, 6, "10.0.0.0:8476")
    assert (
        hosts_of({"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}) == ALONE
    )  # no server, no pod


def test_tpu_environment_is_read_line_by_line() -> None:
    assert tpu_environment("A: 'b:c'\nno pair\n") == {"A": "b:c"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HostOptions(processes=2), "--coordinator and --process are not given"),
        (HostOptions(coordinator="h:1", processes=2), "--process is not given"),
        (HostOptions(coordinator="h:1", processes=2, process=2), "process 2 of 2"),
    ],
)
def test_options_that_do_not_fit_together(options: HostOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.hosts()


def test_one_process_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert HostOptions(processes=1).hosts() == ALONE
    assert HostOptions().hosts().processes == 4


def test_devices_are_shared_evenly() -> None:
    with pytest.raises(ConfigError, match="--devices 8"):
        start_devices(9, None, Hosts("test", 4, 0, "localhost:1"))


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.\nmore")

    monkeypatch.setattr("jax.distributed.initialize", nobody)
    monkeypatch.setattr("meshwright.hardware.hosts._meet", lambda hosts, seconds: None)
    with pytest.raises(HostError, match=r"process 1 of 2 at 127\.0\.0\.1:9") as error:
        join(Hosts("test", 2, 1, "127.0.0.1:9"), seconds=1)
    assert "Barrier timed out" in str(error.value) and "more" not in str(error.value)


JOIN = """
import socket, sys
from meshwright.errors import MeshwrightError
from meshwright.hardware.hosts import Hosts, join
taken = socket.create_server(("", 0))
port = 9 if sys.argv[1] == "1" else taken.getsockname()[1]
try:
    join(Hosts("test", 2, int(sys.argv[1]), f"127.0.0.1:{port}"), 1)
except MeshwrightError as error:
    sys.stderr.write(str(error))
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("variables, truth", [
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x', which is not a number"),
    ({**SLURM, "SLURM_STEP_NODELIST": "n[1-2"}, "one of them cannot be read"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "x"}, "one of them cannot be read"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK is not set"),
    ({"WORLD_SIZE": "0", "MASTER_ADDR": "a", "RANK": "0"}, "at least one computes"),
])  # fmt: skip
def test_variables_that_cannot_be_read_are_named(variables: Mapping[str, str], truth: str) -> None:
    with pytest.raises(ConfigError) as error:
        hosts_of(variables)
    assert truth in error.value.truth


@pytest.mark.parametrize("process, code, truth", [
    (1, 75, "after 1 s: nothing answers there: Connection refused"),
    (0, 5, "this process opens that port for the others, and cannot: Address already in use"),
])  # fmt: skip
def test_who_cannot_join_ends_with_the_reason(process: int, code: int, truth: str) -> None:
    """JAX aborts a process that waits in vain, with the stack of its C++ code and no word of what it waited for."""
    command = [sys.executable, "-c", JOIN, str(process)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "stack" not in done.stderr
    assert (
        f"joining as process {process} of 2 at 127.0.0.1:" in done.stderr and truth in done.stderr
    )


@pytest.mark.parametrize("address", ["node7", "node7:", "node7:port", ":8476", "node7:70000"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="it is not HOST:PORT"):
        join(Hosts("test", 2, 1, address))


def test_a_verb_of_one_process_refuses_to_be_one_of_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="process 2 of 4") as error:
        run(["bench", "hardware"])
    assert "--processes 1" in error.value.fix


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_cache")
def test_collectives_are_timed_across_processes(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "meshwright",
        "bench",
        "collectives",
        "--devices",
        "4",
        "--sizes",
        "4096",
    ]
    words += ["--out", str(tmp_path), "--json"]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    two = [subprocess.Popen(words, env=rank, **pipes) for rank in ranks(2)]
    ends = [process.communicate(timeout=300) for process in two]
    assert [process.returncode for process in two] == [0, 0], [error[-3000:] for _, error in ends]
    rows = json.loads(ends[0][0])["rows"]
    assert {row["devices"] for row in rows} == {2} and all(
        row["correct"] and row["calls"] == 20 for row in rows
    )


def test_the_roll_call_names_who_has_not_come() -> None:
    """Processes 0, 1 and 3 of four come; all of them hear that process 2 has not, and go on when it has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    heard: dict[int, str] = {}

    def come(process: int, seconds: float) -> None:
        try:
            if process == 0:
                call_roll(port, 4, seconds)
            else:
                answer_roll("127.0.0.1", port, process, seconds, lambda absent: None)
            heard[process] = "all have come"
        except AbsentError as error:
            heard[process] = str(error)

    def meet(processes: Sequence[int], seconds: float, *greetings: bytes) -> None:
        threads = [threading.Thread(target=come, args=(i, seconds)) for i in processes]
        for thread in threads:
            thread.start()
        # Something else on the network connects.
        for greeting in greetings:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as other,
            ):
                other.sendall(greeting)
        for thread in threads:
            thread.join(60)

    stranger = b"GET / HTTP/1.1\r\n\r\n"
    meet([0, 1, 3], 3.0, stranger, b"meshwright process 7\n")
    assert heard == dict.fromkeys((0, 1, 3), "process 2 has not come, 3 of 4 have")
    heard.clear()
    meet([3, 2, 1, 0], 60.0, stranger)
    assert heard == dict.fromkeys(range(4), "all have come")
    heard.clear()
    meet([1], 0.5)
    assert "nothing answers there: Connection refused" in heard[1]

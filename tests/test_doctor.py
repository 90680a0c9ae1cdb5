"""Planted faults of hosts, each found and named with its fix."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.hardware.hosts import installed_versions
from meshwright.launching.host_checks import (
    Finding,
    ask_devices,
    check_devices,
    check_limits,
    check_room,
    check_shared_memory,
    check_variables,
    check_versions,
)

JAX = [
    "jaxlib<=0.12.0,>=0.11.2",
    "jaxlib==0.11.2; extra == 'ci'",
    'libtpu==0.0.50.*; extra == "tpu"',
]
GOOD = {"python": "3.12.1", "jax": "0.12.0", "jaxlib": "0.12.0"}


def faults(found: list[Finding]) -> list[str]:
    assert all(bool(finding.fix) == (finding.verdict != "ok") for finding in found)
    return [
        f"{finding.verdict} {finding.check}: {finding.found}"
        for finding in found
        if finding.verdict != "ok"
    ]


@pytest.mark.parametrize(
    ("changes", "accelerator", "expected"),
    [
        ({}, "", []),
        ({"jaxlib": "0.11.0"}, "", ["fault versions: jax 0.12.0 with jaxlib 0.11.0"]),
        ({"jaxlib": "0.12.1"}, "", ["fault versions: jax 0.12.0 with jaxlib 0.12.1"]),
        ({"python": "3.11.9"}, "", ["fault versions: Python 3.11.9"]),
        (
            {"jax-cuda13-plugin": "0.11.2"},
            "gpu",
            ["fault versions: jax-cuda13-plugin 0.11.2 with jaxlib 0.12.0"],
        ),
        (
            {"jax-cuda13-plugin": "0.11.2"},
            "",
            ["warning versions: jax-cuda13-plugin 0.11.2 with jaxlib 0.12.0"],
        ),
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
        (check_room(Path("/no/such/folder"), 10**18), "for the checkpoints"),
        (check_room(Path("/no/such/folder"), 1), None),
        (check_devices("JAX did not list them in 3 s", "tpu"), "did not list them"),
        (check_devices([{"kind": "cpu", "platform": "cpu", "memory": None}], "gpu"), "JAX finds only a CPU"),
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
def test_checks_of_a_host(found: list[Finding], says: str | None) -> None:
    listed = faults(found)
    assert listed == [] if says is None else says in listed[0]


def test_devices_are_asked_in_a_process_of_their_own() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    found = ask_devices(120, environment)
    assert isinstance(found, str) and "nonsense" in found
    assert ask_devices(0.01, environment) == "JAX did not list them in 0 s"


def test_faults_of_this_host_are_named(tmp_path: Path) -> None:
    """The host has few files, a device that is not there, and a contradiction."""
    words = [sys.executable, "-m", "meshwright", "doctor", "--json", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense", "WORLD_SIZE": "4"}
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 256; exec "$@"', "-", *words],
        text=True,
        capture_output=True,
        env=environment,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["verdict"] == "fault", done.stderr
    checks = {finding["check"] for finding in report["findings"] if finding["verdict"] == "fault"}
    assert checks == {"limits", "devices", "variables"}


def test_one_host_needs_room(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "meshwright",
        "doctor",
        "llama3-405b",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(words, text=True, capture_output=True, timeout=300)
    assert done.returncode == 1 and "TiB for the checkpoints of the run" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "fix: a folder with more room" in done.stdout and "1 fault on " in done.stdout

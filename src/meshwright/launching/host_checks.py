"""Checks of one host: versions, limits, shared memory, variables, free room, devices.

Each function takes what it judges, so that a test can describe a faulty host to it.
"""

import dataclasses
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_bytes
from meshwright.hardware.chips import find_chip
from meshwright.hardware.hosts import CUDA_PACKAGES, has_tpu, hosts_of, installed_versions
from meshwright.hardware.machine import determinism_of
from meshwright.monitoring.counters import Counter, rule_of
from meshwright.monitoring.history import level_warning

_FILES = 4096
"""Open files that a process needs: checkpoints open a file for each shard,
and each neighbour is a socket."""
_LOCKED = 64 * 2**20
"""Bytes of locked memory that InfiniBand needs at least for its buffers;
it registers what it sends."""
_SHARED = 2**30
"""Bytes of /dev/shm that NCCL and data loaders need with several GPUs;
a container has 64 MiB by default."""
_COUNTS = (
    "MESHWRIGHT_PROCESSES",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "WORLD_SIZE",
    "JAX_NUM_PROCESSES",
)
"""Variables that give the number of processes."""
Verdict = Literal["ok", "warning", "fault"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check on one host."""

    check: str
    """Name of the check: a column of the table."""
    verdict: Verdict
    """`warning` may be meant; `fault` stops a run, or spoils it."""
    found: str
    """What is true, with its number."""
    fix: str = ""
    """Smallest change that mends it; empty where nothing is wrong."""


type Wrong = Iterator[tuple[Verdict, str, str]]
"""Verdict, truth and fix of everything that a check finds wrong;
at its end what is true where nothing is."""


def _check[**P](name: str) -> Callable[[Callable[P, Wrong]], Callable[P, list[Finding]]]:
    """Makes the findings of a check: an `ok` counts where nothing else was found."""

    def decorate(check: Callable[P, Wrong]) -> Callable[P, list[Finding]]:
        @functools.wraps(check)
        def findings(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
            found = [Finding(name, *each) for each in check(*args, **kwargs)]
            return [finding for finding in found if finding.verdict != "ok"] or found

        return findings

    return decorate


@_check("versions")
def check_versions(
    versions: Mapping[str, str], jax_requires: Sequence[str], accelerator: str
) -> Wrong:
    """Checks that the parts of JAX belong together.

    jax_requires: requirements of the installed JAX.  accelerator: `tpu`, `gpu` or empty.
    """
    jaxlib = versions.get("jaxlib", "0")
    if tuple(map(int, versions["python"].split(".")[:2])) < (3, 12):
        yield "fault", f"Python {versions['python']}", "Python 3.12 or later"
    rules = {
        rule.name: rule for rule in map(Requirement, reversed(jax_requires))
    }  # the first of a name is JAX's own
    if "jaxlib" in rules and not rules["jaxlib"].specifier.contains(jaxlib, prereleases=True):
        fix = f"pip install 'jaxlib{rules['jaxlib'].specifier}'"
        yield "fault", f"jax {versions['jax']} with jaxlib {jaxlib}", fix
    plugins = [name for name in versions if name in CUDA_PACKAGES]
    for name in plugins:
        if versions[name] != jaxlib:
            verdict: Verdict = "fault" if accelerator == "gpu" else "warning"
            yield (
                verdict,
                f"{name} {versions[name]} with jaxlib {jaxlib}",
                f"pip install {name}=={jaxlib}",
            )
    if accelerator == "gpu" and not plugins:
        yield "fault", "GPUs, and no CUDA plugin of JAX", "pip install 'meshwright[cuda13]'"
    if accelerator == "tpu" and "libtpu" not in versions:
        yield "fault", "TPUs, and no libtpu", "pip install 'meshwright[tpu]'"
    elif accelerator == "tpu" and "libtpu" in rules:
        rule = rules["libtpu"].specifier
        if not rule.contains(versions["libtpu"], prereleases=True):
            text = f"libtpu {versions['libtpu']} with jax {versions['jax']}"
            yield "warning", text, f"pip install 'libtpu{rule}', which this JAX names"
    yield "ok", f"Python {versions['python']}, jax {versions.get('jax')}", ""


@_check("limits")
def check_limits(files: int, locked: int, infiniband: bool) -> Wrong:
    """Checks the soft limits of open files and of locked memory (bytes); -1 is unlimited."""
    if 0 <= files < _FILES:
        yield (
            "fault",
            f"{files} open files",
            f"ulimit -n {_FILES}, or LimitNOFILE= of the service that starts the job",
        )
    if infiniband and 0 <= locked < _LOCKED:
        fix = "ulimit -l unlimited: memlock in limits.conf, or slurmd's LimitMEMLOCK"
        yield "fault", f"{format_bytes(locked)} of locked memory with InfiniBand", fix
    yield "ok", "unlimited files" if files < 0 else f"{files} open files", ""


@_check("/dev/shm")
def check_shared_memory(size: int, gpus: int) -> Wrong:
    """Checks the size of /dev/shm in bytes."""
    if gpus > 1 and size < _SHARED:
        fix = "docker run --shm-size 16g, or an emptyDir with medium: Memory at /dev/shm"
        yield "fault", f"{format_bytes(size)} for {gpus} GPUs", fix
    yield "ok", format_bytes(size), ""


@_check("room")
def check_room(folder: Path, needed: int) -> Wrong:
    """Checks the free room of the file system of `folder`.
    needed: bytes of the checkpoints of a run; 0 if unknown."""
    there = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )
    free = shutil.disk_usage(there).free
    if free < needed:
        text = (
            f"{format_bytes(free)} free in {there}, {format_bytes(needed)} for the checkpoints of "
            "the run"
        )
        yield "fault", text, "a folder with more room, or a smaller --training.max-to-keep"
    yield "ok", f"{format_bytes(free)} free", ""


@_check("variables")
def check_variables(
    environment: Mapping[str, str], accelerator: str, interfaces: Sequence[str]
) -> Wrong:
    """Checks that environment variables do not contradict each other or the host.
    interfaces: names of its networks."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if accelerator and platforms.lower().split(",")[0] == "cpu":
        yield (
            "warning",
            f"JAX_PLATFORMS={platforms} on a host with {accelerator.upper()}s",
            "unset JAX_PLATFORMS",
        )
    if accelerator == "gpu" and environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield "fault", "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    if accelerator == "gpu" and "cuda" in environment.get("LD_LIBRARY_PATH", ""):
        yield (
            "warning",
            "LD_LIBRARY_PATH has another CUDA than JAX's wheels",
            "unset LD_LIBRARY_PATH",
        )
    sockets = environment.get("NCCL_SOCKET_IFNAME", "")
    for name in filter(None, sockets.lstrip("^=").split(",")):
        if not any(known.startswith(name) for known in interfaces):
            yield (
                "fault",
                f"NCCL_SOCKET_IFNAME={sockets} names no interface",
                f"one of {', '.join(interfaces)}",
            )
    proxy = next(
        (n for n in ("http_proxy", "https_proxy", "grpc_proxy") if environment.get(n)), None
    )
    no_proxy = any(environment.get(name) for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"))
    try:
        hosts = hosts_of(environment)
    except MeshwrightError as error:
        yield "fault", f"{error.asked}: {error.truth}", error.fix
        return
    if proxy and hosts.coordinator and not no_proxy and hosts.processes > 1:
        fix = f"no_proxy={hosts.coordinator.rpartition(':')[0]}"
        yield "fault", f"{proxy} is set: gRPC asks the proxy for {hosts.coordinator}", fix
    counts = {name: environment[name] for name in _COUNTS if name in environment}
    if len(set(counts.values())) > 1:
        text = " and ".join(f"{name}={value}" for name, value in counts.items())
        yield "warning", text, f"{hosts.source} counts: unset the others"
    yield "ok", hosts.source, ""


_DEVICES = """
import json, jax
jax.config.update("jax_platforms", jax.config.jax_platforms)
found = []
for device in jax.local_devices():
    memory = (device.memory_stats() or {}).get("bytes_limit")
    found.append({"kind": device.device_kind, "platform": device.platform, "memory": memory})
print(json.dumps(found))
"""
"""Program that lists the devices of this process,
in a process of its own: a driver that hangs is then ended."""


def ask_devices(seconds: float, environment: Mapping[str, str]) -> list[dict[str, Any]] | str:
    """Returns the devices that JAX finds, or the reason why it finds none."""
    try:
        command = [sys.executable, "-P", "-c", _DEVICES]
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"JAX did not list them in {seconds:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"JAX ended with exit code {done.returncode}"
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


@_check("devices")
def check_devices(devices: list[dict[str, Any]] | str, accelerator: str) -> Wrong:
    """Checks the devices of a host.
    accelerator: kind of the chips that the host has, `tpu`, `gpu`, or empty."""
    if isinstance(devices, str):
        yield (
            "fault",
            devices,
            "the driver, JAX's extra for it (meshwright[tpu] or [cuda13]), or JAX_PLATFORMS",
        )
        return
    kinds = sorted({str(device["kind"]) for device in devices})
    if len(kinds) > 1:
        yield "fault", f"devices of several kinds: {', '.join(kinds)}", "hosts of one kind"
        return
    if accelerator and devices[0]["platform"] == "cpu":
        extra = "tpu" if accelerator == "tpu" else "cuda13"
        fix = f"pip install 'meshwright[{extra}]', and no JAX_PLATFORMS=cpu"
        yield "fault", f"a host with {accelerator.upper()}s, and JAX finds only a CPU", fix
    chip = find_chip(kinds[0])
    memories = [device["memory"] for device in devices if device["memory"]]
    if chip is not None and memories and min(memories) < 0.6 * chip.hbm_bytes:
        text = f"{kinds[0]} with {format_bytes(min(memories))} of {format_bytes(chip.hbm_bytes)}"
        fix = "end the process that has the rest (nvidia-smi), or raise XLA_CLIENT_MEM_FRACTION"
        yield "fault", text, fix
    yield "ok", f"{len(devices)} x {kinds[0]}", ""


@_check("bits")
def check_bits(devices: list[dict[str, Any]] | str) -> Wrong:
    """States what two runs on this host have in common."""
    if not isinstance(devices, str):
        yield "ok", determinism_of(devices[0]["platform"]).sentence, ""


@_check("counters")
def check_counters(counters: Sequence[Counter]) -> Wrong:
    """Checks the levels of a host's counters;
    counts of errors tell nothing before a second reading."""
    for counter in counters:
        warning = level_warning(counter)
        if warning:
            yield "warning", f"{counter.part}: {warning}", rule_of(counter.name).advice
    parts = {counter.part.partition(",")[0] for counter in counters}
    yield "ok", f"of {len(parts)} parts", ""


def check_host(folder: Path, needed: int, seconds: float) -> list[Finding]:
    """Runs every check of this host.

    folder: output folder.
    needed: bytes that a run writes there.
    seconds: for JAX to list the devices.
    """
    nvidia = any(Path("/dev").glob("nvidia[0-9]*"))
    accelerator = "gpu" if nvidia else "tpu" if has_tpu() else ""
    devices = ask_devices(seconds, os.environ)
    interfaces = sorted(p.name for p in Path("/sys/class/net").glob("*"))
    soft = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )
    shm = Path("/dev/shm")
    gpus = len(devices) if nvidia and isinstance(devices, list) else 0
    return [
        *check_versions(installed_versions(), metadata.requires("jax") or [], accelerator),
        *check_devices(devices, accelerator),
        *check_bits(devices),
        *check_limits(*soft, infiniband=any(Path("/sys/class/infiniband").glob("*"))),
        *(check_shared_memory(shutil.disk_usage(shm).total, gpus) if shm.is_dir() else []),
        *check_variables(os.environ, accelerator, interfaces),
        *check_room(folder, needed),
    ]

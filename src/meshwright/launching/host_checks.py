"""Checks of one host: versions, limits, shared memory, variables, free room, devices.

Each function takes what it judges, so that a wrong host can be described to it.
"""

import dataclasses
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.formatting import format_bytes
from meshwright.hardware.chips import find_chip
from meshwright.hardware.hosts import hosts_of

PACKAGES = (
    "meshwright", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin",
    "jax-cuda12-pjrt", "numpy", "optax", "tensorstore",
)  # fmt: skip
"""Packages whose versions are shown."""
_FILES = 4096
"""Open files that a process needs: checkpoints open a file for each shard, and each neighbour is a socket."""
_LOCKED = 64 * 2**20
"""Bytes of locked memory that InfiniBand needs at least for its buffers; it registers what it sends."""
_SHARED = 2**30
"""Bytes of /dev/shm that NCCL and data loaders need with several GPUs; a container has 64 MiB by default."""
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


def ok(check: str, found: str) -> Finding:
    """Returns a finding of a check that passed."""
    return Finding(check, "ok", found)


def fault(check: str, found: str, fix: str) -> Finding:
    """Returns a finding that stops or spoils a run."""
    return Finding(check, "fault", found, fix)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of those of `PACKAGES` that are installed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(versions: Mapping[str, str], jax_requires: Sequence[str], accelerator: str) -> list[Finding]:
    """Checks that the parts of JAX belong together.

    jax_requires: requirements of the installed JAX.  accelerator: `tpu`, `gpu` or empty.
    """
    found = []
    if tuple(map(int, versions["python"].split(".")[:2])) < (3, 12):
        found.append(fault("versions", f"Python {versions['python']}", "Python 3.12 or later"))
    for requirement in jax_requires:
        match = re.match(r"jaxlib([<>=!~.,\w*]+)$", requirement.replace(" ", "").partition(";")[0])
        if match and "extra" not in requirement and not _fits(versions.get("jaxlib", "0"), match[1]):
            found.append(fault("versions", f"jax {versions['jax']} with jaxlib {versions.get('jaxlib')}",
                                 f"pip install 'jaxlib{match[1]}'"))  # fmt: skip
    plugins = [name for name in versions if name.startswith("jax-cuda")]
    for name in plugins:
        if versions[name] != versions.get("jaxlib"):
            found.append(Finding(
                "versions", "fault" if accelerator == "gpu" else "warning",
                f"{name} {versions[name]} with jaxlib {versions.get('jaxlib')}",
                f"pip install {name}=={versions.get('jaxlib')}",
            ))  # fmt: skip
    if accelerator == "gpu" and not plugins:
        found.append(fault("versions", "GPUs, and no CUDA plugin of JAX", "pip install 'meshwright[cuda13]'"))
    if accelerator == "tpu" and "libtpu" not in versions:
        found.append(fault("versions", "TPUs, and no libtpu", "pip install 'meshwright[tpu]'"))
    wanted = next((r for r in jax_requires if r.startswith("libtpu")), None)
    if accelerator == "tpu" and wanted and "libtpu" in versions:
        rule = wanted.partition(";")[0].strip().removeprefix("libtpu")
        if not _fits(versions["libtpu"], rule):
            found.append(Finding("versions", "warning", f"libtpu {versions['libtpu']} with jax {versions['jax']}",
                                 f"pip install 'libtpu{rule}', which this JAX names"))  # fmt: skip
    return found or [ok("versions", f"Python {versions['python']}, jax {versions.get('jax')}")]


def _fits(version: str, rule: str) -> bool:
    """Whether a version satisfies requirements of numbers, such as `<=0.12.0.1,>=0.11.2` or `==0.0.50.*`."""
    mine = _numbers(version)
    for part in rule.split(","):
        match = re.match(r"(<=|>=|==|<|>|!=|~=)(.+)", part)
        if match is None:
            continue
        sign, text = match[1], match[2]
        if text.endswith(".*"):
            theirs = _numbers(text[:-2])
            same = mine[: len(theirs)] == theirs
            fits = same if sign == "==" else not same
        else:
            theirs = _numbers(text)
            fits = {"<=": mine <= theirs, ">=": mine >= theirs, "==": mine == theirs, "<": mine < theirs,
                    ">": mine > theirs, "!=": mine != theirs, "~=": mine >= theirs}[sign]  # fmt: skip
        if not fits:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(n) for n in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def check_limits(files: int, locked: int, infiniband: bool) -> list[Finding]:
    """Checks the soft limits of open files and of locked memory (bytes); -1 is unlimited."""
    found = []
    if 0 <= files < _FILES:
        found.append(fault("limits", f"{files} open files", f"ulimit -n {_FILES}, or LimitNOFILE= of the "
                             "service that starts the job"))  # fmt: skip
    if infiniband and 0 <= locked < _LOCKED:
        found.append(fault("limits", f"{format_bytes(locked)} of locked memory with InfiniBand",
                             "ulimit -l unlimited: memlock in limits.conf, or slurmd's LimitMEMLOCK"))  # fmt: skip
    return found or [ok("limits", "unlimited files" if files < 0 else f"{files} open files")]


def check_shared_memory(size: int, gpus: int) -> list[Finding]:
    """Checks the size of /dev/shm in bytes."""
    if gpus > 1 and size < _SHARED:
        return [fault("/dev/shm", f"{format_bytes(size)} for {gpus} GPUs",
                        "docker run --shm-size 16g, or an emptyDir with medium: Memory at /dev/shm")]  # fmt: skip
    return [ok("/dev/shm", format_bytes(size))]


def check_room(folder: Path, needed: int, what: str) -> list[Finding]:
    """Checks the free room of the file system of `folder`. needed: bytes."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        return [fault("room", f"{format_bytes(free)} free in {there}, {format_bytes(needed)} for {what}",
                        "a folder with more room, or a smaller --training.max-to-keep")]  # fmt: skip
    return [ok("room", f"{format_bytes(free)} free")]


def check_variables(environment: Mapping[str, str], accelerator: str, interfaces: Sequence[str]) -> list[Finding]:
    """Checks that environment variables do not contradict each other, or what is there.

    interfaces: names of the host's network interfaces.
    """
    found = []

    def report(text: str, fix: str, verdict: Verdict = "fault") -> None:
        found.append(Finding("variables", verdict, text, fix))

    platforms = environment.get("JAX_PLATFORMS", "").lower().split(",")
    if accelerator and platforms[0] == "cpu":
        report(f"JAX_PLATFORMS={environment['JAX_PLATFORMS']} on a host with {accelerator.upper()}s",
               "unset JAX_PLATFORMS", verdict="warning")  # fmt: skip
    if accelerator == "gpu" and environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        report("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if accelerator == "gpu" and "cuda" in environment.get("LD_LIBRARY_PATH", ""):
        report("LD_LIBRARY_PATH has another CUDA than JAX's wheels", "unset LD_LIBRARY_PATH", verdict="warning")
    names = environment.get("NCCL_SOCKET_IFNAME", "").lstrip("^=")
    for name in filter(None, names.split(",")):
        if not any(known.startswith(name) for known in interfaces):
            report(f"NCCL_SOCKET_IFNAME={environment['NCCL_SOCKET_IFNAME']} names no interface",
                   f"one of {', '.join(interfaces)}")  # fmt: skip
    proxy = next((n for n in ("http_proxy", "https_proxy", "grpc_proxy") if environment.get(n)), None)
    no_proxy = environment.get("no_proxy") or environment.get("NO_PROXY") or environment.get("no_grpc_proxy")
    try:
        hosts = hosts_of(environment)
    except MeshwrightError as error:
        report(f"{error.asked}: {error.truth}", error.fix)
        return found
    if proxy and hosts.coordinator and not no_proxy and hosts.processes > 1:
        report(f"{proxy} is set: gRPC asks the proxy for {hosts.coordinator}",
               f"no_proxy={hosts.coordinator.rpartition(':')[0]}")  # fmt: skip
    counts = {
        name: environment[name]
        for name in ("MESHWRIGHT_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE",
                     "JAX_NUM_PROCESSES")
        if name in environment
    }  # fmt: skip
    if len(set(counts.values())) > 1:
        report(" and ".join(f"{name}={value}" for name, value in counts.items()),
               f"{hosts.source} counts: unset the others", verdict="warning")  # fmt: skip
    return found or [ok("variables", hosts.source)]


DEVICES = """
import json, jax
jax.config.update("jax_platforms", jax.config.jax_platforms)
print(json.dumps([
    {"kind": d.device_kind, "platform": d.platform, "memory": (d.memory_stats() or {}).get("bytes_limit")}
    for d in jax.local_devices()
]))
"""
"""Program that lists the devices of this process, in a process of its own: a driver that hangs is then ended."""


def ask_devices(seconds: float, environment: Mapping[str, str]) -> list[dict[str, Any]] | str:
    """Returns the devices that JAX finds, or the reason why it finds none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", DEVICES], env=dict(environment), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"JAX did not list them in {seconds:.0f} s"
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"JAX ended with exit code {done.returncode}"
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def check_devices(devices: list[dict[str, Any]] | str, accelerator: str) -> list[Finding]:
    """Checks the devices of a host. accelerator: kind of the chips that the host has, `tpu`, `gpu`, or empty."""
    if isinstance(devices, str):
        return [fault("devices", devices,
                        "the driver, JAX's extra for it (meshwright[tpu] or [cuda13]), or JAX_PLATFORMS")]  # fmt: skip
    kinds = sorted({str(device["kind"]) for device in devices})
    if len(kinds) > 1:
        return [fault("devices", f"devices of several kinds: {', '.join(kinds)}", "hosts of one kind")]
    text = f"{len(devices)} x {kinds[0]}"
    if accelerator and devices[0]["platform"] == "cpu":
        return [fault("devices", f"a host with {accelerator.upper()}s, and JAX finds a CPU alone",
                        f"pip install 'meshwright[{'tpu' if accelerator == 'tpu' else 'cuda13'}]', and no "
                        "JAX_PLATFORMS=cpu")]  # fmt: skip
    chip = find_chip(kinds[0])
    for device in devices:
        memory = device["memory"]
        if chip is not None and memory and memory < 0.6 * chip.hbm_bytes:
            text = f"{kinds[0]} with {format_bytes(memory)} of {format_bytes(chip.hbm_bytes)}"
            fix = "end the process that has the rest (nvidia-smi), or raise XLA_PYTHON_CLIENT_MEM_FRACTION"
            return [fault("devices", text, fix)]
    return [ok("devices", text)]


def accelerator_here() -> str:
    """Returns the kind of chips that this host has by its device files: `tpu`, `gpu`, or empty."""
    from meshwright.hardware.hosts import has_tpu

    if list(Path("/dev").glob("nvidia[0-9]*")):
        return "gpu"
    return "tpu" if has_tpu() else ""


def check_host(folder: Path, needed: int, seconds: float) -> list[Finding]:
    """Runs every check of this host.

    folder: output folder.  needed: bytes that a run writes there.  seconds: for JAX to list the devices.
    """
    accelerator, versions = accelerator_here(), installed_versions()
    devices = ask_devices(seconds, os.environ)
    interfaces = sorted(p.name for p in Path("/sys/class/net").glob("*"))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = Path("/dev/shm")
    gpus = len(devices) if accelerator == "gpu" and isinstance(devices, list) else 0
    return [
        *check_versions(versions, metadata.requires("jax") or [], accelerator),
        *check_devices(devices, accelerator),
        *check_limits(*soft, infiniband=any(Path("/sys/class/infiniband").glob("*"))),
        *(check_shared_memory(shutil.disk_usage(shm).total, gpus) if shm.is_dir() else []),
        *check_variables(os.environ, accelerator, interfaces),
        *check_room(folder, needed, "the checkpoints of the run" if needed else "nothing"),
    ]

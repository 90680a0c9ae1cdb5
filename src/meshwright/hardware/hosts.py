"""Processes of a run on several hosts: what the environment has about them, and how they join.

The rules read the variables that each scheduler documents. `jax.distributed.initialize` finds
clusters by itself, but does not say beforehand whether there is one, gives a Slurm task that has a
node to itself one of its GPUs, and asks the Kubernetes API, for which pods need a role; it is asked
for the address of Open MPI alone.
"""

import contextlib
import dataclasses
import importlib.metadata
import platform
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright import last_words
from meshwright.errors import ConfigError, HostError, TrainingError, reason_of
from meshwright.hardware.roll_call import AbsentError, answer_roll, call_roll
from meshwright.signs import here, waiting

CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
_PACKAGES = (
    "meshwright",
    "jax",
    "jaxlib",
    "libtpu",
    *CUDA_PACKAGES,
    "numpy",
    "optax",
    "tensorstore",
    "tokenizers",
)
PORT = 8476
"""Port of process 0 where the environment names a host alone."""
_PATIENCE = 10.0
"""Seconds after which a process tells that it waits for the others."""
_LATER = 60
"""Seconds by which JAX's limit for joining is later than this package's."""
_JOIN_FIX = (
    "start the same command on every host, let all reach that address and port, or give "
    "--processes 1"
)
_HEARTBEAT = 30
"""Seconds without a sign of a process after which the others stop."""
JOIN_SECONDS = 300
"""Seconds that processes wait for each other at the start."""


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that decide on numbers."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def store() -> Any:
    """Returns the client of JAX's key-value store; None in a process that is alone."""
    # There is no public interface in JAX 0.12.
    from jax._src import distributed

    return distributed.global_state.client


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Processes that compute together, and which of them this is.

    Example:
        >>> from meshwright.hardware.hosts import hosts_of
        >>> hosts = hosts_of({"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "10.0.0.1"})
        >>> hosts.source, hosts.process, hosts.processes, hosts.coordinator
        ('MASTER_ADDR and RANK', 3, 4, '10.0.0.1:8476')
    """

    source: str
    """Scheduler, or the variables or options that name the others."""
    processes: int
    """Number of processes."""
    process: int
    """Index of this one."""
    coordinator: str | None
    """host:port of process 0; None where JAX finds it."""
    local_device: int | None = None
    """Index of the one accelerator of the host that is this process's; None: all of them."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(
                f"{self.processes} processes ({self.source})",
                "at least one computes",
                "--processes 1",
            )
        if not 0 <= self.process < self.processes:
            asked = f"process {self.process} of {self.processes} ({self.source})"
            raise ConfigError(asked, "processes are counted from 0", f"0 to {self.processes - 1}")


ALONE = Hosts("one process", 1, 0, None)
"""A process that computes alone."""


def hosts_of(environment: Mapping[str, str]) -> Hosts:
    """Returns the processes that the environment tells of; `ALONE` where it tells of none.

    Raises ConfigError where this process belongs to a job of several but was not started as one of
    them, and where the variables contradict themselves.
    """
    for rule in _RULES:
        try:
            hosts = rule(environment)
        except (KeyError, ValueError, TypeError) as error:
            asked, fix = (
                f"the variables of {rule.__name__.strip('_')}",
                f"{_EXPLICIT}, or --processes 1",
            )
            raise ConfigError(asked, _unreadable(error), fix) from error
        if hosts is not None:
            return hosts
    return ALONE


def _unreadable(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is not set"
    if isinstance(error, _NotANumberError):
        return f"{error.name} is {error.value!r}, which is not a number"
    return f"one of them cannot be read: {reason_of(error)}"


class _NotANumberError(ValueError):
    """Variable of the environment whose value is not a number."""

    def __init__(self, name: str, value: str):
        super().__init__(f"{name} is {value!r}")
        self.name = name
        self.value = value


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Returns a variable as a number. Raises KeyError where it is not set and has no default."""
    value = environment[name] if default is None else environment.get(name, default)
    try:
        return int(value)
    except ValueError as error:
        raise _NotANumberError(name, value) from error


_EXPLICIT = "--coordinator HOST:PORT --processes N --process I"


def join(hosts: Hosts, seconds: int = JOIN_SECONDS) -> None:
    """Joins this process to the others.

    Must come before anything asks JAX for its devices.
    seconds: how long to wait for the others; where they do not come, the process exits with
    `HostError`'s code.
    Raises ConfigError where the address is invalid, TrainingError where its port is taken,
    HostError where JAX refuses.
    """
    if hosts.processes == 1 or jax.distributed.is_initialized():
        return
    began = time.monotonic()
    unresolved = "" if hosts.coordinator is None else _unresolved(hosts.coordinator)
    if hosts.process == 0 and hosts.coordinator is not None:
        _check_port(hosts)
    here().enter("join")
    waits = (
        f"process {hosts.process} of {hosts.processes} waits for the others at {hosts.coordinator}"
    )
    message = f"{waits}, at most {seconds} s{'; ' + unresolved if unresolved else ''}"
    timers = [
        threading.Timer(
            0 if unresolved else _PATIENCE, lambda: print(message, file=sys.stderr, flush=True)
        ),
        threading.Timer(seconds + _LATER / 2, _give_up, (hosts, seconds)),
    ]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        if hosts.coordinator is not None:
            _meet(hosts, seconds)
        with waiting("the other processes, to join them"):
            jax.distributed.initialize(
                hosts.coordinator,
                hosts.processes,
                hosts.process,
                local_device_ids=hosts.local_device,
                cluster_detection_method="ompi" if hosts.coordinator is None else None,
                # At its own limit JAX aborts the process with a C++ stack: this one's comes before.
                initialization_timeout=seconds + _LATER,
                heartbeat_timeout_seconds=_HEARTBEAT,
            )
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        truth = f"after {time.monotonic() - began:.0f} s: {str(error).splitlines()[0]}"
        raise HostError(_joining(hosts), truth, _JOIN_FIX) from error
    finally:
        for timer in timers:
            timer.cancel()


def _meet(hosts: Hosts, seconds: float) -> None:
    """Waits until all processes have come. Raises HostError naming those that have not."""
    host, _, port = str(hosts.coordinator).rpartition(":")
    began, said = time.monotonic(), ""

    def news(absent: str) -> None:
        nonlocal said
        if time.monotonic() - began > _PATIENCE and absent != said:
            print(f"process {hosts.process}: {absent}", file=sys.stderr, flush=True)
            said = absent

    try:
        if hosts.process == 0:
            call_roll(int(port), hosts.processes, seconds, news)
        else:
            answer_roll(host.strip("[]"), int(port), hosts.process, seconds, news)
    except AbsentError as absent:
        truth = f"after {seconds:.0f} s: {absent}"
        raise HostError(_joining(hosts), truth, _JOIN_FIX) from absent
    except OSError as error:
        raise _port_taken(hosts, error) from error


def _port_taken(hosts: Hosts, error: OSError) -> TrainingError:
    truth = f"this process opens that port for the others, and cannot: {reason_of(error)}"
    return TrainingError(_joining(hosts), truth, "another port, the same on every host")


def _check_port(hosts: Hosts) -> None:
    """Raises TrainingError if process 0 cannot open its port.

    JAX's own error does not say so, and may crash.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(str(hosts.coordinator).rpartition(":")[2])))
        except OSError as error:
            raise _port_taken(hosts, error) from error


def _joining(hosts: Hosts) -> str:
    return (
        f"joining as process {hosts.process} of {hosts.processes} at {hosts.coordinator} "
        f"({hosts.source})"
    )


def _give_up(hosts: Hosts, seconds: int) -> None:
    """Prints why the processes are not together, and exits: the main thread waits inside JAX."""
    why = "all have come, and one of them has left since"
    if hosts.process and hosts.coordinator is not None:
        host, _, port = hosts.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
            why = "process 0 answers, and another one has left since it came"
        except (OSError, UnicodeError) as refusal:
            why = _unresolved(hosts.coordinator) or f"nothing answers there: {reason_of(refusal)}"
    error = HostError(_joining(hosts), f"after {seconds} s: {why}", _JOIN_FIX)
    last_words.leave(error.exit_code, f"error: {error}\n")


def _unresolved(coordinator: str) -> str:
    """Returns why the coordinator's name has no address (a pod's may come later).

    Empty if it has one.
    Raises ConfigError where the text is not HOST:PORT.
    """
    host, colon, port = coordinator.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"coordinator {coordinator!r}",
            "it is not HOST:PORT with a port from 1 to 65535",
            f"HOST:{PORT}",
        )
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError) as error:  # a name that no DNS label can be
        return f"{host} has no address: {reason_of(error)}"
    return ""


def _job_file(environment: Mapping[str, str]) -> Hosts | None:
    """Variables of this package, for job files of any scheduler."""
    address = environment.get("MESHWRIGHT_COORDINATOR")
    if address is None:
        return None
    count = _number(environment, "MESHWRIGHT_PROCESSES")
    index = _number(environment, "MESHWRIGHT_PROCESS")
    return Hosts("MESHWRIGHT_COORDINATOR", count, index, address)


def _slurm(environment: Mapping[str, str]) -> Hosts | None:
    """A Slurm step: `srun` sets the index of each task. A batch script has no index."""
    # A job that asks for nodes alone has no number of tasks: one for each node.
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES")
    given = next((name for name in counts if name in environment), counts[0])
    count = _number(environment, given, "1")
    if "SLURM_JOB_ID" not in environment or count == 1:
        return None
    if "SLURM_STEP_NODELIST" not in environment:
        raise _alone(
            f"one process in Slurm's job {environment['SLURM_JOB_ID']} of {count} tasks",
            "it was started without srun, and would compute alone while the other nodes wait",
            "srun meshwright ..., or --processes 1",
        )
    first = first_host(environment["SLURM_STEP_NODELIST"])
    # The step's tasks per node; one task per node has all of the node's accelerators.
    per_node = environment.get(
        "SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")
    )
    several = int(re.match(r"\d+", per_node)[0]) > 1  # type: ignore[index]
    local = _number(environment, "SLURM_LOCALID") if several else None
    # Jobs that share a node must not share a port; as JAX does, from the number of the job.
    port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
    return Hosts("Slurm", count, _number(environment, "SLURM_PROCID"), f"{first}:{port}", local)


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm list: `gpu[003-010,12],login1` begins with gpu003."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return nodes.split(",")[0]
    end = rest.index("]")
    return name + re.split("[,-]", rest[:end])[0] + rest[end + 1 :].split(",")[0]


def _open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    count = _number(environment, "OMPI_COMM_WORLD_SIZE", "1")
    if count == 1:
        return None
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    several = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", "1") > 1
    return Hosts(
        "Open MPI",
        count,
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        None,
        local if several else None,
    )


def _tpu_pod(environment: Mapping[str, str]) -> Hosts | None:
    """TPU hosts: GKE sets variables; Cloud TPU VMs have a metadata server."""
    if "TPU_WORKER_HOSTNAMES" in environment:
        workers = environment["TPU_WORKER_HOSTNAMES"].split(",")
        index = _number(environment, "TPU_WORKER_ID") if len(workers) > 1 else 0
        slices = environment
    elif has_tpu():
        endpoints = metadata(environment, "attributes/worker-network-endpoints")
        number = metadata(environment, "attributes/agent-worker-number")
        if endpoints is None or number is None:
            return None
        workers = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
        index, slices = (
            int(number),
            tpu_environment(metadata(environment, "attributes/tpu-env") or ""),
        )
    else:
        return None
    number_of_slices = _number(slices, "MEGASCALE_NUM_SLICES", "1")
    if len(workers) * number_of_slices == 1:
        return None
    this = _number(slices, "MEGASCALE_SLICE_ID") if number_of_slices > 1 else 0
    first = (slices["MEGASCALE_COORDINATOR_ADDRESS"] if number_of_slices > 1 else workers[0]).split(
        ":"
    )[0]
    return Hosts(
        "Cloud TPU", len(workers) * number_of_slices, this * len(workers) + index, f"{first}:{PORT}"
    )


def tpu_environment(text: str) -> dict[str, str]:
    """Returns the variables of a TPU VM's metadata `tpu-env`, lines of NAME: 'value'."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip().strip("'") for name, value in pairs}


def has_tpu() -> bool:
    """Whether this host has TPU chips."""
    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def metadata(environment: Mapping[str, str], name: str) -> str | None:
    """Returns a value of Google's metadata server about this machine.

    None without the server or the value.
    """
    host = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    try:
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=3) as answer:
            return str(answer.read().decode())
    except OSError:  # also URLError and TimeoutError
        return None


def _skypilot(environment: Mapping[str, str]) -> Hosts | None:
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if len(addresses) < 2:
        return None
    return Hosts(
        "SkyPilot",
        len(addresses),
        _number(environment, "SKYPILOT_NODE_RANK"),
        f"{addresses[0]}:{PORT}",
    )


def _torchrun(environment: Mapping[str, str]) -> Hosts | None:
    count = _number(environment, "WORLD_SIZE", "1")
    if count == 1 or "MASTER_ADDR" not in environment:
        return None
    several = _number(environment, "LOCAL_WORLD_SIZE", "1") > 1
    local = _number(environment, "LOCAL_RANK") if several else None
    address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', PORT)}"
    return Hosts("MASTER_ADDR and RANK", count, _number(environment, "RANK"), address, local)


def _kubernetes(environment: Mapping[str, str]) -> Hosts | None:
    """A pod of an indexed Job without an address: it cannot know the others."""
    index = _number(environment, "JOB_COMPLETION_INDEX", "0")
    if "KUBERNETES_SERVICE_HOST" in environment and index > 0:
        raise _alone(
            f"pod {index} of an indexed Job",
            "no variable has the address of pod 0: this one would compute alone",
            "MESHWRIGHT_COORDINATOR, MESHWRIGHT_PROCESSES and MESHWRIGHT_PROCESS in the job file; "
            "or --processes 1",
        )
    return None


def _nameless(environment: Mapping[str, str]) -> Hosts | None:
    for name in ("WORLD_SIZE", "SKYPILOT_NUM_NODES", "MESHWRIGHT_PROCESSES"):
        if _number(environment, name, "1") > 1:
            raise _alone(
                f"one process of {environment[name]} ({name})",
                "no variable has the address of process 0: this one would compute alone",
                f"MASTER_ADDR and RANK, or {_EXPLICIT}; or --processes 1",
            )
    return None


def _alone(asked: str, truth: str, fix: str) -> ConfigError:
    return ConfigError(
        asked, truth, f"{fix}. `meshwright launch` writes a job that starts all of them"
    )


_RULES = (_job_file, _tpu_pod, _open_mpi, _skypilot, _torchrun, _slurm, _kubernetes, _nameless)
"""Rules, the most specific first: inside a Slurm step, mpirun and torchrun count."""

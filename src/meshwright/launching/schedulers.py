"""Job files of Slurm, Kubernetes JobSet and SkyPilot: one command on every host,
and what the hosts need."""

import dataclasses
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import yaml

from meshwright.errors import ConfigError, nearest
from meshwright.hardware.chips import Torus
from meshwright.hardware.hosts import PORT
from meshwright.hardware.targets import Target, format_size
from meshwright.launching import LIMIT
from meshwright.launching.job_starts import ATTEMPT
from meshwright.launching.restarts import FAILED, REFUSED, STOPPED

BACKSTOP = 100
"""Starts that a scheduler makes in all for each that a run makes without progress. A run of 54 days
was interrupted 419 times (arXiv:2407.21783, section 3.3.4); what ends before the run can count is
not started for ever."""
GRACE_SECONDS = 120
"""Seconds between the signal to stop (SIGTERM) and the end, in which a run saves."""
REMOTE_SOURCE = "/tmp/meshwright-source"
"""Folder of a host that a checkout is copied to."""
_CPUS_OF_GPU = 8
_GIB_OF_GPU = 64
"""CPUs and GiB of host memory for each GPU of a job that takes a part of a node: half
of what nodes of eight GPUs have."""
_SAME_RESOURCE = {
    "mem": {"mem-per-cpu", "mem-per-gpu"},
    "cpus-per-task": {"cpus-per-gpu", "exclusive"},
    "exclusive": {"oversubscribe"},
}
"""Directive that a job asks for -> those that ask for the same in another way,
or that it contradicts."""
_TPU_HOST = 4
"""Chips on a host of a TPU slice of several hosts."""


class _Cloud(NamedTuple):
    """Names of a chip in clouds, and its number on a host."""

    gke: str | None = None
    """Value of the node label of Google Kubernetes Engine, where known."""
    skypilot: str | None = None
    """Name among the accelerators of SkyPilot, where known."""
    host: int | None = None
    """Chips of the largest TPU slice on one host, GPUs of a compute tray, where these are not
    `_TPU_HOST` or a node (Google Cloud TPU documentation, machine types ct5lp-hightpu-8t and
    ct6e-standard-8t)."""
    cores: int = 1
    """TensorCores of a chip, which the accelerator types of Cloud TPU count instead of chips."""


_TABLE = tomllib.loads(
    (Path(__file__).parent / "templates" / "clouds.toml").read_text(encoding="utf-8")
)
_CLOUDS = {name: _Cloud(**row) for name, row in _TABLE.items()}
_UNKNOWN = _Cloud()

Pairs = tuple[tuple[str, str], ...]
"""Names with their values, in order."""


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """Hosts of a target and their chips.

    Example:
        >>> from meshwright.hardware.targets import parse_target
        >>> from meshwright.launching.schedulers import accelerators_of
        >>> a = accelerators_of(parse_target("2*v5p:4x4x8"))
        >>> a.hosts, a.chips_per_host, a.slices, a.topology
        (64, 4, 2, '4x4x8')
    """

    name: str
    """Chip as `--target` names it."""
    tpu: bool
    hosts: int
    """Hosts of all slices."""
    chips_per_host: int
    slices: int
    """TPU slices; 1 for GPUs."""
    topology: str
    """Chips along each dimension of a slice, as `4x4x8`; for GPUs nodes x GPUs."""
    chips_per_slice: int
    """Chips of one slice; for GPUs all."""
    fills_hosts: bool = True
    """Whether the hosts have no other chips: not of GPUs that are a part of a node."""

    @property
    def resource(self) -> str:
        """Name of the chips among the resources of a Kubernetes node."""
        return "google.com/tpu" if self.tpu else "nvidia.com/gpu"

    @property
    def node_selector(self) -> Mapping[str, str]:
        """Labels of the Google Kubernetes Engine nodes that have these chips;
        empty where none is known."""
        label = _CLOUDS.get(self.name, _UNKNOWN).gke
        if label is None:
            return {}
        if self.tpu:
            prefix = "cloud.google.com/gke-tpu"
            return {f"{prefix}-accelerator": label, f"{prefix}-topology": self.topology}
        return {"cloud.google.com/gke-accelerator": label}

    @property
    def skypilot(self) -> tuple[str, int]:
        """Name and number of SkyPilot's accelerators on a node.
        Raises ConfigError where it has no such name."""
        cloud = _CLOUDS.get(self.name, _UNKNOWN)
        if cloud.skypilot is None:
            raise ConfigError(
                f"--on skypilot --target {self.name}:{self.topology}",
                "SkyPilot's name of this chip is not known",
                nearest(self.name, [chip for chip, known in _CLOUDS.items() if known.skypilot]),
            )
        if self.tpu:
            return f"{cloud.skypilot}-{self.chips_per_slice * cloud.cores}", 1
        return cloud.skypilot, self.chips_per_host


def accelerators_of(target: Target) -> Accelerators:
    """Returns the hosts of a target. Raises ConfigError where GPUs do not fill their hosts."""
    own = _CLOUDS.get(target.name, _UNKNOWN).host
    per_slice, topology = math.prod(target.topology), format_size(target.topology)
    links = target.chip.interconnect
    fills = True
    if isinstance(links, Torus):
        per_host, slices = (
            per_slice if per_slice <= (own or _TPU_HOST) else _TPU_HOST,
            target.slices,
        )
    else:
        per_host, slices = min(own or links.devices_per_node, target.topology[1]), 1
        fills = per_host == (own or links.devices_per_node)
    if per_slice % per_host:
        raise ConfigError(
            f"target {target}",
            f"its hosts have {per_host} GPUs, and {per_slice} do not divide by that",
            f"{target.name}:{per_slice // per_host * per_host}",
        )
    hosts = per_slice // per_host * slices
    return Accelerators(
        target.name, isinstance(links, Torus), hosts, per_host, slices, topology, per_slice, fills
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One command on several hosts."""

    name: str
    """Name of the job: lower-case letters, digits and hyphens."""
    command: tuple[str, ...]
    """Words of the command, without quotes; every process runs it."""
    hosts: int = 1
    processes_per_host: int = 1
    accelerators: Accelerators | None = None
    """Chips of the hosts; None asks for none."""
    environment: Pairs = ()
    """Environment variables of every process."""
    image: str | None = None
    """Container image."""
    mounts: Pairs = ()
    """(source, path) of what the processes find at a path: a folder, a volume claim or a store."""
    restarts: int = 0
    """Most starts after the first without progress between, which the run itself counts
    (`launching.job_starts`)."""
    fields: Pairs = ()
    """Further fields of the scheduler."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"--name {self.name}",
                "a job is named by 1 to 40 lower-case letters, digits and hyphens, a letter first",
                f"--name {legal_name(self.name)}",
            )
        for name, _ in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                truth = "a variable's name is letters, digits and underscores"
                raise ConfigError(f"--env {name}=...", truth, "--env NAME=VALUE")
        for word in (
            *self.command,
            *(part for pair in (*self.environment, *self.mounts) for part in pair),
        ):
            if "\0" in word:
                raise ConfigError(
                    f"{word!r} in a job", "no process can be given a null character", "without it"
                )


def legal_name(text: str) -> str:
    """Returns the nearest legal name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^(?=[^a-z])", "run-", name)[:40].rstrip("-") or "run"


def pairs(option: str, texts: Iterable[str]) -> Pairs:
    """Splits the values of an option, SOURCE:PATH for --mount, else NAME=VALUE.

    Raises ConfigError where one lacks a half.
    """
    found = []
    for text in texts:
        if option == "--mount":
            first, _, second = text.rpartition(":")  # a source may be a URL
            example = "SOURCE:/path"
        else:
            first, _, second = text.partition("=")
            example = "NAME=VALUE"
        if not first or not second:
            raise ConfigError(f"{option} {text!r}", "it has two halves", f"{option} {example}")
        found.append((first, second))
    return tuple(found)


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def slurm_script(job: Job) -> str:
    """Returns the script for `sbatch`.

    Values of directives are limited to characters that need no quotes, everything else is quoted
    for the shell. Raises ConfigError for a directive that is not.
    """
    chips = job.accelerators
    fields = dict(job.fields)
    directives: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": str(job.processes_per_host),
    }
    if chips is not None and not chips.tpu:
        directives["gpus-per-node"] = str(chips.chips_per_host)
    directives |= _cpus_and_memory(job, fields)
    directives["output"] = "%x-%j.out"
    directives["open-mode"] = "append"
    # To the tasks, not to this script, which has to ask for the next start.
    directives["signal"] = f"TERM@{GRACE_SECONDS}"
    directives |= fields
    if directives.get("exclusive") == "no":
        del directives["exclusive"]
    for name, value in directives.items():
        if value is None:
            continue
        if not re.fullmatch(r"[a-z][a-z-]*", name) or not re.fullmatch(
            r"[\w.,:/=+@%\[\]*&|()-]+", value, re.ASCII
        ):
            raise ConfigError(
                f"#SBATCH --{name}={value!r}",
                "a directive is a word, and its value letters, digits and . , : / = + @ % [ ] * & "
                "| ( ) - _",
                "--set NAME=VALUE of such characters, as in --set partition=gpu --set "
                "time=24:00:00",
            )
    return _template("slurm.sh") % {
        "directives": "".join(
            f"#SBATCH --{name}\n" if value is None else f"#SBATCH --{name}={value}\n"
            for name, value in directives.items()
        ),
        "processes": job.processes_per_host,
        "exports": "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in _variables(job)
        ),
        "command": shlex.join([*_in_container(job), *job.command]),
        "final": " | ".join(map(str, (0, *REFUSED, STOPPED))),
        "restarts": job.restarts * BACKSTOP,
    }


def _variables(job: Job) -> Pairs:
    """Returns the environment variables of every process, the limit of starts
    without progress among them."""
    if not job.restarts:
        return job.environment
    return (*job.environment, (LIMIT, str(job.restarts)))


def _cpus_and_memory(job: Job, fields: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the directives that ask for CPUs and memory,
    without those that `fields` ask for in another way.

    Where nodes are shared, a task gets one CPU and the partition's default memory unless it asks
    for more. A job with all GPUs of its nodes asks for the nodes; one with some of the GPUs asks
    for a share.
    """
    chips = job.accelerators
    if chips is None or chips.fills_hosts:
        # Tasks divide the CPUs of the node among them: the template's srun.
        wanted: dict[str, str | None] = {"exclusive": None, "mem": "0"}
    else:
        cpus = max(1, _CPUS_OF_GPU * chips.chips_per_host // job.processes_per_host)
        memory = _GIB_OF_GPU * chips.chips_per_host
        wanted = {"cpus-per-task": str(cpus), "mem": f"{memory}G"}
    for name, others in _SAME_RESOURCE.items():
        if fields.keys() & others:
            wanted.pop(name, None)
    return wanted


def _in_container(job: Job) -> list[str]:
    mounts = [f"{source}:{path}" for source, path in job.mounts]
    if job.image is None and mounts:
        raise ConfigError(
            "--mount without --image",
            "processes see the files of their host",
            "--image, or neither",
        )
    for mount in mounts:
        if "," in mount:
            raise ConfigError(
                f"--mount {mount}",
                "a comma separates mounts",
                "a folder without a comma in its name",
            )
    if job.image is None:
        return []
    if job.image.endswith(".sif"):
        return [
            "apptainer",
            "exec",
            "--nv",
            *(["--bind", ",".join(mounts)] if mounts else []),
            job.image,
        ]
    return [
        f"--container-image={job.image}",
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
    ]


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Returns YAML data with `values` for every word `$NAME`,
    without entries that are None or empty mappings."""
    if isinstance(template, dict):
        filled = {name: _filled(value, values) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value not in (None, {})}
    if isinstance(template, list):
        return [_filled(value, values) for value in template]
    return (
        values[template[1:]] if isinstance(template, str) and template.startswith("$") else template
    )


def _require_one_process(job: Job, truth: str) -> None:
    if job.processes_per_host != 1:
        raise ConfigError(
            f"--processes {job.processes_per_host * job.hosts}", truth, f"--processes {job.hosts}"
        )


def jobset_manifest(job: Job) -> str:
    """Returns the manifest for `kubectl apply`: one indexed Job for each TPU slice,
    or one for all hosts.

    On TPUs, Google Kubernetes Engine gives each pod its index and the addresses of the others.
    Elsewhere the manifest does, by the host name that a JobSet gives its first pod. Raises
    ConfigError without an image.
    """
    if job.image is None:
        raise ConfigError(
            "--on jobset", "a pod runs an image", "--image NAME, built from docker/Dockerfile"
        )
    _require_one_process(job, "a pod runs one process with all chips of its node")
    chips = job.accelerators
    tpu, slices = chips is not None and chips.tpu, chips.slices if chips else 1
    variables: list[dict[str, Any]] = [
        {"name": name, "value": _escaped(value)} for name, value in _variables(job)
    ]
    if job.restarts:
        attempt = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
        variables.append({"name": ATTEMPT, "valueFrom": {"fieldRef": {"fieldPath": attempt}}})
    if job.hosts > 1 and not tpu:
        index = "metadata.labels['batch.kubernetes.io/job-completion-index']"
        variables += [
            {"name": "MESHWRIGHT_COORDINATOR", "value": f"{job.name}-host-0-0.{job.name}:{PORT}"},
            {"name": "MESHWRIGHT_PROCESSES", "value": str(job.hosts)},
            {"name": "MESHWRIGHT_PROCESS", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (claim, path) in enumerate(job.mounts):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    several = tpu and slices > 1
    values = {
        "name": job.name,
        "exclusive": "cloud.google.com/gke-nodepool" if tpu else None,
        "restarts": job.restarts * BACKSTOP,
        "slices": slices,
        "pods": job.hosts // slices,
        "refusals": [*REFUSED, STOPPED],
        "grace": GRACE_SECONDS,
        "host_network": True if several else None,
        "dns_policy": "ClusterFirstWithHostNet" if several else None,
        "labels": {**(chips.node_selector if chips else {}), **dict(job.fields)},
        "image": job.image,
        "command": [_escaped(word) for word in job.command],
        "variables": variables,
        "port": PORT,
        "limits": {chips.resource: chips.chips_per_host} if chips else None,
        "mounts": mounts,
        "volumes": volumes,
    }
    manifest = _filled(yaml.safe_load(_template("jobset.yaml")), values)
    return yaml.dump(manifest, Dumper=_TextDumper, sort_keys=False, allow_unicode=True)


def _escaped(text: str) -> str:
    """Keeps Kubernetes from expanding `$(NAME)` in a word: `$$` stands for one dollar sign."""
    return text.replace("$", "$$")


class _TextDumper(yaml.SafeDumper):
    """Writes names of every class (`trust`) as text."""


_TextDumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


class _BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as a person would."""


_BlockDumper.add_multi_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def skypilot_task(job: Job) -> str:
    """Returns the task for `sky jobs launch`, which starts a preempted job again.

    Raises ConfigError where SkyPilot cannot have what the job asks for.
    """
    _require_one_process(job, "SkyPilot starts one process on a node")
    chips = job.accelerators
    if chips is not None and chips.slices > 1:
        raise ConfigError(
            f"--on skypilot with {chips.slices} slices",
            "a node of SkyPilot is one slice, which does not know the others",
            f"--target {chips.name}:{chips.topology}, or --on jobset",
        )
    mounts, setup = {path: source for source, path in job.mounts}, None
    if job.image is None:
        extra = "" if chips is None else "tpu" if chips.tpu else "cuda13"
        package, checkout = requirement(distribution("meshwright"), extra)
        setup = f"pip install {shlex.quote(package)}\n"
        mounts |= {} if checkout is None else {REMOTE_SOURCE: checkout}
    values = {
        "name": job.name,
        "nodes": 1
        if chips is not None and chips.tpu
        else job.hosts,  # all hosts of a TPU slice are one node
        "restarts": job.restarts * BACKSTOP,
        "failures": [*FAILED],
        "accelerators": dict([chips.skypilot]) if chips else None,
        "image": f"docker:{job.image}" if job.image else None,
        "variables": dict(_variables(job)),
        "mounts": mounts,
        "setup": setup,
        # One line: a line of a script cannot end within quotes that a value opens.
        "run": f"exec {shlex.join(job.command)}\n",
    }
    task = _filled(yaml.safe_load(_template("skypilot.yaml")), values)
    for name, text in job.fields:
        task["resources"][name] = {"true": True, "false": False}.get(
            text, int(text) if text.isdigit() else text
        )
    return yaml.dump(task, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True)


def requirement(installed: Distribution, extra: str) -> tuple[str, str | None]:
    """Returns what pip installs on a host,
    and the folder here that REMOTE_SOURCE is a copy of, None for no copy.

    installed: the package that runs here, with its origin (PEP 610).  extra: "tpu", "cuda13" or "".
    Raises ConfigError where it was installed from a file that other hosts do not have.
    """
    name, extras = installed.metadata["Name"], f"[{extra}]" if extra else ""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin:
        return f"{name}{extras}=={installed.version}", None
    if version_control := origin.get("vcs_info"):
        return (
            f"{name}{extras} @ "
            f"{version_control['vcs']}+{origin['url']}@{version_control['commit_id']}",
            None,
        )
    if "dir_info" in origin:
        return f"{REMOTE_SOURCE}{extras}", unquote(urlparse(origin["url"]).path)
    if origin["url"].startswith("file:"):
        raise ConfigError(
            "--on skypilot without an image",
            f"{name} was installed here from {origin['url']}, which no node has",
            "--image IMAGE with it, or install it here from its checkout",
        )
    return f"{name}{extras} @ {origin['url']}", None


SCHEDULERS: dict[str, tuple[Callable[[Job], str], str]] = {
    "slurm": (slurm_script, "sbatch"),
    "jobset": (jobset_manifest, "kubectl apply -f"),
    "skypilot": (skypilot_task, "sky jobs launch"),
}
"""Scheduler -> what writes its job file, and the command that starts one."""

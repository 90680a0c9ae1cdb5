"""Task file of SkyPilot, for `sky jobs launch`, which starts a preempted job again."""

import shlex
from importlib.metadata import distribution
from typing import Any

import yaml

from meshwright.errors import ConfigError
from meshwright.launching.exit_codes import FAILED
from meshwright.launching.installation import REMOTE_SOURCE, requirement
from meshwright.launching.job import Job


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, as a person would."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def skypilot_task(job: Job) -> str:
    """Returns the task for `sky jobs launch`. Raises ConfigError where SkyPilot cannot have what the job asks for."""
    if job.processes_per_host != 1:
        raise ConfigError(
            f"--processes {job.processes_per_host * job.hosts}", "SkyPilot starts one process on a node",
            f"--processes {job.hosts}",
        )  # fmt: skip
    chips, recovery = job.accelerators, {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [*FAILED]}
    resources: dict[str, Any] = {"job_recovery": recovery}
    if chips is not None:
        if chips.slices > 1:
            raise ConfigError(
                f"--on skypilot with {chips.slices} slices", "a node of SkyPilot is one slice, which does not know the "
                "others", f"--target {chips.name}:{chips.topology}, or --on jobset",
            )  # fmt: skip
        name, number = chips.skypilot
        resources["accelerators"] = {name: number}
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    resources |= {name: _value(value) for name, value in job.fields}
    mounts, setup = {path: source for source, path in job.mounts}, None
    if job.image is None:
        package, source = requirement(
            distribution("meshwright"), "" if chips is None else "tpu" if chips.tpu else "cuda13"
        )
        setup = f"pip install {shlex.quote(package)}\n"
        mounts |= {} if source is None else {REMOTE_SOURCE: source}
    task = {
        "name": job.name,
        # All hosts of a TPU slice are one node.
        "num_nodes": 1 if chips is not None and chips.tpu else job.hosts,
        "resources": resources,
        **({"envs": dict(job.environment)} if job.environment else {}),
        **({"file_mounts": mounts} if mounts else {}),
        **({"setup": setup} if setup is not None else {}),
        # One line: a line of a script cannot end within quotes that a value opens.
        "run": f"exec {shlex.join(job.command)}\n",
    }
    return yaml.dump(task, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _value(text: str) -> Any:
    """Reads true, false and whole numbers; everything else is text."""
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)

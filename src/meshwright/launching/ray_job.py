"""Submission of a job to a Ray cluster: a script that calls `ray job submit`."""

import base64
import json
import shlex
from typing import Any

from meshwright.errors import ConfigError
from meshwright.launching.job import Job

Specification = dict[str, Any]
"""What `on_ray` runs: command, environment, hosts, resources of a host, restarts."""


def ray_script(job: Job) -> str:
    """Returns the script that submits the job. Raises ConfigError for what a Ray cluster has already: image, mounts."""
    if job.image is not None or job.mounts:
        raise ConfigError(
            "--on ray with --image or --mount", "the nodes of a Ray cluster run already, in their own containers",
            "the image and the volumes in the cluster's configuration",
        )  # fmt: skip
    if job.processes_per_host != 1:
        raise ConfigError(
            f"--processes {job.processes_per_host * job.hosts}", "one process on a node has all of its chips",
            f"--processes {job.hosts}",
        )  # fmt: skip
    submit = ["ray", "job", "submit", *(word for name, value in job.fields for word in (f"--{name}", value))]
    words = [*submit, "--", "python", "-m", "meshwright.launching.on_ray", encode(specification(job))]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# The job, which the last word holds: {json.dumps(job.command)}",
            f"exec {shlex.join(words)}",
            "",
        ]
    )


def specification(job: Job) -> Specification:
    """Returns what `on_ray` runs."""
    chips = job.accelerators
    return {
        "command": list(job.command),
        "environment": dict(job.environment),
        "hosts": job.hosts,
        "resources": {} if chips is None else {"TPU" if chips.tpu else "GPU": chips.chips_per_host},
        "restarts": job.restarts,
    }


def encode(value: Specification) -> str:
    """Encodes a specification in letters and digits: Ray quotes the words of an entry point for another shell."""
    return base64.b32encode(json.dumps(value).encode()).decode().rstrip("=")


def decode(text: str) -> Specification:
    """Decodes what `encode` returns."""
    return dict(json.loads(base64.b32decode(text + "=" * (-len(text) % 8))))

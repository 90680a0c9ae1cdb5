"""Manifest of a Kubernetes JobSet: one indexed Job for each TPU slice, or one for all hosts."""

from typing import Any

import yaml

from meshwright.errors import ConfigError
from meshwright.hardware.hosts import PORT
from meshwright.launching.exit_codes import REFUSED, STOPPED
from meshwright.launching.job import GRACE_SECONDS, Job

_JOB = "host"
"""Name of the replicated job, which is part of the pods' host names."""
_CONTAINER = "meshwright"


def jobset_manifest(job: Job) -> str:
    """Returns the manifest for `kubectl apply`.

    On TPUs, Google Kubernetes Engine gives each pod its index and the addresses of the others. Elsewhere the manifest
    does, by the host name that a JobSet gives its first pod. Raises ConfigError without an image.
    """
    if job.image is None:
        raise ConfigError("--on jobset", "a pod runs an image", "--image NAME, built from docker/Dockerfile")
    if job.processes_per_host != 1:
        raise ConfigError(
            f"--processes {job.processes_per_host * job.hosts}", "a pod runs one process with all chips of its node",
            f"--processes {job.hosts}",
        )  # fmt: skip
    chips = job.accelerators
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            # One slice on one pool of nodes: a Job's pods share their interconnect.
            **({"annotations": {_EXCLUSIVE: "cloud.google.com/gke-nodepool"}} if chips and chips.tpu else {}),
        },
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {
                "maxRestarts": job.restarts,
                "rules": [
                    {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [_replicated(job)],
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True)


_EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def _replicated(job: Job) -> dict[str, Any]:
    slices = job.accelerators.slices if job.accelerators else 1
    pods = job.hosts // slices
    # A Job fails with its first pod, and the whole set starts again. A refusal fails it by this policy, which the
    # set's policy tells from other failures.
    codes = {"containerName": _CONTAINER, "operator": "In", "values": [*REFUSED, STOPPED]}
    return {
        "name": _JOB,
        "replicas": slices,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "parallelism": pods,
                "completions": pods,
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
                "template": {"spec": _pod(job)},
            }
        },
    }


def _pod(job: Job) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (claim, path) in enumerate(job.mounts):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    chips = job.accelerators
    limits = {"resources": {"limits": {chips.resource: chips.chips_per_host}}} if chips else {}
    selector = {**(chips.node_selector if chips else {}), **dict(job.fields)}
    several = chips is not None and chips.tpu and chips.slices > 1
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # Slices reach each other at the speed of the host's own network.
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if several else {}),
        **({"nodeSelector": selector} if selector else {}),
        "containers": [
            {
                "name": _CONTAINER,
                "image": job.image,
                "command": [_escaped(word) for word in job.command],
                "env": _environment(job),
                "ports": [{"containerPort": PORT, "protocol": "TCP"}],
                **limits,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _environment(job: Job) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [{"name": name, "value": _escaped(value)} for name, value in job.environment]
    if job.hosts > 1 and not (job.accelerators and job.accelerators.tpu):
        index = "metadata.labels['batch.kubernetes.io/job-completion-index']"
        variables += [
            {"name": "MESHWRIGHT_COORDINATOR", "value": f"{job.name}-{_JOB}-0-0.{job.name}:{PORT}"},
            {"name": "MESHWRIGHT_PROCESSES", "value": str(job.hosts)},
            {"name": "MESHWRIGHT_PROCESS", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    return variables


def _escaped(text: str) -> str:
    """Keeps Kubernetes from expanding `$(NAME)` in a word: `$$` stands for one dollar sign."""
    return text.replace("$", "$$")

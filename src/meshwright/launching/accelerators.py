"""Hosts of a hardware target: how many, with how many chips each, and what each scheduler calls them."""

import dataclasses
import math
from collections.abc import Mapping

from meshwright.errors import ConfigError, nearest
from meshwright.hardware.chips import Torus
from meshwright.hardware.targets import Target, format_size

_TPU_HOST = 4
"""Chips on a host of a TPU slice of several hosts."""
_SINGLE_HOST = {"v5e": 8, "v6e": 8}
"""Chips of the largest slice that one host has, where that is more than `_TPU_HOST` (Google Cloud TPU documentation,
machine types ct5lp-hightpu-8t and ct6e-standard-8t)."""
_GPU_HOST = {"gb200": 4, "gb300": 4}
"""GPUs of a compute tray, where an NVLink domain has several hosts; elsewhere a node is a host."""

_GKE_TPUS = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
_GKE_GPUS = {
    "a100": "nvidia-a100-80gb", "a100-40gb": "nvidia-tesla-a100", "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb", "b200": "nvidia-b200", "gb200": "nvidia-gb200", "gb300": "nvidia-gb300",
}  # fmt: skip
# Cloud TPU's accelerator types: those of v4, v5p and tpu7x count TensorCores, two on a chip.
_TPU_TYPES = {"v4": ("tpu-v4", 2), "v5e": ("tpu-v5litepod", 1), "v5p": ("tpu-v5p", 2), "v6e": ("tpu-v6e", 1)}
_SKYPILOT_GPUS = {
    "a100": "A100-80GB", "a100-40gb": "A100", "h100": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200",
    "b300": "B300", "gb300": "GB300",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """Hosts of a target and their chips.

    Example:
        >>> from meshwright.hardware.targets import parse_target
        >>> from meshwright.launching.accelerators import accelerators_of
        >>> a = accelerators_of(parse_target("2*v5p:4x4x8"))
        >>> a.hosts, a.chips_per_host, a.slices, a.topology
        (64, 4, 2, '4x4x8')
    """

    name: str
    """Chip as `--target` names it."""
    tpu: bool
    """Whether the chips are TPUs."""
    hosts: int
    """Hosts of all slices."""
    chips_per_host: int
    """Chips that one host has."""
    slices: int
    """TPU slices; 1 for GPUs."""
    topology: str
    """Chips along each dimension of a slice, as `4x4x8`; for GPUs nodes x GPUs."""
    chips_per_slice: int
    """Chips of one slice; for GPUs all."""

    @property
    def resource(self) -> str:
        """Name of the chips among the resources of a Kubernetes node."""
        return "google.com/tpu" if self.tpu else "nvidia.com/gpu"

    @property
    def node_selector(self) -> Mapping[str, str]:
        """Labels of the Google Kubernetes Engine nodes that have these chips; empty where none is known."""
        if self.tpu and self.name in _GKE_TPUS:
            return {
                "cloud.google.com/gke-tpu-accelerator": _GKE_TPUS[self.name],
                "cloud.google.com/gke-tpu-topology": self.topology,
            }
        return {"cloud.google.com/gke-accelerator": _GKE_GPUS[self.name]} if self.name in _GKE_GPUS else {}

    @property
    def skypilot(self) -> tuple[str, int]:
        """Name and number of SkyPilot's accelerators on a node. Raises ConfigError where it has no such name."""
        if self.name in _TPU_TYPES:
            name, cores = _TPU_TYPES[self.name]
            return f"{name}-{self.chips_per_slice * cores}", 1
        if self.name in _SKYPILOT_GPUS:
            return _SKYPILOT_GPUS[self.name], self.chips_per_host
        raise ConfigError(
            f"--on skypilot --target {self.name}:{self.topology}", "SkyPilot's name of this chip is not known",
            nearest(self.name, {**_TPU_TYPES, **_SKYPILOT_GPUS}),
        )  # fmt: skip


def accelerators_of(target: Target) -> Accelerators:
    """Returns the hosts of a target. Raises ConfigError where GPUs do not fill their hosts."""
    per_slice = math.prod(target.topology)
    if isinstance(target.chip.interconnect, Torus):
        single = _SINGLE_HOST.get(target.name, _TPU_HOST)
        per_host = per_slice if per_slice <= single else _TPU_HOST
        hosts = per_slice // per_host * target.slices
        topology = format_size(target.topology)
        return Accelerators(target.name, True, hosts, per_host, target.slices, topology, per_slice)
    most = _GPU_HOST.get(target.name, target.chip.interconnect.devices_per_node)
    per_host = min(most, target.topology[1])
    if per_slice % per_host:
        raise ConfigError(
            f"target {target}", f"its hosts have {per_host} GPUs, and {per_slice} do not divide by that",
            f"{target.name}:{per_slice // per_host * per_host}",
        )  # fmt: skip
    return Accelerators(target.name, False, per_slice // per_host, per_host, 1, format_size(target.topology), per_slice)

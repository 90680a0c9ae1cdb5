"""Devices of a verb: those at hand, or simulated ones, of one process or of several that compute together."""

import dataclasses
import os
from typing import Annotated

import jax
import tyro

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware import mesh
from meshwright.hardware.hosts import ALONE, Hosts, hosts_of, join
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged

SIMULATED = 8
"""Devices simulated where there is no accelerator and neither --devices nor a mesh is given."""

_MOST_SIMULATED = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(Ranged):
    """Processes of a run on several hosts. Slurm, Cloud TPU, GKE, SkyPilot, Open MPI, torchrun and Ray tell it by
    themselves."""

    coordinator: str | None = None
    """HOST:PORT of process 0, where the environment does not tell."""
    processes: PositiveInt | None = None
    """Number of processes, one on each host; 1 computes alone, whatever the environment tells."""
    process: NonNegativeInt | None = None
    """Index of this process."""

    def hosts(self) -> Hosts:
        """Returns the processes by these options, or by the environment. Raises ConfigError where one is missing."""
        if self.processes == 1:
            return ALONE
        given = {"--coordinator": self.coordinator, "--processes": self.processes, "--process": self.process}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return hosts_of(os.environ)
        if self.coordinator is None or self.processes is None or self.process is None:
            raise ConfigError(
                " ".join(f"{name} {value}" for name, value in given.items() if value is not None),
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given",
                "--coordinator HOST:PORT --processes N --process I, with I from 0 to N - 1",
            )
        return Hosts("--coordinator", self.processes, self.process, self.coordinator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Ranged):
    """Options of the verbs that load a checkpoint onto a mesh."""

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default the last."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh to compute on, as axis=degree,...; by default the run's own."""
    devices: PositiveInt | None = None
    """Devices to use; simulated where there is no accelerator."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()

    def shape(self) -> MeshShape | None:
        """Parses the mesh; None takes the run's own."""
        return MeshShape.parse(self.mesh) if self.mesh else None


def start_devices(devices: int | None, shape: MeshShape | None, hosts: Hosts = ALONE) -> None:
    """Joins the processes; simulates this one's part of `devices` where there is no accelerator.

    devices: None takes the size of the mesh. Raises ConfigError where the processes cannot have equally many.
    """
    total = devices or (shape.size if shape else SIMULATED)
    if total % hosts.processes:
        raise ConfigError(
            f"{total} devices over {hosts.processes} processes",
            "each process has the same number, at least one",
            f"--devices {max(1, total // hosts.processes) * hosts.processes}",
        )
    each = total // hosts.processes
    if each > _MOST_SIMULATED:
        raise ConfigError(
            f"{each:,} devices in one process",
            f"no host has as many, and at most {_MOST_SIMULATED:,} are simulated",
            "a smaller mesh; meshwright plan, and prove --on CHIP:SIZE, need no devices",
        )
    try:
        mesh.prepare_host(each)
    except RuntimeError as error:
        enough = jax.default_backend() != "cpu" or jax.device_count() >= each
        if enough and hosts.processes == 1:
            return
        raise ConfigError(
            f"{hosts.processes} processes" if enough else f"{each} simulated devices",
            "the recipe computed with JAX while it was imported, and devices are simulated or joined before that",
            "create models and arrays in functions: mw.wrap(lambda key: Model(key), ...)",
        ) from error
    join(hosts)

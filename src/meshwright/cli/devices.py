"""Devices of a verb: those at hand, or simulated ones, of one process or of several that compute together."""

import dataclasses
import os

import jax

from meshwright.errors import ConfigError
from meshwright.hardware import mesh
from meshwright.hardware.hosts import ALONE, Hosts, hosts_of, join
from meshwright.runs.run import Run

SIMULATED = 8
"""Devices simulated where there is no accelerator and neither --devices nor a mesh is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Processes of a run on several hosts. Slurm, Cloud TPU, GKE, SkyPilot, Open MPI, torchrun and Ray tell it by
    themselves."""

    coordinator: str | None = None
    """HOST:PORT of process 0, where the environment does not tell."""
    processes: int | None = None
    """Number of processes, one on each host; 1 computes alone, whatever the environment tells."""
    process: int | None = None
    """Index of this process."""

    def hosts(self) -> Hosts:
        """Returns the processes by these options, or by the environment where none is given.

        Raises ConfigError where an option is missing.
        """
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
        if self.processes < 1:
            raise ConfigError(f"--processes {self.processes}", "at least one process computes", "--processes 1")
        return Hosts("--coordinator", self.processes, self.process, self.coordinator)


def require_one_process(hosts: Hosts, verb: str, why: str) -> None:
    """Raises ConfigError where this is one of several processes: each of them would compute alone."""
    if hosts.processes > 1:
        raise ConfigError(
            f"meshwright {verb} as process {hosts.process} of {hosts.processes} ({hosts.source})", why,
            f"--processes 1, on one of the hosts: meshwright {verb} --processes 1",
        )  # fmt: skip


def start_devices(devices: int | None, run: Run, hosts: Hosts = ALONE) -> None:
    """Joins the processes; simulates this one's part of `devices` where there is no accelerator.

    devices: None takes the size of the run's mesh. Raises ConfigError where the processes cannot have equally many.
    """
    simulate_devices(devices or (run.mesh.size if run.mesh else SIMULATED), hosts)


def simulate_devices(total: int, hosts: Hosts) -> None:
    """Joins the processes; simulates this one's part of `total` devices where there is no accelerator.

    Raises ConfigError where the processes cannot have equally many.
    """
    if total < 1 or total % hosts.processes:
        raise ConfigError(
            f"{total} devices over {hosts.processes} processes", "each process has the same number, at least one",
            f"--devices {max(1, total // hosts.processes) * hosts.processes}",
        )  # fmt: skip
    try:
        mesh.prepare_host(total // hosts.processes)
    except RuntimeError as error:
        enough = jax.default_backend() != "cpu" or jax.device_count() >= total // hosts.processes
        if enough and hosts.processes == 1:
            return
        raise ConfigError(
            f"{hosts.processes} processes" if enough else f"{total // hosts.processes} simulated devices",
            "the recipe computed with JAX while it was imported, and devices are simulated or joined before that",
            "create models and arrays in functions: mw.wrap(lambda key: Model(key), ...)",
        ) from error
    join(hosts)

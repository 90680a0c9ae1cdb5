"""Devices of a verb: those at hand, or simulated ones."""

import jax

from meshwright.config import Run
from meshwright.errors import ConfigError
from meshwright.hardware import mesh

SIMULATED = 8
"""Devices simulated where there is no accelerator and neither --devices nor a mesh is given."""


def start_devices(devices: int | None, run: Run, processes: int = 1) -> None:
    """Simulates this process's part of `devices` where there is no accelerator; None takes the size of the run's mesh.

    Raises ConfigError where the processes cannot have equally many.
    """
    total = devices or (run.mesh.size if run.mesh else SIMULATED)
    if processes < 1:
        raise ConfigError(f"--processes {processes}", "at least one process trains", "--processes 1")
    if total < 1 or total % processes:
        raise ConfigError(
            f"{total} devices over {processes} processes", "each process has the same number, at least one",
            f"--devices {max(1, total // processes) * processes}",
        )  # fmt: skip
    try:
        mesh.prepare_host(total // processes)
    except RuntimeError as error:
        if jax.default_backend() != "cpu" or jax.device_count() >= total // processes:
            return
        raise ConfigError(
            f"{total // processes} simulated devices",
            "the recipe computed with JAX while it was imported, and devices can be simulated before that alone",
            "create models and arrays in functions: mw.wrap(lambda key: Model(key), ...)",
        ) from error


def initialize_distributed(coordinator: str, processes: int, process: int) -> None:
    """Joins this process to `processes` that train together. coordinator: host:port of process 0."""
    if not 0 <= process < processes:
        raise ConfigError(f"process {process} of {processes}", "processes are counted from 0", f"0 to {processes - 1}")
    jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=30)

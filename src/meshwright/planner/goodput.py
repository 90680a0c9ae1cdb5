"""Goodput of a long training: the fraction of its time that makes steps, between failures, checkpoints and restarts.

Failures come at random with a constant rate per chip. The job saves every `period` seconds of steps; a failure loses
what came after the last checkpoint, and a restart (Daly 2006, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22).
"""

import dataclasses
import math

import jax.numpy as jnp

from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target
from meshwright.planner.memory_model import sharded_elements, state_bytes
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.params import count_params

CHIP_HOURS_PER_FAILURE = float(round(54 * 24 * 16384 / 419))
"""Chip-hours between failures: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3 405B, arXiv:2407.21783,
section 3.3.4 and table 5). Other chips and clouds have their own rate."""
RESTART_MINUTES = 10.0
"""Minutes from a failure to the first step after it: failures are found and diagnosed in less than 10 minutes
(MegaScale, arXiv:2402.15627)."""
STORAGE_BANDWIDTH = 2e12
"""Bytes/s that shared storage sustains (Llama 3 405B, arXiv:2407.21783, section 3.3.1)."""


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How often chips fail, and what a failure and a checkpoint cost."""

    chip_hours_per_failure: float = CHIP_HOURS_PER_FAILURE
    restart_minutes: float = RESTART_MINUTES
    save_seconds: float | None = None
    """Seconds that a checkpoint stops the steps; None computes them: the device's copy to its host."""

    def __post_init__(self) -> None:
        for name, value, option in (
            ("chip-hours between failures", self.chip_hours_per_failure, "--failure-chip-hours 50000"),
            ("minutes of a restart", self.restart_minutes, "--restart-minutes 10"),
            ("seconds of a checkpoint", 1.0 if self.save_seconds is None else self.save_seconds, "--save-seconds 5"),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{value:g} {name}", "it must be positive", option)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Expected fraction of a training's time that makes steps, and its parts."""

    failure_seconds: float
    """Mean seconds between two failures of the whole job."""
    save_seconds: float
    """Seconds that a checkpoint stops the steps."""
    write_seconds: float
    """Seconds until a checkpoint is in storage, beside the steps: no period is shorter."""
    restart_seconds: float
    period: float
    """Seconds of steps between two checkpoints."""

    @property
    def fraction(self) -> float:
        """Steps' seconds over all seconds: Daly's complete model, exact for random failures."""
        rate = 1 / self.failure_seconds
        grown = math.exp(self.restart_seconds * rate) * math.expm1((self.period + self.save_seconds) * rate)
        return self.period * rate / grown


def daly_period(save_seconds: float, failure_seconds: float) -> float:
    """Returns the seconds of steps between checkpoints that waste least time (Daly 2006, equation 37).

    The first factor is Young's optimum, sqrt(2 save failure).
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    small = save_seconds / (2 * failure_seconds)
    young = math.sqrt(2 * save_seconds * failure_seconds)
    return young * (1 + math.sqrt(small) / 3 + small / 9) - save_seconds


def goodput(placed: PlacedRun, target: Target, reliability: Reliability) -> Goodput:
    """Returns the goodput of a placed run with the best period between checkpoints.

    A checkpoint stops the steps while devices copy their state to their hosts; the hosts write it to storage beside the
    steps.
    """
    itemsize = jnp.dtype(placed.run.training.param_dtype).itemsize
    on_device = sharded_elements(placed.layout) * itemsize + state_bytes(placed)
    whole = count_params(placed.params) * on_device / sharded_elements(placed.layout)
    chip = target.chip
    save = reliability.save_seconds
    save = on_device / chip.host_bandwidth if save is None else save
    # Replicas write one copy: the devices share it.
    write = max(whole / target.devices / chip.network_bandwidth, whole / STORAGE_BANDWIDTH)
    failure = reliability.chip_hours_per_failure * 3600 / target.chips
    period = max(daly_period(save, failure), write)
    return Goodput(failure, save, write, 60 * reliability.restart_minutes, period)

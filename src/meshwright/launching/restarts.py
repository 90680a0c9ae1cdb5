"""Policy of a supervisor: how often, and on which hosts, a run is started again."""

import dataclasses
from typing import Literal

from meshwright.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """Restarts under --supervise: after exit code 75, a crash, SIGKILL, a preemption, or a checkpoint that failed."""

    most: int = 20
    """Restarts after which the supervisor gives up."""
    backoff: float = 5.0
    """Seconds before a restart; doubled for each that follows without a step in between, up to five minutes."""
    wait: float = 300.0
    """Seconds to wait for the supervisors of the other hosts."""
    hosts: Literal["all", "left"] = "all"
    """Hosts of a restart: all of them, or those that are left after `wait`, on a mesh of fewer devices that the planner
    chooses; the batch stays the same, and the losses within float error."""

    def __post_init__(self) -> None:
        for name, least in (("most", 0), ("backoff", 0), ("wait", 1)):
            if getattr(self, name) < least:
                option = f"--restarts.{name}"
                raise ConfigError(f"{option} {getattr(self, name)}", f"it is at least {least}", f"{option} {least}")

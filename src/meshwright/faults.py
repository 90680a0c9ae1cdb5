"""Policy of a run for bad input and bad numbers: stop, or go on in a stated way."""

import dataclasses
from typing import Literal

from meshwright.errors import ConfigError

BadStep = Literal["stop", "skip", "roll_back"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """Policy for bad records and bad steps.

    Example:
        >>> mw.Faults(bad_records=0.001, bad_step="skip").most_skipped
        10
    """

    bad_records: float = 0.0
    """Largest share of records (lines, rows, text files) that may be skipped because they cannot be read; their number
    and the first of them are kept with the tokens. 0 refuses the first, with its file and line."""
    bad_step: BadStep = "stop"
    """What follows a step whose loss or gradient is not finite, or spikes: the run stops; the update is left out and
    the run goes on (skip); or the run returns to its last checkpoint and leaves out the samples of that step
    (roll_back). Batch and metrics of the step are kept in any case, and the state before the first that is not
    finite."""
    spike: float = 0.0
    """Gradient norm that counts as a spike, as a multiple of the median of the last 100 steps; 0 takes none for one.
    Its update is in the parameters when it is seen: the run stops or rolls back."""
    most_skipped: int = 10
    """Bad steps of one start of the run after which it stops whatever `bad_step` is."""

    check_every: int = 0
    """Steps between two that are taken twice, their results and all replicas compared bit by bit: it finds silent
    corruption, and takes a step's time and the memory of a second state. 0 checks none."""

    def __post_init__(self) -> None:
        checks = {
            "bad_records": (0 <= self.bad_records < 1, "a share is at least 0 and below 1", "0.001"),
            "spike": (self.spike == 0 or self.spike > 1, "it is a multiple of the median, above 1", "10"),
            "check_every": (self.check_every >= 0, "it is a number of steps", "1000"),
            "most_skipped": (self.most_skipped >= 1, "it is a number of steps, at least 1", "10"),
        }
        for name, (valid, truth, example) in checks.items():
            if not valid:
                option = f"--faults.{name.replace('_', '-')}"
                raise ConfigError(f"{option} {getattr(self, name)}", truth, f"{option} {example}")
        if self.spike and self.bad_step == "skip":
            truth = "a spike is seen when its update is in the parameters, so it cannot be left out"
            raise ConfigError("--faults.spike with --faults.bad-step skip", truth, "--faults.bad-step roll_back")

"""Policy of a run for bad input and bad numbers: stop, or go on in a stated way."""

import dataclasses
from typing import Literal

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
    (roll_back). State, batch and metrics of the step are kept in any case."""
    spike: float = 0.0
    """Gradient norm that counts as a spike, as a multiple of the median of the last 100 steps; 0 takes none for one."""
    most_skipped: int = 10
    """Bad steps after which the run stops whatever `bad_step` is."""

"""Two tiers of checkpoints: on each host's own disk, often, and in the output folder, rarely."""

import dataclasses
from typing import Annotated

from meshwright.declarations import changes
from meshwright.errors import ConfigError
from meshwright.ranges import NonNegativeInt, PositiveInt, Ranged


@dataclasses.dataclass(frozen=True)
class LocalCheckpoints(Ranged, part="local-checkpoints"):
    """Checkpoints on each host's own disk or in its memory (`/dev/shm`), besides those
    in the output folder.

    Example:
        >>> mw.LocalCheckpoints(path="/local/ssd", every=20).max_to_keep
        2
    """

    path: Annotated[str | None, changes("loop")] = None
    """Folder on each host's own disk or in its memory, such as /dev/shm;
    None keeps no such checkpoints."""
    every: Annotated[NonNegativeInt, changes("loop")] = 0
    """Steps between two of them; 0 keeps none.
    Between two, `--training.save-every` writes to the output folder."""
    max_to_keep: Annotated[PositiveInt, changes("loop")] = 2
    """Checkpoints to keep there; another has room beside them while it is written. With two, hosts
    that stopped at different steps have one in common."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is None) != (self.every == 0):
            raise ConfigError(
                f"--local-checkpoints.path {self.path} with --local-checkpoints.every {self.every}",
                "one is the place, the other the period",
                "--local-checkpoints.path /local/ssd --local-checkpoints.every 20",
            )
        if self.path is not None and "://" in self.path:
            truth, fix = (
                "every host has its own, a bucket is shared",
                "a folder on each host's disk",
            )
            raise ConfigError(
                f"--local-checkpoints.path {self.path}", truth, f"{fix}; --out may be in a bucket"
            )

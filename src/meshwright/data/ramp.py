"""Sequences of every step while the batch grows, and how many were read before it."""

import dataclasses

from meshwright.config import Training
from meshwright.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class BatchRamp:
    """Batch of each step: constant parts, and then the full batch.

    Example:
        >>> ramp = ramp_of(Training(batch=256, batch_ramp=("100=64", "200=128")))
        >>> ramp.batch(0), ramp.batch(100), ramp.batch(300), ramp.read_before(301)
        (64, 128, 256, 32256)
    """

    parts: tuple[tuple[int, int], ...]
    """Steps and sequences of each part, in order."""
    full: int
    """Sequences of all steps after them."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """All batches, in order."""
        return (*(size for _, size in self.parts), self.full)

    def batch(self, step: int) -> int:
        """Returns the sequences of the step that `step` others precede."""
        for steps, size in self.parts:
            if step < steps:
                return size
            step -= steps
        return self.full

    def read_before(self, step: int) -> int:
        """Returns the sequences of the first `step` steps: the index of the next sample."""
        read = 0
        for steps, size in self.parts:
            taken = min(steps, step)
            read, step = read + taken * size, step - taken
        return read + step * self.full


def ramp_of(training: Training) -> BatchRamp:
    """Parses the ramp of a run. Raises ConfigError for a part that is not STEPS=SEQUENCES, each at least 1."""
    parts = []
    for part in training.batch_ramp:
        steps, equals, size = part.partition("=")
        if not equals or not steps.isdigit() or not size.isdigit() or int(steps) < 1 or int(size) < 1:
            what = "a part of the ramp is STEPS=SEQUENCES, both whole numbers of at least 1"
            raise ConfigError(f"--training.batch-ramp {part}", what, f"for example 100={max(1, training.batch // 2)}")
        parts.append((int(steps), int(size)))
    return BatchRamp(tuple(parts), training.batch)

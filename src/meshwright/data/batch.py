"""Batch of sequences that one training step reads, and how many it has while the batch grows."""

import dataclasses
import functools
import itertools
from typing import Any

import jax

from meshwright.config import Training
from meshwright.errors import ConfigError

PADDING = 2**30
"""Segment of positions after the last document of a sequence; larger than any document's."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["inputs", "targets", "segments", "positions", "weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences of a step; every field is [B, T]."""

    inputs: Any
    """Tokens, int32."""
    targets: Any
    """Next tokens, int32."""
    segments: Any
    """Index of the document within the sequence, or PADDING, int32; attention does not cross
    documents."""
    positions: Any
    """Position within the document, int32."""
    weights: Any
    """Weight of each position in the loss, float32."""


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

    def sizes_of(self, first: int, last: int) -> tuple[int, ...]:
        """Returns the batch sizes of the steps from `first` to `last` (exclusive), each once."""
        starts = itertools.accumulate((steps for steps, _ in self.parts), initial=0)
        return tuple(
            dict.fromkeys(self.batch(max(start, first)) for start in starts if start < last)
        )

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


@dataclasses.dataclass(frozen=True)
class SourceSamples:
    """Samples of one source of a run's training data."""

    name: str
    samples: int
    """Samples of one pass over it."""
    share: float
    """Share of the training samples that are its own."""

    @property
    def lasts(self) -> float:
        """Samples of the training, of all sources, in which it is read once."""
        return self.samples / self.share


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Passes of a run over its shortest source of samples."""

    ramp: BatchRamp
    samples: float
    """Samples of the training, of all sources, after which the shortest source begins again."""

    def of_step(self, step: int) -> tuple[int, int]:
        """Returns the epochs of the first and the last sample of a step, the first step being 1."""
        first = self.ramp.read_before(step - 1)
        last = self.ramp.read_before(step) - 1
        return int(first // self.samples), int(last // self.samples)


def ramp_of(training: Training) -> BatchRamp:
    """Parses the ramp of a run.

    Raises ConfigError for a part that is not STEPS=SEQUENCES, each at least 1.
    """
    parts = []
    for part in training.batch_ramp:
        steps, equals, size = part.partition("=")
        if (
            not equals
            or not steps.isdigit()
            or not size.isdigit()
            or int(steps) < 1
            or int(size) < 1
        ):
            what = "a part of the ramp is STEPS=SEQUENCES, both whole numbers of at least 1"
            raise ConfigError(
                f"--training.batch-ramp {part}",
                what,
                f"for example 100={max(1, training.batch // 2)}",
            )
        parts.append((int(steps), int(size)))
    return BatchRamp(tuple(parts), training.batch)

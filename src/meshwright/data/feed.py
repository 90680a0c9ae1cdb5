"""Samples by global index, and batches on the devices that need them.

A sample is a window of T + 1 tokens. Its global index alone determines which window it is, so the
data order does not depend on the number of hosts or on the mesh. Grain shuffles, repeats and mixes
by index, and prefetches in threads.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.data.batch import PADDING, Batch, BatchRamp
from meshwright.data.tokens import TokenFile
from meshwright.errors import DataError

HELD_OUT, MOST_HELD_OUT = 0.1, 10_000_000
"""Default held-out fraction of each source, and the most tokens of it."""
_READ = 2**20
"""Tokens of text that are read at a time to count their bytes."""
_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))
_Sample = dict[str, np.ndarray]


class Samples(Protocol):
    """Samples of one source by index, each the fields of a `Batch` [T]."""

    @property
    def seq(self) -> int:
        """Tokens of a sample, T."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> _Sample: ...

    def whole(self) -> "Samples":
        """Returns the samples of all of the source, its training and held-out part together."""
        ...

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the tokens that the first `samples` samples predict, in runs of text."""
        ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `seq` + 1 tokens, `seq` apart, over the part [start, stop) of a token file."""

    file: TokenFile
    seq: int
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, (self.stop - self.start - 1) // self.seq)

    def __getitem__(self, index: int) -> _Sample:
        """Returns one window. Raises DataError for a token out of range."""
        first = self.start + int(index) * self.seq
        tokens, ends = self.file.tokens.read(first, first + self.seq + 1)
        tokens = tokens.astype(np.int32)
        if tokens.max(initial=0) >= self.file.vocab:
            at = int(tokens.argmax())
            raise DataError(
                f"token file {self.file.folder}",
                f"token {first + at} is {tokens[at]}, and the vocabulary has {self.file.vocab}",
                "tokenise again",
            )
        # Positions within this window at which its documents end.
        breaks = ends[ends <= first + self.seq] - first
        position = np.arange(self.seq)
        segments = np.searchsorted(breaks, position, side="right").astype(np.int32)
        starts = np.concatenate([[0], breaks])[segments]
        weights = np.ones(self.seq, np.float32)
        # The first token of a document cannot be predicted from the document before it.
        weights[breaks[breaks > 0] - 1] = 0.0
        places = {"segments": segments, "positions": (position - starts).astype(np.int32)}
        return {"inputs": tokens[:-1], "targets": tokens[1:], **places, "weights": weights}

    def whole(self) -> "Windows":
        """Returns the windows of all of the file."""
        return dataclasses.replace(self, start=0, stop=len(self.file.tokens))

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the tokens that the first windows predict, by document, without their ends."""
        start, stop = self.start + 1, self.start + 1 + samples * self.seq
        left = [np.zeros(0, np.int32)]
        for first in range(start, stop, _READ):
            last = min(first + _READ, stop)
            tokens, ends = self.file.tokens.read(first - 1, last)
            at = 1
            for end in ends[ends < last] - first + 1:
                yield np.concatenate([*left, tokens[at:end]])
                # The first token of a document is not predicted from the document before it.
                left, at = [], int(end) + 1
            left.append(tokens[at:])
        yield np.concatenate(left)


def held_out_border(total: int, held_out: float | None) -> int:
    """Returns how many of `total` tokens or records are trained on.

    None holds out a tenth, at most `MOST_HELD_OUT`.
    """
    if held_out is None:
        return max(held_out_border(total, HELD_OUT), total - MOST_HELD_OUT)
    return round(total * (1 - held_out))


def held_out_fraction(counts: Sequence[int], held_out: float | None) -> float | None:
    """Returns the held-out fraction that a checkpoint records.

    It is the one that earlier versions recorded unless `MOST_HELD_OUT` changes a border.
    """
    tenth = held_out is None and all(
        n - held_out_border(n, HELD_OUT) <= MOST_HELD_OUT for n in counts
    )
    return HELD_OUT if tenth else held_out


def split(
    file: TokenFile, seq: int, held_out: float | None, source: str
) -> tuple[Windows, Windows]:
    """Splits a token file into a training part and the held-out tail.

    source: what the user gave for it, in errors. Raises DataError where either part has no window.
    """
    total = len(file.tokens)
    border = held_out_border(total, held_out)
    train, rest = Windows(file, seq, 0, border), Windows(file, seq, border, total)
    if not len(train) or (held_out != 0 and not len(rest)):
        longest = (border if held_out == 0 else min(border, total - border)) - 1
        raise DataError(
            f"--seq {seq} with --data {source}",
            f"it has {total} tokens: {border} to train on and {total - border} to evaluate, "
            f"and a window takes {seq + 1}",
            f"more text, or --seq {longest}" if longest >= 1 else "more text",
        )
    return train, rest


def build_stream(windows: Sequence[Samples], weights: list[float], seed: int) -> grain.MapDataset:
    """Builds an endless dataset of samples by global index.

    Each source is reshuffled every epoch, and all are mixed by weight.
    """
    shuffled = [
        grain.MapDataset.source(part).seed(seed + number).shuffle().repeat()
        for number, part in enumerate(windows)
    ]
    return shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)


def leave_out_first(stream: Any, count: int) -> Any:
    """Returns a dataset of samples without its first `count`."""
    return _Later(stream, count) if count else stream


@dataclasses.dataclass(frozen=True)
class _Later:
    """Dataset of samples that begins later."""

    stream: Any
    first: int

    def __getitem__(self, index: int) -> _Sample:
        sample: _Sample = self.stream[self.first + index]
        return sample


class Feed:
    """Iterator over the batches of the next `steps` steps, on the devices.

    They begin at the global sample `cursor`.
    taken: steps before them, by which the ramp gives the size of each batch.  skipped: samples of
    the stream that are left out: first index and number, ascending; `cursor` does not count them.
    `wait_seconds` is the time spent waiting for data so far, in seconds.
    """

    def __init__(
        self,
        stream: Any,
        ramp: BatchRamp,
        *,
        seq: int,
        taken: int,
        cursor: int,
        steps: int,
        sharding: NamedSharding,
        skipped: tuple[tuple[int, int], ...] = (),
    ):
        self.wait_seconds = 0.0
        self.position = None
        self._step = taken
        self._ramp = ramp
        self._seq = seq
        self._sharding = sharding
        self._rows = {size: _local_rows(sharding, (size, seq)) for size in ramp.sizes}
        self._stream = stream
        self._skipped = skipped
        self._taken = taken
        self._cursor = cursor
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        batches = grain.MapDataset.range(steps).map(self._local_batch)
        self._batches: Iterator[_Sample] = iter(batches.to_iter_dataset(options))

    def _local_batch(self, number: int) -> _Sample:
        """Returns this process's rows of a batch. number: batches of this feed before it."""
        step = self._taken + int(number)
        read = self._ramp.read_before(step) - self._ramp.read_before(self._taken)
        rows = self._rows[self._ramp.batch(step)]
        return _stack([self._stream[self._index(self._cursor + read + row)] for row in rows])

    def _index(self, sample: int) -> int:
        """Returns the index in the stream of the sample
        that `sample` others precede in training."""
        for first, count in self._skipped:
            if sample >= first:
                sample += count
        return sample

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        local = next(self._batches)
        self.wait_seconds += time.perf_counter() - start
        size = self._ramp.batch(self._step)
        self._step += 1
        return _put_rows(local, self._rows[size], (size, self._seq), self._sharding)


def _stack(samples: Sequence[_Sample]) -> _Sample:
    fields = {}
    for name in _FIELDS:
        fields[name] = np.stack([sample[name] for sample in samples])
    return fields


def _local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, ...]:
    """Returns the rows of the global batch that are on this process's devices, in order."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        rows.update(range(*index[0].indices(shape[0])))  # type: ignore[index]
    return tuple(sorted(rows))


def _put_rows(
    local: _Sample, own: tuple[int, ...], shape: tuple[int, int], sharding: NamedSharding
) -> Batch:
    """Builds the global batch from this process's rows.

    local: each field, [rows of this process, T].
    """
    if sharding.is_fully_addressable:
        return Batch(**jax.device_put(local, sharding))
    fields = {}
    for name, field in local.items():
        block = functools.partial(_block, field, own, shape[0])
        fields[name] = jax.make_array_from_callback(shape, sharding, block)
    return Batch(**fields)


def _block(field: np.ndarray, own: tuple[int, ...], batch: int, index: Any) -> np.ndarray:
    """Returns the rows of a field that a device has. index: its slices of the global array."""
    rows = range(*index[0].indices(batch))
    return field[own.index(rows[0]) : own.index(rows[-1]) + 1]


def held_out_order(parts: Sequence[Samples], samples: int) -> Iterator[tuple[Samples, int]]:
    """Yields the first `samples` windows (0: all) as source and index in it.

    The sources take turns.
    """
    return itertools.islice(_in_turn(parts), samples or None)


def _in_turn(parts: Sequence[Samples]) -> Iterator[tuple[Samples, int]]:
    """Yields sample 0 of each source, then sample 1 of each that has one, and so on."""
    for index in range(max(map(len, parts), default=0)):
        for part in parts:
            if index < len(part):
                yield part, index


def held_out_batches(
    parts: Sequence[Samples], *, samples: int, batch: int, sharding: NamedSharding
) -> Iterator[Batch]:
    """Yields batches of the first `samples` held-out windows (0: all).

    The sources take turns.
    The last batch is filled up with rows of padding: their weights are 0, and they take no room
    from the text.
    """
    shape = (batch, parts[0].seq)
    rows = _local_rows(sharding, shape)
    for order in itertools.batched(held_out_order(parts, samples), batch):
        local: list[_Sample] = []
        for row in rows:
            part, i = order[min(row, len(order) - 1)]
            sample = part[i]
            if row >= len(order):
                padding = np.full_like(sample["segments"], PADDING)
                no_weights = np.zeros_like(sample["weights"])
                sample = {**sample, "segments": padding, "weights": no_weights}
            local.append(sample)
        yield _put_rows(_stack(local), rows, shape, sharding)

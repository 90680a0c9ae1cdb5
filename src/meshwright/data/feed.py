"""Samples by their global index, and batches on the devices that need them.

A sample is a window of T + 1 tokens; its number alone says which: not the number of hosts, not the mesh.
Grain shuffles, repeats and mixes by index, and reads ahead in threads.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.data.batch import Batch
from meshwright.data.tokens import TokenFile
from meshwright.errors import DataError

_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


@dataclasses.dataclass(frozen=True)
class Windows:
    """The part [start, stop) of a token file cut into windows of `seq` + 1 tokens, `seq` apart."""

    file: TokenFile
    seq: int
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, (self.stop - self.start - 1) // self.seq)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = self.start + int(index) * self.seq
        tokens = np.asarray(self.file.tokens[first : first + self.seq + 1]).astype(np.int32)
        if tokens.max(initial=0) >= self.file.vocab:
            at = int(tokens.argmax())
            raise DataError(
                f"token file {self.file.folder}",
                f"token {first + at} is {tokens[at]}, and the vocabulary has {self.file.vocab}",
                "tokenise again",
            )
        # Where the documents of this window end, as counts of its positions.
        low, high = np.searchsorted(self.file.ends, (first, first + self.seq), side="right")
        breaks = self.file.ends[low:high] - first
        position = np.arange(self.seq)
        segments = np.searchsorted(breaks, position, side="right").astype(np.int32)
        starts = np.concatenate([[0], breaks])[segments]
        weights = np.ones(self.seq, np.float32)
        # The first token of a document cannot be told from the one before it.
        weights[breaks[breaks > 0] - 1] = 0.0
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "segments": segments,
            "positions": (position - starts).astype(np.int32),
            "weights": weights,
        }


def split(file: TokenFile, seq: int, held_out: float) -> tuple[Windows, Windows]:
    """The part to train on and the held-out tail. Raises DataError where either has no whole window."""
    total = len(file.tokens)
    border = round(total * (1 - held_out))
    train, rest = Windows(file, seq, 0, border), Windows(file, seq, border, total)
    if not len(train) or (held_out and not len(rest)):
        raise DataError(
            f"sequences of {seq} tokens from {file.folder}",
            f"it has {total} tokens: {border} to train on and {total - border} held out, and a window takes {seq + 1}",
            "more text, or a smaller --seq",
        )
    return train, rest


def build_stream(windows: list[Windows], weights: list[float], seed: int) -> grain.MapDataset:
    """An endless dataset of samples by global index: each source shuffled anew every pass, mixed by weight."""
    shuffled = [
        grain.MapDataset.source(part).seed(seed + number).shuffle().repeat() for number, part in enumerate(windows)
    ]
    if len(shuffled) == 1:
        return shuffled[0]
    return grain.MapDataset.mix(shuffled, weights)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Step -> the rows of its global batch that this process holds."""

    stream: Any
    batch: int
    cursor: int
    steps: int
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        first = self.cursor + int(step) * self.batch
        samples = [self.stream[first + row] for row in self.rows]
        return {name: np.stack([sample[name] for sample in samples]) for name in _FIELDS}


class Feed:
    """Batches on the devices, from the global sample `cursor` on; `waited` is the time spent waiting, in seconds."""

    def __init__(self, stream: Any, *, batch: int, seq: int, cursor: int, steps: int, sharding: NamedSharding):
        self.waited = 0.0
        self._shape, self._sharding = (batch, seq), sharding
        rows = rows_held(sharding, self._shape)
        self._where = {row: i for i, row in enumerate(rows)}
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        steps_of = grain.MapDataset.source(_Rows(stream, batch, cursor, steps, rows))
        self._batches: Iterator[dict[str, np.ndarray]] = iter(steps_of.to_iter_dataset(ahead))

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        local = next(self._batches)
        self.waited += time.perf_counter() - start
        return put_rows(local, self._where, self._shape, self._sharding)


def rows_held(sharding: NamedSharding, shape: tuple[int, int]) -> tuple[int, ...]:
    """Rows of the global batch that lie on this process's devices, in order."""
    held: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        held.update(range(*index[0].indices(shape[0])))  # type: ignore[index]
    return tuple(sorted(held))


def put_rows(
    local: dict[str, np.ndarray], where: dict[int, int], shape: tuple[int, int], sharding: NamedSharding
) -> Batch:
    """The global batch of which this process holds the rows `local`."""
    if sharding.is_fully_addressable:
        return Batch(**jax.device_put(local, sharding))

    def place(field: np.ndarray) -> jax.Array:
        def block(index: Any) -> np.ndarray:
            rows = range(*index[0].indices(shape[0]))
            return field[where[rows[0]] : where[rows[-1]] + 1]

        return jax.make_array_from_callback(shape, sharding, block)

    return Batch(**{name: place(field) for name, field in local.items()})


def held_out_batches(parts: list[Windows], *, samples: int, batch: int, sharding: NamedSharding) -> Iterator[Batch]:
    """The first `samples` held-out windows (0: all), in turn from each source; the last batch is filled up with
    rows of weight 0."""
    total = sum(len(part) for part in parts)
    wanted = min(samples, total) if samples else total
    order = [(part, i) for i in range(max(len(p) for p in parts)) for part in parts if i < len(part)][:wanted]
    shape = (batch, parts[0].seq)
    rows = rows_held(sharding, shape)
    for first in range(0, wanted, batch):
        local: list[dict[str, np.ndarray]] = []
        for row in rows:
            part, i = order[min(first + row, wanted - 1)]
            sample = part[i]
            if first + row >= wanted:
                sample = {**sample, "weights": np.zeros_like(sample["weights"])}
            local.append(sample)
        stacked = {name: np.stack([sample[name] for sample in local]) for name in _FIELDS}
        yield put_rows(stacked, {row: i for i, row in enumerate(rows)}, shape, sharding)

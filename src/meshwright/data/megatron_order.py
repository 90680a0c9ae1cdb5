"""Megatron's order of samples: shuffled documents, shuffled samples,
and blends of several datasets.

A split of a dataset (train, valid, test) is a range of its n sequences, which Megatron calls
documents. To draw N samples of T tokens from it, with S tokens in an epoch:

    epochs E    the fewest with E S >= N T + 1 tokens
    documents   the n documents E times over, shuffled together; the last epoch is shuffled apart,
                behind the others, where it gives fewer than 80 % of an epoch's samples
    sample k    tokens [k T, (k + 1) T] of these documents, one after another: it shares a token
                with the next
    order       the samples, shuffled; those of a last epoch apart, too

Both shuffles are those of one `numpy.random.RandomState(seed)`. A blend takes, as its sample i, the
next one of the dataset d with the largest w_d max(i, 1) - c_d, where c_d samples of it were taken
before.

Megatron keeps the documents, the place of each sample and the order in files of a cache. Here a
place is computed from sums over `_EACH` documents: 4 bytes for each document of an epoch, for each
of its repetitions and for each sample are in memory, and nothing is written. Indices are int64.

Source: `gpt_dataset.py`, `blended_dataset.py`, `blended_megatron_dataset_builder.py` and
`helpers.cpp` in `megatron/core/datasets` of megatron-core 0.16. tests/golden/peers/megatron.py
writes what it computes.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.data.corpus import Source
from meshwright.data.feed import Windows
from meshwright.data.megatron import MegatronTokens, is_megatron
from meshwright.data.tokens import TokenArray, TokenFile
from meshwright.errors import ConfigError, DataError
from meshwright.trust import is_reference

_APART = 0.80
"""A last epoch that gives a smaller share of an epoch's samples is shuffled apart."""
_SURPLUS = 0.005
"""Share of samples that a dataset of a blend has besides those that its weight asks for."""
_EACH = 64
"""Documents of which one sum of tokens is kept."""
_AT_ONCE = 2**20
"""Documents whose lengths are looked up at a time; a multiple of `_EACH`."""
_BLOCK = 2**14
"""Samples of a blend between two states that are kept."""
_MOST_SEQUENCES = 2**31 - 1
"""Megatron numbers sequences with int32."""


Share = tuple[float, float]
"""Part of a dataset, from one fraction of its sequences to another."""


def parse_split(text: str) -> tuple[Share, Share | None, Share | None]:
    """Returns the ranges of train, valid and test, each as parts of a dataset;
    None for an empty one.

    text: Megatron's `--split`, up to three weights. Raises ConfigError for anything else.

    Example:
        >>> parse_split("98,2,0")
        ((0.0, 0.98), (0.98, 1.0), None)
    """
    words = text.split(",")
    numbers = [word for word in words if re.fullmatch(r"\s*[0-9]*\.?[0-9]+\.?\s*", word)]
    weights = [float(word) for word in numbers]
    if len(numbers) != len(words) or len(words) > 3 or not any(weights) or weights[0] == 0:
        truth = "it is up to three weights, of training, validation and test, the first above 0"
        raise ConfigError(f"--data.split {text}", truth, "--data.split 969,30,1")
    shares = normalised([*weights, *[0.0] * (3 - len(weights))])
    ends = list(itertools.accumulate(shares))
    train, valid, test = itertools.pairwise([0.0, *ends])
    return train, _unless_empty(valid), _unless_empty(test)


def _unless_empty(share: Share) -> Share | None:
    return share if share[1] > share[0] else None


def check_sources(sources: Sequence[Source]) -> None:
    """Raises ConfigError where a source is no Megatron dataset,
    or some have weights and others not.

    A file that is not on this host is taken for one: the hosts that train look for it again.
    """
    for source in sources:
        path = os.path.expanduser(source.path)
        is_there = os.path.exists(path) or source.path == "stdlib" or is_reference(source.path)
        if is_there and not is_megatron(source.path):
            raise ConfigError(
                f"--data {source.path} with --data.order megatron",
                "it is no Megatron dataset, of which PREFIX.bin and PREFIX.idx are there",
                "--data.order shuffled",
            )
    weights = weights_of(sources)
    if weights is not None and len(weights) < len(sources):
        without = next(source.path for source in sources if not source.is_weighted)
        raise ConfigError(
            f"--data {without} with --data.order megatron",
            "it has no weight and others have: Megatron blends datasets that all have one, or none",
            f"--data {without}=1",
        )


def weights_of(sources: Sequence[Source]) -> tuple[float, ...] | None:
    """Returns the weights of those sources that have one; None where none has."""
    weights = tuple(source.weight for source in sources if source.is_weighted)
    return weights or None


def normalised(weights: Sequence[float]) -> list[float]:
    """Returns weights over their sum, with Megatron's rounding."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def sequences_of(split: Share, sequences: int) -> range:
    """Returns the sequences of a split of a dataset that has `sequences`."""
    start, stop = split
    return range(round(start * float(sequences)), round(stop * float(sequences)))


@dataclasses.dataclass(frozen=True)
class Epochs:
    """How often a split is read to give a number of samples."""

    number: int
    last_apart: bool
    """Whether the last epoch is shuffled apart from the others."""

    @classmethod
    def of(cls, tokens: int, seq: int, samples: int | None) -> "Epochs":
        """Returns the epochs that give `samples` samples of `seq` tokens; None asks for one epoch.

        tokens: those of an epoch.
        """
        if samples is None:
            return cls(1, False)
        number = max(1, -(-(samples * seq + 1) // tokens))
        if number == 1:
            return cls(1, False)
        from_last = samples - cls.samples_before(tokens, seq, number)
        each = (tokens - 1) // seq
        return cls(number, from_last < int(_APART * each))

    @staticmethod
    def samples_before(tokens: int, seq: int, number: int) -> int:
        """Returns the samples that all epochs but the last give."""
        return ((number - 1) * tokens - 1) // seq


class _ShuffledTokens(TokenArray):
    """Tokens of a dataset's sequences in another order.

    documents: the sequences, int32.  first: number of the sequence that `lengths` begins with.
    """

    def __init__(
        self, source: MegatronTokens, documents: np.ndarray, lengths: np.ndarray, first: int
    ):
        self._source = source
        self._documents = documents
        self._lengths = lengths
        self._first = first
        sums = [np.zeros(1, np.int64)]
        for at in range(0, len(documents), _AT_ONCE):
            part = self._lengths_of(at, at + _AT_ONCE)
            sums.append(np.add.reduceat(part, np.arange(0, len(part), _EACH)))
        self._before = np.cumsum(np.concatenate(sums))
        """Tokens before document 0, _EACH, 2 _EACH, ..., and all of them."""
        super().__init__(int(self._before[-1]), source._no_blocks)

    def _lengths_of(self, at: int, stop: int) -> np.ndarray:
        """Returns the tokens of documents by their places in the order, int64."""
        return self._lengths[self._documents[at:stop] - self._first].astype(np.int64)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens [start, stop), and one past the last token of each document that ends
        in them."""
        parts = [np.zeros(0, np.int64)]
        ends = []
        for document, begin, end in self._documents_from(start):
            if begin >= stop:
                break
            first = max(start, begin)
            count = min(stop, end) - first
            if count > 0:
                parts.append(self._source.read_sequence(document, first - begin, count))
            if start < end <= stop:
                ends.append(end)
        return np.concatenate(parts), np.unique(np.array(ends, np.int64))

    def _documents_from(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yields documents in order, with their first place and one past the last,
        from that with `start` on."""
        group = int(np.searchsorted(self._before, start, side="right")) - 1
        for at in range(group * _EACH, len(self._documents), _EACH):
            lengths = self._lengths_of(at, at + _EACH)
            ends = self._before[at // _EACH] + np.cumsum(lengths)
            for place in np.flatnonzero(ends > start):
                end = int(ends[place])
                yield int(self._documents[at + place]), end - int(lengths[place]), end


@dataclasses.dataclass(frozen=True)
class MegatronSamples:
    """Samples of a split of one dataset in Megatron's order."""

    windows: Windows
    """Samples before their own shuffle, over the shuffled documents."""
    order: np.ndarray
    """Their shuffle, uint32 or int64."""
    source: TokenFile
    epochs: Epochs

    @property
    def seq(self) -> int:
        """Tokens of a sample."""
        return self.windows.seq

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns one sample, as the fields of a Batch."""
        return self.windows[int(self.order[index])]

    def whole(self) -> Windows:
        """Returns the windows of all of the dataset, in the order of its file."""
        return Windows(self.source, self.seq, 0, len(self.source.tokens))

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the tokens that the first samples predict, in runs of text."""
        for index in range(samples):
            start = int(self.order[index]) * self.seq
            yield from dataclasses.replace(self.windows, start=start).texts(1)


def samples_of(
    file: TokenFile, split: Share, *, seq: int, seed: int, samples: int | None
) -> MegatronSamples:
    """Returns the samples of a split of a dataset.

    split: of `parse_split`.
    samples: how many are asked for, of which there may be more; None asks for one epoch. Raises
    DataError where Megatron could not number the sequences, or an epoch has no sample and only one
    is read.
    """
    source = file.tokens
    assert isinstance(source, MegatronTokens)
    asked = f"Megatron's order of {file.folder}"
    if source.sequences > _MOST_SEQUENCES:
        raise DataError(
            asked,
            f"it has {source.sequences:,} sequences, and Megatron numbers at most "
            f"{_MOST_SEQUENCES:,} with int32",
            "--data.order shuffled, or several smaller datasets",
        )
    taken = sequences_of(split, source.sequences)
    lengths = source.read_lengths(taken.start, taken.stop)
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens < 2 or (samples is None and tokens <= seq):
        raise DataError(
            asked,
            f"{len(taken):,} of its {source.sequences:,} sequences are in a part of the split, "
            f"with {tokens:,} tokens, and a sample of {seq} takes {seq + 1}",
            "--data.split with a larger share for it, or --data.split 1,0,0 to evaluate nothing",
        )
    epochs = Epochs.of(tokens, seq, samples)
    state = np.random.RandomState(seed)
    sequences = np.arange(taken.start, taken.stop, dtype=np.int32)
    documents = _shuffle_documents(sequences, epochs, state)
    stream = _ShuffledTokens(source, documents, lengths, taken.start)

    windows = Windows(file._replace(tokens=stream), seq, 0, len(stream))
    border = len(windows)
    if epochs.last_apart:
        border = Epochs.samples_before(tokens, seq, epochs.number)
    order = _shuffle_samples(border, len(windows), state)
    return MegatronSamples(windows, order, file, epochs)


def _shuffle_documents(
    sequences: np.ndarray, epochs: Epochs, state: np.random.RandomState
) -> np.ndarray:
    """Returns the documents of all epochs, int32."""
    together = epochs.number - 1 if epochs.last_apart else epochs.number
    first = np.tile(sequences, together)
    state.shuffle(first)
    if not epochs.last_apart:
        return first
    last = sequences.copy()
    state.shuffle(last)
    return np.concatenate([first, last])


def _shuffle_samples(border: int, count: int, state: np.random.RandomState) -> np.ndarray:
    """Returns `count` samples, shuffled in [0, border) and in [border, count)."""
    dtype = np.uint32 if count < 2**32 - 2 else np.int64
    order = np.arange(count, dtype=dtype)
    state.shuffle(order[:border])
    if border < count:
        state.shuffle(order[border:])
    return order


class Blend:
    """Samples of several datasets by Megatron's greedy rule, from any of them on.

    weights: of the datasets, normalised.
    size: samples of the blend. The counts of each dataset are kept once in `_BLOCK` samples; those
    between are computed again.
    """

    def __init__(self, parts: Sequence[MegatronSamples], weights: Sequence[float], size: int):
        self._parts = parts
        self._weights = [float(weight) for weight in weights]
        self._size = size
        self._counts = [[0] * len(parts)]
        """Samples of each dataset before sample 0, _BLOCK, 2 _BLOCK, ...
        and after the last, as far as they are known."""
        self._lock = threading.Lock()
        self._block = functools.lru_cache(4)(self._compute_block)

    def __len__(self) -> int:
        return self._size

    def place(self, index: int) -> tuple[int, int]:
        """Returns the dataset of a sample of the blend,
        and its number among the samples of that."""
        with self._lock:
            block = index // _BLOCK
            while len(self._counts) <= block:
                self._block(len(self._counts) - 1)
            datasets, samples = self._block(block)
        return int(datasets[index % _BLOCK]), int(samples[index % _BLOCK])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns one sample, as the fields of a Batch."""
        dataset, sample = self.place(int(index))
        return self._parts[dataset][sample]

    def check(self) -> None:
        """Raises DataError where a dataset has fewer samples than the blend takes of it."""
        spare = len(self._parts)
        wanted = [weight * self._size + spare for weight in self._weights]
        if all(len(part) >= number for part, number in zip(self._parts, wanted, strict=True)):
            return
        self.place(self._size - 1)
        for part, number in zip(self._parts, self._counts[-1], strict=True):
            if number > len(part):
                raise DataError(
                    f"a blend of {self._size:,} samples in Megatron's order",
                    f"its weights take {number:,} samples of {part.source.folder}, which has "
                    f"{len(part):,}",
                    "another weight for it, or fewer --training.steps",
                )

    def _compute_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the dataset and the sample of `_BLOCK` places,
        and notes the counts after them."""
        counts = list(self._counts[block])
        first = block * _BLOCK
        size = min(_BLOCK, self._size - first)
        datasets = np.zeros(size, np.int16)
        samples = np.zeros(size, np.int64)
        for place in range(size):
            taken = max(float(first + place), 1.0)
            missing = [
                weight * taken - count for weight, count in zip(self._weights, counts, strict=True)
            ]
            chosen = missing.index(max(missing))  # the first of several
            datasets[place] = chosen
            samples[place] = counts[chosen]
            counts[chosen] += 1
        if len(self._counts) == block + 1:
            self._counts.append(counts)
        return datasets, samples


@dataclasses.dataclass(frozen=True)
class MegatronOrder:
    """Samples of one split of datasets in the order in which Megatron draws them."""

    parts: tuple[MegatronSamples, ...]
    """Samples of each dataset."""
    weights: tuple[float, ...]
    """Shares of the datasets, normalised."""
    stream: "MegatronSamples | Blend"
    """Samples of all of them by their number: `stream[i]`."""

    def fingerprint(self) -> list[Any]:
        """Returns what the order follows from besides texts, seed and split, as JSON values.

        More samples that need no further epoch leave the order as it is.
        """
        epochs = [[part.epochs.number, part.epochs.last_apart] for part in self.parts]
        return [list(self.weights), epochs]


def megatron_order(
    files: Sequence[TokenFile],
    weights: Sequence[float] | None,
    split: Share,
    *,
    seq: int,
    seed: int,
    samples: int,
) -> MegatronOrder:
    """Returns the samples of a split of datasets in the order in which Megatron draws them.

    weights: of the blend. None for datasets without weights: all samples of one epoch of each, or
    any number of samples of a single one.
    split: of `parse_split`.
    samples: how many are asked for. Raises DataError where the datasets have fewer.
    """
    shares = [1.0]
    asked: list[int | None] = [samples]
    if weights is not None:
        shares = normalised(weights)
        asked = [math.ceil(math.ceil(samples * share) * (1 + _SURPLUS)) for share in shares]
    elif len(files) > 1:
        asked = [None] * len(files)
    parts = tuple(
        samples_of(file, split, seq=seq, seed=seed, samples=number)
        for file, number in zip(files, asked, strict=True)
    )

    stream: MegatronSamples | Blend = parts[0]
    if weights is not None:
        shares = normalised(shares)
        size = sum(math.ceil(samples * share) for share in normalised(weights))
        stream = Blend(parts, shares, size)
    elif len(files) > 1:
        counts = [len(part) for part in parts]
        shares = normalised(counts)
        stream = Blend(parts, shares, min(samples, sum(counts)))
    if len(stream) < samples:
        raise DataError(
            f"{samples:,} samples of {seq} tokens in Megatron's order",
            f"without weights each dataset is read once, which gives {len(stream):,} samples",
            f"--data {files[0].folder}=1 and a weight for each other, or fewer --training.steps",
        )
    if isinstance(stream, Blend):
        stream.check()
    return MegatronOrder(parts, tuple(shares), stream)

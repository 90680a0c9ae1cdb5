"""Packing: several complete documents in each sequence, and what becomes of those that do not fit.

The documents of a token file come in groups that stay together: one document, or the chosen and
the rejected answer of a preference. Best fit, longest group first, for sequences of 10 positions
and groups of 3, 4, 5, 6 and 9:

    sequence 0   9 9 9 9 9 9 9 9 9 .
    sequence 1   6 6 6 6 6 6 4 4 4 4
    sequence 2   5 5 5 5 5 3 3 3 . .
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.data.batch import PADDING
from meshwright.data.tokens import TokenFile
from meshwright.errors import DataError
from meshwright.fine_tuning import TooLong


class Used(NamedTuple):
    """The groups of a token file that are used, and how much of each document."""

    positions: np.ndarray
    """Positions of each document: one fewer than its tokens, and fewer still if its end is cut."""
    groups: np.ndarray
    """Numbers of the groups that are used, ascending."""

    @classmethod
    def all_of(cls, file: TokenFile, group_size: int) -> "Used":
        """Returns that every group is used, uncut."""
        positions = np.diff(file.tokens.ends, prepend=0) - 1
        return cls(positions, np.arange(file.documents // group_size))

    def lengths(self, group_size: int) -> np.ndarray:
        """Returns the positions of each group."""
        return self.positions.reshape(-1, group_size).sum(1)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences of `seq` positions, each with several complete documents."""

    file: TokenFile
    answers: np.ndarray
    """1 for tokens that are answers, uint8 [tokens]."""
    seq: int
    sequences: tuple[tuple[int, ...], ...]
    """Documents of each sequence."""
    group_size: int
    used: Used

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Returns the fields of a `Batch` for one sequence, each [T].

        Its end is padding of weight 0.
        """
        fields = {
            "inputs": np.full(self.seq, self.file.tokenizer.end, np.int32),
            "targets": np.full(self.seq, self.file.tokenizer.end, np.int32),
            "segments": np.full(self.seq, PADDING, np.int32),
            "positions": np.zeros(self.seq, np.int32),
            "weights": np.zeros(self.seq, np.float32),
        }
        first = 0
        for segment, document in enumerate(self.sequences[int(index)]):
            start, stop = self._range(document)
            tokens = self.file.tokens[start:stop]
            length = stop - start - 1
            part = slice(first, first + length)
            fields["inputs"][part] = tokens[:-1]
            fields["targets"][part] = tokens[1:]
            fields["segments"][part] = segment
            fields["positions"][part] = np.arange(length)
            fields["weights"][part] = self.answers[start + 1 : stop]
            first += length
        fields["positions"][first:] = np.arange(self.seq - first)
        return fields

    def _range(self, document: int) -> tuple[int, int]:
        """Returns the first token of a document, and one past the last that is used."""
        start = document_range(self.file.tokens.ends, document)[0]
        return start, start + int(self.used.positions[document]) + 1

    def whole(self) -> "Packed":
        """Returns the sequences of all groups that are used, those for evaluation too.

        Their order is drawn.
        """
        groups = self.used.groups
        packed = pack(self.file, self.answers, self.seq, groups, self.group_size, self.used)
        return packed.shuffled()

    def shuffled(self) -> "Packed":
        """Returns the sequences in a drawn order, always the same: the first of them are a sample.

        As packed, the sequences with the longest documents come first.
        """
        order = np.random.default_rng(0).permutation(len(self.sequences))
        return dataclasses.replace(self, sequences=tuple(self.sequences[i] for i in order))

    def texts(self, samples: int) -> Iterator[np.ndarray]:
        """Yields the answers of the first sequences."""
        for documents in self.sequences[:samples]:
            for document in documents:
                start, stop = self._range(document)
                targets = self.file.tokens[start + 1 : stop]
                yield targets[self.answers[start + 1 : stop] > 0]


def document_range(ends: np.ndarray, document: int) -> tuple[int, int]:
    """Returns the first token of a document and one past its last."""
    start = int(ends[document - 1]) if document else 0
    return start, int(ends[document])


class _Sequences:
    """Sequences that are being filled, found by the positions that each has free."""

    def __init__(self, seq: int):
        self.seq = seq
        self.documents: list[list[int]] = []
        self._with_free: dict[int, list[int]] = {}
        self._free: list[int] = []
        """Numbers of free positions that some sequence has, ascending."""

    def add(self, documents: Sequence[int], length: int) -> None:
        """Adds documents to the sequence with the fewest free positions that are enough."""
        sequence, free = self._best_for(length)
        self.documents[sequence] += documents
        remaining = free - length
        if not self._with_free.get(remaining):
            bisect.insort(self._free, remaining)
        self._with_free.setdefault(remaining, []).append(sequence)

    def _best_for(self, length: int) -> tuple[int, int]:
        """Removes the best sequence for a length, or makes a new one.

        Returns its number and its free positions.
        """
        at = bisect.bisect_left(self._free, length)
        if at == len(self._free):
            self.documents.append([])
            return len(self.documents) - 1, self.seq
        free = self._free[at]
        sequence = self._with_free[free].pop()
        if not self._with_free[free]:
            self._free.pop(at)
        return sequence, free


def pack(
    file: TokenFile,
    answers: np.ndarray,
    seq: int,
    groups: Any,
    group_size: int,
    used: Used | None = None,
) -> Packed:
    """Packs groups of `group_size` documents by best fit, the longest first; deterministic.

    Every group fits in `seq` positions (`fit`).  used: None uses all of the file.
    """
    used = Used.all_of(file, group_size) if used is None else used
    lengths = used.lengths(group_size)
    sequences = _Sequences(seq)
    for group in sorted(groups, key=lambda group: (-int(lengths[group]), group)):
        documents = range(group * group_size, (group + 1) * group_size)
        sequences.add(documents, int(lengths[group]))
    packed = tuple(tuple(documents) for documents in sequences.documents)
    return Packed(file, answers, seq, packed, group_size, used)


def fit(
    file: TokenFile,
    answers: np.ndarray,
    seq: int,
    group_size: int,
    place: Callable[[int], str],
    too_long: TooLong,
) -> tuple[Used, str]:
    """Fits the groups of a token file into `seq` positions; returns what is used, and a summary.

    The summary is empty where every group fits. Where groups are truncated, the documents of a
    group share its positions: one that needs less than its share leaves the rest to the other. A
    group in which a document keeps no token of its answer is dropped: it would teach nothing.

    place: returns file and line of a group.
    Raises DataError for a group that does not fit, where that is refused.
    """
    used = Used.all_of(file, group_size)
    lengths = used.lengths(group_size)
    long = np.flatnonzero(lengths > seq)
    if not len(long):
        return used, ""
    if too_long == "refuse":
        first = int(long[0])
        longest = int(lengths.max())
        raise DataError(
            place(first),
            f"it takes {lengths[first]} positions, and a sequence has {seq}; {len(long)} of "
            f"{len(lengths)} records do not fit, the longest takes {longest}",
            f"--seq {longest}, or --finetune.too-long truncate or drop",
        )
    records = f"{len(long):,} of {len(lengths):,} records are longer than a sequence of {seq}"
    if too_long == "drop":
        return Used(used.positions, np.setdiff1d(used.groups, long)), f"{records}: dropped"
    positions, empty = _truncated(file, answers, seq, group_size, used.positions, long)
    summary = f"{records}: {len(long) - len(empty):,} cut at their end, {len(empty):,} dropped"
    if empty:
        summary += f" as no token of an answer was left, the first {place(empty[0])}"
    return Used(positions, np.setdiff1d(used.groups, empty)), summary


def _truncated(
    file: TokenFile,
    answers: np.ndarray,
    seq: int,
    group_size: int,
    positions: np.ndarray,
    long: np.ndarray,
) -> tuple[np.ndarray, list[int]]:
    """Cuts the documents of `long` groups.

    Returns the positions of all documents, and the groups that have no answer left.
    """
    positions = positions.copy()
    empty = list[int]()
    for group in long:
        documents = np.arange(group * group_size, (group + 1) * group_size)
        wanted = [int(length) for length in positions[documents]]
        positions[documents] = share_positions(wanted, seq)
        for document in documents:
            start = document_range(file.tokens.ends, document)[0]
            targets = answers[start + 1 : start + 1 + int(positions[document])]
            if not targets.any():
                empty.append(int(group))
                break
    return positions, empty


def share_positions(wanted: Sequence[int], positions: int) -> list[int]:
    """Divides `positions` between one or two documents that want more than that together.

    Example:
        >>> share_positions([10, 90], 60), share_positions([70, 90], 61), share_positions([90], 60)
        ([10, 50], [30, 31], [60])
    """
    if len(wanted) == 1:
        return [min(wanted[0], positions)]
    first, second = wanted
    first = min(first, max(positions // 2, positions - second))
    return [first, min(second, positions - first)]

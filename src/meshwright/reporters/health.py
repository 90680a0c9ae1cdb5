"""Health of the tensors of a run, by step: the file health.jsonl, written while the run trains
and read by `view`.

A line is a header, which names what the numbers of the lines after it are, or a record of a step:

    {"step": 0, "series": [["gradient norm", "blocks.query", [0, 1, 2]],
    ["gradient norm", "embed", []], ...]} {"step": 10, "values": "base64 of an int16 for each
    number"}

A number x is round(128 log2 x): 0.3 % of it are lost. Zero, infinity and NaN have numbers of their
own. Bytes of a record: 4/3 * 2 for each number, and some 40. Llama 3 405B has 126 layers of 9
tensors and 3 tensors without layers, with three figures each, and two figures of each layer: 3 *
(126 * 9 + 3) + 2 * 126 = 3663 numbers, 9.8 kB. A million steps with a record every 10 steps are
0.98 GB.

Where the file is larger than `LIMIT`, every second record
of its older half is dropped: the older, the fewer are kept.
"""

import base64
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.reporters.files import step_of_line
from meshwright.reporters.lines import Lines, open_lines

NAME = "health.jsonl"
LIMIT = 2**30
"""Bytes of the file above which older records are thinned."""
_SCALE = 128
"""Numbers of the code for a factor of two."""
_ZERO = -(2**15)
_INFINITY = 2**15 - 2
_NAN = 2**15 - 1


class Series(NamedTuple):
    """Numbers of one figure that follow each other in a record."""

    figure: str
    tensor: str
    """Path of a parameter, or name of a stack of layers."""
    layers: tuple[int, ...]
    """Layer of each number; () for one number without a layer."""

    @property
    def size(self) -> int:
        """Numbers of the series."""
        return len(self.layers) if self.layers else 1

    def place(self, number: int) -> str:
        """Returns tensor and layer of one of its numbers: `layer 3, query`."""
        if not self.layers:
            return self.tensor
        inside = self.tensor.partition(".")[2]
        layer = f"layer {self.layers[number]}"
        return f"{layer}, {inside}" if inside else layer


@dataclasses.dataclass(frozen=True)
class HealthRecord:
    """Health of one step on the host."""

    series: tuple[Series, ...]
    values: np.ndarray
    """Numbers of all series, one after another, float32."""
    bits: np.ndarray | None = None
    """Sums of the bits of parameters and optimizer state before and
    after the step, [2, arrays]; not kept."""
    names: tuple[str, ...] = ()
    """Of what each is."""
    batch: np.ndarray | None = None
    """Hashes of each part of the batch, which are not kept."""

    def items(self) -> Iterator[tuple[Series, np.ndarray]]:
        """Yields each series with its numbers."""
        start = 0
        for series in self.series:
            yield series, self.values[start : start + series.size]
            start += series.size

    def of(self, figure: str, tensor: str) -> np.ndarray:
        """Returns the numbers of a figure of a tensor or stack.
        Raises KeyError where it has none."""
        for series, values in self.items():
            if (series.figure, series.tensor) == (figure, tensor):
                return values
        raise KeyError(f"{figure} of {tensor}")

    def curves(self) -> dict[str, float]:
        """Returns a number for each series, for experiment trackers: its largest, under
        `health/FIGURE/TENSOR`."""
        return {
            f"health/{series.figure}/{series.tensor}": float(values.max())
            for series, values in self.items()
        }


def encode(values: np.ndarray) -> str:
    """Returns non-negative numbers as text, two bytes each before base64."""
    values = np.asarray(values, np.float64)
    codes = np.full(values.shape, _NAN, np.int16)
    positive = np.isfinite(values) & (values > 0)
    codes[positive] = np.round(_SCALE * np.log2(values[positive]))
    codes[values == 0] = _ZERO
    codes[np.isposinf(values)] = _INFINITY
    return base64.b64encode(codes.astype("<i2").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    """Inverts `encode`. Raises ValueError for a text that it did not write."""
    codes = np.frombuffer(base64.b64decode(text, validate=True), "<i2")
    values = np.exp2(codes / _SCALE)
    values[codes == _ZERO] = 0.0
    values[codes == _INFINITY] = np.inf
    values[codes == _NAN] = np.nan
    return values


class HealthLog:
    """Reporter that writes health.jsonl.
    A disk without room loses records: the run is not about them."""

    def __init__(self, file: Path, *, upto: int):
        """Opens the file, and drops the records of steps after `upto`,
        which a resumed run writes again."""
        self._lines: Lines = open_lines(file)
        self._lines.cut(lambda line: step_of_line(line) <= upto)
        self._step = upto
        self._series: tuple[Series, ...] = ()
        self._bytes = self._lines.size

    def write(self, step: int, values: Any) -> None:
        """Takes metrics, which are in metrics.jsonl."""

    def health(self, step: int, record: HealthRecord) -> None:
        """Appends the record of a step."""
        lines = []
        if record.series != self._series:
            self._series = record.series
            lines.append({"step": self._step, "series": record.series})
        lines.append({"step": step, "values": encode(record.values)})
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with contextlib.suppress(OSError):
            self._bytes += self._lines.write(data)
            if self._bytes > LIMIT:
                self._thin()
        self._step = step

    def _thin(self) -> None:
        """Drops every second record in the older half of the file."""
        count = sum('"values"' in line for line in self._lines.lines(0))
        keep = _EverySecond(count // 2)
        self._bytes = self._lines.thin(keep)

    def rewind(self, step: int) -> None:
        """Drops the records of steps after `step`, which are taken again."""
        self._lines.cut(lambda line: step_of_line(line) <= step)
        self._series = ()
        self._step = step

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


class _EverySecond:
    """Whether a line stays: headers, every second of the first records, and all others."""

    def __init__(self, older: int):
        self._older = older
        self._number = 0

    def __call__(self, line: str) -> bool:
        if '"values"' not in line:
            return True
        self._number += 1
        return self._number > self._older or self._number % 2 == 1


class History:
    """Records of a run in memory that does not grow with it: each series by step.

    Of more than `most` records every second is dropped, and from then on every second is taken.
    """

    def __init__(self, most: int = 400):
        self.steps: list[int] = []
        self.values: list[np.ndarray] = []
        self.series: tuple[Series, ...] = ()
        self._most = most
        self._every = 1
        self._count = 0

    def read(self, records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Adds the records of lines of the file; a header with other series begins anew.

        Returns the number of lines that are not of this form, by what they are.
        """
        damaged = 0
        for record in records:
            try:
                if "series" in record:
                    self._begin(record["series"])
                else:
                    self._add(int(record["step"]), record["values"])
            except (KeyError, TypeError, ValueError):
                damaged += 1
        return {f"damaged lines of {NAME}": damaged} if damaged else {}

    def _begin(self, described: Any) -> None:
        series = tuple(
            Series(str(f), str(t), tuple(map(int, layers))) for f, t, layers in described
        )
        if series != self.series:
            self.series = series
            self.steps = []
            self.values = []
            self._every = 1
            self._count = 0

    def _add(self, step: int, text: str) -> None:
        values = decode(text)
        self._count += 1
        known = sum(series.size for series in self.series) == values.size
        # What is not finite is kept, however many records there are.
        if not known or (self._count % self._every and np.isfinite(values).all()):
            return
        self.steps.append(step)
        self.values.append(values.astype(np.float32))
        if len(self.steps) > self._most:
            self.steps = self.steps[::2]
            self.values = self.values[::2]
            self._every *= 2

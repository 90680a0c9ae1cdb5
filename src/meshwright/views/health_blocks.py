"""Blocks of a run's page with the health of its tensors: layers by steps as a picture, the first outlier marked."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.reporters.health import History, Series
from meshwright.reporters.outliers import Baseline
from meshwright.step.health import FIGURES
from meshwright.views.blocks import Block, Text
from meshwright.views.charts import Drawing

_COLUMNS = 160
"""Most columns of a picture; each is the furthest of the records that it stands for."""


class Outlier(NamedTuple):
    """The first number of a run that is beyond its history."""

    step: int
    series: Series
    number: int
    """Index of the number in the series."""
    value: float
    factor: float
    """The number over its median before."""

    def __str__(self) -> str:
        where = self.series.tensor
        if self.series.layers:
            where += f" of layer {self.series.layers[self.number]}"
        how = f"{self.factor:.3g} times its median" if math.isfinite(self.value) else "not finite"
        return f"step {self.step:,}: {self.series.figure} of {where} is {self.value:.3g}, {how}"


def health_blocks(history: History) -> list[Block]:
    """Returns a picture for each figure of health; nothing for a run without records."""
    if not history.steps:
        return []
    factors, first = _measured(history)
    blocks: list[Block] = []
    if first is not None:
        blocks.append(Text([f"First outlier: {first}."], tone="bad"))
    for figure in FIGURES:
        rows = _rows_of(history.series, figure)
        if rows:
            blocks.append(_picture(history, figure, rows, factors, first))
    return blocks


def _measured(history: History) -> tuple[np.ndarray, Outlier | None]:
    """Returns each number of each record over its median before, and the first outlier."""
    baseline = Baseline()
    first: Outlier | None = None
    factors = []
    for step, values in zip(history.steps, history.values, strict=True):
        ratios = baseline.factors(values)
        ratios[~np.isfinite(values)] = np.nan
        factors.append(ratios)
        if first is None:
            deviations = np.abs(baseline.deviations(values))
            position = int(np.argmax(deviations))
            if deviations[position] > 1:
                series, index = _place(history.series, position)
                value = float(values[position])
                first = Outlier(step, series, index, value, float(ratios[position]))
        baseline.add(values)
    return np.stack(factors), first


def _place(series: Sequence[Series], position: int) -> tuple[Series, int]:
    """Returns the series of a number of a record, and its index there."""
    for each in series:
        if position < each.size:
            return each, position
        position -= each.size
    raise IndexError(position)


def _rows_of(series: Sequence[Series], figure: str) -> dict[str, list[int]]:
    """Returns the positions of a figure's numbers in a record, by layer or tensor outside the layers."""
    rows: dict[str, list[int]] = {}
    outside: dict[str, list[int]] = {}
    start = 0
    for each in series:
        if each.figure == figure:
            for index in range(each.size):
                if each.layers:
                    rows.setdefault(f"layer {each.layers[index]}", []).append(start + index)
                else:
                    outside[each.tensor] = [start]
        start += each.size
    by_layer = dict(sorted(rows.items(), key=lambda row: int(row[0].removeprefix("layer "))))
    return {**by_layer, **outside}


def _picture(
    history: History,
    figure: str,
    rows: dict[str, list[int]],
    factors: np.ndarray,
    first: Outlier | None,
) -> Drawing:
    """Returns layers by steps. Each cell is the factor furthest from 1 among the layer's tensors and the records."""
    columns = min(_COLUMNS, len(history.steps))
    parts = np.array_split(np.arange(len(history.steps)), columns)
    cells: list[list[float | None]] = []
    for positions in rows.values():
        cells.append([_furthest(factors[np.ix_(part, positions)]) for part in parts])
    data: dict[str, Any] = {
        "rows": list(rows),
        "steps": [history.steps[part[-1]] for part in parts],
        "cells": cells,
        "first": None,
    }
    if first is not None and first.series.figure == figure:
        row = first.series.tensor
        if first.series.layers:
            row = f"layer {first.series.layers[first.number]}"
        column = next(i for i, part in enumerate(parts) if history.steps[part[-1]] >= first.step)
        data["first"] = {"row": list(rows).index(row), "column": column, "text": str(first)}
    declared = FIGURES[figure]
    note = f"{declared.formula}. {declared.summary} Colour: factor over the median of the records before."
    return Drawing("Health", data, title=figure[:1].upper() + figure[1:], note=note)


def _furthest(factors: np.ndarray) -> float | None:
    """Returns the factor furthest from 1; None where one is not finite."""
    if not np.isfinite(factors).all():
        return None
    logs = np.abs(np.log(np.maximum(factors, 1e-300)))
    return float(f"{factors.flat[int(np.argmax(logs))]:.3g}")

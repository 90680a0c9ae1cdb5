"""Blocks of a run's page with the health of its tensors: norms per layer,
and layers by steps as pictures."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.reporters.health import History, Series
from meshwright.reporters.outliers import FEWEST, Baseline
from meshwright.step.health import FIGURES, GRADIENT, PARAMETER, UPDATE
from meshwright.views.blocks import Block, Cell, Column, Table, Text, Tone
from meshwright.views.charts import Drawing

_COLUMNS = 160
"""Most columns of a picture; each is the furthest of the records that it stands for."""
_ROWS = 16
"""Layers of the table that a page shows before a button shows more."""
_NOT_FINITE = "not finite"
_RELATIVE = "update / parameter"
"""Column of the relative update."""
_NORMS = (GRADIENT, PARAMETER, UPDATE)
"""Figures that are square roots of sums: that of a layer is of the sum over its tensors."""


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
    """Returns the norms per layer of the last record, and a picture for each figure;
    nothing without records."""
    if not history.steps:
        return []
    factors, first = _measured(history)
    blocks: list[Block] = []
    if first is not None:
        blocks.append(Text([f"First outlier: {first}."], tone="bad"))
    blocks.append(_norms(history))
    if len(history.steps) <= FEWEST and first is None:
        blocks.append(Text([_too_few(history)], tone="faded"))
        return blocks
    for figure in FIGURES:
        rows = _rows_of(history.series, figure)
        if rows:
            blocks.append(_picture(history, figure, rows, factors, first))
    return blocks


def _too_few(history: History) -> str:
    """Returns why there are no pictures of few records."""
    number = len(history.steps)
    records = "1 record" if number == 1 else f"{number} records"
    return (
        f"Pictures of layers by steps compare each number with its median in {FEWEST} records "
        f"before, and this run has {records} so far (--training.health-every)."
    )


def _norms(history: History) -> Table:
    """Returns the figures of each layer, and of each tensor outside the layers,
    in the last record."""
    values = history.values[-1].astype(np.float64)
    by_figure = {}
    for figure in FIGURES:
        layers = _rows_of(history.series, figure)
        if layers:
            by_figure[figure] = {
                layer: _combined(figure, values[np.array(positions)])
                for layer, positions in layers.items()
            }
    if PARAMETER in by_figure and UPDATE in by_figure:
        by_figure[_RELATIVE] = _ratios(by_figure[UPDATE], by_figure[PARAMETER])
    columns = [Column("layer"), *(Column(figure, "number") for figure in by_figure)]
    rows: list[list[Cell]] = []
    tones: list[Tone] = []
    for layer in dict.fromkeys(layer for numbers in by_figure.values() for layer in numbers):
        numbers = [by_layer.get(layer) for by_layer in by_figure.values()]
        cells: list[Cell] = [_cell(number) for number in numbers]
        rows.append([layer, *cells])
        tones.append("bad" if _NOT_FINITE in cells else "")
    title = f"Norms per layer, step {history.steps[-1]:,}"
    note = "Of all tensors of a layer together, in the last record."
    return Table(columns, rows, tones=tones, title=title, note=note, shown=_ROWS)


def _ratios(over: dict[str, float], under: dict[str, float]) -> dict[str, float]:
    """Returns the quotients of two figures, of the layers that have both."""
    return {
        layer: over[layer] / number for layer, number in under.items() if number and layer in over
    }


def _cell(number: float | None) -> Cell:
    if number is None or math.isfinite(number):
        return number
    return _NOT_FINITE


def _combined(figure: str, numbers: np.ndarray) -> float:
    """Returns a figure of several tensors: the norm of all of them, else the largest."""
    if figure in _NORMS:
        return float(np.sqrt(np.sum(numbers**2)))
    return float(np.max(numbers))


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
    """Returns the positions of a figure's numbers in a record,
    by layer or tensor outside the layers."""
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
    """Returns layers by steps. Each cell is the factor furthest
    from 1 among the layer's tensors and the records."""
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
    note = (
        f"{declared.formula}. {declared.summary} Colour: factor over the median of the records "
        "before."
    )
    return Drawing("Health", data, title=figure[:1].upper() + figure[1:], note=note)


def _furthest(factors: np.ndarray) -> float | None:
    """Returns the factor furthest from 1; None where one is not finite."""
    if not np.isfinite(factors).all():
        return None
    logs = np.abs(np.log(np.maximum(factors, 1e-300)))
    return float(f"{factors.flat[int(np.argmax(logs))]:.3g}")

"""Rule of outliers: by it a run knows a step beyond its own history,
and a page marks the first outlier.

For each number x of a step, with the same number in the last `WINDOW` steps:

    m = median of ln x
    s = 1.4826 * median of |ln x - m|   (a normal deviation, of which half may be outliers)
    x is an outlier where |ln x - m| > max(spreads * s, ln factor)

They are `SPREADS` and `FACTOR`, or less for numbers that change little from step to step.
Logarithms make a fall of a norm as visible as its growth. The median and the spread of `FEWEST`
steps at least are needed. A number that is not finite is always an outlier, and one that is zero
where it was not before.
"""

import numpy as np

WINDOW = 100
FEWEST = 50
SPREADS = 12.0
FACTOR = 4.0
_REFRESHED = 5
"""Steps after which median and spread are computed again."""
_LOG_OF_ZERO = -200.0
"""Below the logarithm of every float32."""


class Baseline:
    """History of the numbers of steps, in logarithms."""

    def __init__(
        self, factors: np.ndarray | float = FACTOR, spreads: np.ndarray | float = SPREADS
    ) -> None:
        """factors, spreads: of each number, or of all."""
        self._spreads = spreads
        self._least = np.log(factors)
        self._rows = np.zeros((0, 0))
        self._count = 0
        self._median = np.zeros(0)
        self._spread = np.zeros(0)

    def deviations(self, values: np.ndarray) -> np.ndarray:
        """Returns by how much each number is beyond its history, as a multiple of the limit;
        above 1 is an outlier.

        The sign is that of the change. Numbers that are not finite have infinity.
        """
        values = np.asarray(values, np.float64)
        found = np.zeros(values.shape)
        if self._count >= FEWEST and values.size == self._median.size:
            logs = _logs(values)
            limit = np.maximum(self._spreads * self._spread, self._least)
            found = (logs - self._median) / limit
            # What was zero before has no history.
            found[self._median == _LOG_OF_ZERO] = 0.0
        found[~np.isfinite(values)] = np.inf
        return found

    def factors(self, values: np.ndarray) -> np.ndarray:
        """Returns each number over its median, 1 where that is not known."""
        if self._count < FEWEST or np.size(values) != self._median.size:
            return np.ones(np.shape(values))
        ratios = np.exp(np.clip(_logs(np.asarray(values, np.float64)) - self._median, -300, 300))
        ratios[self._median == _LOG_OF_ZERO] = 1.0
        return ratios

    def add(self, values: np.ndarray) -> None:
        """Takes the numbers of a step into the history."""
        values = np.asarray(values, np.float64)
        if self._rows.shape[1] != values.size:
            self._rows = np.zeros((WINDOW, values.size))
            self._count = 0
        if not np.isfinite(values).all():
            return
        self._rows[self._count % WINDOW] = _logs(values)
        self._count += 1
        if self._count >= FEWEST and (self._count - FEWEST) % _REFRESHED == 0:
            rows = self._rows[: min(self._count, WINDOW)]
            self._median = np.median(rows, axis=0)
            self._spread = 1.4826 * np.median(np.abs(rows - self._median), axis=0)


def _logs(values: np.ndarray) -> np.ndarray:
    """Returns natural logarithms, with a number of its own for zero."""
    logs = np.full(values.shape, _LOG_OF_ZERO)
    positive = np.isfinite(values) & (values > 0)
    logs[positive] = np.log(values[positive])
    return logs

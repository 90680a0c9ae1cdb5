"""Metrics of a running training, and where they are written."""

from typing import Protocol

Values = dict[str, float]
"""Metrics of one step, by name: `loss`, `gradient norm`, `learning rate`, `tokens/s`, `MFU`, `held-out loss`, ..."""


class Reporter(Protocol):
    """Destination of metrics. Anything with these two methods is one.

    Further methods are called where a reporter has them: `rewind(step)` when the run returns to an earlier step,
    `sample(step, text)` with text from the model, and `keep_page(page)` at the end, with a function that writes the
    run's page and returns its file.
    """

    def write(self, step: int, values: Values) -> None:
        """Takes the metrics of a step; called on process 0 only, in the order of the steps."""
        ...

    def close(self) -> None:
        """Called once, at the end of the run or when it stops."""
        ...

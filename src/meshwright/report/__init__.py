"""What a run says of itself, and where to."""

from typing import Protocol

Values = dict[str, float]


class Reporter(Protocol):
    """Takes the values of a step; each destination is one."""

    def write(self, step: int, values: Values) -> None: ...
    def close(self) -> None: ...

"""Options of reading text, and the display of its progress."""

from typing import NamedTuple, Protocol


class Progress(Protocol):
    """Display of a tokenisation that is under way."""

    def update(self, label: str, read: float, size: float, files: tuple[int, int], tokens: int) -> None:
        """Takes bytes read of those there are (0: not known), files read of those there are, and tokens written."""
        ...

    def write(self, text: str) -> None:
        """Takes a line for the user."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...


class Reading(NamedTuple):
    """Options of reading text."""

    text_field: str = "text"
    bad_records: float = 0.0
    progress: Progress | None = None

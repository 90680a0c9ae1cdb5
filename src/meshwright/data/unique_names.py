"""Objects of a JSON text that have a name twice: JSON parsers take the last value, however the names are spelled."""

from typing import Any


class RepeatedNameError(ValueError):
    """Name that an object has twice."""

    def __init__(self, name: str):
        super().__init__(f"an object in it has {name!r} twice")
        self.name = name


def unique_object(pairs: list[tuple[str, Any]], names: set[str] | None = None) -> dict[str, Any]:
    """Returns an object. Raises RepeatedNameError for one of `names` (None: any) that it has twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen and (names is None or name in names):
                raise RepeatedNameError(name)
            seen.add(name)
    return value

"""Documents from a function outside the package (`--data module:attribute`)."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.data.records import Records, place_of
from meshwright.errors import DataError, describe_failure


@dataclasses.dataclass(frozen=True)
class FunctionDocuments:
    """Documents from a callable `() -> Iterable[str]` outside the package."""

    name: str
    """Name in `data.paths`: `module:attribute` or `FILE.py:attribute`."""
    function: Callable[[], Iterable[str]]

    def read(self, records: Records) -> Iterator[str]:
        """Yields the documents of one call from the position of `records` on.

        Raises DataError where the call fails or an item is not a string.
        """
        number, skip = 0, records.number
        try:
            for number, text in enumerate(self.function(), 1):
                if number <= skip:
                    continue
                records.number = number
                if not isinstance(text, str):
                    raise DataError(
                        f"--data {self.name}",
                        f"its document {number} is of type {type(text).__name__}",
                        "yield strings",
                    )
                document = records.text(text, place_of(self.name, "document", number))
                if document:
                    yield document
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"--data {self.name}",
                f"after {number} document(s) it {describe_failure(error)}",
                "correct the function",
            ) from error
        records.check()

    def fingerprint(self) -> list[str]:
        """Returns the name, and the callable's `fingerprint` attribute or the hash of the file that defines it.

        Raises DataError where it has neither, such as an instance of a class.
        """
        own: Any = getattr(self.function, "fingerprint", None)
        if own is not None:
            return [self.name, str(own() if callable(own) else own)]
        try:
            file = inspect.getsourcefile(self.function)
            code = Path(file or "").read_bytes()
        except (TypeError, OSError) as error:
            raise DataError(
                f"--data {self.name}",
                f"an object of type {type(self.function).__name__} has no source file whose change would be noticed",
                "give it an attribute `fingerprint`: a text that changes when the documents do",
            ) from error
        return [self.name, hashlib.sha256(code).hexdigest()]

    def size(self) -> tuple[int, int]:
        """Returns zeros: the call alone tells."""
        return 0, 0

    def __str__(self) -> str:
        return self.name

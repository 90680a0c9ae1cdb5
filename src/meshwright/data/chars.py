"""Tokenizer over characters."""

import dataclasses
import json
from collections.abc import Iterable

import numpy as np

from meshwright.errors import DataError


@dataclasses.dataclass(frozen=True)
class Chars:
    """Tokenizer over the characters of the training text; one more token ends a document."""

    letters: str
    """Characters in order of their code points."""

    @property
    def vocab(self) -> int:
        """Number of characters, and one."""
        return len(self.letters) + 1

    @property
    def end(self) -> int:
        """Token after the last character."""
        return len(self.letters)

    @property
    def begin(self) -> tuple[int, ...]:
        """No tokens."""
        return ()

    def encode(self, text: str) -> np.ndarray:
        """Returns the index of every character. Raises DataError for one that the vocabulary does not have."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = np.frombuffer(self.letters.encode("utf-32-le", "surrogatepass"), np.uint32)
        index = np.searchsorted(known, codes).clip(max=len(known) - 1)
        unknown = np.flatnonzero(known[index] != codes)
        if unknown.size:
            at = int(unknown[0])
            raise DataError(
                f"encoding text with {len(self.letters)} characters",
                f"character {at} is {text[at]!r}, which the vocabulary does not have",
                "--data.tokenizer bytes, or text with these characters only",
            )
        return index.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the characters of `tokens`."""
        return "".join(self.letters[t] for t in tokens if t < len(self.letters))

    def to_json(self) -> str:
        """Returns the kind and the characters."""
        return json.dumps({"kind": "chars", "letters": self.letters})

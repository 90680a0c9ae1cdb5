"""Tokenizers: bytes, characters, or a subword vocabulary of the `tokenizers` library."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from meshwright.documents import parse_json
from meshwright.errors import DataError

END = "<|end|>"


class Tokenizer(Protocol):
    """Encoder from text to tokens, and decoder back."""

    @property
    def vocab(self) -> int:
        """Vocabulary size."""
        ...

    @property
    def end(self) -> int:
        """Token that ends a document; one of the `vocab` tokens."""
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens that a document begins with; most vocabularies have none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, int32 [tokens]."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`."""
        ...

    def to_json(self) -> str:
        """Returns the JSON from which `tokenizer_from_json` builds the tokenizer again."""
        ...


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Tokenizer over UTF-8 bytes; token 256 ends a document."""

    vocab: int = 257
    end: int = 256
    begin: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Returns `{"kind": "bytes"}`."""
        return json.dumps({"kind": "bytes"})


def with_begin(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens of a document's text after those that a document begins with, where it has not got them.

    A chat template writes them into its text.
    """
    begin = np.array(tokenizer.begin, np.int32)
    return tokens if np.array_equal(tokens[: len(begin)], begin) else np.concatenate([begin, tokens])


def tokenizer_from_json(text: str) -> Tokenizer:
    """Builds the tokenizer that `to_json` described. Raises DataError where `text` is not a tokenizer."""
    try:
        config = parse_json(text)
    except ValueError as error:
        raise DataError("reading a tokenizer", f"not JSON: {error}", "the tokenizer.json of a run") from error
    kind = config.get("kind") if isinstance(config, dict) else None
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        from meshwright.data.chars import Chars

        letters = config.get("letters")
        if not isinstance(letters, str) or not letters or any(a >= b for a, b in itertools.pairwise(letters)):
            raise DataError(
                "reading a tokenizer", "its letters are no characters in order", "the tokenizer.json of a run"
            )
        return Chars(letters)
    from meshwright.data.subwords import Subwords  # loaded for files of the `tokenizers` library

    return Subwords(text)

"""Tokenizers: bytes, characters, or a subword vocabulary of the `tokenizers` library."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import tokenizers

from meshwright.documents import parse_json
from meshwright.errors import DataError

END = "<|end|>"
_GAPS = 10_000
"""Numbers without a token that a vocabulary may have, in addition to one for each token."""


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

    def encode(self, text: str) -> np.ndarray:
        """Returns the UTF-8 bytes of `text`."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Returns `{"kind": "bytes"}`."""
        return json.dumps({"kind": "bytes"})


class Subwords:
    """Subword tokenizer of the `tokenizers` library (Hugging Face's tokenizer.json)."""

    _ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>")

    def __init__(self, text: str):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError("reading a tokenizer", f"{error}", "a tokenizer.json of the tokenizers library") from error
        ends = [i for name in self._ENDS if (i := self._tokenizer.token_to_id(name)) is not None]
        if not ends:
            raise DataError(
                "a tokenizer that separates documents",
                f"its vocabulary has none of {', '.join(self._ENDS)}",
                f"add {END} as a special token",
            )
        self.end = ends[0]
        ids = self._tokenizer.get_vocab().values()
        self.vocab = max(ids) + 1
        # Some models have a few numbers without a token; an embedding has a row for each.
        if self.vocab > 2 * len(ids) + _GAPS:
            raise DataError(
                "reading a tokenizer",
                f"its {len(ids):,} tokens have numbers up to {self.vocab - 1:,}, and an embedding has a row for each",
                "a tokenizer whose tokens are numbered without gaps",
            )

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, without special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; padding of the vocabulary is left out."""
        return str(self._tokenizer.decode([t for t in tokens if t < self.vocab]))

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return str(self._tokenizer.to_str())


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
    return Subwords(text)

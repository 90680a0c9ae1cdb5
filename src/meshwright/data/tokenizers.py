"""Tokenizers: bytes, characters, or a subword vocabulary of the `tokenizers` library."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

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
        self.vocab = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, without special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; padding of the vocabulary is left out."""
        return str(self._tokenizer.decode([t for t in tokens if t < self.vocab]))

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return str(self._tokenizer.to_str())


def build_tokenizer(spec: str, documents: Iterator[str]) -> Tokenizer:
    """Builds the tokenizer `spec`: `bytes`, `chars` or `bpe:SIZE` (both learned from `documents`), or a file."""
    if spec == "bytes":
        return Bytes()
    if spec == "chars":
        from meshwright.data.chars import Chars  # loaded where it is asked for

        letters: set[str] = set()
        for text in documents:
            letters.update(text)
        return Chars("".join(sorted(letters)))
    if spec.startswith("bpe:"):
        if not spec[4:].isdigit():
            raise DataError(f"tokenizer {spec!r}", f"{spec[4:]!r} is not a number of tokens", "bpe:4096")
        from meshwright.data.bpe import train_bpe  # loaded where a vocabulary is learned

        return train_bpe(documents, int(spec[4:]))
    if not Path(spec).is_file():
        raise DataError(
            f"tokenizer {spec!r}", "no such file, and no known kind", "bytes, chars, bpe:SIZE or a tokenizer.json"
        )
    return tokenizer_from_json(Path(spec).read_text(encoding="utf-8"))


def tokenizer_from_json(text: str) -> Tokenizer:
    """Builds the tokenizer that `to_json` described. Raises DataError where `text` is not a tokenizer."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise DataError("reading a tokenizer", f"not JSON: {error}", "the tokenizer.json of a run") from error
    kind = config.get("kind") if isinstance(config, dict) else None
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        from meshwright.data.chars import Chars

        return Chars(config["letters"])
    return Subwords(text)

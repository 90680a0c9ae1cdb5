"""Tokenizers as `--data.tokenizer` names them.

Bytes, characters, or a subword vocabulary of the `tokenizers` library.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from meshwright.data.subwords import Subwords, train_bpe
from meshwright.data.vocabularies import MERGES, VOCAB, check_known, read_pair
from meshwright.documents import LARGE, fix_of, parse_document, read_text
from meshwright.errors import DataError, by_class, reason_of
from meshwright.storage.attempts import is_file
from meshwright.storage.paths import in_bucket, path_of


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

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text."""
        return list(map(self.encode, texts))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`."""
        ...

    def to_json(self) -> str:
        """Returns the JSON from which `tokenizer_from_json` builds the tokenizer again."""
        ...


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
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


@dataclasses.dataclass(frozen=True)
class Chars(Tokenizer):
    """Tokenizer over the characters of the training text.

    The token after the last character ends a document.
    """

    letters: str
    """Characters in order of their code points."""
    begin: tuple[int, ...] = ()

    @property
    def vocab(self) -> int:
        """Number of characters plus one."""
        return len(self.letters) + 1

    @property
    def end(self) -> int:
        """Number of characters."""
        return len(self.letters)

    def encode(self, text: str) -> np.ndarray:
        """Returns the index of every character.

        Raises DataError for one that the vocabulary does not have.
        """
        codes, known = (
            np.frombuffer(t.encode("utf-32-le", "surrogatepass"), np.uint32)
            for t in (text, self.letters)
        )
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


def with_begin(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens of a document after `tokenizer.begin`, which is not added twice.

    A chat template writes these tokens into its text.
    """
    begin = np.array(tokenizer.begin, np.int32)
    return (
        tokens if np.array_equal(tokens[: len(begin)], begin) else np.concatenate([begin, tokens])
    )


def tokenizer_from_json(text: str) -> Tokenizer:
    """Builds the tokenizer that `to_json` described.

    Raises DataError where `text` is not a tokenizer.
    """
    asked, fix = "reading a tokenizer", "the tokenizer.json of a run"
    try:
        config = parse_document(text)
    except ValueError as error:
        raise DataError(asked, f"not JSON: {error}", fix) from error
    kind = config.get("kind") if isinstance(config, dict) else None
    if kind == "bytes":
        return Bytes()
    if kind == "chars":
        letters = config.get("letters")
        if (
            not isinstance(letters, str)
            or not letters
            or any(a >= b for a, b in itertools.pairwise(letters))
        ):
            raise DataError(asked, "its letters are no characters in order", fix)
        return Chars(letters)
    return Subwords(text)


def is_learned(spec: str) -> bool:
    """Whether the tokenizer `spec` is learned from text."""
    return spec == "chars" or spec.startswith("bpe:")


def build_tokenizer(spec: str, documents: Iterable[str] = ()) -> Tokenizer:
    """Builds the tokenizer `spec`.

    `bytes`; `chars` or `bpe:SIZE`, both learned from `documents`; or a file.
    """
    if spec == "bytes":
        return Bytes()
    if spec == "chars":
        return Chars("".join(sorted(set(itertools.chain.from_iterable(documents)))))
    asked = f"tokenizer {spec!r}"
    if spec.startswith("bpe:"):
        if not spec[4:].isdecimal() or len(spec) > 14 or int(spec[4:]) >= 2**31:
            raise DataError(asked, f"{spec[4:]!r} is not a number of tokens below 2^31", "bpe:4096")
        return train_bpe(documents, int(spec[4:]))
    if not in_bucket(spec):
        check_known(asked, path_of(spec))
    if not (path_of(spec).is_file() if in_bucket(spec) else is_file(spec)):
        raise DataError(
            asked, "no such file, and no known kind", "bytes, chars, bpe:SIZE or a tokenizer.json"
        )
    file = path_of(spec)
    if file.name in (VOCAB, MERGES) and not in_bucket(spec):
        return Subwords(read_pair(file))
    try:
        return tokenizer_from_json(read_text(file, LARGE))
    except (OSError, ValueError) as error:
        fix = fix_of(error, "a tokenizer.json")
        refusal = DataError(asked, f"it cannot be read: {reason_of(error)}", fix)
        raise by_class(error, refusal) from error
    except DataError as error:
        raise DataError(asked, f"{error.asked}: {error.truth}", error.fix) from error


def spec_identity(spec: str) -> str:
    """Returns a tokenizer that is not learned as JSON.

    Neither the name of its file nor white space in it matters.
    """
    return build_tokenizer(spec).to_json() if spec == "bytes" or is_file(spec) else spec

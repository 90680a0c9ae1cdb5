"""Tokenizer over a subword vocabulary of the `tokenizers` library."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tokenizers

from meshwright.data.long_texts import LONG, split_text
from meshwright.data.tokenizers import END
from meshwright.errors import DataError

_GAPS = 10_000
"""Numbers without a token that a vocabulary may have, in addition to one for each token."""


class Subwords:
    """Subword tokenizer of the `tokenizers` library (Hugging Face's tokenizer.json)."""

    # In order: GPT-OSS has <|endoftext|>, and <|end|> after a message.
    _ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]", "</s>", END)  # noqa: RUF001

    def __init__(self, text: str):
        self._tokenizer = _called("reading a tokenizer", tokenizers.Tokenizer.from_str, text)
        # A file may ask for texts that are cut or filled up to some length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Gemma's </s> is a word of HTML, and no special token.
        special = {added.content for added in self._tokenizer.get_added_tokens_decoder().values() if added.special}
        names = sorted(self._ENDS, key=lambda name: name not in special)
        ends = [i for name in names if (i := self._tokenizer.token_to_id(name)) is not None]
        if not ends:
            raise DataError(
                "a tokenizer that separates documents",
                f"its vocabulary has none of {', '.join(self._ENDS)}",
                f"add {END} as a special token",
            )
        self.end, self.begin = ends[0], self._first_tokens()
        self._drops = self._has_gaps()
        ids = self._tokenizer.get_vocab().values()
        self.vocab = max(ids) + 1
        # Some models have a few numbers without a token; an embedding has a row for each.
        if self.vocab > 2 * len(ids) + _GAPS:
            raise DataError(
                "reading a tokenizer",
                f"its {len(ids):,} tokens have numbers up to {self.vocab - 1:,}, and an embedding has a row for each",
                "a tokenizer whose tokens are numbered without gaps",
            )

    def _has_gaps(self) -> bool:
        """Whether the library leaves out letters in silence: BPE without a token for those that it does not know."""
        model = self._tokenizer.model
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None or model.byte_fallback:
            return False
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return any(self._tokenizer.token_to_id(letter) is None for letter in letters)

    def _first_tokens(self) -> tuple[int, ...]:
        """Tokens that the file's post-processor puts before a text."""
        call = self._tokenizer.encode
        text, whole = (_called("reading a tokenizer", call, "a", add_special_tokens=a).ids for a in (False, True))
        places = (i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return tuple(whole[: next(places, 0)])

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, without special tokens. Raises DataError for half a surrogate pair."""
        check_unicode(text)
        if len(text) > LONG:
            return np.concatenate([self._encode(part) for part in split_text(text, self.to_json())])
        return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        encoded = _called("encoding a text", self._tokenizer.encode, text, add_special_tokens=False)
        if self._drops:
            self._check_whole(text, encoded.offsets)
        return np.array(encoded.ids, np.int32)

    def _check_whole(self, text: str, offsets: list[tuple[int, int]]) -> None:
        """Raises DataError for a character that is in none of the tokens, which lie at `offsets`."""
        normalizer, end = self._tokenizer.normalizer, 0
        for first, last in [*sorted(offsets), (len(text), len(text))]:
            for at in range(end, first):
                if (normalizer.normalize_str(text[at]) if normalizer is not None else text[at]).strip():
                    raise DataError(
                        "encoding a text",
                        f"character {at + 1} is {text[at]!r}, which the vocabulary does not have, and it has no token "
                        "for what it does not have: the library would leave the character out",
                        "another tokenizer, or text with its characters only",
                    )
            end = max(end, last)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; padding of the vocabulary is left out."""
        return str(_called("decoding tokens", self._tokenizer.decode, [t for t in tokens if t < self.vocab]))

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return str(self._tokenizer.to_str())


def _called(asked: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls the library. Raises DataError where it raises, a bare Exception or a panic of Rust, which is none."""
    try:
        return call(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            asked, f"the tokenizers library: {error}", "another tokenizer.json, or a repaired one"
        ) from error


def check_unicode(text: str) -> None:
    """Raises DataError for a text with half a surrogate pair, which JSON can name and no UTF-8 file has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            "encoding a text", f"character {error.start} is {text[error.start]!r}, half of a surrogate pair",
            "a text without it, as errors='replace' decodes one",
        ) from error  # fmt: skip

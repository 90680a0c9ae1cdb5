"""Subword tokenizers of the `tokenizers` library.

They are read from a file, or are byte-level BPE learned from text.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from meshwright.errors import DataError, by_class, reason_of

END = "<|end|>"
"""Token that ends a document in a learned vocabulary."""
# In order: GPT-OSS has <|endoftext|>, and <|end|> after a message.
_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "<eos>",
    "[EOS]",
    "</s>",
    END,
)
_GAPS = 10_000
"""Numbers without a token that a vocabulary may have, in addition to one for each token."""
LONG = 2**20
"""Characters of a text from which on it is encoded in parts, and of each part."""
_PARTS = 8
"""Parts of a long text that are encoded together."""
_COST = 170
"""Bytes of memory that the library takes for each byte encoded in one piece, measured with 56 MB of
text."""
_BORDER = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
"""Place between two words for every tokenizer of `is_separable`."""


class Subwords:
    """Subword tokenizer of the `tokenizers` library (Hugging Face's tokenizer.json)."""

    def __init__(self, text: str):
        self._tokenizer = called("reading a tokenizer", tokenizers.Tokenizer.from_str, text)
        # A file may ask for texts that are cut or filled up to some length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Gemma's </s> is a word of HTML, not a special token.
        special = {
            added.content
            for added in self._tokenizer.get_added_tokens_decoder().values()
            if added.special
        }
        names = sorted(_ENDS, key=lambda name: name not in special)
        ends = [i for name in names if (i := self._tokenizer.token_to_id(name)) is not None]
        if not ends:
            raise DataError(
                "a tokenizer that separates documents",
                f"its vocabulary has none of {', '.join(_ENDS)}",
                f"add {END} as a special token",
            )
        self.end, self.begin = ends[0], self._first_tokens()
        self._drops = self._drops_letters()
        ids = self._tokenizer.get_vocab().values()
        self.vocab = max(ids) + 1
        # Some models have a few numbers without a token; an embedding has a row for each.
        if self.vocab > 2 * len(ids) + _GAPS:
            raise DataError(
                "reading a tokenizer",
                f"its {len(ids):,} tokens have numbers up to {self.vocab - 1:,}, and an embedding "
                f"has a row for each",
                "a tokenizer whose tokens are numbered without gaps",
            )

    def _drops_letters(self) -> bool:
        """Whether the library omits unknown letters silently: BPE without an unknown token."""
        model = self._tokenizer.model
        if (
            not isinstance(model, tokenizers.models.BPE)
            or model.unk_token is not None
            or model.byte_fallback
        ):
            return False
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return any(self._tokenizer.token_to_id(letter) is None for letter in letters)

    def _first_tokens(self) -> tuple[int, ...]:
        """Tokens that the file's post-processor puts before a text."""
        call = self._tokenizer.encode
        text, whole = (
            called("reading a tokenizer", call, "a", add_special_tokens=a).ids
            for a in (False, True)
        )
        places = (i for i in range(len(whole)) if whole[i : i + len(text)] == text)
        return tuple(whole[: next(places, 0)])

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of `text`, without special tokens.

        Raises DataError for half a surrogate pair.
        """
        check_unicode(text)
        parts = split_text(text, self.to_json()) if len(text) > LONG else [text]
        groups = itertools.batched(parts, _PARTS)
        return np.concatenate([tokens for group in groups for tokens in self._encode(group)])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, which the library computes on all cores."""
        if max(map(len, texts), default=0) > LONG:
            return [self.encode(text) for text in texts]
        return self._encode(texts)

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of `text` and the first character of each."""
        encoded = called("encoding a text", self._tokenizer.encode, text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(
            [start for start, _ in encoded.offsets], np.int64
        )

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        call = (
            self._tokenizer.encode_batch if self._drops else self._tokenizer.encode_batch_fast
        )  # without offsets
        encoded = called("encoding a text", call, list(texts), add_special_tokens=False)
        if self._drops:
            for text, one in zip(texts, encoded, strict=True):
                self._check_complete(text, one.offsets)
        return [np.array(one.ids, np.int32) for one in encoded]

    def _check_complete(self, text: str, offsets: list[tuple[int, int]]) -> None:
        """Raises DataError for a character that no token covers."""
        normalizer, end = self._tokenizer.normalizer, 0
        for first, last in [*sorted(offsets), (len(text), len(text))]:
            for at in range(end, first):
                if (
                    normalizer.normalize_str(text[at]) if normalizer is not None else text[at]
                ).strip():
                    raise DataError(
                        "encoding a text",
                        f"character {at + 1} is {text[at]!r}, which the vocabulary does not have, "
                        f"and it has no token "
                        "for what it does not have: the library would leave the character out",
                        "another tokenizer, or text with its characters only",
                    )
            end = max(end, last)

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`; padding of the vocabulary is left out."""
        return str(
            called("decoding tokens", self._tokenizer.decode, [t for t in tokens if t < self.vocab])
        )

    def text_of(self, token: int) -> str:
        """Returns the text of an added token, which is always encoded as that token.

        Empty for other tokens.
        """
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return "" if added is None else str(added.content)

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return str(self._tokenizer.to_str())


def called(
    asked: str,
    call: Callable[..., Any],
    *args: Any,
    fix: str = "another tokenizer.json, or a repaired one",
    **options: Any,
) -> Any:
    """Calls the library.

    Raises DataError where it raises: a bare Exception, or a panic of Rust, which is not one.
    """
    try:
        return call(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise by_class(
            error, DataError(asked, f"the tokenizers library: {reason_of(error)}", fix)
        ) from error


def check_unicode(text: str) -> None:
    """Raises DataError for a text with half a surrogate pair.

    JSON can write one; UTF-8 cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        truth = f"character {error.start} is {text[error.start]!r}, half of a surrogate pair"
        raise DataError(
            "encoding a text", truth, "a text without it, as errors='replace' decodes one"
        ) from error


def train_bpe(documents: Iterable[str], size: int) -> Subwords:
    """Trains a byte-level BPE vocabulary of at most `size` tokens.

    Sennrich et al. 2016, arXiv:1508.07909.
    """
    if size < 257:
        raise DataError(
            f"bpe:{size}", "256 bytes and the end of a document take 257 tokens", "bpe:257 or more"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return Subwords(tokenizer.to_str())


def is_separable(description: str) -> bool:
    """Whether a tokenizer.json encodes the two sides of a `_BORDER` independently.

    True where byte-level words are found first, by an expression that takes one space and the
    letters behind it for a word, as those of GPT-2, Llama 3 and Qwen do, and nothing before that
    looks across.
    """
    config: dict[str, Any] = json.loads(description)
    outer = config.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    words = [part for part in parts if part.get("type") == "ByteLevel"]
    cuts = [part for part in parts if part.get("type") == "Split"]
    known = all(
        part.get("type") in ("ByteLevel", "Digits")
        or (
            part.get("type") == "Split"
            and "\\s+(?!\\S)" in part.get("pattern", {}).get("Regex", "")
        )
        for part in parts
    )
    normalizer = (config.get("normalizer") or {"type": "NFC"}).get("type")
    across = any(
        token.get("lstrip") or token.get("rstrip") or re.search(r"\S\s|\s\S|^\s$", token["content"])
        for token in config["added_tokens"]
    )
    regex = len(cuts) == 1 or any(part.get("use_regex") for part in words)
    prefix = any(part.get("add_prefix_space") for part in words)
    return bool(words) and known and regex and not prefix and normalizer == "NFC" and not across


def split_text(text: str, description: str) -> Iterator[str]:
    """Yields parts of a long text that encode to the same tokens.

    This bounds the library's memory.
    Raises DataError where the tokenizer needs the text in one piece and this machine has no memory
    for that.
    """
    if not is_separable(description):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if len(text) * _COST > memory:
            raise DataError(
                f"encoding a document of {len(text):,} characters",
                f"this tokenizer takes it in one piece, at about {_COST} bytes each: "
                f"{len(text) * _COST / 2**30:.0f} "
                f"GiB, and the machine has {memory / 2**30:.0f} GiB",
                "several documents, as lines of JSON",
            )
        yield text
        return
    start = 0
    while start < len(text):
        border = _BORDER.search(text, start + LONG)
        end = border.start() if border else len(text)
        yield text[start:end]
        start = end

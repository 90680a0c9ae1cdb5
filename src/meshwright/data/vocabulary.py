"""Vocabularies: tokenizers by the name that `--data.tokenizer` takes, learned from text or read from a file."""

import os
from collections.abc import Iterator
from pathlib import Path

from meshwright.data.local import local_data
from meshwright.data.tokenizers import Bytes, Tokenizer, tokenizer_from_json
from meshwright.data.tokens import is_token_file, load_corpus, parse_source
from meshwright.documents import LARGE, read_text
from meshwright.errors import DataError
from meshwright.storage.paths import in_bucket, path_of


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
        if not spec[4:].isdecimal() or len(spec) > 14 or int(spec[4:]) >= 2**31:
            raise DataError(f"tokenizer {spec!r}", f"{spec[4:]!r} is not a number of tokens below 2^31", "bpe:4096")
        from meshwright.data.bpe import train_bpe  # loaded where a vocabulary is learned

        return train_bpe(documents, int(spec[4:]))
    if not (path_of(spec).is_file() if in_bucket(spec) else os.path.isfile(spec)):
        raise DataError(
            f"tokenizer {spec!r}", "no such file, and no known kind", "bytes, chars, bpe:SIZE or a tokenizer.json"
        )
    try:
        return tokenizer_from_json(read_text(path_of(spec), LARGE))
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer {spec!r}", f"it cannot be read: {error}", "a tokenizer.json") from error
    except DataError as error:
        raise DataError(f"tokenizer {spec!r}", f"{error.asked}: {error.truth}", error.fix) from error


def is_learned(spec: str) -> bool:
    """Whether the tokenizer `spec` is learned from text."""
    return spec == "chars" or spec.startswith("bpe:")


def vocab_of_corpus(
    paths: tuple[str, ...], spec: str, cache: Path, bad_records: float = 0.0, text_field: str = "text"
) -> int:
    """Returns the vocabulary size of `load_corpus`; reads text only where the tokenizer is learned from it."""
    paths, spec = local_data(paths, spec, cache)
    if not any(is_token_file(parse_source(path).path) for path in paths):
        if spec == "bytes":
            return Bytes().vocab
        if os.path.isfile(spec):
            return build_tokenizer(spec, iter(())).vocab
    return load_corpus(paths, spec, cache, bad_records=bad_records, text_field=text_field).vocab

"""Long documents in parts that encode to the tokens of the whole.

The `tokenizers` library takes about 170 bytes of memory for each byte that it encodes at once: 8.5 GB for 50 MB.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from meshwright.errors import DataError

LONG = 2**20
"""Characters of a part, at least; a shorter text is not split."""
_COST = 170
"""Bytes of memory for a character that is encoded in one piece, measured with a text of 56 MB."""
_BORDER = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
"""Place between two words for every tokenizer of `is_separable`."""


def is_separable(description: str) -> bool:
    """Whether a tokenizer.json encodes the two sides of a `_BORDER` independently.

    That holds where byte-level words are found first, by an expression that takes one space and the letters behind it
    for a word, as those of GPT-2, Llama 3 and Qwen do, and nothing before that looks across.
    """
    config: dict[str, Any] = json.loads(description)
    outer = config.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    words = [part for part in parts if part.get("type") == "ByteLevel"]
    cuts = [part for part in parts if part.get("type") == "Split"]
    known = all(
        part.get("type") in ("ByteLevel", "Digits")
        or (part.get("type") == "Split" and "\\s+(?!\\S)" in part.get("pattern", {}).get("Regex", ""))
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
    """Yields parts of a long text, whose tokens one after another are those of the text.

    Raises DataError where the tokenizer needs the whole at once and this machine has no memory for that.
    """
    if not is_separable(description):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if len(text) * _COST > memory:
            raise DataError(
                f"encoding a document of {len(text):,} characters",
                f"this tokenizer takes it in one piece, at about {_COST} bytes each: {len(text) * _COST / 2**30:.0f} "
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

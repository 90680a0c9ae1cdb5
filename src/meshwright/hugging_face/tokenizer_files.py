"""Tokenizers of runs as the files that `transformers` reads."""

import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from meshwright.data.subwords import END
from meshwright.data.tokenizers import Bytes, Chars, Tokenizer, tokenizer_from_json
from meshwright.documents import LARGE, read_text
from meshwright.hugging_face.folder import CHAT_TEMPLATE, TOKENIZER_FILES
from meshwright.storage.writing import copy_file, write_text


def write_tokenizer(file: Path, kept: Path, out: Path) -> int | None:
    """Writes the tokenizer of a run into a Hugging Face folder;
    returns the token that ends a document.

    file: tokenizer.json of the run.
    kept: folder with the files that the model came with, which are copied where the run still has
    their tokenizer, so that its chat template and special tokens come along. A run without a
    tokenizer writes those of `kept`.
    """
    if not file.is_file() or _same(file, kept / "tokenizer.json"):
        for name in TOKENIZER_FILES:
            if (kept / name).is_file():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(kept / name, out / name)
        return tokenizer_from_json(read_text(file, LARGE)).end if file.is_file() else None
    if (kept / CHAT_TEMPLATE).is_file() and not (kept / "tokenizer.json").is_file():
        copy_file(kept / CHAT_TEMPLATE, out / CHAT_TEMPLATE)  # chosen for this tokenizer
    own = tokenizer_from_json(read_text(file, LARGE))
    text = published_text(own)
    write_text(out / "tokenizer.json", text)
    end = tokenizers.Tokenizer.from_str(text).id_to_token(own.end)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    write_text(out / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
    return own.end


def published_text(tokenizer: Tokenizer) -> str:
    """Returns a tokenizer as the tokenizer.json that other programs read."""
    if isinstance(tokenizer, Bytes):
        return str(_bytes_tokenizer().to_str(pretty=True))
    if isinstance(tokenizer, Chars):
        return str(_chars_tokenizer(tokenizer.letters).to_str(pretty=True))
    return tokenizer.to_json()


def _same(file: Path, kept: Path) -> bool:
    if not kept.is_file():
        return False
    texts = [read_text(path, LARGE) for path in (file, kept)]
    return (
        texts[0] == texts[1]
        or tokenizer_from_json(texts[0]).to_json() == tokenizer_from_json(texts[1]).to_json()
    )


def _bytes_tokenizer() -> tokenizers.Tokenizer:
    """Returns a vocabulary of the 256 bytes by their value, and the end of a document."""
    # GPT-2's table of printable characters: bytes that print stand
    # for themselves, the others follow from 256 on.
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {byte: chr(byte) for byte in printing} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
    vocab = {letters[byte]: byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def _chars_tokenizer(letters: str) -> tokenizers.Tokenizer:
    """Returns a vocabulary of characters by their order, and the end of a document."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return tokenizer

"""Vocabularies that are not a tokenizer.json.

Says which a folder has, and what makes a tokenizer.json of it.
`vocab.json` with `merges.txt` is byte-level BPE, and is read. How a text is divided before the
merges is not in the two
files: the class in tokenizer_config.json, or the model type in config.json, names it.
"""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from meshwright.data.subwords import called
from meshwright.documents import LARGE, check_inside, fix_of, read_json, read_text
from meshwright.errors import DataError, by_class, reason_of

VOCAB, MERGES = "vocab.json", "merges.txt"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Expression with which the tokenizer of Qwen2 divides a text (`transformers`, models/qwen2)."""
_CLASSES = {"GPT2Tokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}
_TYPES = {
    "gpt2": "gpt2",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen2",
}
_MAKE = (
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of `transformers`, which "
    "writes tokenizer.json"
)
_FOREIGN = {
    "tokenizer.model": (
        f"a vocabulary of SentencePiece; {_MAKE} (it needs `sentencepiece` and `protobuf`, and "
        f"the tokenizer_config.json of "
        "the model: without its tokenizer_class a text is divided otherwise)"
    ),
    "tekken.json": (
        "a vocabulary of mistral-common; tokenizer.json of the same model on the hub, or "
        "`transformers.integrations.mistral.convert_tekken_tokenizer(FILE).save_pretrained(FOLDER)`"
    ),
}
"""Vocabularies that are not read: what each is, and what makes a tokenizer.json."""


def tokenizer_file(folder: Path) -> Path:
    """Returns the file of a folder's tokenizer.

    It is tokenizer.json, or vocab.json if there is only that, with merges.txt.
    """
    whole = folder / "tokenizer.json"
    if not whole.is_file() and (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return folder / VOCAB
    return whole


def check_known(asked: str, file: Path) -> None:
    """Raises DataError for a vocabulary of a kind that is not read.

    It is `file` itself, or in the folder where `file` should be.
    """
    if file.name in _FOREIGN and file.is_file():
        what, fix = _FOREIGN[file.name].split("; ", 1)
        raise DataError(asked, f"{file.name} is {what}, not a tokenizer.json", fix)
    folder = file if file.is_dir() else file.parent
    there = [name for name in _FOREIGN if (folder / name).is_file()]
    if not file.is_file() and (file.is_dir() or file.name == "tokenizer.json") and there:
        what, fix = _FOREIGN[there[0]].split("; ", 1)
        truth = f"{folder} has no tokenizer.json; it has {there[0]}, {what}"
        raise DataError(asked, truth, fix)


def read_pair(vocab: Path) -> str:
    """Returns the tokenizer.json of a vocab.json and the merges.txt beside it.

    Raises DataError where one is missing or damaged, or neither configuration names how texts are
    divided.
    """
    folder = vocab.parent
    asked = f"the tokenizer of {folder}"
    try:
        check_inside(folder, [folder / VOCAB, folder / MERGES])
        tokens = {
            str(token): int(number) for token, number in read_json(folder / VOCAB, LARGE).items()
        }
        lines = read_text(folder / MERGES, LARGE).split("\n")
        config = _optional(folder / "tokenizer_config.json")
        described = _optional(folder / "config.json")
        added = _optional(folder / "added_tokens.json")
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        truth = f"{VOCAB} and {MERGES} cannot be read: {reason_of(error)}"
        raise by_class(error, DataError(asked, truth, fix_of(error, _MAKE))) from error
    kind = _division(asked, config, described)
    merges = _pairs(asked, lines)
    model: Any = called(asked, models.BPE, vocab=tokens, merges=merges, fix=_MAKE)
    tokenizer = tokenizers.Tokenizer(model)
    called(asked, _add_tokens, tokenizer, config, added, fix=_MAKE)
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(config.get("add_prefix_space")), use_regex=kind == "gpt2"
    )
    tokenizer.pre_tokenizer = byte_level
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        divide = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([divide, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _division(asked: str, config: dict[str, Any], described: dict[str, Any]) -> str:
    """Returns how a text is divided before the merges, `gpt2` or `qwen2`.

    config: tokenizer_config.json.  described: config.json.  Raises DataError for another tokenizer.
    """
    kind = _CLASSES.get(str(config.get("tokenizer_class")).removesuffix("Fast"))
    if kind is None and "tokenizer_class" not in config:
        kind = _TYPES.get(str(described.get("model_type")))
    if kind is None:
        named = config.get("tokenizer_class") or described.get("model_type")
        truth = (
            f"{VOCAB} and {MERGES} do not say how a text is divided, and that of {named!r} is not "
            "known"
        )
        raise DataError(asked, truth, _MAKE)
    return kind


def _pairs(asked: str, lines: list[str]) -> list[tuple[str, str]]:
    """Returns the merges in the lines of merges.txt.

    Raises DataError for a line that is not a pair.
    """
    pairs = []
    for line in lines:
        if not line or line.startswith("#version"):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            truth = f"{MERGES} has the line {line!r:.80}, which is not a pair"
            raise DataError(asked, truth, _MAKE)
        pairs.append((parts[0], parts[1]))
    return pairs


def _optional(file: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; empty where there is no such file."""
    return dict(read_json(file)) if file.is_file() else {}


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, config: dict[str, Any], added: dict[str, Any]
) -> None:
    """Adds the tokens that the files name besides the vocabulary, in the order of their numbers.

    Raises ValueError for one whose number the library would not give it.
    """
    rows: dict[int, tuple[str, dict[str, Any]]] = {
        int(number): (text, {"special": True}) for text, number in added.items()
    }
    for number, row in (config.get("added_tokens_decoder") or {}).items():
        flags = {
            name: bool(row.get(name)) for name in ("special", "lstrip", "rstrip", "normalized")
        }
        rows[int(number)] = (str(row["content"]), flags)
    for number, (text, flags) in sorted(rows.items()):
        tokenizer.add_tokens([AddedToken(text, **flags)])
        if tokenizer.token_to_id(text) != number:
            raise ValueError(f"token {text!r} has number {number}, which is not the next one")
    for name in ("<|endoftext|>",):
        if tokenizer.token_to_id(name) is not None and not rows:
            tokenizer.add_special_tokens([name])

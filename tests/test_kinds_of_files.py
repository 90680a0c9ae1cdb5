"""What a folder or a file is: data and what lies beside it, pointers, GGUF, wrapped weights, vocabularies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from meshwright.data.chat import read_chat_template, read_end_tokens
from meshwright.data.chat_files import find_chat_files, read_records
from meshwright.data.readers import read_documents
from meshwright.data.sources import Records, open_source
from meshwright.data.tokenizers import build_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.hugging_face.config_fields import read_fields
from meshwright.hugging_face.hub import find_folder
from meshwright.hugging_face.safetensors_files import check_unwrapped, find_files, read_header

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
)
GGUF = b"GGUF\x03\0\0\0" + bytes(200)

FOLDERS: dict[str, tuple[str, str]] = {
    "a data set of the hub": (
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet data/validation-00000-of-00001.parquet README.md "
        "LICENSE .gitattributes wikitext.py dataset_infos.json",
    ),
    "splits as folders": ("train/a.jsonl", "test/a.jsonl dev/a.jsonl"),
    "splits as names": ("train.jsonl.zst", "valid.jsonl.zst test.jsonl.zst"),
    "data without the word train": ("a.jsonl b.txt", "eval.jsonl"),
    "a split alone": ("test/a.jsonl test/b.jsonl", ""),
    "a training set named after a test": ("latest.jsonl contest.jsonl", ""),
    "books beside scripts": ("b/one.txt two.txt", "clean.py notes.md LICENSE.txt requirements.txt"),
    "code": ("a.py pkg/test_a.py doc.md", "README.md LICENSE pkg/__pycache__/a.py .venv/b.py"),
    "a notebook": ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt work.ipynb"),
    "hidden": ("a.txt", ".git/b.txt .cache/huggingface/c.jsonl .hidden.txt"),
}
"""Files that are taken of a folder, and those that are left out."""


def _fill(folder: Path, names: str) -> None:
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


@pytest.mark.parametrize("row", FOLDERS)
def test_of_a_folder_the_data_is_taken_and_the_rest_is_said(row: str, tmp_path: Path) -> None:
    taken, left = FOLDERS[row]
    _fill(tmp_path, f"{taken} {left}")
    source: Any = open_source(str(tmp_path))
    assert sorted(str(f.relative_to(tmp_path)) for f in source.files) == sorted(taken.split())
    assert source.note.startswith(f"{len(taken.split())} file")
    assert bool(left) == ("left out: none" not in source.note)


def test_folders_of_conversations_follow_the_same_rule(tmp_path: Path) -> None:
    _fill(tmp_path, "data/train.jsonl data/test.jsonl .cache/x.jsonl README.md config.json")
    found = find_chat_files(str(tmp_path))
    assert [file.name for file in found.files] == ["train.jsonl"]
    assert "1 of the split test (1 .jsonl)" in found.note


def _text(file: Path) -> Any:
    return list(read_documents(open_source(str(file)), Records("")))


def _chat(file: Path) -> Any:
    return list(read_records([file]))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "text": ("a.txt", _text),
    "lines": ("a.jsonl", _text),
    "compressed lines": ("a.jsonl.gz", _text),
    "a table": ("a.parquet", _text),
    "conversations": ("a.jsonl", _chat),
    "an array of conversations": ("a.json", _chat),
    "a table of conversations": ("a.parquet", _chat),
    "a tokenizer": ("tokenizer.json", lambda file: build_tokenizer(str(file))),
    "a vocabulary": ("vocab.json", lambda file: build_tokenizer(str(file))),
    "a chat template": ("chat_template.jinja", lambda file: read_chat_template(file.parent)),
    "settings of generation": ("generation_config.json", lambda file: read_end_tokens(file.parent)),
    "a configuration": ("config.json", lambda file: read_fields(file.parent)),
    "weights": ("model.safetensors", read_header),
    "an index": ("model.safetensors.index.json", lambda file: find_files(file.parent)),
}


@pytest.mark.parametrize("row", READERS)
def test_every_reader_names_a_pointer_and_gguf(row: str, tmp_path: Path) -> None:
    name, read = READERS[row]
    for content, says in ((POINTER, "git-lfs pointer(.|\n)*fix: .*git lfs pull"), (GGUF, "GGUF")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MeshwrightError, match=says):
            read(tmp_path / name)


def test_a_gguf_file_is_named_where_a_model_or_data_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    for call in (
        lambda: find_folder(f"hf:{tmp_path}/m.gguf", weights=True),
        lambda: find_files(tmp_path),
        lambda: open_source(f"{tmp_path}/m.gguf"),
        lambda: build_tokenizer(f"{tmp_path}/m.gguf"),
    ):
        with pytest.raises(MeshwrightError, match="GGUF"):
            call()


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("module.", "DistributedDataParallel"),
        ("_orig_mod.", "torch.compile"),
        ("_orig_mod.module.", "DistributedDataParallel"),
        ("base_model.model.", "PEFT"),
        ("model.layers.0._checkpoint_wrapped_module.", "activation checkpointing"),
    ],
)
def test_names_of_wrappers_are_named(prefix: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"{prefix}norm.weight": np.zeros(2, np.float32)}, file)
    with pytest.raises(MeshwrightError, match=f"saved from inside .*{says}"):
        check_unwrapped(tmp_path, read_header(file))


def test_a_sound_folder_is_not_to_be_downloaded(tmp_path: Path) -> None:
    tensor = {"w": np.zeros(2, np.float32)}
    save_file(tensor, tmp_path / "weights.safetensors")
    with pytest.raises(MeshwrightError, match=r"fix: .*mv .*weights\.safetensors"):
        find_files(tmp_path)
    index = {"weight_map": {"w": "model-00001-of-00003.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensor, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(MeshwrightError, match="index is of other files: replace"):
        find_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tokenizer.model", "SentencePiece(.|\n)*fix: .*save_pretrained"),
        ("tekken.json", "mistral-common(.|\n)*fix: .*tokenizer.json"),
    ],
)
def test_other_vocabularies_are_named_with_what_converts_them(
    name: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"{}")
    for spec in (tmp_path / name, tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(MeshwrightError, match=says):
            build_tokenizer(str(spec))


def test_a_vocabulary_and_its_merges_are_read(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    with pytest.raises(MeshwrightError, match="do not say how a text is divided"):
        build_tokenizer(str(tmp_path / "vocab.json"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    own = build_tokenizer(str(tmp_path / "vocab.json"))
    model: Any = models.BPE(vocab=vocab, merges=[("h", "e")])
    expected = tokenizers.Tokenizer(model)
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.decoder = decoders.ByteLevel()
    text = "he said: the 12  apples' é"
    assert own.encode(text).tolist() == expected.encode(text).ids
    assert own.decode(own.encode(text)) == text
    assert own.end == vocab["<|endoftext|>"]

"""Checkpoints of `torch.distributed.checkpoint`: read without torch and without running their pickles."""

import json
import math
import os
import pickle
import pickletools
import shutil
import subprocess
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from drawn import draw, read

import meshwright as mw
from meshwright.checkpoint.other_programs import import_torch_checkpoint
from meshwright.errors import ConfigError, MeshwrightError, WeightsError
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.pickled_data import Call, Named, read_pickled
from meshwright.hugging_face.safetensors_files import DTYPES, SafetensorsFile
from meshwright.hugging_face.torch_checkpoints import (
    METADATA,
    is_torch_checkpoint,
    read_chunk,
    read_metadata,
)

ABOUT, FILES = read("distributed-checkpoint")


def folder_of(folder: Path, dtype: str = "float32") -> Path:
    """Writes the checkpoint that torch saved, and the config.json of its model."""
    assert (hf_models.PEERS / "distributed_checkpoint.py").is_file()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        if name.startswith(f"{dtype}/"):
            (folder / name.removeprefix(f"{dtype}/")).write_bytes(content.tobytes())
    config = {**ABOUT["config"], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("largest_file", [10**9, 2000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_torchtitan_is_the_model_of_hugging_face(
    dtype: str, largest_file: int, tmp_path: Path
) -> None:
    """Chunks of two processes, split by rows, by columns and replicated; rotary pairs in Hugging Face's order."""
    source = folder_of(tmp_path / "dcp", dtype)
    done = import_torch_checkpoint(source, tmp_path / "out", largest_file=largest_file)
    assert done.tensors == len(ABOUT["tensors"]) == 21
    assert done.parameters == sum(map(math.prod, ABOUT["tensors"].values())) and done.dtype == dtype
    assert "6 tensors of the training" in done.notes[0]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (largest_file == 2000)
    found = {}
    for file in files:
        opened = SafetensorsFile(file)
        found |= {name: opened.tensor(name) for name in opened.entries}
    assert found.keys() == ABOUT["tensors"].keys()
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    for name, shape in ABOUT["tensors"].items():
        expected = draw(name, tuple(shape)).astype(DTYPES[code])
        assert found[name].tobytes() == expected.tobytes(), name
    assert open_folder(str(tmp_path / "out")).dtype == dtype


def test_the_verb_converts_it_and_says_what_is_missing(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dcp")
    assert is_torch_checkpoint(source)
    with pytest.raises(ConfigError, match="has one step"):
        mw.convert(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"fix: .*meshwright convert"):
        open_folder(str(source))
    done = mw.convert(source, tmp_path / "out")
    assert done.architecture == "LlamaForCausalLM"
    again = mw.convert(tmp_path / "out", tmp_path / "run")
    assert again.parameters == done.parameters
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"do not tell heads.*\n.*config.json copied"):
        mw.convert(source, tmp_path / "other")


def test_an_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.hugging_face import torch_checkpoints

    source = folder_of(tmp_path / "dcp")
    read_once = torch_checkpoints.read_chunk
    seen: list[str] = []

    def fails(name: str, *given: Any) -> Any:
        seen.append(name)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return read_once(name, *given)

    monkeypatch.setattr(torch_checkpoints, "read_chunk", fails)
    with pytest.raises(KeyboardInterrupt):
        import_torch_checkpoint(source, tmp_path / "out")
    done = import_torch_checkpoint(source, tmp_path / "out")
    assert done.resumed > 3 and done.tensors == 21
    import_torch_checkpoint(source, tmp_path / "whole")
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Runs:
    """Pickles into a call of a function."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def test_nothing_is_imported_or_called(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for value in (
        Runs(os.system, f"touch {mark}"),
        Runs(exec, f"open({str(mark)!r}, 'w')"),
        {"a": [Runs(subprocess.run, ["touch", str(mark)])]},
        Runs(getattr, "text", "upper"),
    ):
        for protocol in range(2, 6):
            with pytest.raises(ValueError, match="nothing of it was imported or called"):
                read_pickled(
                    pickle.dumps(value, protocol), {"torch Size", "collections OrderedDict"}
                )
    assert not mark.exists()
    source = folder_of(tmp_path / "dcp")
    (source / METADATA).write_bytes(pickle.dumps(Runs(os.system, f"touch {mark}")))
    with pytest.raises(WeightsError, match=r"it names 'posix\.system'"):
        import_torch_checkpoint(source, tmp_path / "out")
    assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_data_is_what_was_pickled(protocol: int) -> None:
    value = {"a": [1, -2, 2**40, 1.5, None, True, (1,), (1, 2), (1, 2, 3, 4), "text", {}], "b": ()}
    assert read_pickled(pickle.dumps(value, protocol), ()) == value
    called = read_pickled(pickle.dumps(Path("a"), protocol), {"pathlib PosixPath"})
    assert isinstance(called, Call) and (called.name, called.arguments) == (
        "pathlib PosixPath",
        ("a",),
    )
    assert read_pickled(pickle.dumps(Path, protocol), {"pathlib Path"}) == Named("pathlib Path")


TWICE = b"q\x01h\x01\x86"
"""Instructions that make a tuple of the last value, twice."""
ENDLESS = b")" + TWICE * 64
"""A tuple of 2 ** 64 empty ones, in 321 bytes."""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02}" + ENDLESS + b"Ns.", id="the key of a dictionary"),
        pytest.param(b"\x80\x02}(" + ENDLESS + b"Nu.", id="a key of several"),
        pytest.param(b"\x80\x04" + ENDLESS + b"\x8c\x01a\x93.", id="the module of a name"),
        pytest.param(b"\x80\x04\x8c\x01a" + ENDLESS + b"\x93.", id="a name"),
    ],
)
def test_a_value_without_end_is_neither_hashed_nor_written(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"dictionary whose keys|holds together: TypeError"):
        read_pickled(content, ())


@pytest.mark.parametrize("key", [1, "a", None, 1.5, b"a", (1, "a"), ()])
def test_keys_of_texts_and_numbers_are_read(key: Any) -> None:
    assert read_pickled(pickle.dumps({key: 1}, 4), ()) == {key: 1}


def test_a_call_is_written_by_its_name() -> None:
    called = read_pickled(b"\x80\x02ca\nb\n" + ENDLESS + b"R.", {"a b"})
    assert repr(called) == "Call(name='a b')"


def in_place_of(content: bytes, text: str, value: bytes) -> bytes:
    """Returns a pickle in which the first value after a key is another."""
    operations = list(pickletools.genops(content))
    found = next(n for n, (_, argument, _) in enumerate(operations) if argument == text)
    value_at = found + 2 if operations[found + 1][0].name == "MEMOIZE" else found + 1
    start, end = operations[value_at][2], operations[value_at + 1][2]
    return content[:start] + value + content[end:]


def test_a_name_of_the_metadata_without_end_is_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dcp")
    content = (source / METADATA).read_bytes()
    endless = b")" + b"q\xf0h\xf0\x86" * 64
    changed = in_place_of(content, "fqn", endless)
    (source / METADATA).write_bytes(changed)
    with pytest.raises(WeightsError, match="a name that is not a text"):
        read_metadata(source)


def test_a_transformation_without_end_is_not_written(tmp_path: Path) -> None:
    from meshwright.hugging_face.torch_checkpoints import _place

    endless = read_pickled(b"\x80\x02" + ENDLESS + b".", ())
    info = {"relative_path": "__0_0.distcp", "transform_descriptors": endless}
    with pytest.raises(ValueError, match=r"in __0_0\.distcp are compressed"):
        _place(tmp_path, info)


def test_a_byteorder_that_decompresses_without_end_is_refused(tmp_path: Path) -> None:
    from meshwright.hugging_face.torch_checkpoints import Chunk

    file = tmp_path / "__0_0.distcp"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("archive/byteorder", bytes(2**26))
        archive.writestr("archive/data.pkl", b"", zipfile.ZIP_STORED)
    content = file.read_bytes().replace((2**26).to_bytes(4, "little"), bytes([6, 0, 0, 0]))
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(WeightsError, match="is compressed"):
        read_chunk("w", "F32", Chunk((0,), (1,), file, 0, len(content)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_any_byte_of_the_metadata_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dcp")
    content = (source / METADATA).read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for place in chance.choice(len(content), 120, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << int(chance.integers(8))
        (source / METADATA).write_bytes(changed)
        try:
            for name, tensor in read_metadata(source).items():
                for chunk in tensor.chunks:
                    if tensor.code:
                        read_chunk(name, tensor.code, chunk)
        except MeshwrightError as error:
            refused += 1
            assert "\n  fix:" in str(error)
    assert refused > 40


def test_any_byte_of_a_chunk_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dcp")
    name = "layers.0.attention.wk.weight"
    tensor = read_metadata(source)[name]
    chunk = tensor.chunks[0]
    content = chunk.file.read_bytes()
    good = read_chunk(name, tensor.code, chunk)
    chance = np.random.default_rng(0)
    refused = 0
    for place in range(chunk.start, chunk.start + chunk.length, 7):
        changed = bytearray(content)
        changed[place] ^= 1 << int(chance.integers(8))
        chunk.file.write_bytes(changed)
        try:
            assert read_chunk(name, tensor.code, chunk).tobytes() == good.tobytes()
        except WeightsError:
            refused += 1
    assert refused > 50


def described(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    from meshwright.hugging_face.torch_checkpoints import Chunk, TorchTensor

    parts = tuple(Chunk(offsets, sizes, Path("a"), 0, 1) for offsets, sizes in chunks)
    return TorchTensor("F32", (4, 6), parts)


@pytest.mark.parametrize(
    ("chunks", "truth"),
    [
        ([((0, 0), (4, 6))], ""),
        ([((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))], ""),
        ([((0, 0), (4, 3))], "24 elements, and its chunks have 12"),
        ([((0, 0), (4, 7))], r"and a chunk \[4, 7\] at \[0, 0\]"),
        ([((0, 0), (4,))], "and a chunk"),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "chunks that overlap"),
        ([((0, 0), (2, 6)), ((0, 0), (2, 6))], "chunks that overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "chunks that overlap"),
    ],
)
def test_chunks_fill_their_tensor_once(chunks: Any, truth: str) -> None:
    from meshwright.hugging_face.torch_checkpoints import _check_tensor

    if not truth:
        _check_tensor("w", described(chunks))
        return
    with pytest.raises(ValueError, match=truth):
        _check_tensor("w", described(chunks))


def test_another_model_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "dcp")
    config = json.loads((source / "config.json").read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"vocab_size": 31}, r"\[31, 16\]"),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "heads of an even size|shape"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "is of Mistral"),
    ]
    for number, (change, truth) in enumerate(changes):
        (source / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(WeightsError, match=truth):
            import_torch_checkpoint(source, tmp_path / f"out-{number}")
    (source / "config.json").write_text(json.dumps(config))
    os.remove(source / "__1_0.distcp")
    with pytest.raises(WeightsError, match=r"__1_0\.distcp"):
        import_torch_checkpoint(source, tmp_path / "out")
    (tmp_path / "elsewhere").write_bytes(FILES["float32/__1_0.distcp"].tobytes())
    (source / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="a link that leaves the folder"):
        import_torch_checkpoint(source, tmp_path / "out")
    shutil.rmtree(source)

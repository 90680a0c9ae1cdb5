"""Checkpoints of MaxText, written by Orbax in MaxText's tree, are Hugging Face's weights byte by byte."""

import json
import math
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import tensorstore
from drawn import draw, read

import meshwright as mw
from meshwright.errors import ConfigError, MeshwrightError, WeightsError
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.safetensors_files import DTYPES, SafetensorsFile

ABOUT, FILES = read("maxtext-checkpoint")


def folder_of(folder: Path, row: str, **changes: Any) -> Path:
    """Writes a row's folder as Orbax wrote it, and the config.json of its model."""
    assert (hf_models.PEERS / "maxtext_checkpoint.py").is_file()
    for name, content in FILES.items():
        if name.startswith(f"{row}/"):
            file = folder / name.removeprefix(f"{row}/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.tobytes())
    model, _ = ABOUT["rows"][row]
    (folder / "config.json").write_text(json.dumps({**ABOUT["configs"][model], **changes}))
    return folder


@pytest.mark.parametrize("row", list(ABOUT["rows"]))
def test_a_checkpoint_of_maxtext_is_the_model_of_hugging_face(row: str, tmp_path: Path) -> None:
    """Stacked layers or not, both drivers of Zarr, one database or folders, rotary pairs of both kinds, experts."""
    model, dtype = ABOUT["rows"][row]
    shapes = ABOUT["tensors"][model]
    done = mw.convert(folder_of(tmp_path / "items", row), tmp_path / "out")
    assert done.tensors == len(shapes) and done.dtype == dtype
    assert done.parameters == sum(map(math.prod, shapes.values()))
    pairs = "numbers 2i and 2i + 1, as config.json has a rope_scaling"
    if model != "llama31":
        pairs = "half a head apart, as config.json has no rope_scaling"
    assert done.notes == (
        "3 arrays of the training, such as opt_state.count, are not read: optimizer, step",
        f"rotary pairs are taken to be {pairs}, and queries to contain 1/sqrt(H); a model with another rope_type, with "
        "rope_use_scale=False or with query_pre_attn_scalar computes something else",
    )
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert file.entries.keys() == shapes.keys()
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    for name, shape in shapes.items():
        expected = draw(name, tuple(shape)).astype(DTYPES[code])
        assert file.tensor(name).tobytes() == expected.tobytes(), name


def test_it_is_found_around_its_items_and_becomes_a_run(tmp_path: Path) -> None:
    items = folder_of(tmp_path / "7" / "items", "mixtral")
    with pytest.raises(ConfigError, match=r"do not tell heads.*\n.*config.json copied"):
        mw.convert(tmp_path / "7", tmp_path / "out")
    (items / "config.json").rename(tmp_path / "7" / "config.json")
    with pytest.raises(ConfigError, match="has one step"):
        mw.convert(tmp_path / "7", tmp_path / "out", dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"Orbax \(MaxText\)(.|\n)*convert.*OUT"):
        open_folder(str(tmp_path / "7"))
    done = mw.convert(tmp_path / "7", tmp_path / "out")
    again = mw.convert(tmp_path / "out", tmp_path / "run")
    assert again.parameters == done.parameters


@pytest.mark.parametrize(
    ("row", "changes", "truth"),
    [
        ("llama", {"num_hidden_layers": 3}, "2 layers in dimension 1, and config.json has 3"),
        ("llama", {"num_attention_heads": 8}, "4 heads in dimension 1, and config.json has 8"),
        ("llama", {"vocab_size": 31}, r"\[31, 16\]"),
        ("llama-unscanned", {"num_hidden_layers": 3}, r"model\.layers\.2"),
        ("mixtral", {"num_local_experts": 8}, "4 experts in dimension 0, and config.json has 8"),
        ("llama", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "is of Qwen2"),
    ],
)
def test_another_model_is_refused(
    row: str, changes: dict[str, Any], truth: str, tmp_path: Path
) -> None:
    source = folder_of(tmp_path / "items", row, **changes)
    with pytest.raises(WeightsError, match=truth):
        mw.convert(source, tmp_path / "out")


def test_a_scaling_that_maxtext_does_not_have_is_refused(tmp_path: Path) -> None:
    """MaxText's llama3.1 scales by constants: a config.json of Llama 3.2 (factor 32) is of another function."""
    scaling = ABOUT["configs"]["llama31"]["rope_scaling"]
    for number, change in enumerate(({"factor": 32.0}, {"original_max_position_embeddings": 4096})):
        source = folder_of(tmp_path / f"{number}", "llama31", rope_scaling={**scaling, **change})
        with pytest.raises(WeightsError, match="other numbers than MaxText's") as refused:
            mw.convert(source, tmp_path / "out")
        assert "factor 8, low_freq_factor 1" in refused.value.fix
        assert not (tmp_path / "out").exists()


def remove_a_chunk(items: Path, array: str) -> None:
    """Deletes the values of an array, as a copy that was cut short would, and leaves its description."""
    metadata = json.loads((items / "_METADATA").read_text())
    base = {"driver": "file", "path": f"{items}/"}
    spec = {"driver": "ocdbt", "base": base} if metadata["use_ocdbt"] else base
    store = tensorstore.KvStore.open(spec).result()
    keys = [key.decode() for key in store.list().result() if key.decode().startswith(f"{array}/")]
    chunks = [key for key in keys if not key.endswith((".zarray", "zarr.json"))]
    assert chunks and len(chunks) < len(keys)
    for key in chunks:
        store.write(key, None).result()


@pytest.mark.parametrize("row", list(ABOUT["rows"]))
def test_a_chunk_that_is_missing_is_refused(row: str, tmp_path: Path) -> None:
    """TensorStore reads zeros in its place, where it is not told that all were written."""
    source = folder_of(tmp_path / "items", row)
    remove_a_chunk(source, "params.params.decoder.decoder_norm.scale")
    with pytest.raises(WeightsError, match=r"reading params\.params\.decoder\.decoder_norm"):
        mw.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_chunks_of_zeros_that_orbax_left_out_are_a_note(tmp_path: Path) -> None:
    """Older Orbax writes none, and its `_METADATA` lacks the field."""
    source = folder_of(tmp_path / "items", "llama31")
    metadata = json.loads((source / "_METADATA").read_text())
    del metadata["store_array_data_equal_to_fill_value"]
    (source / "_METADATA").write_text(json.dumps(metadata))
    remove_a_chunk(source, "params.params.decoder.decoder_norm.scale")
    done = mw.convert(source, tmp_path / "out")
    assert "leaves chunks of zeros out" in done.notes[-1]
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert not file.tensor("model.norm.weight").any()


def test_an_output_layer_that_config_json_ties_is_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "items", "llama", tie_word_embeddings=True)
    with pytest.raises(WeightsError, match=r"converting .*items\n.*ties 'lm_head") as refused:
        mw.convert(source, tmp_path / "out")
    assert "tie_word_embeddings false" in refused.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["params.aqt.scale", "model.scale", "steps", "opt_states.scale"])
def test_only_optimizer_and_step_are_left_out(name: str, tmp_path: Path) -> None:
    """Anything else may be part of the model: quantised weights, or another tree (NNX)."""
    source = folder_of(tmp_path / "items", "llama")
    metadata = json.loads((source / "_METADATA").read_text())
    for entry in metadata["tree_metadata"].values():
        if [key["key"] for key in entry["key_metadata"]] == ["step"]:
            entry["key_metadata"] = [{"key": part, "key_type": 2} for part in name.split(".")]
    (source / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(WeightsError, match=f"{name}', which is none"):
        mw.convert(source, tmp_path / "out")


def test_an_array_that_is_not_known_and_a_link_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "items", "llama")
    metadata = json.loads((source / "_METADATA").read_text())
    tree = metadata["tree_metadata"]
    for entry in tree.values():
        for key in entry["key_metadata"]:
            if key["key"] == "wi_1":
                key["key"] = "wi_2"
    (source / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(WeightsError, match=r"mlp\.wi_2\.kernel', which is none"):
        mw.convert(source, tmp_path / "out")
    source = folder_of(tmp_path / "linked", "llama")
    content = source / "manifest.ocdbt"
    content.rename(tmp_path / "elsewhere")
    content.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="a link that leaves the folder"):
        mw.convert(source, tmp_path / "out")


@pytest.mark.parametrize("row", ["llama", "llama31"])
def test_any_byte_is_refused_or_does_no_harm(row: str, tmp_path: Path) -> None:
    """Damage to a description, a manifest or a chunk is an error of ours, and never one of TensorStore."""
    chance = np.random.default_rng(0)
    refused = 0
    for number in range(24):
        source = folder_of(tmp_path / f"{number}", row)
        files = sorted(path for path in source.rglob("*") if path.is_file())
        file = files[int(chance.integers(len(files)))]
        content = bytearray(file.read_bytes())
        if not content:
            continue
        content[int(chance.integers(len(content)))] ^= 1 << int(chance.integers(8))
        file.write_bytes(content)
        try:
            mw.convert(source, tmp_path / f"out-{number}")
        except MeshwrightError as error:
            refused += 1
            assert "\n  fix:" in str(error)
    assert refused > 3

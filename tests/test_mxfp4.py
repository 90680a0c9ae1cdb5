"""GPT-OSS in MXFP4: read as the numbers that `transformers` reads, given back as bfloat16."""

import json
import shutil
from pathlib import Path
from typing import Any

import hf_models
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright.hugging_face.folder import open_folder
from meshwright.hugging_face.names import read_block
from meshwright.hugging_face.quantised import PackedTensor

EXPERTS = ("model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj")


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """From the definition: the lower half of a byte first, times a power of two, float32 [E, D, F]."""
    numbers = FP4[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*blocks.shape[:3], 32)
    scaled = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder whose experts are in MXFP4, and their numbers by the name of the tensor."""
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    hf_models.write_folder("gpt-oss", path)
    tensors, numbers, rng = load_file(path / "model.safetensors"), {}, np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith("_proj")]:
        E, D, F = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (E, F, D // 32, 16)).astype(np.uint8)
        scales = rng.integers(117, 124, (E, F, D // 32)).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = unpacked(blocks, scales)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path, numbers


def test_packed_weights_are_the_numbers_of_transformers(folder: Any) -> None:
    path, numbers = folder
    weights = open_folder(f"hf:{path}")
    assert any("mxfp4 are read as the bfloat16 numbers" in note for note in weights.notes)
    with weights.reader() as read:
        for param, name, columns in (
            ("expert_gate", EXPERTS[0], slice(0, None, 2)), ("expert_up", EXPERTS[0], slice(1, None, 2)),
            ("expert_down", EXPERTS[1], slice(None)),
        ):  # fmt: skip
            p, stored = weights.params[f"blocks.{param}"], weights.stored[f"blocks.{param}"]
            whole = numbers[name.format(2)][:, :, columns]
            for part in ((0, 4, 0, 64, 0, 64), (1, 3, 5, 41, 3, 20)):
                index = tuple(slice(a, b) for a, b in zip(part[::2], part[1::2], strict=True))
                block = read_block(p, stored, (slice(2, 3), *index), read, np.float32)
                np.testing.assert_array_equal(block[0], whole[index])


def test_packed_weights_go_out_as_numbers(folder: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path, numbers = folder
    mw.convert(path, tmp_path / "run")
    out = mw.convert(tmp_path / "run", tmp_path / "back").out
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["GptOssForCausalLM"] and "quantization_config" not in config
    tensors = load_file(out / "model.safetensors")
    for name, whole in numbers.items():
        np.testing.assert_array_equal(tensors[name], whole)


def test_other_packed_weights_are_refused(folder: Any, tmp_path: Path) -> None:
    shutil.copytree(folder[0], tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = EXPERTS[1].format(0)
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(mw.WeightsError, match=r"down_proj_scales' is missing"):
        open_folder(f"hf:{tmp_path / 'model'}")
    save_file(
        {**tensors, f"{name}_scales": scales[:, :1]}, tmp_path / "model" / "model.safetensors"
    )
    with pytest.raises(mw.WeightsError, match=r"its scales U8\[4, 1, 3\]"):
        open_folder(f"hf:{tmp_path / 'model'}")


def test_every_number_of_four_bits_is_exact() -> None:
    golden = hf_models.read("mxfp4")[1]
    blocks, scales = golden["blocks"], golden["scales"]
    packed: Any = PackedTensor(blocks, scales)[:, :, slice(None)]
    found = packed[slice(0, 1), slice(0, 512), slice(0, 1)]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), golden["numbers"])
    plain = slice(2, 15)  # products that float32 holds
    ours = unpacked(blocks[:, :, plain], scales[:, :, plain])
    np.testing.assert_array_equal(ours, golden["numbers"][:, 64 : 64 + ours.shape[1]])

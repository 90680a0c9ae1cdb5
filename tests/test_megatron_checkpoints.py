"""`torch_dist` checkpoints, as megatron-core wrote them, are Hugging Face's weights byte by byte.

The script that wrote them has compared megatron-core's logits with those of `transformers`.
"""

import argparse
import enum
import io
import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from drawn import draw, read

import meshwright as mw
from meshwright.errors import MeshwrightError, WeightsError
from meshwright.hugging_face.safetensors_files import SafetensorsFile
from meshwright.hugging_face.torch_checkpoints import METADATA

ABOUT, FILES = read("megatron-checkpoint")


def folder_of(folder: Path, model: str, **changes: Any) -> Path:
    """Writes the checkpoint of a model, and its config.json."""
    assert (hf_models.PEERS / "megatron_checkpoint.py").is_file()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        if name.startswith(f"{model}/"):
            (folder / name.removeprefix(f"{model}/")).write_bytes(content.tobytes())
    config = {**ABOUT["configs"][model], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model", list(ABOUT["configs"]))
def test_a_checkpoint_of_megatron_is_the_model_of_hugging_face(model: str, tmp_path: Path) -> None:
    """Stacked layers and experts, grouped queries, keys and values, gates, norms of heads, a vocabulary filled up."""
    shapes = ABOUT["tensors"][model]
    done = mw.convert(folder_of(tmp_path / "torch_dist", model), tmp_path / "out")
    assert done.tensors == len(shapes)
    assert done.parameters == sum(map(math.prod, shapes.values()))
    objects, arguments, *padding = done.notes
    assert "pickled objects" in objects and "common.pt" in arguments
    assert padding == [
        f"2 rows of {name} that no token has are left out"
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert file.entries.keys() == shapes.keys()
    for name, shape in shapes.items():
        center, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.3)
        expected = draw(name, tuple(shape), center, spread)
        assert file.tensor(name).tobytes() == expected.tobytes(), name
    again = mw.convert(tmp_path / "out", tmp_path / "run")
    assert again.parameters == done.parameters


@pytest.mark.parametrize(
    ("model", "changes", "truth"),
    [
        ("llama", {"num_hidden_layers": 3}, "layers in dimension 0, and config.json has 3"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, r"5 \+ 2 x 5 = 15 heads"),
        ("llama", {"vocab_size": 33}, "has 32 rows, and config.json has 33 tokens"),
        ("llama", {"intermediate_size": 32}, r"is \[16, 24\], .* needs \[16, 32\]"),
        ("mixtral", {"num_local_experts": 8}, "experts in dimension 1, and config.json has 8"),
        ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "q_norm"),
        ("llama", {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, "is of Phi3"),
    ],
)
def test_another_model_is_refused(
    model: str, changes: dict[str, Any], truth: str, tmp_path: Path
) -> None:
    source = folder_of(tmp_path / "torch_dist", model, **changes)
    with pytest.raises(WeightsError, match=truth):
        mw.convert(source, tmp_path / "out")


def test_any_byte_of_the_metadata_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "torch_dist", "llama")
    content = (source / METADATA).read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for number, place in enumerate(chance.choice(len(content), 60, replace=False)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(chance.integers(8))
        (source / METADATA).write_bytes(changed)
        try:
            mw.convert(source, tmp_path / f"out-{number}")
        except MeshwrightError as error:
            refused += 1
            assert "\n  fix:" in str(error)
    assert refused > 20


def _write_arguments(folder: Path, **arguments: Any) -> None:
    """Writes the arguments as Megatron-LM does, in an argparse.Namespace beside objects of its own."""
    described = {
        "args": argparse.Namespace(position=Position.rope, seed=7, **arguments),
        "checkpoint_version": 3.0,
        "iteration": 10,
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps(described, protocol=2))
        archive.writestr("common/version", "3")
    (folder / "common.pt").write_bytes(content.getvalue())


class Position(enum.Enum):
    """Stands for an enumeration of Megatron."""

    rope = 1


LLAMA_ARGUMENTS = {
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"rotary_interleaved": True}, "Megatron Bridge"),
        ({"apply_layernorm_1p": True}, "Megatron Bridge"),
        ({"normalization": "LayerNorm"}, "Megatron Bridge"),
        ({"position_embedding_type": "learned_absolute"}, "Megatron Bridge"),
        ({"rotary_base": 123}, "rope_theta 123"),
        ({"num_attention_heads": 3}, "num_attention_heads 3"),
        ({"norm_epsilon": 0.25}, "rms_norm_eps 0.25"),
        ({"use_rope_scaling": True}, "with its rope_scaling"),
    ],
)
def test_arguments_that_compute_something_else_are_refused(
    changes: dict[str, Any], fix: str, tmp_path: Path
) -> None:
    model = next(iter(ABOUT["configs"]))
    folder = folder_of(tmp_path / "torch_dist", model)
    _write_arguments(folder, **(LLAMA_ARGUMENTS | changes))
    with pytest.raises(WeightsError, match=next(iter(changes))) as refused:
        mw.convert(folder, tmp_path / "out")
    assert fix in refused.value.fix
    assert not (tmp_path / "out").exists()


def test_arguments_of_the_same_function_are_a_note(tmp_path: Path) -> None:
    model = next(iter(ABOUT["configs"]))
    folder = folder_of(tmp_path / "torch_dist", model)
    _write_arguments(folder, **LLAMA_ARGUMENTS)
    done = mw.convert(folder, tmp_path / "out")
    assert "Megatron's arguments (common.pt) agree with config.json" in done.notes


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_arguments_that_are_broken_are_refused(content: bytes, tmp_path: Path) -> None:
    model = next(iter(ABOUT["configs"]))
    folder = folder_of(tmp_path / "torch_dist", model)
    (folder / "common.pt").write_bytes(content)
    with pytest.raises(WeightsError, match=r"common\.pt"):
        mw.convert(folder, tmp_path / "out")

"""`torch_dist` checkpoints, as megatron-core wrote them, are Hugging Face's weights byte by byte.

The script that wrote them has compared megatron-core's logits with those of `transformers`.
"""

import json
import math
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
    objects, *padding = done.notes
    assert "pickled objects" in objects and "common.pt" in objects
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

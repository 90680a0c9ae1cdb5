"""`torch_dist` checkpoints, as megatron-core wrote them, are Hugging Face's weights byte by byte.

The script that wrote them has compared megatron-core's logits with those of `transformers`.
"""

import argparse
import enum
import io
import json
import math
import pickle
import pickletools
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from drawn import draw, read

import meshwright as mw
from meshwright.errors import MeshwrightError, WeightsError
from meshwright.hugging_face.megatron_arguments import read_arguments
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
        ({"rotary_seq_len_interpolation_factor": 4}, "of type linear with factor 4"),
        ({"no_rope_freq": 4}, "Megatron Bridge"),
        ({"qk_l2_norm": True}, "Megatron Bridge"),
        ({"moe_router_score_function": "sigmoid"}, "Megatron Bridge"),
        ({"moe_router_topk_scaling_factor": 2.5}, "Megatron Bridge"),
        ({"window_size": (127, 0)}, "sliding_window 128"),
        ({"window_size": (127, 1)}, "Megatron Bridge"),
        ({"window_size": "all"}, "Megatron Bridge"),
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
    names = "rotary_interleaved, apply_layernorm_1p, swiglu, normalization, position_embedding_type"
    prefix = "Megatron's arguments (common.pt) that are compared agree with config.json: "
    assert f"{prefix}{names}" in done.notes


def llama3(**changes: float) -> dict[str, Any]:
    """Returns a rope_scaling of config.json, by default with Megatron's numbers."""
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "rope_type": "llama3",
        **numbers,
        "original_max_position_embeddings": 8192,
        **changes,
    }


@pytest.mark.parametrize(
    ("config", "arguments", "truth"),
    [
        ({"rope_scaling": llama3()}, {"use_rope_scaling": True}, ""),
        (
            {"rope_scaling": llama3(factor=32.0)},
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            "",
        ),
        (
            {"rope_scaling": llama3(factor=32.0)},
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
            "rope_scaling_factor = 8.0 .* factor 8.0.*config.json has factor 32.0",
        ),
        (
            {"rope_scaling": llama3(factor=32.0)},
            {"use_rope_scaling": True},
            "rope_scaling_factor = 8.0",
        ),
        (
            {"rope_scaling": llama3(original_max_position_embeddings=4096)},
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
            "original_max_position_embeddings 8192, and config.json has .* 4096",
        ),
        ({"rope_scaling": llama3()}, {"use_rope_scaling": False}, "has a rope_scaling"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rotary_seq_len_interpolation_factor": 4},
            "",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rotary_seq_len_interpolation_factor": None},
            "divides positions by 4",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            {"position_embedding_type": "rope"},
            "of type yarn",
        ),
    ],
)
def test_scalings_of_the_rotary_embedding_are_compared(
    config: dict[str, Any], arguments: dict[str, Any], truth: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama", **config)
    _write_arguments(folder, **arguments)
    if truth:
        with pytest.raises(WeightsError, match=truth):
            mw.convert(folder, tmp_path / "out")
        return
    done = mw.convert(folder, tmp_path / "out")
    assert any(next(iter(arguments)) in note and "agree" in note for note in done.notes)


@pytest.mark.parametrize(
    ("size", "layers", "truth"),
    [
        ((5, 0), None, ""),
        (
            (6, 0),
            None,
            "attends to 7 tokens, itself included, and config.json has sliding_window 6",
        ),
        ((-1, 0), None, "attends to all tokens before, and config.json has sliding_window 6"),
        (None, None, "attends to all tokens before"),
        ((5, 0), 2, "window_attn_skip_freq = 2"),
    ],
)
def test_windows_are_compared(size: Any, layers: int | None, truth: str, tmp_path: Path) -> None:
    """megatron-core keeps j >= i - w of a causal mask (`get_sliding_window_causal_mask`): w + 1 tokens."""
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    folder = folder_of(tmp_path / "torch_dist", "llama", sliding_window=6, **changes)
    _write_arguments(folder, window_size=size, window_attn_skip_freq=layers)
    if truth:
        with pytest.raises(WeightsError, match=truth):
            mw.convert(folder, tmp_path / "out")
        return
    assert any("window_size" in note for note in mw.convert(folder, tmp_path / "out").notes)


def _write_common(folder: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """Writes common.pt as torch.save does, or with a compression."""
    file = folder / "common.pt"
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("common/data.pkl", pickled)
    return file


def test_arguments_in_a_dictionary_are_read_and_others_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama")
    _write_common(folder, pickle.dumps({"args": {"rotary_interleaved": True}}, protocol=2))
    with pytest.raises(WeightsError, match="rotary_interleaved = True"):
        mw.convert(folder, tmp_path / "out")
    for content in ({"args": [1]}, {"args": "text"}, [1]):
        _write_common(folder, pickle.dumps(content, protocol=2))
        with pytest.raises(WeightsError, match=r"common\.pt\n.*dictionary"):
            mw.convert(folder, tmp_path / "out")
    for content in ({}, {"args": None}, {"args": {"seed": 1}}):
        _write_common(folder, pickle.dumps(content, protocol=2))
        notes = mw.convert(folder, tmp_path / f"out-{content}").notes
        assert any("no arguments of Megatron that are compared" in note for note in notes)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_description_is_refused_before_it_is_read(
    compression: int, tmp_path: Path
) -> None:
    """A zip file claims a size that its decompressor does not keep to: a few bytes become gigabytes."""
    folder = folder_of(tmp_path / "torch_dist", "llama")
    file = _write_common(folder, bytes(2**26), compression)
    content = file.read_bytes()
    claimed = content.replace((2**26).to_bytes(4, "little"), (9).to_bytes(4, "little"))
    assert claimed != content and len(content) < 2**18
    file.write_bytes(claimed)
    tracemalloc.start()
    with pytest.raises(WeightsError, match="is compressed"):
        read_arguments(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize(("place", "value"), [(8, 99), (6, 1)])
def test_an_unknown_compression_and_encryption_are_refused(
    place: int, value: int, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama")
    file = _write_common(folder, pickle.dumps({}, protocol=2))
    content = bytearray(file.read_bytes())
    for start, offset in ((b"PK\3\4", place), (b"PK\1\2", place + 2)):
        content[content.index(start) + offset] = value
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=r"common\.pt"):
        mw.convert(folder, tmp_path / "out")


def test_any_byte_of_the_arguments_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama")
    _write_arguments(folder, **LLAMA_ARGUMENTS)
    content = (folder / "common.pt").read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(chance.integers(8))
        (folder / "common.pt").write_bytes(changed)
        try:
            read_arguments(folder)
        except WeightsError as error:
            refused += 1
            assert "\n  fix:" in str(error)
    assert refused > len(content) // 3


def _nested(opcode: bytes, depth: int) -> bytes:
    """Returns a pickle of {"args": {"swiglu": VALUE}} with a value of `depth` levels, each made of the last by `opcode`."""
    start = b"\x80\x02}X\x04\0\0\0args}X\x06\0\0\0swiglu"
    return start + b")" + opcode * depth + b"ss."


@pytest.mark.parametrize(
    "opcode",
    [
        pytest.param(b"q\x01h\x01\x86", id="a tuple of the last one, twice"),
        pytest.param(b"\x85", id="a tuple of the last one"),
    ],
)
def test_an_argument_without_end_is_refused_in_a_short_text(opcode: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama")
    _write_common(folder, _nested(opcode, 5000))
    with pytest.raises(WeightsError, match="swiglu = 'a tuple'") as refused:
        mw.convert(folder, tmp_path / "out")
    assert len(str(refused.value)) < 1000


def test_a_long_argument_is_shown_in_part(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "torch_dist", "llama")
    _write_arguments(folder, normalization="x" * 10_000)
    with pytest.raises(WeightsError, match=r"x{60,90} \.\.\.") as refused:
        mw.convert(folder, tmp_path / "out")
    assert len(str(refused.value)) < 1000


def _names_of_nemo(content: bytes) -> bytes:
    """Returns a `.metadata` whose tensors have the names that NeMo 2 gives them: those of GPTModel in a `module`."""
    names = re.compile(rb"(decoder|embedding|output_layer)\.")
    parts = []
    operations = list(pickletools.genops(content))
    ends = [*(place for _, _, place in operations[1:]), len(content)]
    for (opcode, argument, place), end in zip(operations, ends, strict=True):
        part = content[place:end]
        if opcode.name == "SHORT_BINUNICODE" and names.match(argument.encode()):
            name = b"module." + argument.encode()
            part = part[:1] + bytes([len(name)]) + name
        parts.append(part)
    return b"".join(parts)


def test_names_of_nemo_are_those_of_megatron(tmp_path: Path) -> None:
    plain = mw.convert(folder_of(tmp_path / "torch_dist", "mixtral"), tmp_path / "plain")
    source = folder_of(tmp_path / "weights", "mixtral")
    changed = _names_of_nemo((source / METADATA).read_bytes())
    assert changed.count(b"module.decoder.layers.") > 20
    (source / METADATA).write_bytes(changed)
    done = mw.convert(source, tmp_path / "out")
    name = "model.safetensors"
    assert (done.out / name).read_bytes() == (plain.out / name).read_bytes()
    assert "2 rows of module.embedding.word_embeddings.weight that no token has are left out" in (
        done.notes
    )


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_arguments_that_are_broken_are_refused(content: bytes, tmp_path: Path) -> None:
    model = next(iter(ABOUT["configs"]))
    folder = folder_of(tmp_path / "torch_dist", model)
    (folder / "common.pt").write_bytes(content)
    with pytest.raises(WeightsError, match=r"common\.pt"):
        mw.convert(folder, tmp_path / "out")

"""Text models inside models of images and video: read, computed, and given back with the other parts."""

import json
import re
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
from hf_models import LARGER, read
from test_weights import assert_same_tensors, tensors_of

import meshwright as mw
from meshwright.hugging_face.folder import open_folder, read_model
from meshwright.hugging_face.names import read_block, unpadded_shape

TOLERANCE = 1e-5
"""Of a gradient's largest element."""


@pytest.mark.parametrize("row", LARGER)
def test_a_larger_model_comes_back_byte_for_byte(row: str, tmp_path: Path) -> None:
    about = hf_models.write_folder(row, tmp_path / "model", files=2)
    done = mw.convert(tmp_path / "model", tmp_path / "run")
    assert done.parameters == about["parameters"]
    parts = [name for name in about["tensors"] if not re.search(r"language_model|lm_head", name)]
    assert parts and any(f"{len(parts)} tensors" in note for note in done.notes)
    back = mw.convert(tmp_path / "run", tmp_path / "back", largest_file=100_000)
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == about["config"]
    assert any("given back as they came" in note for note in back.notes)


@pytest.mark.parametrize("row", LARGER)
def test_the_text_model_computes_what_transformers_does(row: str, tmp_path: Path) -> None:
    hf_models.write_folder(row, tmp_path / "model")
    golden = read(row)[1]
    _, gradients, _ = hf_models.steps_of(tmp_path / "model", hf_models.EIGHT_DEVICES, steps=1)
    hf_models.assert_near("gradient", gradients, golden, TOLERANCE)
    logits = hf_models.logits_of(tmp_path / "model", "data=1")
    assert hf_models.largest_gap(logits, golden["logits"]) < TOLERANCE


PREFIXES = {
    "transformers 5": ("model.language_model.", "lm_head."),
    "transformers 4": ("language_model.model.", "language_model.lm_head."),
}


@pytest.mark.parametrize("form", PREFIXES)
def test_both_forms_of_the_names_are_read(form: str, tmp_path: Path) -> None:
    about, _ = read("mistral-3-larger")
    body, head = PREFIXES[form]
    table = {
        name.replace("language_model.model.", body).replace("language_model.lm_head.", head): row
        for name, row in about["tensors"].items()
    }
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    hf_models.write_tensors(tmp_path, hf_models.draw_tensors(table))
    weights = open_folder(f"hf:{tmp_path}")
    assert "lm_head.weight" in weights.entries and weights.others
    mw.convert(tmp_path, tmp_path / "run")
    mw.convert(tmp_path / "run", tmp_path / "back")
    assert_same_tensors(tmp_path, tmp_path / "back")


EXPERTS = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")


def _packed(tensors: dict[str, np.ndarray], transposed: bool) -> dict[str, np.ndarray]:
    """Returns the tensors with the experts of each layer in two: gates, then projections up; and those down."""
    found = {name: values for name, values in tensors.items() if not EXPERTS.search(name)}
    experts = sorted({EXPERTS.sub("", name) for name in tensors if EXPERTS.search(name)})
    for layer in experts:
        numbers = range(sum(f"{layer}mlp.experts.{i}.up_proj.weight" in tensors for i in range(99)))
        whole = {
            part: np.stack([tensors[f"{layer}mlp.experts.{i}.{part}_proj.weight"] for i in numbers])
            for part in ("gate", "up", "down")
        }
        gate_up = np.concatenate([whole["gate"], whole["up"]], 1)
        order = (0, 2, 1) if transposed else (0, 1, 2)
        found[f"{layer}mlp.experts.gate_up_proj"] = gate_up.transpose(order)
        found[f"{layer}mlp.experts.down_proj"] = whole["down"].transpose(order)
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("row", ["qwen3.5-moe", "qwen3.5-moe-larger"])
def test_both_forms_of_packed_experts_are_read_by_their_shape(
    row: str, transposed: bool, tmp_path: Path
) -> None:
    hf_models.write_folder(row, tmp_path / "apart")
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_bytes((tmp_path / "apart" / "config.json").read_bytes())
    hf_models.write_tensors(packed, _packed(tensors_of(tmp_path / "apart"), transposed))
    one, other = (open_folder(f"hf:{folder}") for folder in (packed, tmp_path / "apart"))
    with one.reader() as read_one, other.reader() as read_other:
        for path, p in one.params.items():
            everything = tuple(slice(0, size) for size in unpadded_shape(p))
            np.testing.assert_array_equal(
                read_block(p, one.stored[path], everything, read_one, np.float32),
                read_block(p, other.stored[path], everything, read_other, np.float32),
            )
    mw.convert(packed, tmp_path / "run")
    mw.convert(tmp_path / "run", tmp_path / "back")
    assert_same_tensors(packed, tmp_path / "back")


def test_packed_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    hf_models.write_folder("qwen3.5-moe", tmp_path)
    tensors = _packed(tensors_of(tmp_path), transposed=False)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-2]
    hf_models.write_tensors(tmp_path, tensors)
    with pytest.raises(mw.WeightsError, match=re.escape("[4, 46, 64]")):
        open_folder(f"hf:{tmp_path}")


def _config(row: str, **changes: Any) -> dict[str, Any]:
    config = {**read(row)[0]["config"], **changes}
    return {name: value for name, value in config.items() if value != "remove"}


def test_a_tie_that_no_field_states_is_that_of_the_files(tmp_path: Path) -> None:
    """Published files of Mistral Small 3 have an unembedding and say nothing about it."""
    hf_models.write_folder("mistral-3-larger", tmp_path)
    config = _config("mistral-3-larger", tie_word_embeddings="remove")
    del config["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = read_model(f"hf:{tmp_path}").model
    assert model.embedding == "untied"
    config["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    tied: Any = read_model(f"hf:{tmp_path}").model
    assert tied.embedding == "tied"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another type": (
        _config("gemma-3-larger", model_type="gemma3_text"),
        "whose model_type is gemma3, and its model_type is gemma3_text: they are two different models",
    ),
    "another text model": (
        _config("mistral-3-larger", text_config={"model_type": "bamba"}),
        "is of the type bamba, which Meshwright does not compute; those of ministral3 and mistral and mistral4 are",
    ),
    "no text model": (_config("qwen3-vl-larger", text_config="remove"), "it has no text_config"),
    "an unknown field of the text": (
        _config("gemma-3-larger", text_config={**read("gemma-3-larger")[0]["config"]["text_config"], "index_topk": 8}),
        "index_topk 8 (a sparse indexer",
    ),
    "an unknown field of the whole": (
        _config("gemma-3-larger", residual_multiplier=0.5),
        "residual_multiplier 0.5 (scaled branches)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_a_larger_model_that_is_not_computed_is_refused(row: str, tmp_path: Path) -> None:
    config, reason = REFUSED[row]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mw.WeightsError, match=re.escape(reason)):
        read_model(f"hf:{tmp_path}")


def test_a_run_that_starts_from_a_larger_model_keeps_its_other_parts(tmp_path: Path) -> None:
    hf_models.write_folder("qwen3-vl-larger", tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text to train on\n" * 200)
    run = mw.recipe(
        f"hf:{tmp_path}/model",
        mesh="fsdp=2",
        steps=1,
        batch=2,
        seq=16,
        paths=(str(tmp_path / "text.txt"),),
        tokenizer="chars",
    )
    mw.train(run, out=tmp_path / "run")
    mw.convert(tmp_path / "run", tmp_path / "back")
    before = tensors_of(tmp_path / "model")
    after = tensors_of(tmp_path / "back")
    assert sorted(before) == sorted(after)
    for name, values in before.items():
        if "visual" in name:
            np.testing.assert_array_equal(values, after[name])

"""A model's step, layer by layer from its files, against the tensors that `transformers` has of the same step."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import hf_models
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import TOKENS, read
from test_divergence import plant_transposed

from meshwright.api.parity import ParityOptions, parity
from meshwright.api.verb import base_run
from meshwright.errors import ConfigError
from meshwright.hugging_face.folder import open_folder
from meshwright.models.blocks import experts
from meshwright.models.blocks.layers import Norm
from meshwright.runs.recipe import find_recipe
from meshwright.trainer import layer_by_layer, other_program, transformers_source
from meshwright.trainer.divergence import Divergence, compare
from meshwright.trainer.layer_by_layer import LayerByLayer
from meshwright.trainer.other_program import compare_transformers, tensors_of
from meshwright.trust import own

ROW = "tensors-qwen3-moe"
LENGTH = 4


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    run = Norm.__call__
    patch.setattr(
        Norm,
        "__call__",
        lambda norm, *arguments: run(dataclasses.replace(norm, epsilon=2e-6), *arguments),
    )


def drop_expert(patch: pytest.MonkeyPatch) -> None:
    run = experts.dropless_moe

    def planted(kind: Any, h: Any, routes: Any, weights: Any, *rest: Any) -> Any:
        return run(kind, h, routes, {**weights, "down": weights["down"].at[2].set(0)}, *rest)

    patch.setattr(experts, "dropless_moe", planted)


def leak(patch: pytest.MonkeyPatch) -> None:
    pack = layer_by_layer.packed_batch

    def planted(documents: np.ndarray) -> Any:
        batch = pack(documents)
        return dataclasses.replace(batch, segments=np.zeros_like(batch.segments))

    patch.setattr(layer_by_layer, "packed_batch", planted)


def divergence_of(folder: Path, row: str = ROW) -> Divergence:
    """Compares a golden folder, layer by layer, with what `transformers` made of it."""
    hf_models.write_folder(row, folder)
    _, arrays = read(row)
    run = hf_models.run_of(folder, "data=1")
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, batch=1, seq=2 * LENGTH)
    )
    weights = open_folder(f"hf:{folder}")
    documents = TOKENS[:2, : LENGTH + 1]
    ours = LayerByLayer(run, weights, documents)
    perturbed = LayerByLayer(run, weights, documents, perturbed=True)
    return compare(("transformers", "Meshwright"), tensors_of(arrays), ours, perturbed)


def test_rounding_explains_what_the_two_differ_by(tmp_path: Path) -> None:
    divergence = divergence_of(tmp_path / "model")
    assert divergence.first is None, str(divergence.first)
    compared = {d.name.name for d in divergence.differences}
    expected = {"embedding", "input", "attention input", "attention heads", "attention output", "attention residual",
                "feed-forward input", "feed-forward output", "output", "final norm", "log-sum-exp of the logits",
                "token loss", "attention_norm", "mlp_norm", "final_norm"}  # fmt: skip
    assert expected <= compared
    activations = {name for name in divergence.only if "router" not in name and "layer" not in name}
    assert activations <= {"gradient of token loss", "gradient of embed", "gradient of unembed"}


def test_factors_are_after_the_outputs_that_are_compared(tmp_path: Path) -> None:
    """Of Granite 4: factors on what halves add and on the logits; a state space, in a packed row."""
    divergence = divergence_of(tmp_path / "model", "tensors-granite-4")
    assert divergence.first is None, str(divergence.first)
    compared = {d.name.name for d in divergence.differences}
    expected = {
        "attention output",
        "feed-forward output",
        "final norm",
        "a_log",
        "skip",
        "step_bias",
    }
    assert expected <= compared


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (other_epsilon, "layer 0, attention input"),
        (plant_transposed, "layer 0, attention output"),
        (leak, "layer 0, attention heads"),
        (drop_expert, "layer 1, feed-forward output"),
    ],
)
def test_a_planted_fault_is_named(
    plant: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    divergence = divergence_of(tmp_path / "model")
    assert str(divergence.first).startswith(f"{expected}: differs by ")


def test_what_is_not_installed_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = find_recipe(own("tiny"))
    with pytest.raises(ConfigError, match="torch and transformers are not installed") as refused:
        parity(run, "transformers")
    assert "pip install 'meshwright[transformers]'" in str(refused.value.fix)


def test_a_run_without_a_folder_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_source, "check_installed", lambda: None)
    with pytest.raises(ConfigError, match="it starts from no folder of Hugging Face"):
        compare_transformers(find_recipe(own("tiny")), 32)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hf_models.write_folder(ROW, folder)
    run = dataclasses.replace(
        hf_models.run_of(folder, "data=1"),
        data=dataclasses.replace(hf_models.run_of(folder, "data=1").data, tokenizer="bytes"),
    )
    with pytest.raises(
        ConfigError,
        match="2 documents of 8 tokens and the token after each are 18, and the text has 5",
    ):
        compare_transformers(run, 16, "short")


def test_a_layer_is_read_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of a layer are read for its turn: twice each, and never those of two layers one after another."""
    folder = tmp_path / "model"
    hf_models.write_folder(ROW, folder)
    turns: list[Any] = []
    read = layer_by_layer._Step._read

    def noted(step: Any, path: str, row: int | None) -> Any:
        turn = (path.partition(".")[0], row)
        if row is not None and turn not in turns[-1:]:
            turns.append(turn)
        return read(step, path, row)

    monkeypatch.setattr(layer_by_layer._Step, "_read", noted)
    monkeypatch.setattr(
        layer_by_layer._Step,
        "_call",
        lambda step, name, part, *arguments: _zeros(step, name, arguments),
    )
    monkeypatch.setattr(layer_by_layer._Step, "_received", lambda step, *of: iter(()))
    run = hf_models.run_of(folder, "data=1")
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=1, seq=8))
    list(LayerByLayer(run, open_folder(f"hf:{folder}"), TOKENS[:2, :5]))
    dense, first, last = ("dense_blocks", 0), ("blocks", 0), ("blocks", 1)
    assert turns == [dense, first, last, first, dense], "the last is read again at once"


def _zeros(step: Any, name: Any, arguments: Any) -> Any:
    """Stands for the compiled parts of a step."""
    x = jnp.zeros((1, 8, 64))
    if name == "loss":
        return arguments[0], x
    if name == "embed gradients":
        return arguments[0]
    return (arguments[0], x) if name[0] == "backward" else x


@pytest.mark.parametrize("against", ["../other", ".", "/a/venv"])
def test_a_folder_is_another_program(against: str) -> None:
    assert other_program.is_program(against)


def test_a_mesh_is_not_another_program_and_options_of_one_kind_are_refused_with_another() -> None:
    assert not other_program.is_program("data=2,tensor=2")
    options = dataclasses.replace(ParityOptions.of(base_run(["tiny"])), tokens=64)
    with pytest.raises(ConfigError, match="--tokens with --against data=1"):
        options.act(None)  # type: ignore[arg-type]

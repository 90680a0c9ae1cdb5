"""Models of one's own: the same numbers on every mesh, resumed, moved, evaluated; and errors that teach."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.plugins import load_file
from meshwright.runs.run_file import read_run
from meshwright.wrapped import prepared as prepared_module
from meshwright.wrapped.model import Wrapped

EXAMPLES = Path(__file__).parents[1] / "docs" / "wrap"
MESHES = {
    "mlp_linen": "data=2,fsdp=4",
    "vit_nnx": "data=2,fsdp=2,tensor=2",
    "mixer_equinox": "fsdp=8",
    "pytree": "data=2,fsdp=2,tensor=2",
}
every_example = pytest.mark.parametrize("name", MESHES)
STEPS = 4


def example(name: str) -> Wrapped:
    model: Wrapped = load_file(EXAMPLES / f"{name}.py").model
    return model


def run_of(name: str, mesh: str, **changes: Any) -> mw.Run:
    return example(name).run(mesh=mesh, steps=STEPS, learning_rate=3e-4, save_every=2, max_to_keep=9, **changes)


def train(run: mw.Run, out: Path, cache: Path, **how: Any) -> mw.Summary:
    return mw.train(run, out, cache=cache, progress="none", **how)


def losses(out: Path, name: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines if name in line]


def saved(out: Path, step: int) -> dict[str, Any]:
    """Shape, type and fingerprint of every tensor of a checkpoint."""
    manifest = json.loads((out / "checkpoints" / str(step) / "manifest" / "metadata").read_text(encoding="utf-8"))
    tensors: dict[str, Any] = manifest["tensors"]
    return tensors


@pytest.fixture(autouse=True, scope="module")
def programs_are_compiled_once() -> Iterator[None]:
    """Runs of this file that have the same program share its executable."""
    compiled: dict[Any, Any] = {}
    build = prepared_module.CompiledTrainStep

    def build_once(device_run: Any, *like: Any) -> Any:
        run = device_run.run
        training = dataclasses.replace(run.training, save_every=0, max_to_keep=1, eval_every=0, log_every=1)
        key = id(run.model.parts), dataclasses.replace(run, training=training, name="")
        return compiled.setdefault(key, None) or compiled.update({key: build(device_run, *like)}) or compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_module, "CompiledTrainStep", build_once)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Any:
    """Output folder of an example trained without interruption, by name and mesh."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(name: str, mesh: str) -> Path:
        if (name, mesh) not in folders:
            folders[name, mesh] = tmp_path_factory.mktemp(name) / "out"
            train(run_of(name, mesh), folders[name, mesh], cache)
        return folders[name, mesh]

    return folder


@every_example
def test_eight_devices_have_the_losses_of_one(trained: Any, name: str) -> None:
    eight, one = trained(name, MESHES[name]), trained(name, "data=1")
    np.testing.assert_allclose(losses(eight), losses(one), rtol=1e-6)
    np.testing.assert_allclose(losses(eight, "gradient norm"), losses(one, "gradient norm"), rtol=1e-5)
    if example(name).parts.held_out is not None:
        np.testing.assert_allclose(losses(eight, "held-out loss"), losses(one, "held-out loss"), rtol=1e-5)


@every_example
def test_initial_values_are_the_same_bits_on_every_mesh(name: str, cache: Path) -> None:
    meshes = ("data=1", MESHES[name])
    states = [
        prepared_module.prepare_wrapped(run_of(name, mesh), cache=cache).device_run.initial_state() for mesh in meshes
    ]
    for path, x in states[0].params.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(states[1].params[path]), err_msg=path)


@every_example
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(trained: Any, name: str, tmp_path: Path, cache: Path) -> None:
    whole = trained(name, MESHES[name])
    shutil.copytree(whole, tmp_path / "out")
    train(run_of(name, MESHES[name]), tmp_path / "out", cache, start="resume", at=2)
    assert saved(tmp_path / "out", STEPS) == saved(whole, STEPS)
    assert losses(tmp_path / "out") == losses(whole)


@every_example
def test_a_run_continues_on_another_mesh(trained: Any, name: str, tmp_path: Path, cache: Path) -> None:
    whole = trained(name, MESHES[name])
    shutil.copytree(whole, tmp_path / "out")
    train(run_of(name, "data=1"), tmp_path / "out", cache, start="resume", at=2)
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(whole), rtol=1e-6)


def test_a_checkpoint_is_evaluated_by_the_name_of_its_model(trained: Any, cache: Path) -> None:
    out = trained("mlp_linen", MESHES["mlp_linen"])
    assert read_run(out / "run.json").model.name.endswith("mlp_linen.py:model")  # type: ignore[attr-defined]
    evaluation: Any = mw.evaluate(out, mesh="fsdp=8", cache=cache)
    assert evaluation.step == STEPS and evaluation.loss == pytest.approx(losses(out, "held-out loss")[-1], rel=1e-6)
    assert 0 <= evaluation.metrics["accuracy"] <= 1


def test_parity_compares_gradients_too(cache: Path) -> None:
    result = mw.parity(run_of("pytree", "fsdp=8"), "data=2", steps=1, cache=cache)
    assert result.first_divergence is None and result.unequal_initial == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"microbatches": 2},
        {"layout": "zero1"},
        {"name": "lion"},
        {"remat": "full"},
        {"remat": "auto"},
        {"microbatches": 2, "layout": "zero1", "remat": "auto"},
    ],
)
def test_options_do_not_change_the_numbers(changes: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    optimizer = mw.Optimizer(name=changes.pop("name", "adamw"), learning_rate=3e-4)
    results = []
    for mesh, own in (("data=1", {}), ("data=2,fsdp=4", changes)):
        run = example("mixer_equinox").run(mesh=mesh, steps=2, optimizer=optimizer, **own)
        train(run, tmp_path / mesh, cache)
        results.append(losses(tmp_path / mesh))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)

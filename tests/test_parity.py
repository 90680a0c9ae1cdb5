"""Parity of two meshes: it passes where only rounding differs, and finds small errors in small tensors."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODELS, tiny_run

from meshwright.api.parity import parity
from meshwright.config import Data, MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware import mesh as mesh_module
from meshwright.models.families.llama import Llama
from meshwright.runs.run import Run
from meshwright.sharding.params import named_leaves
from meshwright.step import pipeline
from meshwright.step.device_run import DeviceRun
from meshwright.trainer import loop, other_program
from meshwright.trainer import parity as parity_module
from meshwright.trainer.other_program import compare_devices
from meshwright.trainer.parity import (
    TOLERANCE,
    check_processes,
    gradient_differences,
    other_devices,
)
from meshwright.views.result_pages import parity_page

MESH = "data=2,fsdp=2,tensor=2"
TEXT = "the quick brown fox jumps over the lazy dog; she sells sea shells by the sea shore. " * 300


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return str(file)


def small_run(text: str, **changes: Any) -> Run:
    """Smaller version of the recipe `tiny`, which the docs compare on the same two meshes."""
    model = changes.pop("model", Llama(None, 64, 2, 4, vocab_multiple=16, kv_heads=2, mlp=176))
    data = Data(paths=(text,), tokenizer="chars", sample=0)
    return tiny_run(model, changes.pop("mesh", MESH), data=data, seq=32, dropout=0.1, **changes)


@pytest.mark.exhaustive
def test_two_meshes_agree_after_updates_with_adamw(
    text: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: set[str] = set()

    def record(*gradients: Any) -> dict[str, float]:
        for tensors in gradients:
            compared.update(tensors)
        return gradient_differences(*gradients)

    monkeypatch.setattr(parity_module, "gradient_differences", record)
    run = small_run(text)
    result = parity(run, "data=1", steps=4, cache=cache)
    assert result.first_divergence is None and not result.unequal_initial
    assert [s.step for s in result.steps] == [1, 2, 3, 4]
    assert result.meshes == (MESH, "data=1")
    for step in result.steps:
        assert 0 < step.gradient_difference < TOLERANCE
        assert step.losses[0] == pytest.approx(step.losses[1], rel=TOLERANCE)
    assert result.steps[0].losses[1] > result.steps[-1].losses[1], "the runs train"
    assert compared == set(named_leaves(dataclasses.replace(run.model, vocab=50).params()))


@pytest.mark.exhaustive
def test_a_gradient_that_is_zero_but_for_rounding_agrees(text: str, cache: Path) -> None:
    """GPT-2's key bias: softmax ignores it, so its gradient is rounding error, and differs by as much as it is."""
    run = small_run(text, model=dataclasses.replace(MODELS["gpt2"], vocab=None))
    assert parity(run, "data=1", steps=2, cache=cache).first_divergence is None


@pytest.mark.exhaustive
def test_an_uneven_pipeline_agrees_with_one_device(text: str, cache: Path) -> None:
    """Its parameters have other rows, so that equal parameters take a conversion."""
    model = Llama(None, 64, 3, 4, vocab_multiple=16, kv_heads=2, mlp=176)
    run = small_run(text, model=model, mesh="data=1", microbatches=2)
    assert parity(run, "data=4,stage=2", steps=1, cache=cache).first_divergence is None


def test_planted_errors_are_found(text: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors on one mesh alone: 0.1 % of one small gradient, 3e-5 of the loss, the last bit of an initial value."""
    build, initial_state = parity_module.build_gradients, DeviceRun.initial_state
    largest: dict[str, float] = {}

    def planted_gradients(device_run: DeviceRun) -> Any:
        gradients = build(device_run)
        if device_run.layout.shape != MeshShape.parse(MESH):
            return gradients

        def run(params: Any, step: Any, batch: Any) -> Any:
            grads, metrics, aux = gradients(params, step, batch)
            total, weight = metrics["loss"]
            blocks = {**grads["blocks"], "key": grads["blocks"]["key"] * 1.001}
            return (
                {**grads, "blocks": blocks},
                {**metrics, "loss": (total * (1 + 3e-5), weight)},
                aux,
            )

        return run

    def planted_state(device_run: DeviceRun) -> Any:
        state = initial_state(device_run)
        if device_run.layout.shape == MeshShape.parse(MESH):
            up = state.params["blocks"]["up"]
            up = jax.device_put(np.nextafter(np.asarray(up), np.float32(1)), up.sharding)
            blocks = {**state.params["blocks"], "up": up}
            state = dataclasses.replace(state, params={**state.params, "blocks": blocks})
        return state

    def record(first: Any, second: Any, perturbed: Any) -> dict[str, float]:
        largest.update({name: float(np.abs(g).max()) for name, g in second.items()})
        return gradient_differences(first, second, perturbed)

    monkeypatch.setattr(parity_module, "build_gradients", planted_gradients)
    monkeypatch.setattr("meshwright.step.train_step.build_gradients", planted_gradients)
    monkeypatch.setattr(DeviceRun, "initial_state", planted_state)
    monkeypatch.setattr(parity_module, "gradient_differences", record)
    result = parity(small_run(text), "data=1", steps=1, cache=cache)
    assert result.unequal_initial == ("blocks.up",)
    assert result.first_divergence == "initial values of blocks.up"
    gradients_alone = dataclasses.replace(result, unequal_initial=())
    assert str(gradients_alone.first_divergence).startswith(
        "step 1, gradient of blocks.key: 1.0e-03"
    )
    # On the scale of the largest gradient of all tensors, the planted error would be within the tolerance.
    assert 1e-3 * largest["blocks.key"] / max(largest.values()) < TOLERANCE
    step = dataclasses.replace(result.steps[0], gradient_difference=0.0)
    loss_alone = dataclasses.replace(gradients_alone, steps=(step,))
    assert str(loss_alone.first_divergence).startswith("step 1, loss")


def test_a_fault_at_a_stages_boundary_is_named(
    text: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 % more of what a stage sends; the other mesh has no stages."""
    shift = pipeline.ring_shift
    monkeypatch.setattr(
        pipeline,
        "ring_shift",
        lambda x, axis, by: shift(x, axis, by) * (1.001 if by > 0 else 1.0),
    )
    result = parity(small_run(text, mesh="stage=2", microbatches=2), "data=1", steps=1, cache=cache)
    assert result.tensors is not None and result.tensors_of_step == 1
    assert str(result.first_tensor).startswith("layer 1, input: differs by ")
    assert "layer 1, input" in "".join(str(page) for page in parity_page(result).sections)


def test_devices_that_change_around_have_the_same_bits(
    text: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device whose weights differ is named: it computed what differs in both orders."""
    run = small_run(text, mesh="data=2")
    prepared = loop.prepare_run(run, cache=cache, devices=3, weights="")
    clean = compare_devices(prepared)
    assert clean.first_divergence is None and clean.devices == ()
    place = parity_module.Side._to_devices

    def planted(side: Any, params: Any) -> Any:
        arrays = place(side, params)
        norm = arrays["blocks"]["mlp_norm"]
        shards = [
            shard.data * (1.001 if shard.device.id == 1 else 1.0)
            for shard in norm.addressable_shards
        ]
        norm = jax.make_array_from_single_device_arrays(norm.shape, norm.sharding, shards)
        return {**arrays, "blocks": {**arrays["blocks"], "mlp_norm": norm}}

    monkeypatch.setattr(parity_module.Side, "_to_devices", planted)
    sick = compare_devices(prepared)
    assert str(sick.first_tensor).startswith("layer 0, feed-forward input: differs by ")
    assert [name.rpartition(":")[2] for name in sick.devices] == [
        str(jax.devices()[1]).rpartition(":")[2]
    ]


def test_another_checkout_takes_the_same_step(text: str, cache: Path) -> None:
    """This checkout by a process of its own; its step is the same to the last bit."""
    run = small_run(text, mesh="data=2")
    root = Path(parity_module.__file__).parents[3]
    result = parity(run, str(root), cache=cache)
    assert result.unequal_initial == () and result.first_divergence is None
    assert result.tensors is not None and len(result.tensors.differences) > 60
    assert result.tensors.only == ()


def test_a_folder_that_is_neither_checkout_nor_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="it has no src/meshwright, which a checkout has, and no bin/python"
    ):
        other_program._command_of(tmp_path)


def test_the_scale_of_a_tensor() -> None:
    reference = {"w": np.array([2.0, -4.0], np.float32)}

    def difference(gradient: list[float], perturbed: list[float]) -> float:
        return gradient_differences(
            {"w": np.array(gradient)}, reference, {"w": np.array(perturbed)}
        )["w"]

    assert difference([2.0, -4.0], [2.0, -4.0]) == 0
    assert difference([2.4, -4.0], [2.0, -4.0]) == pytest.approx(0.1), "its own largest element"
    assert difference([2.4, -4.0], [2.05, -4.0]) == pytest.approx(TOLERANCE), (
        "eight times the rounding error"
    )
    assert np.isnan(difference([np.nan, -4.0], [2.0, -4.0]))
    zero = {"w": np.zeros(2)}
    assert gradient_differences(zero, zero, zero) == {"w": 0.0}
    assert gradient_differences({"w": np.ones(2)}, zero, zero) == {"w": np.inf}


def test_a_gradient_that_is_nan_diverges() -> None:
    step = parity_module.StepParity(1, (2.0, 2.0), float("nan"), "w")
    assert (
        parity_module.Parity(("a", "b"), (), (step,)).first_divergence
        == "step 1, gradient of w: nan of its scale"
    )
    nan = parity_module.StepParity(1, (float("nan"), 2.0), 0.0, "w")
    assert "loss nan against" in str(parity_module.Parity(("a", "b"), (), (nan,)).first_divergence)


@pytest.mark.parametrize(
    ("mesh", "other", "truth"),
    [("fsdp=4", "data=1", "4 of their 8 devices"), ("fsdp=8", "data=6", "process 0 alone has 4"),
     ("fsdp=8", "data=4", ""), (None, "tensor=8", "")],
)  # fmt: skip
def test_meshes_that_several_processes_compare(
    mesh: str | None, other: str, truth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    shape = MeshShape.parse(mesh) if mesh else None
    if not truth:
        return check_processes(shape, MeshShape.parse(other))
    with pytest.raises(ConfigError, match=truth):
        check_processes(shape, MeshShape.parse(other))


def test_a_mesh_of_process_0_needs_no_other_slice() -> None:
    """Two slices of two hosts of two chips: `data=1` runs on one chip, where all devices would need a DCN axis."""
    devices: list[Any] = [
        SimpleNamespace(
            id=i, process_index=i // 2, slice_index=i // 4, platform="tpu", device_kind="fake"
        )
        for i in range(8)
    ]
    one, all_of_them = MeshShape(data=1), MeshShape(data=8, slices=2)
    with pytest.raises(ConfigError, match="in 2 slices"):
        mesh_module._in_slices(one, devices)
    assert [
        [d.id for d in part] for part in mesh_module._in_slices(one, other_devices(one, devices))
    ] == [[0]]
    assert other_devices(all_of_them, devices) == devices

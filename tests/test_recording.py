"""Tensors of a step are recorded as the step computes them: the same on every mesh, in the order of computation."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

import meshwright
from meshwright.models.model import Model
from meshwright.models.recording import LAYER_TENSORS, Recorder, TensorName
from meshwright.step.recorded_step import Recording, record_step

SCALE = 2e-5
"""Largest difference that the meshes of these runs make in float32, relative to a tensor's largest element."""


def recording_of(model: Model, mesh: str, **changes: Any) -> Recording:
    device_run = device_run_of(tiny_run(model, mesh, **changes))
    state = device_run.initial_state()
    return record_step(device_run, state.params, state.step, random_batch(device_run))


def assert_same_tensors(first: Recording, second: Recording) -> None:
    assert first.names == second.names
    for name in first.names:
        expected = second.tensor(name)
        difference = np.abs(first.tensor(name) - expected).max()
        assert difference <= SCALE * np.abs(expected).max(), str(name)


@pytest.fixture(scope="module")
def one_device() -> Recording:
    return recording_of(MODELS["llama"], "data=1", remat="none")


def test_a_split_pipeline_has_the_tensors_of_one_device(one_device: Recording) -> None:
    """Microbatches, stages, a split batch and split heads at once; recomputation sends a tensor twice."""
    mesh = recording_of(MODELS["llama"], "data=2,tensor=2,stage=2", microbatches=4, remat="full")
    assert_same_tensors(mesh, one_device)


def test_every_tensor_of_a_step_has_its_place(one_device: Recording) -> None:
    names = [str(name) for name in one_device.names]
    layer = ["input", "attention input", "attention heads", "attention output", "attention residual",
             "feed-forward input", "feed-forward output", "output"]  # fmt: skip
    end = ["final norm", "log-sum-exp of the logits", "token loss"]
    forward = ["embedding", *(f"layer {i}, {name}" for i in range(2) for name in layer), *end]
    backward = [f"gradient of {name}" for name in reversed(forward)]
    assert names[: len(forward)] == forward
    parameters = [str(name) for name in one_device.names if name.of == "parameters"]
    assert [name for name in names[len(forward) :] if name not in parameters] == backward
    assert parameters[-1] == "gradient of embed" and "gradient of unembed" in parameters[:2]
    last = names.index("gradient of layer 1, input")
    assert names[last + 1] in parameters and names[last + 10] == "gradient of layer 0, output"
    layers = [int(re.findall(r"layer (\d)", name)[0]) for name in parameters if "layer" in name]
    assert layers == sorted(layers, reverse=True) and len(layers) == 2 * 9
    for name in one_device.names:
        assert np.isfinite(one_device.tensor(name)).all(), f"no device has sent all of {name}"


def test_a_piece_tells_its_device_and_a_measure_is_computed_there() -> None:
    device_run = device_run_of(tiny_run(MODELS["gpt2"], "data=2,tensor=2"))
    state = device_run.initial_state()
    recorder = Recorder(measure=lambda x: jnp.abs(x).max())
    recording = record_step(
        device_run, state.params, state.step, random_batch(device_run), recorder=recorder
    )
    name = TensorName("forward", "attention output", 1)
    assert {recording.device_of(piece) for piece in recording.pieces[name]} == set(
        jax.devices()[:4]
    )
    assert {piece.values.shape for pieces in recording.pieces.values() for piece in pieces} == {()}
    assert len(recording.devices(name, 0, 0)) == 1, "data and tensor split the tokens"
    heads = TensorName("forward", "attention heads", 1)
    assert len(recording.devices(heads, 0, 0)) == 2, "each has half of the heads"


def test_every_tap_of_a_layer_has_a_place_in_the_order() -> None:
    """A tap whose name is not in the list would be sorted after its layer's output."""
    folder = Path(meshwright.__file__).parent / "models"
    taps: set[str] = set()
    for file in folder.rglob("*.py"):
        calls = re.findall(
            r"(?:\.record|\btap|\.of_piece\(i, count\))\(\s*\"([^\"]+)\"", file.read_text()
        )
        taps.update(calls)
    assert taps == set(LAYER_TENSORS)

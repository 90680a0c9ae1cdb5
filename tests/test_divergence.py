"""The first tensor that differs by more than rounding explains is named; rounding alone is never named."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import DEEPSEEK, MODELS, QWEN3_NEXT, device_run_of, random_batch, tiny_run

from meshwright.models import decoder, forward
from meshwright.models.blocks import experts
from meshwright.models.blocks.layers import Norm
from meshwright.models.model import Model
from meshwright.models.recording import Recorder, TensorName
from meshwright.step import gradients, pipeline
from meshwright.step.recorded_step import Recording, build_recorder
from meshwright.trainer.divergence import Divergence, as_json, compare, divergence_of, perturb
from meshwright.trainer.parity import unclipped

Plant = Callable[[pytest.MonkeyPatch], None]
FACTOR = 1.001


def source(recording: Recording) -> Iterator[tuple[TensorName, np.ndarray]]:
    for name in recording.names:
        yield name, recording.tensor(name)


def recorded(
    model: Model, mesh: str, perturbed: bool = False, **changes: Any
) -> tuple[Recording, Recording | None]:
    """Tensors of a step on a mesh, and at perturbed parameters."""
    device_run = unclipped(device_run_of(tiny_run(model, mesh, **changes)))
    state = device_run.initial_state()
    record = build_recorder(device_run, Recorder())
    batch = random_batch(device_run)
    exact = record(state.params, state.step, batch)
    if not perturbed:
        return exact, None
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jax.device_put(perturb(np.asarray(x), rng), x.sharding), state.params
    )
    return exact, record(params, state.step, batch)


@functools.cache
def one_device(name: str) -> tuple[Recording, Recording | None]:
    return recorded(FAMILIES[name], "data=1", perturbed=True)


FAMILIES: dict[str, Model] = {**MODELS, "deepseek": DEEPSEEK, "qwen3-next": QWEN3_NEXT}


def divergence_from_one_device(name: str, mesh: str, **changes: Any) -> Divergence:
    reference, perturbed = one_device(name)
    assert perturbed is not None
    first, _ = recorded(FAMILIES[name], mesh, **changes)
    return compare((mesh, "data=1"), source(first), source(reference), source(perturbed))


@pytest.mark.parametrize(
    ("name", "mesh", "changes"),
    [
        ("llama", "data=2,tensor=2,stage=2", {"microbatches": 4}),
        ("llama", "stage=2,context=2", {"microbatches": 4}),
        ("llama", "fsdp=8", {"gather_ahead": "layer", "remat": "projections"}),
        ("gpt2", "data=2,fsdp=2,tensor=2", {}),
        ("qwen-like", "context=2,tensor=2", {}),
        ("mixtral", "data=2,expert=4", {}),
        ("deepseek", "stage=2,expert=2", {"microbatches": 2, "stage_saves": "layers"}),
        ("deepseek", "data=2,expert=2,tensor=2", {}),
        ("qwen3-next", "data=2,tensor=2,stage=2", {"microbatches": 4}),
    ],
)  # fmt: skip
def test_rounding_explains_what_meshes_differ_by(
    name: str, mesh: str, changes: dict[str, Any]
) -> None:
    divergence = divergence_from_one_device(name, mesh, **changes)
    assert divergence.first is None, str(divergence.first)
    assert divergence.only == () and len(divergence.differences) > 50
    assert any(d.largest > 0 for d in divergence.differences), "sums are in another order"


def plant_head(patch: pytest.MonkeyPatch) -> None:
    """0.1 % more of one head of one device."""
    build = forward.build_attend

    def planted(*arguments: Any) -> Any:
        attend = build(*arguments)

        def run(*qkv: Any, **options: Any) -> jax.Array:
            out_BTNH = attend(*qkv, **options)
            is_first = jax.lax.axis_index("tensor") == 0
            return out_BTNH.at[:, :, 3].multiply(jnp.where(is_first, FACTOR, 1.0))

        return run

    patch.setattr(forward, "build_attend", planted)


def plant_expert(patch: pytest.MonkeyPatch) -> None:
    """0.1 % more of what one expert returns."""
    run = experts.dropless_moe

    def planted(kind: Any, h: Any, routes: Any, weights: Any, *rest: Any) -> Any:
        is_first = jax.lax.axis_index("expert") == 0
        down = weights["down"].at[1].multiply(jnp.where(is_first, FACTOR, 1.0))
        return run(kind, h, routes, {**weights, "down": down}, *rest)

    patch.setattr(experts, "dropless_moe", planted)


def plant_dropped_expert(patch: pytest.MonkeyPatch) -> None:
    """One expert returns nothing."""
    run = experts.dropless_moe

    def planted(kind: Any, h: Any, routes: Any, weights: Any, *rest: Any) -> Any:
        is_first = jax.lax.axis_index("expert") == 0
        down = weights["down"].at[1].multiply(jnp.where(is_first, 0.0, 1.0))
        return run(kind, h, routes, {**weights, "down": down}, *rest)

    patch.setattr(experts, "dropless_moe", planted)


def plant_boundary(patch: pytest.MonkeyPatch) -> None:
    """0.1 % more of what a stage sends to the next."""
    shift = pipeline.ring_shift
    patch.setattr(
        pipeline,
        "ring_shift",
        lambda x, axis, by: shift(x, axis, by) * (FACTOR if by > 0 else 1.0),
    )


def plant_boundary_of_gradients(patch: pytest.MonkeyPatch) -> None:
    """0.1 % more of the gradient that a stage sends to the one before."""
    shift = pipeline.ring_shift
    patch.setattr(
        pipeline,
        "ring_shift",
        lambda x, axis, by: shift(x, axis, by) * (FACTOR if by < 0 else 1.0),
    )


def plant_mask(patch: pytest.MonkeyPatch) -> None:
    """0.1 % of attention goes to the documents before."""
    build = forward.build_attend

    def planted(split: Any, segments_BT: jax.Array, kernels: Any) -> Any:
        attend = build(split, segments_BT, kernels)
        leaky = build(split, jnp.zeros_like(segments_BT), kernels)
        return lambda *qkv, **options: (
            (2 - FACTOR) * attend(*qkv, **options) + (FACTOR - 1) * leaky(*qkv, **options)
        )

    patch.setattr(forward, "build_attend", planted)


def plant_leak(patch: pytest.MonkeyPatch) -> None:
    """One sequence's documents see each other."""
    build = forward.build_attend

    def planted(split: Any, segments_BT: jax.Array, kernels: Any) -> Any:
        return build(split, segments_BT.at[1].set(0), kernels)

    patch.setattr(forward, "build_attend", planted)


def plant_epsilon(patch: pytest.MonkeyPatch) -> None:
    """A norm's epsilon of 1e-6 instead of 1e-5."""
    run = Norm.__call__
    patch.setattr(
        Norm,
        "__call__",
        lambda norm, *arguments: run(dataclasses.replace(norm, epsilon=1e-6), *arguments),
    )


def plant_sum(patch: pytest.MonkeyPatch) -> None:
    """The gradients of all parameters that `data` has copies of are summed, and one device counts 0.1 % more."""
    accumulate = gradients._accumulate

    def planted(*arguments: Any) -> Any:
        grads, sums = accumulate(*arguments)
        is_first = jax.lax.axis_index("data") == 0
        more = jnp.where(is_first, FACTOR, 1.0)
        grads["blocks"]["up"] = grads["blocks"]["up"] * more
        return grads, sums

    patch.setattr(gradients, "_accumulate", planted)


def plant_transposed(patch: pytest.MonkeyPatch) -> None:
    """The output projection of attention reads its square matrix transposed."""
    run = decoder.Block._halves

    def planted(block: Any, ctx: Any) -> Any:
        layer = run(block, ctx)

        def transposed(x: Any, w: Any, index: Any) -> Any:
            out_NHD = w["attention_out"]
            flat_DD = jnp.swapaxes(out_NHD.reshape(-1, out_NHD.shape[-1]), 0, 1)
            return layer(x, {**w, "attention_out": flat_DD.reshape(out_NHD.shape)}, index)

        return transposed

    patch.setattr(decoder.Block, "_halves", planted)


@pytest.mark.parametrize(
    ("plant", "name", "mesh", "changes", "expected"),
    [
        (plant_head, "llama", "data=2,tensor=2", {}, "layer 0, attention heads"),
        (plant_expert, "deepseek-like", "expert=2", {}, "layer 1, feed-forward output"),
        (plant_dropped_expert, "deepseek-like", "expert=2", {}, "layer 1, feed-forward output"),
        (plant_boundary, "llama", "stage=2", {"microbatches": 2}, "layer 1, input"),
        (plant_boundary_of_gradients, "llama", "stage=2", {"microbatches": 2},
         "gradient of layer 0, output"),
        (plant_mask, "llama", "data=2", {}, "layer 0, attention heads"),
        (plant_leak, "llama", "data=2", {}, "layer 0, attention heads"),
        (plant_epsilon, "llama", "data=2", {}, "layer 0, attention input"),
        (plant_transposed, "llama", "data=2", {}, "layer 0, attention output"),
        (plant_sum, "llama", "data=2", {}, "gradient of layer 1, up"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    plant: Plant,
    name: str,
    mesh: str,
    changes: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_device(name)
    plant(monkeypatch)
    divergence = divergence_from_one_device(name, mesh, **changes)
    assert str(divergence.first).startswith(f"{expected}: differs by ")
    assert divergence.first is not None and divergence.first.excess > 10


def names(*of: tuple[str, str, int | None]) -> list[TensorName]:
    return [TensorName(*name) for name in of]  # type: ignore[arg-type]


FORWARD = names(("forward", "embedding", None), ("forward", "input", 0), ("forward", "output", 0))
BACKWARD = names(
    ("backward", "output", 0), ("parameters", "up", 0), ("backward", "embedding", None)
)


def arrays(**changes: np.ndarray) -> list[tuple[TensorName, np.ndarray]]:
    values = {name: np.linspace(1, 2, 6).astype(np.float32) for name in [*FORWARD, *BACKWARD]}
    return [(name, changes.get(str(name), value)) for name, value in values.items()]


def slightly(tensors: list[tuple[TensorName, np.ndarray]]) -> Any:
    return ((name, x * np.float32(1 + 1e-6)) for name, x in tensors)


def test_the_first_tensor_in_the_order_of_computation_is_named() -> None:
    base = np.linspace(1, 2, 6).astype(np.float32)
    faults = {"gradient of embedding": base * 1.1, "gradient of layer 0, up": base * 1.001}
    divergence = compare(("a", "b"), arrays(**faults), arrays(), slightly(arrays()))
    assert str(divergence.first) == (
        "gradient of layer 0, up: differs by 1.0e-03 of its scale, and rounding explains 7.6e-06"
    )
    table = divergence.by_layer()
    assert [name for name, _ in table] == ["before the layers", "layer 0"]
    assert table[1][1]["parameters"].place == (5,) and not table[1][1]["parameters"].is_explained
    assert table[1][1]["forward"].is_explained and not table[0][1]["backward"].is_explained
    assert divergence_of(("a", "b"), as_json(divergence)) == divergence


def test_what_only_one_source_has_is_said_and_a_wrong_shape_or_nan_differs() -> None:
    base = np.linspace(1, 2, 6).astype(np.float32)
    fewer = [pair for pair in arrays() if pair[0].name != "up"]
    divergence = compare(("a", "b"), fewer, arrays(), slightly(arrays()))
    assert divergence.only == ("gradient of layer 0, up",) and divergence.first is None
    for wrong in (base[:5], np.full(6, np.nan, np.float32), base + np.float32(np.inf)):
        found = compare(
            ("a", "b"), arrays(**{"layer 0, input": wrong}), arrays(), slightly(arrays())
        )
        assert found.first is not None and str(found.first.name) == "layer 0, input"
    nan = {"layer 0, input": np.full(6, np.nan, np.float32)}
    both = compare(("a", "b"), arrays(**nan), arrays(**nan), slightly(arrays(**nan)))
    assert both.first is None, "neither has a number: the sources agree"


def test_equal_tensors_agree_where_rounding_explains_nothing() -> None:
    assert compare(("a", "b"), arrays(), arrays(), arrays()).first is None
    off = {"layer 0, input": np.nextafter(np.linspace(1, 2, 6).astype(np.float32), np.float32(3))}
    assert compare(("a", "b"), arrays(**off), arrays(), arrays()).first is not None

"""Layers of several kinds that repeat: their scan against a loop, their stages, and Gemma 3 on meshes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import assert_same_steps, device_run_of, tiny_run, train, train_on_one_device

import meshwright as mw
from meshwright.models.flops import layer_flops
from meshwright.models.periods import scan_periods
from meshwright.runs.placed_run import place_run
from meshwright.sharding.periods import assign_periods
from meshwright.sharding.stages import loop_placement

GEMMA = mw.Gemma3(
    50, 64, 5, 8, 4, 8, 96, vocab_multiple=16, local_layers=1, sliding_window=5, query_scale=6, rope_factor=4.0
)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("layers", [6, 8, 2])
def test_the_scan_is_a_loop_over_layers(layers: int, remat: str) -> None:
    """Layers after the last whole period, and fewer layers than a period."""
    kinds = tuple(lambda x, w, i, k=k: (jnp.sin(x * w) + k * i, {"kind": k * jnp.ones(()), "x": x}) for k in range(3))
    w_L, x = jnp.linspace(0.5, 1.5, layers), jnp.arange(4.0)

    def scanned(x: Any, w_L: Any) -> Any:
        return scan_periods(kinds, x, w_L, np.arange(layers), remat=remat, unroll=1)

    def looped(x: Any, w_L: Any) -> Any:
        aux = []
        for i in range(layers):
            x, more = kinds[i % 3](x, w_L[i], i)
            aux.append(more)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *aux)

    for a, b in zip(jax.tree.leaves(scanned(x, w_L)), jax.tree.leaves(looped(x, w_L)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    grads = [jax.grad(lambda *args, f=f: f(*args)[0].sum(), (0, 1))(x, w_L) for f in (scanned, looped)]
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_parts_begin_with_a_period() -> None:
    assignment = assign_periods((1.0,) * 26, 6, 2, 1, loop_placement)
    assert assignment.boundaries == (0, 12, 26)
    rows = assignment.rows(0, 26)[:, 0]
    assert all(layer % 6 == row % 6 for stage in rows for row, layer in enumerate(stage) if layer >= 0)
    with pytest.raises(mw.ConfigError, match=r"every part begins with a period, and 8 parts > 5 periods"):
        assign_periods((1.0,) * 26, 6, 4, 2, loop_placement)


def test_a_global_layer_costs_more_than_a_local_one() -> None:
    model = dataclasses.replace(GEMMA, sliding_window=64)
    local, whole = layer_flops(model, 4096)[:2]
    seen = (64 * 65 / 2 + (4096 - 64) * 64) / 4096
    assert whole - local == pytest.approx(4 * 8 * 8 * (4097 / 2 - seen))


def test_gathering_ahead_is_refused_for_several_kinds() -> None:
    run = tiny_run(GEMMA, "fsdp=2", gather_ahead="layer")
    with pytest.raises(mw.ConfigError, match="the model's layers repeat with a period of 2"):
        device_run_of(run)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("stage=2,context=2,tensor=2", {"microbatches": 2}),
        pytest.param("fsdp=4,data=2", {"saved_layers": 3}, marks=pytest.mark.exhaustive),
        pytest.param("stage=2,fsdp=2", {"microbatches": 2, "pipeline_schedule": "zero_bubble"},
                     marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_gemma_has_the_numbers_of_one_device(mesh: str, changes: dict[str, Any]) -> None:
    """Stages of unequal length with padding rows, a window across chunks of a ring, a part that begins in a period."""
    run = tiny_run(GEMMA, mesh, **changes)
    one = train_on_one_device(run, 3)
    assert_same_steps(train(run, 3, initial=one.initial), one)


def test_gemma_shrinks_with_its_pattern() -> None:
    shape = mw.MeshShape(stage=2, tensor=2)
    small = mw.recipe("gemma3-4b").model.shrunk(shape, 2)
    assert small.spec().period == 2
    run = dataclasses.replace(tiny_run(small), model=small, mesh=shape)
    assert place_run(run, shape).stages.boundaries == (0, 2, 4)

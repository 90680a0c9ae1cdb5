"""bfloat16 parameters: masters lose nothing, random rounding loses nothing on average, meshes agree."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from tiny_runs import (
    MODELS,
    QWEN3_NEXT,
    device_run_of,
    largest_difference,
    on_one_device,
    random_batch,
    tiny_run,
    train,
)

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import Optimizer
from meshwright.errors import ConfigError
from meshwright.models.model import Model
from meshwright.sharding.params import Param, named_leaves
from meshwright.sharding.stages import NO_LAYER
from meshwright.step.bfloat16_params import (
    MasterState,
    join_float32,
    round_at_random,
    split_float32,
    with_masters,
    with_random_rounding,
)
from meshwright.step.optimizers import build_optimizer
from meshwright.step.state import UpdateRule
from meshwright.step.train_step import build_train_step

BFLOAT16 = {"param_dtype": "bfloat16"}
KINDS = [BFLOAT16, {**BFLOAT16, "param_rounding": "stochastic"}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["master", "stochastic"])


def test_a_float32_number_is_its_two_halves() -> None:
    """All lower halves under some upper ones: 1, -1, zeros, the smallest, the largest, and a hundred others."""
    upper = [
        0x3F80,
        0xBF80,
        0x0000,
        0x8000,
        0x0080,
        0x7F00,
        *np.random.default_rng(0).integers(0, 0x7F00, 100),
    ]
    bits = (np.array(upper, np.uint32)[:, None] << 16) + np.arange(2**16, dtype=np.uint32)
    halves = split_float32(jnp.asarray(bits.view(np.float32)))
    assert [x.dtype for x in halves] == [jnp.bfloat16, jnp.int16]
    np.testing.assert_array_equal(np.asarray(join_float32(*halves)).view(np.uint32), bits)
    # The upper half is a nearest bfloat16 number: no further away than the one that rounding to even gives.
    x = bits.view(np.float32).astype(np.float64)
    nearest = bits.view(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert (np.abs(np.asarray(halves[0], np.float64) - x) <= np.abs(nearest - x)).all()


def test_random_rounding_is_right_on_average() -> None:
    x = jnp.full(200_000, 1.0 + 0.3 * 2**-7, jnp.float32)
    rounded = np.asarray(round_at_random(x, jax.random.key(0)), np.float64)
    assert set(rounded) == {1.0, 1.0 + 2**-7}
    # Five standard deviations of a share of 0.3 among 200,000.
    assert abs((rounded > 1).mean() - 0.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5


ONE = {"w": Param((4096,), "D")}


@pytest.mark.parametrize(
    "rule", [with_masters(optax.sgd(1e-5), 0, ONE), with_random_rounding(optax.sgd(1e-5), 0, ONE)]
)
def test_small_updates_arrive(rule: UpdateRule) -> None:
    """A thousand steps of 1e-5 from 1.0; the next bfloat16 number below is 0.996, and nearest rounding stays."""
    params = {"w": jnp.ones((4096,), jnp.bfloat16)}
    ones, state = {"w": jnp.ones((4096,), jnp.float32)}, rule.init(params)

    @jax.jit
    def thousand(params: Any, state: Any) -> Any:
        return jax.lax.fori_loop(
            0, 1000, lambda i, x: rule.update(ones, x[1], x[0], i), (params, state)
        )

    params, state = thousand(params, state)
    weights = (
        join_float32(params["w"], state.low_bits["w"])
        if isinstance(state, MasterState)
        else params["w"]
    )
    assert abs(np.asarray(weights, np.float64).mean() - 0.99) < 4e-4
    assert jnp.bfloat16(1.0) - jnp.bfloat16(1e-5) == 1.0


def test_a_layer_is_rounded_alike_in_any_row() -> None:
    """Interleaved stages keep the rows of a stack in another order, with rows of padding."""
    layers = jax.random.normal(jax.random.key(1), (4, 6, 5))
    order, key = (2, 0, NO_LAYER, 3, 1), jax.random.key(0, impl="threefry2x32")
    rows = jnp.where(np.array(order)[:, None, None] == NO_LAYER, 0, layers[np.maximum(order, 0)])
    moved = np.asarray(round_at_random(rows, key, order), np.float32)
    expected = np.asarray(round_at_random(layers, key), np.float32)
    np.testing.assert_array_equal(moved[[1, 4, 0, 3]], expected)
    assert not moved[2].any()


@kinds
@pytest.mark.parametrize(
    ("model", "names"),
    [(MODELS["deepseek-like"], {"router_bias"}), (QWEN3_NEXT, {"a_log", "step_bias"})],
    ids=["router-bias", "decay-rates"],
)
def test_what_small_steps_move_is_float32_at_rest(
    kind: dict[str, Any], model: Model, names: set[str]
) -> None:
    """A step of 0.001 is lost in a bfloat16 bias above 0.5; `transformers` keeps these in float32 too."""
    device_run = device_run_of(tiny_run(model, **kind))
    state = device_run.abstract
    kept = {
        path.rpartition(".")[2]
        for path, x in named_leaves(state.params).items()
        if x.dtype == jnp.float32
    }
    assert kept == names
    if isinstance(state.optimizer, MasterState):
        assert not any(
            path.endswith(tuple(names)) for path in named_leaves(state.optimizer.low_bits)
        )
    if "router_bias" in names:
        params = {
            "blocks": {
                "router_bias": jnp.full((2, 8), 0.75, state.params["blocks"]["router_bias"].dtype)
            }
        }
        moved = model.post_update(params, {"blocks": {"load": jnp.tile(jnp.arange(8.0), (2, 1))}})
        assert (moved["blocks"]["router_bias"][:, :4] > 0.75).all()


@kinds
@pytest.mark.parametrize(
    ("family", "mesh"), [("llama", "data=2,fsdp=2,tensor=2"), ("deepseek-like", "fsdp=4,expert=2")]
)
def test_the_numbers_of_one_device(kind: dict[str, Any], family: str, mesh: str) -> None:
    """deepseek-like has parameters that change beside the optimizer: the router's bias."""
    run = tiny_run(MODELS[family], mesh, **kind)
    many = train(run, 3)
    one = train(on_one_device(run), 3, initial=many.initial)
    # Gradients of bfloat16 parameters are bfloat16 and may round apart, by one part in 256.
    assert many.losses == pytest.approx(one.losses, rel=2e-4)
    assert largest_difference(many.gradients, one.gradients) < 2**-7


def test_masters_follow_the_float32_run() -> None:
    """The parameters are the masters, rounded, and the moments are float32."""
    run = tiny_run(MODELS["llama"], **BFLOAT16)
    device_run = device_run_of(run)
    state = device_run.initial_state()
    step = build_train_step(device_run)
    for number in range(3):
        state, _ = step(state, random_batch(device_run, number))
    masters = jax.tree.map(join_float32, state.params, state.optimizer.low_bits)
    rounded = jax.tree.map(lambda m: m.astype(jnp.bfloat16), masters)
    for upper, nearest in zip(jax.tree.leaves(state.params), jax.tree.leaves(rounded), strict=True):
        assert upper.dtype == jnp.bfloat16
        np.testing.assert_allclose(upper.astype(np.float32), nearest.astype(np.float32), rtol=2**-7)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.optimizer.inner) if x.ndim)


@kinds
def test_saved_and_restored_bit_for_bit_on_another_mesh(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    run = tiny_run(MODELS["llama"], "data=2,fsdp=2,tensor=2", **kind)
    device_run = device_run_of(run)
    state, _ = build_train_step(device_run)(device_run.initial_state(), random_batch(device_run))
    other = device_run_of(tiny_run(MODELS["llama"], "fsdp=8", **kind))
    with Checkpoints(tmp_path / "checkpoints", max_to_keep=1) as checkpoints:
        checkpoints.save(state, device_run, step=1, cursor=16)
        checkpoints.wait()
        restored, _ = checkpoints.restore(other)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_moments_in_bfloat16_are_refused_where_there_are_none() -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"]))
    with pytest.raises(ConfigError, match="adamw, lion, muon, sgd"):
        build_optimizer(
            Optimizer("adafactor", moment_dtype="bfloat16"), 10, device_run.layout.params
        )
    rule = build_optimizer(Optimizer(moment_dtype="bfloat16"), 10, device_run.layout.params)
    adam: Any = jax.eval_shape(rule.init, device_run.abstract.params)
    assert adam[0].mu["embed"].dtype == jnp.bfloat16 and adam[0].nu["embed"].dtype == jnp.float32

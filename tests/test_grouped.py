"""Grouped matmul: the Triton kernel in interpret mode against a loop over experts, and which one a run takes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import MODELS, device_run_of, tiny_run

from meshwright.errors import ConfigError
from meshwright.models.kernels import grouped_triton
from meshwright.models.kernels.choose import GroupedMatmul, choose_grouped_matmul
from meshwright.models.kernels.grouped_triton import grouped_matmul
from meshwright.trust import own

# A tile has 128 rows and 128 columns, and a step along the contracted dimension 32 of float32.
CASES = {
    "sizes of one tile": (256, 32, 128, [128, 128]),
    "one element more than tiles": (257, 33, 129, [128, 129]),
    "empty experts at both ends and inside": (200, 64, 128, [0, 130, 0, 70, 0]),
    "all rows to one expert": (300, 40, 24, [0, 300, 0, 0]),
    "ragged ends": (321, 48, 136, [1, 127, 129, 64]),
    "rows past the last expert": (300, 32, 32, [10, 0, 150]),
    "no rows of any expert": (140, 32, 16, [0, 0]),
    "two tiles of columns in one": (160, 256, 256, [33, 0, 127]),
    "more experts than tiles of rows": (16, 16, 16, [1, 2, 0, 3, 1, 0, 2, 4]),
}


def by_expert(arrays: Iterable[Any], sizes: Any) -> tuple[np.ndarray, ...]:
    """Output and gradients in float64, one expert after another."""
    x, w, g = (np.asarray(a, np.float64) for a in arrays)
    out, g_x, g_w = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], g_x[rows], g_w[e] = x[rows] @ w[e], g[rows] @ w[e].T, x[rows].T @ g[rows]
        start += size
    return out, g_x, g_w


def draw(case: str, dtype: Any = np.float32) -> tuple[Any, ...]:
    rows, k, n, sizes = CASES[case]
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.normal(size=s).astype(np.float32) for s in ((rows, k), (len(sizes), k, n), (rows, n))
    )
    return *(jnp.asarray(a, dtype) for a in (x, w, g)), np.array(sizes, np.int32)


def with_gradients(
    x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, ...]:
    out, pullback = jax.vjp(lambda x, w: grouped_matmul(x, (w,), sizes, True)[0], x, w)
    return out, *pullback(g)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    x, w, g, sizes = draw(case)
    got = jax.jit(with_gradients)(x, w, g, sizes)
    for a, b in zip(got, by_expert((x, w, g), sizes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_sums_in_float32(case: str) -> None:
    x, w, g, sizes = draw(case, jnp.bfloat16)
    want = by_expert((a.astype(jnp.float32) for a in (x, w, g)), sizes)
    for a, b in zip(jax.jit(with_gradients)(x, w, g, sizes), want, strict=True):
        assert a.dtype == jnp.bfloat16
        # One rounding to 8 bits at the end.
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-8, atol=1e-4)


def test_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_triton, "_LEAST_TILES", 1)
    x, w, g, sizes = draw("two tiles of columns in one")
    for a, b in zip(
        jax.jit(with_gradients)(x, w, g, sizes), by_expert((x, w, g), sizes), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["ragged ends", "rows past the last expert"])
def test_gradients_of_rows_are_added_over_several_weights(case: str) -> None:
    x, w, g, sizes = draw(case)
    weights, gs = (w, 2 * w[::-1]), (g, g[::-1])
    out, pullback = jax.vjp(lambda x, weights: grouped_matmul(x, weights, sizes, True), x, weights)
    g_x, g_w = pullback(gs)
    wants = [by_expert((x, *each), sizes) for each in zip(weights, gs, strict=True)]
    np.testing.assert_allclose(g_x, wants[0][1] + wants[1][1], rtol=1e-5, atol=1e-4)
    for number, (want, _, want_w) in enumerate(wants):
        np.testing.assert_allclose(out[number], want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(g_w[number], want_w, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["ragged ends", "rows past the last expert"])
def test_sums_are_scaled_before_something_is_added(case: str) -> None:
    x, w, g, sizes = draw(case)
    scales = np.logspace(-2, 2, len(x), dtype=np.float32)[:, None]
    got = grouped_triton.multiply(
        x, w, sizes, jnp.float32, jnp.asarray(scales), g, transposed=False, interpret=True
    )
    np.testing.assert_allclose(
        got, by_expert((x, w, g), sizes)[0] * scales + g, rtol=1e-5, atol=1e-3
    )
    columns = np.logspace(-2, 2, w.shape[2], dtype=np.float32)[None]
    of_weights = grouped_triton.multiply_transposed(
        x, g, sizes, jnp.float32, jnp.asarray(columns), interpret=True
    )
    np.testing.assert_allclose(
        of_weights, by_expert((x, w, g), sizes)[2] * columns, rtol=1e-5, atol=1e-3
    )


def test_neighbours_do_not_leak() -> None:
    """Rows past the last expert, and an empty expert's weights, may hold anything."""
    x, w, g, sizes = draw("rows past the last expert")
    used = sizes.sum()
    got = jax.jit(with_gradients)(
        x.at[used:].set(jnp.nan), w.at[1].set(jnp.nan), g.at[used:].set(jnp.nan), sizes
    )
    for a, b in zip(got, by_expert((x, w, g), sizes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "platform, name", [("cpu", "ragged_dot"), ("tpu", "ragged_dot"), ("cuda", "triton")]
)
def test_auto_takes_the_kernel_of_the_platform(platform: str, name: str) -> None:
    assert choose_grouped_matmul("auto", platform, "bfloat16").name == name


@pytest.mark.parametrize(
    "name, platform, dtype, reason",
    [
        ("triton", "cpu", "bfloat16", "runs on gpu or cuda, and the devices are of platform 'cpu'"),
        ("triton", "cuda", "float64", "the compute dtype is float64"),
        ("no-such", "cpu", "float32", "no-such"),
        ("math:sqrt", "cpu", "float32", "a meshwright `GroupedMatmul`"),
    ],
)
def test_a_named_one_is_refused_never_replaced(
    name: str, platform: str, dtype: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_grouped_matmul(own(name), platform, dtype)
    assert reason in str(raised.value)


def test_only_models_with_experts_have_one() -> None:
    assert device_run_of(tiny_run(MODELS["llama"])).grouped_matmul is None
    assert isinstance(device_run_of(tiny_run(MODELS["mixtral"])).grouped_matmul, GroupedMatmul)

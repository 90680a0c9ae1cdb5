"""Mamba-2 layers: the recurrence token by token, documents, states, groups on more devices, arithmetic, refusals."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import tiny_run

import meshwright as mw
from meshwright.generation.cache import CachePlan
from meshwright.models.blocks.mamba2 import (
    Convolution,
    SpaceInputs,
    SpaceSpec,
    mamba2,
    state_space,
)
from meshwright.models.blocks.recurrence import Carried
from meshwright.models.families.granite_hybrid import GraniteHybrid
from meshwright.models.flops import forward_flops
from meshwright.runs.placed_run import place_run

B, T, N, H, K, S, W = 2, 150, 4, 16, 2, 8, 4
SPEC = SpaceSpec(N, H, K, S, W)
TINY = GraniteHybrid(
    50, 64, 4, 4, vocab_multiple=16, kv_heads=4, mlp=96, mamba_head_size=16, mamba_state=8
)


@pytest.fixture(scope="module")
def inputs() -> SpaceInputs:
    rng = np.random.default_rng(0)
    value, key, query = (
        rng.normal(size=size).astype(np.float32)
        for size in ((B, T, N, H), (B, T, K, S), (B, T, K, S))
    )
    return SpaceInputs(value, key, query, rng.uniform(0.01, 1.5, (B, T, N)).astype(np.float32))


@pytest.fixture(scope="module")
def layer() -> tuple[Convolution, jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    sizes = ((N, H), (K, S), (K, S))
    parts = [
        (
            rng.normal(size=(*size, W)).astype(np.float32),
            rng.normal(size=size).astype(np.float32),
        )
        for size in sizes
    ]
    rate_N = -rng.uniform(0.05, 4.0, N).astype(np.float32)
    return Convolution(*parts), rate_N, rng.normal(size=N).astype(np.float32)


def token_by_token(x: SpaceInputs, rate_N: np.ndarray, starts_BT: np.ndarray) -> np.ndarray:
    """The recurrence of arXiv:2405.21060, equation 1, in float64."""
    state = np.zeros((B, N, S, H))
    out = np.zeros((B, T, N, H))
    for t in range(T):
        state[starts_BT[:, t]] = 0.0
        step = x.step[:, t].astype(np.float64)
        key, query = (np.repeat(a[:, t], N // K, 1).astype(np.float64) for a in (x.key, x.query))
        state *= np.exp(step * rate_N)[..., None, None]
        state += key[..., :, None] * (step[..., None] * x.value[:, t])[..., None, :]
        out[:, t] = (query[..., None, :] @ state)[..., 0, :]
    return out


def test_chunks_are_the_recurrence(inputs: SpaceInputs, layer: Any) -> None:
    """With a document that begins in a chunk; and the FLOPs of the compiled program are those of the formula."""
    _, rate_N, skip_N = layer
    starts_BT = np.arange(T)[None].repeat(B, 0) == 0
    starts_BT[0, [70, 75]] = True
    empty = jnp.zeros((N, B, S, H))
    out, _ = jax.jit(state_space)(inputs, rate_N, skip_N, starts_BT, empty)
    expected = token_by_token(inputs, rate_N, starts_BT)
    expected += skip_N[:, None] * inputs.value
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    program = mw.census(jax.jit(lambda x: state_space(x, rate_N, skip_N, starts_BT, empty)), inputs)
    assert program.flops.compiled == pytest.approx(SPEC.flops(T) * B * 192, rel=1e-3)


def test_documents_of_a_row_are_rows_of_their_own(inputs: SpaceInputs, layer: Any) -> None:
    """Packed as separate; and in two steps, the second from what the first carries."""
    cut, net = 67, jax.jit(mamba2)
    positions_BT = np.concatenate([np.arange(cut), np.arange(T - cut)])[None].repeat(B, 0)
    packed, _ = net(inputs, *layer, positions_BT)
    swapped = jax.tree.map(lambda a: np.concatenate([a[:, cut:], a[:, :cut]], 1), inputs)
    others_BT = np.concatenate([np.arange(T - cut), np.arange(cut)])[None].repeat(B, 0)
    alone, _ = net(swapped, *layer, others_BT)
    largest = np.abs(packed).max()
    assert np.abs(packed[:, cut:] - alone[:, : T - cut]).max() < 1e-5 * largest
    assert np.abs(packed[:, :cut] - alone[:, T - cut :]).max() < 1e-5 * largest

    first, carried = net(jax.tree.map(lambda a: a[:, :75], inputs), *layer, positions_BT[:, :75])
    assert jax.tree.map(jnp.shape, carried) == jax.tree.map(jnp.shape, SPEC.carried(B))
    assert isinstance(carried, Carried)
    rest = jax.tree.map(lambda a: a[:, 75:], inputs)
    second, _ = net(rest, *layer, positions_BT[:, 75:], carried)
    assert np.abs(np.concatenate([first, second], 1) - packed).max() < 1e-5 * largest


def test_the_published_model() -> None:
    """FLOPs of the state space, and a cache that grows in every tenth layer alone."""
    model: Any = mw.recipe("granite4-h-small").model
    per_token = 2 * 64 * 128 + 128 * (2 * 64 * 64 + 4 * 128 * 64)
    assert forward_flops(model, 4096)["state space"] == pytest.approx(36 * per_token)
    short, long = (
        CachePlan(model.spec(), mw.MeshShape(tensor=2), 1, s, "bfloat16").bytes_per_device
        for s in (128, 256)
    )
    assert long - short == 4 * 128 * 2 * 8 * 128 * 2 // 2
    assert 2 * short - long == 36 * 4 * 128 * (128 * 64 + 3 * (64 + 2 * 128)) // 2


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({}, "context=2", "state passes from token to token"),
        ({"mamba_groups": 3}, "data=1", "8 = 3 \\* 2 \\+ 2.*--model.mamba-groups"),
        ({"pattern": "M*A"}, "data=1", "fix: .*--model.pattern 'M\\*'"),
        ({"pattern": "MMM*M"}, "data=1", "fix: .*--model.pattern 'MMM\\*'"),
        ({"mamba_heads": 6, "mamba_groups": 2}, "tensor=4", "N=6 does not divide"),
        ({"mamba_heads": 12, "mamba_groups": 3}, "tensor=2", "K=3 does not divide"),
    ],
)
def test_what_does_not_go_is_refused(changes: dict[str, Any], mesh: str, message: str) -> None:
    with pytest.raises(mw.ConfigError, match=f"(?s){message}"):
        place_run(tiny_run(dataclasses.replace(TINY, **changes), mesh))

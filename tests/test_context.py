"""Context parallelism gives the attention of one device, causal and within documents; the ring sends only keys and
values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models.blocks.context import build_attend
from meshwright.models.kernels import blocked
from meshwright.models.kernels.attention import Kernels, reference_attention, sequence_positions
from meshwright.models.kernels.splash import splash_kernels
from meshwright.models.kernels.tokamax_splash import tokamax_splash_kernels
from meshwright.plugins import resolve
from meshwright.sharding.sequence import SequenceSplit, split_sequence

BLOCKED = resolve("attention kernel", "blocked")(512)
exhaustive = pytest.mark.exhaustive
STRATEGIES = ("ring", "all_gather", "ulysses", "usp")
B, T, N, K, H = 2, 32, 8, 4, 4


def mesh_of(shards: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:shards]), ("context",))


def draw(seed: int = 0, seq: int = T, size: int = H) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, seq, n, size)).astype(np.float32) for n in (N, K, K))
    return q, k, v, np.sort(rng.integers(0, 3, (B, seq)), axis=1).astype(np.int32)


def split_by(strategy: str, seq: int, shards: int) -> SequenceSplit:
    """Splits a sequence with two key/value heads for usp, fewer than the shards: groups of two."""
    return split_sequence(strategy, seq, shards, 2 if strategy == "usp" else K)


def split_attention(
    strategy: str, shards: int, window: int | None, kernels: Kernels = BLOCKED, seq: int = T
) -> Callable[..., Any]:
    """Returns attention of whole arrays in their order, computed by `strategy`."""
    split = split_by(strategy, seq, shards)
    order = split.position_order()
    inverse = np.argsort(order)

    def body(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return build_attend(split, segments, kernels)(q, k, v, window=window)

    spec = P(None, "context")
    sharded = jax.shard_map(
        body,
        mesh=mesh_of(shards),
        in_specs=(spec, spec, spec, P()),
        out_specs=spec,
        check_vma=False,
    )

    def whole(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return sharded(q[:, order], k[:, order], v[:, order], segments)[:, inverse]

    return whole


def unsharded(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int | None
) -> jax.Array:
    return reference_attention(
        q, k, v, sequence_positions(segments), sequence_positions(segments), window=window
    )


@pytest.mark.parametrize(
    ("strategy", "shards", "window"),
    [
        ("ring", 1, None),
        pytest.param("ring", 4, None, marks=exhaustive),
        pytest.param("ring", 2, 7, marks=exhaustive),
        pytest.param("ring", 4, 1, marks=exhaustive),
        ("all_gather", 2, None),
        pytest.param("all_gather", 4, 7, marks=exhaustive),
        ("ulysses", 2, 7),
        ("ulysses", 4, None),
        ("usp", 2, None),
        pytest.param("usp", 4, 7, marks=exhaustive),
    ],
)
def test_values_and_gradients_match_one_device(
    strategy: str, shards: int, window: int | None
) -> None:
    """Every strategy with and without a window; that of a ring may end before the ring does."""
    assert_matches_one_device(split_attention(strategy, shards, window), window, *draw())


@pytest.mark.parametrize(
    ("strategy", "shards", "window", "library"),
    [
        ("ring", 2, None, "jax"),
        ("ring", 2, None, "tokamax"),
        ("all_gather", 2, 300, "jax"),
        *(
            pytest.param(strategy, shards, window, "jax", marks=exhaustive)
            for strategy, shards, window in (("ring", 4, None), ("ring", 2, 100), ("ring", 4, 300), ("usp", 4, None),
                                             ("all_gather", 4, None), ("ulysses", 2, 100))
        ),
    ],
)  # fmt: skip
def test_splash_in_every_strategy_matches_one_device(
    strategy: str, shards: int, window: int | None, library: str
) -> None:
    """The TPU's kernel, interpreted, between chunks of 128 positions, heads of 64."""
    kernels = splash_kernels(128, interpret=True)
    if library == "tokamax":
        pytest.importorskip("tokamax")
        kernels = tokamax_splash_kernels(128, interpret=True)
    seq = 256 * shards
    q, k, v, segments = draw(seq=seq, size=64)
    heads = (q[:1, :, :4], k[:1, :, :2], v[:1, :, :2], segments[:1])
    assert_matches_one_device(
        split_attention(strategy, shards, window, kernels, seq), window, *heads
    )


def assert_matches_one_device(
    split: Callable[..., Any],
    window: int | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: np.ndarray,
) -> None:
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def loss(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        def value(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = function(q, k, v)
            return (jnp.sin(out) * weights).sum(), out

        def output_and_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            # The sum itself cancels to a few units of its 262,144 terms: it says less than they do.
            (_, out), gradients = jax.value_and_grad(value, (0, 1, 2), has_aux=True)(q, k, v)
            return out, gradients

        return jax.jit(output_and_gradients)

    many = loss(lambda q, k, v: split(q, k, v, segments))(q, k, v)
    one = loss(lambda q, k, v: unsharded(q, k, v, segments, window))(q, k, v)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attention_is_causal_and_within_documents(strategy: str, shards: int) -> None:
    """Tokens of other documents change no bit of the output, wherever the boundary falls."""
    run = jax.jit(split_attention(strategy, shards, None))
    q, k, v, segments = draw()
    for boundary in (1, T // 4, T // 2 + 3, T - 1):
        segments[:] = np.arange(T) >= boundary
        before = np.asarray(run(q, k, v, segments))
        for masked, own in (
            (slice(boundary, T), slice(0, boundary)),
            (slice(0, boundary), slice(boundary, T)),
        ):
            k2, v2 = k.copy(), v.copy()
            k2[:, masked], v2[:, masked] = 7.0, -7.0
            np.testing.assert_array_equal(
                np.asarray(run(q, k2, v2, segments))[:, own], before[:, own]
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_stay_within_documents(strategy: str) -> None:
    q, k, v, segments = draw()
    segments[:] = np.arange(T) >= T // 2
    split = split_attention(strategy, 4, None)
    g_k, g_v = jax.jit(jax.grad(lambda k, v: split(q, k, v, segments)[:, T // 2 :].sum(), (0, 1)))(
        k, v
    )
    assert float(abs(g_k[:, : T // 2]).max()) == float(abs(g_v[:, : T // 2]).max()) == 0.0
    assert float(abs(g_v[:, T // 2 :]).max()) > 0


def compiled(strategy: str, shards: int, seq: int) -> Any:
    spec = P(None, "context")
    mesh, split = mesh_of(shards), split_by(strategy, seq, shards)

    def body(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sin(build_attend(split, segments, BLOCKED)(q, k, v, window=None)).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    function = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=False
    )
    arrays = [
        jax.ShapeDtypeStruct((B, seq, n, H), jnp.float32, sharding=NamedSharding(mesh, spec))
        for n in (N, K, K)
    ]
    segments = jax.ShapeDtypeStruct((B, seq), jnp.int32, sharding=NamedSharding(mesh, P()))
    return mw.census(jax.jit(function), *arrays, segments)


def test_ring_sends_only_keys_and_values() -> None:
    shards = 4
    census = compiled("ring", shards, T)
    block = B * T // shards * K * H * 4
    assert {e.kind for e in census.ledger} == {"collective-permute"}
    # Keys and values go around together in n - 1 shifts, once more in the backward pass, the gradients of each in n.
    # XLA merges the first shift of both passes, which are one program here.
    shifts = (shards - 1) + (shards - 1) - 1
    assert sum(e.count for e in census.ledger) == shifts + 2 * shards
    assert sum(e.total for e in census.ledger) == (shifts + shards) * 2 * block
    assert census.findings == ()


def test_memory_of_the_ring_is_linear_in_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_LEAST_BLOCK", 64)
    monkeypatch.setattr(blocked, "_SCORE_BYTES", 64 * 64 * 4 * B * N)
    short, long, split = (
        compiled("ring", shards, seq).memory.compiled.peak
        for shards, seq in ((4, 4096), (4, 8192), (8, 8192))
    )
    assert long <= 2.1 * short and split <= 1.1 * short


def test_zigzag_balances_the_load() -> None:
    """Every device has the same number of pairs of chunks that are not masked entirely."""
    for shards in (2, 4, 8):
        work = []
        for shard in range(shards):
            order = split_by("ring", T, shards).position_order()
            own, others = order.reshape(shards, 2, -1)[shard], order.reshape(2 * shards, -1)
            work.append(sum(bool(queries[-1] >= keys[0]) for queries in own for keys in others))
        assert len(set(work)) == 1

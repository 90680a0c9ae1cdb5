"""Sinks, soft caps and chunks of attention: every kernel and context strategy against a softmax written out."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_chunk_kernels import CountedCudnn
from tiny_runs import device_run_of, tiny_run

import meshwright as mw
from meshwright.hardware.machine import Machine
from meshwright.models.blocks.context import build_attend, chunked_segments
from meshwright.models.kernels.attention import Kernels, Scores
from meshwright.models.kernels.choose import choose_kernels
from meshwright.models.kernels.splash import splash_kernels
from meshwright.models.kernels.tokamax_splash import tokamax_splash_kernels
from meshwright.models.loss import token_losses
from meshwright.models.model import AttentionSpec
from meshwright.plugins import resolve
from meshwright.sharding.sequence import split_sequence
from meshwright.trust import own

B, N, K = 2, 8, 4
KINDS: dict[str, dict[str, Any]] = {
    "sinks": {"window": None, "softcap": None, "chunk": None},
    "sinks in a window": {"window": 7, "softcap": None, "chunk": None},
    "softcap": {"window": 7, "softcap": 0.7, "chunk": None},
    "chunks": {"window": None, "softcap": None, "chunk": 6},
}
"""Kinds of attention; those of the first two have sinks."""


def draw(seq: int, size: int) -> tuple[Any, ...]:
    """Queries, keys, values, sinks, documents."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, seq, n, size)), jnp.float32) for n in (N, K, K))
    segments = np.sort(rng.integers(0, 3, (B, seq)), axis=1).astype(np.int32)
    return q, k, v, jnp.asarray(rng.normal(size=N), jnp.float32), jnp.asarray(segments)


def written_out(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    segments: Any,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
) -> Any:
    place = np.arange(q.shape[1])
    segments = np.asarray(segments)
    starts = np.stack([np.searchsorted(row, row) for row in segments])
    distance = place[:, None] - place
    seen = (
        (distance >= 0)
        & (distance < (window or len(place)))
        & (segments[:, :, None] == segments[:, None])
    )
    if chunk is not None:
        number = (place - starts) // chunk
        seen &= number[:, :, None] == number[:, None]
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[3] ** 0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], -1)
    weights = jax.nn.softmax(scores, -1)[..., : k.shape[1]]
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def value_and_gradients(attend: Callable[..., Any], q: Any, k: Any, v: Any, sinks: Any) -> Any:
    weights = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = attend(q, k, v, sinks)
        return (weights * out).sum(), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)


def assert_matches(attend: Callable[..., Any], kind: str, seq: int = 32, size: int = 4) -> None:
    """attend: `(q, k, v, sinks, documents, window, scores) -> output`."""
    q, k, v, sinks, segments = draw(seq, size)
    facts, has_sinks = KINDS[kind], kind.startswith("sinks")

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        scores = Scores(sinks if has_sinks else None, facts["softcap"], facts["chunk"])
        return attend(q, k, v, segments, facts["window"], scores) + 0 * sinks.sum()

    def truth(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return (
            written_out(q, k, v, sinks if has_sinks else None, segments, **facts) + 0 * sinks.sum()
        )

    found, expected = (
        jax.tree.leaves(value_and_gradients(f, q, k, v, sinks)) for f in (ours, truth)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(y).max())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["reference", "blocked"])
def test_one_device(kernel: str, kind: str) -> None:
    split = split_sequence("ring", 32, 1, K)

    def attend(q: Any, k: Any, v: Any, segments: Any, window: Any, scores: Scores) -> Any:
        return build_attend(split, segments, resolve("attention kernel", kernel)(512))(
            q, k, v, window=window, scores=scores
        )

    assert_matches(attend, kind)


@pytest.mark.parametrize(
    ("kind", "library"),
    [("sinks in a window", "jax"), ("softcap", "jax"), ("softcap", "tokamax")],
)
def test_splash(kind: str, library: str) -> None:
    """The TPU's kernel, interpreted."""
    split = split_sequence("ring", 128, 1, K)
    kernels = splash_kernels(128, interpret=True)
    if library == "tokamax":
        pytest.importorskip("tokamax")
        kernels = tokamax_splash_kernels(128, interpret=True)

    def attend(q: Any, k: Any, v: Any, segments: Any, window: Any, scores: Scores) -> Any:
        return build_attend(split, segments, kernels)(q, k, v, window=window, scores=scores)

    assert_matches(attend, kind, 128, 64)


def test_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks added to what cuDNN gives, with its calls replaced by the blocked kernel's arithmetic."""
    CountedCudnn(monkeypatch)
    split = split_sequence("ring", 32, 1, K)

    def attend(q: Any, k: Any, v: Any, segments: Any, window: Any, scores: Scores) -> Any:
        return build_attend(split, segments, resolve("attention kernel", "cudnn")(512))(
            q, k, v, window=window, scores=scores
        )

    assert_matches(attend, "sinks in a window")


def _split(strategy: str, shards: int, kernels: Kernels) -> Callable[..., Any]:
    split = split_sequence(strategy, 32, shards, 2 if strategy == "usp" else K)
    order = split.position_order()
    inverse, spec = np.argsort(order), P(None, "context")

    def attend(q: Any, k: Any, v: Any, segments: Any, window: Any, scores: Scores) -> Any:
        def body(q: Any, k: Any, v: Any, segments: Any, sinks: Any) -> Any:
            own = Scores(sinks, scores.softcap, scores.chunk)
            return build_attend(split, segments, kernels)(q, k, v, window=window, scores=own)

        mesh = Mesh(np.array(jax.devices()[:shards]), ("context",))
        specs = (spec, spec, spec, P(), None if scores.sinks_N is None else P())
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
        return mapped(q[:, order], k[:, order], v[:, order], segments, scores.sinks_N)[:, inverse]

    return attend


@pytest.mark.parametrize(
    ("strategy", "kind", "kernel"),
    [
        ("ring", "sinks", "blocked"), ("ring", "softcap", "blocked"), ("all_gather", "sinks in a window", "blocked"),
        ("all_gather", "sinks", "reference"), ("ulysses", "sinks", "reference"), ("usp", "sinks", "blocked"),
        ("ring", "chunks", "blocked"),
    ],
)  # fmt: skip
def test_context_strategies(strategy: str, kind: str, kernel: str) -> None:
    """Parts of a ring are combined by their log-sum-exp before the sinks take part."""
    assert_matches(_split(strategy, 4, resolve("attention kernel", kernel)(512)), kind)


def test_chunks_end_with_their_document() -> None:
    segments = jnp.asarray([[0, 0, 0, 0, 0, 2, 2, 2, 5, 5]])
    np.testing.assert_array_equal(chunked_segments(segments, 3), [[1, 1, 1, 2, 2, 3, 3, 3, 4, 4]])
    whole = AttentionSpec(1, 1, 1, chunk=3)
    # Chunks of 3, 3 and 2 tokens: 6 + 6 + 3 pairs.
    assert whole.causal_positions(8) == pytest.approx(15 / 8)


def test_a_kernel_without_a_feature_is_passed_over_aloud_or_refused() -> None:
    choose = functools.partial(
        choose_kernels, machine=Machine("gpu", installed=True), block=512, remat="none", head_sizes=(64,),
        dtype="bfloat16", sequence=split_sequence("ring", 1024, 1, 8),
    )  # fmt: skip
    assert choose("auto", needs=frozenset({"sinks"})).name == "cudnn"
    capped = choose("auto", needs=frozenset({"softcap"}))
    assert (capped.name, capped.note) == (
        "blocked", "cudnn attention has no soft cap of the scores, which the model's layers have"
    )  # fmt: skip
    with pytest.raises(mw.ConfigError, match="cudnn attention has no soft cap of the scores"):
        choose("cudnn", needs=frozenset({"softcap"}))
    with pytest.raises(mw.ConfigError, match="row attention has no attention sinks"):
        run = tiny_run(
            mw.GptOss(50, 64, 2, 8, 4, 8, experts=4),
            attention_kernel=own("outside.extensions.row_attention:row_kernel"),
        )
        device_run_of(run)


def test_the_loss_caps_its_logits() -> None:
    rng = np.random.default_rng(0)
    x, table = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 8), (10, 8)))
    labels = jnp.asarray(rng.integers(0, 9, 6))
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("stage", "tensor"))

    def ours(x: Any, table: Any) -> Any:
        def body(x: Any, table: Any) -> Any:
            return token_losses(x, table, labels, 9, 3, 2.0)[0]

        return jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)(
            x, table
        ).sum()

    def truth(x: Any, table: Any) -> Any:
        logits = 2.0 * jnp.tanh(x @ table[:9].T / 2.0)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).sum()

    for a, b in zip(
        *(jax.tree.leaves(jax.value_and_grad(f, (0, 1))(x, table)) for f in (ours, truth)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

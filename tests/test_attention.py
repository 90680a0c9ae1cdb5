"""Reference attention against NumPy, and the keys that a query must not attend to."""

import numpy as np
import pytest

from meshwright.models.kernels.attention import reference_attention, sequence_positions


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, *, window: int | None
) -> np.ndarray:
    positions = sequence_positions(segments)
    return np.asarray(reference_attention(q, k, v, positions, positions, window=window))


def draw(heads: int, kv_heads: int, seq: int = 12) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return (
        *(rng.normal(size=(2, seq, n, 4)).astype(np.float32) for n in (heads, kv_heads, kv_heads)),
        np.sort(rng.integers(0, 3, (2, seq)), axis=1).astype(np.int32),
    )


def numpy_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, window: int | None
) -> np.ndarray:
    out = np.zeros_like(q)
    B, T, N, H = q.shape
    for b in range(B):
        for t in range(T):
            keys = [
                s
                for s in range(t + 1)
                if segments[b, s] == segments[b, t] and (window is None or t - s < window)
            ]
            for n in range(N):
                kv = n // (N // k.shape[2])
                scores = np.array([q[b, t, n] @ k[b, s, kv] for s in keys]) / H**0.5
                weights = np.exp(scores - scores.max())
                out[b, t, n] = (weights / weights.sum()) @ np.array([v[b, s, kv] for s in keys])
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_matches_numpy(heads: int, kv_heads: int, window: int | None) -> None:
    q, k, v, segments = draw(heads, kv_heads)
    out = attention(q, k, v, segments, window=window)
    np.testing.assert_allclose(out, numpy_attention(q, k, v, segments, window), atol=1e-5)


def test_attention_is_causal_and_within_documents() -> None:
    q, k, v, segments = draw(4, 2)
    segments[:] = np.repeat([0, 1], 6)
    before = np.asarray(attention(q, k, v, segments, window=None))
    k2, v2 = k.copy(), v.copy()
    k2[:, 6:], v2[:, 6:] = 7.0, -7.0
    after = np.asarray(attention(q, k2, v2, segments, window=None))
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    k2, v2 = k.copy(), v.copy()
    k2[:, :6], v2[:, :6] = 7.0, -7.0
    after = np.asarray(attention(q, k2, v2, segments, window=None))
    np.testing.assert_array_equal(after[:, 6:], before[:, 6:])

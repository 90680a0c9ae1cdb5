"""Causal attention and its gradients in float64 with NumPy: a reference that shares no code with the kernels."""

from typing import NamedTuple

import numpy as np


class Attention(NamedTuple):
    """Output of attention and the gradients of its inputs."""

    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def attention_with_gradients(
    q_BTNH: np.ndarray,
    k_BTKH: np.ndarray,
    v_BTKH: np.ndarray,
    segments_BT: np.ndarray,
    g_BTNH: np.ndarray,
    window: int | None,
) -> Attention:
    """Returns attention within documents and the gradients of sum(out * g), head by head.

    Derivative of softmax: FlashAttention (arXiv:2205.14135), appendix B.4.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in (q_BTNH, k_BTKH, v_BTKH, g_BTNH))
    B, T, N, _ = q.shape
    K, scale = k.shape[2], q.shape[3] ** -0.5
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    causal = (distance >= 0) & (distance < (window or T))
    result = Attention(*(np.zeros_like(x) for x in (q, q, k, v)))
    for b in range(B):
        visible = causal & (segments_BT[b][:, None] == segments_BT[b][None, :])
        for n in range(N):
            kv = n // (N // K)
            scores = np.where(visible, q[b, :, n] @ k[b, :, kv].T * scale, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            result.out[b, :, n] = weights @ v[b, :, kv]
            result.dv[b, :, kv] += weights.T @ g[b, :, n]
            d_weights = g[b, :, n] @ v[b, :, kv].T
            d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
            result.dq[b, :, n] = d_scores @ k[b, :, kv]
            result.dk[b, :, kv] += d_scores.T @ q[b, :, n]
    return result

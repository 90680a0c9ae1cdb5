"""Llama against a second forward pass, written in numpy from the papers."""

import jax
import numpy as np
from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

from meshwright.models.blocks.rotary import RopeScaling, rope_frequencies
from meshwright.step.eval_step import build_eval_step


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def rope(x: np.ndarray, position: int) -> np.ndarray:
    """[N, H] at one position, by complex numbers: pair (i, i + H/2) turns by position * 10000^(-2i/H)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * position * 10000.0 ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag], -1)


def loss_by_hand(w: dict, batch) -> float:
    total = weight = 0.0
    for b in range(batch.inputs.shape[0]):
        x = w["embed"][np.asarray(batch.inputs[b])].astype(np.float64)
        position, segment = np.asarray(batch.positions[b]), np.asarray(batch.segments[b])
        for layer in range(2):
            p = {name: value[layer].astype(np.float64) for name, value in w["blocks"].items()}
            h = rms(x, p["attention_norm"])
            q, k, v = (np.einsum("td,dnh->tnh", h, p[name]) for name in ("query", "key", "value"))
            q = np.stack([rope(q[t], position[t]) for t in range(len(x))])
            k = np.stack([rope(k[t], position[t]) for t in range(len(x))])
            out = np.zeros_like(q)
            for t in range(len(x)):
                seen = [s for s in range(t + 1) if segment[s] == segment[t]]
                for n in range(q.shape[1]):
                    scores = np.array([q[t, n] @ k[s, n // 2] for s in seen]) / q.shape[2] ** 0.5
                    a = np.exp(scores - scores.max())
                    out[t, n] = (a / a.sum()) @ np.array([v[s, n // 2] for s in seen])
            x = x + np.einsum("tnh,nhd->td", out, p["attention_out"])
            h = rms(x, p["mlp_norm"])
            gate = h @ p["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ p["up"])) @ p["down"]
        logits = rms(x, w["final_norm"].astype(np.float64)) @ w["unembed"][:50].T.astype(np.float64)
        nll = (
            np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(x)), np.asarray(batch.targets[b])]
        )
        total += float((nll * np.asarray(batch.weights[b])).sum())
        weight += float(np.asarray(batch.weights[b]).sum())
    return total / weight


def test_the_loss_is_the_papers() -> None:
    device_run = device_run_of(tiny_run(MODELS["llama"], "fsdp=2,tensor=2"))
    params = device_run.initial_state().params
    batch = random_batch(device_run)
    metrics = build_eval_step(device_run)(params, batch)
    found = float(metrics["loss"][0] / metrics["loss"][1])
    np.testing.assert_allclose(found, loss_by_hand(jax.device_get(params), batch), rtol=1e-5)


def test_llama_3_1_stretches_low_frequencies_only() -> None:
    plain = rope_frequencies(128, 500000.0, None)
    scaled = rope_frequencies(128, 500000.0, RopeScaling())
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()

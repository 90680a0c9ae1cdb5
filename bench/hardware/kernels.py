"""Attention kernels and the grouped matmul against float64, values and gradients; and the grouped matmul in float8.

meshwright bench hardware --only bench/hardware/kernels.py:compare_kernels --out hardware
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.bench.hardware.kernels import (
    Case,
    attention_inputs,
    choose_for,
    forward_and_backward,
    grouped_inputs,
    grouped_matmul_here,
    grouped_products,
    grouped_shapes,
    kernel_names,
    with_all_gradients,
)
from meshwright.bench.hardware.section import Measurement, Section
from meshwright.bench.microbenchmarks import median_seconds
from meshwright.hardware.chips import find_chip
from meshwright.models.kernels.choose import GroupedProducts

LIMITS = {"float32": (2.5e-6, 4e-6), "bfloat16": (0.012, 0.02)}
"""Largest accepted error by dtype: root mean square of the error over that of the value, and largest error over the
largest value. The reference kernel on a CPU reaches a quarter of each (docs/log.md)."""


def correctness_cases(platform: str) -> list[Case]:
    """Returns the shapes whose values and gradients are compared with float64."""
    seq = 128 if platform == "cpu" else 1024
    long = (
        [] if platform == "cpu" else [Case("T 8192", 8192, 2, 1)]
    )  # several blocks of queries in any kernel
    return [
        Case("causal", seq),
        Case("head 64", seq, head_size=64),
        Case("GQA", seq, kv_heads=1),
        Case("window", seq, window=seq // 4 + 1),
        Case("documents", seq, documents=3),
        Case("GQA, window, documents, head 64", seq, 4, 2, 64, seq // 3, 3, 2),
        *long,
    ]


def compare_kernels(section: Section) -> None:
    """Compares every kernel that the platform supports with float64, and times products in float8."""
    platform = jax.default_backend()
    dtypes = ("float32", "bfloat16") if platform == "cpu" else ("bfloat16",)
    names = kernel_names(section.request.kernels)
    items: dict[str, Measurement] = {}
    for case, name, dtype in itertools.product(correctness_cases(platform), names, dtypes):
        items[f"{name}: {case.name}, {dtype}"] = functools.partial(compare, name, case, dtype)
    items["grouped matmul: values and gradients"] = functools.partial(compare_grouped, "bfloat16")
    float8 = grouped_matmul_here("bfloat16").float8
    chip = find_chip(jax.devices()[0].device_kind)
    # Triton ends the process on a chip without float8, such as an A100.
    if float8 is not None and platform in float8.platforms and (chip is None or chip.flops_fp8):
        for name, shape in grouped_shapes(platform).items():
            item = f"grouped matmul: time in float8, {name}"
            items[item] = functools.partial(time_float8, float8, *shape)
    section.facts["limits"] = {dtype: list(limit) for dtype, limit in LIMITS.items()}
    section.measure(items)
    compared = [row for row in section.rows if "errors" in row]
    right = sum(not row["problems"] for row in compared)
    section.notes.append(f"{right} of {len(compared)} comparisons with float64 agree")


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
    """Returns causal attention within documents and the gradients of sum(out * g) in float64, head by head.

    It shares no code with the kernels. Derivative of softmax: FlashAttention (arXiv:2205.14135), appendix B.4.
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


@functools.lru_cache(maxsize=16)
def _truth(case: Case, dtype: str) -> Attention:
    q, k, v, s, g = (
        np.asarray(x.astype(jnp.float32) if x.dtype != jnp.int32 else x)
        for x in attention_inputs(case, dtype)
    )
    return attention_with_gradients(q, k, v, s, g, case.window)


def _compared(
    kernel: str, case: str, dtype: str, results: Mapping[str, Any], expected: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Returns the error of each array by its label, and a line for each that is above the limits.

    An error is two numbers: root mean square of the error over that of the value, and largest error over the largest.
    """
    errors: dict[str, tuple[float, float]] = {}
    problems: list[str] = []
    limit, most_limit = LIMITS[dtype]
    for (label, result), value in zip(results.items(), expected, strict=True):
        difference = np.asarray(result.astype(jnp.float32)).astype(np.float64) - value
        mean = float(np.sqrt((difference**2).mean() / max((value**2).mean(), 1e-300)))
        most = float(np.abs(difference).max() / max(np.abs(value).max(), 1e-300))
        errors[label] = mean, most
        if not (mean <= limit and most <= most_limit):
            problems.append(
                f"{kernel}: {case}, {dtype}: error of {label} is {mean:.2g} (limit {limit:.2g}), at most {most:.2g} "
                f"(limit {most_limit:.2g})"
            )
    return {"kernel": kernel, "case": case, "dtype": dtype, "errors": errors, "problems": problems}


def compare(name: str, case: Case, dtype: str) -> Mapping[str, Any]:
    kernels = choose_for(name, case, dtype)
    if isinstance(kernels, str):
        return {"kernel": name, "case": case.name, "dtype": dtype, "unsupported": kernels}
    # Float32 matmuls take bfloat16 passes on TPUs unless the highest precision is asked for.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        results = forward_and_backward(kernels, case)(*attention_inputs(case, dtype))
    labelled = dict(zip(Attention._fields, results, strict=True))
    return _compared(name, case.name, dtype, labelled, _truth(case, dtype))


def compare_grouped(dtype: str) -> Mapping[str, Any]:
    """Compares two products of the same rows, as gate and up are: the kernel may add the gradients of their rows."""
    x, w, sizes, g = grouped_inputs(8, 512, 128, 256, dtype)
    weights, gradients = (w, w[::-1]), (g, g[::-1])
    rows, *pairs = (
        np.asarray(a.astype(jnp.float32), np.float64) for a in (x, *weights, *gradients)
    )
    expert, of = (
        np.repeat(np.arange(8), np.asarray(sizes)),
        list(zip(pairs[:2], pairs[2:], strict=True)),
    )
    expected = [np.einsum("rk,rkn->rn", rows, w[expert]) for w, _ in of]
    expected.append(sum(np.einsum("rn,rkn->rk", g, w[expert]) for w, g in of))
    expected += [np.stack([rows[expert == e].T @ g[expert == e] for e in range(8)]) for _, g in of]
    results = jax.jit(with_all_gradients)(x, weights, sizes, gradients)
    labelled = dict(zip(("gate", "up", "dx", "gate's dw", "up's dw"), results, strict=True))
    return _compared(
        "grouped matmul", "gate and up, 8 groups, one empty", dtype, labelled, expected
    )


def time_float8(
    products: GroupedProducts, experts: int, rows: int, k: int, n: int
) -> Mapping[str, Any]:
    """Returns the times of the products of operands in float8, and the forward one's rate relative to bfloat16."""
    x, w, sizes, g = grouped_inputs(experts, rows, k, n, "bfloat16")
    x8, w8, g8 = (a.astype(jnp.float8_e4m3fn) for a in (x, w.swapaxes(1, 2), g))
    of_rows, of_columns = jnp.ones((rows, 1)), jnp.ones((1, n))
    multiply = jax.jit(
        lambda x, w, rows_E: products.rows(x, w, rows_E, jnp.bfloat16, of_rows, None)
    )
    gradient = jax.jit(lambda x, g, rows_E: products.groups(x, g, rows_E, jnp.bfloat16, of_columns))
    forward, of_weights = (
        median_seconds(f, x8, a, sizes)[0] for f, a in ((multiply, w8), (gradient, g8))
    )
    wide, _ = median_seconds(jax.jit(grouped_products), x, (w,), sizes)
    flops = 2.0 * rows * k * n
    return {
        "kernel": "grouped matmul",
        "case": f"{experts} experts, {rows} x {k} x {n}",
        "dtype": "float8",
        "flops_per_second": flops / forward,
        "flops_per_second_of_weights": flops / of_weights,
        "of_bfloat16": wide / forward,
    }

"""Section `kernels`: attention kernels and the grouped matmul, their error against float64 and their rate."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.bench.hardware.machine import keep_calibration, memory_stats
from meshwright.bench.hardware.section import Measurement, Section
from meshwright.bench.microbenchmarks import median_seconds
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.chips import find_chip
from meshwright.hardware.machine import Machine
from meshwright.hardware.mesh import build_mesh
from meshwright.models.kernels.attention import Kernels
from meshwright.models.kernels.choose import (
    AUTO,
    GroupedMatmul,
    GroupedProducts,
    choose_grouped_matmul,
    choose_kernels,
)
from meshwright.models.model import AttentionSpec
from meshwright.plugins import PARTS, resolve
from meshwright.sharding.sequence import SequenceSplit

LIMITS = {"float32": (2.5e-6, 4e-6), "bfloat16": (0.012, 0.02)}
"""Largest accepted error by dtype: root mean square of the error over that of the value, and largest error over the
largest value. The reference kernel on a CPU reaches a quarter of each (docs/log.md)."""
_BACKWARD = 2.5
"""Matmul FLOPs of the backward pass over those of the forward pass: five matmuls for two."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Shape of one attention call."""

    name: str
    seq: int
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 128
    window: int | None = None
    documents: int = 1
    batch: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass over visible positions."""
        spec = AttentionSpec(self.heads, self.kv_heads, self.head_size, self.window)
        return (
            4.0
            * self.batch
            * self.seq
            * spec.causal_positions(self.seq)
            * self.heads
            * self.head_size
        )

    @property
    def score_bytes(self) -> int:
        """Bytes of the float32 scores, which a kernel that is not fused writes."""
        return 4 * self.batch * self.heads * self.seq**2


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


def speed_cases(platform: str) -> list[Case]:
    """Returns the shapes that are timed: a Llama 3 8B layer at two lengths, and heads of 64."""
    if platform == "cpu":
        return [Case("T 512", 512, 4, 2, 64)]
    return [
        Case("T 4096", 4096, 32, 8, 128, batch=2),
        Case("T 4096, head 64", 4096, 32, 8, 64, batch=2),
        Case("T 16384", 16384, 32, 8, 128),
        Case("T 16384, window 4096", 16384, 32, 8, 128, window=4096),
    ]


def measure_kernels(section: Section) -> None:
    """Compares every kernel that the platform supports with float64, then times it."""
    platform = jax.default_backend()
    own = AUTO.get(platform, ())
    names = (*section.request.kernels, *dict.fromkeys((*own, *PARTS["attention kernel"])))
    dtypes = ("float32", "bfloat16") if platform == "cpu" else ("bfloat16",)
    items: dict[str, Measurement] = {
        f"{name}: {case.name}, {dtype}": functools.partial(_compare, name, case, dtype)
        for case, name, dtype in itertools.product(correctness_cases(platform), names, dtypes)
    }
    items |= {
        f"{name}: time, {case.name}": functools.partial(_time, name, case)
        for case, name in itertools.product(speed_cases(platform), names)
    }
    items["grouped matmul: values and gradients"] = functools.partial(_compare_grouped, "bfloat16")
    shapes = {"Mixtral 8x7B": (8, 8192, 4096, 14336), "Qwen3-30B-A3B": (128, 16384, 2048, 768)}
    if platform == "cpu":
        shapes = {"8 experts": (8, 256, 64, 128)}
    items |= {
        f"grouped matmul: time, {name}": functools.partial(_time_grouped, *s)
        for name, s in shapes.items()
    }
    float8 = _grouped_matmul("bfloat16").float8
    chip = find_chip(jax.devices()[0].device_kind)
    # Triton ends the process on a chip without float8, such as an A100.
    if float8 is not None and platform in float8.platforms and (chip is None or chip.flops_fp8):
        measure = functools.partial(_time_float8, float8)
        items |= {
            f"grouped matmul: time in float8, {name}": functools.partial(measure, *s)
            for name, s in shapes.items()
        }
    section.facts["limits"] = {dtype: list(limit) for dtype, limit in LIMITS.items()}
    section.measure(items)
    supported = {
        row["kernel"] for row in section.rows if "kernel" in row and "unsupported" not in row
    }
    rates = calibrated_rates(section.rows, own)
    if rates:
        keep_calibration(section, kernels=rates)
    missing = [name for name in own if name not in supported]
    if missing:
        section.notes.append(
            f"the platform's own kernel {', '.join(missing)} supports none of these shapes"
        )


def calibrated_rates(rows: Sequence[Mapping[str, Any]], own: Sequence[str]) -> dict[str, float]:
    """Returns the rates that plans take: of the platform's own attention kernel, and of the grouped matmul.

    own: names of the platform's own kernels. The planner counts the products of each kernel's own backward pass.
    """
    attention = [
        (1 + resolve("attention kernel", row["kernel"])(512).backward)
        / (1 + _BACKWARD)
        * row["flops_per_second"]
        for row in rows
        if row.get("kernel") in own and "flops_per_second" in row
    ]
    grouped = [row["of_dense"] for row in rows if "of_dense" in row]
    rates = {"attention": max(attention)} if attention else {}
    return rates | ({"grouped_matmul": max(grouped)} if grouped else {})


def _choose(name: str, case: Case, dtype: str) -> Kernels | str:
    """Returns the kernel as a training run chooses it, or the reason why it does not support the case."""
    try:
        return choose_kernels(
            name,
            Machine(jax.devices()[0].platform),
            block=512,
            remat="none",
            head_sizes=(case.head_size,),
            dtype=dtype,
            sequence=SequenceSplit("ring", case.seq, 1, 1),
        )
    except ConfigError as error:
        return error.truth


def _inputs(case: Case, dtype: str) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    B, T, N, K, H = case.batch, case.seq, case.heads, case.kv_heads, case.head_size
    q, k, v, g = (
        jnp.asarray(rng.standard_normal((B, T, n, H), np.float32), dtype) for n in (N, K, K, N)
    )
    # Documents of unequal length, which end between the blocks of a kernel.
    ends = np.cumsum(np.linspace(0.6, 1.4, case.documents))[:-1] / case.documents * T
    segments = np.searchsorted(ends, np.arange(T), side="right").astype(np.int32)
    return q, k, v, jnp.broadcast_to(jnp.asarray(segments), (B, T)), g


def _on_one_device(function: Any) -> Any:
    """Compiles `function` as a step calls it: inside a `shard_map` that is manual over every axis."""
    mesh = build_mesh(MeshShape(), jax.devices()[:1])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def _with_gradients(function: Any, inputs: tuple[Any, ...], g: Any) -> tuple[Any, ...]:
    """Returns the output of a function and the gradients of its inputs. g: gradient of the output."""
    out, pullback = jax.vjp(function, *inputs)
    return out, *pullback(g)


def _attention(kernels: Kernels, case: Case, segments: jax.Array) -> Any:
    return lambda q, k, v: kernels.self_attention(q, k, v, segments, window=case.window)


def _forward_and_backward(kernels: Kernels, case: Case) -> Any:
    return _on_one_device(
        lambda q, k, v, s, g: _with_gradients(_attention(kernels, case, s), (q, k, v), g)
    )


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
        for x in _inputs(case, dtype)
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


def _compare(name: str, case: Case, dtype: str) -> Mapping[str, Any]:
    kernels = _choose(name, case, dtype)
    if isinstance(kernels, str):
        return {"kernel": name, "case": case.name, "dtype": dtype, "unsupported": kernels}
    # Float32 matmuls take bfloat16 passes on TPUs unless the highest precision is asked for.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        results = _forward_and_backward(kernels, case)(*_inputs(case, dtype))
    labelled = dict(zip(Attention._fields, results, strict=True))
    return _compared(name, case.name, dtype, labelled, _truth(case, dtype))


def _rates(forward: float, both: float, flops: float, backward: float) -> dict[str, float]:
    """Returns seconds, FLOP/s and fractions of the peak of a forward pass, and of forward and backward pass together.

    flops: of the forward pass.  backward: FLOPs of the backward pass over those of the forward pass.
    """
    rates = {
        "forward_flops_per_second": flops / forward,
        "flops_per_second": (1 + backward) * flops / both,
    }
    chip, fractions = find_chip(jax.devices()[0].device_kind), dict[str, float]()
    if chip is not None:
        fractions = {
            k.replace("flops_per_second", "fraction"): rate / chip.flops_bf16
            for k, rate in rates.items()
        }
    return {"forward_seconds": forward, "seconds": both, **rates, **fractions}


def _time(name: str, case: Case) -> Mapping[str, Any]:
    label, kernels = (
        {"kernel": name, "case": case.name, "dtype": "bfloat16"},
        _choose(name, case, "bfloat16"),
    )
    limit = memory_stats(jax.devices()[0]).get("bytes_limit")
    if (
        isinstance(kernels, Kernels)
        and name == "reference"
        and limit
        and 6 * case.score_bytes > limit
    ):
        kernels = f"its scores take {case.score_bytes / 2**30:.0f} GiB, several times over in the backward pass"
    if isinstance(kernels, str):
        return {**label, "unsupported": kernels}
    inputs = _inputs(case, "bfloat16")
    alone = _on_one_device(lambda q, k, v, s: _attention(kernels, case, s)(q, k, v))
    forward, _ = median_seconds(alone, *inputs[:4])
    both, _ = median_seconds(_forward_and_backward(kernels, case), *inputs)
    return {**label, **_rates(forward, both, case.flops, _BACKWARD)}


def _grouped_inputs(experts: int, rows: int, k: int, n: int, dtype: str) -> tuple[jax.Array, ...]:
    """Returns rows, weights, rows of each expert (one of them none) and the gradient of the output."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, rows + 1, experts - 2))
    sizes = np.diff(np.concatenate([[0, 0], cuts, [rows]])).astype(np.int32)
    x, w, g = (
        (rng.standard_normal(shape, np.float32))
        for shape in ((rows, k), (experts, k, n), (rows, n))
    )
    return (*(jnp.asarray(a, dtype) for a in (x, w)), jnp.asarray(sizes), jnp.asarray(g, dtype))


def _grouped_matmul(dtype: str) -> GroupedMatmul:
    return choose_grouped_matmul("auto", jax.devices()[0].platform, dtype)


def _products(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array
) -> tuple[jax.Array, ...]:
    return _grouped_matmul(x.dtype.name).multiply(x, weights, sizes)


def _with_all_gradients(
    x: Any, weights: Any, sizes: Any, g: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    results, dx, dw = _with_gradients(
        lambda x, weights: _products(x, weights, sizes), (x, weights), g
    )
    return (*results, dx, *dw)


def _compare_grouped(dtype: str) -> Mapping[str, Any]:
    """Compares two products of the same rows, as gate and up are: the kernel may add the gradients of their rows."""
    x, w, sizes, g = _grouped_inputs(8, 512, 128, 256, dtype)
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
    results = jax.jit(_with_all_gradients)(x, weights, sizes, gradients)
    labelled = dict(zip(("gate", "up", "dx", "gate's dw", "up's dw"), results, strict=True))
    return _compared(
        "grouped matmul", "gate and up, 8 groups, one empty", dtype, labelled, expected
    )


def _time_grouped(experts: int, rows: int, k: int, n: int) -> Mapping[str, Any]:
    """Returns the time of the grouped matmul, and its rate relative to one dense matmul of equal FLOPs."""
    x, w, sizes, g = _grouped_inputs(experts, rows, k, n, "bfloat16")
    forward, _ = median_seconds(jax.jit(_products), x, (w,), sizes)
    both, _ = median_seconds(jax.jit(_with_all_gradients), x, (w,), sizes, (g,))
    dense, _ = median_seconds(jax.jit(jnp.matmul), x, w[0])
    return {
        "kernel": "grouped matmul",
        "case": f"{experts} experts, {rows} x {k} x {n}",
        "dtype": "bfloat16",
        **_rates(forward, both, 2.0 * rows * k * n, 2.0),
        "of_dense": dense / forward,
    }


def _time_float8(
    products: GroupedProducts, experts: int, rows: int, k: int, n: int
) -> Mapping[str, Any]:
    """Returns the times of the products of operands in float8, and the forward one's rate relative to bfloat16."""
    x, w, sizes, g = _grouped_inputs(experts, rows, k, n, "bfloat16")
    x8, w8, g8 = (a.astype(jnp.float8_e4m3fn) for a in (x, w.swapaxes(1, 2), g))
    of_rows, of_columns = jnp.ones((rows, 1)), jnp.ones((1, n))
    multiply = jax.jit(
        lambda x, w, rows_E: products.rows(x, w, rows_E, jnp.bfloat16, of_rows, None)
    )
    gradient = jax.jit(lambda x, g, rows_E: products.groups(x, g, rows_E, jnp.bfloat16, of_columns))
    forward, of_weights = (
        median_seconds(f, x8, a, sizes)[0] for f, a in ((multiply, w8), (gradient, g8))
    )
    wide, _ = median_seconds(jax.jit(_products), x, (w,), sizes)
    flops = 2.0 * rows * k * n
    return {
        "kernel": "grouped matmul",
        "case": f"{experts} experts, {rows} x {k} x {n}",
        "dtype": "float8",
        "flops_per_second": flops / forward,
        "flops_per_second_of_weights": flops / of_weights,
        "of_bfloat16": wide / forward,
    }

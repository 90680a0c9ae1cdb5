"""Section `kernels`: rates of the attention kernels and of the grouped matmul."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

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
    choose_grouped_matmul,
    choose_kernels,
)
from meshwright.models.model import AttentionSpec
from meshwright.plugins import PARTS, resolve
from meshwright.sharding.sequence import SequenceSplit

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
    """Times every kernel that the platform supports,
    and keeps the rates of the platform's own for plans."""
    platform = jax.default_backend()
    own = AUTO.get(platform, ())
    names = kernel_names(section.request.kernels)
    items: dict[str, Measurement] = {}
    for case, name in itertools.product(speed_cases(platform), names):
        items[f"{name}: time, {case.name}"] = functools.partial(_time, name, case)
    for name, shape in grouped_shapes(platform).items():
        items[f"grouped matmul: time, {name}"] = functools.partial(_time_grouped, *shape)
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


def kernel_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Returns the attention kernels from outside, those of the platform,
    and the others of the package."""
    own = AUTO.get(jax.default_backend(), ())
    return (*asked, *dict.fromkeys((*own, *PARTS["attention kernel"])))


def grouped_shapes(platform: str) -> dict[str, tuple[int, int, int, int]]:
    """Returns experts, rows, k and n of the grouped matmuls that are timed."""
    if platform == "cpu":
        return {"8 experts": (8, 256, 64, 128)}
    return {"Mixtral 8x7B": (8, 8192, 4096, 14336), "Qwen3-30B-A3B": (128, 16384, 2048, 768)}


def calibrated_rates(rows: Sequence[Mapping[str, Any]], own: Sequence[str]) -> dict[str, float]:
    """Returns the rates that plans take: of the platform's own attention kernel,
    and of the grouped matmul.

    own: names of the platform's own kernels.
    The planner counts the products of each kernel's own backward pass.
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


def choose_for(name: str, case: Case, dtype: str) -> Kernels | str:
    """Returns the kernel as a training run chooses it,
    or the reason why it does not support the case."""
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


def attention_inputs(case: Case, dtype: str) -> tuple[jax.Array, ...]:
    """Returns random q, k and v, the documents of each position, and the gradient of the output."""
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
    """Compiles `function` as a step calls it: inside a `shard_map` that is manual
    over every axis."""
    mesh = build_mesh(MeshShape(), jax.devices()[:1])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def _with_gradients(function: Any, inputs: tuple[Any, ...], g: Any) -> tuple[Any, ...]:
    """Returns the output of a function and the gradients of its inputs.
    g: gradient of the output."""
    out, pullback = jax.vjp(function, *inputs)
    return out, *pullback(g)


def _attention(kernels: Kernels, case: Case, segments: jax.Array) -> Any:
    return lambda q, k, v: kernels.self_attention(q, k, v, segments, window=case.window)


def forward_and_backward(kernels: Kernels, case: Case) -> Any:
    """Compiles attention with the gradients of its inputs."""
    return _on_one_device(
        lambda q, k, v, s, g: _with_gradients(_attention(kernels, case, s), (q, k, v), g)
    )


def _rates(forward: float, both: float, flops: float, backward: float) -> dict[str, float]:
    """Returns seconds, FLOP/s and fractions of the peak of a forward pass,
    and of forward and backward pass together.

    flops: of the forward pass.
    backward: FLOPs of the backward pass over those of the forward pass.
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
        choose_for(name, case, "bfloat16"),
    )
    limit = memory_stats(jax.devices()[0]).get("bytes_limit")
    if (
        isinstance(kernels, Kernels)
        and name == "reference"
        and limit
        and 6 * case.score_bytes > limit
    ):
        kernels = (
            f"its scores take {case.score_bytes / 2**30:.0f} GiB, several times over in the "
            "backward pass"
        )
    if isinstance(kernels, str):
        return {**label, "unsupported": kernels}
    inputs = attention_inputs(case, "bfloat16")
    alone = _on_one_device(lambda q, k, v, s: _attention(kernels, case, s)(q, k, v))
    forward, _ = median_seconds(alone, *inputs[:4])
    both, _ = median_seconds(forward_and_backward(kernels, case), *inputs)
    return {**label, **_rates(forward, both, case.flops, _BACKWARD)}


def grouped_inputs(experts: int, rows: int, k: int, n: int, dtype: str) -> tuple[jax.Array, ...]:
    """Returns rows, weights, rows of each expert (one of them none) and the gradient
    of the output."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, rows + 1, experts - 2))
    sizes = np.diff(np.concatenate([[0, 0], cuts, [rows]])).astype(np.int32)
    x, w, g = (
        (rng.standard_normal(shape, np.float32))
        for shape in ((rows, k), (experts, k, n), (rows, n))
    )
    return (*(jnp.asarray(a, dtype) for a in (x, w)), jnp.asarray(sizes), jnp.asarray(g, dtype))


def grouped_matmul_here(dtype: str) -> GroupedMatmul:
    """Returns the grouped matmul that a training chooses on these devices."""
    return choose_grouped_matmul("auto", jax.devices()[0].platform, dtype)


def grouped_products(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the products of rows with the weights of their experts, one for each of `weights`."""
    return grouped_matmul_here(x.dtype.name).multiply(x, weights, sizes)


def with_all_gradients(
    x: Any, weights: Any, sizes: Any, g: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns grouped products and the gradients of the rows and of the weights.
    g: gradients of the products."""
    results, dx, dw = _with_gradients(
        lambda x, weights: grouped_products(x, weights, sizes), (x, weights), g
    )
    return (*results, dx, *dw)


def _time_grouped(experts: int, rows: int, k: int, n: int) -> Mapping[str, Any]:
    """Returns the time of the grouped matmul,
    and its rate relative to one dense matmul of equal FLOPs."""
    x, w, sizes, g = grouped_inputs(experts, rows, k, n, "bfloat16")
    forward, _ = median_seconds(jax.jit(grouped_products), x, (w,), sizes)
    both, _ = median_seconds(jax.jit(with_all_gradients), x, (w,), sizes, (g,))
    dense, _ = median_seconds(jax.jit(jnp.matmul), x, w[0])
    return {
        "kernel": "grouped matmul",
        "case": f"{experts} experts, {rows} x {k} x {n}",
        "dtype": "bfloat16",
        **_rates(forward, both, 2.0 * rows * k * n, 2.0),
        "of_dense": dense / forward,
    }

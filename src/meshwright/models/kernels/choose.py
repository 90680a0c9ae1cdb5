"""Choice of the kernels of attention and of grouped matmuls, made before tracing
from platform, shapes and dtype.

"auto" takes the first kernel of the platform that supports the shapes, and notes why it passed over
another. A kernel named in the Run is used or refused, never replaced. A kernel from outside the
package is a `Kernels` or a `GroupedMatmul` object, named as `module:attribute`. A kernel is
imported when it is chosen.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.config import Training
from meshwright.errors import ConfigError
from meshwright.hardware.machine import Machine
from meshwright.models.kernels.attention import FEATURES, AttentionShapes, Kernels
from meshwright.plugins import PARTS, expect, resolve
from meshwright.sharding.sequence import SequenceSplit

if TYPE_CHECKING:
    from meshwright.models.model import ModelSpec


# What "auto" tries, by `jax.Device.platform`, best first; "blocked" supports everything but the
# choice of keys by an indexer, which only "reference" has. The fused backward kernel is slower than
# two on v5p and faster on tpu7x (public MaxText recipes, measured on both), and takes 0.70 of their
# time on v6e by the kernels' bundles, each with its best blocks; whole steps of others gain 4.6 %
# (v6e-steps.csv; docs/log.md).
AUTO: dict[str, tuple[str, ...]] = {
    "cpu": ("reference",),
    "tpu": ("splash",),
    "gpu": ("cudnn",),
    "cuda": ("cudnn",),
}
AUTO_BY_CHIP: dict[str, tuple[str, ...]] = {
    "tpu7x": ("splash_fused",),
    "v6e": ("splash_fused",),
}


def kernels_of(
    training: Training, spec: "ModelSpec", sequence: SequenceSplit, machine: Machine
) -> Kernels:
    """Chooses the attention kernel of a placed run, as `choose_kernels`."""
    return choose_kernels(
        training.attention_kernel,
        machine,
        block=training.attention_block,
        remat=training.remat,
        head_sizes=spec.head_sizes,
        dtype=training.compute_dtype,
        sequence=sequence,
        needs=frozenset[str]().union(*(a.features for a in spec.attention)),
        windows=tuple(a.chunk or a.window for a in spec.attention) or (None,),
    )


def choose_kernels(
    name: str,
    machine: Machine,
    *,
    block: int | None,
    remat: str,
    head_sizes: tuple[int, ...],
    dtype: str,
    sequence: SequenceSplit,
    needs: frozenset[str] = frozenset(),
    windows: tuple[int | None, ...] = (None,),
) -> Kernels:
    """Chooses the attention kernel of a run, before anything is traced.

    name: "auto", an attention kernel of `plugins.PARTS`,
    or a `Kernels` named as `module:attribute`.
    block: largest block of queries and keys, for kernels that take one.
    remat: remat policy.
    head_sizes: of the layers. dtype: compute dtype.
    sequence: split over `context`.
    needs: rows of `FEATURES` that some layer has.
    windows: keys that a query of each layer sees; None is all before it.

    The result's `name` is the attention that runs: "ring of splash" where keys go around a ring.
    Raises ConfigError where the named kernel does not support the run, or would not be used.
    """
    shapes = AttentionShapes(
        machine.platform,
        head_sizes,
        sequence.seq,
        _chunk_of(sequence),
        dtype,
        remat,
        machine.chip_name,
        windows,
    )
    refusal = functools.partial(
        _refusal, shapes=shapes, needs=needs, sequence=sequence, installed=machine.installed
    )
    if name == "auto":
        kernels = _first_supported(_auto_names(machine), block, refusal)
        if kernels is not None:
            return _named_by_strategy(kernels.for_shapes(shapes) or kernels, sequence)

    kernels = resolve("attention kernel", name)
    if name in PARTS["attention kernel"]:
        kernels = kernels(block)
    kernels = expect(kernels, Kernels, f"attention kernel {name!r}", "a meshwright `Kernels`")
    reason = refusal(kernels)
    if reason is not None:
        raise ConfigError(
            f"--training.attention-kernel {name}",
            reason,
            "--training.attention-kernel auto, or change what it lacks",
        )
    return _named_by_strategy(kernels.for_shapes(shapes) or kernels, sequence)


def _chunk_of(sequence: SequenceSplit) -> int:
    """Returns the tokens of a chunk: a device has two where the sequence is split into groups."""
    if sequence.groups > 1:
        return sequence.seq // (2 * sequence.groups)
    return sequence.seq


def _auto_names(machine: Machine) -> tuple[str, ...]:
    """Returns the attention kernels that "auto" tries, best first."""
    of_platform = AUTO.get(machine.platform, ())
    return (*AUTO_BY_CHIP.get(machine.chip_name or "", of_platform), "blocked", "reference")


def _first_supported(
    names: tuple[str, ...], block: int | None, refusal: Callable[[Kernels], str | None]
) -> Kernels | None:
    """Returns the first kernel that is not refused, with a note why those before it were;
    None if all were."""
    reasons: list[str] = []
    for name in names:
        kernels = _built_in(name, block)
        reason = refusal(kernels)
        if reason is not None:
            reasons.append(reason)
        elif reasons:
            return dataclasses.replace(kernels, note="; ".join(reasons))
        else:
            return kernels
    return None


def _refusal(
    kernels: Kernels,
    *,
    shapes: AttentionShapes,
    needs: frozenset[str],
    sequence: SequenceSplit,
    installed: bool,
) -> str | None:
    """Returns why a kernel cannot run, or would not be used; None if it runs."""
    unsupported = kernels.unsupported(shapes)
    if unsupported:
        return unsupported
    for feature, words in FEATURES.items():
        if feature in needs - kernels.features:
            return f"{kernels.name} attention has no {words}, which the model's layers have"
    if not installed:
        missing = kernels.missing()
        if missing:
            return missing
    return _unused(kernels, sequence)


def _unused(kernels: Kernels, sequence: SequenceSplit) -> str | None:
    """Returns why the context strategy would not use a kernel; None if it does."""
    if kernels.chunk_attention is not None or sequence.groups == 1:
        return None
    option = f"--training.context-strategy {sequence.strategy}"
    if sequence.is_ring:
        needed = f"over {sequence.shards} devices needs attention between chunks in a ring"
        return f"{option} {needed}, which {kernels.name} lacks"
    if kernels.cross_attention is None:
        return f"{option} needs attention to gathered keys, which {kernels.name} lacks"
    return None


def _named_by_strategy(kernels: Kernels, sequence: SequenceSplit) -> Kernels:
    """Returns a kernel with the name of the attention that runs."""
    if not sequence.is_ring:
        return kernels
    return dataclasses.replace(kernels, name=f"ring of {kernels.name}")


@functools.cache
def _built_in(name: str, block: int | None) -> Kernels:
    return resolve("attention kernel", name)(block)


class GroupedProducts(NamedTuple):
    """Grouped products of operands of one byte,
    without derivatives: those of a low-precision matmul."""

    platforms: tuple[str, ...]
    """Values of `jax.Device.platform` that they run on."""
    rows: Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array, jax.Array | None], jax.Array]
    """`(rows [R, K], weights [E, N, K], rows_E [E], dtype of the result, float32 scales of its rows
    [R, 1], what is added to the scaled product) -> [R, N]`."""
    groups: Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], jax.Array]
    """`(rows [R, K], gradients [R, N], rows_E [E], dtype of the result, float32 scales of its
    columns [1, N]) -> [E, K, N]`."""
    slower_on: tuple[str, ...] = ()
    """Families of chips (`Chip.family`) on which they were measured to be slower
    than those of bfloat16."""


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """Grouped matmul with its derivative: rows sorted by expert, each times the weights
    of its own expert."""

    name: str
    """Name in logs and the census."""
    multiply: Callable[[jax.Array, tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]]
    """`(rows [R, K], weights, each [E, K, N], rows_E [E]) -> results, each [R, N]`.

    The rows of expert 0 come first, then those of expert 1; rows past those of the last expert give
    zeros. Gate and up are multiplied together, so that a kernel may add the gradients of their
    rows.
    """
    platforms: tuple[str, ...] = ()
    """Values of `jax.Device.platform` that it runs on; () are all."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of rows and weights; () are all."""
    float8: GroupedProducts | None = None
    """Products of float8_e4m3fn; None where it has none, and experts stay in the compute dtype."""


def ragged_dot() -> GroupedMatmul:
    """Returns XLA's grouped matmul: on TPUs a kernel of the compiler.

    On NVIDIA GPUs XLA multiplies every row by the weights of every expert and masks the rest, E
    times the FLOPs, so a kernel of this package runs there (kernels/grouped_triton.py).
    """

    float8 = GroupedProducts(("cpu",), _ragged_rows, _ragged_groups)
    return GroupedMatmul("ragged_dot", _ragged_multiply, float8=float8)


def _ragged_multiply(
    x_RK: jax.Array, weights: tuple[jax.Array, ...], rows_E: jax.Array
) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.ragged_dot(x_RK, w, rows_E) for w in weights)


def _ragged_rows(
    x_RK: jax.Array,
    w_ENK: jax.Array,
    rows_E: jax.Array,
    dtype: Any,
    scales: jax.Array,
    added: jax.Array | None,
) -> jax.Array:
    """Computes `GroupedProducts.rows` in float32."""
    w_EKN = w_ENK.swapaxes(1, 2).astype(jnp.float32)
    product = jax.lax.ragged_dot(x_RK.astype(jnp.float32), w_EKN, rows_E) * scales
    if added is not None:
        product = product + added.astype(jnp.float32)
    return product.astype(dtype)


def _ragged_groups(
    x_RK: jax.Array, g_RN: jax.Array, rows_E: jax.Array, dtype: Any, scales: jax.Array
) -> jax.Array:
    """Computes `GroupedProducts.groups` in float32."""
    contract_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    g_RN = g_RN.astype(jnp.float32)
    x_RK = x_RK.astype(jnp.float32)
    product = jax.lax.ragged_dot_general(x_RK, g_RN, rows_E, contract_rows)
    return (product * scales).astype(dtype)


def triton() -> GroupedMatmul:
    """Returns the grouped matmul in Pallas for Triton.
    Raises ConfigError where JAX does not have Triton."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        raise ConfigError(
            "--training.grouped-matmul triton",
            f"it is written in Pallas for Triton, which JAX {jax.__version__} does not have",
            "a JAX of version 0.12, or --training.grouped-matmul ragged_dot, which computes every "
            "expert for every row",
        )
    from meshwright.models.kernels.grouped_triton import (
        grouped_matmul,
        multiply,
        multiply_transposed,
    )

    platforms = ("gpu", "cuda")
    dtypes = ("bfloat16", "float16", "float32")
    float8 = GroupedProducts(platforms, multiply, multiply_transposed, slower_on=("h100",))
    return GroupedMatmul("triton", grouped_matmul, platforms, dtypes, float8)


GROUPED_AUTO = {"gpu": "triton", "cuda": "triton"}
"""Grouped matmul of "auto", by `jax.Device.platform`; "ragged_dot" elsewhere."""


def choose_grouped_matmul(name: str, platform: str, dtype: str) -> GroupedMatmul:
    """Chooses the grouped matmul of a run, before anything is traced.

    name: "auto", a grouped matmul of `plugins.PARTS`, or a `GroupedMatmul` named as
    `module:attribute`. platform: `jax.Device.platform`.
    dtype: compute dtype. Raises ConfigError where it cannot run there; none is replaced.
    """
    chosen = GROUPED_AUTO.get(platform, "ragged_dot") if name == "auto" else name
    kernel = resolve("grouped matmul", chosen)
    if chosen in PARTS["grouped matmul"]:
        kernel = kernel()
    kernel = expect(
        kernel, GroupedMatmul, f"grouped matmul {name!r}", "a meshwright `GroupedMatmul`"
    )
    reason = None
    if kernel.platforms and platform not in kernel.platforms:
        reason = (
            f"it runs on {' or '.join(kernel.platforms)}, and the devices are of platform "
            f"{platform!r}"
        )
    elif kernel.dtypes and dtype not in kernel.dtypes:
        reason = f"it takes {', '.join(kernel.dtypes)}, and the compute dtype is {dtype}"
    if reason is not None:
        raise ConfigError(
            f"--training.grouped-matmul {name}", reason, "--training.grouped-matmul ragged_dot"
        )
    return kernel

"""Choice of the grouped matmul of experts: rows sorted by expert, each times the weights of its own expert.

XLA's `lax.ragged_dot` is a kernel of the compiler on TPUs. On NVIDIA GPUs XLA multiplies every row by the weights of
every expert and masks the rest, E times the FLOPs, so a kernel of our own runs there (kernels/grouped_triton.py).
"""

import dataclasses
import importlib.util
from collections.abc import Callable

import jax
from jax import lax

from meshwright import plugins
from meshwright.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """Grouped matmul with its derivative."""

    name: str
    """Name in logs and the census."""
    multiply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """`(rows [R, K], weights [E, K, N], rows_E [E]) -> [R, N]`.

    The rows of expert 0 come first, then those of expert 1; rows past those of the last expert give zeros.
    """
    platforms: tuple[str, ...] = ()
    """Values of `jax.Device.platform` that it runs on; () are all."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of rows and weights; () are all."""


def _ragged_dot() -> GroupedMatmul:
    return GroupedMatmul("ragged_dot", lax.ragged_dot)


def _triton() -> GroupedMatmul:
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        raise ConfigError(
            "--training.grouped-matmul triton",
            f"it is written in Pallas for Triton, which JAX {jax.__version__} does not have",
            "a JAX of version 0.12, or --training.grouped-matmul ragged_dot, which computes every expert for every row",
        )
    from meshwright.models.kernels.grouped_triton import grouped_matmul

    return GroupedMatmul("triton", grouped_matmul, ("gpu", "cuda"), ("bfloat16", "float16", "float32"))


GROUPED_MATMULS: dict[str, Callable[[], GroupedMatmul]] = {"ragged_dot": _ragged_dot, "triton": _triton}
"""Grouped matmuls by name."""

AUTO = {"gpu": "triton", "cuda": "triton"}
"""Grouped matmul of "auto", by `jax.Device.platform`; "ragged_dot" elsewhere."""


def choose_grouped_matmul(name: str, platform: str, dtype: str) -> GroupedMatmul:
    """Chooses the grouped matmul of a run, before anything is traced.

    name: "auto", a row of GROUPED_MATMULS, or a `GroupedMatmul` named as `module:attribute`.  platform:
    `jax.Device.platform`.  dtype: compute dtype. Raises ConfigError where it cannot run there; none is replaced.
    """
    chosen = AUTO.get(platform, "ragged_dot") if name == "auto" else name
    if chosen in GROUPED_MATMULS:
        kernel = GROUPED_MATMULS[chosen]()
    else:
        kernel = plugins.resolve("grouped matmul", chosen, GROUPED_MATMULS)
    if not isinstance(kernel, GroupedMatmul):
        raise ConfigError(
            f"grouped matmul {name!r}", f"it is a {type(kernel).__name__}", "a meshwright `GroupedMatmul`"
        )
    reason = None
    if kernel.platforms and platform not in kernel.platforms:
        reason = f"it runs on {' or '.join(kernel.platforms)}, and the devices are of platform {platform!r}"
    elif kernel.dtypes and dtype not in kernel.dtypes:
        reason = f"it takes {', '.join(kernel.dtypes)}, and the compute dtype is {dtype}"
    if reason is not None:
        raise ConfigError(f"--training.grouped-matmul {name}", reason, "--training.grouped-matmul ragged_dot")
    return kernel

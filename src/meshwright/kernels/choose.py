"""Which attention runs on which hardware."""

import dataclasses
import functools
from typing import Protocol

import jax

from meshwright.kernels.attention import Positions, attention, positions_of
from meshwright.kernels.blocked import blocked
from meshwright.kernels.cudnn import cudnn_attention, has_cudnn
from meshwright.kernels.splash import splash_attention
from meshwright.memory import ATTENDED, POLICIES, SCORES, save_as


class Whole(Protocol):
    """Attention of whole sequences to themselves; what it saves for its backward pass is marked ATTENDED."""

    def __call__(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array, /, *, window: int | None
    ) -> jax.Array: ...


class Between(Protocol):
    """Attention of some positions to others."""

    def __call__(
        self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, queries: Positions, keys: Positions, /, *,
        window: int | None,
    ) -> jax.Array: ...  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The attention of one kind of hardware; all of them give the same numbers."""

    name: str
    whole: Whole
    between: Between


def _through(between: Between) -> Whole:
    def whole(
        q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array, /, *, window: int | None
    ) -> jax.Array:
        at = positions_of(segments_BT)
        return save_as(between(q_BTNH, k_BTKH, v_BTKH, at, at, window=window), ATTENDED)

    return whole


# By `jax.Device.platform`.
KERNELS: dict[str, Kernels] = {
    "cpu": Kernels("reference", _through(attention), attention),
    "tpu": Kernels("splash", splash_attention, blocked),
    "gpu": Kernels("cuDNN", cudnn_attention, blocked),
}
_BLOCKED = Kernels("blocked", _through(blocked), blocked)


def kernels_of(platform: str, block: int, remat: str) -> Kernels:
    """Attention for the devices of a platform; XLA in blocks where there is no kernel for them.

    block: most queries and keys that a kernel takes at a time, where it asks.
    remat: of all kernels the reference alone keeps scores; blocks take its place where the policy drops them. (A policy
    of `jax.checkpoint` cannot drop them: what a name was given to is kept all the same.)
    """
    if platform == "cpu" and SCORES in POLICIES[remat].dropped:
        return _BLOCKED
    if platform == "tpu":
        splash = functools.partial(splash_attention, block=block)
        return dataclasses.replace(KERNELS[platform], whole=splash)
    name = "gpu" if platform == "cuda" else platform
    return _BLOCKED if name not in KERNELS or (name == "gpu" and not has_cudnn()) else KERNELS[name]

"""Chips: what they can do, each number with its source."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a kind."""

    flops_bf16: float
    """Dense bfloat16 peak, FLOP/s per JAX device."""
    memory: float
    """HBM, bytes per JAX device."""
    source: str


_SCALING_BOOK = "jax-ml/scaling-book, tpus.md"
_GPUS = "jax-ml/scaling-book, gpus.md"
_DOCS = "Google Cloud TPU documentation"

# Keys are the beginnings of `jax.Device.device_kind`, longest match first.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(275e12, 32 * 2**30, _SCALING_BOOK),
    "TPU v5 lite": Chip(197e12, 16e9, _SCALING_BOOK),
    "TPU v5e": Chip(197e12, 16e9, _SCALING_BOOK),
    "TPU v5p": Chip(459e12, 95 * 2**30, _DOCS),
    "TPU v5": Chip(459e12, 95 * 2**30, _DOCS),
    "TPU v6 lite": Chip(918e12, 32e9, _DOCS),
    "TPU v6e": Chip(918e12, 32e9, _DOCS),
    # Two JAX devices a chip, each with half of 2307 TFLOP/s and of 192 GiB.
    "TPU7x": Chip(2307e12 / 2, 96 * 2**30, _DOCS),
    "NVIDIA A100": Chip(312e12, 80e9, _GPUS),
    "NVIDIA H100": Chip(989e12, 80e9, _GPUS),
    "NVIDIA H200": Chip(989e12, 141e9, _GPUS),
    "NVIDIA B200": Chip(2250e12, 180e9, _GPUS),
    "NVIDIA GB200": Chip(2500e12, 186e9, _GPUS),
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip of a device kind, None where it is not known (a CPU)."""
    for kind in sorted(CHIPS, key=len, reverse=True):
        if device_kind.startswith(kind):
            return CHIPS[kind]
    return None

"""Achieved fraction of each chip's peak in a training step, by family of chips: what chip and kernels can do.

How much of it a program uses is in planner/software.py. `matmul`, `grouped_matmul`, the fractions of attention kernels
and the `tensor_overlap` of v5e and v5p are fitted on half of the published measurements and validated on the other half
(docs/foresight.md). `links` and `network` of GPUs are measured collectives. All other fractions are assumptions.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Achieved fractions of a chip's peaks, each between 0 and 1."""

    matmul: float
    """Fraction of peak FLOP/s in a large matmul."""
    grouped_matmul: float
    """Fraction of the `matmul` rate in the matmuls of experts: groups of unequal size, token sorting and unsorting."""
    attention: float
    """Fraction of peak FLOP/s in the chip's own fused attention kernel (splash, cuDNN), of the products that it
    computes: the head size is below the matrix unit's, and softmax runs between its matmuls. The kernel's backward pass
    has 2.5 or 3.5 times those of its forward pass (`Kernels.backward`)."""
    hbm: float
    """Fraction of HBM bandwidth."""
    links: float
    """Fraction of the link bandwidth inside a slice (ICI) or node (NVLink)."""
    network: float
    """Fraction of the network bandwidth between slices (DCN) or nodes."""
    overlap: float
    """Fraction overlapped with compute, of the communication that has compute to overlap with."""
    tensor_overlap: float
    """Fraction overlapped with compute, of the communication over `tensor`, which is pipelined with the matmul before
    or after it."""
    flash2: float = 1.0
    """Fraction of the `attention` rate that FlashAttention-2 reaches, which has the instructions of Ampere alone."""
    triton: float = 1.0
    """Fraction of the `attention` rate that the port of the first FlashAttention to Triton reaches."""
    tile: int = 128
    """Rows and columns of one matrix-unit tile, or of a step of a GPU's matmul along K (a size, not a fraction)."""


_TPU = Efficiency(
    matmul=0.85,
    grouped_matmul=0.5,
    attention=0.30,
    hbm=0.85,
    links=0.85,
    network=0.70,
    overlap=0.85,
    tensor_overlap=0.6,
)
_GPU = Efficiency(
    matmul=0.70,
    grouped_matmul=0.35,
    attention=0.45,
    hbm=0.85,
    links=0.80,
    network=0.75,
    overlap=0.75,
    tensor_overlap=0.6,
    tile=64,
)
_A100 = dataclasses.replace(_GPU, matmul=0.79, attention=0.55, triton=0.60)
_HOPPER = dataclasses.replace(_GPU, matmul=0.68, attention=0.45, flash2=0.68, triton=0.40)
_BLACKWELL = dataclasses.replace(_GPU, matmul=0.53, attention=0.43)
_BLACKWELL_ULTRA = dataclasses.replace(_BLACKWELL, matmul=0.78)

# Rounded output of `bench/foresight/fit.py`. The compiler's own cycle estimates for large matmuls are 0.58 to 0.76 of
# the peak on v6e and 0.86 to 0.93 on v5p (docs/log.md), so `matmul` agrees with what the matrix units can do.
EFFICIENCY: dict[str, Efficiency] = {
    "v4": dataclasses.replace(_TPU, matmul=0.77),
    "v5e": dataclasses.replace(_TPU, matmul=0.89, attention=0.23, tensor_overlap=0.9),
    "v5p": dataclasses.replace(_TPU, matmul=0.93, attention=0.59, tensor_overlap=0.54),
    "v6e": dataclasses.replace(_TPU, matmul=0.65, grouped_matmul=0.66, attention=0.29),
    "tpu7x": dataclasses.replace(_TPU, matmul=0.73, grouped_matmul=0.38, attention=0.24),
    "a100": _A100,
    "a100-40gb": _A100,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
    "b300": _BLACKWELL_ULTRA,
    "gb200": _BLACKWELL,
    "gb300": _BLACKWELL_ULTRA,
}
"""Achieved fractions by chip name (`chips.CHIPS`)."""


def efficiency_of(name: str) -> Efficiency:
    """Returns the achieved fractions of a chip in `chips.CHIPS`; any other chip gets the defaults of GPUs."""
    return EFFICIENCY.get(name, _GPU)

"""FLOPs of convolutions, counted by the positions at which a kernel meets data."""

from collections.abc import Sequence

import numpy as np

from meshwright.hlo.parser import Instruction


def convolution_flops(instruction: Instruction, left: Sequence[int], right: Sequence[int], out: Sequence[int]) -> float:
    """Counts the FLOPs of a convolution from its `dim_labels` and `window`.

    left, right, out: dimensions of input, kernel and output.
    """
    labels, _, result = instruction.attributes["dim_labels"].partition("->")
    lhs, rhs = labels.split("_")
    flops = 2.0 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")]
    for label in filter(str.isdigit, lhs):
        flops *= _taps(
            _window(instruction, int(label)), left[lhs.index(label)], right[rhs.index(label)], out[result.index(label)]
        )
    return flops


def _window(instruction: Instruction, spatial: int) -> dict[str, tuple[int, ...]]:
    """Reads stride, padding and dilations of one spatial dimension of a convolution; defaults are left out."""
    window: dict[str, tuple[int, ...]] = {}
    for part in instruction.attributes.get("window", "{}").strip("{}").split():
        key, _, value = part.partition("=")
        window[key] = tuple(int(n) for n in value.split("x")[spatial].split("_"))
    return window


def _taps(window: dict[str, tuple[int, ...]], size: int, kernel: int, out: int) -> int:
    """Counts the pairs of output and kernel positions that read an element, not padding or a hole of a dilation.

    A TPU writes batched and per-head matrix products as convolutions in which most pairs read padding.
    """
    stride, low = window.get("stride", (1,))[0], window.get("pad", (0, 0))[0]
    lhs_dilation, rhs_dilation = window.get("lhs_dilate", (1,))[0], window.get("rhs_dilate", (1,))[0]
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * rhs_dilation - low
    inside = (position >= 0) & (position <= (size - 1) * lhs_dilation) & (position % lhs_dilation == 0)
    return int(inside.sum())

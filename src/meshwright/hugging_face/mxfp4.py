"""MXFP4 weights of a Hugging Face folder, read as the bfloat16 numbers that they stand for.

A matrix [E, D, F] is stored as `NAME_blocks`, uint8 [E, F, D/32, 16], and `NAME_scales`, uint8 [E, F, D/32]: groups of
32 numbers of 4 bits (E2M1), two in a byte, the first in its low half, with an exponent each (OCP Microscaling Formats
1.0, 2023; `transformers`, integrations/mxfp4.py). Numbers of 4 bits times a power of two are exact in bfloat16.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from meshwright.errors import WeightsError
from meshwright.hugging_face.safetensors_files import TensorEntry

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
PACKED = "mxfp4"
"""`quant_method` of the configuration."""


def unpacked_entries(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors that pairs of blocks and scales stand for, by name; their bytes are those of the blocks.

    Raises WeightsError for blocks without scales, and for shapes that do not belong together.
    """
    found = {}
    for tensor, entry in entries.items():
        if not tensor.endswith(BLOCKS):
            continue
        name = tensor.removesuffix(BLOCKS)
        scales = entries.get(name + SCALES)
        if scales is None or (entry.dtype, scales.dtype) != ("U8", "U8") or entry.shape != (*scales.shape, _GROUP // 2):
            raise WeightsError(
                f"reading {tensor!r}",
                f"it is {entry.dtype}{list(entry.shape)}, and "
                + (
                    f"{name + SCALES!r} is missing"
                    if scales is None
                    else f"its scales {scales.dtype}{list(scales.shape)}"
                ),
                f"MXFP4: uint8 [experts, columns, groups, {_GROUP // 2}] with scales uint8 [experts, columns, groups]",
            )
        E, F, groups = scales.shape
        found[name] = TensorEntry("BF16", (E, groups * _GROUP, F), entry.start, entry.stop)
    return found


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """A matrix [E, D, F] in MXFP4, of which blocks are read as bfloat16: `tensor[:, :, ::2]` is one, lazily."""

    blocks: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [E, D, F] of the numbers."""
        E, F, groups = self.scales.shape
        return (E, groups * _GROUP, F)

    def __getitem__(self, index: Any) -> Any:
        """Returns every n-th column as another packed tensor, or a block of all three dimensions as an array."""
        experts, inputs, columns = tuple(index) + (slice(None),) * (3 - len(index))
        if experts == inputs == slice(None):
            return PackedTensor(self.blocks[:, columns], self.scales[:, columns])
        start, stop, _ = inputs.indices(self.shape[1])
        groups = slice(start // _GROUP, -(-stop // _GROUP))
        values = _unpack(self.blocks[experts, columns, groups], self.scales[experts, columns, groups])
        first = start - groups.start * _GROUP
        return values[:, :, first : first + stop - start].swapaxes(1, 2)

    def reshape(self, shape: list[int]) -> "PackedTensor":
        """Returns the tensor itself: its dimensions are those of the parameter."""
        assert tuple(shape) == self.shape, (shape, self.shape)
        return self


def _unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers [E, F, D] of blocks [E, F, groups, 16] and scales [E, F, groups]."""
    halves = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = np.ldexp(halves.reshape(*scales.shape, _GROUP), scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*scales.shape[:2], -1).astype(ml_dtypes.bfloat16)

"""Quantised weights of Hugging Face folders, read as the bfloat16 numbers that they stand for.

Float8, as DeepSeek-V3 and Kimi K2 are released: a weight `NAME.weight` [out, in] is float8 (e4m3),
and `NAME.weight_scale_inv` has a float32 for each block of it, 128 x 128 in the released files: the
weight is the product (`fp8_cast_bf16.py` of the repository deepseek-ai/DeepSeek-V3).

MXFP4, as GPT-OSS is released: a matrix [E, D, F] is stored as `NAME_blocks`, uint8
[E, F, D/32, 16], and `NAME_scales`, uint8 [E, F, D/32]: groups of 32 numbers of 4 bits (E2M1), two
in a byte, the first in its low half, with an exponent each (OCP Microscaling Formats 1.0, 2023;
`transformers`, integrations/mxfp4.py). Numbers of 4 bits times a power of two are exact in
bfloat16.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from meshwright.errors import WeightsError
from meshwright.hugging_face.config_fields import Fields
from meshwright.hugging_face.safetensors_files import TensorEntry

FP8 = "fp8"
"""`quant_method` of a configuration with float8 weights."""
_SUFFIX = "_scale_inv"
_FIX = "the model's unquantised weights (bfloat16), or dequantise it with `transformers`"
Block = tuple[int, int]
"""Rows and columns of a block that shares a scale."""


def block_of(fields: Fields) -> Block:
    """Returns the blocks of a float8 configuration.
    Raises WeightsError for a form of it that is not read."""
    file, quantisation = fields.file, fields.config["quantization_config"]
    block, kind = quantisation.get("weight_block_size"), quantisation.get("fmt", "e4m3")
    if kind != "e4m3":
        raise WeightsError(
            f"reading {file}", f"its float8 weights are of type {kind}, and e4m3 is read", _FIX
        )
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise WeightsError(
            f"reading {file}",
            f"its float8 weights have scales for blocks of {block} (weight_block_size)",
            _FIX,
        )
    return block[0], block[1]


def scale_name(tensor: str) -> str:
    """Returns the name of the scales of a weight."""
    return tensor + _SUFFIX


def dequantise(weight: np.ndarray, scale: np.ndarray, block: Block) -> np.ndarray:
    """Returns a weight [out, in] in bfloat16, the type of the released models' other weights.

    weight: float8.  scale: float32, one for each block.
    """
    rows, columns = weight.shape
    out = np.empty(weight.shape, ml_dtypes.bfloat16)
    # Row by row of blocks: a whole weight in float32 would take four times its file's memory.
    for number in range(scale.shape[0]):
        part = slice(number * block[0], min((number + 1) * block[0], rows))
        scales = np.repeat(scale[number].astype(np.float32), block[1])[:columns]
        out[part] = (weight[part].astype(np.float32) * scales).astype(ml_dtypes.bfloat16)
    return out


_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4 = "mxfp4"
"""`quant_method` of a configuration with MXFP4 weights."""


def unpacked_entries(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors that pairs of blocks and scales stand for, by name;
    their bytes are those of the blocks.

    Raises WeightsError for blocks without scales, and for shapes that do not belong together.
    """
    found = {}
    for tensor, entry in entries.items():
        if not tensor.endswith(BLOCKS):
            continue
        name = tensor.removesuffix(BLOCKS)
        scales = entries.get(name + SCALES)
        if (
            scales is None
            or (entry.dtype, scales.dtype) != ("U8", "U8")
            or entry.shape != (*scales.shape, _GROUP // 2)
        ):
            found_scales = (
                f"{name + SCALES!r} is missing"
                if scales is None
                else f"its scales {scales.dtype}{list(scales.shape)}"
            )
            raise WeightsError(
                f"reading {tensor!r}",
                f"it is {entry.dtype}{list(entry.shape)}, and {found_scales}",
                f"MXFP4: uint8 [experts, columns, groups, {_GROUP // 2}] with scales uint8 "
                "[experts, columns, groups]",
            )
        E, F, groups = scales.shape
        found[name] = entry._replace(dtype="BF16", shape=(E, groups * _GROUP, F))
    return found


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """A matrix [E, D, F] in MXFP4, of which blocks are read
    as bfloat16: `tensor[:, :, ::2]` is one, lazily."""

    blocks: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [E, D, F] of the numbers."""
        E, F, groups = self.scales.shape
        return (E, groups * _GROUP, F)

    def __getitem__(self, index: Any) -> Any:
        """Returns every n-th column as another packed tensor,
        or a block of all three dimensions as an array."""
        experts, inputs, columns = tuple(index) + (slice(None),) * (3 - len(index))
        if experts == inputs == slice(None):
            return PackedTensor(self.blocks[:, columns], self.scales[:, columns])
        start, stop, _ = inputs.indices(self.shape[1])
        groups = slice(start // _GROUP, -(-stop // _GROUP))
        values = _unpack(
            self.blocks[experts, columns, groups], self.scales[experts, columns, groups]
        )
        first = start - groups.start * _GROUP
        return values[:, :, first : first + stop - start].swapaxes(1, 2)

    def reshape(self, shape: list[int]) -> "PackedTensor":
        """Returns the tensor itself: its dimensions are those of the parameter."""
        assert tuple(shape) == self.shape, (shape, self.shape)
        return self


def _unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers [E, F, D] of blocks [E, F, groups, 16] and scales [E, F, groups]."""
    halves = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = np.ldexp(
        halves.reshape(*scales.shape, _GROUP), scales.astype(np.int32)[..., None] - 127
    )
    return numbers.reshape(*scales.shape[:2], -1).astype(ml_dtypes.bfloat16)

"""Weights in float8 with a scale for each block, as DeepSeek-V3 and Kimi K2 are released, dequantised as they are read.

A weight `NAME.weight` [out, in] is float8 (e4m3), and `NAME.weight_scale_inv` has a float32 for each block of it, 128 x
128 in the released files: the weight is the product (`fp8_cast_bf16.py` of the repository deepseek-ai/DeepSeek-V3).
"""

import ml_dtypes
import numpy as np

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields

PACKED = "fp8"
"""`quant_method` of the configuration."""
CODE = "F8_E4M3"
"""Type of such a weight in a safetensors file."""
_SUFFIX = "_scale_inv"
_FIX = "the model's unquantised weights (bfloat16), or dequantise it with `transformers`"
Block = tuple[int, int]
"""Rows and columns of a block that shares a scale."""


def block_of(fields: Fields) -> Block:
    """Returns the blocks of a float8 configuration. Raises WeightsError for a form of it that is not read."""
    file, quantisation = fields.file, fields.config["quantization_config"]
    block, kind = quantisation.get("weight_block_size"), quantisation.get("fmt", "e4m3")
    if kind != "e4m3":
        raise WeightsError(f"reading {file}", f"its float8 weights are of type {kind}, and e4m3 is read", _FIX)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise WeightsError(
            f"reading {file}", f"its float8 weights have scales for blocks of {block} (weight_block_size)", _FIX
        )
    return block[0], block[1]


def scale_name(tensor: str) -> str:
    """Returns the name of the scales of a weight."""
    return tensor + _SUFFIX


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight [out, in]; the last blocks may be partial."""
    return tuple(-(-size // n) for size, n in zip(shape, block, strict=True))


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

"""Hunyuan's dense models (Tencent 2025; their published configurations): Qwen3's layers, with the
norm of queries and keys after their rotation."""

import dataclasses
from typing import Any, Literal

from meshwright.models.blocks.attention import Attention
from meshwright.models.families.llama import Llama


@dataclasses.dataclass(frozen=True)
class Hunyuan(Llama):
    """Configuration of a dense Hunyuan decoder.

    Example:
        >>> model = mw.Hunyuan(vocab=32000, width=512, layers=8, heads=8, kv_heads=2, mlp=1536)
        >>> model.decoder.layers[0].attention.norm_after_rotation
        True
    """

    qk_norm: Literal["none", "rms", "rms_heads"] = "rms"

    def attention(self, **changes: Any) -> Attention:
        """Returns the attention of the fields. changes: of the fields of `Attention`."""
        return super().attention(norm_after_rotation=True, **changes)

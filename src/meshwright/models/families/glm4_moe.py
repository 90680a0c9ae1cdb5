"""GLM-4.5 and later (Zhipu AI 2025, arXiv:2508.06471): grouped-query attention that rotates half of
each head, then the experts of DeepSeek-V3 with a router bias, after leading dense layers.

MiniMax-M2 (2025) has no dense layers and no shared experts, and normalises queries and keys of all
heads together; dots1 (arXiv:2506.05767) rotates whole heads.
"""

import dataclasses
from typing import Literal

from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Decoder
from meshwright.models.families.expert_fields import DenseLayersFirst
from meshwright.models.families.fields import LEARNED, PartialRotary


@dataclasses.dataclass(frozen=True)
class Glm4Moe(DenseLayersFirst, PartialRotary):
    """Configuration of a GLM-4.5 decoder.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 8, "heads": 8}
        >>> model = mw.Glm4Moe(**sizes, experts=16, dense_layers=1)
        >>> [layer.stack for layer in model.spec().layers[:3]]
        ['dense_blocks', 'blocks', 'blocks']
    """

    rotary_fraction: float = 0.5
    qkv_bias: LEARNED = "none"
    """Bias of the query, key and value projections (GLM-4.5)."""
    qk_norm: Literal["none", "rms", "rms_heads"] = "none"
    """Normalisation of queries and keys: each head (rms: GLM-4.5 and 4.6, without Air), or all
    heads together (rms_heads: MiniMax-M2)."""
    router_score: Literal["softmax", "sigmoid"] = "sigmoid"
    shared_experts: int = 1

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router: always, as the released weights have it."""
        return "choice"

    def build(self) -> Decoder:
        """Returns the dense layers, then the layers with experts."""
        norm = None if self.qk_norm == "none" else Norm(self.qk_norm, self.norm_epsilon)
        return self.dense_then_experts(
            self.attention(qkv_bias=self.qkv_bias == "learned", qk_norm=norm), self.norm
        )

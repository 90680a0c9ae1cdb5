"""Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv:2401.04088), Qwen3-MoE (arXiv:2505.09388),
and layers like DeepSeek-V3's (arXiv:2412.19437) with many small experts, shared experts, and dense
layers first.

One layer is Llama's with another second half.
E experts of width F, of which a token uses k, and shared experts:

    h = sequence_all_gather(rms_norm(x))
    x += sequence_reduce_scatter(sum_k weight_k expert_k(h) + shared(h))
"""

import dataclasses

from meshwright.models.decoder import Decoder
from meshwright.models.families.expert_fields import DenseLayersFirst
from meshwright.models.families.fields import Projections, ScaledRotary


@dataclasses.dataclass(frozen=True)
class Mixtral(DenseLayersFirst, Projections, ScaledRotary):
    """Configuration of a mixture of experts; `mlp` is the width of the dense layers.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 8, "heads": 8}
        >>> model = mw.Mixtral(**sizes, experts=16, experts_per_token=2)
        >>> model.spec().layers[0].experts.experts_per_token
        2
    """

    aux_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001

    def build(self) -> Decoder:
        """Returns the dense layers, then the layers with experts."""
        return self.dense_then_experts(self.attention(), self.norm, norm_place=self.norm_place)

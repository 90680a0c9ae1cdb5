"""GPT-OSS (OpenAI 2025, arXiv:2508.10925): local and global attention
by turns, attention sinks, biased experts.

One layer, model width D, N query heads and K key/value heads of size H, E experts
of width F of which a token uses k:

    h = rms_norm(x)
    x += row_parallel(attention(column_parallel(h q, h k, h v) + biases; sinks) o) + bias
    h = sequence_all_gather(rms_norm(x))
    x += sequence_reduce_scatter(sum_k weight_k expert_k(h))

    expert(h) = ((up + 1) gate sigmoid(alpha gate)) down + bias, gate and up with biases and clamped

Every layer has the rotary frequencies of YaRN.
The first layer of each two attends within a sliding window.
"""

import dataclasses

from meshwright.models.blocks.yarn import Yarn
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import RoutedExperts
from meshwright.models.families.fields import GroupedQuery, local_and_global
from meshwright.ranges import NonNegativeInt, PositiveFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class GptOss(RoutedExperts, GroupedQuery):
    """Configuration of a GPT-OSS decoder.

    Example:
        >>> model = mw.GptOss(vocab=32000, width=512, layers=4, heads=8, kv_heads=2, experts=16)
        >>> [layer.attention.window for layer in model.spec().layers]
        [128, None, 128, None]
    """

    kv_heads: int = 2
    local_layers: NonNegativeInt = 1
    """Layers with a sliding window before each layer without."""
    sliding_window: PositiveInt = 128
    """Positions that a token attends to in local layers, itself included."""
    rope_theta: float = 150000.0
    rope_scaling: Yarn | None = None
    """Scaling of the low rotary frequencies."""
    experts_per_token: int = 4
    swiglu_alpha: PositiveFloat = 1.702
    """Factor of the gate inside of the sigmoid."""
    swiglu_limit: PositiveFloat = 7.0
    """Largest gate, and largest size of the other factor."""

    def build(self) -> Decoder:
        """Returns local and global layers by turns, each with experts."""
        last = self.attention(
            qkv_bias=True, out_bias=True, sinks=True, rotary=self.rotary(scaling=self.rope_scaling)
        )
        local = dataclasses.replace(last, window=self.sliding_window)
        experts = self.routed(
            router_bias="logits", bias=True, clamp=(self.swiglu_alpha, self.swiglu_limit)
        )
        return self.repeat(
            *local_and_global(self, Block("blocks", last, experts, self.norm), local)
        )

"""Kimi Linear (Moonshot AI 2025, arXiv:2510.26692): three layers of Kimi Delta Attention
to one of latent attention.

Of each `full_attention_interval` layers the last has multi-head latent attention, without rotation
(blocks/latent.py), and so has the last layer of all. The others have a delta net with a decay for
each channel (blocks/kimi_delta.py). The second halves are those of DeepSeek-V3: dense in the first
layers, then experts with a router bias, and a shared one.
"""

import dataclasses
from typing import Annotated, Any, Literal

import msgspec

from meshwright.config import MeshShape
from meshwright.errors import refuse
from meshwright.models.blocks.delta_net import DeltaSpec
from meshwright.models.blocks.kimi_delta import KimiDelta
from meshwright.models.blocks.latent import LatentAttention
from meshwright.models.blocks.layers import Norm
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import DenseLayersFirst
from meshwright.models.families.fields import LatentWidths
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class KimiLinear(LatentWidths, DenseLayersFirst):
    """Configuration of a Kimi Linear decoder.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 4, "heads": 8}
        >>> model = mw.KimiLinear(**sizes, experts=16, dense_layers=1)
        >>> [layer.stack for layer in model.spec().layers]
        ['linear_dense_blocks', 'linear_blocks', 'linear_blocks', 'blocks']
    """

    q_lora_rank: PositiveInt | None = None
    full_attention_interval: PositiveInt = 4
    """Layers of which the last has latent attention, and the others linear attention; the last
    layer of all has latent attention too."""
    linear_heads: PositiveInt = 4
    """Heads of linear attention, each with a state."""
    linear_head_size: PositiveInt = 32
    """Size of a query, a key and a value of linear attention, and width of the products that its
    decays and output gate are projections of."""
    convolution_taps: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 4
    """Tokens that the convolution before linear attention reads, the token itself included."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Constant added to the mean square in RMSNorm."""
    router_score: Literal["softmax", "sigmoid"] = "sigmoid"
    shared_experts: int = 1

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router: always, as the released weights have it."""
        return "choice"

    def build(self) -> Decoder:
        """Returns the layers by turns."""
        interval = self.full_attention_interval
        refuse(
            (
                self.layers < 2,
                f"{self.layers} layer of which the last has full attention",
                "at least one layer has full attention, and one linear attention",
                "--model.layers 2 --model.full-attention-interval 2",
            ),
            (
                not 2 <= interval <= self.layers,
                f"{self.layers} layers of which every {interval}-th has full attention",
                "at least one layer has full attention, and one linear attention",
                f"--model.full-attention-interval {min(max(2, interval), self.layers)}",
            ),
        )
        heads, size = self.linear_heads, self.linear_head_size
        delta = DeltaSpec(heads, 1, size, size, self.convolution_taps, decays=size, gate_rank=size)
        linear = KimiDelta(self.width, delta, self.norm_epsilon, self.out_std)
        sizes = (self.width, self.heads, self.qk_nope_head_dim)
        full = LatentAttention(*sizes, self.latent, None, self.out_std)
        norm = Norm("rms", self.norm_epsilon)
        layers = []
        for number, (stack, half) in enumerate(self.second_halves(), 1):
            if number % interval == 0 or number == self.layers:
                layers.append(Block(stack, full, half, norm))
            else:
                layers.append(Block(f"linear_{stack}", linear, half, norm))
        return self.in_order(layers)

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        sizes = super().small_sizes(shape, layers)
        return {**sizes, "linear_head_size": 8, "layers": max(2, sizes["layers"])}

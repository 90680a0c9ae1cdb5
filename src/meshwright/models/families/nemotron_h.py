"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: layers
of one half each, in any order.

A layer has a state space, attention without rotary embedding, a feed-forward with the square of
ReLU, or experts of the same kind with a sigmoid router and a shared one. In Nemotron 3 Super routed
experts read a latent and write one.
"""

import dataclasses
from typing import Any, ClassVar, Literal

from meshwright.config import MeshShape
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import ChoiceOfExperts
from meshwright.models.families.fields import StateSpace
from meshwright.models.families.layer_pattern import PatternOfLayers
from meshwright.ranges import NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True)
class NemotronH(PatternOfLayers, ChoiceOfExperts, StateSpace):
    """Configuration of a Nemotron-H decoder.

    Example:
        >>> model = mw.NemotronH(vocab=32000, width=512, layers=6, heads=8, pattern="ME*-ME")
        >>> [layer.stack for layer in model.spec().layers][:4]
        ['mamba_blocks', 'expert_blocks', 'attention_blocks', 'dense_blocks']
    """

    KINDS: ClassVar[dict[str, str]] = {
        "M": "a state space",
        "E": "experts",
        "*": "attention",
        "-": "a feed-forward",
    }

    pattern: str = dataclasses.field(default="ME*-", kw_only=True)
    """Kinds of the layers, repeated where there are more: M a state space, * attention, - a
    feed-forward, E experts (`hybrid_override_pattern` of the published configurations)."""
    mlp: PositiveInt = 384
    """Feed-forward width F of the layers without experts."""
    shared_mlp: PositiveInt = 384
    """Feed-forward width of the shared expert."""
    expert_latent: PositiveInt | None = None
    """Width of the latent that routed experts read and write, between two projections of each layer
    (Nemotron 3 Super); None is the model's width."""
    router_score: Literal["softmax", "sigmoid"] = "sigmoid"
    mamba_step_floor: NonNegativeFloat = 0.0
    """Least step of the state space (`time_step_min` of a configuration,
    as `transformers` reads it)."""

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router: always, as the released weights have it."""
        return "choice"

    def build(self) -> Decoder:
        """Returns the layers of the pattern."""
        self.check_pattern()
        mamba = self.mamba(step_floor=self.mamba_step_floor)
        dense = FeedForward(self.width, self.mlp, self.out_std, "relu2")
        experts = self.routed(shared=self.shared_mlp, activation="relu2")
        blocks = {
            "M": Block("mamba_blocks", mamba, None, self.norm),
            "*": Block("attention_blocks", self.attention(), None, self.norm),
            "-": Block("dense_blocks", None, dense, self.norm),
            "E": Block("expert_blocks", None, experts, self.norm),
        }
        return self.in_order([blocks[kind] for kind in self.kinds])

    def small_sizes(self, shape: MeshShape, layers: int) -> dict[str, Any]:
        """Returns fields of `shrunk`."""
        latent = None if self.expert_latent is None else 8
        return {**super().small_sizes(shape, layers), "expert_latent": latent}

"""Nemotron-H (NVIDIA 2025, arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: layers
of one half each, in any order.

A layer has a state space, attention without rotary embedding, a feed-forward with the square of
ReLU, or experts of the same kind with a sigmoid router and a shared one.
"""

import dataclasses
from typing import Any, Literal

from meshwright.config import MeshShape
from meshwright.errors import refuse
from meshwright.models.blocks.feed_forward import FeedForward
from meshwright.models.decoder import Block, Decoder, DecoderModel
from meshwright.models.families.expert_fields import ChoiceOfExperts
from meshwright.models.families.fields import StateSpace
from meshwright.models.model import Model
from meshwright.ranges import NonNegativeFloat, PositiveInt

_KINDS = {"M": "a state space", "*": "attention", "-": "a feed-forward", "E": "experts"}
"""Letter of a pattern -> what its layer has."""


@dataclasses.dataclass(frozen=True)
class NemotronH(ChoiceOfExperts, StateSpace):
    """Configuration of a Nemotron-H decoder.

    Example:
        >>> model = mw.NemotronH(vocab=32000, width=512, layers=6, heads=8, pattern="ME*-ME")
        >>> [layer.stack for layer in model.spec().layers][:4]
        ['mamba_blocks', 'expert_blocks', 'attention_blocks', 'dense_blocks']
    """

    pattern: str = "ME*-"
    """Kinds of the layers, repeated where there are more: M a state space, * attention, - a
    feed-forward, E experts (`hybrid_override_pattern` of the published configurations)."""
    mlp: PositiveInt = 384
    """Feed-forward width F of the layers without experts."""
    shared_mlp: PositiveInt = 384
    """Feed-forward width of the shared expert."""
    router_score: Literal["softmax", "sigmoid"] = "sigmoid"
    mamba_step_floor: NonNegativeFloat = 0.0
    """Least step of the state space (`time_step_min` of a configuration,
    as `transformers` reads it)."""

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router: always, as the released weights have it."""
        return "choice"

    @property
    def kinds(self) -> str:
        """Kind of each layer, a letter of `pattern`."""
        return "".join(self.pattern[i % len(self.pattern)] for i in range(self.layers))

    def build(self) -> Decoder:
        """Returns the layers of the pattern."""
        self._check_pattern()
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

    def _check_pattern(self) -> None:
        """Raises ConfigError for a pattern with other letters,
        or with more of them than there are layers."""
        kinds = ", ".join(f"{letter} ({half})" for letter, half in _KINDS.items())
        known = "".join(letter for letter in self.pattern.upper() if letter in _KINDS)
        letters = len(self.pattern)
        refuse(
            (
                not self.pattern or not set(self.pattern) <= set(_KINDS),
                f"layers of the pattern {self.pattern!r}",
                f"a pattern has at least one letter, of {kinds}",
                f"--model.pattern '{known or 'ME*-'}'",
            ),
            (
                letters > self.layers,
                f"{self.layers} layers of a pattern of {letters}",
                "each letter is a layer, and none is left out",
                f"--model.layers {letters}, or --model.pattern '{self.pattern[: self.layers]}'",
            ),
        )

    def shrunk(self, shape: MeshShape, layers: int) -> Model:
        """Returns a small model that has each kind of layers `layers` times."""
        pattern = "".join(dict.fromkeys(self.kinds))
        one_layer = dataclasses.replace(self, pattern=pattern[0], layers=1)
        small: Any = DecoderModel.shrunk(one_layer, shape, 1)
        changed: Model = dataclasses.replace(small, pattern=pattern, layers=layers * len(pattern))
        return changed

"""Qwen2-MoE and Qwen1.5-MoE (arXiv:2407.10671): Mixtral's layers,
with a shared expert whose output a sigmoid scales."""

import dataclasses

from meshwright.models.blocks.experts import Experts
from meshwright.models.families.mixtral import Mixtral
from meshwright.ranges import PositiveInt


@dataclasses.dataclass(frozen=True)
class Qwen2Moe(Mixtral):
    """Configuration of a Qwen2-MoE decoder.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 8, "heads": 8}
        >>> model = mw.Qwen2Moe(**sizes, experts=16, shared_mlp=1024)
        >>> model.spec().layers[0].experts.experts_per_token
        2
    """

    shared_mlp: PositiveInt = 384
    """Feed-forward width F of the shared expert."""

    def routed_and_shared(self) -> Experts:
        """Returns the second half of the layers with experts."""
        return self.routed(shared=self.shared_mlp, shared_gate=True)

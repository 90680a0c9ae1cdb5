"""DeepSeek-V3 (arXiv:2412.19437), DeepSeek-V2-Lite (arXiv:2405.04434)
and Kimi K2 (arXiv:2507.20534).

Multi-head latent attention (blocks/latent.py), then the second half of a Mixtral layer: a SwiGLU in
the first layers, routed and shared experts after them. A further layer may predict the token after
the next (models/forward.py).
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from meshwright.declarations import changes
from meshwright.models.blocks.indexer import Indexer
from meshwright.models.blocks.latent import LatentAttention
from meshwright.models.blocks.layers import Norm, linear
from meshwright.models.blocks.rotary import Rotary, RotaryBase, Temperature
from meshwright.models.blocks.yarn import LatentYarn
from meshwright.models.decoder import Block, Decoder
from meshwright.models.families.expert_fields import DenseLayersFirst
from meshwright.models.families.fields import LatentWidths
from meshwright.models.model import MTP, ForwardContext, Layer, ModelSpec
from meshwright.ranges import NonNegativeFloat
from meshwright.sharding.params import Param, Tree


@dataclasses.dataclass(frozen=True)
class Deepseek(LatentWidths, DenseLayersFirst):
    """Configuration of a mixture of experts with multi-head latent attention.

    Example:
        >>> sizes = {"vocab": 32000, "width": 512, "layers": 8, "heads": 8}
        >>> model = mw.Deepseek(**sizes, experts=16, dense_layers=1)
        >>> attention = model.spec().layers[0].attention
        >>> attention.head_size, attention.value_size, attention.latent.cached
        (48, 32, 80)
    """

    rope_theta: RotaryBase = 10000.0
    """Base of the rotary frequencies."""
    yarn: LatentYarn | None = None
    """Scaling of rotary frequencies and scores for long sequences (YaRN)."""
    norm_epsilon: NonNegativeFloat = 1e-6
    """Constant added to the mean square in RMSNorm."""
    mtp_depth: Literal[0, 1] = 0
    """Further tokens that training predicts: 1 is the token after the next (MTP, section 2.2)."""
    mtp_weight: Annotated[NonNegativeFloat, changes("program")] = 0.3
    """Weight of the loss of the further token."""
    aux_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001

    @property
    def router_bias(self) -> Literal["none", "choice"]:
        """Bias of the router: with sigmoid scores,
        as the released weights of DeepSeek-V3 have it."""
        return "choice" if self.router_score == "sigmoid" else super().router_bias

    @property
    def temperature(self) -> Temperature | None:
        """Growth of queries with their position; None for none."""
        return None

    @property
    def indexer(self) -> Indexer | None:
        """Chooses the keys of each query; None attends to all."""
        return None

    def build(self) -> Decoder:
        """Returns the dense layers, then the layers with experts."""
        size, field = self.qk_rope_head_dim, "qk_rope_head_dim"
        rotary = Rotary(size, self.rope_theta, self.yarn, pairs="neighbours", field=field)
        attention = LatentAttention(
            self.width,
            self.heads,
            self.qk_nope_head_dim,
            self.latent,
            rotary,
            self.out_std,
            self.temperature,
            self.indexer,
        )
        return self.dense_then_experts(attention, Norm("rms", self.norm_epsilon))

    @property
    def _further(self) -> Block:
        return dataclasses.replace(self.decoder.layers[-1], stack=MTP)

    def params(self) -> Tree:
        """Returns the parameter descriptions;
        `mtp` is the layer that predicts the token after the next."""
        if not self.mtp_depth:
            return super().params()
        D = self.width
        norms = {
            name: Param((1, D), "LD", "ones")
            for name in ("embed_norm", "hidden_norm", "final_norm")
        }
        project = Param((1, 2 * D, D), "LZD", role="projection")
        return {**super().params(), MTP: {**norms, "project": project, **self._further.params(1)}}

    def spec(self) -> ModelSpec:
        """Returns the layers, and that of multi-token prediction where there is one."""
        return dataclasses.replace(super().spec(), further=(self._further.spec(),) * self.mtp_depth)

    def further_layer(
        self, params: Tree, x_BTD: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, Layer]:
        """Returns the input of the layer that predicts the token after the next, and the layer.

        x_BTD: hidden states after the last layer.
        ctx: its tokens are those that follow each position.
        """
        norm, block = self.decoder.norm, self._further
        h_BTD = norm(x_BTD, ctx.gather_params(params["final_norm"], "final_norm"))
        embedded_BTD = self.embed(params, ctx)

        def join(h_BTD: jax.Array, w: Tree) -> tuple[jax.Array, Tree]:
            both = [norm(embedded_BTD, w["embed_norm"]), norm(h_BTD, w["hidden_norm"])]
            return linear(jnp.concatenate(both, -1), w["project"]), w

        return h_BTD, block.layer(ctx, join)

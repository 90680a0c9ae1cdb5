"""Kimi Delta Attention (Kimi Linear, arXiv:2510.26692, section 3): a gated delta net
with a decay for each channel.

The delta rule, its convolution and its state are those of blocks/delta_net.py. Each channel of a
key has a decay of its own; decays and output gate are projections of products of low rank, and the
gate is a sigmoid:

    h, f, g = sequence_all_gather(h, h Wf_down, h Wg_down)
    q, k, v, b = column_parallel(h);  s, gate = column_parallel(f Wf_up, g Wg_up)
    decay = -exp(a_log) softplus(s + step_bias);  rate = sigmoid(b)
    out = row_parallel((rms_norm(delta_net(q, k, v, decay, rate)) * sigmoid(gate)) Wo)

The down projections are the same on every device of `tensor`: each computes them
for its own positions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.models.blocks.delta_net import DeltaInputs, DeltaNet
from meshwright.models.blocks.layers import linear, linears
from meshwright.models.model import ForwardContext
from meshwright.models.remat import QKV, recomputed
from meshwright.sharding.params import Param


@recomputed
def _gated(out_BTNGH: jax.Array, gate_BTNGH: jax.Array) -> jax.Array:
    return out_BTNGH * jax.nn.sigmoid(gate_BTNGH.astype(jnp.float32)).astype(out_BTNGH.dtype)


@recomputed
def _decays(step_BTNGH: jax.Array, bias_NGH: jax.Array, a_log_NG: jax.Array) -> jax.Array:
    """Returns the log decay of each channel of a key, float32."""
    growth_BTNGH = jax.nn.softplus(step_BTNGH.astype(jnp.float32) + bias_NGH)
    return -jnp.exp(a_log_NG)[..., None] * growth_BTNGH


@dataclasses.dataclass(frozen=True)
class KimiDelta(DeltaNet):
    """Kimi Delta Attention of one kind of layers."""

    def params(self, layers: int) -> dict[str, Param]:
        """Returns the parameters of a stack of `layers` layers."""
        L, D, N, G = layers, self.width, self.delta.heads, self.delta.groups
        H, F, Z = self.delta.key_size, self.delta.value_size, self.delta.gate_rank
        params = super().params(layers)
        for replaced in ("value_gate", "step", "step_bias"):
            del params[replaced]
        step_bias = Param((L, N, G, H), "LNGH", "ones", precision="float32", stored="float32")
        return {
            **params,
            "step_down": Param((L, D, Z), "LDZ", role="qkv"),
            "step_up": Param((L, Z, N, G, H), "LZNGH", role="projection"),
            "step_bias": step_bias,
            "gate_down": Param((L, D, Z), "LDZ", role="qkv"),
            "gate_up": Param((L, Z, N, G, F), "LZNGH", role="projection"),
        }

    def inputs(
        self, ctx: ForwardContext, h_BTD: jax.Array, w: dict[str, Any]
    ) -> tuple[DeltaInputs, jax.Array]:
        """Returns the inputs of linear attention, and its output gate."""
        down = linears(h_BTD, [w["step_down"], w["gate_down"]])
        low = [checkpoint_name(x, QKV) for x in down]
        names = ("query", "key", "value", "rate", "step_up", "gate_up")
        products = ctx.column_parallel(
            self._up, jnp.concatenate([h_BTD, *low], -1), [w[name] for name in names]
        )
        q_BTNH, k_BTNH, v_BTNGH = (checkpoint_name(x, QKV) for x in products[:3])
        decay_BTNGH = _decays(products[4], w["step_bias"], w["a_log"])
        rate_BTNG = jax.nn.sigmoid(products[3].astype(jnp.float32))
        return DeltaInputs(q_BTNH, k_BTNH, v_BTNGH, decay_BTNGH, rate_BTNG), products[5]

    def _up(self, gathered_BTZ: jax.Array, weights: list[Any]) -> list[jax.Array]:
        """Returns queries, keys, values and rates, of the input;
        decays and gates, of the products of low rank."""
        rank = self.delta.gate_rank
        h_BTD = gathered_BTZ[..., : -2 * rank]
        step_BTZ = gathered_BTZ[..., -2 * rank : -rank]
        gate_BTZ = gathered_BTZ[..., -rank:]
        *of_input, step, gate = weights
        return [*linears(h_BTD, of_input), linear(step_BTZ, step), linear(gate_BTZ, gate)]

    def gated(self, out_BTNGH: jax.Array, gate_BTNGH: jax.Array) -> jax.Array:
        """Returns the normalised output times the sigmoid of its gate."""
        return _gated(out_BTNGH, gate_BTNGH)

"""Key/value heads that are fewer than the devices of `tensor`: every device computes all, and attends with one."""

from typing import Any

import jax
from jax import lax

from meshwright.comm.collectives import axis_index
from meshwright.models.blocks.context import Attend
from meshwright.sharding.placement import replicates_kv_heads


def with_own_kv_head(attend: Attend) -> Attend:
    """Returns `attend` for keys and values of which every device has all heads: it takes that of its own queries.

    Gradients of the projections are summed over `tensor` like those of any parameter that is whole over it.
    """

    def own(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **kind: Any) -> jax.Array:
        devices, heads = lax.axis_size("tensor"), k_BTKH.shape[2]
        if replicates_kv_heads(heads, devices):
            mine = axis_index(("tensor",)) * heads // devices
            k_BTKH, v_BTKH = (lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k_BTKH, v_BTKH))
        return attend(q_BTNH, k_BTKH, v_BTKH, **kind)

    return own

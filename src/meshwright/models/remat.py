"""Rematerialisation (activation checkpointing): which activations the backward pass reads,
and which it recomputes.

A model names its activations with `jax.ad_checkpoint.checkpoint_name`; a policy lists the names
that are saved on the device or offloaded to host memory. Everything else is recomputed, layer by
layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.comm.collectives import row_major
from meshwright.models.saved_activations import saving_activations_only

LAYER_INPUT = "layer input"
"""Name of a layer's input: the residual stream."""
QKV = "queries, keys, values"
"""Name of the queries, keys and values of attention, after rotary embedding."""
ATTN_RESIDUAL = "attention residual"
"""Name of the residual stream between the two halves of a layer."""
ATTN_OUT = "attention output"
"""Name of the attention output before its projection."""
FFN_HIDDEN = "feed-forward hidden"
"""Name of the outputs of the feed-forward's first matmuls (gate and up)."""
ATTN_LSE = "attention log-sum-exp"
"""Name of the log-sum-exp that a fused kernel saves with its output: a float32 per head
and token, never offloaded."""
ATTN_SCORES = "attention scores"
"""Attention scores [B, N, T, S]. They have no checkpoint name: the kernel decides whether they
are saved."""


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """Activations that the backward pass finds saved; all others are recomputed."""

    saved: tuple[str, ...] | None
    """Names saved on the device. None saves everything and recomputes no layer."""
    dropped: tuple[str, ...] = ()
    """Exceptions where everything else is saved."""
    offloaded: tuple[str, ...] = ()
    """Names offloaded to host memory."""

    @property
    def begins_inside(self) -> bool:
        """Whether a layer's backward pass begins with its feed-forward half: it recomputes
        nothing before that."""
        return self.saved is not None and ATTN_RESIDUAL in self.saved

    @property
    def policy(self) -> Callable[..., Any] | None:
        """Policy for `jax.checkpoint`; None where nothing is recomputed."""
        policies = jax.checkpoint_policies
        if self.saved is None:
            return None
        if self.offloaded:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.saved),
                names_which_can_be_offloaded=list(self.offloaded),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return policies.save_only_these_names(*self.saved)


# In the order of what they recompute.
# A layer's input is the loop's carry: it is saved, unless it is offloaded.
REMAT_POLICIES: dict[str, RematPolicy] = {
    "none": RematPolicy(None),
    "attention": RematPolicy(None, dropped=(ATTN_SCORES,)),
    "projections": RematPolicy((QKV, ATTN_OUT, ATTN_LSE, ATTN_RESIDUAL, FFN_HIDDEN)),
    "feed_forward": RematPolicy((QKV, ATTN_OUT, ATTN_LSE, ATTN_RESIDUAL)),
    "attention_out": RematPolicy((ATTN_OUT, ATTN_LSE)),
    "offload_attention": RematPolicy((ATTN_LSE,), offloaded=(LAYER_INPUT, QKV, ATTN_OUT)),
    "full": RematPolicy(()),
    "offload": RematPolicy((), offloaded=(LAYER_INPUT,)),
}


SaveHidden = Callable[[jax.Array], jax.Array]
"""`x [B, T, F] -> x`, named for the remat policy."""


def save_as_it_is(x_BTF: jax.Array) -> jax.Array:
    """Names an output of the feed-forward's first matmuls."""
    return checkpoint_name(x_BTF, FFN_HIDDEN)


def save_tokens_last(x_BTF: jax.Array) -> jax.Array:
    """Names it too, and keeps it with tokens last in memory: so v6e's gradients
    of weights read it (docs/log.md)."""
    return jnp.swapaxes(checkpoint_name(row_major(jnp.swapaxes(x_BTF, -1, -2)), FFN_HIDDEN), -1, -2)


def recomputed[**P, R](elementwise: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function of elementwise operations so that its inputs are saved
    for the backward pass, and no more.

    Without it, policies that save everything also save each float32 intermediate: for SwiGLU's
    product 6 arrays of the hidden width instead of 2. Reading the inputs again costs less than
    writing and reading the intermediates.
    """
    return jax.checkpoint(elementwise, prevent_cse=False)


def checkpoint_layer(
    layer: Callable[..., Any], remat: str, *, prevent_cse: bool = False, saves_weights: bool = True
) -> Callable[..., Any]:
    """Returns `layer(x, ...)` with the remat policy applied; it must run inside a scan.

    prevent_cse: needed where the scan has one iteration, which XLA inlines and then merges
    recomputation and forward pass, and where its body has other layers: the backward pass would
    recompute them all before it needs the first.
    saves_weights: whether a policy that saves everything saves weights as the layer reads them; if
    not, it saves what depends on `x` (`saving_activations_only`).
    """
    policy = REMAT_POLICIES[remat].policy
    if policy is None and not saves_weights:
        return saving_activations_only(layer)

    def named(x: jax.Array, *args: Any) -> Any:
        return layer(checkpoint_name(x, LAYER_INPUT), *args)

    return (
        layer if policy is None else jax.checkpoint(named, policy=policy, prevent_cse=prevent_cse)
    )

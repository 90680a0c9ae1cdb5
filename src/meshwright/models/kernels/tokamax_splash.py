"""Tokamax's splash attention (extra `tokamax`), a newer version of JAX's.

It differs from JAX's in what it computes by and in what it skips:

    exponents       2^(x log2 e) for e^x; the factor log2 e rounds the queries a second time
    masks           computed only in blocks that the mask cuts, in a loop body of their own
    documents       blocks of keys without a document of the block of queries are not visited
    1 / sum         multiplied inside the kernel
    d queries       added up in three copies, of the dtype of the queries, by every third block

All are exact but for rounding: in bfloat16, with 32 blocks of keys, gradients differ from those
in float32 by 0.36 to 0.48 % (JAX's fused kernel: 0.28 to 0.35), that of the last queries by 0.69
(0.38).

Left off: a constant in place of the greatest logit, which is right only where something bounds the
logits; a soft cap or normalised queries and keys would have to prove it, and for Llama nothing
does. Left off as well: the skipping of the hidden quarters of a block on the diagonal, which needs
blocks of one size and no offset between chunks.

Tokamax's public `splash_attention` returns no log-sum-exp, and its operator takes a window only as
an array [T, T] and cannot be interpreted on a CPU. The kernel is therefore taken from
`tokamax._src`, whose names another version may change: the extra pins it, and tests run it.
"""

import importlib.util
from typing import Any

import jax

from meshwright.models.kernels.attention import Kernels
from meshwright.models.kernels.splash import (
    PairShape,
    SplashLibrary,
    SplashOptions,
    chosen_blocks,
    splash_kernels_of,
    visible_mask,
)

GRADIENT_COPIES = 7
"""Copies of the queries' gradient that move outside the backward kernel: three are set to zero,
read, and their sum is written."""


def _make(options: SplashOptions, pair: PairShape) -> Any:
    """`SplashLibrary.make`."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    forward, backward = chosen_blocks(options, pair)
    config = splash.SplashConfig(
        block_q=forward.q,
        block_kv=forward.kv,
        block_kv_compute=forward.kv_compute,
        block_q_dkv=backward.q,
        block_kv_dkv=backward.kv,
        block_kv_dkv_compute=backward.kv_compute,
        attn_logits_soft_cap=options.softcap,
        interpret=options.interpret,
    )
    mask = visible_mask(masks, pair)
    return splash.make_splash_mha_single_device(mask, config=config, save_residuals=True)


def _attend(
    kernel: Any, qkv: list[jax.Array], query_segments: jax.Array, key_segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`SplashLibrary.attend`."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    out, statistics = kernel(*qkv, segment_ids=splash.SegmentIds(query_segments, key_segments))
    return out, statistics["logsumexp"]


def _differentiate(
    kernel: Any,
    qkv: list[jax.Array],
    segments: tuple[jax.Array, jax.Array],
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`SplashLibrary.differentiate`."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash

    options = dict(kernel.kwargs)
    del options["save_residuals"]
    segment_ids = splash.SegmentIds(*segments)
    sinks = None
    dropout_key = None
    # The backward kernel subtracts it from exponents of two.
    lse_base_2 = lse * splash.LOG2E
    residuals = (*qkv, segment_ids, sinks, out, lse_base_2, kernel.dkv_mask_info, dropout_key)
    gradients = splash._splash_attention_bwd(
        save_residuals=False, **options, res=residuals, grads=g
    )
    g_q, g_k, g_v = gradients[2:5]
    return g_q, g_k, g_v


def _missing() -> str | None:
    """`Kernels.missing`."""
    if importlib.util.find_spec("tokamax") is not None:
        return None
    return "its library, tokamax, is not installed: pip install 'meshwright[tokamax]'"


TOKAMAX_SPLASH = SplashLibrary(
    "tokamax", _make, _attend, _differentiate, lambda blocks_of_keys: GRADIENT_COPIES, _missing
)


def tokamax_splash_kernels(block: int | None, interpret: Any = False) -> Kernels:
    """Returns tokamax's splash attention with blocks of at most `block` tokens,
    None the fastest."""
    return splash_kernels_of("tokamax_splash", SplashOptions(TOKAMAX_SPLASH, block, 1, interpret))

"""Splash attention, the TPU's flash attention kernel (jax.experimental.pallas.ops.tpu.splash_attention).

It must be called inside a `shard_map` that is manual over every axis, with `check_vma=False`, as the step is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.models.kernels.attention import AttentionShapes, Kernels
from meshwright.models.kernels.chunks import (
    ChunkAttention,
    ChunkMask,
    Gradients,
    Keys,
    Queries,
    Result,
    self_attention_of,
)

LANES = 128
"""Lanes of the TPU's vector unit: sequences and blocks are multiples of it."""
HEAD_MULTIPLE = 64
"""Heads are multiples of it; those of 64 take the registers and HBM of heads of 128."""


@functools.lru_cache(maxsize=32)
def splash_chunks(
    block: int, backward_kernels: int, interpret: Any, softcap: float | None = None
) -> ChunkAttention:
    """Returns splash attention between two chunks, with a static mask for each kind of pair; hidden blocks are skipped.

    Chunks are multiples of LANES (`_unsupported` checks).  block: largest block of queries and of keys.
    backward_kernels: 2 compute the gradients of the queries apart from those of keys and values, each from its own
    scores: seven matrix products. 1 computes all from the same scores with five, and writes the queries' gradient once
    per block of keys.  interpret: runs the Pallas kernel in interpret mode on a CPU.
    """

    def kernel_and_operands(queries: Queries, keys: Keys, mask: ChunkMask) -> tuple[Any, list[Any]]:
        """Returns the kernel, and scaled queries, keys and values, [B, heads, tokens, H]."""
        (_, tokens, heads, H), S = queries.q_BTNH.shape, keys.k_BSKH.shape[1]
        scaled = (queries.q_BTNH * H**-0.5, keys.k_BSKH, keys.v_BSKH)
        kernel = _kernel((tokens, heads, S), block, backward_kernels, interpret, softcap, mask)
        return kernel, [x.swapaxes(1, 2) for x in scaled]

    def forward(queries: Queries, keys: Keys, mask: ChunkMask) -> Result:
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
            SegmentIds,
        )

        kernel, operands = kernel_and_operands(queries, keys, mask)

        def attend(qkv: list[jax.Array], queries: jax.Array, keys: jax.Array) -> Any:
            return kernel(*qkv, segment_ids=SegmentIds(queries, keys))

        out_BNTH, (lse_BNT,) = jax.vmap(attend)(operands, queries.segments_BT, keys.segments_BS)
        if mask.window is not None:
            # Where a window hides a complete row of blocks, the kernel divides by a sum over no keys.
            out_BNTH = jnp.where(jnp.isfinite(lse_BNT)[..., None], out_BNTH, 0)
        return Result(out_BNTH.swapaxes(1, 2), lse_BNT)

    def backward(
        queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array, mask: ChunkMask
    ) -> Gradients:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as splash,
        )

        kernel, operands = kernel_and_operands(queries, keys, mask)
        options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}

        def attend(qkv: list[Any], segments: tuple[Any, Any], out: Any, lse: Any, g: Any) -> Any:
            ids, tables = splash.SegmentIds(*segments), (kernel.dq_mask_info, kernel.dkv_mask_info)
            saved = (*qkv, ids, None, out, lse, *tables)
            return splash._splash_attention_bwd(save_residuals=False, **options, res=saved, do=g)[
                3:6
            ]

        out_BNTH, g_BNTH = result.out_BTNH.swapaxes(1, 2), g_BTNH.swapaxes(1, 2)
        segments = (queries.segments_BT, keys.segments_BS)
        gradients = jax.vmap(attend)(operands, segments, out_BNTH, result.lse_BNT, g_BNTH)
        g_q, g_k, g_v = (x.swapaxes(1, 2) for x in gradients)
        return g_q * queries.q_BTNH.shape[3] ** -0.5, g_k, g_v

    return ChunkAttention(
        forward, backward, functools.partial(splash_chunks, block, backward_kernels, interpret)
    )


def block_size(seq: int, largest: int) -> int:
    """Returns the queries and keys of a block: the largest multiple of LANES that divides `seq`, at most `largest`."""
    return max(b for b in range(LANES, max(LANES, min(seq, largest)) + 1, LANES) if seq % b == 0)


@functools.lru_cache(maxsize=32)
def _kernel(
    sizes: tuple[int, int, int],
    block: int,
    backward_kernels: int,
    interpret: Any,
    softcap: Any,
    mask: ChunkMask,
) -> Any:
    """Returns the kernel of JAX. sizes: queries, heads and keys of a pair of chunks."""
    # Importing Pallas takes 0.4 s, which only a TPU's step is worth.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tokens, heads, keys = sizes
    visible: masks.Mask
    if mask.distance is None:
        visible = masks.FullMask((tokens, keys))
    elif mask.window is None:
        visible = masks.CausalMask((tokens, keys), mask.distance)
    else:
        visible = masks.LocalMask((tokens, keys), (mask.window - 1, 0), mask.distance)
    q, kv = block_size(tokens, block), block_size(keys, block)
    apart = (
        {"block_q_dq": q, "block_kv_dq": kv}
        if backward_kernels == 2
        else {"use_fused_bwd_kernel": True}
    )
    # The kernel's block tables are constants of the program, even while a caller is being traced.
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            mask=masks.MultiHeadMask([visible] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=splash.BlockSizes(
                block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, **apart
            ),
            save_residuals=True,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )


def splash_kernels(block: int, backward_kernels: int = 2, interpret: Any = False) -> Kernels:
    """Returns splash attention with blocks of at most `block` queries and keys. Options: see `splash_chunks`."""
    chunks = splash_chunks(block, backward_kernels, interpret)
    return Kernels(
        "splash" if backward_kernels == 2 else "splash_fused",
        self_attention_of(chunks),
        unsupported=_unsupported,
        chunk_attention=chunks,
        features=frozenset({"softcap", "sinks"}),
        backward=3.5 if backward_kernels == 2 else 2.5,
    )


splash_fused_kernels = functools.partial(splash_kernels, backward_kernels=1)
"""Splash attention whose backward pass is one kernel."""


def _unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform != "tpu":
        return (
            f"splash attention is a TPU kernel, and the devices are of platform {shapes.platform!r}"
        )
    tokens = "sequence" if shapes.chunk == shapes.seq else "chunk of the sequence"
    for what, n, unit in (
        (tokens, shapes.chunk, LANES),
        *(("head size", n, HEAD_MULTIPLE) for n in shapes.head_sizes),
    ):
        if n % unit:
            return f"splash attention takes a {what} divisible by {unit}: {n} = {n // unit} * {unit} + {n % unit}"
    return None

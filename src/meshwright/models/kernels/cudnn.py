"""cuDNN's flash attention for NVIDIA GPUs, through JAX's primitives for its forward and backward kernels.

cuDNN has causal masks and sliding windows, not documents. Where a pair of chunks has tokens of only one document, the
kernels run without a mask; pairs without a common document are skipped; the rest take documents as a mask. A long
sequence is cut into chunks for this, so that a mask has at most CHUNK x CHUNK elements and memory grows linearly with
the sequence. cuDNN's packed layout (lengths and offsets of the documents) is not used: it needs a static number of
documents per sequence, and its log-sum-exp takes that many times the memory.
"""

import ctypes
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.kernels.attention import AttentionShapes, Kernels
from meshwright.models.kernels.chunks import (
    FULL,
    ChunkAttention,
    ChunkMask,
    Gradients,
    Keys,
    Pass,
    Queries,
    Result,
    backward_pass,
    cut,
    forward_pass,
    self_attention_of,
    uncut,
)

MAX_HEAD_SIZE = 128
"""Largest head before Hopper, where keys and values have one size."""
MAX_HEAD_SIZE_HOPPER = 256
"""Largest head on Hopper and later, where values may have a size of their own (latent attention; cuDNN 9.10)."""
BEFORE_HOPPER = ("a100", "a100-40gb")
"""Chips of earlier architectures."""
CHUNK = 4096
"""Most queries and keys of a pair whose documents are a mask: 32 MiB per sequence."""
ONE_DOCUMENT, SEVERAL_DOCUMENTS = "one document.", "several documents."
"""Named scopes of the forms of attention, from which a conditional chooses by the documents of the tokens."""
_HIDDEN = -(2.0**41)
"""Bias of a hidden key; cuDNN cannot subtract two larger numbers."""


@functools.cache
def has_cudnn() -> bool:
    """Returns whether cuDNN 9 can be loaded here; without it JAX cannot lower its attention."""
    try:
        ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return False
    return True


def _forward(queries: Queries, keys: Keys, mask: ChunkMask) -> Result:
    return _by_documents(forward_pass, mask, (queries,), keys)[0]


def _backward(
    queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array, mask: ChunkMask
) -> Gradients:
    g_q, (g_k, g_v) = _by_documents(backward_pass, mask, (queries, result, g_BTNH), keys)
    return g_q, g_k, g_v


def _kernel(masked: bool) -> ChunkAttention:
    return ChunkAttention(
        lambda queries, keys, mask: _call_forward(queries, keys, mask, masked),
        lambda queries, keys, result, g, mask: _call_backward(
            queries, keys, result, g, mask, masked
        ),
    )


def _by_documents(
    pass_of: Callable[[ChunkAttention], Pass], mask: ChunkMask, rows: Any, keys: Keys
) -> Any:
    """Runs cuDNN without documents where all tokens are of one document, else pair by pair of at most CHUNK tokens."""
    plain, masked = pass_of(_kernel(masked=False)), pass_of(_kernel(masked=True))
    one, several = jax.named_scope(ONE_DOCUMENT), jax.named_scope(SEVERAL_DOCUMENTS)

    def has_one_document(rows: Any, keys: Keys) -> jax.Array:
        first = rows[0].segments_BT[:, :1]
        return (rows[0].segments_BT == first).all() & (keys.segments_BS == first).all()

    def pair(mask: ChunkMask, rows: Any, keys: Keys) -> Any:
        """Computes nothing without a common document, and without a mask in a single one."""
        a, b = rows[0].segments_BT, keys.segments_BS
        # Documents are numbered in order, so that ranges which do not overlap have none in common.
        apart = ((a.max(1) < b.min(1)) | (a.min(1) > b.max(1))).all()
        compute = functools.partial(masked.pair, mask, rows, keys)
        empty = _as(compute, masked.start(rows, keys))
        if not _native(mask):
            return lax.cond(apart, lambda: empty, compute)
        alone = functools.partial(plain.pair, mask, rows, keys)
        kind = jnp.where(apart, 0, jnp.where(has_one_document(rows, keys), 2, 1))
        return lax.switch(kind, (lambda: empty, several(compute), one(alone)))

    def here(mask: ChunkMask, rows: Any, keys: Keys) -> Any:
        """Computes the mask where it is used: JAX moves what needs only documents out of the loop over layers.

        That would be the masks of all pairs at once, T^2 / 2 elements: 16 GiB for a sequence of 131,072 tokens.
        """
        queries, (k, v, segments_BS) = rows[0], keys
        q, segments_BT, segments_BS = lax.optimization_barrier(
            (queries.q_BTNH, queries.segments_BT, segments_BS)
        )
        return pair(mask, (Queries(q, segments_BT), *rows[1:]), Keys(k, v, segments_BS))

    T, S = rows[0].q_BTNH.shape[1], keys.k_BSKH.shape[1]
    if max(T, S) <= CHUNK:
        return pair(mask, rows, keys)
    undivided = functools.partial(plain.pair, mask, rows, keys)

    def in_chunks() -> Any:
        common = math.gcd(T, S)
        size = max(size for size in range(1, min(CHUNK, common) + 1) if common % size == 0)
        by_mask: dict[ChunkMask, list[tuple[int, int, int]]] = {}
        for i, j in np.ndindex(T // size, S // size):
            between = mask.between(i, j, size)
            if between is not None:
                by_mask.setdefault(between, []).append((i, j, 0))
        row_chunks, key_chunks = cut((rows, keys), size)
        each, sums = dataclasses.replace(masked, pair=here), masked.start(row_chunks, key_chunks)
        for between, steps in by_mask.items():
            sums = each.visit_all(
                (between,), tuple(jnp.asarray(steps, jnp.int32).T), row_chunks, key_chunks, sums
            )
        return _as(undivided, uncut(sums))

    if not _native(mask):
        return in_chunks()
    return lax.cond(has_one_document(rows, keys), one(undivided), several(in_chunks))


def _as(like: Callable[[], Any], x: Any) -> Any:
    """Returns a tree in the types that a function returns."""
    return jax.tree.map(lambda leaf, made: leaf.astype(made.dtype), x, jax.eval_shape(like))


def _native(mask: ChunkMask) -> bool:
    """Returns whether cuDNN has the mask: none, or causal and a sliding window from the diagonal."""
    return mask.distance in (None, 0)


def _call_forward(queries: Queries, keys: Keys, mask: ChunkMask, masked: bool) -> Result:
    primitive, operands, options = _arguments("fwd", queries, keys, mask, masked)
    return Result(*primitive.bind(*operands, **options, is_training=True))


def _call_backward(
    queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array, mask: ChunkMask, masked: bool
) -> Gradients:
    primitive, operands, options = _arguments("bwd", queries, keys, mask, masked)
    g_q, g_k, g_v = primitive.bind(*operands, result.lse_BNT, result.out_BTNH, g_BTNH, **options)
    return g_q, g_k, g_v


def _arguments(
    which: str, queries: Queries, keys: Keys, mask: ChunkMask, masked: bool
) -> tuple[Any, list[jax.Array], dict[str, Any]]:
    """Returns JAX's primitive of a cuDNN kernel, its first ten operands and its options.

    JAX's public function differentiates the kernel with its own log-sum-exp; chunks need that of all keys.
    masked: whether documents, and a mask that cuDNN does not have, are a bias [B, 1, T, S].
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q_BTNH, k_BSKH, v_BSKH = queries.q_BTNH, keys.k_BSKH, keys.v_BSKH
    unused = jnp.zeros(0, q_BTNH.dtype)
    bias, native = unused, mask if _native(mask) else FULL
    if masked:
        in_bias = FULL if _native(mask) else mask
        visible = in_bias.visible(queries.segments_BT, keys.segments_BS)
        bias = jnp.where(visible, 0, _HIDDEN).astype(q_BTNH.dtype)[:, None]
    options = {
        "scale": q_BTNH.shape[3] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (masked, False),
        "mask_type": cudnn.MaskType.NO_MASK if native.distance is None else cudnn.MaskType.CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": native.window,
    }
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:  # since JAX 0.12
        options["score_mod"] = None
    primitive = getattr(cudnn, f"_dot_product_attention_{which}_p_wrapper")
    return primitive, [q_BTNH, k_BSKH, v_BSKH, bias, *[unused] * 6], options


cudnn_chunks = ChunkAttention(_forward, _backward)
"""cuDNN's attention between two chunks."""


def cudnn_kernels(block: int) -> Kernels:
    """Returns cuDNN's attention, which chooses its blocks itself.

    Sinks need only its output and log-sum-exp (kernels/chunks.py); it has no function of the scores.
    """
    return Kernels(
        "cudnn",
        self_attention_of(cudnn_chunks),
        unsupported=_unsupported,
        chunk_attention=cudnn_chunks,
        features=frozenset({"sinks"}),
        missing=lambda: None if has_cudnn() else "cuDNN 9 (libcudnn.so.9) cannot be loaded here",
    )


def _unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform not in ("gpu", "cuda"):
        return f"cuDNN attention runs on NVIDIA GPUs, and the devices are of platform {shapes.platform!r}"
    if shapes.dtype not in ("bfloat16", "float16"):
        return f"cuDNN attention takes bfloat16 or float16, and the compute dtype is {shapes.dtype}"
    hopper = shapes.chip is not None and shapes.chip not in BEFORE_HOPPER
    most = MAX_HEAD_SIZE_HOPPER if hopper else MAX_HEAD_SIZE
    for head in shapes.head_sizes:
        if head > most or head % 8:
            return f"cuDNN attention takes heads of at most {most} in multiples of 8, and the head size is {head}"
    return None

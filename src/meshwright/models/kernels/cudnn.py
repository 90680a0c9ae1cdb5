"""cuDNN's flash attention for NVIDIA GPUs, through JAX's primitives for its forward
and backward kernels.

cuDNN has causal masks and sliding windows, not documents. Where a pair of chunks has tokens of only
one document, the kernels run without a mask; pairs without a common document are skipped; the rest
take documents as a mask. A long sequence is cut into chunks for this, so that a mask has at most
CHUNK x CHUNK elements and memory grows linearly with the sequence. cuDNN's packed layout (lengths
and offsets of the documents) is not used: it needs a static number of documents per sequence, and
its log-sum-exp takes that many times the memory.
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
"""Largest head on Hopper and later, where values may have a size
of their own (latent attention; cuDNN 9.10)."""
BEFORE_HOPPER = ("a100", "a100-40gb")
"""Chips of earlier architectures."""
CHUNK = 4096
"""Most queries and keys of a pair whose documents are a mask: 32 MiB per sequence."""
ONE_DOCUMENT = "one document."
"""Named scope of the attention that a conditional chooses where all tokens are of one document."""
SEVERAL_DOCUMENTS = "several documents."
"""Named scope of the attention that it chooses where they are not."""
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
    result, _ = _pass_by_documents(forward_pass).compute(mask, (queries,), keys)
    return result


def _backward(
    queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array, mask: ChunkMask
) -> Gradients:
    by_documents = _pass_by_documents(backward_pass)
    g_q, (g_k, g_v) = by_documents.compute(mask, (queries, result, g_BTNH), keys)
    return g_q, g_k, g_v


def _kernel(masked: bool) -> ChunkAttention:
    """Returns cuDNN's kernels, with documents as a mask or without documents."""

    def forward(queries: Queries, keys: Keys, mask: ChunkMask) -> Result:
        return _call_forward(queries, keys, mask, masked)

    def backward(
        queries: Queries, keys: Keys, result: Result, g_BTNH: jax.Array, mask: ChunkMask
    ) -> Gradients:
        return _call_backward(queries, keys, result, g_BTNH, mask, masked)

    return ChunkAttention(forward, backward)


def _pass_by_documents(pass_of: Callable[[ChunkAttention], Pass]) -> "_PassByDocuments":
    return _PassByDocuments(pass_of(_kernel(masked=False)), pass_of(_kernel(masked=True)))


@dataclasses.dataclass(frozen=True)
class _PassByDocuments:
    """Forward or backward pass that chooses cuDNN's kernels by the documents of the tokens,
    when it runs.

    One document in all tokens: one kernel for the complete sequence, without a mask of documents.
    Else the sequence is cut into chunks; here four, of the documents 0 0 0 1 | 1 1 1 1 | 1 1 2 2 |
    3 3 3 3:

        keys           0 0 0 1   1 1 1 1   1 1 2 2   3 3 3 3
        queries  0001  masked    .         .         .
                 1111  masked    unmasked  .         .
                 1122  masked    masked    masked    .
                 3333  nothing   nothing   nothing   unmasked

    A dot is a pair that the causal mask hides; it is not compiled. "nothing" has no document in
    common and is skipped. `query_inputs` are what a pass reads of queries (`chunks.Pass`).
    """

    unmasked: Pass
    masked: Pass

    def compute(self, mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        """Computes queries and keys of any length."""
        T = query_inputs[0].q_BTNH.shape[1]
        S = keys.k_BSKH.shape[1]
        if max(T, S) <= CHUNK:
            return self._pair(mask, query_inputs, keys)
        in_chunks = functools.partial(self._in_chunks, mask, query_inputs, keys)
        if not _native(mask):
            return in_chunks()
        undivided = functools.partial(self.unmasked.pair, mask, query_inputs, keys)
        return lax.cond(
            _has_one_document(query_inputs, keys),
            jax.named_scope(ONE_DOCUMENT)(undivided),
            jax.named_scope(SEVERAL_DOCUMENTS)(in_chunks),
        )

    def _pair(self, mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        """Computes nothing without a common document, and without a mask in a single one."""
        disjoint = _no_common_document(query_inputs, keys)
        masked = functools.partial(self.masked.pair, mask, query_inputs, keys)
        empty = _as(masked, self.masked.start(query_inputs, keys))
        if not _native(mask):
            return lax.cond(disjoint, lambda: empty, masked)
        unmasked = functools.partial(self.unmasked.pair, mask, query_inputs, keys)
        visible = jnp.where(_has_one_document(query_inputs, keys), 2, 1)
        branches = (
            lambda: empty,
            jax.named_scope(SEVERAL_DOCUMENTS)(masked),
            jax.named_scope(ONE_DOCUMENT)(unmasked),
        )
        return lax.switch(jnp.where(disjoint, 0, visible), branches)

    def _pair_in_loop(self, mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        """Computes a pair, and its mask where it is used: JAX moves what needs only documents
        out of loops over layers.

        That would be the masks of all pairs at once, T^2 / 2 elements: 16 GiB
        for a sequence of 131,072 tokens.
        """
        queries = query_inputs[0]
        q, query_segments, key_segments = lax.optimization_barrier(
            (queries.q_BTNH, queries.segments_BT, keys.segments_BS)
        )
        query_inputs = (Queries(q, query_segments), *query_inputs[1:])
        return self._pair(mask, query_inputs, Keys(keys.k_BSKH, keys.v_BSKH, key_segments))

    def _in_chunks(self, mask: ChunkMask, query_inputs: Any, keys: Keys) -> Any:
        """Computes the visible pairs of chunks, those of one mask in one loop."""
        T = query_inputs[0].q_BTNH.shape[1]
        S = keys.k_BSKH.shape[1]
        size = _chunk_size(T, S)
        query_chunks, key_chunks = cut((query_inputs, keys), size)
        in_loop = dataclasses.replace(self.masked, pair=self._pair_in_loop)
        sums = in_loop.start(query_chunks, key_chunks)
        for pair_mask, steps in _steps_by_mask(mask, T // size, S // size, size).items():
            indices = tuple(jnp.asarray(steps, jnp.int32).T)
            sums = in_loop.visit_all((pair_mask,), indices, query_chunks, key_chunks, sums)
        undivided = functools.partial(self.unmasked.pair, mask, query_inputs, keys)
        return _as(undivided, uncut(sums))


def _chunk_size(T: int, S: int) -> int:
    """Returns the largest common divisor of T queries and S keys that is at most CHUNK."""
    common = math.gcd(T, S)
    most = min(CHUNK, common)
    return max(size for size in range(1, most + 1) if common % size == 0)


def _steps_by_mask(
    mask: ChunkMask, query_chunks: int, key_chunks: int, size: int
) -> dict[ChunkMask, list[tuple[int, int, int]]]:
    """Returns the steps of `Pass.visit_all` for the visible pairs of chunks,
    by the mask of the pair."""
    steps: dict[ChunkMask, list[tuple[int, int, int]]] = {}
    for i, j in np.ndindex(query_chunks, key_chunks):
        pair_mask = mask.between(i, j, size)
        if pair_mask is not None:
            steps.setdefault(pair_mask, []).append((i, j, 0))
    return steps


def _has_one_document(query_inputs: Any, keys: Keys) -> jax.Array:
    """Returns whether each sequence's queries and keys are of a single document."""
    query_segments = query_inputs[0].segments_BT
    first = query_segments[:, :1]
    return (query_segments == first).all() & (keys.segments_BS == first).all()


def _no_common_document(query_inputs: Any, keys: Keys) -> jax.Array:
    """Returns whether no sequence has a document with queries and keys.

    Documents are numbered in order, so that ranges which do not overlap have none in common.
    """
    a = query_inputs[0].segments_BT
    b = keys.segments_BS
    return ((a.max(1) < b.min(1)) | (a.min(1) > b.max(1))).all()


def _as(like: Callable[[], Any], x: Any) -> Any:
    """Returns a tree in the types that a function returns."""
    return jax.tree.map(lambda leaf, made: leaf.astype(made.dtype), x, jax.eval_shape(like))


def _native(mask: ChunkMask) -> bool:
    """Returns whether cuDNN has the mask: none,
    or causal and a sliding window from the diagonal."""
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

    JAX's public function differentiates the kernel with its own log-sum-exp;
    chunks need that of all keys.
    masked: whether documents, and a mask that cuDNN does not have, are a bias [B, 1, T, S].
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q_BTNH = queries.q_BTNH
    unused = jnp.zeros(0, q_BTNH.dtype)
    native = FULL
    in_bias = mask
    if _native(mask):
        native = mask
        in_bias = FULL
    bias = unused
    if masked:
        visible = in_bias.visible(queries.segments_BT, keys.segments_BS)
        bias = jnp.where(visible, 0, _HIDDEN).astype(q_BTNH.dtype)[:, None]

    mask_type = cudnn.MaskType.CAUSAL
    if native.distance is None:
        mask_type = cudnn.MaskType.NO_MASK
    options = {
        "scale": q_BTNH.shape[3] ** -0.5,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (masked, False),
        "mask_type": mask_type,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": native.window,
    }
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:  # since JAX 0.12
        options["score_mod"] = None
    primitive = getattr(cudnn, f"_dot_product_attention_{which}_p_wrapper")
    operands = [q_BTNH, keys.k_BSKH, keys.v_BSKH, bias, *[unused] * 6]
    return primitive, operands, options


cudnn_chunks = ChunkAttention(_forward, _backward)
"""cuDNN's attention between two chunks."""


def cudnn_kernels(block: int | None) -> Kernels:
    """Returns cuDNN's attention, which chooses its blocks itself.

    Sinks need only its output and log-sum-exp (kernels/chunks.py);
    it has no function of the scores.
    """
    return Kernels(
        "cudnn",
        self_attention_of(cudnn_chunks),
        unsupported=_unsupported,
        chunk_attention=cudnn_chunks,
        features=frozenset({"sinks"}),
        missing=_missing,
    )


def _missing() -> str | None:
    if has_cudnn():
        return None
    return "cuDNN 9 (libcudnn.so.9) cannot be loaded here"


def _unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform not in ("gpu", "cuda"):
        return (
            "cuDNN attention runs on NVIDIA GPUs, and the devices are of platform "
            f"{shapes.platform!r}"
        )
    if shapes.dtype not in ("bfloat16", "float16"):
        return f"cuDNN attention takes bfloat16 or float16, and the compute dtype is {shapes.dtype}"
    is_hopper = shapes.chip is not None and shapes.chip not in BEFORE_HOPPER
    most = MAX_HEAD_SIZE_HOPPER if is_hopper else MAX_HEAD_SIZE
    for size in shapes.head_sizes:
        if size > most or size % 8:
            return (
                f"cuDNN attention takes heads of at most {most} in multiples of 8, "
                f"and the head size is {size}"
            )
    return None

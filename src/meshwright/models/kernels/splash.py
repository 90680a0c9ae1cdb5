"""Splash attention, the TPU's flash attention kernel: what its libraries share, and JAX's
(jax.experimental.pallas.ops.tpu.splash_attention). Tokamax's is in tokamax_splash.py.

It must be called inside a `shard_map` that is manual over every axis,
with `check_vma=False`, as the step is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.hardware.chips import CHIPS, Chip
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
from xlacensus.kernel_bundles import (
    KernelBlocks,
    causal_pairs,
    find_bundles,
    kernel_seconds,
    read_bundles,
)

LANES = 128
"""Lanes of the TPU's vector unit: sequences and blocks are multiples of it."""
DEFAULT_BLOCK = 512
"""Largest block where the bundles of a chip's kernels are not known."""
HEAD_MULTIPLE = 64
"""Heads are multiples of it; those of 64 take the registers and HBM of heads of 128."""


@dataclasses.dataclass(frozen=True)
class SplashLibrary:
    """A library that has splash attention: all that differs between two of them."""

    name: str
    """Name in the table of bundles (`KernelBundles.library`)."""
    make: "Callable[[SplashOptions, PairShape], Any]"
    """Returns the kernel of a pair of chunks."""
    attend: Callable[[Any, list[jax.Array], jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    """`(kernel, [q, k, v], documents of the queries, of the keys)`, each of one sequence
    -> output [N, T, H] and log-sum-exp [N, T]."""
    differentiate: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """`(kernel, [q, k, v], (documents of the queries, of the keys), output, log-sum-exp, gradient
    of the output)` -> gradients of queries, keys and values.

    A library's own derivative takes output and log-sum-exp of the same pair of chunks; chunks need
    those over all keys, so its backward function is called with them as residuals.
    """
    gradient_copies: Callable[[int], int]
    """Copies of the queries' gradient that the fused backward pass moves outside its kernel, of the
    blocks of keys."""
    missing: Callable[[], str | None] = lambda: None
    """`Kernels.missing`."""


@dataclasses.dataclass(frozen=True)
class SplashOptions:
    """Options of splash attention.

    Chunks are multiples of LANES (`_unsupported` checks).
    """

    library: SplashLibrary
    block: int | None
    """Largest block of queries and of keys; None: DEFAULT_BLOCK where no better are known."""
    backward_kernels: int
    """2 compute the gradients of the queries apart from those of keys and values, each from its own
    scores: seven matrix products. 1 computes all from the same scores with five, and writes the
    queries' gradient once per block of keys."""
    interpret: Any = False
    """Runs the Pallas kernel in interpret mode on a CPU."""
    best: "BestBlocks | None" = None
    """Blocks for chunks of its length, instead of `block`."""
    softcap: float | None = None


class PairShape(NamedTuple):
    """A pair of chunks."""

    queries: int
    heads: int
    """Query heads."""
    keys: int
    mask: ChunkMask


@dataclasses.dataclass(frozen=True)
class BestBlocks:
    """Blocks that are fastest by the bundles of the chip's kernels, for chunks of one length."""

    tokens: int
    """Queries and keys of a chunk."""
    forward: KernelBlocks
    backward: KernelBlocks
    forward_seconds: float
    """Seconds of one head of one sequence, a mean over the layers."""
    backward_seconds: float


@functools.lru_cache(maxsize=32)
def splash_chunks(options: SplashOptions) -> ChunkAttention:
    """Returns splash attention between two chunks, with a static mask for each kind of pair;
    hidden blocks are skipped."""
    return ChunkAttention(
        functools.partial(_forward, options),
        functools.partial(_backward, options),
        functools.partial(_with_softcap, options),
    )


def _with_softcap(options: SplashOptions, softcap: float) -> ChunkAttention:
    return splash_chunks(dataclasses.replace(options, softcap=softcap))


# The grid of the forward kernel is (heads, blocks of queries, visible blocks of keys): for each
# block of queries a table made from the static mask names the blocks of keys to load, so that
# hidden blocks are neither loaded nor computed. A block is full (no mask), or partial (the mask is
# applied); documents are compared in both.
#
#   causal, 4 x 4 blocks     blocks of keys of each block of queries
#   P . . .                  0
#   F P . .                  0 1
#   F F P .                  0 1 2
#   F F F P                  0 1 2 3
#
# The backward kernels walk the same tables, dK and dV by blocks of keys,
# and dQ by blocks of queries.
def _forward(options: SplashOptions, queries: Queries, keys: Keys, mask: ChunkMask) -> Result:
    kernel = _kernel(options, queries, keys, mask)
    out_BNTH, lse_BNT = jax.vmap(functools.partial(options.library.attend, kernel))(
        _by_head(queries, keys), queries.segments_BT, keys.segments_BS
    )
    if mask.window is not None:
        # Where a window hides a complete row of blocks, the kernel divides by a sum over no keys.
        sees_keys = jnp.isfinite(lse_BNT)[..., None]
        out_BNTH = jnp.where(sees_keys, out_BNTH, 0)
    return Result(out_BNTH.swapaxes(1, 2), lse_BNT)


def _by_head(queries: Queries, keys: Keys) -> list[jax.Array]:
    """Returns scaled queries, keys and values, [B, heads, tokens, H]."""
    scale = queries.q_BTNH.shape[3] ** -0.5
    operands = (queries.q_BTNH * scale, keys.k_BSKH, keys.v_BSKH)
    return [x.swapaxes(1, 2) for x in operands]


def _backward(
    options: SplashOptions,
    queries: Queries,
    keys: Keys,
    result: Result,
    g_BTNH: jax.Array,
    mask: ChunkMask,
) -> Gradients:
    kernel = _kernel(options, queries, keys, mask)
    operands = _by_head(queries, keys)
    out_BNTH = result.out_BTNH.swapaxes(1, 2)
    g_BNTH = g_BTNH.swapaxes(1, 2)
    segments = (queries.segments_BT, keys.segments_BS)
    gradients = jax.vmap(functools.partial(options.library.differentiate, kernel))(
        operands, segments, out_BNTH, result.lse_BNT, g_BNTH
    )
    g_q, g_k, g_v = (x.swapaxes(1, 2) for x in gradients)
    return g_q * queries.q_BTNH.shape[3] ** -0.5, g_k, g_v


def block_size(seq: int, largest: int) -> int:
    """Returns the queries and keys of a block: the largest multiple of LANES
    that divides `seq`, at most `largest`."""
    most = max(LANES, min(seq, largest))
    return max(size for size in range(LANES, most + 1, LANES) if seq % size == 0)


def _kernel(options: SplashOptions, queries: Queries, keys: Keys, mask: ChunkMask) -> Any:
    """Returns the library's kernel of a pair of chunks."""
    _, T, N, _ = queries.q_BTNH.shape
    return _make_kernel(options, PairShape(T, N, keys.k_BSKH.shape[1], mask))


@functools.lru_cache(maxsize=32)
def _make_kernel(options: SplashOptions, pair: PairShape) -> Any:
    # The kernel's block tables are constants of the program, even while a caller is being traced.
    with jax.ensure_compile_time_eval():
        return options.library.make(options, pair)


def visible_mask(masks: Any, pair: PairShape) -> Any:
    """Returns the mask of a pair, of a library's module of masks."""
    shape = (pair.queries, pair.keys)
    mask = pair.mask
    if mask.distance is None:
        return masks.FullMask(shape)
    if mask.window is None:
        return masks.CausalMask(shape, mask.distance)
    return masks.LocalMask(shape, (mask.window - 1, 0), mask.distance)


def chosen_blocks(options: SplashOptions, pair: PairShape) -> tuple[KernelBlocks, KernelBlocks]:
    """Returns the blocks of the forward and the backward kernel."""
    T, _, S, _ = pair
    best = options.best
    if best is not None and T == S == best.tokens:
        return best.forward, best.backward
    largest = options.block or DEFAULT_BLOCK
    q = block_size(T, largest)
    kv = block_size(S, largest)
    square = KernelBlocks(q, kv, kv)
    return square, square


def _make_jax(options: SplashOptions, pair: PairShape) -> Any:
    """`SplashLibrary.make` of JAX's."""
    # Importing Pallas takes 0.4 s, which only a TPU's step is worth.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    forward, backward = chosen_blocks(options, pair)
    fused: dict[str, Any] = {"use_fused_bwd_kernel": True}
    if options.backward_kernels == 2:
        fused = {"block_q_dq": backward.q, "block_kv_dq": backward.kv}
    blocks = splash.BlockSizes(
        block_q=forward.q,
        block_kv=forward.kv,
        block_kv_compute=forward.kv_compute,
        block_q_dkv=backward.q,
        block_kv_dkv=backward.kv,
        block_kv_dkv_compute=backward.kv_compute,
        **fused,
    )
    return splash.make_splash_mha(
        mask=masks.MultiHeadMask([visible_mask(masks, pair)] * pair.heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=blocks,
        save_residuals=True,
        attn_logits_soft_cap=options.softcap,
        interpret=options.interpret,
    )


def _attend_jax(
    kernel: Any, qkv: list[jax.Array], query_segments: jax.Array, key_segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`SplashLibrary.attend` of JAX's."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    out, (lse,) = kernel(*qkv, segment_ids=splash.SegmentIds(query_segments, key_segments))
    return out, lse


def _differentiate_jax(
    kernel: Any,
    qkv: list[jax.Array],
    segments: tuple[jax.Array, jax.Array],
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`SplashLibrary.differentiate` of JAX's."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    options = dict(kernel.kwargs)
    del options["save_residuals"]
    segment_ids = splash.SegmentIds(*segments)
    sinks = None
    residuals = (
        *qkv,
        segment_ids,
        sinks,
        out,
        lse,
        kernel.dq_mask_info,
        kernel.dkv_mask_info,
    )
    gradients = splash._splash_attention_bwd(save_residuals=False, **options, res=residuals, do=g)
    g_q, g_k, g_v = gradients[3:6]
    return g_q, g_k, g_v


def _gradient_copies_jax(blocks_of_keys: int) -> int:
    """`SplashLibrary.gradient_copies` of JAX's: one of each block of keys is read,
    and their sum written."""
    return blocks_of_keys + 1


JAX_SPLASH = SplashLibrary("jax", _make_jax, _attend_jax, _differentiate_jax, _gradient_copies_jax)


def splash_kernels(block: int | None, backward_kernels: int = 2, interpret: Any = False) -> Kernels:
    """Returns JAX's splash attention with blocks of at most `block` tokens, None the fastest."""
    name = "splash" if backward_kernels == 2 else "splash_fused"
    return splash_kernels_of(name, SplashOptions(JAX_SPLASH, block, backward_kernels, interpret))


splash_fused_kernels = functools.partial(splash_kernels, backward_kernels=1)
"""JAX's splash attention whose backward pass is one kernel."""


def splash_kernels_of(name: str, options: SplashOptions) -> Kernels:
    """Returns splash attention as a kernel of a run."""
    chunks = splash_chunks(options)
    # Matrix products of the backward pass over the two of the forward pass.
    backward = 7 / 2 if options.backward_kernels == 2 else 5 / 2
    return Kernels(
        name,
        self_attention_of(chunks),
        unsupported=_unsupported,
        chunk_attention=chunks,
        features=frozenset({"softcap", "sinks"}),
        missing=options.library.missing,
        backward=backward,
        for_shapes=functools.partial(_with_best_blocks, name, options),
    )


def _with_best_blocks(name: str, options: SplashOptions, shapes: AttentionShapes) -> Kernels | None:
    """Returns splash attention with the fastest known blocks;
    None where the chip's bundles are not known."""
    best = best_blocks(options.library, options.block, options.backward_kernels, shapes)
    if best is None:
        return None
    kernels = splash_kernels_of(name, dataclasses.replace(options, best=best))
    return dataclasses.replace(
        kernels,
        note=f"blocks {best.forward}, backward {best.backward}",
        head_seconds=(best.forward_seconds, best.backward_seconds),
        tokens=best.tokens,
    )


@functools.lru_cache(maxsize=64)
def best_blocks(
    library: SplashLibrary, block: int | None, backward_kernels: int, shapes: AttentionShapes
) -> BestBlocks | None:
    """Returns the blocks of at most `block` that take a layer the least time by the bundles
    of the chip's kernels.

    seconds of a pass = sum over its kernels of `kernel_seconds`,
    at the mean over the windows of the layers

    The fused backward kernel writes several copies of the gradient of the queries, which are read
    again and summed (`gradient_copies`). None where the bundles are not known, or the layers have
    heads of several sizes.
    """
    chip = CHIPS.get(shapes.chip or "")
    if chip is None or chip.clock_hz is None or len(shapes.head_sizes) != 1:
        return None
    price = functools.partial(_seconds_of_blocks, library, chip, shapes)
    forward = _fastest(block, shapes, price, ("fwd",))
    names = ("fused",) if backward_kernels == 1 else ("dq", "dkv")
    backward = _fastest(block, shapes, price, names)
    if forward is None or backward is None:
        return None
    return BestBlocks(shapes.chunk, forward[1], backward[1], forward[0], backward[0])


def _fastest(
    block: int | None,
    shapes: AttentionShapes,
    price: Callable[[tuple[str, ...], KernelBlocks], float | None],
    kernels: tuple[str, ...],
) -> tuple[float, KernelBlocks] | None:
    """Returns the least seconds of a pass and its blocks, of the blocks that divide a chunk;
    None if none is known."""
    found = []
    for blocks in sorted({row.blocks for row in read_bundles()}, key=str):
        if block is not None and max(blocks.q, blocks.kv) > block:
            continue
        if shapes.chunk % blocks.q or shapes.chunk % blocks.kv:
            continue
        seconds = price(kernels, blocks)
        if seconds is not None:
            found.append((seconds, blocks))
    return min(found, key=lambda pair: pair[0], default=None)


def _seconds_of_blocks(
    library: SplashLibrary,
    chip: Chip,
    shapes: AttentionShapes,
    kernels: tuple[str, ...],
    blocks: KernelBlocks,
) -> float | None:
    """Returns the seconds of one head in some kernels, a mean over the layers;
    None if one is not known."""
    assert chip.clock_hz is not None
    head_size = shapes.head_sizes[0]
    tokens = shapes.chunk
    seconds = 0.0
    for kernel in kernels:
        bundles = find_bundles(chip.name, library.name, kernel, head_size, blocks)
        if bundles is None:
            return None
        for window in shapes.windows:
            pairs = causal_pairs(tokens, blocks.q, blocks.kv, window)
            taken = kernel_seconds(bundles, chip.clock_hz, tokens, tokens, pairs)
            seconds += taken / len(shapes.windows)
        if kernel == "fused":
            copies = library.gradient_copies(tokens // blocks.kv)
            moved = copies * tokens * head_size * jnp.dtype(shapes.dtype).itemsize
            seconds += moved / (chip.hbm_bandwidth * chip.efficiency.hbm)
    return seconds


def _unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform != "tpu":
        return (
            f"splash attention is a TPU kernel, and the devices are of platform {shapes.platform!r}"
        )
    tokens = "sequence" if shapes.chunk == shapes.seq else "chunk of the sequence"
    sizes = [(tokens, shapes.chunk, LANES)]
    sizes += [("head size", size, HEAD_MULTIPLE) for size in shapes.head_sizes]
    for dimension, size, multiple in sizes:
        quotient, remainder = divmod(size, multiple)
        if remainder:
            return (
                f"splash attention takes a {dimension} divisible by {multiple}: "
                f"{size} = {quotient} * {multiple} + {remainder}"
            )
    return None

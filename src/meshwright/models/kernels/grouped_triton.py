"""Grouped matmul for NVIDIA GPUs in Pallas and Triton: each row is multiplied only by the weights of its expert.

A tile is a block of rows of one expert and a block of columns. The tables of tiles follow from the rows of each expert
and are computed on the device, so their number is that of the worst case, R / block + E + 1; tiles without rows end at
once. Compiles for Ampere, Hopper and Blackwell without the device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_ROWS = 128
"""Rows of an output tile."""
_DEPTH_BYTES = 128
"""Bytes of one step along the contracted dimension: 64 of bfloat16, 128 of float8."""
_STAGES, _WARPS = 3, 8
_LEAST_TILES = 4 * 148
"""Tiles from which a partly filled last wave costs at most a fifth: four for each multiprocessor of a B200."""


def _columns(tiles_of_rows: int, columns: int) -> int:
    """Returns the columns of an output tile: 256 where they divide and leave enough tiles, else 128.

    A step reads (128 + columns) x 128 bytes for 2 x 128 x columns x 64 FLOPs of bfloat16: 64 FLOPs for each byte with
    128 columns, and 85 with 256. At about 5.5 TB/s of an H100's L2 that is 350 and 470 TFLOP/s. Three steps in flight
    take 96 or 144 KiB of shared memory (an A100 has 164, an H100 and a B200 228), the sums 64 or 128 of 255 registers.
    """
    return 256 if columns % 256 == 0 and tiles_of_rows * (columns // 256) >= _LEAST_TILES else 128


def _tiles(rows_E: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the rows of each expert, then those past the last, into tiles of at most `block` rows.

    Returns first row, last row (excluded) and expert of each tile, int32; expert E holds the rows of no expert.
    """
    experts = rows_E.shape[0]
    rows_E = jnp.append(rows_E, rows - rows_E.sum()).astype(jnp.int32)
    ends, tiles_E = jnp.cumsum(rows_E), -(-rows_E // block)
    tile = jnp.arange(rows // block + experts + 1, dtype=jnp.int32)
    last = jnp.cumsum(tiles_E)
    expert = (tile[:, None] >= last).sum(1, dtype=jnp.int32)
    e = jnp.minimum(expert, experts)
    start = ends[e] - rows_E[e] + (tile - last[e] + tiles_E[e]) * block
    # Tiles past the last are empty.
    return start, jnp.where(expert <= experts, jnp.minimum(start + block, ends[e]), start), e


_Inside = tuple[jax.Array | None, jax.Array | None]
"""Which positions of a block are inside along each of its two dimensions; None where all of them always are."""


def _mask(inside: _Inside) -> jax.Array | None:
    masks = [m[:, None] if d == 0 else m[None, :] for d, m in enumerate(inside) if m is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Any, index: tuple[Any, ...], inside: _Inside) -> jax.Array:
    mask = _mask(inside)
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0.0)


def _inside(start: Any, size: int, block: int) -> jax.Array | None:
    return None if size % block == 0 else start + jnp.arange(block) < size


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    rows: jax.Array, weights: tuple[jax.Array, ...], rows_E: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Multiplies each row by the weights of its expert, of which there may be several; products are summed in float32.

    rows: [R, K], sorted by expert.  weights: each [E, K, N], of the same dtype.  rows_E: rows of each expert, [E];
    their sum is at most R.  interpret: runs on a CPU. Returns [R, N] for each, zero for rows past those of the last
    expert. Sizes need not be multiples of the tiles.
    """
    return tuple(multiply(rows, w, rows_E, transposed=False, interpret=interpret) for w in weights)


def _backward(interpret: bool, saved: Any, g: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    (rows, weights, rows_E), g_rows = saved, None
    for w, g_of_product in zip(weights, g, strict=True):
        g_rows = multiply(g_of_product, w, rows_E, added=g_rows, interpret=interpret)
    return (
        g_rows,
        tuple(multiply_transposed(rows, each, rows_E, interpret=interpret) for each in g),
        None,
    )


grouped_matmul.defvjp(lambda *inputs: (grouped_matmul(*inputs), inputs[:3]), _backward)


def multiply(
    rows: jax.Array,
    weights: jax.Array,
    rows_E: jax.Array,
    dtype: Any = None,
    scales: jax.Array | None = None,
    added: jax.Array | None = None,
    *,
    transposed: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Computes one product of `grouped_matmul`, without a derivative. transposed: weights are [E, N, K].

    dtype: of the result; None is that of the rows.  scales: [R, 1], which the float32 sums are multiplied by.  added:
    [R, N] in the type of the result, added to it afterwards, whose memory the result takes. Hopper multiplies float8
    only along the innermost dimension of both operands, which `transposed` is.
    """
    R, K = rows.shape
    E, N = weights.shape[0], weights.shape[1 if transposed else 2]
    depth, width = _DEPTH_BYTES // rows.dtype.itemsize, _columns(R // _ROWS, N)
    tiles = _tiles(rows_E, R, _ROWS)
    given = {} if added is None else {"added": added}
    given |= {} if scales is None else {"scales": scales[:, 0]}

    def kernel(rows_ref: Any, w_ref: Any, *refs: Any) -> None:
        *more, start_ref, end_ref, expert_ref, out_ref = refs
        ref_of = dict(zip(given, more, strict=True))
        tile, n = pl.program_id(1), pl.program_id(0) * width
        start, end, expert = start_ref[tile], end_ref[tile], expert_ref[tile]
        row_inside, column_inside = start + jnp.arange(_ROWS) < end, _inside(n, N, width)
        block, columns = pl.ds(start, _ROWS), pl.ds(n, width)

        def add(step: Any, total: jax.Array) -> jax.Array:
            k = step * depth
            along, depth_inside = pl.ds(k, depth), _inside(k, K, depth)
            x = _load(rows_ref, (block, along), (row_inside, depth_inside))
            if transposed:
                w = _load(w_ref, (expert, columns, along), (column_inside, depth_inside))
            else:
                w = _load(w_ref, (expert, along, columns), (depth_inside, column_inside))
            return total + plgpu.dot(x, w, trans_b=transposed)

        # Rows of no expert are written as zeros.
        steps = jnp.where((expert < E) & (start < end), jnp.int32(pl.cdiv(K, depth)), jnp.int32(0))
        total = jax.lax.fori_loop(0, steps, add, jnp.zeros((_ROWS, width), jnp.float32))
        inside = row_inside, column_inside
        if scales is not None:
            total *= plgpu.load(ref_of["scales"].at[block], mask=row_inside, other=0.0)[:, None]
        if added is not None:
            total += _load(ref_of["added"], (block, columns), inside).astype(jnp.float32)
        plgpu.store(out_ref.at[block, columns], total.astype(out_ref.dtype), mask=_mask(inside))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(N, width), tiles[0].shape[0]),
        out_shape=jax.ShapeDtypeStruct((R, N), dtype or rows.dtype),
        # Each row and column is read and written by one tile only.
        input_output_aliases={} if added is None else {2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="grouped_matmul",
    )(rows, weights, *given.values(), *tiles)


def multiply_transposed(
    rows: jax.Array,
    g: jax.Array,
    rows_E: jax.Array,
    dtype: Any = None,
    scales: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns, for each expert, its rows [R, K] transposed times its rows of g [R, N]: [E, K, N]; zero without rows.

    dtype: of the result; None is that of the rows.  scales: [1, N], which the float32 sums are multiplied by.
    """
    K, N, E = rows.shape[1], g.shape[1], rows_E.shape[0]
    depth, width = _DEPTH_BYTES // rows.dtype.itemsize, _columns(E * pl.cdiv(K, _ROWS), N)
    ends = jnp.cumsum(rows_E, dtype=jnp.int32)
    starts = ends - rows_E.astype(jnp.int32)

    given = () if scales is None else (scales[0],)

    def kernel(x_ref: Any, g_ref: Any, *refs: Any) -> None:
        *scales_ref, start_ref, end_ref, out_ref = refs
        expert, k, n = pl.program_id(2), pl.program_id(1) * _ROWS, pl.program_id(0) * width
        start, end = start_ref[expert], end_ref[expert]
        k_inside, n_inside = _inside(k, K, _ROWS), _inside(n, N, width)
        along_k, along_n = pl.ds(k, _ROWS), pl.ds(n, width)

        def add(step: Any, total: jax.Array) -> jax.Array:
            row = start + step * depth
            inside = row + jnp.arange(depth) < end
            x = _load(x_ref, (pl.ds(row, depth), along_k), (inside, k_inside))
            gradient = _load(g_ref, (pl.ds(row, depth), along_n), (inside, n_inside))
            return total + plgpu.dot(x, gradient, trans_a=True)

        total = jax.lax.fori_loop(
            0, pl.cdiv(end - start, depth), add, jnp.zeros((_ROWS, width), jnp.float32)
        )
        for ref in scales_ref:
            total *= plgpu.load(
                ref.at[along_n], mask=n_inside, other=None if n_inside is None else 0.0
            )[None, :]
        mask = _mask((k_inside, n_inside))
        plgpu.store(out_ref.at[expert, along_k, along_n], total.astype(out_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(N, width), pl.cdiv(K, _ROWS), E),
        out_shape=jax.ShapeDtypeStruct((E, K, N), dtype or rows.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name="grouped_matmul_transposed",
    )(rows, g, *given, starts, ends)

"""Grouped matmul for NVIDIA GPUs in Pallas and Triton: each row is multiplied only
by the weights of its expert.

A tile is a block of rows of one expert and a block of columns. The tables of tiles follow from the
rows of each expert and are computed on the device, so their number is that of the worst case, R /
block + E + 1; tiles without rows end at once. Compiles for Ampere, Hopper and Blackwell without the
device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_ROWS = 128
"""Rows of an output tile."""
_DEPTH_BYTES = 128
"""Bytes of one step along the contracted dimension: 64 of bfloat16, 128 of float8."""
_STAGES = 3
"""Steps along the contracted dimension in flight."""
_WARPS = 8
"""Warps of a tile."""
_LEAST_TILES = 4 * 148
"""Tiles from which a partly filled last wave costs at most a fifth: four
for each multiprocessor of a B200."""


def _columns(tiles_of_rows: int, columns: int) -> int:
    """Returns the columns of an output tile: 256 where they divide
    and leave enough tiles, else 128.

    A step reads (128 + columns) x 128 bytes for 2 x 128 x columns x 64 FLOPs of bfloat16: 64 FLOPs
    for each byte with 128 columns, and 85 with 256. At about 5.5 TB/s of an H100's L2 that is 350
    and 470 TFLOP/s. Three steps in flight take 96 or 144 KiB of shared memory (an A100 has 164, an
    H100 and a B200 228), the sums 64 or 128 of 255 registers.
    """
    wide_tiles = tiles_of_rows * (columns // 256)
    if columns % 256 == 0 and wide_tiles >= _LEAST_TILES:
        return 256
    return 128


# Expert e has ceil(rows[e] / block) tiles. The tile with index i belongs to the first expert whose
# last tile is after i; within it, it is tile j = i - (tiles of the experts before), and its rows
# begin at the expert's first + j block.
#
#   rows_E = [130, 0, 70], block = 128    tile     0    1    2    3...
#                                         expert   0    0    2    3 (no expert, then empty tiles)
#                                         start    0  128  130  200
#                                         end    128  130  200  ...
def _tiles(rows_E: jax.Array, rows: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the rows of each expert, then those past the last, into tiles of at most `block` rows.

    Returns first row, last row (excluded) and expert of each tile, int32;
    expert E has the rows of no expert.
    """
    experts = rows_E.shape[0]
    rows_E = jnp.append(rows_E, rows - rows_E.sum()).astype(jnp.int32)
    row_ends_E = jnp.cumsum(rows_E)
    tiles_E = -(-rows_E // block)
    tile = jnp.arange(rows // block + experts + 1, dtype=jnp.int32)
    tile_ends_E = jnp.cumsum(tiles_E)

    expert = (tile[:, None] >= tile_ends_E).sum(1, dtype=jnp.int32)
    e = jnp.minimum(expert, experts)
    start = row_ends_E[e] - rows_E[e] + (tile - tile_ends_E[e] + tiles_E[e]) * block
    # Tiles past the last are empty.
    end = jnp.where(expert <= experts, jnp.minimum(start + block, row_ends_E[e]), start)
    return start, end, e


def _inside(start: Any, size: int, block: int) -> jax.Array | None:
    """Returns which positions of a block are inside a dimension of `size`;
    None where blocks divide it."""
    if size % block == 0:
        return None
    return start + jnp.arange(block) < size


def _mask(rows_inside: jax.Array | None, columns_inside: jax.Array | None) -> jax.Array | None:
    """Returns the mask of a block, [rows, columns]; None where every position is inside."""
    if rows_inside is None and columns_inside is None:
        return None
    if columns_inside is None:
        assert rows_inside is not None
        return rows_inside[:, None]
    if rows_inside is None:
        return columns_inside[None, :]
    return jnp.logical_and(rows_inside[:, None], columns_inside[None, :])


def _load_masked(ref: Any, index: tuple[Any, ...], mask: jax.Array | None) -> jax.Array:
    """Loads a block, zero where its mask is false; a mask of None is true everywhere."""
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0.0)


@dataclasses.dataclass(frozen=True)
class _OutputTile:
    """Rows and columns of the result that one program computes;
    the last tile may reach beyond the result."""

    rows: pl.Slice
    columns: pl.Slice
    rows_inside: jax.Array | None
    """Which rows the program writes; None where all."""
    columns_inside: jax.Array | None
    """Which columns the program writes; None where all."""

    @property
    def index(self) -> tuple[pl.Slice, pl.Slice]:
        """Index of the tile in a matrix."""
        return self.rows, self.columns

    def mask(self) -> jax.Array | None:
        """Returns the mask of the tile, [rows, columns]."""
        return _mask(self.rows_inside, self.columns_inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x_RK: jax.Array, weights: tuple[jax.Array, ...], rows_E: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Multiplies each row by the weights of its expert,
    of which there may be several; products are summed in float32.

    x_RK: rows sorted by expert.
    weights: each [E, K, N], of the same dtype.
    rows_E: rows of each expert; their sum is at most R.
    interpret: runs on a CPU. Returns [R, N] for each, zero for rows past those of the last expert.
    Sizes need not be multiples of the tiles.
    """
    return tuple(multiply(x_RK, w, rows_E, transposed=False, interpret=interpret) for w in weights)


def _grouped_matmul_forward(
    x_RK: jax.Array, weights: tuple[jax.Array, ...], rows_E: jax.Array, interpret: bool
) -> tuple[tuple[jax.Array, ...], Any]:
    outputs = grouped_matmul(x_RK, weights, rows_E, interpret)
    return outputs, (x_RK, weights, rows_E)


# For y = x W of one expert: dL/dx = dL/dy W^T, added up over the weights, and dL/dW = x^T dL/dy.
def _grouped_matmul_backward(
    interpret: bool, residuals: Any, g: tuple[jax.Array, ...]
) -> tuple[Any, ...]:
    x_RK, weights, rows_E = residuals
    g_x_RK = None
    for w, g_RN in zip(weights, g, strict=True):
        g_x_RK = multiply(g_RN, w, rows_E, added=g_x_RK, interpret=interpret)
    g_weights = tuple(multiply_transposed(x_RK, g_RN, rows_E, interpret=interpret) for g_RN in g)
    return g_x_RK, g_weights, None


grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


@dataclasses.dataclass(frozen=True)
class _ProductKernel:
    """Kernel of one tile of `multiply`: what is known before tracing.

    Grid: (tiles of columns, tiles of rows).
    The tables of tiles give each program its rows and its expert.
    """

    experts: int
    contracted: int
    """Size of the contracted dimension K."""
    columns: int
    """Columns N of the result."""
    tile_columns: int
    depth: int
    """Elements of K of one step."""
    transposed: bool
    """Whether weights are [E, N, K]."""
    epilogue: tuple[str, ...]
    """Operands of the epilogue, in their order: "added", "scales"."""

    def __call__(self, x_ref: Any, w_ref: Any, *refs: Any) -> None:
        """Computes and stores one tile."""
        *epilogue_refs, start_ref, end_ref, expert_ref, out_ref = refs
        tile = pl.program_id(1)
        first_column = pl.program_id(0) * self.tile_columns
        start = start_ref[tile]
        end = end_ref[tile]
        expert = expert_ref[tile]
        output = _OutputTile(
            pl.ds(start, _ROWS),
            pl.ds(first_column, self.tile_columns),
            start + jnp.arange(_ROWS) < end,
            _inside(first_column, self.columns, self.tile_columns),
        )

        # Rows of no expert are written as zeros.
        has_product = (expert < self.experts) & (start < end)
        all_steps = jnp.int32(pl.cdiv(self.contracted, self.depth))
        steps = jnp.where(has_product, all_steps, jnp.int32(0))
        total = self._product(x_ref, w_ref, expert, output, steps)

        ref_of = dict(zip(self.epilogue, epilogue_refs, strict=True))
        if "scales" in ref_of:
            scales = _load_masked(ref_of["scales"], (output.rows,), output.rows_inside)
            total *= scales[:, None]
        if "added" in ref_of:
            added = _load_masked(ref_of["added"], output.index, output.mask())
            total += added.astype(jnp.float32)
        result = total.astype(out_ref.dtype)
        plgpu.store(out_ref.at[output.index], result, mask=output.mask())

    def _product(
        self, x_ref: Any, w_ref: Any, expert: Any, output: _OutputTile, steps: Any
    ) -> jax.Array:
        """Sums `steps` products along the contracted dimension, in float32."""

        def add_step(step: Any, total: jax.Array) -> jax.Array:
            k = step * self.depth
            contracted = pl.ds(k, self.depth)
            depth_inside = _inside(k, self.contracted, self.depth)
            x_mask = _mask(output.rows_inside, depth_inside)
            x = _load_masked(x_ref, (output.rows, contracted), x_mask)
            if self.transposed:
                index = (expert, output.columns, contracted)
                w_mask = _mask(output.columns_inside, depth_inside)
            else:
                index = (expert, contracted, output.columns)
                w_mask = _mask(depth_inside, output.columns_inside)
            w = _load_masked(w_ref, index, w_mask)
            return total + plgpu.dot(x, w, trans_b=self.transposed)

        zeros = jnp.zeros((_ROWS, self.tile_columns), jnp.float32)
        return jax.lax.fori_loop(0, steps, add_step, zeros)


# y[r, :] = s[r] sum_k x[r, k] W[e(r)][k, :] + added[r, :] for each row r of expert e(r): the
# grouped GEMM of MegaBlocks (Gale et al. 2022, arXiv:2211.15841) without its padding of experts to
# complete tiles of rows.
#
#   rows of x          W of their experts        y
#   | e0      |        tile 0 x W[e0]     ->   tile 0    128 rows of expert 0
#   | e0  ....|        tile 1 x W[e0]     ->   tile 1    the rest of expert 0: a partial tile
#   | e2      |        tile 2 x W[e2]     ->   tile 2    expert 1 has no rows and no tile
#   | no one's|        no product         ->   tile 3    zeros
def multiply(
    x_RK: jax.Array,
    weights: jax.Array,
    rows_E: jax.Array,
    dtype: Any = None,
    scales: jax.Array | None = None,
    added: jax.Array | None = None,
    *,
    transposed: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Computes one product of `grouped_matmul`, without a derivative: [R, N].

    weights: [E, N, K] if `transposed`, else [E, K, N].
    dtype: of the result; None is that of the rows.
    scales: [R, 1], which the float32 sums are multiplied by.
    added: [R, N] in the type of the result, added to the scaled sums; the result takes its memory.
    Hopper multiplies float8 only along the innermost dimension of both operands, which needs
    `transposed`.
    """
    R, K = x_RK.shape
    E = weights.shape[0]
    N = weights.shape[1 if transposed else 2]

    depth = _DEPTH_BYTES // x_RK.dtype.itemsize
    tile_columns = _columns(R // _ROWS, N)
    tiles = _tiles(rows_E, R, _ROWS)

    epilogue: dict[str, jax.Array] = {}
    aliases: dict[int, int] = {}
    if added is not None:
        epilogue["added"] = added
        # Operand 2 and the result share memory: each element is read and written by one tile only.
        aliases = {2: 0}
    if scales is not None:
        epilogue["scales"] = scales[:, 0]

    kernel = _ProductKernel(E, K, N, tile_columns, depth, transposed, tuple(epilogue))
    grid = (pl.cdiv(N, tile_columns), tiles[0].shape[0])
    out_shape = jax.ShapeDtypeStruct((R, N), dtype or x_RK.dtype)
    call = _pallas_call(kernel, grid, out_shape, "grouped_matmul", interpret, aliases)
    return call(x_RK, weights, *epilogue.values(), *tiles)


@dataclasses.dataclass(frozen=True)
class _TransposedProductKernel:
    """Kernel of one tile of `multiply_transposed`: what is known before tracing.

    Grid: (tiles of the columns N, tiles of the rows K of the result, experts).
    """

    result_rows: int
    """Rows K of each expert's result."""
    columns: int
    """Columns N of each expert's result."""
    tile_columns: int
    depth: int
    """Rows of x and g, which are contracted, of one step."""

    def __call__(self, x_ref: Any, g_ref: Any, *refs: Any) -> None:
        """Computes and stores one tile."""
        *scales_refs, start_ref, end_ref, out_ref = refs
        expert = pl.program_id(2)
        k = pl.program_id(1) * _ROWS
        n = pl.program_id(0) * self.tile_columns
        start = start_ref[expert]
        end = end_ref[expert]
        output = _OutputTile(
            pl.ds(k, _ROWS),
            pl.ds(n, self.tile_columns),
            _inside(k, self.result_rows, _ROWS),
            _inside(n, self.columns, self.tile_columns),
        )

        total = self._product(x_ref, g_ref, start, end, output)
        for scales_ref in scales_refs:
            scales = _load_masked(scales_ref, (output.columns,), output.columns_inside)
            total *= scales[None, :]
        mask = output.mask()
        result = total.astype(out_ref.dtype)
        plgpu.store(out_ref.at[expert, *output.index], result, mask=mask)

    def _product(
        self, x_ref: Any, g_ref: Any, start: Any, end: Any, output: _OutputTile
    ) -> jax.Array:
        """Sums the products of the rows from `start` to `end`, in float32."""

        def add_step(step: Any, total: jax.Array) -> jax.Array:
            row = start + step * self.depth
            rows_inside = row + jnp.arange(self.depth) < end
            x_mask = _mask(rows_inside, output.rows_inside)
            x = _load_masked(x_ref, (pl.ds(row, self.depth), output.rows), x_mask)
            g_mask = _mask(rows_inside, output.columns_inside)
            g = _load_masked(g_ref, (pl.ds(row, self.depth), output.columns), g_mask)
            return total + plgpu.dot(x, g, trans_a=True)

        steps = pl.cdiv(end - start, self.depth)
        zeros = jnp.zeros((_ROWS, self.tile_columns), jnp.float32)
        return jax.lax.fori_loop(0, steps, add_step, zeros)


# y[e][k, n] = s[n] sum_r x[r, k] g[r, n] over the rows r of expert e,
# which are neighbors: [starts[e], ends[e]).
def multiply_transposed(
    x_RK: jax.Array,
    g_RN: jax.Array,
    rows_E: jax.Array,
    dtype: Any = None,
    scales: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns, for each expert, its rows of x transposed times its rows of g: [E, K, N];
    zero without rows.

    dtype: of the result; None is that of x.
    scales: [1, N], which the float32 sums are multiplied by.
    """
    K = x_RK.shape[1]
    N = g_RN.shape[1]
    E = rows_E.shape[0]
    depth = _DEPTH_BYTES // x_RK.dtype.itemsize
    tile_columns = _columns(E * pl.cdiv(K, _ROWS), N)
    ends = jnp.cumsum(rows_E, dtype=jnp.int32)
    starts = ends - rows_E.astype(jnp.int32)

    epilogue: tuple[jax.Array, ...] = ()
    if scales is not None:
        epilogue = (scales[0],)

    kernel = _TransposedProductKernel(K, N, tile_columns, depth)
    grid = (pl.cdiv(N, tile_columns), pl.cdiv(K, _ROWS), E)
    out_shape = jax.ShapeDtypeStruct((E, K, N), dtype or x_RK.dtype)
    call = _pallas_call(kernel, grid, out_shape, "grouped_matmul_transposed", interpret, {})
    return call(x_RK, g_RN, *epilogue, starts, ends)


def _pallas_call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct,
    name: str,
    interpret: bool,
    aliases: dict[int, int],
) -> Callable[..., jax.Array]:
    """Returns the call of a kernel whose operands all stay in HBM,
    with the pipeline that both products use."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name=name,
    )

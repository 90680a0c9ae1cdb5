"""A Pallas tile

A kernel multiplies in blocks: `x` in blocks of (bm, bk), `w` in (bk, bn), and for each block (bm, bn) of `y` it runs
over k, the innermost dimension of the grid. The block of `y` stays in fast memory during that loop; those of `x` and
`w` are read from HBM in every step. Larger tiles read less, and need more of the fast memory: 16 MiB, for two of each
block (one in use, one on its way).

Choose the tile, and write the kernel. It runs here in interpret mode; bytes, memory and time follow from the tile.
"""

import functools

import jax
import numpy as np
from grading import Blocks, Figures, Problem, read_sizes
from jax.experimental import pallas as pl

from meshwright.hardware.targets import parse_target

PROBLEM = Problem(
    lesson="5_roofline",
    mesh="hbm=1",
    takes="x[M, K]; w[K, N]",
    gives="y[M, N]",
    small="M=512 K=512 N=512",
    other="M=1024 K=256 N=512",
    full="M=8192 K=8192 N=8192",
    most_memory="16 * 2**20",
    predict="sent: MB that cross the link to HBM, with the best tile that fits 16 MiB",
    arithmetic="4 * (M*N*K/1024 + M*N*K/1024 + M*N)",
    because="x is read once for each of the N/bn columns of blocks, w once for each of the M/bm rows, y is written "
    "once. bk does not appear: it only takes fast memory, so keep it small and make bm and bn large.",
    hints=(
        "Bytes of one pass: x once for every column of blocks (N/bn), w once for every row (M/bm). What does bk "
        "change?",
        "2 x 4 x (bm bk + bk bn + bm bn) bytes must stay below 16 MiB. Try bm = bn = 1024.",
        "In the kernel: where pl.program_id(2) == 0, set y_ref to zero (pl.when); then add x_ref[...] @ w_ref[...].",
    ),
)


def one_device(x, w):
    """The product."""
    return x @ w


def multiply(answer, x, w):
    """Runs the kernel of an answer in interpret mode."""
    (bm, bn, bk), kernel = answer()
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // bm, w.shape[1] // bn, x.shape[1] // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        interpret=True,
    )(x, w)


def attempt(answer, case):
    """Multiplies blocks of the answer's own tile: two in each direction, then four by two by one."""
    (bm, bn, bk), _ = answer()
    for name, size, tile in (("M", 8192, bm), ("N", 8192, bn), ("K", 8192, bk)):
        if size % tile:
            raise ValueError(f"{name} = {size} is not a multiple of its tile, {tile}")
    rows, columns, inner = (2, 2, 2) if case.sizes == PROBLEM.small else (4, 1, 2)
    keys = jax.random.split(jax.random.key(case.seed))
    x = jax.random.normal(keys[0], (rows * bm, inner * bk))
    w = jax.random.normal(keys[1], (inner * bk, columns * bn))
    got = jax.jit(functools.partial(multiply, answer))(x, w)
    return [Blocks("y", [np.asarray(got)], [np.asarray(one_device(x, w))], 1e-4)]


def measure(answer):
    """Returns bytes over the link to HBM, fast memory, and the roofline's time."""
    (bm, bn, bk), _ = answer()
    s = read_sizes(PROBLEM.full)
    m, n, k = s["M"], s["N"], s["K"]
    moved, flops = 4.0 * (m * n * k / bn + m * n * k / bm + m * n), 2.0 * m * n * k
    chips = {machine: parse_target(machine).chip for machine in PROBLEM.targets}
    seconds = {name: max(flops / chip.flops_bf16, moved / chip.hbm_bandwidth) for name, chip in chips.items()}
    basis = dict.fromkeys(seconds, "roofline: the larger of FLOPs at the peak and bytes at the bandwidth of HBM")
    return Figures({"hbm": moved}, 8.0 * (bm * bk + bk * bn + bm * bn), flops, seconds, basis)


def picture():
    """The blocks of a tile of 1024 x 1024 x 512."""
    from meshwright.views.draw import picture_of, side_by_side

    grid = {"i": 8, "j": 8, "k": 16}
    return side_by_side(
        picture_of("x", (8192, 8192), "MK", (("i",), ("k",)), {"i": 8, "k": 16}),
        picture_of("w", (8192, 8192), "KN", (("k",), ("j",)), {"k": 16, "j": 8}),
        picture_of("y", (8192, 8192), "MN", (("i",), ("j",)), {"i": grid["i"], "j": grid["j"]}),
    )


PREDICTION = None


def answer():
    """Returns ((bm, bn, bk), kernel); kernel(x_ref, w_ref, y_ref) adds one product of blocks."""
    raise NotImplementedError

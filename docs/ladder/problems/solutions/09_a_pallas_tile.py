"""Solution of problem 9: try first, three hints are free."""

import jax.numpy as jnp
from grading import mistake
from jax.experimental import pallas as pl


def kernel(x_ref, w_ref, y_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        y_ref[...] = jnp.zeros_like(y_ref)

    y_ref[...] += x_ref[...] @ w_ref[...]


def reference():
    return (1024, 1024, 512), kernel


@mistake("result", "Each step over k overwrites the block of y: what is left is the product of the last step.")
def overwrites():
    def last(x_ref, w_ref, y_ref):
        y_ref[...] = x_ref[...] @ w_ref[...]

    return (256, 256, 256), last


@mistake(
    "result",
    "The block of y is set to zero in every step where the *row* is the first. The loop over k is dimension 2 of the "
    "grid: pl.program_id(2).",
)
def zeroes_by_row():
    def wrong(x_ref, w_ref, y_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        @pl.when((pl.program_id(0) > 0) & (pl.program_id(2) == 0))
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        y_ref[...] += x_ref[...] @ w_ref[...]

    return (256, 256, 256), wrong


@mistake(
    "bytes",
    "Small tiles read x and w from HBM again and again: with bm = bn = 128 a FLOP costs eight times the bytes, and the "
    "kernel waits for HBM.",
)
def small_tile():
    return (128, 128, 128), kernel


@mistake("memory", "The tile does not fit: two of each block take more than 16 MiB of fast memory.")
def large_tile():
    return (2048, 2048, 256), kernel

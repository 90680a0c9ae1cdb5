"""A tensor parallel layer

A gated feed-forward layer, `silu(x wg) * (x wu)` and then `w2`, with columns of `wg` and `wu` and rows of `w2` on each
device. Every device has all of `x` and must end with all of `y`. The gradient of `x` must be complete on every device
too: think of Megatron's two functions.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="6_tensor_parallel",
    mesh="tensor=8",
    takes="x[T, D]; wg[D, F/tensor]; wu[D, F/tensor]; w2[F/tensor, D]",
    gives="y[T, D]",
    gradients="x wg wu w2",
    small="T=6 D=8 F=16",
    other="T=10 D=12 F=24",
    full="T=8192 D=4096 F=16384",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * 2 * 4 * T * D * 7/8",
    because="g, at the end, is one all-reduce of y forward; f, at the beginning, one all-reduce of the gradient of x "
    "backward. Weights never move, and F does not appear.",
    hints=(
        "Columns of wg and wu give columns of the hidden layer; with rows of w2 they give an addend of y.",
        "all_reduce at the end is g: its derivative sends nothing. At the beginning you need f: the identity "
        "forward, a sum backward.",
        "f is a jax.custom_vjp whose backward returns (all_reduce(g, ('tensor',)),). Apply it to x once, and use the "
        "result for both products.",
    ),
)


def one_device(x, wg, wu, w2):
    """The layer with whole weights."""
    import jax

    return (jax.nn.silu(x @ wg) * (x @ wu)) @ w2


PREDICTION = None


def answer(x, wg, wu, w2):
    """x: [T, D], alike on all devices; wg, wu: own columns; w2: own rows. Returns y, [T, D], complete."""
    raise NotImplementedError

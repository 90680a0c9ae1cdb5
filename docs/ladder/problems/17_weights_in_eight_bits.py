"""Weights in eight bits

FSDP gathers weights that are multiplied once and thrown away. Send them in int8: each device scales every column of its
block by the column's largest magnitude, `q = round(w / scale)` with `scale = max |w| / 127`, and gathers `q` and the
scales. The gradient stays in float32. `y` may be off by one percent of its largest value, and the gradient of `w` must
be that of the unrounded product.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="10_precision",
    mesh="fsdp=8",
    takes="x[B/fsdp, D]; w[D/fsdp, F]",
    gives="y[B/fsdp, F]",
    gradients="w",
    small="B=16 D=64 F=8",
    other="B=24 D=128 F=16",
    full="B=16384 D=8192 F=8192",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="(D * F + 4 * 8 * F + 4 * D * F) * 7/8",
    because="One byte for each weight and a scale for each column of a block forward, four bytes for each gradient "
    "backward: 5 where float32 would be 8. Rounding is half a step of max/127, and thousands of roundings average "
    "out in a product.",
    tolerance=1e-2,
    hints=(
        "The receiver has to know the scale of each block: eight blocks, eight scales for every column.",
        "gather q (int8) along 0 and the scales, [1, F] from each device; then q.reshape(8, D/8, F) * scales[:, None].",
        "round has the derivative zero. Give the gather a jax.custom_vjp: backward, reduce_scatter the cotangent "
        "of the gathered weight (the straight-through estimate).",
    ),
)


def one_device(x, w):
    """The product, not rounded."""
    return x @ w


PREDICTION = None


def answer(x, w):
    """x: rows of this device; w: its rows of the weight, [D/8, F], float32. Returns x @ w within a percent."""
    raise NotImplementedError

"""A pipeline is a loop

Four stages have two layers each, `h = h + tanh(h @ w)`. M microbatches enter at stage 0, one in each tick, and every
tick ends with a shift to the next stage. Return the mean of the squares of what leaves the last stage, on every device.
The gradient needs no lines of its own: the derivative of a shift is the shift back.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="9_pipeline",
    mesh="stage=4",
    takes="xs[M, B, D]; w[L/stage, D, D]",
    gives="loss[]",
    gradients="w",
    small="M=6 B=4 D=5 L=8",
    other="M=7 B=8 D=4 L=8",
    full="M=8 B=512 D=4096 L=8",
    predict="sent: MB that a device sends, forward and backward together (all ticks, idle ones as well)",
    arithmetic="2 * (M + 3) * 4 * B * D + 2 * 4 * 3/4",
    because="M + P - 1 ticks with a shift of one microbatch forward, as many backward, and the loss. FSDP over the "
    "same devices would gather the weights and scatter their gradients, whatever the batch.",
    hints=(
        "In tick t stage s works on microbatch t - s. How many ticks until the last microbatch has left stage P - 1?",
        "jax.lax.scan over M + 3 ticks; stage 0 takes xs[min(t, M - 1)], the others what ring_shift(y, 'stage', 1) "
        "brought. The output of microbatch m is on the last stage in tick m + 3.",
        "Sum the squares where stage == 3 and t >= 3, then all_reduce and divide by the number of elements of xs.",
    ),
)


def one_device(xs, w):
    """All layers, one microbatch after another."""
    import jax
    import jax.numpy as jnp

    h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), xs, w)
    return (h**2).mean()


PREDICTION = None


def answer(xs, w):
    """xs: all microbatches, [M, B, D], alike on all stages; w: the two layers of this stage. Returns the loss."""
    raise NotImplementedError

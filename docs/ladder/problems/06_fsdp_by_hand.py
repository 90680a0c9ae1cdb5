"""FSDP by hand

Each device keeps an eighth of the rows of every layer's weight, and gathers a layer when it computes with it: forward,
and again backward. What was gathered is not kept. Return the loss of the whole batch, and the device's own eighth of
the gradient.

    h = tanh(h @ w[0]), tanh(h @ w[1]), ...        loss = mean of h^2
"""

from grading import Problem

PROBLEM = Problem(
    lesson="3_data_parallel",
    mesh="fsdp=8",
    takes="x[B/fsdp, D]; w[L, D/fsdp, D]",
    gives="loss[]; dw[L, D/fsdp, D]",
    small="B=16 D=8 L=3",
    other="B=24 D=16 L=2",
    full="B=16384 D=4096 L=8",
    predict="sent: MB that a device sends in the step",
    arithmetic="3 * 4 * L * D * D * 7/8",
    because="Every weight is gathered twice, once in each direction, and its gradient scattered once: 3 V (n-1)/n. "
    "Without the second gather it would be 2 V, and all gathered layers would stay in memory from forward to "
    "backward.",
    hints=(
        "The derivative of all_gather is reduce_scatter: gather inside the function that you differentiate, and the "
        "gradient comes out summed and split.",
        "jax.lax.scan over the layers with the gather inside; then jax.checkpoint around the layer, so that backward "
        "gathers again instead of keeping what forward gathered.",
        "reduce_scatter sums over devices, and the loss is a mean: divide dw by 8, and all_reduce the loss.",
    ),
)


def one_device(x, w):
    """Loss and gradient with whole weights."""
    import jax
    import jax.numpy as jnp

    def loss(w):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return (h**2).mean()

    return jax.value_and_grad(loss)(w)


PREDICTION = None


def answer(x, w):
    """x: rows of this device, [B/8, D]; w: its rows of all weights, [L, D/8, D]. Returns (loss, dw), dw as w."""
    raise NotImplementedError

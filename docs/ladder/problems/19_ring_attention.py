"""Ring attention

One sequence on eight devices: each has an eighth of the queries, keys and values, in order. Queries stay; keys and
values pass by, one block at a time. Attention is causal, and no device may hold the scores of its queries with *all*
keys: keep a running maximum, sum and output for each query, and correct them with every block (one head of width H).
"""

from grading import Problem

PROBLEM = Problem(
    lesson="12_context",
    mesh="context=8",
    takes="q[T/context, H]; k[T/context, H]; v[T/context, H]",
    gives="o[T/context, H]",
    gradients="q k v",
    small="T=32 H=4",
    other="T=48 H=6",
    large="q",
    full="T=32768 H=128",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * 7 * 2 * 4 * T/8 * H",
    because="Seven shifts of a block of keys and one of values; backward their gradients take the same way back. A "
    "gather would send as much: the ring saves memory, and lets each transfer overlap with the block before it.",
    hints=(
        "With running (m, s, o) and a block of scores: M = max(m, scores.max), then s = s e^(m - M) + sum "
        "e^(scores - M), and o the same with v; at the end o / s.",
        "After h shifts by 1 device i has the keys of device (i - h) % 8: mask by global positions, not by local ones.",
        "Start m at a finite -1e30. Wrap the work on one block in jax.checkpoint, or backward keeps all scores; seven "
        "shifts, not eight.",
    ),
)


def one_device(q, k, v):
    """Causal attention."""
    import jax
    import jax.numpy as jnp

    scores = jnp.where(jnp.tril(jnp.ones((q.shape[0],) * 2, bool)), q @ k.T / q.shape[1] ** 0.5, -1e30)
    return jax.nn.softmax(scores, -1) @ v


PREDICTION = None


def answer(q, k, v):
    """q, k, v: the block of this device, [T/8, H]. Returns its block of the output."""
    raise NotImplementedError

"""Cross-entropy in pieces

The last layer of a language model: `h[T, D]` is alike on all devices, the unembedding is split by vocabulary, and
the logits of T tokens and V words would be the largest array of the model. Nobody may have them whole. Return the mean
of the loss `lse - logit of the label`, with the gradients of `h` and `w` complete.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="6_tensor_parallel",
    mesh="tensor=8",
    takes="h[T, D]; w[V/tensor, D]; labels<V[T]",
    gives="loss[]",
    gradients="h w",
    small="T=6 D=8 V=32",
    other="T=10 D=12 V=48",
    large="h",
    full="T=8192 D=4096 V=131072",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * 4 * T * D * 7/8 + 3 * 2 * 4 * T * 7/8",
    because="Three numbers for each token forward: maximum, sum of exponentials, logit of the label. The rest is "
    "f, the sum of the gradient of h over the parts of the vocabulary. V does not appear.",
    hints=(
        "Problem 3 has the log-sum-exp, problem 11 the trick with a mask for the label's logit.",
        "Here every device uses the sums alike, for the same loss: all_reduce, not psum. Why was it psum in problem 3?",
        "h enters a product with own columns on each device, as x in problem 10: it needs f.",
    ),
)


def one_device(h, w, labels):
    """Mean cross-entropy over all words."""
    import jax
    import jax.numpy as jnp

    logits = h @ w.T
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()


PREDICTION = None


def answer(h, w, labels):
    """h: [T, D], alike; w: the words of this device, [V/8, D]; labels: [T], alike. Returns the loss, a scalar."""
    raise NotImplementedError

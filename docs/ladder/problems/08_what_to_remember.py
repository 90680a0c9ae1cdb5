"""What to remember

Backward needs values of forward: keep them, or compute them again. A layer is

    u = h @ w1          (named "up")
    a = gelu(u)         (named "act")
    h = h + a @ w2

The loop over layers keeps each layer's `h`. Without a policy JAX also keeps whatever the derivative of `gelu` asks for,
several arrays as wide as `u`. Wrap the layer so that **no matrix product is computed twice, and one wide array is kept
for each layer**.
"""

import jax
from grading import Problem
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

PROBLEM = Problem(
    lesson="4_memory",
    mesh="data=8",
    takes="x[B, D]; w1[L, D, F]; w2[L, F, D]",
    gives="loss[]",
    gradients="w1 w2",
    small="B=16 D=8 F=32 L=3",
    other="B=24 D=12 F=20 L=2",
    full="B=65536 D=2048 F=8192 L=8",
    predict="flops: GFLOPs that a device computes in the step (count the six products of each layer)",
    arithmetic="6 * 2 * B/8 * D * F * L",
    because="Two products forward, four backward: two for each weight and two for what flows back. The derivative "
    "of the second product needs `a`, that of gelu needs `u`, and `a` follows from `u` by elementwise work that "
    "costs no matrix product: `u` is the one to keep.",
    hints=(
        "jax.checkpoint(layer, policy=...) keeps what the policy says, and computes the rest again.",
        "Policies: jax.checkpoint_policies.save_only_these_names('...'). From which name does the other follow "
        "cheaply?",
        "gelu(u) follows from u. From a, u does not follow: the product would be computed again.",
    ),
)


def layer(h, w1, w2):
    """One layer."""
    u = checkpoint_name(h @ w1, "up")
    a = checkpoint_name(jax.nn.gelu(u), "act")
    return h + a @ w2


def loss_fn(x, w1, w2, layer=layer):
    """Loss of all layers."""
    h, _ = jax.lax.scan(lambda h, w: (layer(h, *w), None), x, (w1, w2))
    return (h**2).mean()


one_device = loss_fn


def program(answer, mesh):
    """The loss with the wrapped layer, as the compiler partitions it over the batch."""
    return lambda x, w1, w2: loss_fn(x, w1, w2, answer(layer)), [P("data"), P(), P()], [P()]


PREDICTION = None


def answer(layer):
    """Returns `layer`, a function (h, w1, w2) -> h, wrapped in the right policy."""
    raise NotImplementedError

"""Tokens to experts

Eight experts, one on each device. A token goes to the expert that `choice` names, is multiplied by that expert's
weight, and comes back to where it was. The router is well balanced: each device has exactly `T/64` tokens for each
expert, in any order.
"""

from grading import Problem

PROBLEM = Problem(
    lesson="11_experts",
    mesh="expert=8",
    takes="x[T/expert, D]; choice<8[T/expert]; w[E/expert, D, F]",
    gives="y[T/expert, F]",
    gradients="x w",
    small="T=128 D=5 F=6 E=8",
    other="T=192 D=7 F=5 E=8",
    full="T=65536 D=4096 F=4096 E=8",
    predict="sent: MB that a device sends, forward and backward together",
    arithmetic="2 * (4 * T/8 * D + 4 * T/8 * F) * 7/8",
    because="Each token travels to its expert and its result back; backward, the gradients take the same ways. An "
    "eighth of the tokens is at home already. Gathering all tokens on all devices would send eight times as much.",
    hints=(
        "Sort your tokens by expert: jnp.argsort(choice) gives blocks of equal size, one for each device.",
        "all_to_all(x, ('expert',), 0, 0) sends block e to device e, and brings one block from each device.",
        "The same all_to_all sends the results back, in sorted order; undo the sorting: y.at[order].set(results).",
    ),
)


def prepare(x, choice, w):
    """Balances the router: on each device the same number of tokens for each expert, in an order of its own."""
    import jax
    import jax.numpy as jnp

    every = jnp.tile(jnp.arange(8), choice.shape[0] // 64)
    keys = jax.random.split(jax.random.key(7), 8)
    return x, jnp.concatenate([jax.random.permutation(key, every) for key in keys]), w


def one_device(x, choice, w):
    """Every token by the weight of its expert."""
    import jax
    import jax.numpy as jnp

    return (jax.nn.one_hot(choice, 8)[:, :, None] * jnp.einsum("td,edf->tef", x, w)).sum(1)


PREDICTION = None


def answer(x, choice, w):
    """x, choice: tokens of this device; w[0]: [D, F], the weight of its expert. Returns their results, in order."""
    raise NotImplementedError

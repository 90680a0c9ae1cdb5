"""Update of bfloat16 parameters, which changes them by less than their last bit.

A step changes a weight by about the learning rate. At 3e-5 that is less than half the distance between two neighbouring
bfloat16 numbers for every weight above 0.016, so rounding to the nearest would leave those weights where they are.

- `master` keeps the other 16 bits of a float32 master weight in the optimizer state: 2 + 2 bytes, as many as a float32
  parameter has, of which only the 2 of the parameter are gathered.
- `stochastic` keeps nothing and rounds up with the probability of the remainder (Gupta et al. 2015, arXiv:1502.02551).

Moments and updates are float32 in both.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Rule

from meshwright.sharding.params import Tree
from meshwright.step.optimizers import UpdateRule


class MasterState(NamedTuple):
    """Optimizer state with float32 master weights, whose upper bits are the parameters."""

    low_bits: Tree
    """What is missing from a parameter to its master weight, in units of the master's last bit; int16."""
    inner: Any
    """State of the optimizer."""


def with_masters(rule: Rule) -> UpdateRule:
    """Returns the update of bfloat16 parameters whose float32 master weights an optax rule updates."""

    def init(params: Tree) -> MasterState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int16), params)
        return MasterState(zeros, rule.init(jax.tree.map(join_float32, params, zeros)))

    def update(grads: Tree, state: MasterState, params: Tree, step: jax.Array) -> tuple[Tree, MasterState]:
        masters = jax.tree.map(join_float32, params, state.low_bits)
        updates, inner = rule.update(grads, state.inner, masters)
        new = jax.tree.map(split_float32, optax.apply_updates(masters, updates))
        upper, low_bits = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), new)
        return upper, MasterState(low_bits, inner)

    return UpdateRule(init, update)


def with_random_rounding(rule: Rule, seed: int) -> UpdateRule:
    """Returns the update of bfloat16 parameters that are rounded at random, by an optax rule.

    seed: of the rounding, which is the same on any mesh.
    """

    def to_float32(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(grads: Tree, state: Any, params: Tree, step: jax.Array) -> tuple[Tree, Any]:
        exact = to_float32(params)
        updates, state = rule.update(grads, state, exact)
        leaves, treedef = jax.tree.flatten(optax.apply_updates(exact, updates))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), len(leaves))
        return jax.tree.unflatten(treedef, [round_at_random(x, k) for x, k in zip(leaves, keys, strict=True)]), state

    return UpdateRule(lambda params: rule.init(to_float32(params)), update)


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits finite float32 numbers into the nearest bfloat16 numbers and int16 remainders of their bits."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Half a unit is rounded away from zero: the remainder is then from -2^15 to 2^15 - 1, which is int16.
    upper = (bits + jnp.uint32(1 << 15)) >> 16
    return _from_upper(upper), (bits - (upper << 16)).astype(jnp.int32).astype(jnp.int16)


def join_float32(upper: jax.Array, low_bits: jax.Array) -> jax.Array:
    """Inverts `split_float32`."""
    bits = jax.lax.bitcast_convert_type(upper, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits + low_bits.astype(jnp.int32).astype(jnp.uint32), jnp.float32)


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds finite float32 numbers to one of the two nearest bfloat16 numbers; the mean is the number itself."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return _from_upper((bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)) >> 16)


def _from_upper(upper: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)

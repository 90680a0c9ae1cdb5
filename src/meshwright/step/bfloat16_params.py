"""Updates of bfloat16 parameters: float32 master weights, or rounding at random.

A step changes a bfloat16 parameter (`param_dtype`) by about the learning rate. At 3e-5 that is less
than half the distance between two neighbouring bfloat16 numbers for every weight above 0.016, so
rounding to the nearest would leave those weights where they are.

- `master` keeps the difference of a float32 master weight to its parameter, which is the nearest
  bfloat16 number, in 16 bits of the optimizer state: 2 + 2 bytes, as many as a float32 parameter
  has, of which only the 2 of the parameter are gathered.
- `stochastic` keeps nothing and rounds up with the probability of the remainder (Gupta et al. 2015,
  arXiv:1502.02551).

Moments and updates are float32 in both.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformation as Rule

from meshwright.sharding.initial_values import random_bits
from meshwright.sharding.params import Tree, is_param
from meshwright.step.state import UpdateRule


class MasterState(NamedTuple):
    """Optimizer state with float32 master weights,
    of which the parameters are the nearest bfloat16 numbers."""

    low_bits: Tree
    """What is missing from a parameter to its master weight, in units of the master's last bit;
    int16. None for a parameter that is float32 at rest."""
    inner: Any
    """State of the optimizer."""


def with_masters(rule: Rule, seed: int, described: Tree) -> UpdateRule:
    """Returns the update of bfloat16 parameters whose float32 master weights an optax rule updates.

    Parameters that are float32 at rest are their own masters. seed, described: as
    `with_random_rounding`, and not used.
    """
    masters = _Masters(rule)
    return UpdateRule(masters.init, masters.update)


@dataclasses.dataclass(frozen=True)
class _Masters:
    """Update of master weights, which are `join_float32(parameter, low bits)`."""

    rule: Rule

    def init(self, params: Tree) -> MasterState:
        """Returns the state in which the master weights are the parameters."""
        zeros = jax.tree.map(_no_low_bits, params)
        masters = jax.tree.map(join_float32, params, zeros)
        return MasterState(zeros, self.rule.init(masters))

    def update(
        self, grads: Tree, state: MasterState, params: Tree, step: jax.Array
    ) -> tuple[Tree, MasterState]:
        """Returns the updated master weights in bfloat16,
        and a state with their differences to that."""
        masters = jax.tree.map(join_float32, params, state.low_bits)
        updates, inner = self.rule.update(grads, state.inner, masters)
        treedef: Any
        leaves, treedef = jax.tree.flatten(optax.apply_updates(masters, updates))
        upper: list[jax.Array] = []
        low_bits: list[jax.Array | None] = []
        for master, param in zip(leaves, jax.tree.leaves(params), strict=True):
            high: jax.Array = master
            low: jax.Array | None = None
            if param.dtype == jnp.bfloat16:
                high, low = split_float32(master)
            upper.append(high)
            low_bits.append(low)
        return treedef.unflatten(upper), MasterState(treedef.unflatten(low_bits), inner)


def _no_low_bits(p: jax.Array) -> jax.Array | None:
    """Returns the remainder of a bfloat16 parameter that is its master weight.

    The result is None for a float32 one.
    """
    return jnp.zeros(p.shape, jnp.int16) if p.dtype == jnp.bfloat16 else None


def with_random_rounding(rule: Rule, seed: int, described: Tree) -> UpdateRule:
    """Returns the update of bfloat16 parameters that are rounded at random, by an optax rule.

    seed: of the rounding, which is the same on any mesh: its bits are drawn by layer, wherever a
    layer's row is.
    described: descriptions of the parameters.
    """
    orders = [p.order for p in jax.tree.leaves(described, is_leaf=is_param)]
    rounding = _RandomRounding(rule, seed, orders)
    return UpdateRule(rounding.init, rounding.update)


@dataclasses.dataclass(frozen=True)
class _RandomRounding:
    """Update of float32 copies of the parameters, which are rounded at random to bfloat16."""

    rule: Rule
    seed: int
    orders: list[tuple[int, ...] | None]
    """Layer in each row of every parameter (`Param.order`)."""

    def init(self, params: Tree) -> Any:
        """Returns the state of the rule."""
        return self.rule.init(_to_float32(params))

    def update(self, grads: Tree, state: Any, params: Tree, step: jax.Array) -> tuple[Tree, Any]:
        """Returns the rounded parameters and the state of the rule."""
        exact = _to_float32(params)
        updates, state = self.rule.update(grads, state, exact)
        new = optax.apply_updates(exact, updates)
        leaves, treedef = jax.tree.flatten(new)
        key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), step)
        keys = jax.random.split(key, len(leaves))
        before = jax.tree.leaves(params)
        rounded = []
        for x, p, key_of_p, order in zip(leaves, before, keys, self.orders, strict=True):
            stays = p.dtype != jnp.bfloat16
            rounded.append(x if stays else round_at_random(x, key_of_p, order))
        return jax.tree.unflatten(treedef, rounded), state


def _to_float32(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits finite float32 numbers into the nearest bfloat16 numbers and int16 remainders."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Half a unit is rounded away from zero: the remainder is then from -2^15 to 2^15 - 1, which is
    # int16.
    upper = (bits + jnp.uint32(1 << 15)) >> 16
    return _from_upper(upper), (bits - (upper << 16)).astype(jnp.int32).astype(jnp.int16)


def join_float32(upper: jax.Array, low_bits: jax.Array | None) -> jax.Array:
    """Inverts `split_float32`; None stands for no remainder, of a float32 number."""
    if low_bits is None:
        return upper
    bits = jax.lax.bitcast_convert_type(upper, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(
        bits + low_bits.astype(jnp.int32).astype(jnp.uint32), jnp.float32
    )


def round_at_random(
    x: jax.Array, key: jax.Array, order: tuple[int, ...] | None = None
) -> jax.Array:
    """Rounds finite float32 numbers to one of the two nearest bfloat16 numbers.

    The mean is the number itself.

    order: layer in each row of x (`Param.order`).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    drawn = random_bits(jax.random.key_data(key), x.shape, order).astype(jnp.uint16)
    return _from_upper((bits + drawn.astype(jnp.uint32)) >> 16)


def _from_upper(upper: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)

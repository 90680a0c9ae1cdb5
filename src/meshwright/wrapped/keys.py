"""Random keys of a loss: the same numbers for the same example on every mesh.

A key of JAX gives the same numbers to every device, and a key folded with the device's index gives numbers that depend
on the mesh. A key made here knows which part of the batch its device has. An array that is drawn with it is that part
of the array which one device with the whole batch would draw, and a split into one key per example gives the keys of
those examples. What is drawn without a batch dimension (a mask that all examples share) is the same everywhere.

Which of an array's dimensions is the batch is not guessed from its size: the loss is traced once with the whole batch,
and what it draws there is compared. Numbers are Threefry-2x32 of (row, column), as in sharding.params.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry2x32_p

from meshwright.errors import ConfigError
from xlacensus.jaxprs import all_jaxprs

Shape = tuple[int, ...]
Draw = tuple[str, Shape]
"""`bits` or `split`, and the shape that was asked for."""
_DRAWING = {"random_bits": "bits", "random_split": "split"}
_TAG = "mwp"
_WORDS = 3
"""Words of a key: two of Threefry's, and the part of the batch."""
_SPLIT_SALT = 0x9E3779B9
"""Added to the key where keys are drawn instead of numbers."""


@dataclasses.dataclass(eq=False)
class Draws:
    """Everything that a loss draws for the whole batch."""

    shapes: set[Draw] = dataclasses.field(default_factory=set)
    foreign: list[Draw] = dataclasses.field(default_factory=list)
    """What is drawn with keys of the loss's own, in the order of the program."""

    def read(self, jaxpr: Any) -> None:
        """Adds what an open jaxpr draws with keys of this module."""
        for equation in (equation for inner, _ in all_jaxprs(jaxpr) for equation in inner.eqns):
            kind = _DRAWING.get(equation.primitive.name)
            if kind is not None and _TAG in str(equation.invars[0].aval.dtype):
                self.shapes.add((kind, tuple(equation.params["shape"])))
            elif kind is not None:
                self.foreign.append((kind, tuple(equation.params["shape"])))

    def check_foreign(self, jaxpr: Any) -> None:
        """Raises ConfigError where a key of the loss's own draws for the examples of the batch.

        jaxpr: the loss of a batch of twice the size. Each device would draw the same numbers for its own examples.
        """
        twice = Draws()
        twice.read(jaxpr)
        for own, other in zip(self.foreign, twice.foreign, strict=False):
            if own != other:
                raise ConfigError(
                    f"{list(own[1])} random {'keys' if own[0] == 'split' else 'numbers'} in the loss",
                    "they are drawn for the examples of the batch with a key that the loss has itself: each device "
                    "would draw the same ones, and each step again",
                    "the key that the step gives: loss(model, batch, key)",
                )

    def has_batch(self, kind: str, shape: Shape, parts: int) -> bool:
        """Returns whether the first dimension is the batch, of which one of `parts` has the array `shape`.

        Raises ConfigError where that cannot be known, because the whole batch draws both shapes, or neither.
        """
        if parts == 1 or not shape:
            return False
        whole = (kind, (shape[0] * parts, *shape[1:])) in self.shapes
        same = (kind, shape) in self.shapes
        if whole != same:
            return whole
        drawn = f"{list(shape)} %s {[shape[0] * parts, *shape[1:]]}"
        if whole:
            truth = f"both {drawn % 'and'}, so they may belong to the examples of the part or to all of the batch"
            fix = "another batch or mesh, with other sizes for a part of the batch"
            fix += (
                f"; or split(key, {shape[0] + 1}) for keys that all of the batch shares"
                if kind == "split"
                else ""
            )
        else:
            truth = f"neither {drawn % 'nor'}: the batch is not its first dimension"
            fix = "draw arrays whose first dimension is the batch, or that do not depend on it"
        raise ConfigError(
            f"{list(shape)} random {'keys' if kind == 'split' else 'numbers'} on each of {parts} parts of the batch",
            f"the whole batch draws {truth}",
            fix,
        )


@functools.lru_cache(maxsize=64)
def _implementation(parts: int, draws: Draws) -> Any:
    """Returns the kind of keys for one of `parts` parts of a batch."""
    return define_prng_impl(
        key_shape=(_WORDS,),
        seed=_seeded,
        split=functools.partial(_split, parts, draws),
        random_bits=functools.partial(_bits, parts, draws),
        fold_in=_fold_in,
        name=f"meshwright_part_of_{parts}",
        tag=_TAG,
    )


def _hashed(
    key: jax.Array, shape: Shape, has_batch: bool, salt: int
) -> tuple[jax.Array, jax.Array]:
    """Returns two words for each element: Threefry-2x32 of its row in the complete batch and its column."""
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    if has_batch:
        row = row + key[2] * jnp.uint32(rows)
    first = jnp.broadcast_to(key[0] + jnp.uint32(salt), row.shape)
    second = jnp.broadcast_to(key[1], row.shape)
    high, low = threefry2x32_p.bind(first, second, row, column)
    return high.reshape(shape), low.reshape(shape)


def _bits(parts: int, draws: Draws, key: jax.Array, width: int, shape: Shape) -> jax.Array:
    """Returns random integers of `width` bits."""
    high, low = _hashed(key, shape, draws.has_batch("bits", shape, parts), 0)
    if width == 64:
        return high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _split(parts: int, draws: Draws, key: jax.Array, shape: Shape) -> jax.Array:
    """Returns keys: those of the examples of the part, or the same on every device, each still of its part."""
    has_batch = draws.has_batch("split", shape, parts)
    high, low = _hashed(key, shape, has_batch, _SPLIT_SALT)
    # The key of an example is no longer one of a part.
    part = jnp.zeros_like(high) if has_batch else jnp.broadcast_to(key[2], high.shape)
    return jnp.stack([high, low, part], -1)


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    zero = jnp.zeros((), jnp.uint32)
    second = key[1] ^ jnp.uint32(_SPLIT_SALT)
    high, low = threefry2x32_p.bind(key[0], second, zero, jnp.asarray(data, jnp.uint32))
    return jnp.stack([high, low, key[2]])


def _seeded(seed: jax.Array) -> jax.Array:
    zero = jnp.zeros((), jnp.uint32)
    return jnp.stack([zero, jnp.asarray(seed).astype(jnp.uint32), zero])


def step_key(seed: int, step: Any, part: Any, parts: int, draws: Draws) -> jax.Array:
    """Returns the key of one part of the batch at a step. part: index of the part, outermost axis first."""
    words = [jnp.asarray(word).astype(jnp.uint32) for word in (step, seed, part)]
    return key_of(jnp.stack(words), parts, draws)


def key_of(words: Any, parts: int, draws: Draws) -> jax.Array:
    """Returns the key of one of `parts` parts of a batch. words: its data."""
    return jax.random.wrap_key_data(words, impl=_implementation(parts, draws))


KEY_WORDS = jax.ShapeDtypeStruct((_WORDS,), jnp.uint32)
"""Abstract data of a key, for traces that touch no device."""

"""Random keys of a loss: the same numbers for the same example on every mesh.

A key of JAX gives the same numbers to every device, and a key folded with the device's index gives
numbers that depend on the mesh. A key made here knows which part of the batch its device has. An
array that is drawn with it is that part of the array which one device with the whole batch would
draw, and a split into one key per example gives the keys of those examples. What is drawn without a
batch dimension (a mask that all examples share) is the same everywhere.

Whether the first dimension of an array is the batch is not guessed from its size: the loss is
traced with the batch and with one of twice the size, and each of its draws is compared with itself.
Numbers are Threefry-2x32 of (row, column), as in sharding.params.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry2x32_p

from meshwright.errors import ConfigError
from xlacensus.jaxprs import all_jaxprs

Shape = tuple[int, ...]
_DRAWING = {"random_bits": "bits", "random_split": "split", "random_fold_in": "fold_in"}
_TAG = "mwp"
_WORDS = 3
"""Words of a key: two of Threefry's, and the part of the batch."""
_SPLIT_SALT = 0x9E3779B9
"""Added to the key where keys are drawn instead of numbers."""


class Draw(NamedTuple):
    """One equation of a loss that draws numbers or keys."""

    kind: str
    """`bits`, `split` or `fold_in`."""
    shape: Shape
    """Shape that was asked for; of `fold_in` that of the keys."""
    of_step: bool
    """Whether its key comes from the step; else the loss has made one itself."""

    @property
    def noun(self) -> str:
        """Word for errors."""
        return "numbers" if self.kind == "bits" else "keys"


def draws_of(jaxpr: Any) -> list[Draw]:
    """Returns what an open jaxpr draws, in the order of the program."""
    found = []
    for inner, _ in all_jaxprs(jaxpr):
        for equation in inner.eqns:
            kind = _DRAWING.get(equation.primitive.name)
            if kind is not None:
                of_step = _TAG in str(equation.invars[0].aval.dtype)
                shape = equation.params.get("shape", equation.outvars[0].aval.shape)
                found.append(Draw(kind, tuple(shape), of_step))
    return found


@dataclasses.dataclass(eq=False)
class Draws:
    """Everything that a loss draws for the whole batch,
    and which of its arrays have the batch as first dimension."""

    whole: list[Draw]
    """For the whole batch."""
    trace_twice: Callable[[], Any]
    """Returns the open jaxpr of the loss of a batch of twice the size."""

    @functools.cached_property
    def _twice(self) -> list[Draw]:
        return draws_of(self.trace_twice())

    def check_keys_of_the_loss(self) -> None:
        """Raises ConfigError where a key that the loss has itself draws for the examples
        of the batch."""
        if all(draw.of_step for draw in self.whole):
            return
        for draw, twice in zip(self.whole, self._twice, strict=False):
            if not draw.of_step and draw != twice:
                raise ConfigError(
                    f"{list(draw.shape)} random {draw.noun} in the loss",
                    "they are drawn for the examples of the batch with a key that the loss has "
                    "itself: each device would draw the same ones, and each step again",
                    "the key that the step gives: loss(model, batch, key)",
                )

    def compare(self, parts: int) -> None:
        """Compares the draws of two sizes of the batch,
        before a step is built whose batch has several parts.

        Raises ConfigError where their number depends on the size of the batch, or keys are made of
        the index of an example: a part of the batch counts its own examples from zero.
        """
        if parts == 1 or not self.whole:
            return
        count, twice = len(self.whole), len(self._twice)
        if count != twice:
            raise ConfigError(
                f"random numbers of the loss on {parts} parts of the batch",
                f"the loss draws {count} times for the batch and {twice} times for one of twice "
                "the size, as a Python loop over examples does: which draw belongs to which "
                "example is not known",
                "jax.vmap over the examples, with the keys jax.random.split(key, batch_size)",
            )
        for draw, doubled in zip(self.whole, self._twice, strict=True):
            if draw.kind == "fold_in" and draw.of_step and draw.shape != doubled.shape:
                raise ConfigError(
                    f"{list(draw.shape)} random keys on {parts} parts of the batch",
                    f"jax.random.fold_in makes {list(doubled.shape)} for a batch of twice the "
                    "size, and each part counts its examples from zero: all parts would draw the "
                    "same",
                    "jax.random.split(key, batch_size), whose keys are those of the part's "
                    "examples",
                )

    def has_batch(self, kind: str, shape: Shape, parts: int) -> bool:
        """Returns whether the first dimension is the batch,
        of which one of `parts` has the array `shape`.

        A draw of the whole batch that doubles with the batch has the shape [rows / parts, ...] on a
        part, and one that does not depend on the batch has its own shape. Raises ConfigError where
        draws of both kinds have this shape on a part, or none.
        """
        if parts == 1:
            return False
        examples = (shape[0] * parts, *shape[1:]) if shape else ()
        of_examples = False
        shared = False
        for draw, twice in zip(self.whole, self._twice, strict=True):
            if draw.kind != kind or not draw.of_step:
                continue
            if draw.shape == twice.shape:
                shared = shared or draw.shape == shape
            elif shape and twice.shape == (2 * draw.shape[0], *draw.shape[1:]):
                of_examples = of_examples or draw.shape == examples
        if of_examples != shared:
            return of_examples
        noun = "keys" if kind == "split" else "numbers"
        if shared:
            truth = (
                f"the whole batch draws {list(examples)} for its examples, {examples[0]} / {parts} "
                f"= {shape[0]} rows on each part, and {list(shape)} that all examples share: these "
                "may belong to either"
            )
            fix = "another batch or mesh, with other sizes for a part of the batch"
            if kind == "split":
                fix += f"; or split(key, {shape[0] + 1}) for keys that all of the batch shares"
        else:
            truth = (
                f"the whole batch draws neither {list(examples)} for its examples nor "
                f"{list(shape)} that all share: the batch is not the first dimension"
            )
            fix = "draw arrays whose first dimension is the batch, or that do not depend on it"
        raise ConfigError(
            f"{list(shape)} random {noun} on each of {parts} parts of the batch", truth, fix
        )


@functools.lru_cache(maxsize=64)
def _implementation(parts: int, draws: Draws | None) -> Any:
    """Returns the kind of keys for one of `parts` parts of a batch. draws: needed for several."""
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
    """Returns two words for each element: Threefry-2x32 of its row in the complete batch
    and its column."""
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


def _has_batch(draws: Draws | None, kind: str, shape: Shape, parts: int) -> bool:
    return draws is not None and draws.has_batch(kind, shape, parts)


def _bits(parts: int, draws: Draws | None, key: jax.Array, width: int, shape: Shape) -> jax.Array:
    """Returns random integers of `width` bits."""
    high, low = _hashed(key, shape, _has_batch(draws, "bits", shape, parts), 0)
    if width == 64:
        return high.astype(jnp.uint64) << 32 | low.astype(jnp.uint64)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _split(parts: int, draws: Draws | None, key: jax.Array, shape: Shape) -> jax.Array:
    """Returns keys: those of the examples of the part,
    or the same on every device, each still of its part."""
    has_batch = _has_batch(draws, "split", shape, parts)
    high, low = _hashed(key, shape, has_batch, _SPLIT_SALT)
    # The key of an example is no longer one of a part.
    part = jnp.zeros_like(high) if has_batch else jnp.broadcast_to(key[2], high.shape)
    return jnp.stack([high, low, part], -1)


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    word = jnp.asarray(data).astype(jnp.uint32)
    # Threefry takes four words of one shape: with `vmap` only the key
    # or only the data has a further dimension.
    zero = (key[0] ^ key[0]) | (word ^ word)
    second = key[1] ^ jnp.uint32(_SPLIT_SALT)
    high, low = threefry2x32_p.bind(key[0] | zero, second | zero, zero, word | zero)
    return jnp.stack([high, low, key[2] | zero])


def _seeded(seed: jax.Array) -> jax.Array:
    zero = jnp.zeros((), jnp.uint32)
    return jnp.stack([zero, jnp.asarray(seed).astype(jnp.uint32), zero])


def step_key(seed: int, step: Any, part: Any, parts: int, draws: Draws) -> jax.Array:
    """Returns the key of one part of the batch at a step.
    part: index of the part, outermost axis first."""
    words = [jnp.asarray(word).astype(jnp.uint32) for word in (step, seed, part)]
    return key_of(jnp.stack(words), parts, draws)


def key_of(words: Any, parts: int, draws: Draws | None) -> jax.Array:
    """Returns the key of one of `parts` parts of a batch. words: its data.
    draws: needed for several parts."""
    return jax.random.wrap_key_data(words, impl=_implementation(parts, draws))


KEY_WORDS = jax.ShapeDtypeStruct((_WORDS,), jnp.uint32)
"""Abstract data of a key, for traces that touch no device."""

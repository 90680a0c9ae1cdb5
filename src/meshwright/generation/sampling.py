"""Choice of the next token from its logits.

The random numbers of a token depend on the seed, the sequence's index in the batch, the token's
position and its index in the vocabulary, and on nothing else: they are the same on any mesh and in
any batch padding.

Order of the operations, that of `transformers`: repetition penalty, temperature, top-k,
top-p, min-p.
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax

from meshwright.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Ranged,
    Seed,
)

_Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]
_ALL_TOKENS = 2**31 - 1
"""A top-k that leaves no token out."""


@dataclasses.dataclass(frozen=True)
class Sampling(Ranged):
    """How the next token is chosen.

    Example:
        >>> mw.Sampling(temperature=0.8, top_p=0.95, seed=3).top_k
        0
    """

    temperature: NonNegativeFloat = 0.0
    """Divides the logits before the draw; 0 takes the most probable token (greedy)."""
    top_k: NonNegativeInt = 0
    """Draw among the k most probable tokens; 0 is all."""
    top_p: _Probability = 1.0
    """Draw among the fewest tokens whose probabilities sum to at least p (nucleus:
    arXiv:1904.09751); 1 is all."""
    min_p: Fraction = 0.0
    """Draw among tokens at least p times as probable as the most probable one (arXiv:2407.01082);
    0 is all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides the positive logits of tokens that the text already has, and multiplies their
    negative ones (CTRL, arXiv:1909.05858); 1 changes nothing."""
    seed: Seed = 0
    """Seed of the random numbers, which do not depend on the mesh."""

    def settings(self) -> "Settings":
        """Returns the numbers as arguments of a compiled program: others compile nothing again."""
        f, i = np.float32, np.int32
        return Settings(
            f(self.temperature),
            i(min(self.top_k, _ALL_TOKENS)),
            f(self.top_p),
            f(self.min_p),
            f(self.repetition_penalty),
            np.uint32(self.seed),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of `Sampling` as scalars of a compiled program."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    seed: Any


def choose_tokens(
    logits_BV: jax.Array,
    settings: Settings,
    text_BT: jax.Array,
    sequences_B: jax.Array,
    positions_B: jax.Array,
) -> jax.Array:
    """Returns the next token of each sequence, int32 [B].

    logits_BV: whole vocabulary, float32.
    text_BT: tokens so far, -1 where there is none.
    sequences_B: index of each sequence in the batch.
    positions_B: position that the token will have.
    """
    logits_BV = lax.cond(
        settings.repetition_penalty == 1.0,
        lambda x: x,
        lambda x: _penalise(x, text_BT, settings),
        logits_BV,
    )
    return lax.cond(
        settings.temperature == 0.0,
        lambda x: x.argmax(-1).astype(jnp.int32),
        lambda x: _draw(x, settings, sequences_B, positions_B),
        logits_BV,
    )


def _penalise(logits_BV: jax.Array, text_BT: jax.Array, settings: Settings) -> jax.Array:
    penalty, rows = settings.repetition_penalty, jnp.arange(logits_BV.shape[0])[:, None]
    # A negative index would count from the end.
    index_BT = jnp.where(text_BT < 0, logits_BV.shape[1], text_BT)
    seen_BV = jnp.zeros(logits_BV.shape, jnp.bool_).at[rows, index_BT].set(True, mode="drop")
    return jnp.where(
        seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV
    )


def _draw(
    logits_BV: jax.Array, settings: Settings, sequences_B: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Draws by the Gumbel-max trick: the argmax of logits plus Gumbel noise is a draw
    from their softmax."""
    vocab = logits_BV.shape[1]
    kept_BV = keep_tokens(
        logits_BV / settings.temperature, settings.top_k, settings.top_p, settings.min_p
    )

    def noise(sequence: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(settings.seed), sequence), position
        )
        return jax.random.gumbel(key, (vocab,))

    return (kept_BV + jax.vmap(noise)(sequences_B, positions_B)).argmax(-1).astype(jnp.int32)


def keep_tokens(
    logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Returns the logits with -inf for the tokens that top-k, top-p and min-p leave out."""

    def some(logits_BV: jax.Array) -> jax.Array:
        order_BV = jnp.argsort(logits_BV, -1, descending=True, stable=True)
        sorted_BV = jnp.take_along_axis(logits_BV, order_BV, -1)
        rank_V = jnp.arange(logits_BV.shape[1])
        among_k_BV = jnp.where((top_k > 0) & (rank_V >= top_k), -jnp.inf, sorted_BV)
        probability_BV = jax.nn.softmax(among_k_BV, -1)
        before_BV = jnp.cumsum(probability_BV, -1) - probability_BV
        kept_BV = (before_BV < top_p) | (rank_V == 0)
        # Ratios to the most probable token do not change where others are left out.
        kept_BV &= probability_BV >= min_p * probability_BV[:, :1]
        rows = jnp.arange(logits_BV.shape[0])[:, None]
        return (
            jnp.full_like(logits_BV, -jnp.inf)
            .at[rows, order_BV]
            .set(jnp.where(kept_BV, among_k_BV, -jnp.inf))
        )

    filters = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return lax.cond(filters, some, lambda x: x, logits_BV)

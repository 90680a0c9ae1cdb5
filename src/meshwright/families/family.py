"""What a family is."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from meshwright.blocks.context import Attend
from meshwright.blocks.dropout import Dropout
from meshwright.config import Model
from meshwright.errors import ConfigError
from meshwright.params import Tree, Use


class OverLayers(Protocol):
    """`memory.over_layers` with the remat policy and the unrolling already chosen."""

    def __call__(
        self, block: Callable[[jax.Array, Any, jax.Array], jax.Array], x: jax.Array, stacked: Any, *, layers: int
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Text:
    """What the model reads: each [B, T/context], int32."""

    tokens: jax.Array
    positions: jax.Array
    """Place within the document."""


@dataclasses.dataclass(frozen=True)
class Family:
    """params(config) describes the parameters; forward gives hidden states [B, T, D], whole over `tensor`,
    and the unembedding [V/tensor, D]; flops(config, seq) itemises one token's forward pass, in FLOPs."""

    config: type[Model]
    params: Callable[[Any], Tree]
    forward: Callable[[Any, Tree, Text, Use, Dropout, Attend, OverLayers], tuple[jax.Array, jax.Array]]
    flops: Callable[[Any, int], dict[str, float]]
    longest: Callable[[Any], int | None]
    """Positions the model has; None where there is no limit."""


def vocab_of(model: Model) -> int:
    """Tokens of the vocabulary. Raises ConfigError where nobody has said."""
    if model.vocab is None:
        raise ConfigError("a model without a vocabulary", "model.vocab is not set", "--model.vocab 32000, say")
    return model.vocab


def padded_vocab(model: Model) -> int:
    """Rows of the embedding tables: the vocabulary rounded up to `vocab_multiple`."""
    return -(-vocab_of(model) // model.vocab_multiple) * model.vocab_multiple


def head_size(model: Model) -> int:
    """Width over heads. Raises ConfigError where it is not whole."""
    if model.width % model.heads:
        raise ConfigError(
            f"width {model.width} in {model.heads} heads",
            f"{model.width} = {model.width // model.heads} * {model.heads} + {model.width % model.heads}",
            f"a width of {model.width // model.heads * model.heads or model.heads}, or give model.head_size",
        )
    return model.width // model.heads

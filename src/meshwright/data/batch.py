"""What one step reads."""

import dataclasses
import functools
from typing import Any

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["inputs", "targets", "segments", "positions", "weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences, each field [B, T]."""

    inputs: Any
    """Tokens, int32."""
    targets: Any
    """The token after each, int32."""
    segments: Any
    """Document within the sequence, int32; positions of different documents do not see each other."""
    positions: Any
    """Place within the document, int32."""
    weights: Any
    """Weight of each position's loss, float32."""

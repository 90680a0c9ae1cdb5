"""Positions of a sequence on each device of the mesh axis `context`.

Zigzag: balanced for causal attention.
A causal mask gives late positions more work than early ones. For load balancing, each group of
devices therefore holds one chunk from the front and one from the back of the sequence (Llama 3,
arXiv:2407.21783, section 3.3.2).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SEGMENTS = 2
"""Segments of neighbouring positions that a device holds, of equal length, under every strategy."""


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """Split of a sequence of `seq` tokens over `shards` devices of `context`.

    `group` neighbouring devices form a group, and the groups form a ring. A group holds one chunk
    from the front and one from the back of the sequence; its devices hold equal parts of them, in
    order.
    """

    strategy: str
    """Context strategy: ring, all_gather, ulysses or usp."""
    seq: int
    """Tokens of the full sequence T."""
    shards: int
    """Devices along `context`."""
    group: int
    """Devices in a group: 1 for ring and all_gather, all of them for ulysses."""

    @property
    def groups(self) -> int:
        """Groups, each with two chunks of the sequence."""
        return self.shards // self.group

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go around a ring of groups."""
        return self.groups > 1 and self.strategy != "all_gather"

    def in_order(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the shards of all devices, gathered along axis 1, in the order of the sequence.

        Groups have one device.
        """
        chunks = jnp.split(x_BTKH, 2 * self.groups, axis=1)
        return jnp.concatenate([*chunks[::2], *chunks[::-2]], axis=1)

    def shard_positions(self, shard: Any) -> jax.Array:
        """Returns the positions that a device holds, int32 [T/shards], in its order."""
        group = jnp.asarray(shard // self.group)
        size = self.seq // self.shards
        chunk = self.seq // (2 * self.groups)
        starts = jnp.stack([group, 2 * self.groups - 1 - group]) * chunk
        of_group = (starts[:, None] + jnp.arange(chunk)).reshape(-1).astype(jnp.int32)
        return lax.dynamic_slice_in_dim(of_group, shard % self.group * size, size)

    def local_positions(self) -> jax.Array:
        """Returns this device's positions, int32 [T/shards]; for use inside the `shard_map`."""
        if self.shards == 1:
            return jnp.arange(self.seq, dtype=jnp.int32)
        return self.shard_positions(lax.axis_index("context"))

    def segments(self) -> np.ndarray:
        """Returns the place in the sequence of each device's segments, [shards, SEGMENTS]."""
        tokens = segment_tokens(self.seq, self.shards)
        return self.position_order()[::tokens].reshape(self.shards, SEGMENTS) // tokens

    def local_segments(self) -> list[jax.Array]:
        """Returns the places of this device's segments, int32 scalars;
        for use inside the `shard_map`."""
        places = jnp.asarray(self.segments(), jnp.int32)[lax.axis_index("context")]
        return [places[i] for i in range(SEGMENTS)]

    def position_order(self) -> np.ndarray:
        """Returns the positions of all shards one after another, [T]."""
        with jax.ensure_compile_time_eval():
            return np.concatenate([np.asarray(self.shard_positions(i)) for i in range(self.shards)])


def segment_tokens(seq: int, shards: int) -> int:
    """Returns the tokens of a segment of a sequence of `seq`,
    of which `shards` devices have parts."""
    return seq if shards == 1 else seq // (SEGMENTS * shards)


def split_sequence(strategy: str, seq: int, shards: int, kv_heads: int) -> SequenceSplit:
    """Splits a sequence of `seq` tokens over `shards` devices by a context strategy.

    kv_heads: key/value heads on one device before any exchange of heads for positions. One device
    has all positions, by whatever strategy: a model whose layers are not known names none.
    """
    if shards == 1:
        return SequenceSplit(strategy, seq, 1, 1)
    group_sizes = {"ring": 1, "all_gather": 1, "ulysses": shards, "usp": math.gcd(shards, kv_heads)}
    return SequenceSplit(strategy, seq, shards, group_sizes[strategy])

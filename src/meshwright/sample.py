"""Text from the model being trained, by the same forward pass it trains with.

Every token reads the whole window again: right for a look at what a run has learned, not for serving.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.blocks.context import CONTEXT, build_attend
from meshwright.blocks.dropout import no_dropout
from meshwright.collectives import gather
from meshwright.config import MeshShape
from meshwright.families import find_family
from meshwright.families.family import Text, vocab_of
from meshwright.layouts import BATCH_AXES
from meshwright.memory import over_layers
from meshwright.params import Tree, plan_use
from meshwright.step import BATCH_SPEC, Program, specs


def build_next_logits(program: Program) -> Callable[[Tree, jax.Array, jax.Array], jax.Array]:
    """`(params, tokens [B, T], at) -> logits [B, V]` after position `at` of each sequence, whole on every device."""
    run = program.run
    dtype = jnp.dtype(run.training.compute_dtype)
    use = plan_use(program.params, program.placed, compute_dtype=dtype, reduce_dtype=dtype)
    layers = functools.partial(over_layers, remat="none", unroll=run.training.unroll)
    family = find_family(run.model)

    def next_logits(params: Tree, tokens_BT: jax.Array, at: jax.Array) -> jax.Array:
        attend = build_attend(program.split, jnp.zeros_like(tokens_BT))
        places_T = program.split.own()
        positions_BT = jnp.broadcast_to(places_T, (tokens_BT.shape[0], len(places_T)))
        text = Text(tokens_BT[:, places_T], positions_BT)
        x_BTD, table_VD = family.forward(run.model, params, text, use, no_dropout(), attend, layers)
        # Every device has its own positions; the one after which the next token comes is found among all of them.
        held = gather(places_T, CONTEXT, 0)
        x_BD = jax.lax.dynamic_index_in_dim(gather(x_BTD, CONTEXT, 1), jnp.argmax(held == at), 1, keepdims=False)
        logits_BV = jnp.einsum("bd,vd->bv", x_BD, table_VD, preferred_element_type=jnp.float32)
        return gather(gather(logits_BV, ("tensor",), 1), BATCH_AXES, 0)[:, : vocab_of(run.model)]

    return jax.jit(
        jax.shard_map(
            next_logits,
            mesh=program.mesh,
            in_specs=(specs(program.placed, "at_rest"), BATCH_SPEC, PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def generate(
    program: Program, params: Tree, prompt: np.ndarray, *, tokens: int, seed: int, temperature: float = 0.8
) -> Iterator[int]:
    """`tokens` tokens after `prompt`, one by one, seeing at most the last `seq` before each."""
    next_logits = build_next_logits(program)
    seq = program.run.training.seq
    rows = MeshShape(**program.mesh.shape).over(BATCH_AXES)
    seen = [int(t) for t in prompt]
    rng = np.random.default_rng(seed)
    for _ in range(tokens):
        # Half a window is dropped at once, so most steps only append.
        window = seen if len(seen) <= seq else seen[-(seq // 2 + (len(seen) - seq) % max(seq // 2, 1)) :]
        batch = jax.make_array_from_callback(
            (rows, seq), program.batch_sharding, _padded(window, rows, seq).__getitem__
        )
        logits = np.asarray(next_logits(params, batch, jnp.int32(len(window) - 1)))[0].astype(np.float64)
        # Gumbel's trick: the largest of logits plus noise is a draw from their softmax.
        token = int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))
        seen.append(token)
        yield token


def _padded(window: list[int], rows: int, seq: int) -> np.ndarray:
    padded = np.zeros((rows, seq), np.int32)
    padded[:, : len(window)] = window
    return padded

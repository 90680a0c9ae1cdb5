"""Sampling of text from the model in training, with the forward pass of the train step.

Every token recomputes the whole window and no key or value is cached. That suits a sample at the end of a run, not
serving.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_gather
from meshwright.data.batch import Batch
from meshwright.models.blocks.dropout import no_dropout
from meshwright.models.model import vocab_size
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Tree
from meshwright.step.device_run import BATCH_SPEC, DeviceRun, param_specs
from meshwright.step.pipeline import PipelineModel, run_forward


def build_next_logits(device_run: DeviceRun) -> Callable[[Tree, jax.Array, jax.Array], jax.Array]:
    """Returns the jitted `(params, tokens [B, T], position) -> logits [B, V]`, replicated over the mesh.

    The logits are those of the token that follows `position`, an int32 scalar.
    """
    placed, model = device_run.placed, device_run.local_model

    def next_logits(params: Tree, tokens_BT: jax.Array, position: jax.Array) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        batch = Batch(tokens_BT, tokens_BT, jnp.zeros_like(tokens_BT), positions_BT, jnp.ones(tokens_BT.shape))
        ctx = model.context(batch, no_dropout())

        def logits(params: Tree, x_BTD: jax.Array, microbatch: Any) -> tuple[jax.Array, jax.Array]:
            x_BTD, table_VD = model.unembed(params, x_BTD)
            # Each device of `context` has some of the positions, so the one asked for is found among all of them.
            positions_T = all_gather(placed.sequence.local_positions(), ("context",), 0)
            x_BD = all_gather(x_BTD, ("context",), 1)[:, jnp.argmax(positions_T == position)]
            return jnp.zeros(()), jnp.einsum("bd,vd->bv", x_BD, table_VD, preferred_element_type=jnp.float32)

        pipeline = PipelineModel(
            embed=lambda params, microbatch: model.embed(params, ctx),
            layers=lambda params, x, virtual_stage, microbatch: model.layers(params, x, ctx, virtual_stage),
            loss=logits,
            aux_loss=lambda aux: 0.0,
            stacks=tuple(model.stacks),
            together=model.permutes,
        )
        logits_BV = run_forward(placed.forward_table(1), pipeline, params)
        return all_gather(all_gather(logits_BV, VOCAB_AXES, 1), BATCH_AXES, 0)[:, : vocab_size(placed.run.model)]

    return jax.jit(
        jax.shard_map(
            next_logits,
            mesh=device_run.mesh,
            in_specs=(param_specs(device_run.placements, "at_rest"), BATCH_SPEC, PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def generate(
    device_run: DeviceRun, params: Tree, prompt: np.ndarray, *, tokens: int, seed: int, temperature: float = 0.8
) -> Iterator[int]:
    """Yields `tokens` tokens that continue `prompt`; each depends on at most the last `seq` tokens before it."""
    next_logits = build_next_logits(device_run)
    seq = device_run.run.training.seq
    sequences = device_run.shape.over(BATCH_AXES)
    text = [int(token) for token in prompt]
    rng = np.random.default_rng(seed)
    for _ in range(tokens):
        # A full window drops its first half at once, so the positions of tokens change in few steps only.
        window = text if len(text) <= seq else text[-(seq // 2 + (len(text) - seq) % max(seq // 2, 1)) :]
        padded_BT = _padded(window, sequences, seq)
        batch = jax.make_array_from_callback(padded_BT.shape, device_run.batch_sharding, padded_BT.__getitem__)
        logits = np.asarray(next_logits(params, batch, jnp.int32(len(window) - 1)))[0].astype(np.float64)
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a draw from their softmax.
        token = int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))
        text.append(token)
        yield token


def _padded(window: list[int], sequences: int, seq: int) -> np.ndarray:
    """Repeats `window`, padded with zeros, for every sequence of the batch; int32 [B, T]."""
    tokens_BT = np.zeros((sequences, seq), np.int32)
    tokens_BT[:, : len(window)] = window
    return tokens_BT

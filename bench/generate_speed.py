"""Seconds a token of `generate` against a whole forward pass of the training window for each token.

`python bench/generate_speed.py [--mesh data=2,fsdp=2,tensor=2] [--tokens 503]`. The recipe is `tiny` with 512 tokens a
sequence and random weights. The forward pass is the train step's own, compiled once; both sides run in one process, and
the ratio is that of their medians.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.comm.collectives import all_gather
from meshwright.config import MeshShape
from meshwright.data.batch import Batch
from meshwright.data.tokenizers import Bytes
from meshwright.generation.generator import Decoding, Generator
from meshwright.generation.sampling import Sampling
from meshwright.generation.source import OpenedModel, place_for_decoding
from meshwright.hardware.mesh import prepare_host
from meshwright.models.blocks.layers import no_dropout
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun, param_specs
from meshwright.step.state import BATCH_SPEC

SEQ = 512
_REPEATS = 5


def tiny_512() -> Run:
    """Returns the recipe `tiny` with 512 tokens a sequence, of bytes."""
    run = find_recipe("tiny")
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, vocab=Bytes().vocab),
        training=dataclasses.replace(run.training, seq=SEQ),
    )


def next_token_of(device_run: DeviceRun):  # type: ignore[no-untyped-def]
    """Returns the jitted `(params, tokens [B, T], position) -> token`, the most probable one after `position`."""
    model = device_run.local_model

    def next_token(params: Tree, tokens_BT: jax.Array, position: jax.Array) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(SEQ), tokens_BT.shape)
        batch = Batch(
            tokens_BT, tokens_BT, jnp.zeros_like(tokens_BT), positions_BT, jnp.ones(tokens_BT.shape)
        )
        x_BTD, _ = model.hidden(params, batch, no_dropout())
        x_BTD, table_VD = model.unembed(params, x_BTD)
        logits_BV = jnp.einsum(
            "bd,vd->bv", x_BTD[:, position], table_VD, preferred_element_type=jnp.float32
        )
        return jnp.argmax(all_gather(all_gather(logits_BV, VOCAB_AXES, 1), BATCH_AXES, 0)[0])

    everywhere = PartitionSpec()
    specs = (param_specs(device_run.layout.placements, "at_rest"), BATCH_SPEC, everywhere)
    sharded = jax.shard_map(
        next_token, mesh=device_run.mesh, in_specs=specs, out_specs=everywhere, check_vma=False
    )
    return jax.jit(sharded)


def forward_seconds(device_run: DeviceRun, params: Tree) -> float:
    """Returns the median seconds of one token by a whole forward pass."""
    tokens_BT = np.zeros((device_run.layout.shape.over(BATCH_AXES), SEQ), np.int32)
    batch = jax.make_array_from_callback(
        tokens_BT.shape, device_run.batch_sharding, tokens_BT.__getitem__
    )
    next_token, times = next_token_of(device_run), []
    for position in range(2 * _REPEATS):
        began = time.perf_counter()
        int(next_token(params, batch, jnp.int32(position)))
        times.append(time.perf_counter() - began)
    return statistics.median(times[_REPEATS:])


def cached_seconds(opened: OpenedModel, weights: str, tokens: int) -> float:
    """Returns the median seconds of one token by the decode loop."""
    generator = Generator(opened, Decoding(weights=weights, stream_every=tokens))  # type: ignore[arg-type]
    reports = [
        generator.generate(["def "], max_tokens=tokens, sampling=Sampling(temperature=0.0)).report
        for _ in "123"
    ]
    return statistics.median(1 / report.decode_tokens_per_second for report in reports[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="data=1")
    parser.add_argument("--tokens", type=int, default=500)
    given = parser.parse_args()
    shape = MeshShape.parse(given.mesh)
    prepare_host(shape.size)
    device_run = place_for_decoding(tiny_512(), shape, None)
    opened = OpenedModel(
        device_run, device_run.initial_state().params, Bytes(), (), 512, "random weights"
    )
    forward = forward_seconds(opened.device_run, opened.params)
    print(f"mesh {shape}: a forward pass for each token {1e3 * forward:.1f} ms")
    for weights in ("sharded", "gathered"):
        seconds = cached_seconds(opened, weights, given.tokens)
        print(
            f"cache, weights {weights}: {1e3 * seconds:.2f} ms, {forward / seconds:.0f} times faster"
        )


if __name__ == "__main__":
    main()

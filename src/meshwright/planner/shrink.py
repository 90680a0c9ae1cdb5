"""A small version of a run, for rehearsals: the same mesh, layout, schedule
and divisibility, a model for a laptop."""

import dataclasses
import math

from meshwright.config import Data, MeshShape
from meshwright.models.model import vocab_size
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES

_POSITIONS = 32
_BYTES = 257
"""Tokens of the bytes tokenizer."""


def shrink(run: Run, shape: MeshShape, steps: int) -> Run:
    """Returns `run` on the mesh `shape`, with the least sizes that divide
    as the real ones divide on the real mesh.

    It trains `steps` steps on the source of Python's standard library. Layers keep their remainder
    over stages, the vocabulary its padding, heads their number over `tensor` and `context`. Raises
    ConfigError where the real run does not fit its own mesh.
    """
    placed = place_run(run, run.mesh or MeshShape())
    training = placed.run.training
    parts = shape.stage * (placed.layout.stages.virtual_stages if shape.stage > 1 else 1)
    layers = len(placed.layout.spec.layers)
    layers = parts + layers % parts if parts > 1 else min(2, layers)
    # The tokenizer is bytes; what the real vocabulary lacks to be divided is kept.
    over = shape.over(VOCAB_AXES)
    vocab = _BYTES + (vocab_size(run.model) - _BYTES) % over
    model = dataclasses.replace(run.model.shrunk(shape, layers), vocab=vocab, vocab_multiple=1)
    sequence = 2 * shape.context * shape.tensor
    batch = shape.over(BATCH_AXES) * training.microbatches
    return dataclasses.replace(
        run,
        mesh=shape,
        model=model,
        fsdp_min_size=1,
        training=dataclasses.replace(
            training,
            steps=steps,
            batch=batch,
            seq=sequence * max(1, -(-_POSITIONS // sequence)),
            eval_every=0,
            eval_samples=batch,
            save_every=max(1, steps // 2),
            log_every=1,
            logits_mib=1,
            attention_block=128,
            compiler_options=(),
            max_to_keep=4,
        ),
        optimizer=dataclasses.replace(run.optimizer, warmup_steps=0),
        data=Data(tokenizer="bytes", sample=0),
        name=f"{run.name}-rehearsed",
    )


def shape_within(shape: MeshShape, most: int) -> MeshShape:
    """Returns the mesh with its largest degrees divided until it has at most `most` devices;
    split axes stay split."""
    degrees, slices = shape.degrees(), shape.slices
    while math.prod(degrees.values()) > most:
        for axis in sorted(degrees, key=lambda axis: -degrees[axis]):
            least = 2 * (slices if axis == shape.dcn_axis and slices > 1 else 1)
            prime = next(
                (p for p in (2, 3, 5, 7) if degrees[axis] % p == 0 and degrees[axis] // p >= least),
                None,
            )
            if prime is not None:
                degrees[axis] //= prime
                break
        else:
            break
    return MeshShape(**degrees, slices=slices, dcn_axis=shape.dcn_axis)

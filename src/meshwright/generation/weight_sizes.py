"""Layouts of the weights for decoding, by arithmetic on shapes: their bytes, and the run that decodes on a mesh."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import local_shape

WeightsLayout = Literal["gathered", "sharded"]
"""`sharded` keeps the layout and dtype of training and gathers each layer for each token; `gathered` gathers all of
them once, in the compute dtype."""


def weight_bytes(placed: PlacedRun, layout: WeightsLayout) -> int:
    """Returns the bytes of the weights on one device in a layout."""
    training, total = placed.run.training, 0
    for _, p, where in placed.leaves:
        if layout == "sharded":
            dtype, placement = p.stored or training.param_dtype, where.at_rest
        else:
            dtype, placement = "float32" if p.precision == "float32" else training.compute_dtype, where.in_use
        total += math.prod(local_shape(p.shape, placement, placed.shape)) * jnp.dtype(dtype).itemsize
    return total


def run_for_decoding(run: Run, shape: MeshShape) -> Run:
    """Returns a run on a mesh with a batch and a sequence length that fit it; kernels of training are left out.

    The sizes of a training step do not matter here: prompts, slots and chunks have sizes of their own.
    """
    multiple = (2 if shape.context > 1 else 1) * shape.context * shape.tensor
    longest = run.model.spec().max_seq
    training = dataclasses.replace(
        run.training,
        batch=shape.over(BATCH_AXES),
        microbatches=1,
        seq=multiple if longest is None else max(multiple, longest // multiple * multiple),
        remat="full",
        saved_layers=0,
        stage_saves="input",
        context_strategy="all_gather",
        attention_kernel="blocked",
        tensor_strategy="gather",
        gather_ahead="none",
    )
    return dataclasses.replace(run, mesh=shape, training=training)

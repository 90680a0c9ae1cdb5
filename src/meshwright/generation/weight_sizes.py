"""Layouts of the weights for decoding, by arithmetic on shapes: their bytes, and the run that decodes on a mesh."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.runs.placed_run import PlacedRun
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Param, is_low_precision
from meshwright.sharding.placement import local_shape

WeightsLayout = Literal["gathered", "sharded", "int8"]
"""`sharded` keeps the layout and dtype of training and gathers each layer for each token; `gathered` gathers all of
them once, in the compute dtype; `int8` does so too, with the matmul weights of dense layers in int8."""


def is_int8(p: Param) -> bool:
    """Returns whether the layout `int8` quantises a parameter: matmul weights of layers, those of experts excepted."""
    return is_low_precision(p) and "L" in p.dims


def weight_bytes(placed: PlacedRun, layout: WeightsLayout) -> int:
    """Returns the bytes of the weights on one device in a layout."""
    training, total = placed.run.training, 0
    for _, p, where in placed.leaves:
        if layout == "sharded":
            size = jnp.dtype(p.stored or training.param_dtype).itemsize
            total += math.prod(local_shape(p.shape, where.at_rest, placed.shape)) * size
            continue
        shape = local_shape(p.shape, where.in_use, placed.shape)
        if layout == "int8" and is_int8(p):
            total += math.prod(shape) + 4 * shape[0] * math.prod(shape[1 + p.contract :])
        else:
            kept = "float32" if p.precision == "float32" else training.compute_dtype
            total += math.prod(shape) * jnp.dtype(kept).itemsize
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

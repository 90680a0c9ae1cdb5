"""Price of prefill and decode by arithmetic: time of a token, memory, tokens per second and chip.

A decode step reads every weight and the cache of every sequence once, for one token of each sequence: it is bound by
HBM until the batch is large (scaling-book, inference.md). Its collectives are too short to overlap: all are exposed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, divisors
from meshwright.fine_tuning import FineTune
from meshwright.generation.cache import CachePlan
from meshwright.generation.weight_sizes import run_for_decoding, weight_bytes
from meshwright.hardware.chips import Chip
from meshwright.hardware.interconnect import map_axes
from meshwright.hardware.targets import Target
from meshwright.models.model import padded_vocab
from meshwright.planner.search import split_size, tensor_degrees
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.placement import local_shape


@dataclasses.dataclass(frozen=True)
class DecodePrice:
    """Predicted decoding of a batch at a context on a mesh."""

    mesh: MeshShape
    batch: int
    """Sequences, over all devices."""
    context: int
    """Tokens of each sequence that a step attends to."""
    parts: Mapping[str, float]
    """Seconds of one decode step: weights and matmuls, cache and attention, links; they add up to `seconds`."""
    prefill_seconds: float
    """Seconds to compute prompts of `context` tokens for the batch."""
    weights: float
    """Bytes of weights on a device."""
    cache: float
    """Bytes of the cache on a device."""
    logits: float
    """Bytes of the logits of a step on a device."""
    chip: Chip

    @property
    def seconds(self) -> float:
        """Seconds of one token of every sequence."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Decoded tokens per second and device."""
        return self.batch / self.seconds / self.mesh.size

    @property
    def prefill_per_second_per_chip(self) -> float:
        """Prompt tokens per second and device."""
        return self.batch * self.context / self.prefill_seconds / self.mesh.size

    @property
    def bytes(self) -> float:
        """Bytes on a device."""
        return self.weights + self.cache + self.logits

    @property
    def fits(self) -> bool:
        """Whether the heap, with its fragmentation, has room."""
        return self.bytes * self.chip.fragmentation <= self.chip.hbm_bytes

    @property
    def bound_by(self) -> str:
        """Largest part of a step."""
        return max(self.parts, key=lambda part: self.parts[part])


def price_decode(placed: PlacedRun, target: Target, *, batch: int, context: int) -> DecodePrice:
    """Predicts decoding and prefill with gathered weights.

    batch: sequences, a multiple of the devices that share the batch.
    """
    shape, chip, efficiency = placed.shape, target.chip, target.efficiency
    bandwidth, peak = chip.hbm_bandwidth * efficiency.hbm, chip.flops_bf16 * efficiency.matmul
    sequences = batch / shape.over(BATCH_AXES)
    read, flops = _weights_work(placed, sequences)
    plan = CachePlan(placed.spec, shape, batch, context, placed.run.training.compute_dtype)
    itemsize = jnp.dtype(placed.run.training.compute_dtype).itemsize
    seen = [(a, a.reach(context) / shape.context) for a in placed.spec.attention]
    cache_read = sum(a.cached_width(shape.tensor) * n for a, n in seen) * itemsize * sequences
    # A step reads the states of linear attention and writes them, whatever the context.
    cache_read += sum(2 * 4 * d.state / shape.tensor for d in placed.spec.delta) * sequences
    scores = sum(2 * a.heads / shape.tensor * a.cached_score_width * n for a, n in seen) * sequences
    causal = sum(
        2 * a.heads / shape.tensor * a.cached_score_width * a.causal_positions(context) for a in placed.spec.attention
    )
    recurrent = sum(d.flops(context) for d in placed.spec.delta) / shape.tensor * sequences * context
    prefill = (
        (flops * context + recurrent) / peak
        + causal * sequences * context / shape.context / (chip.flops_bf16 * efficiency.attention)
        + _links_seconds(placed, target, sequences, context)
    )
    return DecodePrice(
        mesh=shape,
        batch=batch,
        context=context,
        parts={
            "weights": max(read / bandwidth, flops / peak),
            "cache": max(cache_read / bandwidth, scores / (chip.flops_bf16 * efficiency.attention)),
            "links": _links_seconds(placed, target, sequences, 1),
        },
        prefill_seconds=prefill,
        weights=weight_bytes(placed, "gathered"),
        cache=plan.bytes_per_device,
        logits=sequences * padded_vocab(placed.run.model) * 4,
        chip=chip,
    )


def _weights_work(placed: PlacedRun, sequences: float) -> tuple[float, float]:
    """Bytes of weights read in a decode step on a device, of experts those that some token uses, and FLOPs."""
    shape, read, flops = placed.shape, 0.0, 0.0
    rows = sequences / shape.context
    experts = {layer.stack: layer.experts for layer in placed.spec.layers}
    for path, p, where in placed.leaves:
        if "L" not in p.dims and path != placed.spec.embedding:
            continue  # a table that is looked up, and norms
        elements = math.prod(local_shape(p.shape, where.in_use, shape))
        size = 4 if p.precision == "float32" else jnp.dtype(placed.run.training.compute_dtype).itemsize
        share = 1.0
        expert = experts.get(path.split(".")[0])
        if "E" in p.dims and expert is not None:
            used = expert.experts_per_token / expert.experts
            share = 1 - (1 - used) ** max(1.0, rows * shape.expert)
            # A device computes its experts for the tokens of all devices along `expert`.
            flops += 2 * rows * shape.expert * used * elements
        elif p.role is not None or path == placed.spec.embedding:
            flops += 2 * (rows if "L" in p.dims else sequences) * elements
        read += elements * size * share
    return read, flops


def _links_seconds(placed: PlacedRun, target: Target, sequences: float, tokens: int) -> float:
    """Seconds of the collectives of one step of `tokens` tokens of each sequence, none of them overlapped."""
    shape, spec, mapping = placed.shape, placed.spec, map_axes(placed.shape, target)
    size = jnp.dtype(placed.run.training.compute_dtype).itemsize
    layers, residual = len(spec.layers), sequences * tokens / shape.context * spec.width * size
    total = 0.0

    def add(kind: str, axes: tuple[str, ...], payload: float, count: float) -> None:
        nonlocal total
        path = mapping.route(axes)
        if path is not None:
            total += count * path.seconds(kind, payload)

    add("all-gather", ("tensor",), residual, 2 * layers + 1)
    add("reduce-scatter", ("tensor",), residual, 2 * layers + 1)
    add("all-gather", ("tensor",), sequences * padded_vocab(placed.run.model) * 4, 1)
    for a in spec.attention:
        heads, rows, key = a.heads / shape.tensor, sequences * tokens, a.cached_heads[1]
        add("all-gather", ("context",), rows * size * heads * key, 1)
        add("all-gather", ("context",), rows * size * a.cached_width(shape.tensor), 1)
        add("reduce-scatter", ("context",), rows * 4 * heads * (a.cached_score_width - key), 1)
        add("all-reduce", ("context",), sequences * tokens * heads * 4, 2)
    for layer in spec.layers:
        if layer.experts is not None:
            add("all-to-all", ("expert",), residual * layer.experts.experts_per_token, 2)
    return total


def decode_meshes(run: Run, target: Target) -> Iterator[MeshShape]:
    """Yields meshes of `data`, `tensor`, `expert` and `context` over all devices; the weights are gathered once."""
    node = 64 if target.chip.on_torus else target.topology[-1]
    for tensor in tensor_degrees(run):
        if tensor > node or target.devices % tensor:
            continue
        for expert in divisors(split_size(run, "expert")) if any(la.experts for la in run.model.spec().layers) else [1]:
            for context in (1, 2, 4, 8):
                data, rest = divmod(target.devices // tensor, expert * context)
                if not rest:
                    slices = target.slices if data % target.slices == 0 else 1
                    yield MeshShape(data=data, expert=expert, context=context, tensor=tensor, slices=slices)


def best_decode(run: Run, target: Target, *, batches: Sequence[int], contexts: Sequence[int]) -> list[DecodePrice]:
    """Returns the mesh with the most tokens per second for each batch and context; those that fit before others.

    Batches are rounded up to what the mesh divides. Raises ConfigError where no mesh divides the model.
    """
    placed = []
    merged = dataclasses.replace(run, finetune=FineTune())  # adapters are merged before weights are laid out
    for shape in decode_meshes(run, target):
        try:
            placed.append(place_run(run_for_decoding(merged, shape), shape))
        except ConfigError:
            continue
    if not placed:
        raise ConfigError(f"decoding {run.name} on {target}", "no mesh divides the model", "another number of chips")
    found = []
    for context in contexts:
        for batch in batches:
            prices = [price_decode(p, target, batch=_rounded(batch, p.shape), context=context) for p in placed]
            # Padding sequences are no tokens: a mesh that has to add many serves few.
            found.append(max(prices, key=lambda price: (price.fits, min(batch, price.batch) / price.seconds)))
    return found


def _rounded(batch: int, shape: MeshShape) -> int:
    share = shape.over(BATCH_AXES)
    return math.ceil(batch / share) * share

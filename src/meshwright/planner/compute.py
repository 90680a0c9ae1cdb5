"""Seconds that one device computes for a microbatch,
by pass and by the resource that bounds them."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from meshwright.hardware.chips import Efficiency
from meshwright.hardware.targets import Target
from meshwright.planner.attention import AttentionKernel, attention_kernel
from meshwright.planner.memory_model import (
    kept_bytes,
    param_bytes,
    rounded_elements,
    sharded_elements,
)
from meshwright.planner.physics import MATMUL_TILES, PHYSICS, TILE_REUSE, Physics
from meshwright.planner.work import RECURRENCE, LowPrecision, Matmul, Work, low_precision
from meshwright.runs.settle import Settled

PASSES = ("forward", "recomputation", "backward")
ATTENTION_HALF, FEED_FORWARD_HALF = "attention half", "feed-forward half"
"""Halves of a layer."""
_HALF_OF_ROLE = {
    "qkv": ATTENTION_HALF,
    "attention_out": ATTENTION_HALF,
    "projection": ATTENTION_HALF,
    RECURRENCE: ATTENTION_HALF,
    "ffn_in": FEED_FORWARD_HALF,
    "ffn_out": FEED_FORWARD_HALF,
    "expert_latent": FEED_FORWARD_HALF,
    "router": FEED_FORWARD_HALF,
}
"""Half of a layer that has the matmuls of a role."""


class MatmulSeconds(NamedTuple):
    """Seconds of a matmul by what may bound it; it takes the longer."""

    compute: float
    """At the rate of the matrix unit."""
    memory: float
    """Of reading its operands from HBM and writing its result."""


def matmul_seconds(m: Matmul, target: Target) -> MatmulSeconds:
    """Returns the seconds of a matmul at the matrix unit's rate,
    and those of its bytes at the HBM's.

    compute = FLOPs / (peak * Efficiency.matmul * fraction of its shape)
    memory = bytes / (HBM bandwidth * Efficiency.hbm)
    """
    chip = target.chip
    efficiency = target.efficiency
    peak: float = getattr(chip, f"flops_{m.rate}")
    rate = peak * efficiency.matmul
    # Rows of a batch of products are those of as many groups, each with an operand of its own.
    together = m.groups or (m.batch if m.batch > 1 else 0)
    rows = m.m if m.groups else m.m * m.batch
    rate *= shape_efficiency(rows, m.k, m.n, efficiency, chip.multiprocessors, together)
    # The groups of a wrapped model's product are a batch dimension, of equal rows.
    if m.groups and m.role != "projection":
        rate *= efficiency.grouped_matmul
    return MatmulSeconds(m.flops / rate, m.bytes(2) / (chip.hbm_bandwidth * efficiency.hbm))


def shape_efficiency(
    m: float,
    k: float,
    n: float,
    efficiency: Efficiency,
    multiprocessors: int = 0,
    groups: float = 0,
) -> float:
    """Returns the fraction of a large matmul's rate that [m, k] x [k, n] reaches.

    multiprocessors: of a GPU; 0 on a TPU.
    groups: experts that share the m rows, 0 where all rows meet one weight.
    """
    rows = m / max(1, groups)
    if multiprocessors:
        filled = _filled_waves(rows, n, multiprocessors, max(1, groups))
        # The pipeline of a tile fills along K.
        filled *= k / (k + efficiency.tile)
        # Rows of other than 16 bytes, 8 elements, are loaded in shorter pieces.
        filled *= math.sqrt(math.gcd(int(n), 8) / 8)
    else:
        filled = _filled_tiles(rows, k, n, efficiency.tile)
    return max(0.02, filled)


def _filled_tiles(rows: float, k: float, n: float, tile: int) -> float:
    """Returns the fraction of a TPU's rate: whole tiles along K and N,
    and a start along each dimension."""
    started = k / (k + tile)
    started *= rows / (rows + tile) * (n / (n + tile))
    return _filled(k, tile) * _filled(n, tile) * started


def _filled_waves(rows: float, n: float, multiprocessors: int, groups: float) -> float:
    """Returns the fraction of a GPU's rate with the fastest size of tiles.

    Each multiprocessor computes a tile of the result at a time, all of them in waves, of which the
    last is half full on average. A tile of a x b loads a + b operands for a * b products, so small
    tiles are slower:

        rate = full waves * filled tiles * (1 + r/128 + r/256) / (1 + r/a + r/b),  r = TILE_REUSE
    """
    largest = 1 + TILE_REUSE / 128 + TILE_REUSE / 256
    best = 0.0
    for tile_rows, tile_columns in MATMUL_TILES:
        tiles = groups * -(-rows // tile_rows) * -(-n // tile_columns)
        waves = tiles / multiprocessors
        used = min(waves, waves / (waves + 0.5)) * _filled(rows, tile_rows)
        used *= _filled(n, tile_columns)
        loading = 1 + TILE_REUSE / tile_rows + TILE_REUSE / tile_columns
        best = max(best, used * largest / loading)
    return best


def _filled(size: float, tile: int) -> float:
    """Returns the fraction of whole tiles along a dimension that it fills."""
    return size / (-(-size // tile) * tile)


class Product(NamedTuple):
    """A matmul with its seconds, forward and backward."""

    matmul: Matmul
    forward: MatmulSeconds
    gradients: tuple[MatmulSeconds, ...]
    """For its input, and unless it is frozen for its weight."""

    def of_pass(self, name: str) -> tuple[MatmulSeconds, ...]:
        """Returns the seconds of each product of a pass."""
        return self.gradients if name == "backward" else (self.forward,)


def price_product(matmul: Matmul, target: Target, expert_rate: str | None = None) -> Product:
    """Prices a matmul and its gradients. expert_rate: peak that experts run at;
    None keeps their own."""
    rated = matmul
    if matmul.groups and expert_rate:
        rated = dataclasses.replace(matmul, rate=expert_rate)
    gradients = tuple(matmul_seconds(gradient, target) for gradient in rated.gradients)
    return Product(matmul, matmul_seconds(rated, target), gradients)


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass over a microbatch."""

    matmul: float
    attention: float
    elementwise: float
    operands: float
    """Of `matmul`, products that the HBM traffic of their operands bounds."""
    scores: float
    """Of `attention`, where the HBM traffic of scores bounds it."""

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        return self.matmul + self.attention + self.elementwise


@dataclasses.dataclass(frozen=True)
class Computation:
    """Computation of a microbatch on a device, priced by pass and by what it waits for.

        matmul        the largest of FLOPs / rate, operands / HBM and launches, for each product
        attention     the largest of FLOPs / rate, scores / HBM and launches
        elementwise   bytes / HBM of the residual stream, hidden features, attention by chunks,
                      quantisation and sorting

    It prices this package's step.
    A subclass with other properties prices a step that is carried out otherwise.
    """

    settled: Settled
    work: Work
    recomputed: frozenset[str]
    """Roles of the products that the backward pass computes again;
    `scores` are those of attention."""
    target: Target
    physics: Physics = PHYSICS

    @functools.cached_property
    def passes(self) -> dict[str, PassSeconds]:
        """Seconds of each pass over a microbatch, without the unembedding."""
        return {name: self._pass_seconds(name) for name in PASSES}

    @functools.cached_property
    def on_gpu(self) -> bool:
        """Whether kernels are launched one by one."""
        return not self.settled.machine.on_tpu

    @functools.cached_property
    def launch(self) -> float:
        """Seconds that a kernel takes at least."""
        return self.physics.gpu_launch_seconds if self.on_gpu else 0.0

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes of HBM per second."""
        return self.target.chip.hbm_bandwidth * self.target.efficiency.hbm

    # How this package carries out a step.

    @functools.cached_property
    def kernel(self) -> AttentionKernel:
        """Kernel of attention."""
        return attention_kernel(self.settled, self.physics)

    @functools.cached_property
    def low(self) -> LowPrecision | None:
        """Low precision of experts and of what is quantised;
        None where experts stay in the compute dtype."""
        return low_precision(self.settled) if self.settled.low_precision_experts else None

    @functools.cached_property
    def quantise_bytes(self) -> int:
        """HBM bytes that quantising an element moves."""
        return self.physics.quantise_bytes

    @functools.cached_property
    def quantised_gradients(self) -> float:
        """Gradients of dense products that a backward pass quantises."""
        return self.work.quantised_gradients

    @functools.cached_property
    def expert_gradient_quantisations(self) -> int:
        """Times that a gradient of experts is quantised: for each of its two products."""
        return 2

    @functools.cached_property
    def expert_input_quantisations(self) -> float:
        """Times that an input of gate or up is quantised as a row of a buffer: rows are quantised
        before they are sent, which `Work.quantised_inputs` counts."""
        return 0.0

    @functools.cached_property
    def buffered(self) -> float:
        """Rows of the experts' buffers over rows that are sent: this package's experts compute
        all of a buffer."""
        sent = self.work.expert_tokens * self.work.experts
        if not sent:
            return 1.0
        return max(1.0, self.work.expert_rows / sent)

    @functools.cached_property
    def residual_shards(self) -> int:
        """Devices over which the residual stream of a token is split (sequence parallelism)."""
        return self.settled.layout.shape.tensor

    @functools.cached_property
    def chunk_bytes(self) -> Mapping[str, float]:
        """HBM bytes per query element, where attention of a split sequence is computed
        by pairs of chunks."""
        if not self.on_gpu or self.settled.sequence.groups == 1 or self.kernel.score_bytes:
            return {}
        return self.physics.chunk_bytes.get(self.settled.run.training.context_strategy, {})

    @functools.cached_property
    def logit_passes(self) -> int:
        """Forward passes of the unembedding: the backward pass computes logits again, a chunk
        at a time."""
        if self.settled.layout.spec.trains_only_indexers:
            return 1
        preferences = self.settled.run.finetune.objective == "preferences"
        return 3 if preferences else 2

    @functools.cached_property
    def copied_bytes(self) -> dict[str, float]:
        """HBM bytes of a microbatch's weights, gradients
        and kept activations besides their matmuls, by pass.

        Cut out of its stack, a layer's weights are read, converted and written, those that are
        rounded already in a byte each. A pipeline stage copies what it keeps into the slot of the
        microbatch, and out of it.
        """
        placed = self.settled
        summed = self.summed_bytes
        if not self.work.layers:
            return {"backward": summed}
        training = placed.run.training
        param = jnp.dtype(training.param_dtype).itemsize
        compute = jnp.dtype(training.compute_dtype).itemsize
        reduce = jnp.dtype(training.reduce_dtype).itemsize
        elements, _ = sharded_elements(placed.layout)

        weights = param_bytes(placed.layout, training.param_dtype) + compute * elements
        weights -= (param + compute - 2) * rounded_elements(self.settled)
        kept = 2.0 * kept_bytes(placed, self.work)
        # The new gradient is read in the compute dtype to be added to the sum.
        added = summed * (1 + compute / (2 * reduce))
        return {"forward": weights + kept, "backward": weights + kept + added}

    @functools.cached_property
    def summed_bytes(self) -> float:
        """HBM bytes of the sum of gradients over microbatches,
        which each of them reads and writes."""
        training = self.settled.run.training
        if training.microbatches == 1 and self.settled.layout.shape.stage == 1:
            return 0.0
        _, trained = sharded_elements(self.settled.layout)
        return 2.0 * jnp.dtype(training.reduce_dtype).itemsize * trained

    # Seconds of a pass.

    def _pass_seconds(self, name: str) -> PassSeconds:
        matmul, operands = self._matmul_seconds(name)
        attention, scores = self._attention_seconds(name)
        calls = self.work.layers * self.kernel.kernels * math.ceil(self._attention_passes(name))
        elementwise = self._elementwise_bytes(name) / self.bandwidth
        copies = self.work.halves / 2 * self._residual_copies(name)
        times = self._times(name)
        copied = self.copied_bytes.get(name, 0.0) / self.bandwidth
        return PassSeconds(
            matmul=matmul * times,
            attention=max(attention, scores, self.launch * calls) * times,
            elementwise=max(elementwise, self.launch * copies) * times + copied,
            operands=operands * times,
            scores=scores * times if scores > attention else 0.0,
        )

    def _is_without_gradients(self, name: str) -> bool:
        """Whether only indexers take part in a pass: their warm-up trains nothing else."""
        return name != "forward" and self.settled.layout.spec.trains_only_indexers

    def _recomputes_nothing(self, name: str) -> bool:
        """Whether a pass is a recomputation of at most the scores of attention."""
        return name == "recomputation" and not self.recomputed - {"scores"}

    def _matmul_seconds(self, name: str) -> tuple[float, float]:
        """Returns the seconds of all products of a pass, and those of them that operands bound."""
        total = 0.0
        bound_by_operands = 0.0
        for product in self._products_of(name):
            total += self._product_seconds(product, name)
            for seconds in product.of_pass(name):
                if seconds.memory > seconds.compute:
                    bound_by_operands += seconds.memory
        return total, bound_by_operands

    def half_seconds(self, name: str) -> dict[str, float]:
        """Returns the seconds of the products of a pass by half of a layer."""
        times = self._times(name)
        total = {ATTENTION_HALF: 0.0, FEED_FORWARD_HALF: 0.0}
        for product in self._products_of(name):
            half = _HALF_OF_ROLE.get(product.matmul.role)
            if half is not None:
                total[half] += times * self._product_seconds(product, name)
        return total

    def _times(self, name: str) -> float:
        """Returns how often a pass takes place: the reference model
        of preferences is one more forward pass."""
        preferences = self.settled.run.finetune.objective == "preferences"
        return 2.0 if preferences and name == "forward" else 1.0

    def _products_of(self, name: str) -> list[Product]:
        """Returns the products that a pass computes."""
        if self._is_without_gradients(name):
            return []
        if name != "recomputation":
            return self._products
        # Recurrences are computed again from their inputs, whatever the policy keeps.
        recomputed = {*self.recomputed, RECURRENCE}
        return [product for product in self._products if product.matmul.role in recomputed]

    def _product_seconds(self, product: Product, name: str) -> float:
        """Returns the seconds of a product in a pass."""
        launches = product.matmul.count / product.matmul.batch * self.launch
        total = 0.0
        for seconds in product.of_pass(name):
            total += max(seconds.compute, seconds.memory, launches)
        return total

    @functools.cached_property
    def _products(self) -> list[Product]:
        """Products of all layers with their seconds."""
        expert_rate = self.low.rate if self.low else None
        return [price_product(m, self.target, expert_rate) for m in self.work.matmuls]

    def _attention_seconds(self, name: str) -> tuple[float, float]:
        """Returns the seconds of attention by its FLOPs,
        and by the scores that pass through HBM."""
        passes = self._attention_passes(name)
        rate = self.kernel.flops_per_second.get(name)
        if rate is None:
            fraction: float = getattr(self.target.efficiency, self.kernel.rate)
            rate = self.target.chip.flops_bf16 * self.kernel.speed * fraction
        index_flops, index_scores = self._index_work(name)
        moved = index_scores * self.kernel.index_bytes.get(name, 0)
        if passes:
            moved += self.work.scores * self.kernel.score_bytes.get(name, 0)
        scores = moved / self.bandwidth
        if self.on_gpu:
            scores *= self._elementwise_factor
        return (passes * self.work.attention + index_flops) / rate, scores

    def _index_work(self, name: str) -> tuple[float, float]:
        """Returns the FLOPs and scores of indexers in a pass.
        No remat policy but that of everything keeps any."""
        indexers = self.work.indexers
        if name == "backward":
            return indexers.backward_flops, indexers.backward_scores
        if name == "recomputation" and not self.recomputed - {"scores"}:
            return 0.0, 0.0
        return indexers.flops, indexers.scores

    def _attention_passes(self, name: str) -> float:
        """Returns how often a pass computes attention, in forward passes of it."""
        if name == "forward":
            return 1.0
        if self._is_without_gradients(name):
            return 0.0
        if name == "backward":
            return self.kernel.backward
        needed = {"attention", "scores"} if self.kernel.keeps_scores else {"attention"}
        return 1.0 if needed & self.recomputed else 0.0

    @functools.cached_property
    def _elementwise_factor(self) -> float:
        """HBM traffic of elementwise kernels over what is counted."""
        if self.on_gpu:
            return self.physics.gpu_elementwise
        return self.physics.tpu_elementwise

    def _elementwise_bytes(self, name: str) -> float:
        """Returns the HBM bytes that a pass moves besides matmuls and scores."""
        if self._is_without_gradients(name):
            return 0.0
        moved = self._residual_bytes(name)
        moved += self._hidden_bytes(name)
        moved += self._chunk_bytes(name)
        moved *= self._elementwise_factor
        if self._recomputes_nothing(name):
            return moved
        moved += self.quantise_bytes * self._quantised_elements[name]
        return moved + self._sorting_bytes(name)

    def _residual_copies(self, name: str) -> float:
        """Returns how often a pass reads or writes the residual stream of a layer
        with two halves."""
        if self._recomputes_nothing(name) or self._is_without_gradients(name):
            return 0
        return self.physics.residual_copies[name]

    def _residual_bytes(self, name: str) -> float:
        """Returns the bytes of norms, sums and rotations;
        of a wrapped loss what its backward pass reads."""
        work = self.work
        residual = work.tokens * work.width * 2 * work.halves / 2 / self.residual_shards
        kept = 0.0 if name == "recomputation" else work.kept_bytes
        return self._residual_copies(name) * residual + kept

    def _hidden_bytes(self, name: str) -> float:
        """Returns the bytes of the feed-forward's activation function,
        which TPUs fuse into matmuls."""
        if not self.on_gpu:
            return 0.0
        if name == "recomputation" and "ffn_in" not in self.recomputed:
            return 0.0
        return self.physics.gpu_hidden_copies[name] * 2 * self._hidden_elements

    @functools.cached_property
    def _hidden_elements(self) -> float:
        """Elements of the feed-forward's hidden features, of all layers."""
        elements = 0.0
        for m in self.work.matmuls:
            if m.role == "ffn_in":
                elements += m.m * m.n * m.count * (self.buffered if m.groups else 1)
        return elements

    def _chunk_bytes(self, name: str) -> float:
        """Returns the bytes of the sums of attention over chunks of keys."""
        if not self.chunk_bytes or not self._attention_passes(name):
            return 0.0
        work = self.work
        queries = self.settled.layout.shape.context * work.tokens * work.layers * work.widths.query
        direction = "backward" if name == "backward" else "forward"
        return self.chunk_bytes[direction] * queries

    def _sorting_bytes(self, name: str) -> float:
        """Returns the bytes of sorting, scaling and summing the rows of experts."""
        work = self.work
        rows = work.expert_tokens * work.experts
        # Half of the copies are of rows as they are sent, the other half of buffers.
        rows *= work.expert_layers * (1 + self.buffered) / 2
        return self.physics.sorting_copies[name] * 2 * rows * work.width * self.physics.sorting

    @functools.cached_property
    def _quantised_elements(self) -> dict[str, float]:
        """Elements that each pass quantises: inputs of dense matmuls and of experts,
        and their gradients."""
        inputs = self.work.quantised_inputs
        recomputed = 0.0 if self._recomputes_nothing("recomputation") else inputs
        gradients = self.quantised_gradients
        experts = [m for m in self.work.matmuls if m.groups]
        for m in experts if self.low else ():
            times = self.expert_input_quantisations if m.role == "ffn_in" else 1.0
            inputs += self.buffered * times * m.m * m.k * m.count
            times = self.expert_gradient_quantisations
            gradients += self.buffered * times * m.m * m.n * m.count
        return {"forward": inputs, "recomputation": recomputed, "backward": gradients}

    # The loss.

    @functools.cached_property
    def unembedding_seconds(self) -> float:
        """Seconds of a microbatch's logits, their loss and their gradients,
        which all pipeline stages share."""
        return self.logit_seconds(self.work.unembedding)

    def logit_seconds(self, unembedding: Matmul) -> float:
        """Returns the seconds of a microbatch's logits by one matmul,
        of their loss and of their gradients."""
        if not unembedding.n:
            return 0.0
        if self.settled.run.finetune.method == "lora":  # a frozen table has no gradient
            unembedding = dataclasses.replace(unembedding, frozen=True)
        product = price_product(unembedding, self.target)
        seconds = 0.0
        for _ in range(self.logit_passes):
            seconds += product.forward.compute
        for gradient in () if self._is_without_gradients("backward") else product.gradients:
            seconds += gradient.compute
        if not self.target.chip.on_torus:
            seconds += self.physics.gpu_loss_bytes * unembedding.m * unembedding.n / self.bandwidth
        return seconds


class WithoutCopies(Computation):
    """Computation of a step that copies no weights: what is left of it on any mesh and schedule."""

    @functools.cached_property
    def copied_bytes(self) -> dict[str, float]:
        """HBM bytes of the sum of gradients only."""
        return {"backward": self.summed_bytes}

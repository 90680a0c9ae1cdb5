"""Memory of one device, by category, in bytes: arithmetic over parameter descriptions.

Activations are what the remat policy keeps of each layer (Korthikanti et al. 2022,
arXiv:2205.05198, section 4), for the microbatches in flight on a stage. The rest is what a layer
needs while it runs.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshwright.config import Optimizer
from meshwright.models.loss import chunk_tokens
from meshwright.models.remat import (
    ATTN_LSE,
    ATTN_OUT,
    ATTN_RESIDUAL,
    FFN_HIDDEN,
    LAYER_INPUT,
    QKV,
    REMAT_POLICIES,
)
from meshwright.planner.optimizer import (
    StoredArray,
    state_arrays,
    state_bytes,
    state_of,
    stored_array,
    update_temporaries,
)
from meshwright.planner.physics import PHYSICS, Physics
from meshwright.planner.work import Work, low_precision
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.runs.settle import Settled
from meshwright.sharding.placement import axes_of, local_shape, replica_parts


def memory_by_category(settled: Settled, work: Work, in_flight: float) -> dict[str, float]:
    """Returns the bytes of a device by category, in a step of this package.

    in_flight: microbatches (of one virtual stage each) whose inputs a stage holds at once;
    1 without a pipeline.
    """
    return StepMemory(settled, work, in_flight).by_category()


@dataclasses.dataclass(frozen=True)
class SavedInputs:
    """Form in which inputs of matmuls are saved where the remat policy saves everything."""

    gathered: bool = True
    """Whole over `tensor`, as matmuls read them; else as sequence parallelism splits them."""
    projected: bool = True
    """Whether the attention output is saved as its projection reads it, besides the
    kernel's own."""
    in_one_byte: bool = False
    """Whether they are saved in low precision."""


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Live bytes of a device at the peak of a train step.

    Two moments can be the peak: a layer in the backward pass, or the loss.

        always            parameters, optimizer state, gradients
        of a microbatch   activations, and gathered weights where they are saved
        at the peak       a layer:  its weights, their gradients, its own arrays
                          the loss: its table, the gradient of the table, two arrays of logits

    It describes this package's step.
    A subclass with other properties prices a step that is carried out otherwise.
    """

    settled: Settled
    work: Work
    in_flight: float
    """Microbatches, of one virtual stage each, whose inputs a stage holds at once;
    1 without a pipeline."""
    physics: Physics = PHYSICS

    def by_category(self) -> dict[str, float]:
        """Returns the bytes by category."""
        placed = self.settled
        if not self.work.layers:
            return _memory_of_loss(placed, self.work)
        layer = self.layer
        loss = self.loss
        activations = self.activations
        weights = self.gathered_weights
        result = {
            "parameters": param_bytes(placed.layout, placed.run.training.param_dtype),
            "optimizer state": state_bytes(placed),
            "gradients": self.gradients + self.late_gradients,
            "activations": activations,
            "gathered weights": weights,
            "one layer" if layer > loss else "loss and its table": max(layer, loss),
        }
        # The update comes when activations have gone: it counts where it needs more than they did.
        update = update_temporaries(placed) - (activations + weights + max(layer, loss))
        if update > 0:
            result["optimizer update"] = update
        return result

    @functools.cached_property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return jnp.dtype(self.settled.run.training.compute_dtype).itemsize

    @functools.cached_property
    def is_frozen(self) -> bool:
        """Whether adapters are trained, and weights have no gradients."""
        return self.settled.run.finetune.method == "lora"

    @functools.cached_property
    def sums_microbatches(self) -> bool:
        """Whether gradients of several microbatches are added up."""
        return self.settled.run.training.microbatches > 1 or self.settled.layout.shape.stage > 1

    @functools.cached_property
    def kept_parts(self) -> float:
        """Parts of a pipeline stage whose activations it keeps, besides the one that runs."""
        return self.in_flight if keeps_stages(self.settled) else 0.0

    # How this package carries out a step.

    @functools.cached_property
    def saved_inputs(self) -> SavedInputs:
        """Form in which inputs of matmuls are saved."""
        return SavedInputs()

    @functools.cached_property
    def keeps_weights(self) -> bool:
        """Whether gathered weights are saved for the backward pass,
        as a policy does that saves everything."""
        saves_everything = REMAT_POLICIES[self.settled.run.training.remat].saved is None
        return saves_everything and not computes_weights_again(self.settled)

    @functools.cached_property
    def gradients(self) -> float:
        """Bytes of the gradients that a device keeps: in float32 while they are added up."""
        training = self.settled.run.training
        _, trained = sharded_elements(self.settled.layout)
        if self.sums_microbatches:
            return trained * 4
        param = jnp.dtype(training.param_dtype).itemsize
        return trained * max(param, jnp.dtype(training.reduce_dtype).itemsize)

    @functools.cached_property
    def late_gradients(self) -> float:
        """Bytes of the gradients of one microbatch that are there before they are added
        to the sum."""
        if not self.sums_microbatches:
            return 0.0
        param = jnp.dtype(self.settled.run.training.param_dtype).itemsize
        return param * _added_late(self.settled)

    @functools.cached_property
    def gathered_weights(self) -> float:
        """Bytes of gathered weights that are saved,
        and of those that a pipeline rounds once for all ticks."""
        weights = 0.0
        if self.keeps_weights:
            _, all_layers = _gathered_elements(self.settled.layout)
            all_layers *= (1 + self.kept_parts) / self.settled.layout.stages.virtual_stages
            weights = self.compute_bytes * all_layers
        return weights + rounded_elements(self.settled)

    @functools.cached_property
    def activations(self) -> float:
        """Bytes that the remat policy saves.

        One part of a stage runs at a time; without a pipeline it is the model.
        Rows without a layer are saved too.
        """
        running = self._layer_saves(self.work) * _rows(self.settled.layout)
        kept = 0.0
        if self.kept_parts:
            kept = self.kept_parts * _bytes_of_part(self.settled, self.work, self._layer_saves)
        return running + kept + self.stage_inputs

    def _layer_saves(self, work: Work) -> float:
        """Returns the bytes that the remat policy saves of a layer."""
        layer = _saved_bytes(self.settled, work, self.saved_inputs)
        if REMAT_POLICIES[self.settled.run.training.remat].saved is None:
            layer += score_bytes(self.settled, work, _KEPT_SCORES)
        return layer

    @functools.cached_property
    def stage_inputs(self) -> float:
        """Bytes of the inputs of the microbatches that a pipeline stage holds."""
        shape = self.settled.layout.shape
        if shape.stage == 1:
            return 0.0
        tokens = self.in_flight * self.work.tokens / shape.tensor
        return tokens * self.work.width * self.compute_bytes

    @functools.cached_property
    def loss(self) -> float:
        """Bytes of the loss: its table, the gradient of the table, logits and their gradient."""
        work = self.work
        chunk = chunk_tokens(
            int(work.tokens), work.unembedding.n, self.settled.run.training.logits_mib
        )
        gradient = 0 if self.is_frozen else 4
        table = work.unembedding.n * work.width * (self.compute_bytes + gradient)
        return table + 2.0 * (chunk * work.unembedding.n) * self.physics.logit_bytes

    @functools.cached_property
    def layer(self) -> float:
        """Bytes of a layer in the backward pass."""
        # Offloaded activations come back for one layer and, ahead of time, for the next.
        from_host = 2 * offloaded_bytes(self.settled, self.work) / max(1.0, self.work.layers)
        # Of a scan that gathers ahead: weights that the layer below begins with, last gradients
        # of the layer above.
        carried = self.compute_bytes * _carried_elements(self.settled)
        inner = layer_bytes(self.settled, self.work, self.physics)
        return from_host + self.layer_weights + carried + inner + self.tied_gradient

    @functools.cached_property
    def layer_weights(self) -> float:
        """Bytes of a layer's gathered weights, of those of the next, and of their gradients."""
        one_layer, _ = _gathered_elements(self.settled.layout)
        weights = one_layer * 2 * self.compute_bytes
        if self.is_frozen:
            return weights
        reduce = jnp.dtype(self.settled.run.training.reduce_dtype).itemsize
        if self.settled.machine.on_tpu:
            # Four programs for v5p have two of the three gradients of a layer's experts at once: so
            # the plan is 0 to 8 % above them, and 2 to 13 % with all three (docs/log.md). Programs
            # for GPUs are on both sides of the plan with all three.
            return weights + (one_layer - _first_reduced_elements(self.settled.layout)) * reduce
        # The layers of a period are one body of the loop: GPU programs reduce the gradients
        # of all of them at its end.
        return weights + _period_elements(self.settled.layout) * reduce

    @functools.cached_property
    def tied_gradient(self) -> float:
        """Bytes of a tied table's gradient,
        which GPU programs keep until the embedding's is added to it, at the end."""
        if (
            self.is_frozen
            or self.settled.machine.on_tpu
            or self.settled.layout.spec.embedding != "embed"
        ):
            return 0.0
        return 4 * self.work.unembedding.n * self.work.width


def _memory_of_loss(placed: PlacedRun, work: Work) -> dict[str, float]:
    """Returns the bytes by category where a loss begins its backward pass,
    with all of its weights gathered."""
    training, shape = placed.run.training, placed.layout.shape
    compute, reduce = (
        jnp.dtype(training.compute_dtype).itemsize,
        jnp.dtype(training.reduce_dtype).itemsize,
    )
    gathered = [
        (
            p.size / shape.over(axes_of(where.in_use)),
            compute if p.precision == "compute" else jnp.dtype(p.precision).itemsize,
        )
        for _, p, where in placed.layout.leaves
        if where.at_rest != where.in_use
    ]
    return {
        "parameters": param_bytes(placed.layout, training.param_dtype),
        "optimizer state": float(state_bytes(placed)),
        # float32 at rest, and in the type of the reduction while they are scattered
        "gradients": 4.0 * sharded_elements(placed.layout)[1]
        + reduce * max((n for n, _ in gathered), default=0.0),
        "gathered weights": sum(n * itemsize for n, itemsize in gathered),
        "activations": 0.0 if training.remat == "full" else work.kept_bytes,
        "batch and variables": work.input_bytes,
    }


class ScoreArrays(NamedTuple):
    """float32 arrays of one score for each pair of tokens."""

    per_head: float
    per_index_head: float


_LIVE_SCORES = {
    "frozen": ScoreArrays(2, 2),
    "warmup": ScoreArrays(4, 4),
    "sparse": ScoreArrays(3, 4),
}
"""Arrays of scores that a layer has at once, by stage of its indexer. Compiled for CPUs, which add
2.0 per head and 2.0 per head of the indexer, 4.0 and 4.0, and 2.6 and 4.0 (docs/log.md)."""
_KEPT_SCORES = {
    "frozen": ScoreArrays(2, 0),
    "warmup": ScoreArrays(0, 1),
    "sparse": ScoreArrays(2, 1),
}
"""Arrays of scores that each layer keeps where remat saves everything."""


def score_bytes(settled: Settled, work: Work, arrays: Mapping[str, ScoreArrays]) -> float:
    """Returns the bytes of a layer's scores on a device, of a model with an indexer; 0 for others.

        bytes = tokens * T * 4 * (arrays per head * heads + arrays per index head * index heads)

    Reference attention has them where keys are chosen, and the loss of an indexer that is trained.
    Every device of `tensor` has all heads of the indexer.
    """
    seq = settled.run.training.seq
    pairs = work.tokens * seq
    most = 0.0
    for attention in settled.layout.spec.attention:
        indexer = attention.indexer
        if indexer is None:
            continue
        counted = arrays[indexer.training]
        scores = counted.per_head * attention.heads / settled.layout.shape.tensor
        scores += counted.per_index_head * indexer.heads
        most = max(most, scores)
    return 4.0 * pairs * most


def layer_bytes(settled: Settled, work: Work, physics: Physics = PHYSICS) -> float:
    """Returns the bytes of a layer's own arrays while it runs, without its weights."""
    compute = jnp.dtype(settled.run.training.compute_dtype).itemsize
    # Norms of queries and keys, and of the halves' outputs, read them as they were before.
    normalised = any(attention.normalises_qk for attention in settled.layout.spec.attention)
    attention_inner = (work.widths.query + work.widths.kv) * (2 + normalised)
    residuals = (4 + len(work.outputs_read)) * work.width
    # Experts (compiled for v5p and H100) have four arrays of the hidden width
    # at once, a dense layer's SwiGLU five.
    hidden = 2.0 if work.expert_rows else 2.5
    inner = work.tokens * (residuals + hidden * work.ffn_hidden + attention_inner) * compute
    inner += physics.expert_copies * work.expert_rows * work.expert_width * compute
    inner += score_bytes(settled, work, _LIVE_SCORES)
    # One of the halves runs at a time.
    return max(inner, work.tokens * (4 * work.width * compute + work.recurrence_inner))


PHASES = ("start", "step", "evaluation", "save", "resume")
"""Phases of a training, each with a peak of its own."""
READERS = 8
"""Tensors that a resume reads at a time (`checkpoint.checkpoints`)."""


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Most memory of a phase of a training, in bytes."""

    device: float
    """On one device, with the state."""
    host: float
    """Copies in its host's memory, for each of the host's devices."""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bytes on the device by what they hold; they add up to `device`."""

    @classmethod
    def of(cls, parts: Mapping[str, float], host: float = 0.0) -> "PhaseMemory":
        """Returns the memory of a phase from its parts on a device."""
        return cls(sum(parts.values()), host, parts)


def phase_memory(settled: Settled, work: Work, step: Mapping[str, float]) -> dict[str, PhaseMemory]:
    """Returns the memory of each phase; start and resume include the state that they make.

    step: of a train step, by category.
    """
    training, compute = settled.run.training, jnp.dtype(settled.run.training.compute_dtype).itemsize
    machine = settled.machine
    on_gpu = not (machine.on_tpu or machine.simulated)
    copies = _checkpoint_copies(*state_of(settled), fuses=not machine.simulated, in_place=on_gpu)
    state = {name: step[name] for name in ("parameters", "optimizer state")}
    logits = (
        chunk_tokens(int(work.tokens), work.unembedding.n, training.logits_mib) * work.unembedding.n
    )
    forward = layer_bytes(settled, work) + _gathered_elements(settled.layout)[0] * compute
    loss = work.unembedding.n * work.width * compute + 4.0 * logits
    evaluation = {"one layer": forward} if forward > loss else {"loss and its table": loss}
    if settled.layout.shape.stage > 1:
        sent = work.tokens / settled.layout.shape.tensor * work.width * compute
        evaluation["activations between stages"] = 2.0 * sent
    return {
        "start": PhaseMemory.of({**state, **copies["start"].parts}),
        "step": PhaseMemory.of(step, offloaded_bytes(settled, work)),
        "evaluation": PhaseMemory.of(state | evaluation),
        "save": PhaseMemory.of({**state, **copies["save"].parts}, copies["save"].host),
        "resume": PhaseMemory.of({**state, **copies["resume"].parts}, copies["resume"].host),
    }


_HASHES = 2.0
"""Arrays of 32 bits that XLA:CPU has while it hashes a tensor. Compilers of TPUs and GPUs fuse both
hashes into their sums and have none: a save of Llama 3 70B in NF4 takes the 42 GiB of its state on
an H100, as compiled."""
_REORDERED = 1.5
"""Copies of a tensor whose rows change between those of the stages and the order
of the layers, its result included."""


@functools.lru_cache(maxsize=4096)
def _checkpoint_copies(
    layout: ModelLayout, *rest: Any, fuses: bool, in_place: bool
) -> dict[str, PhaseMemory]:
    """Memory of the phases that make, save and read the state, besides the state.

    fuses: whether the compiler fuses the hashes of a tensor into their sums.
    in_place: whether a tensor is drawn where it stays. Programs for GPUs are, with no temporary at
    all: a start of Llama 2 13B, GPT-OSS 20B, GPT-2 XL and OLMo 2 13B takes its state to 0.1 % as
    compiled for H100, A100 and B200 (bench/results/compiled_plans.json). Others have the random
    bits of one tensor besides.
    """
    saved = _checkpoint_arrays(layout, *rest)
    # Tensors are hashed one by one. Those whose rows are permuted are converted one by one,
    # and in pieces.
    hashes = 0.0 if fuses else _HASHES
    hashed = max(hashes * x.hashed for x in saved)
    permuted = [x for x in saved if x.rows is not None]
    largest = max((float(x.local) for x in permuted), default=0.0)
    copied = max((x.local + hashes * x.hashed for x in permuted), default=0.0)
    if fuses:
        copied = _REORDERED * largest
    read = sorted((x.local for x in saved), reverse=True)[:READERS]
    made: dict[str, float] = {}
    if not in_place:
        made["largest tensor, as it is made"] = float(max(x.local for x in saved))
    return {
        "start": PhaseMemory.of(made),
        "save": PhaseMemory.of(_larger(hashed, copied), sum(x.part for x in saved)),
        "resume": PhaseMemory.of(_larger(hashed, _REORDERED * largest), float(sum(read))),
    }


def _larger(hashed: float, reordered: float) -> dict[str, float]:
    """Names the larger of the two copies that a save or a resume makes of a tensor;
    {} where there is none."""
    if hashed > reordered:
        return {"hashes of the largest tensor": hashed}
    return {"largest tensor in the order of the layers": reordered} if reordered else {}


def computes_weights_again(placed: PlacedRun) -> bool:
    """Returns whether a policy that saves everything saves no weights,
    which are frozen and gathered again.

    A stage of a pipeline reads its layers' weights by their number, and saves them.
    """
    if placed.run.finetune.method != "lora" or placed.layout.shape.stage > 1:
        return False
    return REMAT_POLICIES[placed.run.training.remat].saved is None


def keeps_stages(placed: PlacedRun) -> bool:
    """Returns whether a pipeline stage keeps what its backward passes read
    (`training.stage_saves`)."""
    return placed.layout.shape.stage > 1 and placed.run.training.stage_saves == "layers"


def kept_bytes(placed: PlacedRun, work: Work) -> float:
    """Returns the bytes that the stages of a pipeline keep of a microbatch, on a device;
    0 where they keep inputs."""
    if not keeps_stages(placed):
        return 0.0
    training = placed.run.training
    compute = jnp.dtype(training.compute_dtype).itemsize
    everything_kept = REMAT_POLICIES[training.remat].saved is None
    weights = compute * _gathered_elements(placed.layout)[1] if everything_kept else 0.0
    part = _bytes_of_part(placed, work, functools.partial(_saved_bytes, placed))
    return part * placed.layout.stages.virtual_stages + weights


def _bytes_of_part(placed: PlacedRun, work: Work, saves: Callable[[Work], float]) -> float:
    """Returns the bytes that a pipeline stage keeps of a part and a microbatch, on a device.

        bytes = sum over stacks of rows x bytes of a layer of the stack

    All stages run one program, so each keeps rows of every stack, padding too. DeepSeek-V3 in 32
    parts, compiled for 16 stages, keeps two dense rows beside two of experts in each part.
    saves: bytes of a layer from the work of its stack.
    """
    spec = placed.layout.spec
    hidden: dict[str, float] = {}
    if _second_fraction(placed) == 1:  # else bytes of a layer are a mean over those without
        hidden = dict(work.hidden_of_stacks)
    part = 0.0
    for stack in spec.stacks:
        rows = placed.layout.stages.rows(spec.layers_of(stack)).shape[-1]
        of_stack = dataclasses.replace(work, ffn_hidden=hidden.get(stack, work.ffn_hidden))
        part += rows * saves(of_stack)
    return part


@functools.lru_cache(maxsize=4096)
def _rows(layout: ModelLayout) -> float:
    """Rows that a part of a pipeline stage saves; without a pipeline the layers of the model.

    They are those of its stack, padding included (3 for 2.5 layers). Of several stacks only the
    layers count while a part runs: the compiled DeepSeek-V3 has no three dense rows in each of its
    four parts. What a stage keeps has them (`_bytes_of_part`).
    """
    spec = layout.spec
    if layout.shape.stage == 1:
        return float(len(spec.layers) + len(spec.further))
    if len(spec.stacks) > 1:
        return (len(spec.layers) + len(spec.further)) / (
            layout.shape.stage * layout.stages.virtual_stages
        )
    return float(layout.stages.rows(spec.layers_of(next(iter(spec.stacks)))).shape[-1])


def _added_late(placed: PlacedRun) -> float:
    """Elements on a device of gradients of one microbatch that are there at once,
    before they are added to the sum.

    References add each layer's in place: without a pipeline not those in another type, nor those of
    layers that take turns, whose stack has another shape in the loop over periods.
    """
    layout = placed.layout
    if layout.shape.stage > 1 or (
        layout.spec.period == 1 and placed.run.training.param_dtype == "float32"
    ):
        return 0.0
    return sum(
        p.size / layout.shape.over(axes_of(where.at_rest))
        for _, p, where in layout.leaves
        if "L" in p.dims and not p.frozen
    )


@functools.lru_cache(maxsize=4096)
def sharded_elements(layout: ModelLayout) -> tuple[float, float]:
    """Returns the elements that a device keeps of all parameters, and of those that are trained."""
    elements = [
        (p.size / layout.shape.over(axes_of(where.at_rest)), p.frozen)
        for _, p, where in layout.leaves
    ]
    return sum(n for n, _ in elements), sum(n for n, frozen in elements if not frozen)


def rounded_elements(settled: Settled) -> float:
    """Returns the elements on a device of weights that a pipeline rounds once for all ticks,
    in a byte each."""
    low = low_precision(settled)
    if low is None or settled.layout.shape.stage == 1:
        return 0.0
    return sum(
        p.size / settled.layout.shape.over(axes_of(where.at_rest))
        for _, p, where in settled.layout.leaves
        if "L" in p.dims and where.at_rest == where.in_use
        if settled.in_low_precision(p) and (low.gathered or "E" in p.dims)
    )


@functools.lru_cache(maxsize=4096)
def param_bytes(layout: ModelLayout, param_dtype: str) -> float:
    """Returns the bytes of all parameters on a device, each in its own type."""
    return sum(
        math.prod(p.shape)
        / layout.shape.over(axes_of(where.at_rest))
        * jnp.dtype(p.stored or param_dtype).itemsize
        for _, p, where in layout.leaves
    )


@functools.lru_cache(maxsize=4096)
def _weights(layout: ModelLayout) -> tuple[tuple[str, Any, Any, float], ...]:
    """Paths, parameters and placements of the layers' weights,
    with the gathered elements of one layer on a device."""
    leaves = [
        (path, p, where)
        for path, p, where in layout.leaves
        if "L" in p.dims and path[:10] != "reference."
    ]
    rows_on_devices = [
        p.shape[0] * layout.shape.over(axes_of(where.in_use)) / layout.shape.stage
        for _, p, where in leaves
    ]
    return tuple(
        (path, p, where, p.size / rows)
        for (path, p, where), rows in zip(leaves, rows_on_devices, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _gathered_elements(layout: ModelLayout) -> tuple[float, float]:
    """Elements on a device after the gather: of one layer of the largest stack,
    and of all layers."""
    one_layer = collections.defaultdict[str, float](float)
    for path, _, _, elements in _weights(layout):
        one_layer[path.partition(".")[0]] += elements
    all_layers = (
        sum(elements * p.shape[0] for _, p, _, elements in _weights(layout)) / layout.shape.stage
    )
    return max(one_layer.values(), default=0.0), all_layers


def _period_elements(layout: ModelLayout) -> float:
    """Elements on a device of the layers of a period after the gather;
    of runs, of the longest period."""
    spec = layout.spec
    largest, _ = _gathered_elements(layout)
    if not spec.runs:
        return spec.period * largest
    one_layer = collections.defaultdict[str, float](float)
    for path, _, _, elements in _weights(layout):
        one_layer[path.partition(".")[0]] += elements
    periods = [spec.layers[run.first : run.first + run.period] for run in spec.runs]
    return max(sum(one_layer[layer.stack] for layer in layers) for layers in periods)


def _first_reduced_elements(layout: ModelLayout) -> float:
    """Elements of a layer's experts whose gradient has been scattered
    when the others are there: `down`'s comes first.

    Experts' gradients are too large for the compiler to combine their reduce-scatters,
    as it does a dense layer's.
    """
    downs = (
        (where, n) for _, p, where, n in _weights(layout) if "E" in p.dims and p.role == "ffn_out"
    )
    return max((n for where, n in downs if where.at_rest != where.in_use), default=0.0)


def _carried_elements(settled: Settled) -> float:
    """Elements that a scan which gathers ahead carries between layers, weights
    and gradients, of the largest stack."""
    inside, carried = REMAT_POLICIES[settled.run.training.remat].begins_inside, [0.0]
    for stack, (first, half) in settled.gathered_ahead.items():
        weights = {
            path.split(".")[1]: n
            for path, _, _, n in _weights(settled.layout)
            if path.startswith(f"{stack}.")
        }
        carried.append(
            sum(weights.get(name, 0.0) for name in (*first, *(half if inside else first)))
        )
    return max(carried)


class Saved(NamedTuple):
    """Array of a checkpoint, in bytes."""

    total: int
    local: int
    """Of the slice on a device, in the order of the layers."""
    part: float
    """Of what the first of a slice's replicas copies to its host, which is the largest part."""
    hashed: int
    """Of 32 bits for each element of the slice."""
    rows: int | None
    """As of `StoredArray`."""


def checkpoint_bytes(placed: PlacedRun) -> tuple[float, float]:
    """Returns the bytes of a checkpoint, and those that the device with most copies to its host."""
    saved = _checkpoint_arrays(*state_of(placed))
    return float(sum(x.total for x in saved)), sum(x.part for x in saved)


@functools.lru_cache(maxsize=4096)
def _checkpoint_arrays(
    layout: ModelLayout, optimizer: Optimizer, dtype: Any, rounding: Any
) -> tuple[Saved, ...]:
    @functools.cache
    def saved(x: StoredArray) -> Saved:
        local, degree = (
            list(local_shape(x.shape, x.placement, layout.shape)),
            layout.shape.over(axes_of(x.placement)),
        )
        if x.rows is not None:  # as in `checkpoint.layer_order`, and there in full
            stages = layout.shape.over(x.placement[0])
            other = next((d for d in range(1, len(local)) if local[d] % stages == 0), None)
            local[0] = x.rows if x.rows % stages else x.rows // stages
            if x.rows % stages and other is not None:
                local[other] //= stages
        size = math.prod(local) * x.itemsize
        total = math.prod((x.rows or x.shape[0], *x.shape[1:]) if x.shape else ()) * x.itemsize
        parts = replica_parts(tuple(local), x.itemsize, layout.shape.size // degree)[1]
        return Saved(total, size, size / parts, 4 * math.prod(local), x.rows)

    sizes = [
        (p, jnp.dtype(p.stored or dtype).itemsize, where.at_rest) for _, p, where in layout.leaves
    ]
    params = [stored_array(*each) for each in sizes]
    return tuple(saved(x) for x in (*params, *state_arrays(layout, optimizer, dtype, rounding)))


def _parallel_fraction(placed: PlacedRun) -> float:
    """Returns the fraction of the layers whose halves read one norm: nothing between them
    is saved."""
    layers = placed.layout.spec.layers
    return sum(layer.has_parallel_halves for layer in layers) / len(layers)


def _second_fraction(placed: PlacedRun) -> float:
    """Returns the fraction of the layers that have a second half."""
    layers = placed.layout.spec.layers
    return sum(layer.has_second_half for layer in layers) / len(layers)


def _divided_fraction(placed: PlacedRun) -> float:
    """Returns the fraction of the layers with a residual stream between their halves."""
    layers = placed.layout.spec.layers
    divided = (layer.halves == 2 and not layer.has_parallel_halves for layer in layers)
    return sum(divided) / len(layers)


def _elements_per_token(placed: PlacedRun, work: Work) -> dict[str, float]:
    """Elements per token that a layer produces under each checkpoint name, on a device."""
    return {
        LAYER_INPUT: work.width / placed.layout.shape.tensor,
        QKV: work.widths.saved,
        # An exchange of heads makes another array of the kernel's output, with the same name.
        ATTN_OUT: work.widths.value * (2 if placed.sequence.group > 1 else 1),
        ATTN_RESIDUAL: _divided_fraction(placed) * work.width / placed.layout.shape.tensor,
        # What experts in a latent return has the name of their hidden layer.
        FFN_HIDDEN: _second_fraction(placed)
        * (work.ffn_hidden + work.expert_latent / placed.layout.shape.tensor),
    }


_AS_READ = SavedInputs()


def _saved_bytes(placed: PlacedRun, work: Work, inputs: SavedInputs = _AS_READ) -> float:
    """Returns the bytes of a microbatch that the remat policy saves of a layer, on a device."""
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    policy = REMAT_POLICIES[placed.run.training.remat]
    elements = _elements_per_token(placed, work)
    elements[ATTN_LSE] = work.widths.heads * 4 / compute
    if policy.saved is None:
        elements[ATTN_OUT] = work.widths.value
        kept = sum(elements.values()) + _unnamed_elements(placed, work, inputs)
        return kept * work.tokens * compute
    kept = sum(n for name, n in elements.items() if name in policy.saved)
    if LAYER_INPUT not in policy.offloaded:
        kept += elements[LAYER_INPUT]
    return kept * work.tokens * compute


def _unnamed_elements(placed: PlacedRun, work: Work, inputs: SavedInputs) -> float:
    """Elements per token of a layer that a policy which saves everything saves besides the
    named ones, on a device.

    They follow from the layers' kinds.
    tests/test_saved_activations.py compares them with every family's step.
    """
    compute = jnp.dtype(placed.run.training.compute_dtype).itemsize
    layers = placed.layout.spec.layers
    tensor = placed.layout.shape.tensor
    kept = _saved_input_elements(placed, work, inputs)
    if inputs.in_one_byte:
        kept /= compute
    # Outputs of the halves before their norm; what attention reads and returns in other forms.
    normalised = sum(layer.halves * layer.normalises_outputs for layer in layers) / len(layers)
    two = sum(layer.has_two_feed_forwards for layer in layers) / len(layers)
    kept += (normalised + 2 * two) * work.width / tensor + work.widths.kept
    kept += _adapter_elements(placed)
    experts = [layer.experts for layer in layers if layer.experts is not None]
    if experts:
        # The router reads its input, and returns its logits and their softmax, in float32.
        routed = max(e.experts for e in experts)
        read = 0 if placed.run.finetune.method == "lora" else work.width
        kept += _second_fraction(placed) * 4 / compute / tensor * (read + 2 * routed)
        kept += sum(e.gates_shared for e in experts) / len(layers) * work.width
    return kept


def _saved_input_elements(placed: PlacedRun, work: Work, inputs: SavedInputs) -> float:
    """Elements per token of the inputs of a layer's matmuls."""
    layers = placed.layout.spec.layers
    tensor = placed.layout.shape.tensor
    frozen = placed.run.finetune.method == "lora"
    # Each half reads the residual stream after its norm.
    all_halves = work.halves / work.layers
    halves = all_halves / tensor
    if inputs.gathered:
        halves = all_halves - work.ungathered_layers / work.layers * (1 - 1 / tensor)
    if tensor == 1:
        unread = sum(layer.halves * (not layer.normalises_inputs) for layer in layers)
        halves -= unread / len(layers)
    if not inputs.gathered or tensor == 1:
        halves -= _parallel_fraction(placed) / tensor
    halves += sum(layer.has_two_feed_forwards for layer in layers) / len(layers)
    elements = work.width * halves
    # Products of the hidden layer, whose inputs are named, and rows of experts, scaled too where
    # their weights multiply them. Only gradients of weights read both: those of routed experts have
    # no adapters.
    products = max(layer.hidden_products for layer in layers)
    hidden = work.ffn_hidden - (work.expert_hidden if frozen else 0.0)
    elements += _second_fraction(placed) * hidden * products
    if not frozen:
        scaled = sum(layer.scales_rows for layer in layers) / len(layers)
        rows = _second_fraction(placed) * work.expert_rows / work.tokens
        elements += (1 + scaled) * rows * work.expert_width
    if inputs.projected:
        elements += _projected_elements(placed, work)
    return elements


def _projected_elements(placed: PlacedRun, work: Work) -> float:
    """Elements per token that the projection out of a layer's first half reads besides its named
    output.

    What is saved beside frozen weights has each array once, in whatever shape it is read, so the
    projection out of attention reads the named output. That of a recurrence is normalised and gated
    first, which makes another array.
    """
    if not computes_weights_again(placed):
        return work.widths.value
    spec = placed.layout.spec
    recurrent = [layer for layer in spec.layers if layer.recurrence is not None]
    tensor = placed.layout.shape.tensor
    return sum(layer.widths(spec.width, tensor).value for layer in recurrent) / len(spec.layers)


def _adapter_elements(placed: PlacedRun) -> float:
    """Elements per token of the products of a layer's inputs with A of its adapters, as wide as
    their rank, on a device."""
    if placed.run.finetune.method != "lora":
        return 0.0
    ranks = 0.0
    for _, param, _ in placed.layout.leaves:
        if param.role == "adapter" and param.dims.endswith("U"):
            layers, rank = param.shape[0], param.shape[-1]
            ranks += layers * rank
    return ranks / len(placed.layout.spec.layers)


def offloaded_bytes(placed: PlacedRun, work: Work) -> float:
    """Returns the bytes that a microbatch of a device sends to host memory, and brings back."""
    if not work.layers:
        return 0.0
    training = placed.run.training
    policy, compute = REMAT_POLICIES[training.remat], jnp.dtype(training.compute_dtype).itemsize
    if not policy.offloaded:
        return 0.0
    elements = sum(
        n for name, n in _elements_per_token(placed, work).items() if name in policy.offloaded
    )
    return elements * work.tokens * compute * work.layers

"""Computation of one device for one microbatch: matmuls and attention,
from the parameters and their placements.

Passes: `forward`, `recomputation` (rematerialisation: what the policy does not keep) and `backward`
(twice a matmul: one for its input, one for its weight; scaling-book, transformers.md).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright.config import MeshShape
from meshwright.models.model import (
    AttentionSpec,
    ExpertSpec,
    IndexWork,
    LayerSpec,
    MatmulSizes,
    Model,
    Recurrence,
    Widths,
    padded_vocab,
)
from meshwright.models.quantisation import find_precision
from meshwright.models.remat import ATTN_OUT, ATTN_RESIDUAL, FFN_HIDDEN, QKV, REMAT_POLICIES
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.sharding.layouts import TOKEN_AXES, VOCAB_AXES
from meshwright.sharding.params import Param, is_low_precision
from meshwright.sharding.placement import Placements, local_shape
from meshwright.sharding.sequence import SEGMENTS, segment_tokens


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Matmuls of one role and size: `count` of [m, k] by [k, n] in a forward pass
    of all layers of a device."""

    role: str
    m: float
    k: float
    n: int
    count: float = 1.0
    groups: int = 0
    """Experts of the device that share its rows; 0 where all rows meet one weight."""
    frozen: bool = False
    """Whether its weight has no gradient: the backward pass is one matmul, for its input."""
    rate: str = "bf16"
    """Peak of the chip that it runs at: bf16, or that of a low precision (fp8, mxfp8, int8)."""
    batch: float = 1.0
    """Of `count`, those that one kernel computes: they fill a GPU's multiprocessors together."""

    @property
    def flops(self) -> float:
        """FLOPs of all of them."""
        return 2.0 * self.m * self.k * self.n * self.count

    @functools.cached_property
    def gradients(self) -> tuple["Matmul", ...]:
        """Products of the backward pass: for the input, and unless it is frozen for the weight."""
        given = dataclasses.replace(self, k=self.n, n=int(self.k))
        groups = max(1, self.groups)
        learned = dataclasses.replace(self, m=float(self.k * groups), k=self.m / groups)
        return (given,) if self.frozen else (given, learned)

    def bytes(self, itemsize: int) -> float:
        """Returns the bytes read and written, each operand and result once; operands of low
        precision have one byte."""
        operands = itemsize if self.rate == "bf16" else 1
        weights = max(1, self.groups) * self.k * self.n
        return (operands * (self.m * self.k + weights) + itemsize * self.m * self.n) * self.count


@dataclasses.dataclass(frozen=True)
class Work:
    """One microbatch on the pipeline stage with the most work."""

    tokens: float
    """Tokens of a device, whole over `tensor`."""
    layers: float
    """Layers of a device."""
    halves: float
    """Halves of these layers."""
    width: int
    """Model width D."""
    matmuls: tuple[Matmul, ...]
    """Matmuls of all layers of the device."""
    unembedding: Matmul
    attention: float
    """FLOPs of scores and weighted values, one forward pass of all layers."""
    scores: float
    """Attention scores computed in one forward pass of all layers."""
    widths: Widths
    """Widths of attention, averaged over layers."""
    ffn_hidden: float
    """Elements per token of the feed-forward's hidden layer (gate and up),
    of the widest layer and device."""
    experts: float
    """Experts per token; 0 in a dense model."""
    expert_rows: float
    """Rows of a device's buffer for experts; 0 in a dense model."""
    expert_layers: float
    """Layers with experts of a device."""
    expert_tokens: float = 0.0
    """Tokens of a device that it sends to experts: in a folded layout its part over `tensor`."""
    ungathered_layers: float = 0.0
    """Layers with experts whose second half gathers nothing over `tensor`: folded,
    and without shared experts."""
    twice_gathered_layers: float = 0.0
    """Layers whose second half gathers two inputs over `tensor`: those of a dense feed-forward and
    of experts. One with experts in a latent counts as the fraction of the model's width that it
    gathers besides."""
    expert_width: int = 0
    """Width of the rows that routed experts read and write: the model's, or that of their latent.
    """
    expert_latent: int = 0
    """Width of the latent of routed experts; 0 for none."""
    quantised_inputs: float = 0.0
    """Activations quantised in one forward pass of all layers: the inputs
    of low-precision matmuls, each once."""
    recurrence_inner: float = 0.0
    """Bytes per token and device of a recurrence while it runs, of one layer;
    0 in models without it."""
    quantised_gradients: float = 0.0
    """Gradients quantised in one backward pass: of the outputs of those matmuls."""
    kept_bytes: float = 0.0
    """Bytes that the backward pass reads, parameters excepted,
    of a loss whose layers are not known (`wrapped`)."""
    input_bytes: float = 0.0
    """Bytes of its batch on a device, and of the variables that it changes."""
    outputs_read: frozenset[str] = frozenset()
    """Roles whose outputs the backward pass reads: policies that save names compute them again."""
    expert_hidden: float = 0.0
    """Of `ffn_hidden`, elements of the hidden layers of routed experts."""
    hidden_of_stacks: tuple[tuple[str, float], ...] = ()
    """Elements per token of the hidden layer of each stack's feed-forward, of which `ffn_hidden` is
    the most."""
    indexers: IndexWork = IndexWork()
    """FLOPs and scores of the indexers of all layers, by pass."""
    over_tensor: float = 0.0
    """Bytes of activations that such a loss sums over `tensor`."""


def tokens_per_device(placed: PlacedRun) -> float:
    """Returns the tokens of one microbatch on a device, whole over `tensor`."""
    training = placed.run.training
    return (
        training.batch
        * training.seq
        / (placed.layout.shape.over(TOKEN_AXES) * training.microbatches)
    )


def work_of(placed: PlacedRun) -> Work:
    """Returns the work of the stage with the most."""
    return placed.run.model.work(placed, _work_of_layers)


def _work_of_layers(model: Model, placed: PlacedRun) -> Work:
    return _work_of(
        placed.layout, placed.run.training.seq, tokens_per_device(placed), low_precision(placed)
    )


@functools.lru_cache(maxsize=4096)
def _work_of(layout: ModelLayout, seq: int, tokens: float, low: "LowPrecision | None") -> Work:
    """Returns the work of a microbatch of `tokens` per device, on the heaviest stage."""
    stage = _HeaviestStage(layout, seq, tokens)
    fraction = stage.fraction
    weights = stage.weights
    recurrences = _matmuls_of_recurrences(layout, seq, tokens, fraction)
    return Work(
        tokens=tokens,
        layers=len(stage.layers) * fraction,
        halves=sum(layer.halves for layer in stage.layers) * fraction,
        width=layout.spec.width,
        matmuls=(*_merged(weights, low), *recurrences),
        unembedding=stage.unembedding(),
        attention=stage.attention_flops(),
        scores=stage.attention_scores(),
        indexers=stage.indexers(),
        widths=_mean_widths(layout),
        ffn_hidden=stage.ffn_hidden(weights),
        experts=stage.experts_per_token(),
        expert_tokens=stage.expert_tokens,
        expert_rows=max(stage.expert_rows.values(), default=0.0),
        expert_width=stage.expert_width(),
        expert_latent=stage.expert_latent(),
        expert_hidden=stage.ffn_hidden(stage.expert_weights),
        hidden_of_stacks=tuple(stage.hidden_of_stacks(weights).items()),
        expert_layers=stage.expert_layers(),
        ungathered_layers=fraction * _ungathered_layers(layout, weights),
        twice_gathered_layers=fraction * _twice_gathered_layers(layout),
        recurrence_inner=_recurrence_inner(layout, seq),
        quantised_inputs=_quantised_inputs(weights) if low else 0.0,
        quantised_gradients=_quantised_gradients(weights, low) if low else 0.0,
        outputs_read=_outputs_read(layout),
    )


@dataclasses.dataclass(frozen=True)
class _HeaviestStage:
    """The pipeline stage whose layers cost most, and what one of its devices computes."""

    layout: ModelLayout
    seq: int
    tokens: float
    """Tokens of a device, in a microbatch."""

    @functools.cached_property
    def fraction(self) -> float:
        """Fraction of the cost of all layers."""
        return self.layout.stages.busiest_fraction

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Layers of the model, with those that predict further tokens."""
        return (*self.layout.spec.layers, *self.layout.spec.further)

    @functools.cached_property
    def experts(self) -> dict[str, ExpertSpec]:
        """Experts of each stack of layers that has some."""
        return {layer.stack: layer.experts for layer in self.layers if layer.experts is not None}

    @functools.cached_property
    def weights(self) -> "list[_Weight]":
        """Weights of the layers."""
        return _layer_weights(self.layout, self.experts, self.tokens, self.fraction)

    @functools.cached_property
    def expert_weights(self) -> "list[_Weight]":
        """Weights of routed experts."""
        return [weight for weight in self.weights if weight.groups]

    @functools.cached_property
    def expert_tokens(self) -> float:
        """Tokens that a device sends to experts."""
        return self.tokens / self.layout.routed_parts

    @functools.cached_property
    def expert_rows(self) -> dict[str, float]:
        """Rows of a device's buffer for the experts of each stack."""
        shards = self.layout.shape.over(self.layout.expert_axes)
        rows: dict[str, float] = {}
        for stack, experts in self.experts.items():
            rows[stack] = experts.buffers(int(self.expert_tokens), shards).experts
        return rows

    def unembedding(self) -> Matmul:
        """Returns the matmul that makes the logits, those of further tokens with it."""
        spec = self.layout.spec
        predictions = 1 + len(spec.further)
        vocab = padded_vocab(self.layout.model) // self.layout.shape.over(VOCAB_AXES)
        return Matmul("unembedding", self.tokens * predictions, spec.width, vocab)

    def attention_flops(self) -> float:
        """Returns the FLOPs of scores and weighted values in a forward pass."""
        return self._of_heads(sum(a.computed_flops(self.seq) for a in self._attention))

    def attention_scores(self) -> float:
        """Returns the attention scores that a forward pass computes."""
        return self._of_heads(sum(a.computed_scores(self.seq) for a in self._attention))

    def indexers(self) -> IndexWork:
        """Returns the FLOPs and scores of the indexers."""
        tensor = self.layout.shape.tensor
        by_layer = [a.index_work(self.seq, tensor) for a in self._attention]
        totals = [sum(column) for column in zip(IndexWork(), *by_layer, strict=True)]
        return IndexWork(*(self._of_heads(total) for total in totals))

    def hidden_of_stacks(self, weights: "Iterable[_Weight]") -> dict[str, float]:
        """Returns the elements per token of the hidden layer of each stack's feed-forward."""
        return _hidden_elements(weights, self.expert_rows, self.tokens)

    def ffn_hidden(self, weights: "Iterable[_Weight]") -> float:
        """Returns the elements per token of the widest feed-forward's hidden layer."""
        return max(self.hidden_of_stacks(weights).values(), default=0.0)

    def experts_per_token(self) -> float:
        """Returns the experts of a token; 0 in a dense model."""
        return float(max((e.experts_per_token for e in self.experts.values()), default=0))

    def expert_width(self) -> int:
        """Returns the width of the rows that travel to experts; 0 in a dense model."""
        width = self.layout.spec.width
        return max((e.row_width(width) for e in self.experts.values()), default=0)

    def expert_latent(self) -> int:
        """Returns the width of the latent that experts read; 0 where they read the model's."""
        return max((e.latent or 0 for e in self.experts.values()), default=0)

    def expert_layers(self) -> float:
        """Returns how many layers of a device have experts."""
        by_stack = {weight.stack: weight.layers for weight in self.expert_weights}
        return sum(by_stack.values())

    @functools.cached_property
    def _attention(self) -> list[AttentionSpec]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    def _of_heads(self, per_token: float) -> float:
        """Returns what a device computes of a quantity of all layers, heads split by `tensor`."""
        return per_token * self.tokens * self.fraction / self.layout.shape.tensor


class _Weight(NamedTuple):
    """A weight of the layers as a device multiplies it: [m, k] by [k, n],
    in each of some layers."""

    stack: str
    role: str
    m: float
    k: int
    n: int
    layers: float
    """Layers of the device that have it."""
    groups: int
    """Experts of the device; 0 for a dense weight."""
    frozen: bool
    low_precision: bool
    """Whether it is multiplied in low precision, where a run has one."""

    @property
    def shape(self) -> tuple[str, int, int, int, bool]:
        """Role, sizes and groups, which matmuls of one kind share."""
        return self.role, self.k, self.n, self.groups, self.frozen


def _layer_weights(
    layout: ModelLayout, experts: Mapping[str, ExpertSpec], tokens: float, fraction: float
) -> list[_Weight]:
    """Returns the weights of a device's layers. fraction: of the layers that the device has."""
    shards = layout.shape.over(layout.expert_axes)
    weights: list[_Weight] = []
    for path, p, placements in layout.leaves:
        if p.role is None or path.startswith("reference."):
            continue
        stack = path.partition(".")[0]
        k, n = _matrix_shape(p, placements, layout.shape)
        m = tokens
        groups = 0
        if "E" in p.dims:
            groups = experts[stack].experts // shards
            # Tokens sent to other devices' experts are made up for by tokens received from them.
            m = tokens / layout.routed_parts * experts[stack].experts_per_token
        elif "R" in p.dims or p.role == "expert_latent":
            # Each device of `tensor` routes its own tokens, and projects them into the latent of
            # experts.
            m = tokens / layout.shape.tensor
        layers = p.logical_shape[0] * fraction
        low = is_low_precision(p)
        weights.append(_Weight(stack, str(p.role), m, k, n, layers, groups, p.frozen, low))
    return weights


def _matrix_shape(p: Param, placements: Placements, shape: MeshShape) -> tuple[int, int]:
    """Returns the rows and columns of a weight's matrix on a device,
    without its layers and experts."""
    local = list(local_shape(p.shape, placements.in_use, shape))
    if p.packed is not None:  # two elements in a byte
        local[p.packed] *= 2
    sizes = [n for letter, n in zip(p.dims, local, strict=True) if letter not in "LE"]
    return math.prod(sizes[: p.contract]), math.prod(sizes[p.contract :])


def _merged(weights: Sequence[_Weight], low: "LowPrecision | None") -> list[Matmul]:
    """Returns the matmuls of weights, those of one role and size together."""
    counts: dict[tuple[str, int, int, int, bool], float] = {}
    last: dict[tuple[str, int, int, int, bool], _Weight] = {}
    for weight in weights:
        counts[weight.shape] = counts.get(weight.shape, 0.0) + weight.layers
        last[weight.shape] = weight
    result = []
    for key, weight in last.items():
        rate = low.rate if low and weight.low_precision else "bf16"
        role, k, n, groups, frozen = key
        result.append(Matmul(role, weight.m, k, n, counts[key], groups, frozen, rate))
    return result


def _hidden_elements(
    weights: Iterable[_Weight], rows: Mapping[str, float], tokens: float
) -> dict[str, float]:
    """Returns the elements per token of the feed-forward's hidden layer, by stack.

    Experts have hidden layers for every row of their buffer.
    """
    hidden: dict[str, float] = {}
    for weight in weights:
        if weight.role == "ffn_in":
            elements = weight.n * (rows[weight.stack] / tokens if weight.groups else 1.0)
            hidden[weight.stack] = hidden.get(weight.stack, 0.0) + elements
    return hidden


def _ungathered_layers(layout: ModelLayout, weights: Iterable[_Weight]) -> int:
    """Returns the layers of the model whose feed-forward half gathers nothing over `tensor`."""
    has_ffn = {weight.stack for weight in weights if weight.role == "ffn_in"}
    gathers = {
        weight.stack
        for weight in weights
        if weight.role == "ffn_out" and (layout.routed_parts == 1 or not weight.groups)
    }
    layers = (*layout.spec.layers, *layout.spec.further)
    return sum(layer.stack in has_ffn - gathers for layer in layers)


def _twice_gathered_layers(layout: ModelLayout) -> float:
    """Returns the layers of the model whose feed-forward half gathers two inputs over `tensor`.

    Where `tensor` splits the experts, only the dense feed-forward gathers its input. Experts in a
    latent gather it besides what the experts that every token uses gather:

        layers = layers with two feed-forwards + sum over layers with a latent of Z / D
    """
    if layout.routed_parts > 1:
        return 0.0
    layers = float(sum(layer.has_two_feed_forwards for layer in layout.spec.layers))
    for layer in layout.spec.layers:
        if layer.experts is not None and layer.experts.latent is not None:
            layers += layer.experts.latent / layout.spec.width
    return layers


def _quantised_inputs(weights: Iterable[_Weight]) -> float:
    """Returns the activations quantised in a forward pass, each once.

    Matmuls of one role and width share their input: queries, keys, values; gate and up.
    """
    inputs = {
        (weight.stack, weight.role, weight.k): weight.m * weight.k * weight.layers
        for weight in weights
        if weight.low_precision
    }
    return sum(inputs.values())


def _quantised_gradients(weights: Iterable[_Weight], low: "LowPrecision") -> float:
    """Returns the gradients of outputs that are quantised in a backward pass."""
    elements = 0.0
    for weight in weights:
        if weight.low_precision:
            elements += weight.m * weight.n * weight.layers * low.gradient_passes
    return elements


def _mean_widths(layout: ModelLayout) -> Widths:
    """Returns the widths of attention on a device, averaged over layers."""
    spec = layout.spec
    by_layer = [layer.widths(spec.width, layout.shape.tensor) for layer in spec.layers]
    means = [sum(column) / len(by_layer) for column in zip(*by_layer, strict=True)]
    return Widths(*means)


def _outputs_read(layout: ModelLayout) -> frozenset[str]:
    """Returns the roles whose outputs the backward pass reads: norms
    of outputs read what they normalise."""
    if layout.spec.layers[0].normalises_outputs:
        return frozenset({"attention_out", "ffn_out"})
    return frozenset()


def _recurrence_inner(layout: ModelLayout, seq: int) -> float:
    """Returns the bytes per token and device of the recurrence that has most while it runs.

    Where `context` splits sequences, what all segments share is there with its gradient.
    """
    context = layout.shape.context
    segment = segment_tokens(seq, context)
    most = 0.0
    for recurrence in layout.spec.recurrences:
        inner = recurrence.inner_bytes(segment)
        if context > 1:
            inner += 2.0 * SEGMENTS * context * _shared_bytes(recurrence, segment) * context / seq
        most = max(most, inner)
    return most / layout.shape.tensor


def _shared_bytes(recurrence: Recurrence, segment: int) -> float:
    """Returns the bytes that a segment of one sequence shares,
    of all devices of `tensor` together."""
    shared = recurrence.gathered(1, segment, "float32") or {}
    arrays = [gathered.array for gathered in shared.values()]
    return float(sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays))


RECURRENCE = "recurrence"
"""Role of the matmuls of recurrences, which have no weights;
computed again from their inputs by every policy."""


def _matmuls_of_recurrences(
    layout: ModelLayout, seq: int, tokens: float, fraction: float
) -> list[Matmul]:
    """Returns the matmuls without weights of all layers with a recurrence.

    A kernel computes those of all chunks and heads of a layer, or of one chunk of all sequences
    where chunks follow each other. tokens: of a device.
    fraction: of the layers, that the device has.
    """
    context = layout.shape.context
    segment = segment_tokens(seq, context)
    matmuls = list[Matmul]()
    for recurrence, all_layers in collections.Counter(layout.spec.recurrences).items():
        layers = all_layers * fraction
        rows = recurrence.matmuls(segment)
        if context > 1:
            rows = [*rows, *recurrence.segment_matmuls(segment)]
        chunk = recurrence.chunk(segment)
        chunks = layers * tokens / chunk / layout.shape.tensor
        for row in rows:
            sizes = MatmulSizes(*row)
            launches = layers * segment / chunk if sizes.scanned else layers
            matmuls.append(_batched(sizes, sizes.number * chunks, launches))
        if context > 1:
            segments = SEGMENTS * context
            sequences = layers * tokens * context / seq / layout.shape.tensor
            for row in recurrence.composition_matmuls(segments):
                sizes = MatmulSizes(*row)
                matmuls.append(_batched(sizes, sizes.number * sequences, layers * segments))
    return matmuls


def _batched(sizes: MatmulSizes, count: float, launches: float) -> Matmul:
    """Returns `count` matmuls of a recurrence that so many launches compute."""
    batch = max(1.0, count / launches)
    return Matmul(RECURRENCE, sizes.m, sizes.k, sizes.n, count, batch=batch)


@dataclasses.dataclass(frozen=True)
class LowPrecision:
    """Facts of the low-precision matmuls of a run."""

    rate: str
    """Peak of the chip that they run at: the field `flops_{rate}`."""
    gathered: bool
    """Whether weights are quantised before they are gathered,
    and gathered with one byte per element."""
    gradient_passes: int
    """Times that a gradient is quantised: once for both products, or once for each."""


def low_precision(placed: PlacedRun) -> LowPrecision | None:
    """Returns the facts of the run's low-precision matmuls, None where it has none."""
    name = placed.run.training.matmul_precision
    if name == "compute":
        return None
    recipe = find_precision(name)
    whole = recipe.scaling in ("tensor", "row")
    return LowPrecision(recipe.rate, whole, 1 if recipe.scaling == "tensor" else 2)


def recomputed_roles(remat: str) -> frozenset[str]:
    """Returns the roles whose matmuls the backward pass recomputes;
    `attention` and `scores` are the kernel's."""
    if remat == "auto":  # of a model whose layers are not known
        return frozenset()
    policy = REMAT_POLICIES[remat]
    if policy.saved is None:
        return frozenset({"scores"} if policy.dropped else ())
    # The layer's output is not needed, and of other matmuls nothing is known.
    made_by = {
        ATTN_RESIDUAL: "attention_out",
        QKV: "qkv",
        ATTN_OUT: "attention",
        FFN_HIDDEN: "ffn_in",
    }
    again = {
        role for name, role in made_by.items() if name not in (*policy.saved, *policy.offloaded)
    }
    return frozenset({"router", "projection", "adapter", "expert_latent", *again})

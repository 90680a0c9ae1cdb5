"""Computation of one device for one microbatch: matmuls and attention, from the parameters and their placements.

Passes: `forward`, `recomputation` (rematerialisation: what the policy does not keep) and `backward` (twice a matmul:
one for its input, one for its weight; scaling-book, transformers.md).
"""

import collections
import dataclasses
import functools
import math

from meshwright.models.model import Model, Widths, padded_vocab
from meshwright.models.quantisation import find_precision
from meshwright.models.remat import ATTN_OUT, ATTN_RESIDUAL, FFN_HIDDEN, QKV, REMAT_POLICIES
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.sharding.layouts import TOKEN_AXES, VOCAB_AXES
from meshwright.sharding.params import is_low_precision
from meshwright.sharding.placement import local_shape


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Matmuls of one role and size: `count` of [m, k] by [k, n] in a forward pass of all layers of a device."""

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
        """Returns the bytes read and written, each operand and result once; operands of low precision have one byte."""
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
    """Elements per token of the feed-forward's hidden layer (gate and up), of the widest layer and device."""
    experts: float
    """Experts per token; 0 in a dense model."""
    expert_rows: float
    """Rows of a device's buffer for experts, each of the model's width; 0 in a dense model."""
    expert_layers: float
    """Layers with experts of a device."""
    expert_tokens: float = 0.0
    """Tokens of a device that it sends to experts: in a folded layout its part over `tensor`."""
    ungathered_layers: float = 0.0
    """Layers with experts whose second half gathers nothing over `tensor`: folded, and without shared experts."""
    quantised_inputs: float = 0.0
    """Activations quantised in one forward pass of all layers: the inputs of low-precision matmuls, each once."""
    recurrence_inner: float = 0.0
    """Bytes per token and device of a recurrence while it runs, of one layer; 0 in models without it."""
    quantised_gradients: float = 0.0
    """Gradients quantised in one backward pass: of the outputs of those matmuls."""
    kept_bytes: float = 0.0
    """Bytes that the backward pass reads, parameters excepted, of a loss whose layers are not known (`wrapped`)."""
    input_bytes: float = 0.0
    """Bytes of its batch on a device, and of the variables that it changes."""
    outputs_read: frozenset[str] = frozenset()
    """Roles whose outputs the backward pass reads: policies that save names compute them again."""
    expert_hidden: float = 0.0
    """Of `ffn_hidden`, elements of the hidden layers of routed experts."""
    over_tensor: float = 0.0
    """Bytes of activations that such a loss sums over `tensor`."""


def tokens_per_device(placed: PlacedRun) -> float:
    """Returns the tokens of one microbatch on a device, whole over `tensor`."""
    training = placed.run.training
    return training.batch * training.seq / (placed.shape.over(TOKEN_AXES) * training.microbatches)


def work_of(placed: PlacedRun) -> Work:
    """Returns the work of the stage with the most."""
    return placed.run.model.work(placed, _work_of_layers)


def _work_of_layers(model: Model, placed: PlacedRun) -> Work:
    return _work_of(
        placed.layout, placed.run.training.seq, tokens_per_device(placed), low_precision(placed)
    )


@functools.lru_cache(maxsize=4096)
def _work_of(layout: ModelLayout, seq: int, tokens: float, low: "LowPrecision | None") -> Work:
    shape, spec = layout.shape, layout.spec
    fraction = max(layout.stages.cost_fraction(stage) for stage in range(shape.stage))
    routed, shards = tokens / layout.routed_parts, shape.over(layout.expert_axes)
    all_layers = (*spec.layers, *spec.further)
    experts = {layer.stack: layer.experts for layer in all_layers if layer.experts is not None}
    # Experts have hidden layers for every row of their buffer.
    rows = {stack: e.buffers(int(routed), shards).experts for stack, e in experts.items()}
    matmuls: dict[tuple[str, int, int, int, bool], Matmul] = {}
    hidden, gathers, expert_layers = dict[str, float](), set[str](), 0.0
    expert_hidden = dict[str, float]()
    inputs, outputs = dict[tuple[str, str, int], float](), 0.0
    for path, p, where in layout.leaves:
        if p.role is None or path.startswith("reference."):
            continue
        local = local_shape(p.shape, where.in_use, shape)
        whole = (2 * n if i == p.packed else n for i, n in enumerate(local))
        sizes = tuple(n for letter, n in zip(p.dims, whole, strict=True) if letter not in "LE")
        k, n = math.prod(sizes[: p.contract]), math.prod(sizes[p.contract :])
        stack, groups, layers, m = path.partition(".")[0], 0, p.logical_shape[0] * fraction, tokens
        if "E" in p.dims:
            groups = experts[stack].experts // shards
            expert_layers = max(expert_layers, layers)
            # Tokens sent to other devices' experts are made up for by tokens received from them.
            m = routed * experts[stack].experts_per_token
        elif "R" in p.dims:  # each device of `tensor` routes its own tokens
            m = tokens / shape.tensor
        if p.role == "ffn_in":
            elements = n * (rows[stack] / tokens if groups else 1.0)
            hidden[stack] = hidden.get(stack, 0.0) + elements
            if groups:
                expert_hidden[stack] = expert_hidden.get(stack, 0.0) + elements
        if p.role == "ffn_out" and (layout.routed_parts == 1 or not groups):
            gathers.add(stack)
        key = (str(p.role), k, n, groups, p.frozen)
        count = matmuls[key].count + layers if key in matmuls else layers
        quantised = low is not None and is_low_precision(p)
        rate = low.rate if low and quantised else "bf16"
        matmuls[key] = Matmul(str(p.role), m, k, n, count, groups, p.frozen, rate)
        if quantised:
            # Matmuls of one role and width share their input: queries, keys, values; gate and up.
            inputs[stack, str(p.role), k] = m * k * layers
            outputs += m * n * layers * (low.gradient_passes if low else 0)
    each = [layer.widths(spec.width, shape.tensor) for layer in spec.layers]
    attention = [layer.attention for layer in all_layers if layer.attention is not None]
    vocab = padded_vocab(layout.model) // shape.over(VOCAB_AXES)
    return Work(
        tokens=tokens,
        layers=len(all_layers) * fraction,
        width=spec.width,
        matmuls=(*matmuls.values(), *_matmuls_of_recurrences(layout, seq, tokens * fraction)),
        unembedding=Matmul("unembedding", tokens * (1 + len(spec.further)), spec.width, vocab),
        attention=sum(a.flops(seq) for a in attention) * tokens * fraction / shape.tensor,
        scores=sum(a.heads * a.causal_positions(seq) for a in attention)
        * tokens
        * fraction
        / shape.tensor,
        widths=Widths(*(sum(column) / len(each) for column in zip(*each, strict=True))),
        ffn_hidden=max(hidden.values(), default=0.0),
        experts=float(max((e.experts_per_token for e in experts.values()), default=0)),
        expert_tokens=routed,
        expert_rows=max(rows.values(), default=0.0),
        expert_hidden=max(expert_hidden.values(), default=0.0),
        expert_layers=expert_layers,
        ungathered_layers=fraction
        * sum(layer.stack in hidden.keys() - gathers for layer in all_layers),
        recurrence_inner=max((r.inner_bytes(seq) for r in spec.recurrences), default=0.0)
        / shape.tensor,
        quantised_inputs=sum(inputs.values()),
        quantised_gradients=outputs,
        outputs_read=frozenset(
            ("attention_out", "ffn_out") if spec.layers[0].normalises_outputs else ()
        ),
    )


RECURRENCE = "recurrence"
"""Role of the matmuls of recurrences, which have no weights; computed again from their inputs by every policy."""


def _matmuls_of_recurrences(layout: ModelLayout, seq: int, tokens: float) -> list[Matmul]:
    """Returns the matmuls without weights of all layers with a recurrence.

    tokens: of a device, times its fraction of the layers.
    """
    matmuls = list[Matmul]()
    for recurrence, layers in collections.Counter(layout.spec.recurrences).items():
        chunks = layers * tokens / recurrence.chunk(seq) / layout.shape.tensor
        for m, k, n, count in recurrence.matmuls(seq):
            matmuls.append(Matmul(RECURRENCE, m, k, n, count * chunks))
    return matmuls


@dataclasses.dataclass(frozen=True)
class LowPrecision:
    """Facts of the low-precision matmuls of a run."""

    rate: str
    """Peak of the chip that they run at: the field `flops_{rate}`."""
    gathered: bool
    """Whether weights are quantised before they are gathered, and gathered with one byte per element."""
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
    """Returns the roles whose matmuls the backward pass recomputes; `attention` and `scores` are the kernel's."""
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
    return frozenset({"router", "projection", "adapter", *again})

"""Communication of one device in a step, from the placements of the parameters
and a layer's points of communication.

Payloads are bytes of the whole array that a group moves, as the census counts them.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from meshwright.models.model import ExpertSpec
from meshwright.planner.memory_model import computes_weights_again, keeps_stages
from meshwright.planner.optimizer import update_exchanges
from meshwright.planner.physics import PHYSICS, Physics
from meshwright.planner.work import Work, low_precision
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.runs.settle import Settled
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Param, is_low_precision, is_low_precision_expert
from meshwright.sharding.placement import Placements, axes_of
from meshwright.sharding.schedule_table import TaskCounts
from meshwright.sharding.sequence import SEGMENTS, segment_tokens
from meshwright.words import AXES

_AxisElements = dict[tuple[str, ...], float]


TO_EXPERTS = "tokens to experts"
"""Purpose of the movements of experts' rows."""


class Movement(NamedTuple):
    """A collective, some times in a step."""

    kind: str
    axes: tuple[str, ...]
    payload: float
    """Bytes of the whole array."""
    times: float
    during: str
    """Pass whose computation can overlap it: forward, recomputation, backward,
    or step (once, at the end)."""
    blocking: bool
    """Whether the next operation needs its result at once, so that nothing overlaps it."""
    purpose: str
    overlap: float = 0.0
    """Fraction of a blocking one that overlaps all the same: it is sent in pieces,
    and another computes meanwhile."""


def movements(
    settled: Settled, work: Work, recomputed: frozenset[str], tasks: TaskCounts | None = None
) -> list[Movement]:
    """Returns all collectives of a device in a step of this package.

    recomputed: roles that the backward pass computes again.
    tasks: of the pipeline, None without one.
    """
    return Traffic(settled, work, recomputed, tasks).movements()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of a device in a step, by what they are for.

        pass            tensor        context        expert          weights           once a step
        forward         activations   keys, values   rows, outputs   gather            loss, stages
        recomputation   again         again          again           (with backward)
        backward        gradients     gradients      gradients       gather, scatter   replicas

    It describes this package's step.
    A subclass with other properties prices a step that is carried out otherwise.
    """

    settled: Settled
    work: Work
    recomputed: frozenset[str]
    """Roles of the products that the backward pass computes again."""
    tasks: TaskCounts | None
    """Of the pipeline; None without one."""
    physics: Physics = PHYSICS

    @functools.cached_property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return jnp.dtype(self.settled.run.training.compute_dtype).itemsize

    @functools.cached_property
    def microbatches(self) -> float:
        """Microbatches of a step."""
        return float(self.settled.run.training.microbatches)

    @functools.cached_property
    def layers(self) -> float:
        """Layers of a device, over all microbatches."""
        return self.work.layers * self.microbatches

    @functools.cached_property
    def residual(self) -> float:
        """Bytes of a microbatch's residual stream, whole over `tensor`."""
        return self.work.tokens * self.work.width * self.compute_bytes

    # How this package carries out a step.

    @functools.cached_property
    def low_precision_experts(self) -> bool:
        """Whether weights of experts are gathered in low precision, and multiplied so."""
        return self.settled.low_precision_experts

    @functools.cached_property
    def receivers(self) -> int:
        """Nodes that a token is sent to once each, at most; 1 sends it to each of its experts."""
        return self.settled.expert_nodes

    @functools.cached_property
    def exchange_is_blocking(self) -> bool:
        """Whether the next operation waits for the rows of experts.

        Rows of the whole batch at once are half overlapped inside a node (two compiled
        programs), and bare between.
        """
        if not self.settled.scheduled_by_price or self.physics.overlapped_compute == 0:
            return True
        return self.receivers > 1 and self.settled.exchange_pieces == 1

    @functools.cached_property
    def gradients_during(self) -> str:
        """Pass in which replicas sum their gradients: layer by layer,
        or once after the last backward pass."""
        return "step" if self.settled.sums_gradients_last else "backward"

    # Movements.

    def movements(self) -> list[Movement]:
        """Returns all collectives."""
        result = [*self.tensor(), *self.context(), *self.experts()]
        if self.settled.layout.shape.stage > 1 and not keeps_stages(self.settled):
            # A backward task repeats the forward pass of its stage.
            result += [m._replace(during="recomputation") for m in result if m.during == "forward"]
        result += self.weights()
        result += self.gradients()
        chip = self.settled.machine.chip
        if chip is not None and chip.sums_alone:
            result = [self._alone(m) for m in result]
        result += self.optimizer()
        result += self.stages()
        result += self.loss()
        if self.settled.run.finetune.objective == "preferences":
            # The reference model is one more forward pass.
            forward = [m for m in result if m.during == "forward"]
            result += [m._replace(purpose=f"{m.purpose}, reference") for m in forward]
        return result

    def tensor(self) -> list[Movement]:
        """Returns the activations that `tensor` gathers and scatters,
        or of a wrapped loss the sums of its products."""
        work = self.work
        if self.settled.layout.shape.tensor == 1:
            return []
        if not work.layers:
            axes = ("tensor",)
            sums = work.over_tensor
            return [
                Movement(
                    "all-reduce", axes, sums, self.microbatches, "forward", True, "activations"
                )
            ]
        roles = {matmul.role for matmul in work.matmuls}
        most = max(1, len(roles & {"attention_out", "ffn_out"}))  # halves of a layer
        all_halves = min(most * work.layers, work.halves) * self.microbatches
        # Routed experts that `tensor` splits gather nothing over it.
        halves = all_halves - work.ungathered_layers * self.microbatches
        halves += work.twice_gathered_layers * self.microbatches
        # Latent attention gathers its latents, which are narrower than the residual stream.
        excess = self.layers * (work.widths.gathered / work.width - 1)
        opened = self.residual * (halves + excess) / halves
        inner = all_halves - self.layers + work.twice_gathered_layers * self.microbatches
        return _tensor((opened, self.residual), halves, inner, self.microbatches, self.recomputed)

    def context(self) -> list[Movement]:
        """Returns keys and values, or heads,
        and what recurrences share, that context parallelism moves."""
        if self.settled.layout.shape.context == 1:
            return []
        moved = _context(self.settled, self.work, self.layers, self.compute_bytes, self.recomputed)
        return moved + _recurrences(self.settled, self.work, self.layers, self.recomputed)

    def experts(self) -> list[Movement]:
        """Returns the rows sent to experts and back."""
        degrees = {
            axis: self.settled.layout.shape.degrees()[axis]
            for axis in self.settled.layout.expert_axes
        }
        if not degrees or not self.work.experts:
            return []
        spec = next(
            layer.experts for layer in self.settled.layout.spec.layers if layer.experts is not None
        )
        itemsize = self.compute_bytes
        if self.low_precision_experts and spec.weighted == "hidden":
            itemsize = 1
        itemsize = spec.sent_bytes or itemsize
        layers = self.work.expert_layers * self.microbatches
        result: list[Movement] = []
        for axes, rows in sent_rows(spec, degrees, self.receivers).items():
            elements = self.work.expert_tokens * rows * self.work.expert_width
            payloads = (elements * itemsize, elements * self.compute_bytes)
            result += _experts(axes, payloads, layers, self.recomputed, self.exchange_is_blocking)
        return result

    def weights(self) -> list[Movement]:
        """Returns the gathers of weights and the scatters of their gradients."""
        again = bool(self.recomputed - {"scores"}) or computes_weights_again(self.settled)
        return _weights(self.settled, self.microbatches, again, self.low_precision_experts)

    def gradients(self) -> list[Movement]:
        """Returns the sums of gradients over replicas; ZeRO-1's scatter and gather."""
        return _gradients(self.settled, self.gradients_during)

    def optimizer(self) -> list[Movement]:
        """Returns the exchanges of optimizers that update whole matrices."""
        purpose = "matrices of the optimizer"
        return [
            Movement(e.kind, e.axes, payload, e.count, "step", True, purpose)
            for e, payload in update_exchanges(self.settled)
        ]

    def stages(self) -> list[Movement]:
        """Returns what pipeline stages send; all of them share embedding and loss."""
        if self.tasks is None:
            return []
        payload = self.residual / self.settled.layout.shape.tensor
        # The first stage's embeddings are summed over all stages, the last stage's hidden states
        # go to all, and back.
        shared = Movement(
            "all-reduce",
            ("stage",),
            payload,
            4.0 * self.tasks.microbatches,
            "forward",
            True,
            "hidden states of all stages",
        )
        return [*between_stages(self.tasks, payload), shared]

    def loss(self) -> list[Movement]:
        """Returns the sums of the loss over the devices that split the vocabulary."""
        degrees = self.settled.layout.shape.degrees()
        axes = tuple(axis for axis in VOCAB_AXES if degrees[axis] > 1)
        if not axes or not self.work.unembedding.n:
            return []
        # Maximum, sum and label logit of every token, float32.
        payload = self.work.tokens * 4 * 3
        return [
            Movement(
                "all-reduce", axes, payload, self.microbatches, "forward", True, "loss softmax"
            )
        ]

    def _alone(self, m: Movement) -> Movement:
        """Returns a movement as a chip runs it whose sums of gradients overlap
        with nothing (`Chip.sums_alone`).

        Over several dimensions of the torus they are all-reduces.
        Sums between slices are sent by the hosts.
        """
        if m.during != "backward" or "reduce" not in m.kind or m.blocking:
            return m
        if self.settled.layout.shape.slices > 1 and self.settled.layout.shape.dcn_axis in m.axes:
            return m
        spans_torus = bool(dict(self.settled.machine.torus).keys() & {*m.axes})
        return m._replace(blocking=True, kind="all-reduce" if spans_torus else m.kind)


class _Weights(NamedTuple):
    """Weights that are gathered alike: over the same axes, and in the same type."""

    axes: tuple[str, ...]
    is_stacked: bool
    """Whether they are weights of layers, which are gathered layer by layer."""
    is_quantised: bool
    """Whether each element travels as one byte."""
    dtype: str | None
    """Type in which they travel; None is the compute dtype."""


class _Elements(NamedTuple):
    """Elements on a device after an all-gather."""

    gathered: float
    trained: float
    """Those of them that have gradients."""


def _weights(
    placed: PlacedRun, microbatches: float, gathered_again: bool, low_experts: bool
) -> list[Movement]:
    """Returns the all-gathers of weights and the reduce-scatters of their gradients.

    For each set of axes and microbatch, in every layer, or once for what is not in layers:

        forward    all-gather      bytes of the weights as they travel
        backward   all-gather      the same, where the backward pass gathers again
                   reduce-scatter  trained elements x bytes of the reduce dtype
    """
    # A backward task that repeats its forward pass gathers for it too.
    repeats_forward = placed.layout.shape.stage > 1 and not keeps_stages(placed)
    repeats = int(repeats_forward) + int(gathered_again)
    reduce_bytes = jnp.dtype(placed.run.training.reduce_dtype).itemsize
    result: list[Movement] = []
    for (axes, is_stacked), (sent, trained) in _sent_and_trained(placed, low_experts).items():
        # The weights of a model whose layers are not known are gathered
        # before its loss, all of them.
        in_layers = is_stacked or not placed.run.model.states_layers
        what = "weights" if in_layers else "embedding and unembedding"
        layers = float(len(placed.layout.spec.layers)) if is_stacked else 1.0
        times = layers * microbatches
        gather = Movement("all-gather", axes, sent / layers, times, "forward", False, what)
        result.append(gather)
        if in_layers and repeats:
            again = gather._replace(
                times=times * repeats, during="backward", purpose=f"{what}, recomputed"
            )
            result.append(again)
        if trained:
            reduced = trained / layers * reduce_bytes
            purpose = f"gradients of {what}"
            result.append(
                Movement("reduce-scatter", axes, reduced, times, "backward", False, purpose)
            )
    return result


def _sent_and_trained(
    placed: PlacedRun, low_experts: bool
) -> dict[tuple[tuple[str, ...], bool], tuple[float, float]]:
    """Returns the bytes of all gathered weights as they travel, and the elements that are trained.

    By axes, and whether they are weights of layers.
    """
    low = low_precision(placed)
    gathers_low = low is not None and low.gathered
    found: dict[tuple[tuple[str, ...], bool], tuple[float, float]] = {}
    for weights, elements in _gathered_elements(placed.layout, gathers_low, low_experts).items():
        itemsize = jnp.dtype(weights.dtype or placed.run.training.compute_dtype).itemsize
        if weights.is_quantised:
            itemsize = 1
        sent, trained = found.get((weights.axes, weights.is_stacked), (0.0, 0.0))
        found[weights.axes, weights.is_stacked] = (
            sent + elements.gathered * itemsize,
            trained + elements.trained,
        )
    return found


@functools.lru_cache(maxsize=4096)
def _gathered_elements(
    layout: ModelLayout, low: bool, low_experts: bool
) -> dict[_Weights, _Elements]:
    """Returns the elements on a device after the all-gathers of all parameters.

    Frozen quantised weights travel as they are kept, those of a wrapped model in the module's type.
    low: whether low-precision weights are quantised before they are gathered.
    low_experts: the same of experts.
    """
    found: dict[_Weights, _Elements] = {}
    for path, p, placements in layout.leaves:
        if path.startswith("reference."):
            continue
        dtype: str | None = p.precision
        if p.precision in ("compute", "float32"):
            dtype = p.stored if p.stored in ("int8", "uint8") else None
        is_quantised = (low and is_low_precision(p)) or (low_experts and is_low_precision_expert(p))
        for axes, gathered in _gathers(p, placements, layout):
            weights = _Weights(axes, "L" in p.dims, is_quantised, dtype)
            before = found.get(weights, _Elements(0.0, 0.0))
            trained = 0.0 if p.frozen else gathered
            found[weights] = _Elements(before.gathered + gathered, before.trained + trained)
    return found


def _gathers(
    p: Param, placements: Placements, layout: ModelLayout
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields the axes of each all-gather of a parameter,
    and its elements on a device afterwards."""
    elements = math.prod(p.shape) / layout.shape.over(axes_of(placements.at_rest))
    gathers = [
        rest[len(use) :]
        for rest, use in zip(placements.at_rest, placements.in_use, strict=True)
        if rest != use
    ]
    # Over DCN first, as the step does (sharding.params.plan_gathers).
    for axes in sorted(gathers, key=lambda axes: layout.shape.dcn_axis not in axes):
        elements *= layout.shape.over(axes)
        yield axes, elements


def _gradients(placed: PlacedRun, during: str) -> list[Movement]:
    """Gradients summed over replicas, one collective for each set of axes;
    ZeRO-1's scatter and gather."""
    training = placed.run.training
    reduce = jnp.dtype(training.reduce_dtype).itemsize
    param = jnp.dtype(training.param_dtype).itemsize
    sums, scattered = _gradient_elements(placed.layout)
    result = [
        Movement("all-reduce", axes, n * reduce, 1.0, during, False, "gradients")
        for axes, n in sums.items()
    ]
    for axes, n in scattered.items():
        scatter = Movement("reduce-scatter", axes, n * reduce, 1.0, during, False, "gradients")
        gather = Movement("all-gather", axes, n * param, 1.0, "step", False, "updated parameters")
        result += [scatter, gather]
    return result


@functools.lru_cache(maxsize=4096)
def _gradient_elements(layout: ModelLayout) -> tuple[_AxisElements, _AxisElements]:
    """Elements of the gradients that a device all-reduces
    and reduce-scatters once per step, by axes."""
    shape = layout.shape
    sums, scattered, degrees = _AxisElements(), _AxisElements(), shape.degrees()
    # Without known layers `tensor` is the compiler's.
    summed_over = AXES if layout.model.states_layers else BATCH_AXES
    for _, p, where in layout.leaves:
        if p.frozen:
            continue
        sharded = math.prod(p.shape) / shape.over(axes_of(where.at_rest))
        more = tuple(a for a in axes_of(where.optimizer) if a not in axes_of(where.at_rest))
        if more:
            scattered[more] = scattered.get(more, 0.0) + sharded
        lacking = tuple(
            a for a in summed_over if a not in axes_of(where.optimizer) and degrees[a] > 1
        )
        if lacking:
            sums[lacking] = sums.get(lacking, 0.0) + math.prod(p.shape) / shape.over(
                axes_of(where.optimizer)
            )
    return sums, scattered


def _tensor(
    payloads: tuple[float, float],
    halves: float,
    first: float,
    microbatches: float,
    again: frozenset[str],
) -> list[Movement]:
    """Tensor parallel with sequence parallel: each half of a layer is entered by an all-gather and
    left by a reduce-scatter (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).

    payloads: bytes that enter a half of a layer, on average,
    and that leave it: latent attention gathers its latents.
    halves: of all layers, attention and feed-forward.
    first: those of them that are not a layer's last.
    """
    opened, residual = payloads
    axes = ("tensor",)
    # The embedding ends with a reduce-scatter and the unembedding begins
    # with an all-gather, once per microbatch.
    times = halves + microbatches
    gathered = (opened * halves + residual * microbatches) / times
    result = [
        Movement("all-gather", axes, gathered, times, "forward", True, "sequence gathered"),
        Movement("reduce-scatter", axes, residual, times, "forward", True, "sequence scattered"),
        Movement(
            "all-gather", axes, residual, times, "backward", True, "sequence scattered, backward"
        ),
        Movement(
            "reduce-scatter", axes, gathered, times, "backward", True, "sequence gathered, backward"
        ),
    ]
    if again - {"scores"}:
        result.append(
            Movement("all-gather", axes, opened, halves, "recomputation", True, "sequence gathered")
        )
        # The output of the last half is not needed again, unless it is normalised.
        times = halves if "ffn_out" in again else first
        result.append(
            Movement(
                "reduce-scatter", axes, residual, times, "recomputation", True, "sequence scattered"
            )
        )
    return result


def _context(
    placed: PlacedRun, work: Work, layers: float, compute: int, again: frozenset[str]
) -> list[Movement]:
    """Keys and values (ring, all_gather) or heads (ulysses, usp) moved by context parallelism."""
    strategy, axes, n = (
        placed.run.training.context_strategy,
        ("context",),
        placed.layout.shape.context,
    )
    # Keys and values of latent attention are sent as arrays of one shape,
    # but for Ulysses (families/deepseek.py).
    kv_width = (
        work.widths.query
        if placed.layout.spec.has_latents and placed.sequence.groups > 1
        else work.widths.kv
    )
    block = 2 * work.tokens * kv_width * compute
    queries = work.tokens * (work.widths.query + _attention_output(placed)) * compute
    passes = [("forward", 1.0), ("backward", 2.0 if strategy == "ring" else 1.0)]
    # Queries, keys and values are saved as they were before they moved: what was gathered
    # moves again.
    moves_again = "attention" in again if strategy == "ring" else bool(again - {"scores"})
    passes += [("recomputation", 1.0)] if moves_again else []
    result = []
    for during, count in passes:
        if strategy == "all_gather":
            kind = "reduce-scatter" if during == "backward" else "all-gather"
            result.append(Movement(kind, axes, block * n, layers, during, True, "keys and values"))
        elif strategy == "ring":
            times = (n - 1) * count * layers
            result.append(
                Movement("collective-permute", axes, block, times, during, False, "keys and values")
            )
        else:
            result.append(
                Movement("all-to-all", axes, block + queries, layers * count, during, True, "heads")
            )
    return result


def _attention_output(placed: PlacedRun) -> float:
    """Returns the width of attention's output on a device, averaged
    over all layers: a recurrence moves no heads."""
    spec, tensor = placed.layout.spec, placed.layout.shape.tensor
    values = [
        layer.widths(spec.width, tensor).value
        for layer in spec.layers
        if layer.attention is not None
    ]
    return sum(values) / len(spec.layers)


def _recurrences(
    placed: PlacedRun, work: Work, layers: float, again: frozenset[str]
) -> list[Movement]:
    """Returns what segments of a sequence share for a recurrence, gathered over `context`
    (models/blocks/delta_net.py)."""
    training, layout, axes = placed.run.training, placed.layout, ("context",)
    shape = layout.shape
    segments = SEGMENTS * shape.context
    sequences = round(work.tokens * shape.context / training.seq)
    described = len(layout.spec.layers) + len(layout.spec.further)
    result: list[Movement] = []
    for recurrence, count in collections.Counter(layout.spec.recurrences).items():
        times = layers * count / described
        shared = recurrence.gathered(
            sequences, segment_tokens(training.seq, shape.context), str(training.compute_dtype)
        )
        for name, (array, inside) in (shared or {}).items():
            payload = math.prod(array.shape) * array.dtype.itemsize * segments / shape.tensor
            gather = Movement("all-gather", axes, payload, times, "forward", True, name)
            result.append(gather)
            if inside or again - {"scores"}:
                result.append(gather._replace(during="recomputation"))
            result.append(gather._replace(kind="reduce-scatter", during="backward"))
    return result


def sent_rows(
    spec: ExpertSpec, degrees: Mapping[str, int], nodes: int
) -> dict[tuple[str, ...], float]:
    """Returns the rows of a token that each exchange sends, those between nodes first,
    on average over even choices.

    degrees: of the axes that split the experts.
    Keys are as `hlo.collectives.axes_of_groups` names devices.
    """
    between, inside, room = list[str](), list[str](), math.prod(degrees.values()) // nodes
    for axis, degree in reversed([*degrees.items()]):
        here = math.gcd(degree, room)
        room //= here
        whole = here in (1, degree)
        between = (
            [axis if whole else f"{axis} between {degree // here}", *between]
            if here < degree
            else between
        )
        inside = [axis if whole else f"{axis} within {here}", *inside] if here > 1 else inside
    rows = {tuple(between): spec.mean_nodes(nodes), tuple(inside): float(spec.experts_per_token)}
    return {axes: n for axes, n in rows.items() if axes}


def _experts(
    axes: tuple[str, ...],
    payloads: tuple[float, float],
    layers: float,
    again: frozenset[str],
    blocking: bool,
) -> list[Movement]:
    """Tokens sent to their experts and back;
    a pass that recomputes needs what goes back only to normalise it.

    payloads: bytes of the rows that go to experts, and of their outputs and the gradients of both.
    """
    there, back = payloads
    sent = [("forward", there), ("forward", back), ("backward", back), ("backward", back)]
    sent += [("recomputation", there)] if again - {"scores"} else []
    sent += [("recomputation", back)] if "ffn_out" in again else []
    return [
        Movement("all-to-all", axes, payload, layers, during, blocking, TO_EXPERTS)
        for during, payload in sent
    ]


def between_stages(tasks: TaskCounts, activation: float) -> list[Movement]:
    """Returns the activations and their gradients that neighbouring stages of a pipeline send.

    activation: bytes of a device's part of the activations. In a tick with both halves, activations
    travel beside the backward half, and gradients beside the next forward half (step/pipeline.py);
    in the others the stages wait:

        tick          forward only     both halves          backward only
        activations   blocking         beside backward      -
        gradients     -                beside forward       blocking
    """
    kind = "collective-permute"
    axes = ("stage",)
    (forward, backward), both = tasks.ticks_by_halves
    gradients = "their gradients"
    result = [
        Movement(kind, axes, activation, float(forward), "forward", True, "activations"),
        Movement(kind, axes, activation, float(both), "backward", False, "activations"),
        Movement(kind, axes, activation, float(backward), "backward", True, gradients),
        Movement(kind, axes, activation, float(both), "forward", False, gradients),
    ]
    return [movement for movement in result if movement.times]

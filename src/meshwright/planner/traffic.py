"""Communication of one device in a step, from the placements of the parameters and a layer's points of communication.

Payloads are bytes of the whole array that a group moves, as the census counts them.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from meshwright.models.model import ExpertSpec
from meshwright.planner.memory_model import computes_weights_again, keeps_stages
from meshwright.planner.optimizer import update_exchanges
from meshwright.planner.software import MESHWRIGHT, Software
from meshwright.planner.work import Work, low_precision
from meshwright.runs.placed_run import ModelLayout, PlacedRun
from meshwright.runs.settle import Settled
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES
from meshwright.sharding.params import Param, is_low_precision, is_low_precision_expert
from meshwright.sharding.placement import Placements, axes_of
from meshwright.sharding.schedule_table import TaskCounts
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
    """Pass whose computation can overlap it: forward, recomputation, backward, or step (once, at the end)."""
    blocking: bool
    """Whether the next operation needs its result at once, so that nothing overlaps it."""
    purpose: str
    overlap: float = 0.0
    """Fraction of a blocking one that overlaps all the same: it is sent in pieces, and another computes meanwhile."""


def runs_experts_in_low_precision(settled: Settled, software: Software) -> bool:
    """Returns whether a program gathers weights of experts in low precision, and multiplies them so."""
    return software.name == MESHWRIGHT.name and settled.low_precision_experts


def movements(
    settled: Settled,
    work: Work,
    again: frozenset[str],
    tasks: TaskCounts | None,
    software: Software,
) -> list[Movement]:
    """Returns all collectives of a device in a step.

    again: roles that the backward pass recomputes. tasks: of the pipeline, None without one.
    """
    shape, training = settled.layout.shape, settled.run.training
    microbatches = float(training.microbatches)
    result: list[Movement] = []
    layers = work.layers * microbatches
    compute = jnp.dtype(training.compute_dtype).itemsize
    residual = work.tokens * work.width * compute
    if shape.tensor > 1 and not work.layers:
        sums = work.over_tensor
        result.append(
            Movement("all-reduce", ("tensor",), sums, microbatches, "forward", True, "activations")
        )
    elif shape.tensor > 1:
        pairs = max(1, len({matmul.role for matmul in work.matmuls} & {"attention_out", "ffn_out"}))
        # Routed experts that `tensor` splits gather nothing over it.
        halves = pairs * layers - work.ungathered_layers * microbatches
        opened = residual * (halves + layers * (work.widths.gathered / work.width - 1)) / halves
        result += _tensor((opened, residual), halves, (pairs - 1) * layers, microbatches, again)
    if shape.context > 1:
        result += (software.context or _context)(settled, work, layers, compute, again)
    degrees = {axis: shape.degrees()[axis] for axis in settled.layout.expert_axes}
    if degrees and work.experts:
        beside = software.sends_beside and settled.layout.stages.virtual_stages > 1
        spec = next(
            layer.experts for layer in settled.layout.spec.layers if layer.experts is not None
        )
        nodes = 1 if software.rows_by == "expert" else settled.expert_nodes
        # Rows of the whole batch at once are half overlapped inside a node (two compiled programs), and bare between.
        beside |= (
            software.beside > 0
            and settled.scheduled_by_price
            and (nodes == 1 or settled.exchange_pieces > 1)
        )
        nodes = (
            math.prod(degrees.values()) if software.rows_by == "device" and nodes == 1 else nodes
        )
        low = runs_experts_in_low_precision(settled, software) and spec.weighted == "hidden"
        for axes, rows in sent_rows(spec, degrees, nodes).items():
            elements = work.expert_tokens * rows * work.width
            payloads = (elements * (spec.sent_bytes or (1 if low else compute)), elements * compute)
            result += _experts(axes, payloads, work.expert_layers * microbatches, again, not beside)
    if shape.stage > 1 and not keeps_stages(settled):
        result += [m._replace(during="recomputation") for m in result if m.during == "forward"]
    result += _weights(
        settled,
        microbatches,
        bool(again - {"scores"}) or computes_weights_again(settled),
        runs_experts_in_low_precision(settled, software),
    )
    result += _gradients(settled, software)
    if settled.machine.chip is not None and settled.machine.chip.sums_alone:
        # Over several dimensions of the torus they are all-reduces. Sums between slices are sent by the hosts.
        outside = {shape.dcn_axis} if shape.slices > 1 else set[str]()
        whole = dict(settled.machine.torus).keys()
        for at, m in enumerate(result):
            if (
                m.during == "backward"
                and "reduce" in m.kind
                and not (m.blocking or outside & {*m.axes})
            ):
                result[at] = m._replace(
                    blocking=True, kind="all-reduce" if whole & {*m.axes} else m.kind
                )
    for e, payload in update_exchanges(settled):
        result.append(
            Movement(e.kind, e.axes, payload, e.count, "step", True, "matrices of the optimizer")
        )
    if tasks is not None:
        result += _stages(tasks, residual / shape.tensor, software)
    vocab_axes = tuple(axis for axis in VOCAB_AXES if shape.degrees()[axis] > 1)
    if vocab_axes and work.unembedding.n:
        # Maximum, sum and label logit of every token, float32.
        result.append(
            Movement(
                "all-reduce",
                vocab_axes,
                work.tokens * 4 * 3,
                microbatches,
                "forward",
                True,
                "loss softmax",
            )
        )
    for at, m in enumerate(result if software.sends_beside else ()):
        if (
            m.kind == "collective-permute"
            and not m.blocking
            and (m.axes != ("stage",) or settled.layout.stages.virtual_stages > 1)
        ):
            result[at] = m._replace(blocking=True, overlap=1.0)
    if settled.run.finetune.objective == "preferences":
        # The reference is one more forward pass.
        again_forward = [m._replace(purpose=f"{m.purpose}, reference") for m in result]
        result += [m for m in again_forward if m.during == "forward"]
    return result


def _weights(
    placed: PlacedRun, microbatches: float, gathered_again: bool, low_experts: bool
) -> list[Movement]:
    training = placed.run.training
    reduce = jnp.dtype(training.reduce_dtype).itemsize
    result: list[Movement] = []
    # A backward task that repeats its forward pass gathers for it too.
    repeats = int(placed.layout.shape.stage > 1 and not keeps_stages(placed)) + int(gathered_again)
    low = low_precision(placed)
    elements_of = _gathered_elements(placed.layout, low is not None and low.gathered, low_experts)
    gathered: dict[tuple[tuple[str, ...], bool], tuple[float, float]] = {}
    for (axes, stacked, quantised, travels), (elements, trained) in elements_of.items():
        count, payload = gathered.get((axes, stacked), (0.0, 0.0))
        itemsize = 1 if quantised else jnp.dtype(travels or training.compute_dtype).itemsize
        gathered[axes, stacked] = (count + trained, payload + elements * itemsize)
    for (axes, stacked), (count, payload) in gathered.items():
        # The weights of a model whose layers are not known are gathered before its loss, all of them.
        in_layers = stacked or not placed.layout.spec.layers
        what = "weights" if in_layers else "embedding and unembedding"
        layers = float(len(placed.layout.spec.layers)) if stacked else 1.0
        per, sent = count / layers, payload / layers
        result.append(
            Movement("all-gather", axes, sent, layers * microbatches, "forward", False, what)
        )
        if in_layers and repeats:
            times = layers * microbatches * repeats
            result.append(
                Movement("all-gather", axes, sent, times, "backward", False, f"{what}, recomputed")
            )
        times = layers * microbatches
        if count:
            scattered = Movement(
                "reduce-scatter",
                axes,
                per * reduce,
                times,
                "backward",
                False,
                f"gradients of {what}",
            )
            result.append(scattered)
    return result


@functools.lru_cache(maxsize=4096)
def _gathered_elements(
    layout: ModelLayout, low: bool, low_experts: bool
) -> dict[tuple[tuple[str, ...], bool, bool, str | None], tuple[float, float]]:
    """Elements on a device after the all-gathers, and those of them that are trained.

    By axes, whether they are stacked, whether they have one byte each, and the type that they travel in where it is not
    the compute dtype: frozen quantised weights as they are kept, those of a wrapped model in the module's.
    low: whether low-precision weights are quantised before they are gathered. low_experts: the same of experts.
    """
    elements: dict[tuple[tuple[str, ...], bool, bool, str | None], tuple[float, float]] = {}
    own = ((p, where) for path, p, where in layout.leaves if not path.startswith("reference."))
    for p, where in own:
        for axes, gathered in _gathers(p, where, layout):
            quantised = (low and is_low_precision(p)) or (
                low_experts and is_low_precision_expert(p)
            )
            travels: str | None = p.stored if p.stored in ("int8", "uint8") else None
            travels = travels if p.precision in ("compute", "float32") else p.precision
            key = (axes, "L" in p.dims, quantised, travels)
            every, trained = elements.get(key, (0.0, 0.0))
            elements[key] = (every + gathered, trained + (0.0 if p.frozen else gathered))
    return elements


def _gathers(
    p: Param, where: Placements, layout: ModelLayout
) -> Iterator[tuple[tuple[str, ...], float]]:
    elements = math.prod(p.shape) / layout.shape.over(axes_of(where.at_rest))
    gathers = [
        rest[len(use) :]
        for rest, use in zip(where.at_rest, where.in_use, strict=True)
        if rest != use
    ]
    # Over DCN first, as the step does (sharding.params.plan_gathers).
    for axes in sorted(gathers, key=lambda axes: layout.shape.dcn_axis not in axes):
        elements *= layout.shape.over(axes)
        yield axes, elements


def _gradients(placed: PlacedRun, software: Software) -> list[Movement]:
    """Gradients summed over replicas, one collective for each set of axes; ZeRO-1's scatter and gather.

    This package sums them layer by layer in the backward pass, or once, after it (`PlacedRun.sums_gradients_last`).
    """
    training = placed.run.training
    during = "step" if placed.sums_gradients_last and software.sums_gradients_last else "backward"
    reduce, param = (jnp.dtype(t).itemsize for t in (training.reduce_dtype, training.param_dtype))
    sums, scattered = _gradient_elements(placed.layout)
    result = [
        Movement("all-reduce", a, n * reduce, 1.0, during, False, "gradients")
        for a, n in sums.items()
    ]
    for axes, n in scattered.items():
        result.append(Movement("reduce-scatter", axes, n * reduce, 1.0, during, False, "gradients"))
        result.append(
            Movement("all-gather", axes, n * param, 1.0, "step", False, "updated parameters")
        )
    return result


@functools.lru_cache(maxsize=4096)
def _gradient_elements(layout: ModelLayout) -> tuple[_AxisElements, _AxisElements]:
    """Elements of the gradients that a device all-reduces and reduce-scatters once per step, by axes."""
    shape = layout.shape
    sums, scattered, degrees = _AxisElements(), _AxisElements(), shape.degrees()
    summed_over = (
        AXES if layout.spec.layers else BATCH_AXES
    )  # `tensor` is the compiler's in a wrapped model
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
    """Tensor parallel with sequence parallel: each half of a layer is entered by an all-gather and left by a
    reduce-scatter (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).

    payloads: bytes that enter a half of a layer, on average, and that leave it: latent attention gathers its latents.
    halves: of all layers, attention and feed-forward.  first: those of them that are not a layer's last.
    """
    opened, residual = payloads
    axes = ("tensor",)
    # The embedding ends with a reduce-scatter and the unembedding begins with an all-gather, once per microbatch.
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
    # Keys and values of latent attention are sent as arrays of one shape, but for Ulysses (families/deepseek.py).
    kv_width = (
        work.widths.query
        if placed.layout.spec.has_latents and placed.sequence.groups > 1
        else work.widths.kv
    )
    block = 2 * work.tokens * kv_width * compute
    queries = work.tokens * (work.widths.query + work.widths.value) * compute
    passes = [("forward", 1.0), ("backward", 2.0 if strategy == "ring" else 1.0)]
    # Queries, keys and values are saved as they were before they moved: what was gathered moves again.
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


def sent_rows(
    spec: ExpertSpec, degrees: Mapping[str, int], nodes: int
) -> dict[tuple[str, ...], float]:
    """Returns the rows of a token that each exchange sends, those between nodes first, on average over even choices.

    degrees: of the axes that split the experts. Keys are as `hlo.collectives.axes_of_groups` names devices.
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
    """Tokens sent to their experts and back; a pass that recomputes needs what goes back only to normalise it.

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


def _stages(tasks: TaskCounts, activation: float, software: Software) -> list[Movement]:
    """Activations and their gradients between neighbouring stages; embedding and loss, where all stages share them.

    activation: bytes of a device's part of the activations. In a tick with both halves, activations travel beside the
    backward half, and gradients beside the next forward half (step/pipeline.py); in the others the stages wait.
    """
    axes, result = ("stage",), list[Movement]()
    alone, both = tasks.ticks_by_halves
    times = {"forward": alone[0], "backward": alone[1]}
    for name, other, what in (
        ("forward", "backward", "activations"),
        ("backward", "forward", "their gradients"),
    ):
        result.append(
            Movement("collective-permute", axes, activation, float(times[name]), name, True, what)
        )
        result.append(
            Movement("collective-permute", axes, activation, float(both), other, False, what)
        )
    if software.vocab_over_stages:
        # The first stage's embeddings are summed over all stages, the last stage's hidden states go to all, and back.
        count = 4.0 * tasks.microbatches
        result.append(
            Movement(
                "all-reduce",
                axes,
                activation,
                count,
                "forward",
                True,
                "hidden states of all stages",
            )
        )
    return [movement for movement in result if movement.times]

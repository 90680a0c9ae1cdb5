"""Price of an attention kernel: its matrix products, its rate,
and the scores that it moves through HBM."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from meshwright.models.kernels.blocked import block_size
from meshwright.models.model import AttentionSpec
from meshwright.planner.physics import Physics
from meshwright.planner.work import tokens_per_device
from meshwright.runs.settle import Settled


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """Attention kernel as the planner prices it."""

    backward: float = 2.5
    """Matrix products of the backward pass over those of the forward pass."""
    rate: Literal["attention", "matmul"] = "attention"
    """Fraction of peak that it reaches: a field of `Efficiency`."""
    score_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """HBM bytes that it moves per visible score, by pass; empty where scores stay on the chip."""
    kernels: int = 1
    """Kernels of a forward pass."""
    keeps_scores: bool = False
    """Whether its backward pass reads the scores of the forward pass,
    which some remat policies compute again."""
    speed: float = 1.0
    """Its rate over `rate`."""
    flops_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rate of the forward and of the backward pass where its bundles are known, instead of `rate`;
    both of the products that causal attention needs."""
    index_bytes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """HBM bytes that it moves per score of an indexer,
    by pass: no kernel keeps those on the chip."""


def attention_kernel(settled: Settled, physics: Physics) -> AttentionKernel:
    """Returns the price of the attention kernel that a run uses on its machine."""
    attention = settled.layout.spec.attention
    if not settled.run.model.states_layers:
        return AttentionKernel(backward=0.0)
    kernel = AttentionKernel(settled.kernels.backward)
    if any(a.indexer is not None for a in attention):
        of_index = {name: n for name, (n, _) in _bytes_of_scores(settled, physics).items()}
        kernel = dataclasses.replace(kernel, index_bytes=of_index)
    if not attention or settled.kernels.fused:
        return dataclasses.replace(kernel, flops_per_second=rates_of_bundles(settled))
    if settled.kernels.name == "reference":
        return _reference_kernel(kernel, settled, physics)
    return dataclasses.replace(kernel, score_bytes=_score_bytes(settled, physics))


def _reference_kernel(
    kernel: AttentionKernel, settled: Settled, physics: Physics
) -> AttentionKernel:
    """Returns the price of reference attention,
    which computes the scores of all pairs of query and key."""
    attention = settled.layout.spec.attention
    seq = settled.run.training.seq
    computed = sum(a.heads * seq for a in attention)
    counted = sum(a.computed_scores(seq) for a in attention)
    score_bytes = {}
    for name, (of_score, of_element) in _bytes_of_scores(settled, physics).items():
        elements = max(a.head_size for a in attention) / seq
        score_bytes[name] = computed / counted * (of_score + of_element * elements)
    return dataclasses.replace(kernel, score_bytes=score_bytes, speed=counted / computed)


def _bytes_of_scores(settled: Settled, physics: Physics) -> Mapping[str, tuple[float, float]]:
    """Returns the HBM bytes of a score and of a query's element, by pass."""
    return physics.tpu_score_bytes if settled.machine.on_tpu else physics.gpu_score_bytes


def rates_of_bundles(settled: Settled) -> dict[str, float]:
    """Returns the rates of a kernel whose seconds are known by its bundles, by pass;
    empty for all others.

        rate of a pass = FLOPs of its products in one head of one chunk / seconds of that head

    A recomputation runs the forward kernel.
    """
    kernels = settled.kernels
    attention = settled.layout.spec.attention
    if kernels.head_seconds is None:
        return {}
    tokens = kernels.tokens
    forward = sum(a.flops(tokens) * tokens / a.heads for a in attention) / len(attention)
    forward_seconds, backward_seconds = kernels.head_seconds
    return {
        "forward": forward / forward_seconds,
        "recomputation": forward / forward_seconds,
        "backward": kernels.backward * forward / backward_seconds,
    }


def visited_positions(attention: AttentionSpec, seq: int, block: int) -> float:
    """Returns the key positions computed for a query in blocks of `block` queries
    and keys, on average.

    Causal attention over 4 blocks with a window of 2: x is computed, and - is skipped.

        queries 0   x
        queries 1   x x
        queries 2   - x x          (4 * 5 / 2 - 3) blocks of block^2 scores, over 4 * block queries
        queries 3   - - x x
    """
    if attention.chunk:
        seq = min(seq, attention.chunk)
    window = attention.window or seq
    skipped = 0
    for first_query in range(0, seq, block):
        skipped += max(0, first_query - window + 1) // block
    blocks = seq // block
    return block * (blocks * (blocks + 1) / 2 - skipped) / blocks


def _score_bytes(settled: Settled, physics: Physics) -> dict[str, float]:
    """Returns the HBM bytes that blocked attention moves per visible score, by pass.

        bytes = visited / visible * (bytes of a score + bytes
        of a query's element * head size / block)

    A block is computed as a whole, so all of its scores count, the masked ones included.
    """
    attention = settled.layout.spec.attention
    split = settled.sequence
    seq = settled.run.training.seq
    heads = max(a.heads for a in attention) / (settled.layout.shape.tensor * split.group)
    sequences = tokens_per_device(settled) * settled.layout.shape.context / seq
    tokens = seq
    if split.groups > 1:
        tokens = seq // (2 * split.groups)
    block = block_size(tokens, max(1, int(4 * sequences * heads)))

    visible = sum(a.heads * a.causal_positions(seq) for a in attention)
    visited = sum(a.heads * visited_positions(a, seq, block) for a in attention) / visible
    elements = max(a.head_size for a in attention) / block
    return {
        name: visited * (of_score + of_element * elements)
        for name, (of_score, of_element) in _bytes_of_scores(settled, physics).items()
    }

"""Seconds of one microbatch's layers on a device: matmuls, attention, and what moves through HBM beside them."""

import dataclasses

from meshwright.hardware.chips import Efficiency
from meshwright.hardware.targets import Target
from meshwright.planner.software import SCORE_BYTES, AttentionKernel, Software
from meshwright.planner.work import Matmul, Work, low_precision
from meshwright.runs.settle import Settled

QUANTISE_BYTES = 5
"""HBM bytes per element that is quantised: read for the maximum, read and written for the conversion, bfloat16."""
RESIDUAL_COPIES = {"forward": 10, "recomputation": 8, "backward": 20}
"""Copies of the residual stream that a layer's norms, sums and rotations read and write besides its matmuls.

Each device has its part of them over `tensor` (sequence parallelism)."""
HIDDEN_COPIES = {"forward": 1.5, "recomputation": 1.5, "backward": 3.0}
"""Copies of the feed-forward's first outputs, gate and up together, that a GPU moves in the activation function.

SwiGLU reads two and writes one; its gradient reads three and writes three, the product among them. On TPUs the matmuls
have it fused."""


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """One microbatch's layers of a device, by what their seconds follow from."""

    settled: Settled
    work: Work
    again: frozenset[str]
    target: Target
    software: Software
    kernel: AttentionKernel

    def seconds(self, name: str) -> dict[str, float]:
        """Returns the seconds of a pass by kind: matmul, attention, elementwise.

        Of the first two also those that HBM bounds rather than the matrix unit, by what it moves: operands, scores.
        """
        work, chip, recomputes = self.work, self.target.chip, name == "recomputation"
        matmul = operands = 0.0
        for m in work.matmuls:
            # Linear attention is computed again from its inputs, whatever the policy keeps.
            if not recomputes or m.role in self.again or m.role == "delta":
                at_peak, moved = matmul_seconds(self._at_rate(m), self.target)
                factor = 2.0 if name == "backward" and not m.frozen else 1.0
                matmul += factor * max(at_peak, moved)
                operands += factor * moved if moved > at_peak else 0.0
        kernel, efficiency = self.kernel, self.target.efficiency
        again = {"attention", "scores"} if kernel.keeps_scores else {"attention"}
        passes = {"forward": 1.0, "backward": kernel.backward, "recomputation": 1.0 if again & self.again else 0.0}
        attention = passes[name] * work.attention / (chip.flops_bf16 * _attention_fraction(kernel, efficiency))
        bandwidth = chip.hbm_bandwidth * efficiency.hbm
        scores = work.scores * kernel.score_bytes.get(name, 0) / bandwidth if passes[name] else 0.0
        recomputed = self.again - {"scores"}
        copies = RESIDUAL_COPIES[name] if not recomputes or recomputed else 0
        residual = work.tokens * work.width * 2 * work.layers / self.settled.placed.shape.tensor
        elementwise = copies * residual + _quantising_bytes(work, name, self.again)
        gpu = not self.settled.machine.on_tpu
        if gpu and (not recomputes or "ffn_in" in self.again):
            hidden = sum(m.m * m.n * m.count for m in work.matmuls if m.role == "ffn_in")
            elementwise += HIDDEN_COPIES[name] * 2 * hidden
        elementwise *= self.software.elementwise if gpu else 1.0
        seconds = {
            "matmul": matmul,
            "attention": max(attention, scores),
            "elementwise": elementwise / bandwidth,
            "operands": operands,
            "scores": scores if scores > attention else 0.0,
        }
        # The reference of preferences is one more forward pass.
        reference = self.settled.placed.run.finetune.objective == "preferences" and name == "forward"
        return {kind: value * (2.0 if reference else 1.0) for kind, value in seconds.items()}

    def _at_rate(self, m: Matmul) -> Matmul:
        """Returns a matmul of experts in the run's low precision, where the software has it."""
        if not (m.grouped and self.software.experts_in_low_precision):
            return m
        low = low_precision(self.settled.placed)
        return m if low is None else dataclasses.replace(m, rate=low.rate)


def attention_kernel(settled: Settled, software: Software) -> AttentionKernel:
    """Returns the attention kernel: that which the run chooses, or on GPUs that of another program."""
    if software.kernel is not None and not settled.machine.on_tpu:
        return software.kernel
    kernels = settled.kernels
    return AttentionKernel(kernels.backward, score_bytes={} if kernels.fused or software.kernel else SCORE_BYTES)


def _attention_fraction(kernel: AttentionKernel, efficiency: Efficiency) -> float:
    """Returns the fraction of peak FLOP/s that an attention kernel reaches."""
    if kernel.rate == "matmul":
        return efficiency.matmul
    of_own = {"attention": 1.0, "flash2": efficiency.flash2, "triton": efficiency.triton}
    return efficiency.attention * of_own[kernel.rate]


def _quantising_bytes(work: Work, name: str, again: frozenset[str]) -> float:
    """HBM bytes of quantising activations (forward, and where layers are recomputed) or gradients (backward)."""
    recomputed = work.quantised_inputs if again - {"scores"} else 0.0
    elements = {"forward": work.quantised_inputs, "recomputation": recomputed, "backward": work.quantised_gradients}
    return QUANTISE_BYTES * elements[name]


def matmul_seconds(m: Matmul, target: Target) -> tuple[float, float]:
    """Seconds of a matmul at the matrix unit's rate, and of its bytes at that of the HBM; it takes the longer."""
    chip, efficiency = target.chip, target.efficiency
    reached: float = (
        getattr(chip, f"flops_{m.rate}") * efficiency.matmul * shape_efficiency(m.m, m.k, m.n, efficiency.tile)
    )
    reached *= efficiency.grouped_matmul if m.grouped else 1.0
    return m.flops / reached, m.bytes(2) / (chip.hbm_bandwidth * efficiency.hbm)


def shape_efficiency(m: float, k: float, n: float, tile: int) -> float:
    """Returns the fraction of a large matmul's rate that [m, k] x [k, n] reaches: partial tiles, pipelines filling."""

    def full(size: float) -> float:
        return size / (-(-size // tile) * tile)

    filling = (m / (m + tile)) * (k / (k + tile)) * (n / (n + tile))
    return max(0.02, full(k) * full(n) * filling)

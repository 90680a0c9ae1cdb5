"""Choice of the attention kernel, made before tracing from platform, shapes and dtype.

"auto" takes the first kernel of the platform that supports the shapes, and notes why it passed over another. A kernel
named in the Run is used or refused, never replaced. A kernel from outside the package is a `Kernels` object, named as
`module:attribute`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright import plugins
from meshwright.config import Training
from meshwright.errors import ConfigError
from meshwright.hardware.machine import Machine
from meshwright.models.remat import ATTN_SCORES, REMAT_POLICIES
from meshwright.sharding.sequence import SequenceSplit

if TYPE_CHECKING:
    from meshwright.models.kernels.attention import CrossAttention, SelfAttention
    from meshwright.models.kernels.chunks import ChunkAttention
    from meshwright.models.model import ModelSpec


@dataclasses.dataclass(frozen=True)
class AttentionShapes:
    """Facts of a run that decide whether a kernel supports it."""

    platform: str
    """`jax.Device.platform`: cpu, tpu, gpu or cuda, rocm."""
    head_sizes: tuple[int, ...]
    """Sizes of the layers' keys and values, each once."""
    seq: int
    """Tokens of the whole sequence T."""
    chunk: int
    """Tokens of a chunk, of which a device has two where the context strategy is ring, usp or all_gather; else T."""
    dtype: str
    """Dtype of queries, keys and values."""
    remat: str
    """Remat policy (models/remat.py)."""
    chip: str | None = None
    """Name in `chips.CHIPS`, if it is known."""


FEATURES: dict[str, str] = {"softcap": "soft cap of the scores", "sinks": "attention sinks"}
"""What layers may need of a kernel besides causal attention in a window -> in words (kernels/scores.py)."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Attention kernel: self-attention of whole sequences, and attention between parts of a sequence.

    The context strategies ring and usp need `chunk_attention`; all_gather needs it or `cross_attention`.
    """

    name: str
    """Name in logs, lints and the census."""
    self_attention: "SelfAttention"
    """Kernel where a device has whole sequences: without context parallelism, and with Ulysses."""
    cross_attention: "CrossAttention | None" = None
    """Kernel between queries and keys at any positions; None where it has none."""
    unsupported: Callable[[AttentionShapes], str | None] = lambda shapes: None
    """Returns the reason why the kernel cannot run these shapes, None if it can."""
    chunk_attention: "ChunkAttention | None" = None
    """Kernel between two chunks of a sequence, with its log-sum-exp and its backward pass; None where it has none."""
    features: frozenset[str] = frozenset()
    """What the kernel computes of `FEATURES`; it is not chosen for layers that need another."""
    missing: Callable[[], str | None] = lambda: None
    """Returns which library the kernel lacks on this machine, None if it lacks none."""
    fused: bool = True
    """Whether scores stay on the chip; the planner counts their HBM bytes otherwise."""
    backward: float = 2.5
    """Matrix products of the backward pass over those of the forward pass: five for two, the scores again included."""
    note: str = ""
    """Why "auto" did not take the platform's own kernel."""

    @property
    def summary(self) -> str:
        """Name, and the note if there is one."""
        return f"{self.name} ({self.note})" if self.note else self.name


def _reference_unsupported(shapes: AttentionShapes) -> str | None:
    # A policy of jax.checkpoint cannot drop only the scores and save everything else: the kernel must not save them.
    if ATTN_SCORES in REMAT_POLICIES[shapes.remat].dropped:
        return f"reference attention saves its scores, which --training.remat {shapes.remat} drops"
    return None


# A run has one kernel: the others are not imported.
def _reference(block: int) -> Kernels:
    from meshwright.models.kernels.attention import as_self_attention, reference_attention

    attend, features = as_self_attention(reference_attention), frozenset(FEATURES)
    return Kernels("reference", attend, reference_attention, _reference_unsupported, features=features, fused=False)


def _blocked(block: int) -> Kernels:
    from meshwright.models.kernels.blocked import blocked_chunks, blocked_self_attention

    features = frozenset(FEATURES)
    return Kernels("blocked", blocked_self_attention, chunk_attention=blocked_chunks, features=features, fused=False)


def _splash(block: int) -> Kernels:
    from meshwright.models.kernels.splash import splash_kernels

    return splash_kernels(block)


def _splash_fused(block: int) -> Kernels:
    from meshwright.models.kernels.splash import splash_kernels

    return splash_kernels(block, backward_kernels=1)


def _cudnn(block: int) -> Kernels:
    from meshwright.models.kernels.cudnn import cudnn_kernels

    return cudnn_kernels()


KERNELS: dict[str, Callable[[int], Kernels]] = {
    "reference": _reference,
    "blocked": _blocked,
    "splash": _splash,
    "splash_fused": _splash_fused,
    "cudnn": _cudnn,
}
"""Kernels by name, each a function of the largest block of queries and keys."""

# What "auto" tries, by `jax.Device.platform`, best first; "blocked" supports everything. The fused backward kernel is
# slower than two on v5p and faster on tpu7x (public MaxText recipes, measured on both; docs/log.md).
AUTO: dict[str, tuple[str, ...]] = {"cpu": ("reference",), "tpu": ("splash",), "gpu": ("cudnn",), "cuda": ("cudnn",)}
AUTO_BY_CHIP: dict[str, tuple[str, ...]] = {"tpu7x": ("splash_fused",)}


def kernels_of(training: Training, spec: "ModelSpec", sequence: SequenceSplit, machine: Machine) -> Kernels:
    """Chooses the attention kernel of a placed run, as `choose_kernels`."""
    return choose_kernels(
        training.attention_kernel,
        machine,
        block=training.attention_block,
        remat=training.remat,
        head_sizes=tuple(sorted({size for a in spec.attention for size in (a.head_size, a.value_size)})),
        dtype=training.compute_dtype,
        sequence=sequence,
        needs=frozenset().union(*(a.features for a in spec.attention)),
    )


def choose_kernels(
    name: str,
    machine: Machine,
    *,
    block: int,
    remat: str,
    head_sizes: tuple[int, ...],
    dtype: str,
    sequence: SequenceSplit,
    needs: frozenset[str] = frozenset(),
) -> Kernels:
    """Chooses the attention kernel of a run, before anything is traced.

    name: "auto", a row of KERNELS, or a `Kernels` named as `module:attribute`.  block: largest block of queries and
    keys, for kernels that take one.  remat: remat policy.  head_sizes: of the layers.  dtype: compute dtype.
    sequence: split over `context`.  needs: rows of `FEATURES` that some layer has.

    The result's `name` is the attention that runs: "ring of splash" where keys go around a ring. Raises ConfigError
    where the named kernel does not support the run, or would not be used.
    """
    chunk = sequence.seq // (2 * sequence.groups) if sequence.groups > 1 else sequence.seq
    shapes = AttentionShapes(machine.platform, head_sizes, sequence.seq, chunk, dtype, remat, machine.chip_name)

    def refusal(kernels: Kernels) -> str | None:
        missing = None if machine.installed else kernels.missing()
        return kernels.unsupported(shapes) or _lacking(kernels, needs) or missing or _unused(kernels, sequence)

    if name == "auto":
        reasons: list[str] = []
        names = (*AUTO_BY_CHIP.get(machine.chip_name or "", AUTO.get(machine.platform, ())), "blocked")
        for kernels in (KERNELS[candidate](block) for candidate in names):
            reason = refusal(kernels)
            if reason is None:
                return _in_strategy(dataclasses.replace(kernels, note="; ".join(reasons)), sequence)
            reasons.append(reason)
    kernels = KERNELS[name](block) if name in KERNELS else plugins.resolve("attention kernel", name, KERNELS)
    if not isinstance(kernels, Kernels):
        raise ConfigError(f"attention kernel {name!r}", f"it is a {type(kernels).__name__}", "a meshwright `Kernels`")
    reason = refusal(kernels)
    if reason is not None:
        raise ConfigError(
            f"--training.attention-kernel {name}", reason, "--training.attention-kernel auto, or change what it lacks"
        )
    return _in_strategy(kernels, sequence)


def _lacking(kernels: Kernels, needs: frozenset[str]) -> str | None:
    lacking = [words for feature, words in FEATURES.items() if feature in needs - kernels.features]
    return f"{kernels.name} attention has no {lacking[0]}, which the model's layers have" if lacking else None


def _unused(kernels: Kernels, sequence: SequenceSplit) -> str | None:
    """Returns why a context strategy would not run the kernel, None if it does."""
    if kernels.chunk_attention is not None or sequence.groups == 1:
        return None
    if sequence.is_ring:
        return (
            f"--training.context-strategy {sequence.strategy} over {sequence.shards} devices needs attention between "
            f"chunks in a ring, which {kernels.name} lacks"
        )
    if kernels.cross_attention is None:
        return f"--training.context-strategy all_gather needs attention to gathered keys, which {kernels.name} lacks"
    return None


def _in_strategy(kernels: Kernels, sequence: SequenceSplit) -> Kernels:
    """Gives the kernel its name in a ring."""
    return dataclasses.replace(kernels, name=f"ring of {kernels.name}") if sequence.is_ring else kernels

"""Choice of the attention kernel, made before tracing from platform, shapes and dtype.

"auto" takes the first kernel of the platform that supports the shapes, and notes why it passed over another. A kernel
named in the Run is used or refused, never replaced. A kernel from outside the package is a `Kernels` object, named as
`module:attribute`.
"""

import dataclasses
from collections.abc import Callable

from meshwright import plugins
from meshwright.errors import ConfigError
from meshwright.models.kernels.attention import CrossAttention, SelfAttention, as_self_attention, reference_attention
from meshwright.models.kernels.blocked import blocked_chunks, blocked_self_attention
from meshwright.models.kernels.chunks import ChunkAttention, self_attention_of
from meshwright.models.kernels.cudnn import MAX_HEAD_SIZE, cudnn_attention, cudnn_chunks, has_cudnn
from meshwright.models.kernels.splash import LANES, SplashChunks
from meshwright.models.remat import ATTN_SCORES, REMAT_POLICIES
from meshwright.sharding.sequence import SequenceSplit

HEAD_MULTIPLE = 64
"""Splash attention's heads are multiples of it."""


@dataclasses.dataclass(frozen=True)
class AttentionShapes:
    """Facts of a run that decide whether a kernel supports it."""

    platform: str
    """`jax.Device.platform`: cpu, tpu, gpu or cuda, rocm."""
    head_sizes: tuple[int, ...]
    """Head sizes H of the layers, each once."""
    seq: int
    """Tokens of the whole sequence T."""
    chunk: int
    """Tokens of a chunk, of which a device has two where the context strategy is ring, usp or all_gather; else T."""
    dtype: str
    """Dtype of queries, keys and values."""
    remat: str
    """Remat policy (models/remat.py)."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Attention kernel: self-attention of whole sequences, and attention between parts of a sequence.

    The context strategies ring and usp need `chunk_attention`; all_gather needs it or `cross_attention`.
    """

    name: str
    """Name in logs, lints and the census."""
    self_attention: SelfAttention
    """Kernel where a device has whole sequences: without context parallelism, and with Ulysses."""
    cross_attention: CrossAttention | None = None
    """Kernel between queries and keys at any positions; None where it has none."""
    unsupported: Callable[[AttentionShapes], str | None] = lambda shapes: None
    """Returns the reason why the kernel cannot run these shapes, None if it can."""
    chunk_attention: ChunkAttention | None = None
    """Kernel between two chunks of a sequence, with its log-sum-exp and its backward pass; None where it has none."""
    missing: Callable[[], str | None] = lambda: None
    """Returns which library the kernel lacks on this machine, None if it lacks none."""
    fused: bool = True
    """Whether scores stay on the chip; the planner counts their HBM bytes otherwise."""
    note: str = ""
    """Why "auto" did not take the platform's own kernel."""

    @property
    def summary(self) -> str:
        """Name, and the note if there is one."""
        return f"{self.name} ({self.note})" if self.note else self.name


def _splash_unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform != "tpu":
        return f"splash attention is a TPU kernel, and the devices are of platform {shapes.platform!r}"
    what, n = ("sequence", shapes.seq) if shapes.chunk == shapes.seq else ("chunk of the sequence", shapes.chunk)
    if n % LANES:
        return f"splash attention takes a {what} divisible by {LANES}: {n} = {n // LANES} * {LANES} + {n % LANES}"
    for n in shapes.head_sizes:
        if n % HEAD_MULTIPLE:
            return (
                f"splash attention takes a head size divisible by {HEAD_MULTIPLE}: {n} = {n // HEAD_MULTIPLE} * "
                f"{HEAD_MULTIPLE} + {n % HEAD_MULTIPLE}"
            )
    return None


def _cudnn_unsupported(shapes: AttentionShapes) -> str | None:
    if shapes.platform not in ("gpu", "cuda"):
        return f"cuDNN attention runs on NVIDIA GPUs, and the devices are of platform {shapes.platform!r}"
    if shapes.dtype not in ("bfloat16", "float16"):
        return f"cuDNN attention takes bfloat16 or float16, and the compute dtype is {shapes.dtype}"
    for head in shapes.head_sizes:
        if head > MAX_HEAD_SIZE or head % 8:
            return (
                f"cuDNN attention takes heads of at most {MAX_HEAD_SIZE} in multiples of 8, and the head size is {head}"
            )
    return None


def _cudnn_missing() -> str | None:
    return None if has_cudnn() else "cuDNN 9 (libcudnn.so.9) cannot be loaded here"


def _reference_unsupported(shapes: AttentionShapes) -> str | None:
    # A policy of jax.checkpoint cannot drop only the scores and save everything else: the kernel must not save them.
    if ATTN_SCORES in REMAT_POLICIES[shapes.remat].dropped:
        return f"reference attention saves its scores, which --training.remat {shapes.remat} drops"
    return None


def _splash(block: int) -> Kernels:
    chunks = SplashChunks(block).attention()
    return Kernels("splash", self_attention_of(chunks), unsupported=_splash_unsupported, chunk_attention=chunks)


KERNELS: dict[str, Kernels] = {
    "reference": Kernels(
        "reference", as_self_attention(reference_attention), reference_attention, _reference_unsupported, fused=False
    ),
    "blocked": Kernels("blocked", blocked_self_attention, chunk_attention=blocked_chunks, fused=False),
    "splash": _splash(512),
    "cudnn": Kernels(
        "cudnn", cudnn_attention, unsupported=_cudnn_unsupported, chunk_attention=cudnn_chunks, missing=_cudnn_missing
    ),
}

# What "auto" tries, by `jax.Device.platform`, best first; "blocked" supports everything.
AUTO: dict[str, tuple[str, ...]] = {"cpu": ("reference",), "tpu": ("splash",), "gpu": ("cudnn",), "cuda": ("cudnn",)}


def choose_kernels(
    name: str,
    platform: str,
    *,
    block: int,
    remat: str,
    head_sizes: tuple[int, ...],
    dtype: str,
    sequence: SequenceSplit,
    installed: bool = False,
) -> Kernels:
    """Chooses the attention kernel of a run, before anything is traced.

    name: "auto", a row of KERNELS, or a `Kernels` named as `module:attribute`.  platform: `jax.Device.platform`.
    block: largest block of queries and keys, for kernels that take one.  remat: remat policy.  head_sizes: of the
    layers.  dtype: compute dtype.  sequence: split over `context`.  installed: whether libraries count as present, as
    on the hardware that a plan is for.

    The result's `name` is the attention that runs: "ring of splash" where keys go around a ring. Raises ConfigError
    where the named kernel does not support the run, or would not be used.
    """
    chunk = sequence.seq // (2 * sequence.groups) if sequence.groups > 1 else sequence.seq
    shapes = AttentionShapes(platform, head_sizes, sequence.seq, chunk, dtype, remat)

    def refusal(kernels: Kernels) -> str | None:
        missing = None if installed else kernels.missing()
        return kernels.unsupported(shapes) or missing or _unused(kernels, sequence)

    if name == "auto":
        reasons = []
        for kernels in (KERNELS[candidate] for candidate in (*AUTO.get(platform, ()), "blocked")):
            reason = refusal(kernels)
            if reason is None:
                return _prepare(dataclasses.replace(kernels, note="; ".join(reasons)), sequence, block)
            reasons.append(reason)
    kernels = plugins.resolve("attention kernel", name, KERNELS)
    if not isinstance(kernels, Kernels):
        raise ConfigError(f"attention kernel {name!r}", f"it is a {type(kernels).__name__}", "a meshwright `Kernels`")
    reason = refusal(kernels)
    if reason is not None:
        raise ConfigError(
            f"--training.attention-kernel {name}", reason, "--training.attention-kernel auto, or change what it lacks"
        )
    return _prepare(kernels, sequence, block)


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


def _prepare(kernels: Kernels, sequence: SequenceSplit, block: int) -> Kernels:
    """Gives the kernel its blocks, and its name in a ring."""
    if kernels.name == "splash":
        kernels = dataclasses.replace(_splash(block), note=kernels.note)
    return dataclasses.replace(kernels, name=f"ring of {kernels.name}") if sequence.is_ring else kernels

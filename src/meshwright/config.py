"""The parts of a `Run` that know no model: mesh, training, optimizer, data, faults.

Values and the checks that need nothing but themselves; `runs.placed_run` checks whether a model fits a mesh.
"""

import dataclasses
import math
from typing import Annotated, Literal

import msgspec
import tyro

from meshwright.errors import ConfigError, nearest
from meshwright.plugins import keep_names, name_of
from meshwright.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranged,
    Seed,
    Share,
)
from meshwright.words import AXES, AXIS_ALIASES


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Degrees of the mesh axes. An axis of degree 1 costs nothing.

    Example:
        >>> shape = mw.MeshShape.parse("data=2,fsdp=4,tensor=8")
        >>> shape.size, shape == mw.MeshShape(data=2, fsdp=4, tensor=8)
        (64, True)
    """

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    slices: int = 1
    """Parts of the machine joined by the data-centre network: slices of TPUs, nodes of GPUs."""
    dcn_axis: str = "data"
    """DCN axis: the one axis that crosses slices; all others lie inside a slice."""

    def __post_init__(self) -> None:
        if self.dcn_axis not in AXES or self.slices < 1:
            raise ConfigError(
                f"{self.slices} slices with DCN axis {self.dcn_axis!r}",
                "a mesh has at least one slice, and one of its axes crosses them",
                f"one of {', '.join(AXES)}",
            )
        degree = self.degrees()[self.dcn_axis]
        if degree % self.slices:
            raise ConfigError(
                f"mesh axis {self.dcn_axis}={degree} across {self.slices} slices",
                f"{degree} = {degree // self.slices} * {self.slices} + {degree % self.slices}",
                f"{self.dcn_axis}={self.slices}*{max(1, round(degree / self.slices))}",
            )
        for axis, count in self.degrees().items():
            if count < 1:
                raise ConfigError(
                    f"mesh axis {axis}={count}",
                    "a degree is a number of devices, so at least 1",
                    f"{axis}=1",
                )

    def degrees(self) -> dict[str, int]:
        """Returns the degree of every axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """Number of devices: the product of all degrees."""
        return self.over(tuple(AXES))

    def over(self, axes: tuple[str, ...]) -> int:
        """Returns the product of the degrees of `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def __str__(self) -> str:
        def text(axis: str, degree: int) -> str:
            crosses = axis == self.dcn_axis and self.slices > 1
            return (
                f"{axis}={self.slices}*{degree // self.slices}" if crosses else f"{axis}={degree}"
            )

        return (
            ",".join(text(axis, degree) for axis, degree in self.degrees().items() if degree > 1)
            or "data=1"
        )

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parses `data=2,fsdp=2,tensor=2`; `data=4*2` means 4 slices of 2. Raises ConfigError on anything else."""
        degrees: dict[str, int] = {}
        slices, dcn_axis = 1, "data"
        for part in text.split(","):
            axis, equals, degree = part.strip().partition("=")
            if axis not in AXES:
                known = next(
                    (ours for ours, names in AXIS_ALIASES.items() if axis.lower() in names.split()),
                    None,
                )
                fix = f"{known}={degree or 'N'}" if known else nearest(axis.lower(), AXES)
                raise ConfigError(f"mesh {text!r}", f"{axis!r} is not a mesh axis", fix)
            if axis in degrees:
                raise ConfigError(
                    f"mesh {text!r}", f"{axis!r} is given twice", "give each axis once"
                )
            outer, star, inner = degree.partition("*")
            if (
                not equals
                or not outer.isdecimal()
                or (star and not inner.isdecimal())
                or len(degree) > 18
            ):
                raise ConfigError(
                    f"mesh {text!r}", f"{part!r} is not axis=degree", "for example data=2,fsdp=4"
                )
            if star and slices > 1:
                raise ConfigError(
                    f"mesh {text!r}",
                    f"{dcn_axis} and {axis} both cross slices",
                    "one axis that does, say data=4*2",
                )
            if star:
                slices, dcn_axis = int(outer), axis
            degrees[axis] = int(outer) * int(inner or 1)
        return cls(**degrees, slices=slices, dcn_axis=dcn_axis)


Precision = Literal["float32", "bfloat16"]
_BlockSize = Annotated[int, msgspec.Meta(ge=128, multiple_of=128)]
ParamRounding = Literal["master", "stochastic"]
MuonHeads = Literal["each", "together"]


@dataclasses.dataclass(frozen=True)
class Optimizer(Ranged, part="optimizer"):
    """Update rule, learning-rate schedule and regularisation.

    Example:
        >>> mw.Optimizer(name="lion", learning_rate=1e-4, warmup_steps=100).lr_schedule
        'cosine'
    """

    name: str = "adamw"
    """Update rule: adamw, adafactor, lion, muon, sgd, or module:attribute of a function
    `(config: Optimizer, learning_rate: optax.Schedule) -> optax.GradientTransformation`."""
    learning_rate: Annotated[PositiveFloat, tyro.conf.arg(aliases=["--lr"])] = 3e-4
    """Peak learning rate."""
    lr_schedule: str = "cosine"
    """Shape after the peak: cosine, linear, constant, wsd (constant, then linear decay over the last fifth of the
    steps), or module:attribute of a function `(config: Optimizer, intervals: int) -> optax.Schedule`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up, the last of them at the peak; a run that has no more steps warms up in all but its
    last."""
    final_lr_fraction: Share = 0.1
    """Learning rate at the last step, as a fraction of the peak (not used by `constant`)."""
    beta1: Fraction = 0.9
    """Decay of the first moment (momentum for sgd and muon)."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: NonNegativeFloat = 1e-8
    """Constant added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, applied to weight matrices and embeddings, not to norms and biases."""
    grad_clip_norm: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""
    moment_dtype: Precision = "float32"
    """Type in which the first moment is stored (momentum for sgd and muon). Adafactor has none."""
    lr_groups: tuple[str, ...] = ()
    """Factors on learning rate and weight decay: `embed=0.1`, `blocks.*norm*=2`, `role:router=0.5`; the first wins."""
    muon_heads: Annotated[MuonHeads, tyro.conf.Fixed] = "each"
    """Matrices of attention for Muon: those of every head [D, H] (each), or of a projection [D, N H] (together)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_names(self, "name", "lr_schedule")


Remat = Literal[
    "auto",
    "none",
    "attention",
    "projections",
    "feed_forward",
    "attention_out",
    "full",
    "offload_attention",
    "offload",
]
StageSaves = Literal["auto", "input", "layers"]
ContextStrategy = Literal["auto", "ring", "all_gather", "ulysses", "usp"]
GatherAhead = Literal["auto", "layer", "none"]
TensorStrategy = Literal["auto", "ring", "gather"]


@dataclasses.dataclass(frozen=True)
class Training(Ranged, part="training"):
    """Training step: number of steps, batch, precision, rematerialisation, pipeline schedule.

    Example:
        >>> training = mw.Training(steps=1000, batch=64, seq=2048, remat="projections")
        >>> training.compute_dtype, training.reduce_dtype
        ('bfloat16', 'float32')
    """

    steps: Annotated[PositiveInt, tyro.conf.arg(aliases=["--steps"])] = 300
    """Optimizer steps."""
    batch: Annotated[PositiveInt, tyro.conf.arg(aliases=["--batch"])] = 16
    """Global batch: sequences per step over all devices."""
    batch_ramp: tuple[str, ...] = ()
    """Smaller batches to begin with, each STEPS=SEQUENCES (`100=64 200=128`); each has to divide like `batch`."""
    seq: Annotated[PositiveInt, tyro.conf.arg(aliases=["--seq"])] = 128
    """Tokens per sequence T."""
    microbatches: NonNegativeInt = 0
    """Gradient accumulation: parts of the batch computed one after another, with `stage` through the pipeline. 0 takes
    the fastest predicted that fits, 1 where the chip is unknown."""
    pipeline_schedule: str = "auto"
    """Pipeline schedule: 1f1b, interleaved, zbv, gpipe, zero_bubble, circular, or module:attribute of a
    `PipelineSchedule`. `auto` takes the fastest predicted of the first three, 1f1b where the chip is unknown."""
    virtual_stages: PositiveInt = 2
    """Chunks of layers on each stage, for schedules that use them (interleaved, circular)."""
    seed: Annotated[Seed, tyro.conf.arg(aliases=["--seed"])] = 0
    """Seed of initial values, data order and dropout; the same numbers on any mesh."""
    param_dtype: Precision = "float32"
    """Type of the sharded parameters. The optimizer computes in float32 either way."""
    param_rounding: ParamRounding = "master"
    """How bfloat16 parameters take small updates: by a float32 master weight, or rounded at random (stochastic)."""
    compute_dtype: Precision = "bfloat16"
    """Type of gathered weights and of activations."""
    reduce_dtype: Precision = "float32"
    """Type in which gradients are summed over devices."""
    matmul_precision: str = "compute"
    """Precision of the layers' matmuls, forward and backward: compute (the compute dtype), fp8, fp8_rowwise, mxfp8,
    int8, or module:attribute of a `MatmulPrecision`. Embedding, unembedding, norms, router and attention itself stay in
    the compute dtype, and so do the grouped matmuls of experts where float8 does not make them faster (int8 recipes,
    TPUs, H100, H200)."""
    remat: Remat = "auto"
    """Rematerialisation (activation checkpointing): the backward pass recomputes nothing (none), the attention scores
    (attention), everything between the projections (projections), the feed-forward half of a layer (feed_forward), all
    but the attention kernel (attention_out), or the whole layer (full). On TPUs the layer inputs can wait in host
    memory (offload), with the attention outputs (offload_attention). `auto` takes the policy with the shortest
    predicted step that fits the chip's memory, and full where the chip is unknown."""
    stage_saves: StageSaves = "auto"
    """What a pipeline stage saves of a microbatch for its backward pass: its input, from which it recomputes its layers
    (input), or what `remat` saves of every layer (layers). `auto`: what fits and is fastest; unknown chips: input."""
    saved_layers: Annotated[NonNegativeInt, tyro.conf.Fixed] = 0
    """First layers that save all projections; the others follow `remat`, whose `auto` fills the memory. No stages."""
    context_strategy: ContextStrategy = "auto"
    """Attention over a sequence sharded over `context`: pass key/value blocks around a ring (ring), gather them
    (all_gather), exchange heads for positions (ulysses), or a ring of Ulysses groups (usp). `auto` takes ulysses where
    `context` divides the key/value heads, else ring, and ring where the chip is unknown."""
    gather_ahead: Annotated[GatherAhead, tyro.conf.Fixed] = "auto"
    """Weights that a layer needs first: gathered while the layer before computes, their gradients reduced while the one
    below computes (layer), or within the layer (none). `auto`: `layer` on closed 3D tori of v5p and with offload."""
    tensor_strategy: Annotated[TensorStrategy, tyro.conf.Fixed] = "auto"
    """Tensor parallelism's gathers and scatters of the sequence: in chunks around a ring, each overlapped with the
    matmul of another chunk (ring: collective matmul), or in one collective (gather). `auto` is the ring on TPUs."""
    attention_kernel: str = "auto"
    """Attention kernel: auto (the platform's own), reference, blocked, splash, splash_fused, cudnn, or
    module:attribute of a `Kernels`. A kernel named here is used or refused, never replaced."""
    grouped_matmul: Annotated[str, tyro.conf.Fixed] = "auto"
    """Grouped matmul of dropless experts: auto (triton on NVIDIA GPUs, else ragged_dot), ragged_dot (XLA's), triton, or
    module:attribute of a `GroupedMatmul`. One named here is used or refused, never replaced."""
    attention_block: Annotated[_BlockSize, tyro.conf.Fixed] = 512
    """Largest block of queries and keys in the TPU's attention kernel; a multiple of 128."""
    deterministic: bool = False
    """Same bits in every run, on NVIDIA GPUs too: by XLA's deterministic kernels, chosen without timing them, gradients
    of embeddings summed in order, and NCCL_ALGO=Ring. CPUs and TPUs have the same bits anyway."""
    compiler_options: tuple[str, ...] = ("auto",)
    """XLA compiler options for accelerators, each NAME=VALUE; `auto`: the chip's (hardware/chips.toml)."""
    unroll: Annotated[PositiveInt, tyro.conf.Fixed] = 1
    """Layers per iteration of the loop over layers."""
    dropout: Fraction = 0.0
    """Fraction of activations dropped after the embedding and at the end of each residual branch."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-sum-exp of the logits (PaLM, arXiv:2204.02311, section 5)."""
    logits_mib: Annotated[PositiveInt, tyro.conf.Fixed] = 64
    """Largest size of the logits on a device, in MiB; the loss is computed over chunks of tokens."""
    log_every: PositiveInt = 1
    """Steps between lines of the metrics file."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out text; 0 evaluates only at the end."""
    eval_samples: NonNegativeInt = 256
    """Held-out sequences in one evaluation; 0 takes all."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves only at the end."""
    max_to_keep: PositiveInt = 2
    """Checkpoints kept; older ones are deleted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_names(
            self, "pipeline_schedule", "attention_kernel", "grouped_matmul", "matmul_precision"
        )


@dataclasses.dataclass(frozen=True)
class Data(Ranged, part="data"):
    """Text sources and their tokenisation.

    Example:
        >>> mw.Data(paths=("books/*.txt=3", "code/=1"), tokenizer="bpe:4096").tokenizer
        'bpe:4096'
    """

    paths: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--data"])] = ("stdlib",)
    """Files, folders, globs, folders that `meshwright tokenize` wrote, or module:attribute of a
    function that yields documents; `stdlib` is Python's standard library. PATH=WEIGHT mixes several by weight."""
    tokenizer: str = "bytes"
    """Tokenizer: `bytes`, `chars`, `bpe:SIZE` (trained on the text), or a tokenizer.json file."""
    other_tokenizer: bool = False
    """Accept that the weights of init-from were trained with another tokenizer: their embeddings stand for other
    texts, and are trained anew."""
    text_field: str = "text"
    """Field or column with the text in JSON lines and tables, `body.text` of nested ones."""
    held_out: Fraction | None = None
    """Held-out fraction: tokens at the end of each source that are evaluated and never trained on; None: a tenth, at
    most 10M tokens."""
    prompt: str = "\n"
    """Prompt of the text sampled at the end of a run."""
    sample: NonNegativeInt | None = None
    """Tokens sampled at the end, at most a sequence; 200 by default up to 100M parameters or with sample-every."""
    sample_every: NonNegativeInt = 0
    """Steps between such samples while it trains; 0 samples only at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "paths", tuple(name_of(path) for path in self.paths))


BadStep = Literal["stop", "skip", "roll_back"]


@dataclasses.dataclass(frozen=True)
class Faults(Ranged, part="faults"):
    """Policy for bad records and bad steps.

    Example:
        >>> mw.Faults(bad_records=0.001, bad_step="skip").most_skipped
        10
    """

    bad_records: Fraction = 0.0
    """Largest share of records (lines, rows, text files) that may be skipped because they cannot be read; their number
    and the first of them are kept with the tokens. 0 refuses the first, with its file and line."""
    bad_step: BadStep = "stop"
    """What follows a step whose loss or gradient is not finite, or spikes: the run stops; the update is left out and
    the run goes on (skip); or the run returns to its last checkpoint and leaves out the samples of that step
    (roll_back). Batch and metrics of the step are kept in any case, and the state before the first that is not
    finite."""
    spike: NonNegativeFloat = 0.0
    """Gradient norm that counts as a spike, as a multiple of the median of the last 100 steps; 0 takes none for one.
    Its update is in the parameters when it is seen: the run stops or rolls back."""
    most_skipped: PositiveInt = 10
    """Bad steps of one start of the run after which it stops whatever `bad_step` is."""
    check_every: NonNegativeInt = 0
    """Steps between two that are taken twice, their results and all replicas compared bit by bit: it finds silent
    corruption, and takes a step's time and the memory of a second state. 0 checks none. NVIDIA GPUs need
    `--training.deterministic` for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.spike <= 1:
            truth = "it is a multiple of the median, above 1; 0 takes none for a spike"
            raise ConfigError(f"--faults.spike {self.spike}", truth, "--faults.spike 10")
        if self.spike and self.bad_step == "skip":
            truth = "a spike is seen when its update is in the parameters, so it cannot be left out"
            raise ConfigError(
                "--faults.spike with --faults.bad-step skip", truth, "--faults.bad-step roll_back"
            )

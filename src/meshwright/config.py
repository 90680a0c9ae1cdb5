"""The parts of a `Run` that know no model: mesh, training, optimizer, data, faults.

Values and the checks that need nothing but themselves;
`runs.placed_run` checks whether a model fits a mesh.
"""

import dataclasses
from typing import Annotated, Final, Literal

import msgspec
import tyro

from meshwright.declarations import (
    TEXT_ONLY,
    TRANSFORMERS_ONLY,
    changes,
    refused,
)
from meshwright.errors import ConfigError
from meshwright.mesh_shape import MeshShape as MeshShape
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

    name: Annotated[str, changes("program", "plan")] = "adamw"
    """Update rule: adamw, adafactor, lion, muon, sgd, or module:attribute of a function
    `(config: Optimizer, learning_rate: optax.Schedule) -> optax.GradientTransformation`."""
    learning_rate: Annotated[PositiveFloat, tyro.conf.arg(aliases=["--lr"]), changes("program")] = (
        3e-4
    )
    """Peak learning rate."""
    lr_schedule: Annotated[str, changes("program")] = "cosine"
    """Shape after the peak: cosine, linear, constant, wsd (constant, then linear decay over the
    last fifth of the steps), or module:attribute of a function `(config: Optimizer, intervals: int)
    -> optax.Schedule`."""
    warmup_steps: Annotated[NonNegativeInt, changes("program")] = 0
    """Steps of linear warm-up, the last of them at the peak;
    a run that has no more steps warms up in all but its last."""
    final_lr_fraction: Annotated[Share, changes("program")] = 0.1
    """Learning rate at the last step, as a fraction of the peak (not used by `constant`)."""
    beta1: Annotated[Fraction, changes("program")] = 0.9
    """Decay of the first moment (momentum for sgd and muon)."""
    beta2: Annotated[Fraction, changes("program")] = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[NonNegativeFloat, changes("program")] = 1e-8
    """Constant added to the root of the second moment."""
    weight_decay: Annotated[NonNegativeFloat, changes("program")] = 0.1
    """Decoupled weight decay, applied to weight matrices and embeddings,
    not to norms and biases."""
    grad_clip_norm: Annotated[NonNegativeFloat, changes("program")] = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""
    moment_dtype: Annotated[Precision, changes("program", "plan")] = "float32"
    """Type in which the first moment is stored (momentum for sgd and muon). Adafactor has none."""
    lr_groups: Annotated[tuple[str, ...], changes("program")] = ()
    """Factors on learning rate and weight decay: `embed=0.1`, `blocks.*norm*=2`,
    `role:router=0.5`; the first wins."""
    muon_heads: Annotated[MuonHeads, changes("program", "plan"), TRANSFORMERS_ONLY] = "each"
    """Matrices of attention for Muon: those of every head [D, H] (each),
    or of a projection [D, N H] (together)."""

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

    steps: Annotated[PositiveInt, tyro.conf.arg(aliases=["--steps"]), changes("program")] = 300
    """Optimizer steps."""
    batch: Annotated[
        PositiveInt,
        tyro.conf.arg(aliases=["--batch"]),
        changes("program", "evaluation", "plan"),
    ] = 16
    """Global batch: sequences per step over all devices."""
    batch_ramp: Annotated[tuple[str, ...], changes("loop"), TRANSFORMERS_ONLY] = ()
    """Smaller batches to begin with, each STEPS=SEQUENCES (`100=64 200=128`);
    each has to divide like `batch`."""
    seq: Annotated[
        PositiveInt,
        tyro.conf.arg(aliases=["--seq"]),
        changes("program", "evaluation", "data", "plan", resumes=False),
        TRANSFORMERS_ONLY,
    ] = 128
    """Tokens per sequence T."""
    microbatches: Annotated[NonNegativeInt, changes("program", "evaluation", "plan")] = 0
    """Gradient accumulation: parts of the batch computed one after another, with `stage` through
    the pipeline. 0 takes the fastest predicted that fits, 1 where the chip is unknown."""
    pipeline_schedule: Annotated[
        str, changes("program", "plan", needs="mesh.stage"), TRANSFORMERS_ONLY
    ] = "auto"
    """Pipeline schedule: 1f1b, interleaved, zbv, gpipe, zero_bubble, circular, or module:attribute
    of a `PipelineSchedule`. `auto` takes the fastest predicted of the first three, 1f1b where the
    chip is unknown."""
    virtual_stages: Annotated[
        PositiveInt,
        changes("program", "evaluation", "plan", needs="mesh.stage"),
        TRANSFORMERS_ONLY,
    ] = 2
    """Chunks of layers on each stage, for schedules that use them (interleaved, circular)."""
    seed: Annotated[
        Seed, tyro.conf.arg(aliases=["--seed"]), changes("program", "data", resumes=False)
    ] = 0
    """Seed of initial values, data order and dropout; the same numbers on any mesh."""
    param_dtype: Annotated[Precision, changes("program", "evaluation", "plan", parity=False)] = (
        "float32"
    )
    """Type of the sharded parameters. The optimizer computes in float32 either way."""
    param_rounding: Annotated[ParamRounding, changes("program", "plan", parity=False)] = "master"
    """How bfloat16 parameters take small updates: by a float32 master weight,
    or rounded at random (stochastic)."""
    compute_dtype: Annotated[Precision, changes("program", "evaluation", "plan", parity=False)] = (
        "bfloat16"
    )
    """Type of gathered weights and of activations."""
    reduce_dtype: Annotated[Precision, changes("program", "plan", parity=False)] = "float32"
    """Type in which gradients are summed over devices."""
    matmul_precision: Annotated[
        str,
        changes("program", "evaluation", "plan", parity=False),
        refused(
            "lora",
            because=(
                "the recipes quantise weights and their gradients, and the weights that adapters "
                "add to are frozen"
            ),
            instead="--training.matmul-precision compute; --finetune.base int8 or nf4 saves memory",
        ),
        TRANSFORMERS_ONLY,
    ] = "compute"
    """Precision of the layers' matmuls, forward and backward: compute (the compute dtype), fp8,
    fp8_rowwise, mxfp8, int8, or module:attribute of a `MatmulPrecision`. Embedding, unembedding,
    norms, router and attention itself stay in the compute dtype, and so do the grouped matmuls of
    experts where float8 does not make them faster (int8 recipes, TPUs, H100, H200)."""
    remat: Annotated[Remat, changes("program", "plan")] = "auto"
    """Rematerialisation (activation checkpointing): the backward pass recomputes nothing (none),
    the attention scores (attention), everything between the projections (projections), the
    feed-forward half of a layer (feed_forward), all but the attention kernel (attention_out), or
    the whole layer (full). On TPUs the layer inputs can wait in host memory (offload), with the
    attention outputs (offload_attention). `auto` takes the policy with the shortest predicted step
    that fits the chip's memory, and full where the chip is unknown."""
    stage_saves: Annotated[
        StageSaves, changes("program", "plan", needs="mesh.stage"), TRANSFORMERS_ONLY
    ] = "auto"
    """What a pipeline stage saves of a microbatch for its backward pass: its input, from which it
    recomputes its layers (input), or what `remat` saves of every layer (layers). `auto`: what fits
    and is fastest; unknown chips: input."""
    saved_layers: Annotated[
        NonNegativeInt,
        changes("program", "evaluation", "plan"),
        TRANSFORMERS_ONLY,
    ] = 0
    """First layers that save all projections;
    the others follow `remat`, whose `auto` fills the memory. No stages."""
    context_strategy: Annotated[
        ContextStrategy, changes("program", "evaluation", "plan"), TRANSFORMERS_ONLY
    ] = "auto"
    """Attention over a sequence sharded over `context`: pass key/value blocks around a ring (ring),
    gather them (all_gather), exchange heads for positions (ulysses), or a ring of Ulysses groups
    (usp). `auto` takes ulysses where `context` divides the key/value heads, else ring, and ring
    where the chip is unknown."""
    gather_ahead: Annotated[
        GatherAhead,
        changes("program", "evaluation", "plan"),
        TRANSFORMERS_ONLY,
    ] = "auto"
    """Weights that a layer needs first: gathered while the layer before computes, their gradients
    reduced while the one below computes (layer), or within the layer (none). `auto`: `layer` on
    closed 3D tori of v5p and with offload."""
    tensor_strategy: Annotated[
        TensorStrategy, changes("program", "evaluation"), TRANSFORMERS_ONLY
    ] = "auto"
    """Tensor parallelism's gathers and scatters of the sequence: in chunks around a ring, each
    overlapped with the matmul of another chunk (ring: collective matmul), or in one collective
    (gather). `auto` is the ring on TPUs."""
    attention_kernel: Annotated[
        str, changes("program", "evaluation", "plan"), TRANSFORMERS_ONLY
    ] = "auto"
    """Attention kernel: auto (the platform's own), reference, blocked, splash, splash_fused,
    tokamax_splash, cudnn, or module:attribute of a `Kernels`. A kernel named here is used or
    refused, never replaced."""
    grouped_matmul: Annotated[str, changes("program", "evaluation"), TRANSFORMERS_ONLY] = "auto"
    """Grouped matmul of dropless experts: auto (triton on NVIDIA GPUs, else ragged_dot), ragged_dot
    (XLA's), triton, or module:attribute of a `GroupedMatmul`. One named here is used or refused,
    never replaced."""
    attention_block: Annotated[
        _BlockSize | None, changes("program", "evaluation"), TRANSFORMERS_ONLY
    ] = None
    """Largest block of queries and keys in the TPU's attention kernel; a multiple of 128. None: the
    blocks that take the least time by the bundles of the kernel where they are known (v6e), 512 on
    other chips."""
    deterministic: Annotated[bool, changes("program", "evaluation")] = False
    """Same bits in every run, on NVIDIA GPUs too: by XLA's deterministic kernels, chosen without
    timing them, gradients of embeddings summed in order, and NCCL_ALGO=Ring. CPUs and TPUs have the
    same bits anyway."""
    compiler_options: Annotated[tuple[str, ...], changes("program", "evaluation")] = ("auto",)
    """XLA compiler options for accelerators, each NAME=VALUE;
    `auto`: the chip's (hardware/chips.toml)."""
    unroll: Annotated[PositiveInt, changes("program", "evaluation"), TRANSFORMERS_ONLY] = 1
    """Layers per iteration of the loop over layers."""
    dropout: Annotated[Fraction, changes("program"), TRANSFORMERS_ONLY] = 0.0
    """Fraction of activations dropped after the embedding and at the end
    of each residual branch."""
    z_loss: Annotated[
        NonNegativeFloat,
        changes("program", "evaluation"),
        refused(
            "preferences",
            because=(
                "their loss compares log probabilities of answers, whose log-sum-exp has no weight "
                "of its own"
            ),
            instead="--training.z-loss 0",
        ),
        TRANSFORMERS_ONLY,
    ] = 0.0
    """Weight of the squared log-sum-exp of the logits (PaLM, arXiv:2204.02311, section 5)."""
    logits_mib: Annotated[
        PositiveInt,
        changes("program", "evaluation", "plan"),
        TRANSFORMERS_ONLY,
    ] = 64
    """Largest size of the logits on a device, in MiB;
    the loss is computed over chunks of tokens."""
    log_every: Annotated[PositiveInt, changes("loop")] = 1
    """Steps between lines of the metrics file."""
    health: Annotated[bool, changes("program", "loop")] = True
    """Measure every tensor in every step: norms of gradients, parameters and updates, the residual
    stream, attention and routers of each layer (docs/health.md)."""
    health_every: Annotated[PositiveInt, changes("loop")] = 10
    """Steps between two records of health.jsonl, which has the first step too."""
    eval_every: Annotated[NonNegativeInt, changes("loop")] = 0
    """Steps between evaluations on held-out text; 0 evaluates only at the end."""
    eval_samples: Annotated[NonNegativeInt, changes("evaluation", "loop"), TEXT_ONLY] = 256
    """Held-out sequences in one evaluation; 0 takes all."""
    save_every: Annotated[NonNegativeInt, changes("loop")] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    max_to_keep: Annotated[PositiveInt, changes("loop")] = 2
    """Checkpoints kept; older ones are deleted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_names(
            self, "pipeline_schedule", "attention_kernel", "grouped_matmul", "matmul_precision"
        )


Order = Literal["shuffled", "megatron"]
CONVERSATIONS_HAVE_AN_ORDER: Final = refused(
    "answers",
    "preferences",
    because="conversations are packed and ordered by themselves",
    instead="leave it out",
)


@dataclasses.dataclass(frozen=True)
class Data(Ranged, part="data"):
    """Text sources and their tokenisation.

    Example:
        >>> mw.Data(paths=("books/*.txt=3", "code/=1"), tokenizer="bpe:4096").tokenizer
        'bpe:4096'
    """

    paths: Annotated[
        tuple[str, ...],
        tyro.conf.arg(aliases=["--data"]),
        changes("evaluation", "data"),
        TEXT_ONLY,
    ] = ("stdlib",)
    """Files, folders, globs, folders that `meshwright tokenize` wrote, PREFIX.bin of Megatron, or
    module:attribute of a function that yields documents; `stdlib` is Python's standard library.
    PATH=WEIGHT mixes several by weight."""
    tokenizer: Annotated[str, changes("data"), TEXT_ONLY] = "bytes"
    """Tokenizer: `bytes`, `chars`, `bpe:SIZE` (trained on the text), or a tokenizer.json file."""
    other_tokenizer: Annotated[bool, changes("loop", needs="init_from"), TEXT_ONLY] = False
    """Accept that the weights of init-from were trained with another tokenizer: their embeddings
    stand for other texts, and are trained anew."""
    text_field: Annotated[
        str,
        changes("evaluation", "data"),
        refused(
            "answers",
            "preferences",
            because="records of conversations have fields of their own",
            instead="leave it out",
        ),
        TEXT_ONLY,
    ] = "text"
    """Field or column with the text in JSON lines and tables, `body.text` of nested ones."""
    held_out: Annotated[Fraction | None, changes("evaluation", "data"), TEXT_ONLY] = None
    """Held-out fraction: tokens at the end of each source that are evaluated and never trained on;
    None: a tenth, at most 10M tokens."""
    order: Annotated[
        Order,
        changes("evaluation", "data", resumes=False),
        CONVERSATIONS_HAVE_AN_ORDER,
        TEXT_ONLY,
    ] = "shuffled"
    """Order of training samples: windows of each source, shuffled anew in every epoch and mixed by
    weight; or that of Megatron, for Megatron datasets, with training.seed as its --seed."""
    split: Annotated[
        str,
        changes("evaluation", "data", resumes=False, needs="data.order"),
        CONVERSATIONS_HAVE_AN_ORDER,
        TEXT_ONLY,
    ] = "969,30,1"
    """Weights of training, validation and test in each dataset, in Megatron's order: its --split.
    The second part is evaluated, the third is not read."""
    order_samples: Annotated[
        PositiveInt | None,
        changes("data", needs="data.order"),
        CONVERSATIONS_HAVE_AN_ORDER,
        TEXT_ONLY,
    ] = None
    """Samples that Megatron's order is made for: its --train-samples,
    or --train-iters times --global-batch-size.
    None: first-sample and those of all steps."""
    first_sample: Annotated[
        NonNegativeInt,
        changes("data", resumes=False),
        CONVERSATIONS_HAVE_AN_ORDER,
        TEXT_ONLY,
    ] = 0
    """Samples at the beginning of the order that are not read: those
    that another program has trained on."""
    prompt: Annotated[str, changes("loop"), TEXT_ONLY] = "\n"
    """Prompt of the text sampled at the end of a run; by default a line break, and nothing where
    characters of a text without one are the tokens."""
    sample: Annotated[NonNegativeInt | None, changes("loop"), TEXT_ONLY] = None
    """Tokens sampled at the end, at most a sequence;
    200 by default up to 100M parameters or with sample-every."""
    sample_every: Annotated[NonNegativeInt, changes("loop"), TEXT_ONLY] = 0
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

    bad_records: Annotated[
        Fraction,
        changes("evaluation", "data"),
        refused(
            "answers",
            "preferences",
            because="a conversation that cannot be read is refused with its file and line",
            instead="correct it",
        ),
        TEXT_ONLY,
    ] = 0.0
    """Largest share of records (lines, rows, text files) that may be skipped because they cannot be
    read; their number and the first of them are kept with the tokens. 0 refuses the first, with its
    file and line."""
    bad_step: Annotated[BadStep, changes("loop")] = "stop"
    """What follows a step whose loss or gradient is not finite, or spikes: the run stops; the
    update is left out and the run goes on (skip); or the run returns to its last checkpoint and
    leaves out the samples of that step (roll_back). Batch and metrics of the step are kept in any
    case, and the state before the first that is not finite."""
    spike: Annotated[NonNegativeFloat, changes("loop")] = 0.0
    """Gradient norm that counts as a spike, as a multiple of the median of the last 100 steps;
    0 takes none for one.
    Its update is in the parameters when it is seen: the run stops or rolls back."""
    most_skipped: Annotated[PositiveInt, changes("loop")] = 10
    """Bad steps of one start of the run after which it stops whatever `bad_step` is."""
    check_every: Annotated[NonNegativeInt, changes("loop")] = 0
    """Steps between two that are taken twice, their results and all replicas compared bit by bit:
    it finds silent corruption, and takes a step's time and the memory of a second state. 0 checks
    none. NVIDIA GPUs need `--training.deterministic` for it."""
    check_replicas: Annotated[NonNegativeInt, changes("loop")] = 0
    """Steps between two comparisons of the replicas of every parameter and of the optimizer's
    state, bit by bit; they are also compared before each save. One that differs from most is
    replaced by their bits; of two that differ, the run returns to its last checkpoint. It reads the
    state once. 0 compares none. NVIDIA GPUs need `--training.deterministic` for it."""
    check_bits: Annotated[bool, changes("program")] = False
    """Sum the bits of every parameter and of the optimizer's state before and after each step: what
    a step leaves is what the next one has to find, so a bit that memory has flipped in between is
    named (docs/health.md). It reads them all twice more in a step."""

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

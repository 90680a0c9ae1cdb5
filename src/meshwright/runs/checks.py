"""Checks of a run before anything is traced: numbers in range, sizes that divide, features that go together."""

import dataclasses
import math
import operator
import typing

import tyro

from meshwright.config import MeshShape
from meshwright.data.batch import ramp_of
from meshwright.errors import ConfigError, divisors, refuse
from meshwright.fine_tuning import FineTune
from meshwright.models.families import builtin_name
from meshwright.models.remat import REMAT_POLICIES
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES

_COUNTED = frozenset({"vocab", "vocab_multiple", "width", "layers", "heads", "kv_heads", "head_size", "mlp"})
"""Model sizes of at least 1 unless their default is 0; others, such as shared experts, may be 0."""
_FROM_1 = "steps batch seq microbatches virtual_stages unroll logits_mib max_to_keep log_every attention_block"
_FROM_0 = "data.sample data.sample_every optimizer.warmup_steps training.eval_every training.eval_samples fsdp_min_size"


def check_sizes(run: Run) -> None:
    """Raises ConfigError for a number of the run, or a size of its model, that is out of range."""
    low = {**{f"training.{name}": 1 for name in _FROM_1.split()}, **dict.fromkeys(_FROM_0.split(), 0)}
    given = [(name, operator.attrgetter(name)(run), least) for name, least in low.items()]
    for field in dataclasses.fields(run.model):
        counted = field.name in _COUNTED and field.default != 0
        given.append((f"model.{field.name}", getattr(run.model, field.name), int(counted)))
    for name, size, least in given:
        most = 10**5 if name == "model.layers" else 2**62
        if (type(size) is int and not least <= size <= most) or (type(size) is float and not math.isfinite(size)):
            option = _as_given(run, name)
            truth = f"it is at least {least}" if size < least else f"it is a number up to {most}"
            raise ConfigError(f"{option} {size}", truth, f"{option} {max(1, -size)}")
    t, o, d, inf, name = run.training, run.optimizer, run.data, math.inf, run.name
    is_folder = 0 < len(name) < 200 and name.isprintable() and "/" not in name and name[0] != "."
    for option, value, truth, right, fix in (
        ("training.steps", t.steps, "its samples are counted in 64 bits", t.steps * t.batch < 2**62, "1000000"),
        ("training.save-every", t.save_every, "it counts steps; 0 saves at the end", t.save_every >= 0, 0),
        ("training.seed", t.seed, "it is from 0 to 2^32 - 1", 0 <= t.seed < 2**32, t.seed % 2**32),
        ("training.dropout", t.dropout, "it must be at least 0 and below 1", 0 <= t.dropout < 1, 0.1),
        ("training.z-loss", t.z_loss, "it is at least 0, and finite", 0 <= t.z_loss < inf, 1e-4),
        ("training.attention-block", t.attention_block, "it is a multiple of 128", t.attention_block % 128 == 0, 512),
        ("lr", o.learning_rate, "it must be positive, and finite", 0 < o.learning_rate < inf, 3e-4),
        ("optimizer.final-lr-fraction", o.final_lr_fraction, "it lies in [0, 1]", 0 <= o.final_lr_fraction <= 1, 0.1),
        ("optimizer.beta1", o.beta1, "within [0, 1)", 0 <= o.beta1 < 1, 0.9),
        ("optimizer.beta2", o.beta2, "within [0, 1)", 0 <= o.beta2 < 1, 0.9),
        ("optimizer.epsilon", o.epsilon, "it is at least 0, and finite", 0 <= o.epsilon < inf, 1e-8),
        ("optimizer.weight-decay", o.weight_decay, "it is at least 0, and finite", 0 <= o.weight_decay < inf, 0.1),
        ("optimizer.grad-clip-norm", o.grad_clip_norm, "it is at least 0, which disables it", o.grad_clip_norm >= 0, 1),
        ("data.held-out", d.held_out, "it must be at least 0 and below 1", 0 <= (d.held_out or 0) < 1, 0.1),
        ("name", repr(name), "it is the name of a folder", is_folder, "run"),
    ):
        if not right:
            option = _as_given(run, option)
            raise ConfigError(f"{option} {value}", truth, f"{option} {fix}")


def _as_given(run: Run, name: str) -> str:
    """Returns a field of the run as its user gives it: an option, or its path where the command line has none."""
    part, _, field = name.replace("-", "_").rpartition(".")
    hint = typing.get_type_hints(type(getattr(run, part)), include_extras=True).get(field) if part else None
    if tyro.conf.Fixed in getattr(hint, "__metadata__", ()):
        return f"{part}.{field}"
    return f"--{name.replace('_', '-')}"


def check_batch(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError where the devices of a mesh do not divide the batch into microbatches."""
    training = run.training
    parts = shape.over(BATCH_AXES) * training.microbatches
    for batch in ramp_of(training).sizes:
        if batch < 1 or batch % parts:
            below, above = batch // parts * parts, (batch // parts + 1) * parts
            option = "--batch" if batch == training.batch else "--training.batch-ramp with"
            raise ConfigError(
                f"batch of {batch} sequences on mesh {shape} in {training.microbatches} microbatch(es)",
                f"{' * '.join(BATCH_AXES)} * microbatches = {parts}, and {batch} = "
                f"{batch // parts} * {parts} + {batch % parts}",
                f"{option} {above}" + (f" or {below}" if below > 0 else ""),
            )


def check_sequence(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError where a mesh does not divide the sequence, or the model has fewer positions."""
    seq, spec = run.training.seq, run.model.spec()
    # With context parallelism each device has one chunk from the front and one from the back (load balancing).
    parts = (2 if shape.context > 1 else 1) * shape.context * shape.tensor
    if seq < 1 or seq % parts:
        legal = ", ".join(str(d) for d in divisors(max(seq, 1)) if d <= 64)
        axes = f"tensor={shape.tensor}" + (f", context={shape.context}" if shape.context > 1 else "")
        raise ConfigError(
            f"sequences of {seq} tokens on {axes}",
            f"between blocks the sequence is split into {parts}, and {seq} = {seq // parts} * {parts} + {seq % parts}",
            f"--seq {(seq // parts + 1) * parts}, or tensor{' * context' if shape.context > 1 else ''} of {legal}",
        )
    if spec.max_seq is not None and seq > spec.max_seq:
        truth = f"the model has {spec.max_seq} positions"
        raise ConfigError(f"sequences of {seq} tokens", truth, f"--seq {spec.max_seq}, or more positions")


def check_ulysses(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError where the devices of `context` have no even share of the key/value heads to exchange."""
    heads = run.model.spec().kv_heads
    if shape.context == 1 or run.training.context_strategy != "ulysses" or heads is None:
        return
    local = max(1, heads // shape.tensor)
    if local % shape.context:
        raise ConfigError(
            f"--training.context-strategy ulysses on {shape}",
            f"it gives each device some of the {heads} key/value heads; over tensor={shape.tensor} there are "
            f"{local} = {local // shape.context} * {shape.context} + {local % shape.context}",
            f"context of {', '.join(map(str, divisors(local)))}, or --training.context-strategy usp",
        )


def check_saved(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for saved layers, or activations kept by pipeline stages, that the run cannot have."""
    training, layers = run.training, len(run.model.spec().layers)
    saved, stages = training.saved_layers, shape.stage > 1
    offloads = REMAT_POLICIES[training.remat].offloaded
    refuse(
        (not 0 <= saved <= layers, f"{saved} saved layers", f"the model has {layers} layers", f"0 to {layers}"),
        (
            saved > 0 and stages,
            f"{saved} saved layers on mesh {shape}",
            "a pipeline stage runs the same program as every other, so all layers have one remat policy",
            "training.saved_layers 0 and --training.remat projections, or stage=1",
        ),
        (
            bool(stages and training.stage_saves == "layers" and offloads),
            f"--training.stage-saves layers with --training.remat {training.remat} on mesh {shape}",
            "activations that a stage keeps for several microbatches are in device memory",
            "--training.stage-saves input, or a remat policy that does not offload",
        ),
    )


def check_fine_tuning(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for a number of the fine-tuning that is out of range, and for options that conflict."""
    tuning, training = run.finetune, run.training
    if tuning == FineTune():
        return
    lora, preferences = tuning.method == "lora", tuning.objective == "preferences"
    asked_lora = "--finetune.method lora with"
    refuse(
        (tuning.rank < 1, f"adapters of rank {tuning.rank}", "a rank is at least 1", "--finetune.rank 16"),
        (tuning.alpha <= 0, f"alpha {tuning.alpha}", "it scales the adapters, above 0", "--finetune.alpha 32"),
        (tuning.beta <= 0, f"beta {tuning.beta}", "it weighs the reference, above 0", "--finetune.beta 0.1"),
        (not tuning.targets, "adapters of no matrix", "lora trains only adapters", "--finetune.targets all"),
        (
            not lora and tuning.base != "compute",
            f"a base in {tuning.base} with method {tuning.method}",
            "trained weights need gradients, which quantised values do not have: the frozen base is quantised",
            "--finetune.method lora",
        ),
        (
            not lora and tuning.adapter is not None,
            f"the adapter {tuning.adapter} with method {tuning.method}",
            "an adapter is a start for adapters",
            "--finetune.method lora",
        ),
        (
            lora and training.matmul_precision != "compute",
            f"{asked_lora} --training.matmul-precision {training.matmul_precision}",
            "the recipes quantise weights and their gradients, and the weights that adapters add to are frozen",
            "--training.matmul-precision compute; --finetune.base int8 or nf4 saves memory",
        ),
        (
            lora and training.stage_saves == "layers" and shape.stage > 1,
            f"{asked_lora} --training.stage-saves {training.stage_saves}",
            f"a stage would keep a copy of its frozen weights with each of up to {shape.stage} microbatches in flight",
            "--training.stage-saves input",
        ),
        (
            preferences and shape.stage > 1,
            f"preferences on mesh {shape}",
            "the reference is a second forward pass of each microbatch, which the schedule of "
            f"{shape.stage} stages does not have",
            f"fsdp={shape.stage * shape.fsdp} instead of stage={shape.stage}",
        ),
        (
            preferences and training.z_loss > 0,
            f"preferences with training.z_loss {training.z_loss}",
            "their loss compares log probabilities of answers, whose log-sum-exp has no weight of its own",
            "training.z_loss 0",
        ),
        (
            preferences and bool(run.model.spec().further),
            "preferences with multi-token prediction",
            "answers have one loss, not one for each token: the layer that predicts further tokens has none",
            "--model.mtp-depth 0",
        ),
    )


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Pair of features that no run can have together."""

    features: tuple[str, str]
    because: str
    instead: str


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        ("multi-token prediction", "stage"), "each stage would repeat its layer", "--model.mtp-depth 0, or no stage"
    ),
    Refusal(
        ("linear attention", "context"),
        "its state passes from token to token, so each device of context would wait for those before it",
        "the same devices as fsdp or tensor",
    ),
)
"""Pairs of features that are refused; all others go together. Tests walk all pairs on eight devices and compare each
with one device, or expect its refusal."""

ALWAYS = ("packing", "evaluation", "checkpoint on another mesh")
"""Features of every run."""


def features_of(run: Run, uneven: bool) -> set[str]:
    """Returns the features of a run. uneven: whether its stages have different numbers of layers."""
    training, model = run.training, run.model
    degrees = run.mesh.degrees() if run.mesh else {}
    family = {name for name in (builtin_name(model),) if name is not None}
    features = {run.optimizer.name, f"remat: {training.remat}", *family, *model.features(), *ALWAYS}
    features |= {axis for axis, degree in degrees.items() if degree > 1}
    optional = {
        "several slices": run.mesh is not None and run.mesh.slices > 1,
        f"schedule: {training.pipeline_schedule}": "stage" in features,
        "uneven stages": uneven,
        "linear attention": bool(model.spec().delta),
        f"context: {training.context_strategy}": "context" in features,
        "accumulation": training.microbatches > 1,
        "zero1": run.layout == "zero1",
        "dropout": training.dropout > 0,
    }
    return features | {name for name, present in optional.items() if present}


def check_composition(run: Run) -> None:
    """Raises ConfigError where the run has two features that do not go together."""
    features = features_of(run, uneven=False)  # no refused pair has uneven stages
    for refusal in REFUSED:
        if features.issuperset(refusal.features):
            raise ConfigError(" with ".join(refusal.features), refusal.because, refusal.instead)

"""Checks of a run before anything is traced: sizes that divide, features that go together."""

import dataclasses

from meshwright.config import MeshShape
from meshwright.data.batch import ramp_of
from meshwright.errors import ConfigError, divisors, refuse
from meshwright.fine_tuning import FineTune
from meshwright.models.remat import REMAT_POLICIES
from meshwright.ranges import check_ranges
from meshwright.runs.fields import check_fields
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, find_layout

_MOST_SAMPLES = 2**62
"""Samples are counted in 64 bits."""


def check_sizes(run: Run) -> None:
    """Raises ConfigError for a number of samples or a name that the types do not refuse."""
    check_ranges(run.model)  # a family from outside the package may not check itself
    training, name = run.training, run.name
    is_folder = 0 < len(name) < 200 and name.isprintable() and "/" not in name and name[0] != "."
    samples = training.steps * training.batch
    refuse(
        (
            samples >= _MOST_SAMPLES,
            f"--steps {training.steps} --batch {training.batch}",
            f"{samples:.3g} samples are more than 2^62, as far as they are counted",
            "--steps 1000000",
        ),
        (not is_folder, f"--name {name!r}", "it is the name of a folder", "--name run"),
    )


def check_batch(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError where the devices of a mesh do not divide the batch into microbatches."""
    training = run.training
    parts = shape.over(BATCH_AXES) * training.microbatches
    for batch in ramp_of(training).sizes:
        if batch % parts:
            below, above = batch // parts * parts, (batch // parts + 1) * parts
            option = "--batch" if batch == training.batch else "--training.batch-ramp with"
            raise ConfigError(
                f"batch of {batch} sequences on mesh {shape} in {training.microbatches} "
                f"microbatch(es)",
                f"{' * '.join(BATCH_AXES)} * microbatches = {parts}, and {batch} = "
                f"{batch // parts} * {parts} + {batch % parts}",
                f"{option} {above}" + (f" or {below}" if below > 0 else ""),
            )


def check_positions(run: Run) -> None:
    """Raises ConfigError where the model has fewer positions than a sequence has tokens."""
    seq, most = run.training.seq, run.model.spec().max_seq
    if most is not None and seq > most:
        raise ConfigError(
            f"sequences of {seq} tokens",
            f"the model has {most} positions",
            f"--seq {most}, or more positions",
        )


def check_sequence(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError if a mesh does not divide the sequence, or the model is shorter."""
    check_positions(run)
    seq, spec = run.training.seq, run.model.spec()
    # With context parallelism each device has one chunk from the front and one from the back (load
    # balancing).
    parts = (2 if shape.context > 1 else 1) * shape.context * shape.tensor
    if seq % parts:
        legal = ", ".join(str(d) for d in divisors(seq) if d <= 64)
        axes = f"tensor={shape.tensor}" + (
            f", context={shape.context}" if shape.context > 1 else ""
        )
        below, above = seq // parts * parts, (seq // parts + 1) * parts
        lengths = [n for n in (above, below) if 0 < n <= (spec.max_seq or above)]
        fixes = [f"--seq {lengths[0]}"] if lengths else []
        fixes.append(f"tensor{' * context' if shape.context > 1 else ''} of {legal}")
        raise ConfigError(
            f"sequences of {seq} tokens on {axes}",
            f"between blocks the sequence is split into {parts}, and {seq} = {seq // parts} * "
            f"{parts} + {seq % parts}",
            ", or ".join(fixes),
        )


def check_ulysses(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError if `context` does not divide the key/value heads that it exchanges."""
    heads = run.model.spec().kv_heads
    if shape.context == 1 or run.training.context_strategy != "ulysses" or heads is None:
        return
    local = max(1, heads // shape.tensor)
    if local % shape.context:
        raise ConfigError(
            f"--training.context-strategy ulysses on {shape}",
            f"it gives each device some of the {heads} key/value heads; over "
            f"tensor={shape.tensor} there are "
            f"{local} = {local // shape.context} * {shape.context} + {local % shape.context}",
            f"context of {', '.join(map(str, divisors(local)))}, or --training.context-strategy "
            f"usp",
        )


def check_saved(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError if layers are saved, or stages keep activations, but cannot."""
    training, layers = run.training, len(run.model.spec().layers)
    saved, stages = training.saved_layers, shape.stage > 1
    offloads = REMAT_POLICIES[training.remat].offloaded
    refuse(
        (
            saved > layers,
            f"{saved} saved layers",
            f"the model has {layers} layers",
            f"0 to {layers}",
        ),
        (
            saved > 0 and stages,
            f"{saved} saved layers on mesh {shape}",
            "a pipeline stage runs the same program as every other, so all layers have one remat "
            "policy",
            "--training.saved-layers 0 and --training.remat projections, or stage=1",
        ),
        (
            bool(stages and training.stage_saves == "layers" and offloads),
            f"--training.stage-saves layers with --training.remat {training.remat} on mesh {shape}",
            "activations that a stage keeps for several microbatches are in device memory",
            "--training.stage-saves input, or a remat policy that does not offload",
        ),
    )


def check_fine_tuning(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for options of the fine-tuning that conflict."""
    tuning, training = run.finetune, run.training
    if tuning == FineTune():
        return
    for path in (tuning.method, tuning.objective):
        check_fields(path, run, shape)
    lora = tuning.method == "lora"
    spec = run.model.spec()
    trains_indexer = any(a.indexer is not None and a.indexer.trained for a in spec.attention)
    stage = getattr(run.model, "index_training", None)
    refuse(
        (
            not tuning.targets,
            "adapters of no matrix",
            "lora trains only adapters",
            "--finetune.targets all",
        ),
        (
            lora and training.stage_saves == "layers" and shape.stage > 1,
            f"--finetune.method lora with --training.stage-saves {training.stage_saves}",
            f"a stage would keep a copy of its frozen weights with each of up to {shape.stage} "
            f"microbatches in flight",
            "--training.stage-saves input",
        ),
        (
            lora and trains_indexer,
            f"--model.index-training {stage} with --finetune.method lora",
            "lora trains adapters and freezes everything else, the indexer too",
            "--model.index-training frozen, or --finetune.method full",
        ),
        (
            tuning.objective == "preferences" and stage == "warmup",
            "--model.index-training warmup with --finetune.objective preferences",
            "only the indexer is trained, and attention sees all keys: the model gives each answer "
            "the probability that its reference gives, and learns no preference",
            "--model.index-training frozen or sparse, or --finetune.objective answers",
        ),
        (
            tuning.objective == "preferences" and bool(spec.further),
            "preferences with multi-token prediction",
            "answers have one loss, not one for each token: the layer that predicts further "
            "tokens has none",
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
        ("multi-token prediction", "stage"),
        "each stage would repeat its layer",
        "--model.mtp-depth 0, or no stage",
    ),
    Refusal(
        ("recurrence without segments", "context"),
        "its state passes from token to token, and it states no exchange between the segments of a "
        "sequence (`Recurrence.gathered`)",
        "the same devices as fsdp or tensor",
    ),
    Refusal(
        ("indexer", "context"),
        "it compares every query with all keys of the sequence, and its keys are not sent around",
        "the same devices as fsdp or tensor",
    ),
    Refusal(
        ("layout: folded", "dispatch: capacity"),
        "an expert has capacity for tokens of a sequence, and devices that split one would send "
        "their parts apart",
        "--layout fsdp, or --model.dispatch dropless",
    ),
)
"""Pairs of features that are refused; all others go together. Tests walk all pairs on eight devices
and compare each with one device, or expect its refusal."""


def check_composition(run: Run) -> None:
    """Raises ConfigError where the run has two features that do not go together."""
    spec, degrees = run.model.spec(), run.mesh.degrees() if run.mesh else {}
    features = {axis for axis, degree in degrees.items() if degree > 1}
    folded = features & {"context", "tensor"} & set(find_layout(run.layout).table.get("E", ()))
    features |= {
        f"dispatch: {getattr(run.model, 'dispatch', None)}",
        *(["layout: folded"] if folded else []),
    }
    features |= {"multi-token prediction"} if spec.further else set()
    if any(recurrence.gathered(1, 1, "float32") is None for recurrence in spec.recurrences):
        features |= {"recurrence without segments"}
    features |= {"indexer"} if any(a.indexer for a in spec.attention) else set()
    for refusal in REFUSED:
        if features.issuperset(refusal.features):
            raise ConfigError(" with ".join(refusal.features), refusal.because, refusal.instead)

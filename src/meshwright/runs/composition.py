"""Composition rules: every feature of a run goes with every other, except the pairs refused here with a reason.

Whether sizes divide is checked in `placed_run`. The tests walk all pairs on eight devices and compare each with one
device, or expect its refusal.
"""

import dataclasses

from meshwright.errors import ConfigError
from meshwright.models.families import builtin_name
from meshwright.runs.run import Run


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


def refusal_of(features: set[str]) -> Refusal | None:
    """Returns the first pair among `features` that is refused."""
    return next((refusal for refusal in REFUSED if features.issuperset(refusal.features)), None)


def check_composition(run: Run, uneven: bool) -> None:
    """Raises ConfigError where the run has two features that do not go together."""
    refusal = refusal_of(features_of(run, uneven))
    if refusal is not None:
        raise ConfigError(" with ".join(refusal.features), refusal.because, refusal.instead)

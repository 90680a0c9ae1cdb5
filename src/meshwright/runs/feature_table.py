"""Features of runs by kind, for the table of what goes together (docs/composition.md)."""

from meshwright.models.families import FAMILIES
from meshwright.models.remat import REMAT_POLICIES
from meshwright.runs.composition import ALWAYS
from meshwright.sharding.schedules import SCHEDULES
from meshwright.words import AXES

FEATURES: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "mesh axis": tuple(AXES),
    "slices": ("several slices",),
    "pipeline": (*(f"schedule: {name}" for name in SCHEDULES), "uneven stages"),
    "sequence": tuple(f"context: {s}" for s in ("ring", "all_gather", "ulysses", "usp")),
    "experts": ("dispatch: dropless", "dispatch: capacity", "leading dense layers"),
    "memory": ("accumulation", *(f"remat: {r}" for r in REMAT_POLICIES), "zero1"),
    "model": ("tied embeddings", "dropout", "multi-token prediction"),
    "optimizer": ("adamw", "adafactor", "lion", "muon", "sgd"),
    "always": ALWAYS,
}
"""Features by kind. Those under `always` are part of every run."""

IMPLIED: dict[str, tuple[str, ...]] = {"qwen3_next": ("linear attention",)}
"""Family -> features that all of its models have."""

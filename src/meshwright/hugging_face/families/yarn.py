"""YaRN's fields of a config.json."""

from collections.abc import Mapping
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields
from meshwright.models.blocks.yarn import Yarn

_KNOWN = {
    "rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings",
    "attention_factor", "truncate",
}  # fmt: skip


def is_yarn(scaling: Mapping[str, Any]) -> bool:
    """Whether a rope_scaling is of type yarn."""
    return scaling.get("rope_type", scaling.get("type", "default")) == "yarn"


def read_yarn(fields: Fields, scaling: Mapping[str, Any]) -> Yarn:
    """Returns the scaling of a rope_scaling of type yarn. Raises WeightsError for what is missing or not computed."""
    others = sorted(name for name, value in scaling.items() if name not in _KNOWN and value not in (None, 1.0))
    missing = [name for name in ("factor", "original_max_position_embeddings") if scaling.get(name) is None]
    if others or missing:
        raise WeightsError(
            f"reading {fields.file}",
            f"its rope_scaling of type 'yarn' has no {missing[0]!r}" if missing
            else f"its rope_scaling of type 'yarn' has {others[0]!r}, which Meshwright does not compute",
            "a rope_scaling with factor and original_max_position_embeddings",
        )  # fmt: skip
    attention_factor = scaling.get("attention_factor")
    return Yarn(
        float(scaling["factor"]), float(scaling.get("beta_fast") or 32.0), float(scaling.get("beta_slow") or 1.0),
        int(scaling["original_max_position_embeddings"]),
        None if attention_factor is None else float(attention_factor),
        "whole" if scaling.get("truncate", True) else "exact",
    )  # fmt: skip


def write_yarn(theta: float, scaling: Yarn | None) -> dict[str, Any]:
    """Returns the rope_parameters of a base and a scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    fields = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
        "truncate": scaling.bounds == "whole",
    }
    return fields if scaling.attention_factor is None else {**fields, "attention_factor": scaling.attention_factor}

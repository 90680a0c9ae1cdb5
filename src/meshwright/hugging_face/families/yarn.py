"""YaRN's fields of a config.json."""

from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.families.rope import RopeFields, refused_rope
from meshwright.hugging_face.fields import Fields
from meshwright.models.blocks.rotary import LatentYarn, Yarn

_KNOWN = {
    "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "truncate",
    "mscale", "mscale_all_dim",
}  # fmt: skip


def read_yarn(fields: Fields, rope: RopeFields) -> Yarn | None:
    """Returns the scaling of type yarn, or None without one. Raises WeightsError for what is missing or unknown."""
    if rope.kind == "default":
        return None
    if rope.kind != "yarn":
        raise refused_rope(fields, f"rope_scaling of type {rope.kind!r}", "a model without scaling, or with YaRN")
    scaling = rope.scaling
    others = sorted(name for name in scaling if name not in _KNOWN)
    if others:
        raise WeightsError(
            f"reading {fields.file}",
            f"its rope_scaling of type 'yarn' has {others[0]!r}, which Meshwright does not compute",
            f"a rope_scaling with none but {', '.join(sorted(_KNOWN))}",
        )
    factor = float(rope.number(fields, "factor"))
    return Yarn(
        factor,
        float(rope.number(fields, "beta_fast")) if scaling.get("beta_fast") else 32.0,
        float(rope.number(fields, "beta_slow")) if scaling.get("beta_slow") else 1.0,
        rope.pretrained_length(fields),
        _attention_factor(fields, rope, factor),
        "whole" if scaling.get("truncate", True) else "exact",
    )  # fmt: skip


def _attention_factor(fields: Fields, rope: RopeFields, factor: float) -> float | None:
    """Factor on queries and keys, where it is not that of `factor` alone; `transformers` has it of both mscales."""
    if "attention_factor" in rope.scaling:
        return float(rope.number(fields, "attention_factor"))
    if not (rope.scaling.get("mscale") and rope.scaling.get("mscale_all_dim")):
        return None
    mscale, mscale_all_dim = (float(rope.number(fields, name)) for name in ("mscale", "mscale_all_dim"))
    return LatentYarn(factor, mscale=mscale, mscale_all_dim=mscale_all_dim).magnitude


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

"""Scalings of rotary frequencies in a config.json: linear, llama3 and yarn, each a field of `Llama`."""

import dataclasses
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.families.rope import RopeFields, refused_rope
from meshwright.hugging_face.families.yarn import read_yarn, write_yarn
from meshwright.hugging_face.fields import Fields
from meshwright.models.blocks.rotary import RopeScaling

_BY_LENGTH = {
    "dynamic": "another base for each length beyond max_position_embeddings, and none below",
    "longrope": "one set of factors up to original_max_position_embeddings, and another beyond",
}
"""Scaling -> how its frequencies depend on the length of the text that is computed."""


def read_rope(fields: Fields, rope: RopeFields) -> dict[str, Any]:
    """Returns the fields of `Llama` for the rotation. Raises WeightsError for a scaling that is not computed."""
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind == "default":
        return found
    if rope.kind == "linear":
        return {**found, "rope_factor": float(rope.number(fields, "factor"))}
    if rope.kind == "yarn":
        return {**found, "yarn": read_yarn(fields, rope)}
    if rope.kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        numbers = {name: float(rope.number(fields, name)) for name in names}
        scaling = RopeScaling(**numbers, original_max_position_embeddings=rope.pretrained_length(fields))
        return {**found, "rope_scaling": scaling}
    if rope.kind in _BY_LENGTH:
        raise WeightsError(
            f"reading {fields.file}",
            f"its rope_scaling of type {rope.kind!r} has {_BY_LENGTH[rope.kind]}: the numbers of a token depend on how "
            "many tokens follow it, and keys in a cache would be those of another length",
            "rope_scaling of type 'yarn' for long texts; for dynamic, none (null) gives the same numbers up to "
            "max_position_embeddings",
        )
    raise refused_rope(fields, f"rope_scaling of type {rope.kind!r}", "a model with none, linear, llama3 or yarn")


def write_rope(c: Any) -> dict[str, Any]:
    """Returns the fields, as both versions of `transformers` read them."""
    scaling, longest = None, {}
    if getattr(c, "rope_scaling", None) is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(c.rope_scaling)}
    elif getattr(c, "rope_factor", 1.0) != 1.0:
        scaling = {"rope_type": "linear", "factor": c.rope_factor}
    elif c.yarn is not None:
        scaling = write_yarn(c.rope_theta, c.yarn)
        longest = {"max_position_embeddings": int(c.yarn.factor * c.yarn.original_max_position_embeddings)}
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling, **longest}

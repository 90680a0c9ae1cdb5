"""Rotary fields of a config.json, as `transformers` 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them."""

import dataclasses
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields
from meshwright.models.blocks.rotary import RopeScaling


def read_rope(fields: Fields, default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling of the rotary frequencies. Raises WeightsError for a scaling that is not computed."""
    parameters = fields.get("rope_parameters", {})
    scaling = parameters or fields.get("rope_scaling", {})
    theta = parameters.get("rope_theta") or fields.get("rope_theta", default_theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _refused(fields, f"a rotation of {partial} of each head", "a model that rotates whole heads")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise _refused(fields, f"rope_scaling of type {kind!r}", "a model without scaling, or with that of type llama3")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    missing = [name for name in names if name not in scaling]
    if missing:
        raise WeightsError(f"reading {fields.file}", f"rope_scaling has no {missing[0]!r}", "a whole rope_scaling")
    return float(theta), RopeScaling(**{name: scaling[name] for name in names})


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the fields, as both versions of `transformers` read them."""
    values = None if scaling is None else {"rope_type": "llama3", **dataclasses.asdict(scaling)}
    return {"rope_theta": theta, "rope_scaling": values}


def _refused(fields: Fields, found: str, fix: str) -> WeightsError:
    return WeightsError(f"reading {fields.file}", f"it has {found}, which Meshwright does not compute", fix)

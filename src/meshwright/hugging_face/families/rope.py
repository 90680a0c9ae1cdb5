"""Rotary fields of a config.json, as `transformers` 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields


@dataclasses.dataclass(frozen=True)
class RopeFields:
    """Rotary fields of one kind of layers."""

    theta: float
    """Base of the frequencies."""
    kind: str
    """`rope_type` of the scaling; "default" has none."""
    scaling: Mapping[str, Any]
    """Fields of the scaling, besides base, kind and fraction."""
    fraction: float
    """Part of each head that rotates."""

    def number(self, fields: Fields, name: str, default: float | None = None) -> float:
        """Returns a field of the scaling, which is a number above 0. default: instead of a missing one; None has none.

        Raises WeightsError for a field that is missing, or no such number.
        """
        value = self.scaling.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            found = f"has no {name!r}" if value is None else f"has the {name} {value!r}"
            raise WeightsError(
                f"reading {fields.file}", f"its rope_scaling of type {self.kind!r} {found}", f"a {name} above 0"
            )
        return value

    def pretrained_length(self, fields: Fields) -> int:
        """Returns the longest sequence before the extension, found where `transformers` looks for it.

        That is a field of the configuration itself, then one of the scaling, then max_position_embeddings.
        """
        own = fields.get("original_max_position_embeddings", self.scaling.get("original_max_position_embeddings"))
        longest = fields.get("max_position_embeddings", 0) if own is None else own
        found = {"original_max_position_embeddings": longest or None}
        return int(dataclasses.replace(self, scaling=found).number(fields, "original_max_position_embeddings"))


_OWN = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def rope_fields(
    fields: Fields, theta: float = 10000.0, layers: str | None = None, theta_field: str = "rope_theta",
    fraction: float = 1.0,
) -> RopeFields:  # fmt: skip
    """Returns the rotary fields of a configuration, of which those of `transformers` 4 come before those of 5.

    A rope_scaling is what users write into a configuration for longer contexts, and `transformers` prefers it as well.
    theta: base of the architecture, where no field has one.  layers: kind of layers, where rope_parameters has fields
    for each; a rope_scaling is that of "full_attention".  theta_field: the kind's field of `transformers` 4.
    fraction: part of a head that rotates, where no field has one; an architecture with 1 rotates whole heads alone.
    """
    parameters, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if layers is None:
        found = dict(scaling or parameters)
    else:
        found = {**(parameters.get(layers) or {}), **(scaling if layers == "full_attention" else {})}
    base = found.get("rope_theta", fields.get(theta_field, theta))
    own = fields.get("partial_rotary_factor", fraction)
    part = found.get("partial_rotary_factor", own)
    kind = str(found.get("rope_type", found.get("type", "default")))
    if not base > 0:
        raise WeightsError(f"reading {fields.file}", f"rope_theta is {base}", "a base above 0, such as 10000")
    if fraction == 1.0 and part != 1.0:
        raise refused_rope(fields, f"a rotation of {part} of each head", "a model that rotates whole heads")
    return RopeFields(float(base), kind, {n: v for n, v in found.items() if n not in _OWN}, float(part))


def refused_rope(fields: Fields, found: str, fix: str) -> WeightsError:
    """Returns the error of rotary fields that a family does not compute."""
    return WeightsError(f"reading {fields.file}", f"it has {found}, which Meshwright does not compute", fix)

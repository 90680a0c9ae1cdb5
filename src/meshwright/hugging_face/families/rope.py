"""Rotary fields of a config.json, as `transformers` 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.errors import WeightsError
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.table import Entry
from meshwright.models.blocks.rotary import LatentYarn, RopeScaling, Yarn


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
    fields: Fields,
    theta: float = 10000.0,
    layers: str | None = None,
    theta_field: str = "rope_theta",
    fraction: float = 1.0,
) -> RopeFields:
    """Returns the rotary fields of a configuration, of which those of `transformers` 4 come before those of 5.

    A rope_scaling is what users write into a configuration for longer contexts, and `transformers` prefers it as well.
    theta: base of the architecture, where no field has one.  layers: kind of layers, where rope_parameters has fields
    for each; a rope_scaling is that of "full_attention".  theta_field: the kind's field of `transformers` 4.
    fraction: part of a head that rotates, where no field has one; an architecture with 1 rotates only whole heads.
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


_KNOWN = {
    "factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "attention_factor",
    "truncate",
    "mscale",
    "mscale_all_dim",
}


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
    )


def _attention_factor(fields: Fields, rope: RopeFields, factor: float) -> float | None:
    """Factor on queries and keys, where it does not follow from `factor`; `transformers` has it of both mscales."""
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
    if c.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(c.rope_scaling)}
    elif c.rope_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": c.rope_factor}
    elif c.yarn is not None:
        scaling = write_yarn(c.rope_theta, c.yarn)
        longest = {"max_position_embeddings": c.yarn.longest}
    return {"rope_theta": c.rope_theta, "rope_scaling": scaling, **longest}


def scaled_rope(theta: float = 10000.0) -> Entry:
    """Returns the entry of base and scaling. theta: base of the architecture, where no field has one."""
    return Entry(lambda fields: read_rope(fields, rope_fields(fields, theta)), write_rope)


def plain_rope() -> Entry:
    """Returns the entry of the base in an architecture without scalings."""

    def read(fields: Fields) -> dict[str, Any]:
        rope = rope_fields(fields)
        if rope.kind != "default":
            raise refused_rope(fields, f"rope_scaling of type {rope.kind!r}", "a model without")
        return {"rope_theta": rope.theta}

    return Entry(read, lambda c: {"rope_theta": c.rope_theta})


def partial_rope(fraction: float) -> Entry:
    """Returns the entry of base, scaling and part of each head that rotates. fraction: where no field has one."""

    def read(fields: Fields) -> dict[str, Any]:
        rope = rope_fields(fields, fraction=fraction)
        return {**read_rope(fields, rope), "rotary_fraction": rope.fraction}

    return Entry(read, lambda c: {**write_rope(c), "partial_rotary_factor": c.rotary_fraction})

"""Fields of a config.json: read by name, required to have the value
that a family computes, or refused.

A fact that config.json and a model both state is one `Entry`, read and written. Rotary fields are
read as `transformers` 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import check_inside, fix_of, read_json
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.models.blocks.rotary import RopeScaling
from meshwright.models.blocks.yarn import LatentYarn, Yarn
from meshwright.models.decoder import head_size_of

REQUIRED: Any = object()
"""Default of a field that has none: it must be there."""

_REASONS: dict[str, tuple[str, ...]] = {
    "it names the model, its files or the program that wrote them": (
        "architectures",
        "model_type",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        "unsloth_version",
        "unsloth_fixed",
        "transformers_weights",  # which file has the weights: safetensors_files reads it
    ),
    "weights are read in the type that the files have": ("dtype", "torch_dtype"),
    "how a program runs, not what it computes": (
        "use_cache",
        "cache_implementation",
        "pretraining_tp",
        "chunk_size_feed_forward",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "torchscript",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "attn_implementation",
        "_flash_attn_2_enabled",
    ),
    "rotary positions have no end: a note is printed for longer texts": (
        "max_position_embeddings",
    ),
    "tokens that begin, end and fill a text are the tokenizer's and the sampler's": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
    "it belongs to a classifier or an encoder": (
        "id2label",
        "label2id",
        "task_specific_params",
        "problem_type",
        "is_encoder_decoder",
        "is_decoder",
        "tokenizer_class",
    ),
    "it changes initial values, and weights are read": ("initializer_range",),
    "dropout of training with `transformers`; here it is --training.dropout": (
        "attention_dropout",
        "attention_probs_dropout_prob",
    ),
    "it is a setting of the sampler": (
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "max_length",
        "min_length",
        "num_beams",
        "do_sample",
    ),
}
WITHOUT_EFFECT = {name: reason for reason, names in _REASONS.items() for name in names}
"""Field of any architecture that changes no number of the forward pass -> why."""

_LACKED = {
    r"^(hc_|hyper_connection|num_residual_streams)": "hyper-connections between layers",
    r"per_layer_(input|config)": "embeddings or settings of each layer",
    r"^num_kv_shared_layers": "layers that share keys and values",
    r"^(compress_ratios|compress_)": "compressed keys and values",
    r"^conv_L_cache": "short convolutions",
    r"^altup|^laurel": "alternating updates",
}
"""Pattern of fields -> what a model with them has, which no family here computes."""
_COMPUTED = {
    r"^(ssm_|mamba_|state_size|time_step_|conv_kernel$|n_groups$)": "state space layers",
    r"^linear_": "linear attention",
    r"^(embedding|residual|attention|logits?)_(multiplier|scaling|scale)": "scaled branches",
    r"^index_(topk|n_heads|head_dim)": "a sparse indexer, which chooses the tokens to attend to",
    r"^(kv|q)_lora_rank": "multi-head latent attention",
    r"^(n_routed|num|num_local)_experts$": "a mixture of experts",
    r"^quantization_config$": "quantised weights",
    r"^vision_config$": "a vision tower",
    r"^audio_config$": "an audio tower",
    r"^(num_nextn_predict_layers|num_mtp_layers)": "layers of multi-token prediction",
    r"^sliding_window": "a sliding window",
    r"^rope_(scaling|parameters)": "rotary embeddings",
}
"""The same, which some family computes."""


def meaning_of(name: str, value: Any) -> str:
    """Returns what a model has whose configuration has this field, "" where
    that is not known or the value is none."""
    return _first_meaning(_LACKED | _COMPUTED, name, value)


def lacked_meaning_of(name: str, value: Any) -> str:
    """Returns what a model with this field has that no family here computes, ""
    where there is nothing such."""
    return _first_meaning(_LACKED, name, value)


def _first_meaning(meanings: Mapping[str, str], name: str, value: Any) -> str:
    if _is_empty(value) or value == 0:
        return ""
    return next((text for pattern, text in meanings.items() if re.search(pattern, name)), "")


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


_SIZES = frozenset[str]().union(
    (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    (
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
        "n_inner",
        "max_position_embeddings",
        "intermediate_size",
    ),
    (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_group",
        "topk_group",
    ),
    (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "intermediate_size_mlp",
        "interleave_moe_layer_step",
    ),
    ("global_head_dim", "num_global_key_value_heads", "top_k_experts"),
    ("sliding_window", "attention_chunk_size", "full_attention_interval", "no_rope_layer_interval"),
    (
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "linear_conv_kernel_dim",
    ),
    (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
)
"""Fields that count something of which there is at least one, where they are not null."""


class Fields:
    """Fields of one config.json. Remembers which were read, so that the others can be reported."""

    def __init__(self, file: Path, config: Mapping[str, Any], inside: str = ""):
        """inside: field of the file that has these fields; "" is the file itself."""
        self.file = file
        self.config = config
        self._inside = inside
        self._read: set[str] = set()

    def part(self, name: str, config: Mapping[str, Any]) -> "Fields":
        """Returns the fields of a part of this configuration, which is its field `name`."""
        return Fields(self.file, config, name)

    def with_value(self, name: str, value: Any) -> "Fields":
        """Returns these fields with another value of one of them;
        what is read of them counts as read of these."""
        changed = Fields(self.file, {**self.config, name: value}, self._inside)
        changed._read = self._read
        return changed

    def error(self, found: str, fix: str) -> WeightsError:
        """Returns the error of a configuration that is not read."""
        where = f", {self._inside}" if self._inside else ""
        return WeightsError(f"reading {self.file}{where}", found, fix)

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a field; `default` stands for a missing one and for null.
        Raises WeightsError without a default."""
        self._read.add(name)
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.error(f"it has no {name!r}", f"a configuration with {name}")
            return default
        if name in _SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise self.error(
                f"{name} is {json.dumps(value)}", f"a configuration whose {name} is 1 or more"
            )
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns a field that is an object, without its nulls; {} where it is missing."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(
                f"{name} is {json.dumps(value)}, and not a JSON object", "a model's config.json"
            )
        return {key: inner for key, inner in value.items() if inner is not None}

    def first(self, *names: str, default: Any = REQUIRED) -> Any:
        """Returns the first of several fields that is there: names
        of different versions of `transformers`."""
        self._read.update(names)
        found = next((name for name in names if self.config.get(name) is not None), names[0])
        return self.get(found, default)

    def require(self, name: str, *allowed: Any) -> None:
        """Raises WeightsError unless a field has one of the values that the family computes,
        or is missing."""
        self._read.add(name)
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            known = " or ".join(json.dumps(a) for a in allowed)
            found = f"{name} is {json.dumps(value)}, and Meshwright computes it only with {known}"
            raise self.error(found, f"a model with {name} {known}")

    def flag(self, name: str) -> bool:
        """Returns a field that is true or false; a missing one is false.
        Raises WeightsError for any other value."""
        self.require(name, False, True, None)
        return bool(self.config.get(name))

    def without_effect(self, *names: str) -> None:
        """Counts fields as read that change no number of the forward pass."""
        self._read.update(names)

    def check_quantised(self, known: str | None) -> bool:
        """Returns whether the weights are quantised, in the form `known`.
        Raises WeightsError for any other."""
        self._read.add("quantization_config")
        quantisation = self.config.get("quantization_config")
        if quantisation is None or quantisation == {}:
            return False
        fix = "the model's unquantised weights (bfloat16), or dequantise it with `transformers`"
        if not isinstance(quantisation, dict):
            found = f"quantization_config is {json.dumps(quantisation)[:60]}, and not a JSON object"
            raise self.error(found, fix)
        method = quantisation.get("quant_method")
        if method is None:
            found = (
                "its quantization_config has no quant_method, the name of how weights are stored"
            )
            raise self.error(found, f"the one that was published with these weights, or {fix}")
        if method != known:
            raise self.error(
                f"its weights are quantised ({method}), and training needs the numbers themselves",
                fix,
            )
        return True

    def check_all_read(self, architecture: str) -> None:
        """Raises WeightsError for a field that nothing has read and that is not known
        to change no number.

        A field without a value (null, false, "", [] or {}) asks for nothing.
        """
        known = self._read | WITHOUT_EFFECT.keys()
        unread = sorted(
            name
            for name, value in self.config.items()
            if name not in known and not _is_empty(value)
        )
        if not unread:
            return
        described = [self._describe(name) for name in unread]
        raise self.error(
            f"it has {', '.join(described)}, which Meshwright does not compute for {architecture}: "
            "what the model computes may depend on it",
            f"a model without; or delete {', '.join(unread)} from the file, if you know that no "
            "number depends on it",
        )

    def _describe(self, name: str) -> str:
        """Returns a field with its value, and what it stands for where that is known."""
        value = json.dumps(self.config[name])
        shown = value if len(value) <= _LONGEST_VALUE else value[:_LONGEST_VALUE] + " ..."
        meaning = meaning_of(name, self.config[name])
        return f"{name} {shown}" + (f" ({meaning})" if meaning else "")


_LONGEST_VALUE = 60
"""Characters of a value that an error shows."""


def read_fields(folder: Path) -> Fields:
    """Reads the config.json of a folder.
    Raises WeightsError where there is none, or it is not a configuration."""
    file = folder / "config.json"
    try:
        check_inside(folder, [file])
        config = read_json(file)
    except OSError as error:
        fix = "a folder that save_pretrained of `transformers` wrote"
        if (folder / "adapter_config.json").is_file():
            fix = (
                "an adapter merged into its model by PEFT (merge_and_unload, save_pretrained); or "
                "the run that it is of"
            )
        raise by_class(error, WeightsError(f"reading {file}", reason_of(error), fix)) from error
    except ValueError as error:
        raise WeightsError(
            f"reading {file}",
            f"it is not a configuration: {error}",
            fix_of(error, "download it again"),
        ) from error
    if not isinstance(config, dict):
        raise WeightsError(
            f"reading {file}", "it is not a JSON object", "the config.json of a model"
        )
    return Fields(file, config)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One fact that a config.json and a model both state."""

    read: Callable[[Fields], dict[str, Any] | None] = lambda fields: None
    """Returns fields of the model, None if it only checks.
    Raises WeightsError for what the family cannot compute."""
    write: Callable[[Any], dict[str, Any] | None] = lambda c: {}
    """Returns fields of config.json; None where the architecture cannot express the model."""


def read_table(table: tuple[Entry, ...], fields: Fields) -> dict[str, Any]:
    """Returns the fields of a model from a config.json."""
    found: dict[str, Any] = {}
    for entry in table:
        found |= entry.read(fields) or {}
    return found


def write_table(table: tuple[Entry, ...], c: Any) -> dict[str, Any] | None:
    """Returns the config.json of a model, or None where one of the entries cannot express it."""
    found: dict[str, Any] = {}
    for entry in table:
        written = entry.write(c)
        if written is None:
            return None
        found |= written
    return found


def same(
    name: str, field: str, default: Any = REQUIRED, *, other: str | None = None, kind: Any = None
) -> Entry:
    """Returns the entry of a number that both have.

    name: in config.json.
    field: of the model.
    default: where config.json lacks it; a function is called with the fields.
    other: a second name to look for.
    kind: type that the number is converted to.
    """

    def read(fields: Fields) -> dict[str, Any]:
        value = default(fields) if callable(default) else default
        found = (
            fields.get(name, value) if other is None else fields.first(name, other, default=value)
        )
        return {field: found if kind is None else kind(found)}

    return Entry(read, lambda c: {name: getattr(c, field)})


def choice(name: str, field: str, values: Mapping[Any, Any], default: Any = False) -> Entry:
    """Returns the entry of a choice. values: of config.json -> of the model."""
    names = {value: key for key, value in values.items()}
    return Entry(
        lambda fields: {field: values[bool(fields.get(name, default))]},
        lambda c: {name: names[getattr(c, field)]} if getattr(c, field) in names else None,
    )


def flag(name: str, *fields_of_model: str) -> Entry:
    """Returns the entry of biases that are there together: true is `learned` in all
    of the fields."""

    def write(c: Any) -> dict[str, Any] | None:
        found = {getattr(c, field) for field in fields_of_model}
        return None if len(found) > 1 else {name: found == {"learned"}}

    return Entry(
        lambda fields: dict.fromkeys(fields_of_model, "learned" if fields.flag(name) else "none"),
        write,
    )


def fixed(name: str, *allowed: Any, written: bool = True) -> Entry:
    """Returns the entry of a field that has one of the values
    that the family computes, the first where it lacks."""
    return Entry(
        lambda fields: fields.require(name, *allowed),
        lambda c: {name: allowed[0]} if written else {},
    )


def must(**values: Any) -> Entry:
    """Returns the entry of model fields that have one value in this architecture."""
    return Entry(
        lambda fields: values,
        lambda c: {} if all(getattr(c, name) == value for name, value in values.items()) else None,
    )


def given(**values: Any) -> Entry:
    """Returns the entry of model fields that config.json does not state,
    with the values of the published training."""
    return Entry(lambda fields: values)


def without_effect(*names: str) -> Entry:
    """Returns the entry of fields that change no number of the forward pass."""
    return Entry(lambda fields: fields.without_effect(*names))


def only_if(condition: Callable[[Any], bool]) -> Entry:
    """Returns the entry of a condition on models that the architecture can express."""
    return Entry(write=lambda c: {} if condition(c) else None)


def head_size(default: Any = None) -> Entry:
    """Returns the entry of `head_dim`, which models have where it is not width / heads."""

    def read(fields: Fields) -> dict[str, Any]:
        size = fields.get("head_dim", default)
        usual = size is None or size * fields.get("num_attention_heads") == fields.get(
            "hidden_size"
        )
        return {"head_size": None if usual else size}

    return Entry(read, lambda c: {"head_dim": head_size_of(c)})


def own_head_size(default: Any = REQUIRED) -> Entry:
    """Returns the entry of `head_dim` of models that always state it."""
    return Entry(
        lambda fields: {"head_size": fields.get("head_dim", default)},
        lambda c: {"head_dim": head_size_of(c)},
    )


def layer_types(layers: int, local_layers: int, local: str = "sliding_attention") -> list[str]:
    """Returns the kinds of layers of which every `local_layers + 1`-th is global."""
    return ["full_attention" if (i + 1) % (local_layers + 1) == 0 else local for i in range(layers)]


def read_local_layers(fields: Fields, default: int, local: str = "sliding_attention") -> int:
    """Returns the local layers before each global one.
    default: where the configuration names no kinds.

    Raises WeightsError for layers that do not repeat so.
    """
    layers = fields.get("num_hidden_layers")
    kinds = fields.get("layer_types", layer_types(layers, default, local))
    number = kinds.index("full_attention") if "full_attention" in kinds else default
    if kinds != layer_types(layers, number, local):
        raise fields.error(
            f"layer_types does not repeat every {number + 1} layers: {kinds}",
            "a model with the same number of local layers before each global one",
        )
    return int(number)


def local_layers(default: int) -> Entry:
    """Returns the entry of local layers before each global one, and of their window."""
    return Entry(
        lambda fields: {"local_layers": read_local_layers(fields, default)},
        lambda c: {"layer_types": layer_types(c.layers, c.local_layers)},
    )


def rotary_layers(layers: int, interval: int) -> list[int]:
    """Returns `no_rope_layers` of a configuration,
    which has a 1 for layers *with* a rotary embedding."""
    return [int((i + 1) % interval != 0) for i in range(layers)]


def read_no_rope(fields: Fields) -> tuple[int, list[int]]:
    """Returns every how many layers one is without rotary embedding,
    and the list of the configuration."""
    layers, interval = fields.get("num_hidden_layers"), fields.get("no_rope_layer_interval", 4)
    rotary = [
        int(bool(x)) for x in fields.get("no_rope_layers", None) or rotary_layers(layers, interval)
    ]
    return rotary.index(0) + 1 if 0 in rotary else layers + 1, rotary


@dataclasses.dataclass(frozen=True)
class RopeFields:
    """Rotary fields of one kind of layers."""

    fields: Fields
    theta: float
    """Base of the frequencies."""
    kind: str
    """`rope_type` of the scaling; "default" has none."""
    scaling: Mapping[str, Any]
    """Fields of the scaling, besides base, kind and fraction."""
    fraction: float
    """Part of each head that rotates."""

    def number(self, name: str) -> float:
        """Returns a field of the scaling.
        Raises WeightsError where it is missing, or not a number above 0."""
        value = self.scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            found = f"has no {name!r}" if value is None else f"has the {name} {value!r}"
            raise self.fields.error(
                f"its rope_scaling of type {self.kind!r} {found}", f"a {name} above 0"
            )
        return value

    def pretrained_length(self) -> int:
        """Returns the longest sequence before the extension, found
        where `transformers` looks for it.

        That is a field of the configuration itself, then one
        of the scaling, then max_position_embeddings.
        """
        name = "original_max_position_embeddings"
        own = self.fields.get(name, self.scaling.get(name))
        longest = self.fields.get("max_position_embeddings", 0) if own is None else own
        return int(dataclasses.replace(self, scaling={name: longest or None}).number(name))

    def refused(self, found: str = "", fix: str = "a model without") -> WeightsError:
        """Returns the error of rotary fields that a family does not compute.
        found: by default the scaling."""
        found = found or f"rope_scaling of type {self.kind!r}"
        return self.fields.error(f"it has {found}, which Meshwright does not compute", fix)


_OWN = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Which frequencies turn with time, height and width of an image: a token
of text has one position for all three."""


def rope_fields(
    fields: Fields,
    theta: float = 10000.0,
    layers: str | None = None,
    theta_field: str = "rope_theta",
    fraction: float = 1.0,
    partial: bool = False,
) -> RopeFields:
    """Returns the rotary fields of a configuration,
    of which those of `transformers` 4 come before those of 5.

    A rope_scaling is what users write into a configuration for longer contexts,
    and `transformers` prefers it as well.
    theta: base of the architecture, where no field has one.
    layers: kind of layers, where rope_parameters has fields for each;
    a rope_scaling is that of "full_attention".
    theta_field: the kind's field of `transformers` 4.
    fraction: part of a head that rotates, where no field has one; an architecture with 1 rotates
    only whole heads, unless it is `partial`.
    """
    parameters, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    if layers is None:
        found = dict(scaling or parameters)
    else:
        found = {
            **(parameters.get(layers) or {}),
            **(scaling if layers == "full_attention" else {}),
        }
    base = found.get("rope_theta", fields.get(theta_field, theta))
    part = found.get("partial_rotary_factor", fields.get("partial_rotary_factor", fraction))
    kind = str(found.get("rope_type", found.get("type", "default")))
    if not base > 0:
        raise fields.error(f"rope_theta is {base}", "a base above 0, such as 10000")
    rope = RopeFields(
        fields,
        float(base),
        kind,
        {n: v for n, v in found.items() if n not in (*_OWN, *_OF_IMAGES)},
        float(part),
    )
    if fraction == 1.0 and part != 1.0 and not partial:
        raise rope.refused(f"a rotation of {part} of each head", "a model that rotates whole heads")
    return rope


_YARN = {
    *(
        "factor",
        "beta_fast",
        "beta_slow",
        "original_max_position_embeddings",
        "attention_factor",
        "truncate",
    ),
    *("mscale", "mscale_all_dim"),
}
"""Fields of a scaling of type yarn."""


def read_yarn(rope: RopeFields) -> Yarn | None:
    """Returns the scaling of type yarn, or None without one.
    Raises WeightsError for what is missing or unknown."""
    if rope.kind == "default":
        return None
    if rope.kind != "yarn":
        raise rope.refused(fix="a model without scaling, or with YaRN")
    scaling = rope.scaling
    others = sorted(scaling.keys() - _YARN)
    if others:
        raise rope.fields.error(
            f"its rope_scaling of type 'yarn' has {others[0]!r}, which Meshwright does not compute",
            f"a rope_scaling with none but {', '.join(sorted(_YARN))}",
        )
    factor = float(rope.number("factor"))
    attention_factor = None  # follows from `factor`
    if "attention_factor" in scaling:
        attention_factor = float(rope.number("attention_factor"))
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = (float(rope.number(name)) for name in ("mscale", "mscale_all_dim"))
        attention_factor = LatentYarn(
            factor, mscale=mscale, mscale_all_dim=mscale_all_dim
        ).magnitude
    return Yarn(
        factor,
        float(rope.number("beta_fast")) if scaling.get("beta_fast") else 32.0,
        float(rope.number("beta_slow")) if scaling.get("beta_slow") else 1.0,
        rope.pretrained_length(),
        attention_factor,
        "whole" if scaling.get("truncate", True) else "exact",
    )


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
    return (
        fields
        if scaling.attention_factor is None
        else {**fields, "attention_factor": scaling.attention_factor}
    )


_BY_LENGTH = {
    "dynamic": "another base for each length beyond max_position_embeddings, and none below",
    "longrope": "one set of factors up to original_max_position_embeddings, and another beyond",
}
"""Scaling -> how its frequencies depend on the length of the text that is computed."""


def read_scaling(rope: RopeFields) -> dict[str, Any]:
    """Returns the fields of a model with a choice of scalings.
    Raises WeightsError for another scaling."""
    if rope.kind == "default":
        return {}
    if rope.kind == "linear":
        return {"rope_factor": float(rope.number("factor"))}
    if rope.kind == "yarn":
        return {"yarn": read_yarn(rope)}
    if rope.kind == "llama3":
        numbers = {
            name: float(rope.number(name))
            for name in ("factor", "low_freq_factor", "high_freq_factor")
        }
        return {
            "rope_scaling": RopeScaling(
                **numbers, original_max_position_embeddings=rope.pretrained_length()
            )
        }
    if rope.kind in _BY_LENGTH:
        raise rope.fields.error(
            f"its rope_scaling of type {rope.kind!r} has {_BY_LENGTH[rope.kind]}: the numbers of a "
            "token depend on how many tokens follow it, and keys in a cache would be those of "
            "another length",
            "rope_scaling of type 'yarn' for long texts; for dynamic, none (null) gives the same "
            "numbers up to max_position_embeddings",
        )
    raise rope.refused(fix="a model with none, linear, llama3 or yarn")


def scaled_rope(theta: float = 10000.0, fraction: float = 1.0) -> Entry:
    """Returns the entry of base and scaling,
    and of the part of each head that rotates where not all of it does.

    theta, fraction: those of the architecture, where no field has one.
    """

    def read(fields: Fields) -> dict[str, Any]:
        rope = rope_fields(fields, theta, fraction=fraction)
        part = {} if fraction == 1.0 else {"rotary_fraction": rope.fraction}
        return {"rope_theta": rope.theta, **read_scaling(rope), **part}

    def write(c: Any) -> dict[str, Any]:
        scaling, longest = None, {}
        if c.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **dataclasses.asdict(c.rope_scaling)}
        elif c.rope_factor != 1.0:
            scaling = {"rope_type": "linear", "factor": c.rope_factor}
        elif c.yarn is not None:
            scaling = write_yarn(c.rope_theta, c.yarn)
            longest = {"max_position_embeddings": c.yarn.longest}
        part = {} if fraction == 1.0 else {"partial_rotary_factor": c.rotary_fraction}
        return {"rope_theta": c.rope_theta, "rope_scaling": scaling, **longest, **part}

    return Entry(read, write)


def plain_rope(theta: float = 10000.0) -> Entry:
    """Returns the entry of the base in an architecture without scalings.
    theta: where no field has one."""

    def read(fields: Fields) -> dict[str, Any]:
        rope = rope_fields(fields, theta)
        if rope.kind != "default":
            raise rope.refused()
        return {"rope_theta": rope.theta}

    return Entry(read, lambda c: {"rope_theta": c.rope_theta})

"""The architecture of a configuration: of a text model, or of the text model inside a larger one.

A larger model also reads images, video or sound. Its config.json has the text model's fields under
`text_config`, and its files have the text model's tensors under a prefix:

    name in the larger model                           name in the text model
    model.language_model.layers.0.mlp.up_proj.weight   model.layers.0.mlp.up_proj.weight
    language_model.model.layers.0.mlp.up_proj.weight   model.layers.0.mlp.up_proj.weight
    lm_head.weight, language_model.lm_head.weight      lm_head.weight
    model.vision_tower. ...                            (of another part)

The first form is that of `transformers` 5, the second that of 4. The text model is computed; the
tensors of the other parts are kept byte for byte.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.hugging_face.architectures import ARCHITECTURES, Architecture
from meshwright.hugging_face.config_fields import Fields, lacked_meaning_of
from meshwright.hugging_face.language_models import LANGUAGE_MODELS
from meshwright.hugging_face.safetensors_files import tensor_names


@dataclasses.dataclass(frozen=True)
class TextPrefix:
    """Prefixes of the text model's tensors inside a larger model."""

    body: str
    """Stands for `model.`."""
    head: str
    """Stands for `lm_head.`."""

    def name_in_text_model(self, stored: str) -> str | None:
        """Returns the name of a tensor in the text model, or None for a tensor of another part."""
        if stored.startswith(self.body):
            return "model." + stored.removeprefix(self.body)
        if stored.startswith(self.head):
            return "lm_head." + stored.removeprefix(self.head)
        return None

    def name_in_larger_model(self, name: str) -> str:
        """Inverts `name_in_text_model`."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head.")
        return self.body + name.removeprefix("model.")


TEXT_PREFIXES = (
    TextPrefix("model.language_model.", "lm_head."),
    TextPrefix("language_model.model.", "language_model.lm_head."),
)
"""Forms of the names, the one that is written without an example first."""


@dataclasses.dataclass(frozen=True)
class LargerModel:
    """An architecture with a text model and other parts."""

    name: str
    """Name in config.json: "Gemma3ForConditionalGeneration"."""
    model_type: str
    """Type in config.json: "gemma3"."""
    text: Mapping[str, str]
    """Type of `text_config` -> the architecture that computes it."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the text model that published files leave out,
    with the values of `transformers`."""
    default_text_type: str | None = None
    """Type of a `text_config` that names none."""


_GEMMA3_SIZES = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
_ALL_LARGER = (
    LargerModel(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {"gemma3_text": "Gemma3ForCausalLM"},
        _GEMMA3_SIZES,
        "gemma3_text",
    ),
    *(
        LargerModel(
            f"{name}ForConditionalGeneration",
            kind,
            {f"{kind}_text": f"{name}ForCausalLM"},
            default_text_type=f"{kind}_text",
        )
        for name, kind in (("Gemma4", "gemma4"), ("Gemma4Unified", "gemma4_unified"))
    ),
    LargerModel("Llama4ForConditionalGeneration", "llama4", {"llama4_text": "Llama4ForCausalLM"}),
    LargerModel(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
    ),
    # The name of the published files, and that of `transformers`.
    *(
        LargerModel(
            name,
            "kimi_k25",
            {"kimi_k2": _DEEPSEEK_V3, "deepseek_v3": _DEEPSEEK_V3},
            default_text_type="deepseek_v3",
        )
        for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ),
    LargerModel(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", {"qwen3_vl_text": "Qwen3ForCausalLM"}
    ),
    LargerModel(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": "Qwen3VLMoeTextModel"},
        default_text_type="qwen3_vl_moe_text",
    ),
    LargerModel(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        default_text_type="qwen3_5_text",
    ),
    LargerModel(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        default_text_type="qwen3_5_moe_text",
    ),
)
LARGER_MODELS = {larger.name: larger for larger in _ALL_LARGER}
"""Architectures whose text model is computed, by name;
another is added from outside the package."""


_OTHER_PARTS = re.compile(
    r"image|video|vision|visual|audio|speech|media|projector|projection|spatial|"
    r"^mm_|^bo[ia]_|^eo[ia]_|^ignore_index$|^language_model_only$"
)
"""Fields of a larger model about images, video and sound: a text has none of them."""


@dataclasses.dataclass(frozen=True)
class TextModel:
    """The text model that a config.json describes."""

    architecture: Architecture
    fields: Fields
    """Fields of the text model."""
    larger: LargerModel | None = None
    """The model that it is a part of; None where it is all of the model."""
    whole: Fields | None = None
    """Fields of that model."""

    def check_all_read(self) -> None:
        """Raises WeightsError for a field that nothing reads and that is not known
        to change no number."""
        self.fields.check_all_read(self.architecture.name)
        if self.whole is not None and self.larger is not None:
            self.whole.check_all_read(self.larger.name)


def find_text_model(fields: Fields) -> TextModel:
    """Returns the architecture of a configuration and the fields of its text model.

    An architecture is found by its name (`architectures`) and its type (`model_type`), which have
    to agree. Raises WeightsError where they do not, and for a model that Meshwright does not
    compute.
    """
    name = _architecture_name(fields)
    if name in LARGER_MODELS:
        return _inside(LARGER_MODELS[name], fields)
    if name not in ARCHITECTURES:
        raise fields.error(*_unknown(name, fields))
    architecture = ARCHITECTURES[name]
    _check_type(fields, name, architecture.types)
    return TextModel(architecture, fields)


def _architecture_name(fields: Fields) -> str:
    """Returns the architecture that a config.json names.
    Raises WeightsError where it names none."""
    names = fields.config.get("architectures") or []
    if not isinstance(names, list):
        found = f"its architectures are {names!r}, which is not a list"
        raise fields.error(found, "the config.json that was published with these weights")
    if names:
        return str(names[0])
    model_type = fields.config.get("model_type")
    by_type = {t: a.name for a in ARCHITECTURES.values() for t in a.types}
    by_type |= {larger.model_type: larger.name for larger in LARGER_MODELS.values()}
    fix = "the config.json that was published with these weights"
    if model_type in by_type:
        fix = f'"architectures": ["{by_type[model_type]}"], if the weights are of it'
    raise fields.error(
        "its architecture is not named: it has no architectures, and its model_type is "
        f"{model_type!r}",
        fix,
    )


def _check_type(fields: Fields, name: str, types: tuple[str, ...]) -> None:
    """Raises WeightsError unless `model_type` is one of the types of the architecture `name`."""
    found = fields.config.get("model_type")
    if found in types:
        return
    known = " or ".join(types)
    if found is None:
        raise fields.error(
            f"its architecture is {name}, and it has no model_type", f'"model_type": "{types[0]}"'
        )
    raise fields.error(
        f"its architecture is {name}, whose model_type is {known}, and its model_type is {found}: "
        "they are two different models",
        "the config.json that was published with these weights",
    )


def _inside(larger: LargerModel, fields: Fields) -> TextModel:
    """Returns the text model of a larger one."""
    _check_type(fields, larger.name, (larger.model_type,))
    inner = fields.config.get("text_config")
    if not isinstance(inner, dict):
        found = f"its architecture is {larger.name}, and it has no text_config"
        raise fields.error(found, "the config.json that was published with these weights")
    text_type = str(inner.get("model_type") or larger.default_text_type)
    if text_type not in larger.text:
        raise fields.error(
            f"the text model of {larger.name} is of the type {text_type}, which Meshwright does "
            f"not compute; those of {' and '.join(sorted(larger.text))} are computed",
            "a model with such a text model",
        )
    fields.without_effect("text_config")
    fields.without_effect(*filter(_OTHER_PARTS.search, fields.config))
    tied = _is_tied(fields, inner)
    given = {**larger.defaults, **inner} | ({} if tied is None else {"tie_word_embeddings": tied})
    given.setdefault("quantization_config", fields.config.get("quantization_config"))
    fields.without_effect("quantization_config")
    architecture = ARCHITECTURES[larger.text[text_type]]
    return TextModel(architecture, fields.part("text_config", given), larger, fields)


def _is_tied(fields: Fields, inner: Mapping[str, Any]) -> bool | None:
    """Returns whether embedding and unembedding are one tensor;
    None where only the architecture tells.

    `transformers` takes the field of the larger model. Where that is missing it takes the class's
    own value, and ties nothing if the files have two tensors with different values. Here the files
    decide then, whatever the values are.
    """
    fields.without_effect("tie_word_embeddings")
    stated = fields.config.get("tie_word_embeddings")
    if stated is not None:
        return bool(stated)
    names = tensor_names(fields.file.parent)
    if names:
        heads = {prefix.head + "weight" for prefix in TEXT_PREFIXES}
        return not heads & names
    inner_value = inner.get("tie_word_embeddings")
    return None if inner_value is None else bool(inner_value)


def prefix_of_text(names: Iterable[str]) -> TextPrefix | None:
    """Returns the form of the names of a larger model's tensors;
    None where no text model is among them."""
    known = tuple(names)
    for prefix in TEXT_PREFIXES:
        if any(name.startswith(prefix.body) for name in known):
            return prefix
    return None


def _unknown(name: str, fields: Fields) -> tuple[str, str]:
    """Returns what is true of a configuration whose architecture is not computed,
    and what to do."""
    known = (*ARCHITECTURES, *LARGER_MODELS)
    meant = _misspelt(name, known)
    if meant is not None:
        return f"there is no architecture {name}", f"did you mean {meant!r}?"
    parts = [f"its architecture is {name}, which Meshwright does not compute"]
    config = dict(fields.config)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        parts.append("a text model inside it is not read from a larger model of this name")
        config |= inner
    lacked = {lacked_meaning_of(field, value) for field, value in config.items()} - {""}
    if lacked:
        parts.append(
            f"by its fields it has what no family here computes: {'; '.join(sorted(lacked))}"
        )
    relatives = [other for other in known if _maker(other) == _maker(name)]
    fix = "a model that one of these computes: " + ", ".join(sorted(relatives or known))
    if relatives:
        fix = f"of the same maker these are computed: {', '.join(sorted(relatives))}"
    return "; ".join(parts), fix


_FEW_LETTERS = 2


def _misspelt(name: str, known: Iterable[str]) -> str | None:
    """Returns the architecture of which `name` is a misspelling of one or two letters, or None.

    Names with other digits are other models (Qwen2, Qwen3),
    and so is every name that `transformers` has.
    """
    if name in LANGUAGE_MODELS:
        return None
    for other in known:
        same_digits = re.findall(r"\d+", name) == re.findall(r"\d+", other)
        if same_digits and _edits(name, other) <= _FEW_LETTERS:
            return other
    return None


def _edits(a: str, b: str) -> int:
    """Returns how many letters are replaced, inserted or removed between two texts."""
    edits = 0
    for kind, a_start, a_stop, b_start, b_stop in difflib.SequenceMatcher(
        None, a, b, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            edits += max(a_stop - a_start, b_stop - b_start)
    return edits


_MAKERS = {"mixtral": "mistral", "ministral": "mistral", "voxtral": "mistral"}
"""First word of a name -> that of its maker's other models, where it differs."""


def _maker(name: str) -> str:
    """Returns the first word of an architecture's name
    in small letters: "qwen" of Qwen3MoeForCausalLM."""
    word = re.match(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name)
    found = "" if word is None else word.group().lower()
    return _MAKERS.get(found, found)

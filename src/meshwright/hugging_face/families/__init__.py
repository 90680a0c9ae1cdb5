"""Architectures of Hugging Face by name; the module of a family is imported when one of its architectures is used.

An architecture is added from outside the package by adding it to `ARCHITECTURES`.
"""

from typing import Any

from meshwright.errors import WeightsError, nearest
from meshwright.hugging_face.architecture import Architecture
from meshwright.hugging_face.fields import Fields
from meshwright.models.model import Model
from meshwright.plugins import resolve

_MODULES = {
    "deepseek": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "gpt2": ("GPT2LMHeadModel",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "gemma": ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    "llama": (
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM"),
        *("Olmo3ForCausalLM", "Phi3ForCausalLM", "SmolLM3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"),
    ),
    "llama4": ("Llama4ForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM",),
}
_FAMILIES = {name: module for module, names in _MODULES.items() for name in names}
"""Architecture -> Hugging Face family of `plugins.PARTS` that states it."""

ARCHITECTURES: dict[str, Architecture] = {}
"""Architectures loaded so far, and those added from outside the package."""


def find_architecture(fields: Fields) -> Architecture:
    """Returns the architecture of a configuration. Raises WeightsError for one that Meshwright does not compute."""
    names = fields.config.get("architectures") or []
    name = str(names[0]) if names else ""
    if name not in ARCHITECTURES and name not in _FAMILIES:
        known = {*ARCHITECTURES, *_FAMILIES}
        raise WeightsError(
            f"reading {fields.file}",
            f"its architecture is {name or 'not named'}, which Meshwright does not compute",
            nearest(name, known),
        )
    return load_architecture(name)


def load_architecture(name: str) -> Architecture:
    """Returns an architecture by name; its family's module is imported now."""
    if name not in ARCHITECTURES:
        family = resolve("Hugging Face family", _FAMILIES[name])
        ARCHITECTURES.update({architecture.name: architecture for architecture in family})
    return ARCHITECTURES[name]


def architecture_of(model: Model) -> tuple[Architecture, dict[str, Any]]:
    """Returns the architecture that can express `model`, and its configuration. Raises WeightsError where none can."""
    for name in [*_FAMILIES, *ARCHITECTURES]:
        architecture = load_architecture(name)
        config = architecture.write(model)
        if config is not None:
            names = {"architectures": [architecture.name], "model_type": architecture.model_type}
            return architecture, {**names, **config}
    raise WeightsError(
        f"a {type(model).__name__} as a Hugging Face model",
        "no architecture of `transformers` that Meshwright knows has this combination of fields",
        f"a model that one of these can express: {', '.join(sorted({*_FAMILIES, *ARCHITECTURES}))}",
    )

"""Model families by name, as run.json keeps them, and the additions to them that few runs ask for.

Both are imported when they are used.
"""

from typing import Any

from meshwright.fine_tuning import FineTune
from meshwright.models.model import Model
from meshwright.plugins import load, name_of, resolve
from meshwright.sharding.params import Stored, Tree

FAMILIES: dict[str, str] = {
    "deepseek": "meshwright.models.families.deepseek:Deepseek",
    "gemma2": "meshwright.models.families.gemma:Gemma2",
    "gemma3": "meshwright.models.families.gemma:Gemma3",
    "glm4_moe": "meshwright.models.families.glm4_moe:Glm4Moe",
    "gpt2": "meshwright.models.families.gpt2:Gpt2",
    "gpt_oss": "meshwright.models.families.gpt_oss:GptOss",
    "llama": "meshwright.models.families.llama:Llama",
    "llama4": "meshwright.models.families.llama4:Llama4",
    "mixtral": "meshwright.models.families.mixtral:Mixtral",
    "olmo3": "meshwright.models.families.olmo3:Olmo3",
    "qwen3_next": "meshwright.models.families.qwen3_next:Qwen3Next",
    "smollm3": "meshwright.models.families.smollm3:SmolLM3",
}
"""Name of a family -> module and class."""
ADDITIONS: dict[str, str] = {
    "adapted_params": "meshwright.models.adapters:adapted_params",
    "adapter_gather": "meshwright.models.adapters:adapter_gather",
    "Preferences": "meshwright.models.preferences:Preferences",
    "with_reference": "meshwright.models.preferences:with_reference",
    "with_reference_params": "meshwright.models.preferences:with_reference_params",
    "check_precision": "meshwright.models.quantisation:check_precision",
    "low_precision_gather": "meshwright.models.blocks.quantised:low_precision_gather",
}
"""Function of adapters, of preferences or of low precision -> where it is."""


def family_name(model: Model) -> str:
    """Returns the name of a model's family: a row of `FAMILIES`, or module:attribute of its class."""
    return builtin_name(model) or name_of(type(model))


def builtin_name(model: Model) -> str | None:
    """Returns the name of a model's family where it is one of `FAMILIES`, else None."""
    path = f"{type(model).__module__}:{type(model).__qualname__}"
    return next((name for name, known in FAMILIES.items() if known == path), None)


def find_family(name: str) -> type[Model]:
    """Returns the class of a family. Raises ConfigError with the nearest name."""
    family = resolve("model family", name, FAMILIES)
    loaded: type[Model] = load("model family", family) if isinstance(family, str) else family
    return loaded


def addition(name: str) -> Any:
    """Returns a row of `ADDITIONS`."""
    return load("addition", ADDITIONS[name])


def tuned_params(params: Tree, tuning: FineTune, compute_dtype: Stored) -> Tree:
    """Returns the descriptions of a run's parameters: its model's, with those that fine-tuning adds.

    Raises ConfigError for adapters that the model cannot have.
    """
    if tuning.method == "lora":
        return addition("adapted_params")(params, tuning, compute_dtype)
    return addition("with_reference_params")(params, compute_dtype) if tuning.objective == "preferences" else params

"""Architectures of Hugging Face by name: configuration to model and back, and the tensors of each parameter.

Each family's module states its architectures (`families/`). One is added from outside the package by adding it to
`ARCHITECTURES`.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import WeightsError, nearest
from meshwright.hugging_face.fields import Fields
from meshwright.hugging_face.names import StoredTensor
from meshwright.hugging_face.table import LLAMA, Entry, Names, read_table, stored_tensors, write_table
from meshwright.models.model import Model

LAYER = "model.layers.{layer}."
COMPUTED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of `transformers`, as a family of Meshwright computes it."""

    name: str
    """Name in config.json: "LlamaForCausalLM"."""
    model_type: str
    """Type in config.json: "llama"."""
    family: Callable[..., Model]
    """Class of the models."""
    table: tuple[Entry, ...]
    """Facts that config.json and the model's fields both state, read and written."""
    names: Names = dataclasses.field(default_factory=lambda: LLAMA)
    """Tensors of the parameters."""
    layer: str = LAYER
    """Prefix of a layer's tensors."""
    tied: tuple[str, str] | None = ("lm_head.weight", "model.embed_tokens.weight")
    """Tensor that files may have besides the one that it is tied to: it is compared with it, and not kept."""
    computed: tuple[str, ...] = COMPUTED
    """Patterns of stored tensors that are computed, not learned: they are left out."""
    prefix: str = ""
    """Prefix of the tensors' names that files may lack."""
    packed: str | None = None
    """Quantised form of weights that is read as the numbers it stands for; None reads none."""
    left_out: tuple[str, ...] = ()
    """Patterns of learned tensors that no logit depends on: they are left out, and a note counts them."""

    def read(self, fields: Fields) -> Model:
        """Returns the model of a configuration. Raises WeightsError for a field that the family does not compute."""
        return self.family(**read_table(self.table, fields))

    def write(self, model: Model) -> dict[str, Any] | None:
        """Returns the configuration of a model, or None where the architecture cannot express it."""
        return write_table(self.table, model) if type(model) is self.family else None

    def tensors(self, model: Model) -> Mapping[str, StoredTensor]:
        """Returns where each parameter of a model is stored, by dotted path."""
        return stored_tensors(model, self.names, self.layer)

    def is_computed(self, name: str) -> bool:
        """Whether a stored tensor is one that the model computes."""
        return any(re.fullmatch(pattern, name) for pattern in self.computed)

    def leaves_out(self, name: str) -> bool:
        """Whether a stored tensor is learned, and none of those that the model computes logits from."""
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)


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
"""Architecture -> module of `hugging_face.families` that states it."""

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
        module = importlib.import_module(f"meshwright.hugging_face.families.{_FAMILIES[name]}")
        ARCHITECTURES.update({architecture.name: architecture for architecture in module.ARCHITECTURES})
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

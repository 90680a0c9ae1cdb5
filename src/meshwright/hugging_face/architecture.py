"""Architecture of Hugging Face: configuration to model and back, and the tensors of each parameter.

Each family's module states its architectures (`families/`).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

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

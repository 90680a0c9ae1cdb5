"""Fields of a config.json: read by name, required to have the one value that a family computes, or refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import check_inside, read_json
from meshwright.errors import WeightsError

REQUIRED: Any = object()
"""Default of a field that has none: it must be there."""

NEUTRAL = frozenset[str]().union(
    ("architectures", "model_type", "transformers_version", "auto_map", "_name_or_path", "unsloth_version"),
    ("dtype", "torch_dtype", "use_cache", "cache_implementation", "pretraining_tp", "max_position_embeddings"),
    ("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "task_specific_params", "problem_type"),
    ("initializer_range", "attention_dropout", "attention_probs_dropout_prob", "is_encoder_decoder", "is_decoder"),
    ("return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
    ("_attn_implementation", "_attn_implementation_autoset"),
)
"""Fields of every architecture that change no number of the forward pass, or name the architecture itself."""


_SIZES = frozenset[str]().union(
    ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    ("n_embd", "n_layer", "n_head", "n_positions", "n_inner", "max_position_embeddings", "intermediate_size"),
    ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp", "interleave_moe_layer_step"),
    ("sliding_window", "attention_chunk_size", "full_attention_interval", "no_rope_layer_interval"),
    ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_conv_kernel_dim"),
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
"""Fields that count something of which there is at least one, where they are not null."""


class Fields:
    """Fields of one config.json. Remembers which were read, so that the others can be reported."""

    def __init__(self, file: Path, config: Mapping[str, Any]):
        self.file, self.config = file, config
        self._read: set[str] = set()

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a field; `default` stands for a missing one and for null. Raises WeightsError without a default."""
        self._read.add(name)
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                raise WeightsError(f"reading {self.file}", f"it has no {name!r}", f"a configuration with {name}")
            return default
        if name in _SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise WeightsError(
                f"reading {self.file}", f"{name} is {json.dumps(value)}", f"a configuration whose {name} is 1 or more"
            )
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns a field with fields of its own, without those that are null; a missing one has none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise WeightsError(
                f"reading {self.file}", f"{name} is {json.dumps(value)}, and not a JSON object", "a model's config.json"
            )
        return {key: inner for key, inner in value.items() if inner is not None}

    def first(self, *names: str, default: Any = REQUIRED) -> Any:
        """Returns the first of several fields that is there: names of different versions of `transformers`."""
        self._read.update(names)
        return next((self.config[n] for n in names if self.config.get(n) is not None), None) or self.get(
            names[0], default
        )

    def require(self, name: str, *allowed: Any) -> None:
        """Raises WeightsError unless a field has one of the values that the family computes, or is missing."""
        self._read.add(name)
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            known = " or ".join(json.dumps(a) for a in allowed)
            raise WeightsError(
                f"reading {self.file}",
                f"{name} is {json.dumps(value)}, and Meshwright computes it only with {known}",
                f"a model with {name} {known}",
            )

    def flag(self, name: str) -> bool:
        """Returns a field that is true or false; a missing one is false. Raises WeightsError for any other value."""
        self.require(name, False, True, None)
        return bool(self.config.get(name))

    def without_effect(self, *names: str) -> None:
        """Counts fields as read that change no number of the forward pass."""
        self._read.update(names)

    def check_quantised(self, known: str | None) -> bool:
        """Returns whether the weights are quantised, in the form `known`. Raises WeightsError for any other."""
        self._read.add("quantization_config")
        method = (self.config.get("quantization_config") or {}).get("quant_method")
        if not self.config.get("quantization_config"):
            return False
        if method != known:
            raise WeightsError(
                f"reading {self.file}",
                f"its weights are quantised ({method or '?'}), and training needs the numbers themselves",
                "the model's unquantised weights (bfloat16), or dequantise it with `transformers`",
            )
        return True

    def unread(self) -> list[str]:
        """Returns the fields with a value that nothing has read, and that are not known to be without effect."""
        empty: tuple[Any, ...] = (None, False, [], {}, "")
        return sorted(
            name
            for name, value in self.config.items()
            if name not in self._read and name not in NEUTRAL and value not in empty
        )


def read_fields(folder: Path) -> Fields:
    """Reads the config.json of a folder. Raises WeightsError where there is none, or it is not a configuration."""
    file = folder / "config.json"
    try:
        check_inside(folder, [file])
        config = read_json(file)
    except OSError as error:
        raise WeightsError(
            f"reading {file}", f"{error.strerror or error}", "a folder that save_pretrained of `transformers` wrote"
        ) from error
    except ValueError as error:
        raise WeightsError(f"reading {file}", f"it is not a configuration: {error}", "download it again") from error
    if not isinstance(config, dict):
        raise WeightsError(f"reading {file}", "it is not a JSON object", "the config.json of a model")
    return Fields(file, config)

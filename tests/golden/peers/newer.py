"""Writes the golden files of further architectures, each as its own script writes those of `theirs.py`."""

import sys
from pathlib import Path
from typing import Any

import architectures
import changed
import drawn
import fields
import larger
import numpy as np
import theirs
import transformers

HERE = Path(__file__).resolve()
_SIZES = theirs._SIZES
_LINEAR_AND_FULL = {
    **_SIZES, "num_hidden_layers": 4, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_GEMMA4 = {
    **_SIZES, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8,
    "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 5,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip
_TWO_LAYERS_OF_GEMMA4 = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
_TWO = {**_SIZES, "num_hidden_layers": 2}
_FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
_SPACE = {
    "shared_intermediate_size": 48, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 32,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip
_KIND = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Kinds of Nemotron-H's layers by the letters of published configurations."""
_GROWING = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "routed_scaling_factor": 1.8,
}  # fmt: skip
_SPARSE = {
    **_SIZES, **theirs._LATENT, **_ROUTED, "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 24,
    "first_k_dense_replace": 1, "index_n_heads": 8, "index_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", _LINEAR_AND_FULL),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_LINEAR_AND_FULL, **_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen2-moe": ("Qwen2Moe", {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "olmoe": ("Olmoe", {
        **_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "attention_bias": True,
    }),
    "glm-4.7-flash": ("Glm4MoeLite", {
        **_SIZES, **theirs._LATENT, **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "seed-oss": ("SeedOss", {**_SIZES, "head_dim": 24}),
    "minimax-m2": ("MiniMaxM2", {
        **_SIZES, "head_dim": 16, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }),
    "gemma-4": ("Gemma4", {
        **_GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 3,
        "moe_intermediate_size": 24, "num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
        **_TWO_LAYERS_OF_GEMMA4,
    }),
    "gemma-4-dense": ("Gemma4Unified", {**_GEMMA4, "final_logit_softcapping": None}),
    "granite": ("Granite", {**_TWO, **_FACTORS, "tie_word_embeddings": True, "attention_bias": True}),
    "granite-moe": ("GraniteMoe", {
        **_TWO, **_FACTORS, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "granite-4": ("GraniteMoeHybrid", {
        **_TWO, **_FACTORS, **_SPACE, "num_local_experts": 0, "mamba_n_groups": 2, "tie_word_embeddings": True,
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
    "granite-4-moe": ("GraniteMoeHybrid", {
        **_TWO, **_FACTORS, **_SPACE, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "position_embedding_type": "rope",
    }),
    "nemotron-h": ("NemotronH", {
        **{name: value for name, value in _SIZES.items() if name != "num_hidden_layers"},
        **_ROUTED, "hidden_size": 32, "intermediate_size": 48, "moe_shared_expert_intermediate_size": 48, "head_dim": 8,
        "layers_block_type": [_KIND[letter] for letter in "M*MEME-"], "norm_topk_prob": True,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "time_step_min": 0.6,
    }),
    "nemotron-3-super": ("NemotronH", {
        **{name: value for name, value in _SIZES.items() if name != "num_hidden_layers"},
        **_ROUTED, "n_routed_experts": 4, "n_group": 2, "num_experts_per_tok": 2, "moe_latent_size": 16,
        "hidden_size": 32, "moe_shared_expert_intermediate_size": 48, "head_dim": 8,
        "layers_block_type": [_KIND[letter] for letter in "*E"], "norm_topk_prob": True,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "time_step_min": 0.6,
    }),
    "arcee": ("Arcee", {**_TWO, "mlp_bias": True}),
    "cohere": ("Cohere", {
        **_TWO, "logit_scale": 0.5, "attention_bias": True, "use_qk_norm": True, "pad_token_id": None,
    }),
    "cohere2": ("Cohere2", {
        **_TWO, "hidden_size": 32, "intermediate_size": 48, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5, "logit_scale": 0.5, "pad_token_id": None,
    }),
    "hunyuan": ("HunYuanDenseV1", {
        **_TWO, "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 5.0, "factor": 1.0, "rope_theta": 10000.0},
    }),
    "ministral-3": ("Ministral3", {**_TWO, "head_dim": 24, "rope_parameters": _GROWING}),
    "mistral-4": ("Mistral4", {
        **_TWO, **theirs._LATENT, "num_key_value_heads": 4, "q_lora_rank": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "rope_parameters": {**_GROWING, "mscale_all_dim": 0.7},
    }),
    "deepseek-v3.2": ("DeepseekV32", {**_SPARSE, "index_topk": 5}),
    "glm-5": ("GlmMoeDsa", {**_SPARSE, "index_topk": 6}),
    "dots1": ("Dots1", {**_SIZES, **_ROUTED, "first_k_dense_replace": 1, "norm_topk_prob": True}),
    "kimi-linear": ("KimiLinear", {
        **_SIZES, **theirs._LATENT, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 24,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_experts_per_token": 2,
        "num_shared_experts": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 1.8, "pad_token_id": None,
    }),
}  # fmt: skip
"""Row -> class of `transformers`, and its configuration."""

_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
_NO_TOKEN = int(np.setdiff1d(np.arange(theirs.VOCAB), theirs.TOKENS)[0])
"""A token that the texts do not have: `torch` gives the embedding of padding no gradient."""
LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-larger": ("Qwen3_5ForConditionalGeneration", {
        "text_config": ROWS["qwen3.5"][1], "vision_config": _VISION,
    }),
    "qwen3.5-moe-larger": ("Qwen3_5MoeForConditionalGeneration", {
        "text_config": ROWS["qwen3.5-moe"][1], "vision_config": _VISION,
    }),
    "gemma-4-larger": ("Gemma4ForConditionalGeneration", {
        "text_config": {**ROWS["gemma-4"][1], "use_bidirectional_attention": "vision", "pad_token_id": _NO_TOKEN},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
        },
    }),
    "gemma-4-unified-larger": ("Gemma4UnifiedForConditionalGeneration", {
        "text_config": {**ROWS["gemma-4-dense"][1], **_TWO_LAYERS_OF_GEMMA4, "pad_token_id": _NO_TOKEN},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16},
        "audio_config": {"audio_embed_dim": 16},
    }),
    "ministral-3-larger": ("Mistral3ForConditionalGeneration", {
        "text_config": {"model_type": "ministral3", **ROWS["ministral-3"][1], "num_hidden_layers": 1},
        "vision_config": theirs.LARGER["mistral-3-larger"][1]["vision_config"], "tie_word_embeddings": False,
    }),
    "qwen3-vl-moe-larger": ("Qwen3VLMoeForConditionalGeneration", {
        "text_config": {
            **_SIZES, **_EXPERTS, "head_dim": 24, "mlp_only_layers": [0], "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 3, 3], "mrope_interleaved": True,
            },
        },
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0]},
    }),
}  # fmt: skip
"""Row of a larger model -> class of `transformers`, and its configuration."""

WRITTEN_AS = {
    "gemma-4-dense": "Gemma4ForCausalLM",
    "glm-4.7-flash": "DeepseekV3ForCausalLM",
    "seed-oss": "Qwen2ForCausalLM",
    "dots1": "Glm4MoeForCausalLM",
}
"""Row -> architecture that Meshwright writes from its model, where it is another that computes the same."""
LAYERS: dict[str, dict[str, Any]] = {
    "gemma-4": {"num_hidden_layers": 42},
    "gemma-4-dense": {"num_hidden_layers": 42},
    "kimi-linear": {
        "linear_attn_config": {
            "full_attn_layers": list(range(4, 41, 4)),
            "kda_layers": [layer for layer in range(1, 41) if layer % 4],
        },
    },
}
"""Row -> changes that make it deep, besides `num_hidden_layers`."""


_table_of = theirs.table_of


def table_of(folder: Path) -> dict[str, Any]:
    """How the tensors of a folder are drawn: those of Gemma 4, whose scores have no divisor, with smaller norms."""
    table = _table_of(folder)
    if not any(name.endswith("layer_scalar") for name in table):
        return table
    for name, (dtype, shape, center, spread) in table.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            table[name] = (dtype, shape, center / 2, spread)
    return table


theirs.table_of = table_of


def with_infinite_limit(config_class: Any) -> None:
    """Lets a class of configurations read an infinite limit as it writes it."""
    read_config = config_class.from_dict

    def read(values: dict[str, Any], **others: Any) -> Any:
        limit = values.get("time_step_limit")
        if limit is not None:
            numbers = [float(x["__float__"]) if isinstance(x, dict) else x for x in limit]
            values = {**values, "time_step_limit": numbers}
        return read_config(values, **others)

    config_class.from_dict = read


with_infinite_limit(transformers.GraniteMoeHybridConfig)
with_infinite_limit(transformers.NemotronHConfig)


def _write(folder: Path, name: str, scripts: list[Path], *contents: Any) -> None:
    """Writes a golden file that belongs to this script too."""
    drawn.write(folder, name, [*scripts, HERE], *contents)


def main(out: Path, rows: list[str]) -> None:
    """Writes the files of `rows`, or all; the fields of all rows."""
    chosen = {row: ROWS[row] for row in rows if row in ROWS} if rows else ROWS
    theirs.LARGER = {row: LARGER[row] for row in rows if row in LARGER} if rows else LARGER
    theirs.ROWS = chosen
    theirs.WRITTEN_AS = WRITTEN_AS
    architectures.write = _write
    larger.write = _write
    architectures.main(out)
    larger.main(out)
    theirs.ROWS = ROWS
    changed.write = lambda folder, name, *rest: _write(folder, f"newer-{name}", *rest)
    changed.main(out)
    fields.write = lambda folder, name, *rest: _write(folder, f"newer-{name}", *rest)
    fields.CHANGES = {
        row: {"num_hidden_layers": fields.LAYERS, **LAYERS.get(row, {})} for row in ROWS
    }
    fields.main(out)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]), sys.argv[2:])

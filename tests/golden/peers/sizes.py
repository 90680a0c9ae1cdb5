"""Writes configurations of published sizes, and the parameters that `transformers` counts in each, without weights."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import theirs
import torch
import transformers
from drawn import write

HERE = Path(__file__).resolve()
_ROPE_OF_QWEN = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
_GEMMA4 = {
    "attention_k_eq_v": True, "sliding_window": 1024, "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
_GRANITE = {
    "vocab_size": 49155, "num_key_value_heads": 8, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}  # fmt: skip
_GRANITE_4 = {
    "vocab_size": 100352, "num_hidden_layers": 40, "num_key_value_heads": 8, "tie_word_embeddings": True,
    "mamba_d_head": 64, "mamba_d_state": 128,
    "layer_types": [
        "full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)
    ],
}  # fmt: skip
_FULL_OF_KIMI = [4, 8, 12, 16, 20, 24, 27]
_QWEN_MOE = {"num_key_value_heads": 2, "rope_parameters": _ROPE_OF_QWEN}
_QWEN_LARGE_MOE = {
    **_QWEN_MOE, "num_attention_heads": 32, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}  # fmt: skip


def _kinds(pattern: str) -> list[str]:
    """Kinds of Nemotron-H's layers from the letters of a published configuration."""
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [names[letter] for letter in pattern]


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-0.8B": ("Qwen3_5ForCausalLM", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
        "rope_parameters": _ROPE_OF_QWEN,
    }),
    "Qwen3.5-4B": ("Qwen3_5ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True, "rope_parameters": _ROPE_OF_QWEN,
    }),
    "Qwen3.5-9B": ("Qwen3_5ForCausalLM", {"rope_parameters": _ROPE_OF_QWEN}),
    "Qwen3.5-27B": ("Qwen3_5ForCausalLM", {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48, "rope_parameters": _ROPE_OF_QWEN,
    }),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeForCausalLM", _QWEN_MOE),
    "Qwen3.5-122B-A10B": ("Qwen3_5MoeForCausalLM", {
        **_QWEN_LARGE_MOE, "hidden_size": 3072, "num_hidden_layers": 48,
    }),
    "Qwen3.5-397B-A17B": ("Qwen3_5MoeForCausalLM", {
        **_QWEN_LARGE_MOE, "hidden_size": 4096, "num_hidden_layers": 60, "num_experts": 512, "num_experts_per_tok": 10,
    }),
    "Gemma-4-12B": ("Gemma4UnifiedForCausalLM", {
        **_GEMMA4, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 1,
    }),
    "Gemma-4-26B-A4B": ("Gemma4ForCausalLM", {
        **_GEMMA4, "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
    }),
    "Gemma-4-31B": ("Gemma4ForCausalLM", {
        **_GEMMA4, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0,
    }),
    "Granite-3.1-8B": ("GraniteForCausalLM", {
        **_GRANITE, "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
        "num_attention_heads": 32, "attention_multiplier": 0.0078125, "logits_scaling": 16.0,
    }),
    "Granite-3.1-3B-A800M": ("GraniteMoeForCausalLM", {
        **_GRANITE, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_local_experts": 40, "num_experts_per_tok": 8, "attention_multiplier": 0.015625, "logits_scaling": 6.0,
    }),
    "Granite-4.0-H-Micro": ("GraniteMoeHybridForCausalLM", {
        **_GRANITE_4, "hidden_size": 2048, "shared_intermediate_size": 8192, "mamba_n_heads": 64,
        "num_local_experts": 0,
    }),
    "Granite-4.0-H-350M": ("GraniteMoeHybridForCausalLM", {
        **_GRANITE_4, "hidden_size": 768, "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4,
        "shared_intermediate_size": 2048, "mamba_n_heads": 48, "mamba_d_head": 32, "num_local_experts": 0,
        "layer_types": [
            "full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)
        ],
    }),
    "Granite-4.0-H-Tiny": ("GraniteMoeHybridForCausalLM", {
        **_GRANITE_4, "hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 12,
        "num_key_value_heads": 4, "shared_intermediate_size": 1024, "mamba_n_heads": 48, "num_local_experts": 64,
        "num_experts_per_tok": 6,
    }),
    "Granite-4.0-H-Small": ("GraniteMoeHybridForCausalLM", {
        **_GRANITE_4, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_local_experts": 72,
        "num_experts_per_tok": 10,
    }),
    "Nemotron-H-8B": ("NemotronHForCausalLM", {
        "layers_block_type": _kinds("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    }),
    "Nemotron-Nano-9B-v2": ("NemotronHForCausalLM", {
        "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "mamba_head_dim": 80,
        "layers_block_type": _kinds("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
    }),
    "Nemotron-3-Nano-30B-A3B": ("NemotronHForCausalLM", {
        "hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2, "mamba_num_heads": 64,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        "layers_block_type": _kinds("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    }),
    "Nemotron-3-Super-120B-A12B": ("NemotronHForCausalLM", {
        "intermediate_size": 2688, "num_key_value_heads": 2, "n_routed_experts": 512, "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
        "routed_scaling_factor": 5.0,
        "layers_block_type": _kinds(
            "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
        ),
    }),
    "AFM-4.5B": ("ArceeForCausalLM", {
        "vocab_size": 128004, "num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4,
        "head_dim": 128,
    }),
    "Command-R-35B": ("CohereForCausalLM", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    }),
    "Command-R-Plus-104B": ("CohereForCausalLM", {
        "hidden_size": 12288, "intermediate_size": 33792, "num_hidden_layers": 64, "num_attention_heads": 96,
        "num_key_value_heads": 8, "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 75e6},
    }),
    "Command-R7B": ("Cohere2ForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "logit_scale": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }),
    "Command-A": ("Cohere2ForCausalLM", {
        "hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 64, "num_attention_heads": 96,
        "num_key_value_heads": 8, "logit_scale": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }),
    "Hunyuan-7B": ("HunYuanDenseV1ForCausalLM", {
        "vocab_size": 128167, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    }),
    "Ministral-3-8B": ("Ministral3ForCausalLM", {}),
    "Mistral-Small-4": ("Mistral4ForCausalLM", {}),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", {}),
    "GLM-5": ("GlmMoeDsaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Kimi-Linear-48B-A3B": ("KimiLinearForCausalLM", {
        "linear_attn_config": {
            "full_attn_layers": _FULL_OF_KIMI, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "kda_layers": [layer for layer in range(1, 28) if layer not in _FULL_OF_KIMI],
        },
    }),
    "Qwen1.5-MoE-A2.7B": ("Qwen2MoeForCausalLM", {}),
    "Qwen2-57B-A14B": ("Qwen2MoeForCausalLM", {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
        "num_experts": 64, "num_experts_per_tok": 8,
    }),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", {"intermediate_size": 1024}),
    "GLM-4.7-Flash": ("Glm4MoeLiteForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Seed-OSS-36B": ("SeedOssForCausalLM", {
        "hidden_size": 5120, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    }),
    "MiniMax-M2": ("MiniMaxM2ForCausalLM", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }),
    "dots.llm1": ("Dots1ForCausalLM", {
        "hidden_size": 4096, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    }),
}  # fmt: skip
"""Published model -> class of `transformers`, and the fields that are not the defaults of its configuration."""


def main(out: Path) -> None:
    found = {}
    for name, (class_name, fields) in SIZES.items():
        model_class = getattr(transformers, class_name)
        config = model_class.config_class(**fields)
        with torch.device("meta"):
            model = model_class(config)
        # The bias of a router is a buffer, which files have as they have parameters.
        stored = model.state_dict().keys()
        buffers = [b for name, b in model.named_buffers() if name in stored]
        parameters = sum(tensor.numel() for tensor in (*model.parameters(), *buffers))
        written = json.loads(config.to_json_string(use_diff=False))
        found[name] = {
            "config": {**written, "architectures": [class_name]},
            "parameters": parameters,
        }
        print(name, f"{parameters:,}", flush=True)
    counts = np.array([row["parameters"] for row in found.values()])
    write(
        out,
        "published-sizes",
        [HERE, HERE.parent / "theirs.py"],
        theirs.versions(),
        {"sizes": found},
        {"counts": counts},
    )


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

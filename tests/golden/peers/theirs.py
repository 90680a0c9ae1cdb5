"""Small models of `transformers`, one for each architecture, with drawn weights; and what `torch` makes of them."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from drawn import (
    BETAS,
    DECAY,
    EPSILON,
    GREEDY,
    LEARNING_RATE,
    PROMPT,
    STEPS,
    TOKENS,
    VOCAB,
    draw_tensors,
)
from safetensors.numpy import load_file, save_file

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
_LATENT_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 10000.0,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
_SHORT_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24, "moe_intermediate_size": 32,
}  # fmt: skip

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "llama-3.1": ("Llama", {
        **_SIZES, "rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 24, "attention_bias": True,
        "mlp_bias": True,
    }),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": 5, "rope_parameters": _LINEAR}),
    "qwen2": ("Qwen2", {**_SIZES, "rope_parameters": _SHORT_YARN}),
    "qwen3": ("Qwen3", {**_SIZES, "head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 4, "head_dim": 16, "rope_parameters": _SHORT_YARN}),
    "qwen3-moe": ("Qwen3Moe", {
        **_SIZES, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "mlp_only_layers": [0], "attention_bias": True,
        "rope_parameters": {**_SHORT_YARN, "attention_factor": 0.9},
    }),
    "gpt2": ("GPT2", {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
    "olmo-2": ("Olmo2", {
        **_SIZES, "attention_bias": True, "rope_parameters": {**_SHORT_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    }),
    "gpt-oss": ("GptOss", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 5, "swiglu_limit": 0.1, "rope_parameters": {**_YARN, "truncate": False},
    }),
    "llama-4": ("Llama4", {
        **_SIZES, "num_hidden_layers": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
        "intermediate_size": 32, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4, "attention_chunk_size": 6, "floor_scale": 4,
    }),
    "llama-4-scout": ("Llama4", {
        **_SIZES, "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 32, "no_rope_layer_interval": 2, "attention_chunk_size": 5, "floor_scale": 4,
        "use_qk_norm": False, "rope_parameters": {**_LLAMA3, "high_freq_factor": 1.0},
    }),
    "gemma-2": ("Gemma2", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7,
    }),
    "olmo-3": ("Olmo3", {
        **_SIZES, "num_hidden_layers": 5, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {**_YARN, "rope_theta": 10000.0},
        },
    }),
    "gemma-3": ("Gemma3", {
        **_SIZES, "num_hidden_layers": 5, "head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    }),
    "deepseek-v3": ("DeepseekV3", {
        **_SIZES, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": 24, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "rope_parameters": _LATENT_YARN,
        "num_mtp_layers": 0,
    }),
    "deepseek-v2-lite": ("DeepseekV2", {
        **_SIZES, **_LATENT, "num_key_value_heads": 4, "q_lora_rank": None, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "topk_method": "greedy", "first_k_dense_replace": 1,
    }),
    "qwen3-next": ("Qwen3Next", {
        **_SIZES, "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }),
    "phi-4": ("Phi3", {**_SIZES, "sliding_window": 5}),
    "smollm3": ("SmolLM3", {**_SIZES, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "glm-4.5": ("Glm4Moe", {
        **_SIZES, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_mtp_layers": 0,
    }),
}  # fmt: skip
"""Row -> class of `transformers`, and its configuration."""

_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def _text(row: str, **changes: Any) -> dict[str, Any]:
    return {**ROWS[row][1], **changes}


LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-larger": ("Gemma3ForConditionalGeneration", {
        "text_config": _text("gemma-3"), "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
    }),
    "llama-4-larger": ("Llama4ForConditionalGeneration", {
        "text_config": _text("llama-4"),
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5,
        },
    }),
    "mistral-3-larger": ("Mistral3ForConditionalGeneration", {
        "text_config": {"model_type": "mistral", **_text("mistral", sliding_window=None)},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "head_dim": 8,
        },
        "tie_word_embeddings": False,
    }),
    "kimi-k2.5-larger": ("Kimi_K25ForConditionalGeneration", {
        "text_config": {"model_type": "deepseek_v3", **_text("deepseek-v3")},
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        },
        "tie_word_embeddings": False,
    }),
    "qwen3-vl-larger": ("Qwen3VLForConditionalGeneration", {
        "text_config": _text(
            "qwen3",
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 3, 3],
                "mrope_interleaved": True,
            },
        ),
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        "tie_word_embeddings": True,
    }),
}  # fmt: skip
"""Row of a larger model -> class of `transformers`, and its configuration: the text model of another row, and a tower."""

WRITTEN_AS = {"phi-4": "MistralForCausalLM"}
"""Row -> architecture that Meshwright writes from its model, where it is another that computes the same."""


def model_class(name: str) -> Any:
    """The class of `transformers` with a head for text."""
    if name.endswith("ForConditionalGeneration"):
        return getattr(transformers, name)
    found = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    if name == "Llama4":
        found.config_class = transformers.Llama4TextConfig
    return found


def config_of(row: str) -> Any:
    name, settings = (ROWS | LARGER)[row]
    config = model_class(name).config_class(**settings)
    config._attn_implementation = "eager"
    return config


def _initial(tensor: np.ndarray, name: str) -> tuple[float, float]:
    """Center and spread that a tensor is drawn with: around a constant initial value, else around zero."""
    if name.endswith("A_log"):
        return (
            -2.2,
            1.0,
        )  # states that last: most are otherwise forgotten within a token, and their gradients rounding
    return (float(tensor.flat[0]), 0.05) if (tensor == tensor.flat[0]).all() else (0.0, 0.054)


def table_of(folder: Path) -> dict[str, Any]:
    """How the tensors of a folder are drawn: name -> (dtype, shape, center, spread)."""
    tensors = load_tensors(folder)
    return {n: (str(t.dtype), list(t.shape), *_initial(t, n)) for n, t in sorted(tensors.items())}


def load_tensors(folder: Path) -> dict[str, np.ndarray]:
    # The published files of Kimi K2.5 have layers of text, which transformers 5.24 writes under the tower's word.
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            published = name.replace("language_model.model.blocks.", "language_model.model.layers.")
            found[published] = tensor
    return found


def save(row: str, folder: Path) -> dict[str, Any]:
    """Writes the folder of a row with drawn weights; returns its table. No bias is zero, and no norm one."""
    torch.manual_seed(0)
    model_class((ROWS | LARGER)[row][0])(config_of(row)).float().save_pretrained(folder)
    table = table_of(folder)
    save_file(draw_tensors(table), folder / "model.safetensors", {"format": "pt"})
    return table


def load(folder: Path) -> Any:
    """The model of a folder in float32."""
    config = json.loads((folder / "config.json").read_text())
    found = getattr(transformers, config["architectures"][0])
    model = found.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def logits_of(model: Any, tokens: np.ndarray = TOKENS[:, :-1]) -> Any:
    # The forward pass of Llama 4's larger model fails without images (5.24): its text model computes the same.
    is_llama4 = type(model).__name__ == "Llama4ForConditionalGeneration"
    part = model.language_model if is_llama4 else model
    return part(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits


def loss_of(logits: Any) -> Any:
    targets = torch.tensor(TOKENS[:, 1:], dtype=torch.long)
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    )


def stored(model: Any, values: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Values by the names of a model's parameters, by the names that `transformers` stores them under.

    The model is left with the values. What has none is left out: NaN marks it.
    """
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(values[name]) if values.get(name) is not None else tensor.fill_(
                    float("nan")
                )
    model.save_pretrained(folder)
    return {n: t for n, t in load_tensors(folder).items() if not np.isnan(t).any()}


def reference(folder: Path, scratch: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits [B, T, V], and the gradient of the mean loss by the name of the stored tensor."""
    model = load(folder)
    logits = logits_of(model)
    loss_of(logits).backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return logits.detach().numpy(), stored(model, grads, scratch)


def steps(folder: Path, scratch: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of AdamW steps on one batch, and the parameters after them by the name of the stored tensor."""
    model = load(folder)
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, p in model.named_parameters():
        matrix = p.ndim >= 2 and not name.endswith(("bias", "A_log", "norm.weight"))
        groups[matrix].append(p)
    parts = [{"params": groups[decays], "weight_decay": DECAY * decays} for decays in (True, False)]
    optimizer = torch.optim.AdamW(parts, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(logits_of(model))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, stored(
        model, {n: p.detach().clone() for n, p in model.named_parameters()}, scratch
    )


def greedy(model: Any, texts: np.ndarray = TOKENS[:, :PROMPT], count: int = GREEDY) -> np.ndarray:
    """Greedy text after each prompt, [B, count]: each token from a forward pass over all before it."""
    for _ in range(count):
        with torch.no_grad():
            chosen = logits_of(model, texts)[:, -1].argmax(-1).numpy()
        texts = np.concatenate([texts, chosen[:, None]], 1)
    return texts[:, -count:]


def missing_fields(row: str, folder: Path) -> dict[str, Any]:
    """What `transformers` takes for each field that a configuration leaves out: field -> the fields that differ.

    `rope_scaling` is the configuration with a linear one added.
    """
    config_class = type(config_of(row))
    config = json.loads(config_class(**ROWS[row][1]).to_json_string(use_diff=False))
    fewer = {name: {n: v for n, v in config.items() if n != name} for name in config}
    rope = config.get("rope_parameters") or {}
    for name in rope:
        rest = {n: v for n, v in rope.items() if n != name}
        fewer[f"rope_parameters.{name}"] = {**config, "rope_parameters": rest}
    fewer["rope_scaling"] = {**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    changes = {}
    for name, given in fewer.items():
        try:
            filled = json.loads(
                config_class.from_dict(json.loads(json.dumps(given))).to_json_string(use_diff=False)
            )
        except Exception as refused:
            changes[name] = f"{type(refused).__name__}: {refused}"
            continue
        gone = [n for n in config if n not in filled]
        different = {n: v for n, v in filled.items() if n not in config or v != config[n]}
        changes[name] = {"changed": different, "gone": gone}
    return {"config": config, "without": changes}


def versions(*modules: Any) -> dict[str, str]:
    return {m.__name__: m.__version__ for m in (torch, transformers, np, *modules)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of `transformers` and `torch`, which are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Writes `torch_dist` checkpoints of a small Llama, Qwen2, Qwen3 and Mixtral with megatron-core's own GPTModel, on the CPU.

The parameters are those of Hugging Face's model, drawn by name. megatron-core's logits are compared with those of
`transformers` before it saves: the order of its tensors is then that of the same function.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from drawn import draw, write

HERE = Path(__file__).resolve()
D, N, K, H, F, V, L, E = 16, 4, 2, 4, 24, 30, 2, 4
PADDED = 32
"""Rows of Megatron's vocabulary, which it fills up."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K, "vocab_size": V, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "dtype": "float32", "head_dim": H,
}  # fmt: skip
CONFIGS = {
    "llama": CONFIG,
    "qwen2": {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mixtral": {
        **CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": E,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of Hugging Face's parameters by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for layer in range(L):
        start = f"model.layers.{layer}"
        shapes |= {
            f"{start}.self_attn.q_proj.weight": (N * H, D),
            f"{start}.self_attn.k_proj.weight": (K * H, D),
            f"{start}.self_attn.v_proj.weight": (K * H, D),
            f"{start}.self_attn.o_proj.weight": (D, N * H),
            f"{start}.input_layernorm.weight": (D,),
            f"{start}.post_attention_layernorm.weight": (D,),
        }
        if model == "qwen2":
            shapes[f"{start}.self_attn.q_proj.bias"] = (N * H,)
            shapes |= {f"{start}.self_attn.{name}_proj.bias": (K * H,) for name in "kv"}
        if model == "qwen3":
            norms = (f"{start}.self_attn.q_norm.weight", f"{start}.self_attn.k_norm.weight")
            shapes |= dict.fromkeys(norms, (H,))
        if model != "mixtral":
            shapes |= {f"{start}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
            shapes[f"{start}.mlp.down_proj.weight"] = (D, F)
            continue
        shapes[f"{start}.block_sparse_moe.gate.weight"] = (E, D)
        for expert in range(E):
            name = f"{start}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{name}.w1.weight": (F, D), f"{name}.w2.weight": (D, F)}
            shapes[f"{name}.w3.weight"] = (F, D)
    return shapes


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter: larger than initial values, so that an error shows in the logits."""
    if "norm" in name:
        return draw(name, shape, 1.0, 0.1)
    return draw(name, shape, 0.0, 0.3)


def megatron_value(name: str, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the value of a parameter of GPTModel."""
    if name == "embedding.word_embeddings.weight":
        return np.pad(weights["model.embed_tokens.weight"], ((0, PADDED - V), (0, 0)))
    if name == "output_layer.weight":
        return np.pad(weights["lm_head.weight"], ((0, PADDED - V), (0, 0)))
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, layer, rest = name.split(".", 3)

    def weight(inner: str) -> np.ndarray:
        return weights[f"model.layers.{layer}.{inner}.weight"]

    simple = {
        "input_layernorm.weight": "input_layernorm",
        "pre_mlp_layernorm.weight": "post_attention_layernorm",
        "self_attention.linear_proj.weight": "self_attn.o_proj",
        "self_attention.q_layernorm.weight": "self_attn.q_norm",
        "self_attention.k_layernorm.weight": "self_attn.k_norm",
        "mlp.linear_fc2.weight": "mlp.down_proj",
        "mlp.router.weight": "block_sparse_moe.gate",
    }
    if rest in simple:
        return weight(simple[rest])
    if rest.startswith("self_attention.linear_qkv."):
        of_groups = []
        for letter in "qkv":
            projection = f"model.layers.{layer}.self_attn.{letter}_proj.{rest.split('.')[-1]}"
            of_groups.append(weights[projection].reshape(K, -1, *weights[projection].shape[1:]))
        joined = np.concatenate(of_groups, axis=1)
        return joined.reshape(-1, *joined.shape[2:])
    if rest == "mlp.linear_fc1.weight":
        return np.concatenate([weight("mlp.gate_proj"), weight("mlp.up_proj")])
    expert = rest.split(".")[3]
    start = f"block_sparse_moe.experts.{expert}"
    if rest.endswith("linear_fc1.weight"):
        return np.concatenate([weight(f"{start}.w1"), weight(f"{start}.w3")])
    return weight(f"{start}.w2")


def gpt_model(model: str) -> Any:
    """Returns megatron-core's model with its local modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if model == "mixtral":
        moe = {"num_moe_experts": E, "moe_router_topk": 2, "moe_ffn_hidden_size": F}
    config = TransformerConfig(
        num_layers=L, hidden_size=D, ffn_hidden_size=F, num_attention_heads=N, num_query_groups=K, kv_channels=H,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-5, qk_layernorm=model == "qwen3",
        add_qkv_bias=model == "qwen2", attention_dropout=0.0, hidden_dropout=0.0, **moe,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=E if moe else None, moe_grouped_gemm=False, qk_layernorm=model == "qwen3",
        normalization="RMSNorm",
    )  # fmt: skip
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=64, position_embedding_type="rope", rotary_base=10000,
        share_embeddings_and_output_weights=False,
    ).eval()  # fmt: skip


def difference(gpt: Any, model: str, weights: dict[str, np.ndarray]) -> float:
    """Returns the largest difference of megatron-core's logits and those of `transformers`, relative to the largest."""
    from safetensors.numpy import save_file

    tokens = torch.arange(12)[None] * 7 % V
    positions = torch.arange(12)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        save_file(weights, Path(name, "model.safetensors"), metadata={"format": "pt"})
        Path(name, "config.json").write_text(json.dumps(CONFIGS[model]))
        reference = transformers.AutoModelForCausalLM.from_pretrained(name).float().eval()
        theirs = reference(tokens).logits
        ours = gpt(tokens, positions, mask)[..., :V]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main(out: Path) -> None:
    import theirs as peers
    from megatron.core import __version__, dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29634",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    torch.distributed.init_process_group("gloo")
    # It asks for the GPU where it waits for copies and where it tells of failures; here there is none.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    parallel_state.initialize_model_parallel(1, 1)
    # A name that it imports from Transformer Engine, and asks for where there is none.
    moe_utils.te_general_gemm = None
    # Random numbers of a GPU, which nothing draws without dropout.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    arrays: dict[str, np.ndarray] = {}
    differences: dict[str, float] = {}
    for model in CONFIGS:
        weights = {name: value(name, shape) for name, shape in shapes_of(model).items()}
        gpt = gpt_model(model)
        for name, p in gpt.named_parameters():
            p.data.copy_(torch.tensor(megatron_value(name, weights)))
        differences[model] = difference(gpt, model, weights)
        state = {
            "model": gpt.sharded_state_dict(),
            "iteration": 5,
            "checkpoint_version": 3.0,
        }
        with tempfile.TemporaryDirectory() as name:
            dist_checkpointing.save(state, name)
            for file in sorted(Path(name).iterdir()):
                arrays[f"{model}/{file.name}"] = np.frombuffer(file.read_bytes(), np.uint8)
    print(differences)
    assert max(differences.values()) < 1e-5, differences
    tensors = {
        model: {name: list(shape) for name, shape in shapes_of(model).items()} for model in CONFIGS
    }
    about = {"configs": CONFIGS, "tensors": tensors}
    versions = {**peers.versions(), "megatron-core": __version__}
    write(out, "megatron-checkpoint", [HERE], versions, about, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes checkpoints as MaxText saves a small Llama, Llama 3.1 and Mixtral, with Orbax.

The parameters are those of Hugging Face's model, drawn by name. They are put into MaxText's tree in the order of its own
conversion (`llama_or_mistral_ckpt.py`): weights have inputs before outputs, the layers are the second dimension, queries are
divided by the square root of the head size, and Llama 3.1 has the two numbers of each rotary pair beside each other.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import theirs as peers
from drawn import draw, write

HERE = Path(__file__).resolve()
D, N, K, H, F, V, L, E = 16, 4, 2, 4, 24, 30, 2, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K, "vocab_size": V, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "dtype": "float32",
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS = {
    "llama": CONFIG,
    "llama31": {**CONFIG, "rope_scaling": SCALING},
    "mixtral": {
        **CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": E,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def theirs(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns Hugging Face's parameters by name."""
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
        if "num_local_experts" not in config:
            shapes |= {
                f"{start}.mlp.gate_proj.weight": (F, D),
                f"{start}.mlp.up_proj.weight": (F, D),
                f"{start}.mlp.down_proj.weight": (D, F),
            }
            continue
        shapes[f"{start}.block_sparse_moe.gate.weight"] = (E, D)
        for expert in range(E):
            name = f"{start}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{name}.w1.weight": (F, D), f"{name}.w2.weight": (D, F)}
            shapes |= {f"{name}.w3.weight": (F, D)}
    return {name: draw(name, shape) for name, shape in shapes.items()}


def beside_each_other(kernel: np.ndarray) -> np.ndarray:
    """Returns heads with number i of the first half at 2i, and that of the second half at 2i + 1."""
    first, second = np.split(kernel, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(kernel.shape)


def layer_of(config: dict[str, Any], weights: dict[str, np.ndarray], layer: int) -> dict[str, Any]:
    """Returns a layer's arrays in MaxText's tree."""

    def weight(name: str) -> np.ndarray:
        return weights[f"model.layers.{layer}.{name}.weight"]

    query = weight("self_attn.q_proj").T.reshape(D, N, H)
    key = weight("self_attn.k_proj").T.reshape(D, K, H)
    if "rope_scaling" in config:
        query, key = beside_each_other(query), beside_each_other(key)
    tree: dict[str, Any] = {
        "pre_self_attention_layer_norm": {"scale": weight("input_layernorm")},
        "post_self_attention_layer_norm": {"scale": weight("post_attention_layernorm")},
        "self_attention": {
            "query": {"kernel": query / np.float32(np.sqrt(H))},
            "key": {"kernel": key},
            "value": {"kernel": weight("self_attn.v_proj").T.reshape(D, K, H)},
            "out": {"kernel": weight("self_attn.o_proj").T.reshape(N, H, D)},
        },
    }
    if "num_local_experts" not in config:
        names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        tree["mlp"] = {own: {"kernel": weight(f"mlp.{name}").T} for own, name in names.items()}
        return tree
    names = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
    experts = {
        own: np.stack([weight(f"block_sparse_moe.experts.{e}.{name}").T for e in range(E)])
        for own, name in names.items()
    }
    tree["MoeBlock_0"] = {"gate": {"kernel": weight("block_sparse_moe.gate").T}, **experts}
    return tree


def tree_of(config: dict[str, Any], weights: dict[str, np.ndarray], scanned: bool) -> Any:
    """Returns MaxText's train state."""
    layers = [layer_of(config, weights, layer) for layer in range(L)]
    decoder: dict[str, Any] = {
        "decoder_norm": {"scale": weights["model.norm.weight"]},
        "logits_dense": {"kernel": weights["lm_head.weight"].T},
    }
    if scanned:
        decoder["layers"] = jax.tree.map(lambda *arrays: np.stack(arrays, axis=1), *layers)
    else:
        decoder |= {f"layers_{number}": layer for number, layer in enumerate(layers)}
    params = {
        "params": {
            "decoder": decoder,
            "token_embedder": {"embedding": weights["model.embed_tokens.weight"]},
        }
    }
    moments = {"mu": {"scale": np.zeros(D, np.float32)}, "count": np.int32(7)}
    return {"params": params, "opt_state": moments, "step": np.int32(7)}


def save(tree: Any, folder: Path, dtype: str, **how: bool) -> Path:
    """Saves a train state as MaxText's checkpoint manager does; returns the folder of its arrays."""

    def array(x: Any) -> Any:
        x = jax.numpy.asarray(x)
        return x.astype(dtype) if x.dtype == jax.numpy.float32 else x

    handler = ocp.PyTreeCheckpointHandler(**how)
    manager = ocp.CheckpointManager(folder, item_names=("items",), item_handlers={"items": handler})
    items = ocp.args.PyTreeSave(item=jax.tree.map(array, tree))
    manager.save(7, args=ocp.args.Composite(items=items))
    manager.wait_until_finished()
    manager.close()
    return folder / "7" / "items"


ROWS = {
    "llama": ("llama", "float32", True, {"use_ocdbt": True, "use_zarr3": False}),
    "llama-bfloat16": ("llama", "bfloat16", True, {"use_ocdbt": True, "use_zarr3": True}),
    "llama-unscanned": ("llama", "float32", False, {"use_ocdbt": True, "use_zarr3": False}),
    "llama31": ("llama31", "float32", True, {"use_ocdbt": False}),
    "mixtral": ("mixtral", "float32", True, {"use_ocdbt": True, "use_zarr3": True}),
}


def main(out: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for row, (model, dtype, scanned, how) in ROWS.items():
        config = CONFIGS[model]
        with tempfile.TemporaryDirectory() as name:
            tree = tree_of(config, theirs(config), scanned)
            items = save(tree, Path(name), dtype, **how)
            for file in sorted(items.rglob("*")):
                if file.is_file():
                    key = f"{row}/{file.relative_to(items).as_posix()}"
                    arrays[key] = np.frombuffer(file.read_bytes(), np.uint8)
    tensors = {
        model: {name: list(values.shape) for name, values in theirs(config).items()}
        for model, config in CONFIGS.items()
    }
    rows = {row: [model, dtype] for row, (model, dtype, _, _) in ROWS.items()}
    about = {"configs": CONFIGS, "tensors": tensors, "rows": rows}
    versions = {"orbax-checkpoint": ocp.__version__, "jax": jax.__version__}
    write(out, "maxtext-checkpoint", [HERE], {**peers.versions(), **versions}, about, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes a checkpoint of `torch.distributed.checkpoint` as torchtitan saves a small Llama, from two processes.

The parameters are those of Hugging Face's Llama, drawn by name, in torchtitan's names and order of rotary pairs. The files
of the checkpoint are arrays of bytes in the golden file.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from drawn import draw, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

HERE = Path(__file__).resolve()
PROCESSES = 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = {
    "attention.wq": ("self_attn.q_proj", (16, 16)),
    "attention.wk": ("self_attn.k_proj", (8, 16)),
    "attention.wv": ("self_attn.v_proj", (8, 16)),
    "attention.wo": ("self_attn.o_proj", (16, 16)),
    "feed_forward.w1": ("mlp.gate_proj", (24, 16)),
    "feed_forward.w2": ("mlp.down_proj", (16, 24)),
    "feed_forward.w3": ("mlp.up_proj", (24, 16)),
    "attention_norm": ("input_layernorm", (16,)),
    "ffn_norm": ("post_attention_layernorm", (16,)),
}  # fmt: skip
HEADS = {"attention.wq": 4, "attention.wk": 2}


def parameters() -> dict[str, tuple[str, np.ndarray]]:
    """Returns torchtitan's parameters by name: Hugging Face's name, and the values of that."""
    found = {
        "tok_embeddings.weight": ("model.embed_tokens.weight", (30, 16)),
        "norm.weight": ("model.norm.weight", (16,)),
        "output.weight": ("lm_head.weight", (30, 16)),
    }
    for layer in range(2):
        for name, (theirs_, shape) in LAYER.items():
            found[f"layers.{layer}.{name}.weight"] = (
                f"model.layers.{layer}.{theirs_}.weight",
                shape,
            )
    return {name: (other, draw(other, shape)) for name, (other, shape) in found.items()}


def in_titans_order(name: str, values: torch.Tensor) -> torch.Tensor:
    """Returns a weight with the two numbers of each rotary pair beside each other."""
    heads = next((count for part, count in HEADS.items() if part in name), None)
    if heads is None:
        return values
    rows, width = values.shape
    return values.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def save(rank: int, folder: str, dtype: str) -> None:
    """Saves the model from one of the processes, each with its part of every tensor."""
    os.chdir(folder)  # so that the checkpoint's name in it is always the same, as is its number
    torch.distributed.checkpoint.filesystem._generate_uuid = lambda: "0"
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29633",
        "RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
    }
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    state: dict[str, Any] = {}
    for name, (_, values) in parameters().items():
        whole = in_titans_order(name, torch.tensor(values)).to(getattr(torch, dtype))
        placement = Shard(1) if name.endswith("wo.weight") else Shard(0)
        if name == "norm.weight":
            placement = Replicate()
        state[name] = distribute_tensor(whole, mesh, [placement])
    moments = {
        f"state.{name}.exp_avg": torch.zeros_like(value)
        for name, value in state.items()
        if "norm" in name
    }
    other = {
        "optimizer": moments,
        "train_state": {"step": torch.tensor(7, dtype=torch.int32)},
        "lr_scheduler": {"x": 1},
    }
    dcp.save({**state, **other}, checkpoint_id="checkpoint")
    torch.distributed.destroy_process_group()


def main(out: Path) -> None:
    import theirs  # the other processes, which begin with this module, need no `transformers`

    arrays: dict[str, np.ndarray] = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as name:
            torch.multiprocessing.spawn(save, (name, dtype), nprocs=PROCESSES)
            for file in sorted(Path(name, "checkpoint").iterdir()):
                arrays[f"{dtype}/{file.name}"] = np.frombuffer(file.read_bytes(), np.uint8)
    tensors = {other: list(values.shape) for other, values in parameters().values()}
    about = {"config": CONFIG, "tensors": tensors}
    write(out, "distributed-checkpoint", [HERE], theirs.versions(), about, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

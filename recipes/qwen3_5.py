"""Qwen3.5 by name, the text models; dimensions from their published configurations (Qwen/Qwen3.5-9B and others).

Those of 9B and 35B-A3B are the defaults of `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig` in `transformers`, with the
base of the rotary frequencies that the published config.json has. Qwen3.6 has the same sizes. The text is yours:
`--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.qwen3_5 import Qwen35, Qwen35Moe
from meshwright.models.model import Model
from meshwright.runs.run import Run

_LINEAR = {
    "linear_heads": 16,
    "linear_key_size": 128,
    "linear_value_size": 128,
    "head_size": 256,
    "rope_theta": 1e7,
}


def _run(name: str, model: Model) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=1024, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def qwen35_9b() -> Run:
    """Qwen3.5 9B: 9.0 B parameters, linear attention in 24 of 32 layers."""
    model = Qwen35(248320, 4096, 32, 16, kv_heads=4, mlp=12288, linear_value_heads=32, **_LINEAR)
    return _run("qwen35-9b", model)


def qwen35_27b() -> Run:
    """Qwen3.5 27B: 26.9 B parameters, linear attention in 48 of 64 layers."""
    model = Qwen35(248320, 5120, 64, 24, kv_heads=4, mlp=17408, linear_value_heads=48, **_LINEAR)
    return _run("qwen35-27b", model)


def qwen35_35b_a3b() -> Run:
    """Qwen3.5 35B-A3B: 34.7 B parameters, of which a token uses 3.5 B; 256 experts, linear attention in 30 of 40."""
    model = Qwen35Moe(
        248320, 2048, 40, 16, kv_heads=2, experts=256, experts_per_token=8, expert_mlp=512, shared_mlp=512,
        linear_value_heads=32, expert_buffer_factor=1.5, **_LINEAR,
    )  # fmt: skip
    return _run("qwen35-35b-a3b", model)

"""Qwen3-Next by name; dimensions from its published configuration (Qwen/Qwen3-Next-80B-A3B-Instruct).

They are the defaults of `Qwen3NextConfig` in `transformers`, with the base of the rotary frequencies that the published
config.json has. The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.qwen3_next import Qwen3Next
from meshwright.runs.run import Run


def qwen3_next_80b_a3b() -> Run:
    """Qwen3-Next 80B-A3B: 79.7 B parameters, of which a token uses 3.9 B; 512 experts, linear attention in 36 of 48."""
    model = Qwen3Next(
        151936, 2048, 48, 16, kv_heads=2, head_size=256, rope_theta=1e7, experts=512, experts_per_token=10,
        expert_mlp=512, shared_mlp=512, linear_heads=16, linear_value_heads=32, linear_key_size=128,
        linear_value_size=128, expert_buffer_factor=1.5,
    )  # fmt: skip
    return Run(
        name="qwen3-next-80b-a3b",
        model=model,
        training=Training(
            steps=100_000, batch=1024, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )

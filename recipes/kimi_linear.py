"""Kimi Linear by name; dimensions from its published configuration (moonshotai/Kimi-Linear-48B-A3B-Instruct).

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.kimi_linear import KimiLinear
from meshwright.runs.run import Run


def kimi_linear_48b_a3b() -> Run:
    """Kimi Linear 48B-A3B: 49.1 B parameters, of which a token uses 3 B; linear attention in 20 of 27 layers."""
    model = KimiLinear(
        163840, 2304, 27, 32, mlp=9216, dense_layers=1, experts=256, experts_per_token=8, expert_mlp=1024,
        shared_experts=1, routed_scaling=2.446, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, linear_heads=32, linear_head_size=128, aux_loss_weight=0.0001, bias_update_rate=0.001,
        expert_buffer_factor=1.5,
    )  # fmt: skip
    return Run(
        name="kimi-linear-48b-a3b",
        model=model,
        training=Training(
            steps=100_000, batch=1024, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )

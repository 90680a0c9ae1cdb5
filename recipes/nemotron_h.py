"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 by name; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from typing import Any

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.nemotron_h import NemotronH
from meshwright.runs.run import Run


def _nemotron(name: str, pattern: str, width: int, heads: int, **fields: Any) -> Run:
    space = {"mamba_heads": 128, "mamba_head_size": 64, "mamba_groups": 8, "mamba_state": 128}
    model = NemotronH(
        131072, width, len(pattern), heads, head_size=128, pattern=pattern, mamba_step_floor=0.001,
        **{"kv_heads": 8, **space, **fields},
    )  # fmt: skip
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=512, seq=8192, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def nemotron_h_8b() -> Run:
    """Nemotron-H 8B: 8.1 B parameters, dense."""
    return _nemotron("nemotron-h-8b", "M-M-M-M*-M-" * 4 + "M-" * 4, 4096, 32, mlp=21504)


def nemotron_nano2_9b() -> Run:
    """Nemotron Nano 2 9B: 8.9 B parameters, dense."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return _nemotron("nemotron-nano2-9b", pattern, 4480, 40, mlp=15680, mamba_head_size=80)


def nemotron3_nano_30b_a3b() -> Run:
    """Nemotron 3 Nano 30B-A3B: 31.6 B parameters, of which a token uses 3.6 B."""
    return _nemotron(
        "nemotron3-nano-30b-a3b", "MEMEM*E" * 5 + "MEMEMEM*E" + "ME" * 4, 2688, 32,
        kv_heads=2, mamba_heads=64, experts=128, experts_per_token=6, expert_mlp=1856, shared_mlp=3712,
        routed_scaling=2.5, aux_loss_weight=0.0001, bias_update_rate=0.001,
    )  # fmt: skip


def nemotron3_super_120b_a12b() -> Run:
    """Nemotron 3 Super 120B-A12B: 121 B parameters, of which a token uses 12.8 B; experts read a latent."""
    return _nemotron(
        "nemotron3-super-120b-a12b",
        "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME", 4096, 32,
        kv_heads=2, experts=512, experts_per_token=22, expert_mlp=2688, shared_mlp=5376, expert_latent=1024,
        routed_scaling=5.0, aux_loss_weight=0.0001, bias_update_rate=0.001,
    )  # fmt: skip

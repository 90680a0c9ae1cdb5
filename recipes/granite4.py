"""Granite 4.0 by name, the models with a state space; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

import dataclasses
from typing import Any

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.granite_hybrid import GraniteHybrid
from meshwright.runs.run import Run


def _granite(
    name: str, width: int, heads: int, kv_heads: int, pattern: str = "MMMMM*MMMM" * 4, **fields: Any
) -> Run:
    model = GraniteHybrid(
        100352, width, len(pattern), heads, kv_heads=kv_heads, pattern=pattern,
        mamba_state=128, embedding="tied",
        **{"mamba_heads": 2 * width // 64, "mamba_head_size": 64, **fields},
    )  # fmt: skip
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=512, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def granite4_h_350m() -> Run:
    """Granite 4.0 H-350M: 340 M parameters, dense; attention in four layers without a period."""
    run = _granite(
        "granite4-h-350m", 768, 12, 4, "M" * 10 + "*MM*MMM*" + "M" * 9 + "*MMMM", mlp=2048,
        mamba_heads=48, mamba_head_size=32, residual_multiplier=0.246, logits_scaling=3.0,
    )  # fmt: skip
    # Taps of a layer's convolution, 48 x 32 x 4, stay whole: nothing of them divides by 64 devices.
    return dataclasses.replace(run, fsdp_min_size=2**13)


def granite4_h_micro() -> Run:
    """Granite 4.0 H-Micro: 3.19 B parameters, dense."""
    return _granite("granite4-h-micro", 2048, 32, 8, mlp=8192, logits_scaling=8.0)


def granite4_h_tiny() -> Run:
    """Granite 4.0 H-Tiny: 6.94 B parameters, of which a token uses 1 B."""
    return _granite(
        "granite4-h-tiny", 1536, 12, 4, mlp=1024, experts=64, experts_per_token=6, expert_mlp=512,
        attention_multiplier=0.0078125, logits_scaling=6.0,
    )  # fmt: skip


def granite4_h_small() -> Run:
    """Granite 4.0 H-Small: 32.2 B parameters, of which a token uses 9 B."""
    return _granite(
        "granite4-h-small", 4096, 32, 8, mlp=1536, experts=72, experts_per_token=10, expert_mlp=768,
        attention_multiplier=0.0078125, logits_scaling=16.0,
    )  # fmt: skip

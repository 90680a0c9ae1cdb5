"""Llama 4 by name, the text models; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.blocks.rotary import RopeScaling
from meshwright.models.families.llama4 import Llama4
from meshwright.runs.run import Run

_ROOM = 1.5
"""Room for rows of experts on other devices, of an even share: the most that can arrive is up to `expert` times it."""
_SCALING = RopeScaling(
    factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
)


def _run(name: str, model: Llama4) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=1024, seq=8192, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def llama4_scout() -> Run:
    """Llama 4 Scout: 107.8 B parameters, of which a token uses 17 B; all layers have 16 experts."""
    model = Llama4(
        202048, 5120, 48, 40, kv_heads=8, head_size=128, mlp=16384, rope_scaling=_SCALING, experts=16, expert_mlp=8192,
        expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run("llama4-scout", model)


def llama4_maverick() -> Run:
    """Llama 4 Maverick: 400.7 B parameters, of which a token uses 17 B; every second layer has 128 experts."""
    model = Llama4(
        202048, 5120, 48, 40, kv_heads=8, head_size=128, mlp=16384, qk_l2_norm="none", expert_interval=2, experts=128,
        expert_mlp=8192, expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run("llama4-maverick", model)

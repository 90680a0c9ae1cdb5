"""GLM-4.5 by name (arXiv:2508.06471); dimensions from the published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.glm4_moe import Glm4Moe
from meshwright.runs.run import Run

_ROOM = 1.5
"""Room for rows of experts on other devices, of an even share: the most that can arrive is up to `expert` times it."""


def _run(name: str, model: Glm4Moe) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=4096, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=2.5e-4, warmup_steps=2000, weight_decay=0.1, beta2=0.95),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def glm45_air() -> Run:
    """GLM-4.5-Air: 106.9 B parameters, of which a token uses 13.4 B; the first of 46 layers is dense."""
    model = Glm4Moe(
        151552,
        4096,
        46,
        96,
        kv_heads=8,
        head_size=128,
        mlp=10944,
        dense_layers=1,
        rope_theta=1e6,
        qkv_bias="learned",
        experts=128,
        experts_per_token=8,
        expert_mlp=1408,
        bias_update_rate=0.001,
        aux_loss_weight=0.0001,
        expert_buffer_factor=_ROOM,
    )
    return _run("glm45-air", model)


def glm45() -> Run:
    """GLM-4.5: 352.8 B parameters, of which a token uses 33.6 B; the first three of 92 layers are dense."""
    model = Glm4Moe(
        151552,
        5120,
        92,
        96,
        kv_heads=8,
        head_size=128,
        mlp=12288,
        dense_layers=3,
        rope_theta=1e6,
        qkv_bias="learned",
        qk_norm="rms",
        experts=160,
        experts_per_token=8,
        expert_mlp=1536,
        routed_scaling=2.5,
        bias_update_rate=0.001,
        aux_loss_weight=0.0001,
        expert_buffer_factor=_ROOM,
    )
    return _run("glm45", model)

"""GPT-OSS by name (arXiv:2508.10925); dimensions from its published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.blocks.rotary import Yarn
from meshwright.models.families.gpt_oss import GptOss
from meshwright.runs.run import Run

_ROOM = 1.5
"""Room for rows of experts on other devices, of an even share: the most that can arrive is up to `expert` times it."""


def _gpt_oss(name: str, layers: int, experts: int) -> Run:
    model = GptOss(
        201088, 2880, layers, 64, 8, 64, experts=experts, experts_per_token=4, expert_mlp=2880,
        rope_scaling=Yarn(factor=32.0, original_max_position_embeddings=4096, bounds="exact"),
        expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=1024, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def gpt_oss_20b() -> Run:
    """GPT-OSS 20B: 20.9 B parameters, of which a token uses 3.6 B (arXiv:2508.10925, table 1)."""
    return _gpt_oss("gpt-oss-20b", 24, 32)


def gpt_oss_120b() -> Run:
    """GPT-OSS 120B: 116.8 B parameters, of which a token uses 5.1 B (arXiv:2508.10925, table 1)."""
    return _gpt_oss("gpt-oss-120b", 36, 128)

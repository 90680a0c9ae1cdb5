"""Command R+, Command R7B and Command A (arXiv:2504.00698) by name; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.cohere import Cohere, Cohere2
from meshwright.runs.run import Run


def _command(name: str, model: Cohere | Cohere2) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=512, seq=8192, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def command_r_plus() -> Run:
    """Command R+: 104 B parameters."""
    model = Cohere(
        256000, 12288, 64, 96, kv_heads=8, mlp=33792, rope_theta=75e6, logit_scale=0.8333333333333334,
        qk_norm="layer_heads",
    )  # fmt: skip
    return _command("command-r-plus", model)


def command_r7b() -> Run:
    """Command R7B: 8.03 B parameters."""
    model = Cohere2(
        256000, 4096, 32, 32, kv_heads=8, mlp=14336, rope_theta=50000.0, logit_scale=0.25
    )
    return _command("command-r7b", model)


def command_a() -> Run:
    """Command A: 111 B parameters (arXiv:2504.00698)."""
    model = Cohere2(
        256000, 12288, 64, 96, kv_heads=8, mlp=36864, rope_theta=50000.0, logit_scale=0.25
    )
    return _command("command-a", model)

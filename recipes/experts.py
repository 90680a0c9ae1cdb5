"""Mixtures of experts by name; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`. `tiny-moe` needs none.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.mixtral import Mixtral
from meshwright.runs.run import Run


def tiny_moe() -> Run:
    """A small mixture: 1.9 M parameters, of which a token uses 1.05 M; 8 experts, 2 active, 1 shared, one dense layer."""
    return Run(
        name="tiny-moe",
        model=Mixtral(
            width=128, layers=4, heads=4, kv_heads=2, mlp=352, vocab_multiple=16, experts=8, experts_per_token=2,
            expert_mlp=128, shared_experts=1, dense_layers=1,
        ),
        training=Training(
            steps=250,
            batch=16,
            seq=128,
            compute_dtype="float32",
            remat="none",
            eval_every=125,
            eval_samples=128,
            save_every=125,
        ),
        optimizer=Optimizer(learning_rate=4e-3, warmup_steps=20, weight_decay=0.1, beta2=0.98),
        data=Data(paths=("stdlib",), tokenizer="bpe:1024", prompt="def "),
    )  # fmt: skip


def _run(name: str, model: Mixtral, *, seq: int, batch: int, learning_rate: float) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=batch, seq=seq, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=learning_rate, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


_ROOM = 1.5
"""Room for rows of experts on other devices, of an even share: the most that can arrive is up to `expert` times it."""


def _mixtral(vocab: int, width: int, layers: int, heads: int, expert_mlp: int) -> Mixtral:
    return Mixtral(
        vocab, width, layers, heads, kv_heads=8, rope_theta=1e6, experts=8, experts_per_token=2, expert_mlp=expert_mlp,
        expert_buffer_factor=_ROOM,
    )  # fmt: skip


def mixtral_8x7b() -> Run:
    """Mixtral 8x7B: 46.7 B parameters, of which a token uses 12.9 B (arXiv:2401.04088, table 1)."""
    model = _mixtral(32000, 4096, 32, 32, 14336)
    return _run("mixtral-8x7b", model, seq=8192, batch=512, learning_rate=3e-4)


def mixtral_8x22b() -> Run:
    """Mixtral 8x22B: 141 B parameters, of which a token uses 39 B (its published configuration)."""
    model = _mixtral(32768, 6144, 56, 48, 16384)
    return _run("mixtral-8x22b", model, seq=8192, batch=512, learning_rate=2e-4)


def _qwen3_moe(
    name: str, width: int, layers: int, heads: int, kv_heads: int, expert_mlp: int
) -> Run:
    model = Mixtral(
        151936, width, layers, heads, kv_heads=kv_heads, head_size=128, rope_theta=1e6, norm_epsilon=1e-6,
        qk_norm="rms", experts=128, experts_per_token=8, expert_mlp=expert_mlp, aux_loss_weight=0.001,
        expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run(name, model, seq=4096, batch=1024, learning_rate=3e-4)


def qwen3_30b_a3b() -> Run:
    """Qwen3-30B-A3B: 30.5 B parameters, of which a token uses 3.3 B (arXiv:2505.09388, table 2)."""
    return _qwen3_moe("qwen3-30b-a3b", 2048, 48, 32, 4, 768)


def qwen3_235b_a22b() -> Run:
    """Qwen3-235B-A22B: 235 B parameters, of which a token uses 22 B (arXiv:2505.09388, table 2)."""
    return _qwen3_moe("qwen3-235b-a22b", 4096, 94, 64, 4, 1536)

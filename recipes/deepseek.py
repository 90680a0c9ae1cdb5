"""DeepSeek-V3, DeepSeek-V2-Lite and Kimi K2; dimensions from their published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`. Sequences are those of pre-training, without
the YaRN scaling (`model.yarn`) with which the released models were extended.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.deepseek import Deepseek
from meshwright.runs.run import Run

_ROOM = 1.5
"""Room for rows of experts on other devices, of an even share: the most that can arrive is up to `expert` times it."""


def _run(name: str, model: Deepseek, *, batch: int, learning_rate: float) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=batch, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(
            learning_rate=learning_rate, warmup_steps=2000, weight_decay=0.1, beta2=0.95
        ),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def deepseek_v3() -> Run:
    """DeepSeek-V3: 671 B parameters, of which a token uses 37 B (arXiv:2412.19437, section 4.2)."""
    model = Deepseek(
        129280, 7168, 61, 128, mlp=18432, dense_layers=3, experts=256, experts_per_token=8, expert_mlp=2048,
        shared_experts=1, router_score="sigmoid", routed_scaling=2.5, expert_groups=8, topk_groups=4,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        aux_loss_weight=0.0001, router_z_loss_weight=0.0, bias_update_rate=0.001, expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run("deepseek-v3", model, batch=15360, learning_rate=2.2e-4)


def kimi_k2() -> Run:
    """Kimi K2: 1.03 T parameters, of which a token uses 32 B (arXiv:2507.20534, table 2), with AdamW, not MuonClip."""
    model = Deepseek(
        163840, 7168, 61, 64, mlp=18432, dense_layers=1, experts=384, experts_per_token=8, expert_mlp=2048,
        shared_experts=1, router_score="sigmoid", routed_scaling=2.827, rope_theta=50000.0,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        aux_loss_weight=0.0001, router_z_loss_weight=0.0, bias_update_rate=0.001, expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run("kimi-k2", model, batch=16384, learning_rate=2e-4)


def deepseek_v2_lite() -> Run:
    """DeepSeek-V2-Lite: 15.7 B parameters, of which a token uses 2.7 B (arXiv:2405.04434, appendix B)."""
    model = Deepseek(
        102400, 2048, 27, 16, mlp=10944, dense_layers=1, experts=64, experts_per_token=6, expert_mlp=1408,
        shared_experts=2, normalize_top_k=False,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        aux_loss_weight=0.001, router_z_loss_weight=0.0, expert_buffer_factor=_ROOM,
    )  # fmt: skip
    return _run("deepseek-v2-lite", model, batch=4608, learning_rate=4.2e-4)

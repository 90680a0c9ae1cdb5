"""Llama 1 to 3.3, Mistral, Ministral 3, Granite, Qwen2, Qwen2.5, Qwen3, OLMo 2 and OLMo 3 by name; dimensions from their
published configurations.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.blocks.rotary import RopeScaling, Yarn
from meshwright.models.families.granite import Granite
from meshwright.models.families.llama import Llama
from meshwright.models.families.ministral3 import Ministral3
from meshwright.models.families.olmo3 import Olmo3
from meshwright.models.families.smollm3 import SmolLM3
from meshwright.runs.run import Run

_LLAMA31 = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA32 = RopeScaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def _run(name: str, model: Llama, *, seq: int, batch: int, learning_rate: float) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=batch, seq=seq, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=learning_rate, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def _llama2(name: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> Run:
    model = Llama(32000, width, layers, heads, kv_heads=kv_heads, mlp=mlp)
    return _run(name, model, seq=4096, batch=1024, learning_rate=3e-4 if width < 8192 else 1.5e-4)


def _llama3(
    name: str,
    width: int,
    layers: int,
    heads: int,
    mlp: int,
    scaling: RopeScaling | None,
    learning_rate: float,
) -> Run:
    model = Llama(
        128256, width, layers, heads, kv_heads=8, mlp=mlp, rope_theta=500000.0, rope_scaling=scaling
    )
    return _run(name, model, seq=8192, batch=1024, learning_rate=learning_rate)


def llama1_7b() -> Run:
    """Llama 7B: 6.74 B parameters (Touvron et al. 2023, arXiv:2302.13971, table 2)."""
    model = Llama(32000, 4096, 32, 32, kv_heads=32, mlp=11008, norm_epsilon=1e-6)
    return _run("llama1-7b", model, seq=2048, batch=2048, learning_rate=3e-4)


def llama1_65b() -> Run:
    """Llama 65B: 65.3 B parameters (arXiv:2302.13971, table 2)."""
    model = Llama(32000, 8192, 80, 64, kv_heads=64, mlp=22016, norm_epsilon=1e-5)
    return _run("llama1-65b", model, seq=2048, batch=2048, learning_rate=1.5e-4)


def llama2_7b() -> Run:
    """Llama 2 7B: 6.74 B parameters (arXiv:2307.09288)."""
    return _llama2("llama2-7b", 4096, 32, 32, 32, 11008)


def llama2_13b() -> Run:
    """Llama 2 13B: 13 B parameters (arXiv:2307.09288)."""
    return _llama2("llama2-13b", 5120, 40, 40, 40, 13824)


def llama2_70b() -> Run:
    """Llama 2 70B: 69 B parameters (arXiv:2307.09288)."""
    return _llama2("llama2-70b", 8192, 80, 64, 8, 28672)


def llama3_8b() -> Run:
    """Llama 3 8B: 8.03 B parameters (arXiv:2407.21783, table 3)."""
    return _llama3("llama3-8b", 4096, 32, 32, 14336, None, 3e-4)


def llama3_70b() -> Run:
    """Llama 3 70B: 70.6 B parameters (arXiv:2407.21783, table 3)."""
    return _llama3("llama3-70b", 8192, 80, 64, 28672, None, 1.5e-4)


def llama3_405b() -> Run:
    """Llama 3.1 405B: 406 B parameters (arXiv:2407.21783, table 3)."""
    return _llama3("llama3-405b", 16384, 126, 128, 53248, _LLAMA31, 8e-5)


def llama31_8b() -> Run:
    """Llama 3.1 8B: 8.03 B parameters, longer context by scaled rotary frequencies."""
    return _llama3("llama31-8b", 4096, 32, 32, 14336, _LLAMA31, 3e-4)


def llama31_70b() -> Run:
    """Llama 3.1 (and 3.3) 70B: 70.6 B parameters."""
    return _llama3("llama31-70b", 8192, 80, 64, 28672, _LLAMA31, 1.5e-4)


def llama32_1b() -> Run:
    """Llama 3.2 1B: 1.24 B parameters, tied embeddings."""
    model = Llama(
        128256,
        2048,
        16,
        32,
        kv_heads=8,
        mlp=8192,
        rope_theta=500000.0,
        rope_scaling=_LLAMA32,
        embedding="tied",
    )
    return _run("llama32-1b", model, seq=8192, batch=512, learning_rate=3e-4)


def llama32_3b() -> Run:
    """Llama 3.2 3B: 3.21 B parameters, tied embeddings."""
    model = Llama(
        128256,
        3072,
        28,
        24,
        kv_heads=8,
        mlp=8192,
        rope_theta=500000.0,
        rope_scaling=_LLAMA32,
        embedding="tied",
    )
    return _run("llama32-3b", model, seq=8192, batch=512, learning_rate=3e-4)


def mistral_7b() -> Run:
    """Mistral 7B v0.1: 7.24 B parameters, sliding window of 4096 (arXiv:2310.06825)."""
    model = Llama(32000, 4096, 32, 32, kv_heads=8, mlp=14336, sliding_window=4096)
    return _run("mistral-7b", model, seq=8192, batch=512, learning_rate=3e-4)


def ministral3_8b() -> Run:
    """Ministral 3 8B: 8.49 B parameters in the text model."""
    model = Ministral3(
        131072, 4096, 34, 32, kv_heads=8, mlp=14336,
        yarn=Yarn(16.0, attention_factor=1.0, original_max_position_embeddings=16384),
    )  # fmt: skip
    return _run("ministral3-8b", model, seq=16384, batch=256, learning_rate=3e-4)


def granite31_8b() -> Run:
    """Granite 3.1 8B: 8.17 B parameters."""
    model = Granite(
        49155, 4096, 40, 32, kv_heads=8, mlp=12800, rope_theta=1e7, embedding="tied", attention_multiplier=0.0078125,
        logits_scaling=16.0,
    )  # fmt: skip
    return _run("granite31-8b", model, seq=4096, batch=1024, learning_rate=3e-4)


def _qwen2(
    name: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int
) -> Run:
    tied = "tied" if width < 3000 else "untied"
    model = Llama(
        vocab, width, layers, heads, kv_heads=kv_heads, mlp=mlp, rope_theta=1e6, norm_epsilon=1e-6, qkv_bias="learned",
        embedding=tied,
    )  # fmt: skip
    return _run(name, model, seq=4096, batch=1024, learning_rate=3e-4)


def qwen2_0_5b() -> Run:
    """Qwen2 0.5B: 494 M parameters (arXiv:2407.10671, table 1)."""
    return _qwen2("qwen2-0-5b", 896, 24, 14, 2, 4864, 151936)


def qwen2_1_5b() -> Run:
    """Qwen2 1.5B: 1.54 B parameters (arXiv:2407.10671, table 1)."""
    return _qwen2("qwen2-1-5b", 1536, 28, 12, 2, 8960, 151936)


def qwen25_3b() -> Run:
    """Qwen2.5 3B: 3.09 B parameters (arXiv:2412.15115, table 1); 0.5B, 1.5B, 7B and 72B have the sizes of Qwen2."""
    return _qwen2("qwen25-3b", 2048, 36, 16, 2, 11008, 151936)


def qwen25_14b() -> Run:
    """Qwen2.5 14B: 14.8 B parameters (arXiv:2412.15115, table 1)."""
    return _qwen2("qwen25-14b", 5120, 48, 40, 8, 13824, 152064)


def qwen25_32b() -> Run:
    """Qwen2.5 32B: 32.8 B parameters (arXiv:2412.15115, table 1)."""
    return _qwen2("qwen25-32b", 5120, 64, 40, 8, 27648, 152064)


def qwen2_7b() -> Run:
    """Qwen2 7B: 7.62 B parameters (arXiv:2407.10671, table 1)."""
    return _qwen2("qwen2-7b", 3584, 28, 28, 4, 18944, 152064)


def qwen2_72b() -> Run:
    """Qwen2 72B: 72.7 B parameters (arXiv:2407.10671, table 1)."""
    return _qwen2("qwen2-72b", 8192, 80, 64, 8, 29568, 152064)


def _qwen3(name: str, width: int, layers: int, heads: int, mlp: int) -> Run:
    tied = "tied" if width < 3000 else "untied"
    model = Llama(
        151936, width, layers, heads, kv_heads=8, head_size=128, mlp=mlp, rope_theta=1e6, norm_epsilon=1e-6,
        qk_norm="rms", embedding=tied,
    )  # fmt: skip
    return _run(name, model, seq=4096, batch=1024, learning_rate=3e-4)


def qwen3_0_6b() -> Run:
    """Qwen3 0.6B: 596 M parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-0-6b", 1024, 28, 16, 3072)


def qwen3_1_7b() -> Run:
    """Qwen3 1.7B: 1.72 B parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-1-7b", 2048, 28, 16, 6144)


def qwen3_4b() -> Run:
    """Qwen3 4B: 4.02 B parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-4b", 2560, 36, 32, 9728)


def qwen3_14b() -> Run:
    """Qwen3 14B: 14.8 B parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-14b", 5120, 40, 40, 17408)


def qwen3_8b() -> Run:
    """Qwen3 8B: 8.19 B parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-8b", 4096, 36, 32, 12288)


def qwen3_32b() -> Run:
    """Qwen3 32B: 32.8 B parameters (arXiv:2505.09388, table 1)."""
    return _qwen3("qwen3-32b", 5120, 64, 64, 25600)


def _olmo2(name: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> Run:
    model = Llama(
        100352, width, layers, heads, kv_heads=kv_heads, mlp=mlp, rope_theta=500000.0, norm_epsilon=1e-6,
        qk_norm="rms_heads", norm_place="after",
    )  # fmt: skip
    return _run(name, model, seq=4096, batch=1024, learning_rate=3e-4)


def olmo2_1b() -> Run:
    """OLMo 2 1B: 1.48 B parameters (arXiv:2501.00656; its published configuration)."""
    return _olmo2("olmo2-1b", 2048, 16, 16, 16, 8192)


def olmo2_7b() -> Run:
    """OLMo 2 7B: 7.3 B parameters (arXiv:2501.00656, table 3)."""
    return _olmo2("olmo2-7b", 4096, 32, 32, 32, 11008)


def olmo2_13b() -> Run:
    """OLMo 2 13B: 13.7 B parameters (arXiv:2501.00656, table 3)."""
    return _olmo2("olmo2-13b", 5120, 40, 40, 40, 13824)


def olmo2_32b() -> Run:
    """OLMo 2 32B: 32.2 B parameters (arXiv:2501.00656, table 3)."""
    return _olmo2("olmo2-32b", 5120, 64, 40, 8, 27648)


def _olmo3(name: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> Run:
    # The published configurations are those after the extension to 64k tokens.
    yarn = Yarn(factor=8.0, original_max_position_embeddings=8192)
    model = Olmo3(100278, width, layers, heads, kv_heads=kv_heads, mlp=mlp, yarn=yarn)
    return _run(name, model, seq=8192, batch=512, learning_rate=3e-4)


def olmo3_7b() -> Run:
    """OLMo 3 7B: 7.3 B parameters (arXiv:2512.13961; its published configuration)."""
    return _olmo3("olmo3-7b", 4096, 32, 32, 32, 11008)


def olmo3_32b() -> Run:
    """OLMo 3 32B: 32.2 B parameters (arXiv:2512.13961; its published configuration)."""
    return _olmo3("olmo3-32b", 5120, 64, 40, 8, 27648)


def phi4() -> Run:
    """Phi-4 14B: 14.7 B parameters (arXiv:2412.08905; its published configuration)."""
    model = Llama(100352, 5120, 40, 40, kv_heads=10, mlp=17920, rope_theta=250000.0)
    return _run("phi4", model, seq=4096, batch=1024, learning_rate=3e-4)


def smollm3_3b() -> Run:
    """SmolLM3 3B: 3.08 B parameters (its published configuration): one layer of four has no rotary embedding."""
    model = SmolLM3(128256, 2048, 36, 16, kv_heads=4, mlp=11008)
    return _run("smollm3-3b", model, seq=4096, batch=576, learning_rate=2e-4)

"""Gemma 2 (arXiv:2408.00118), Gemma 3 (arXiv:2503.19786) and Gemma 4 by name; dimensions from their published
configurations, the text models alone.

The text is yours: `--data PATH --data.tokenizer FOLDER/tokenizer.json`.
"""

from meshwright.config import Data, Optimizer, Training
from meshwright.models.families.gemma import Gemma, Gemma2, Gemma3
from meshwright.models.families.gemma4 import Gemma4
from meshwright.runs.run import Run


def _gemma(name: str, model: Gemma | Gemma4, batch: int = 512) -> Run:
    return Run(
        name=name,
        model=model,
        training=Training(
            steps=100_000, batch=batch, seq=4096, eval_every=1000, save_every=1000, logits_mib=1024
        ),
        optimizer=Optimizer(learning_rate=3e-4, warmup_steps=2000, weight_decay=0.1),
        data=Data(paths=("data/*.parquet",), tokenizer="tokenizer.json"),
    )


def gemma2_2b() -> Run:
    """Gemma 2 2B: 2.61 B parameters (arXiv:2408.00118, table 1)."""
    return _gemma("gemma2-2b", Gemma2(256000, 2304, 26, 8, 4, 256, mlp=9216, query_scale=256))


def gemma2_9b() -> Run:
    """Gemma 2 9B: 9.24 B parameters (arXiv:2408.00118, table 1)."""
    return _gemma("gemma2-9b", Gemma2(256000, 3584, 42, 16, 8, 256, mlp=14336, query_scale=256))


def gemma2_27b() -> Run:
    """Gemma 2 27B: 27.2 B parameters (arXiv:2408.00118, table 1)."""
    return _gemma("gemma2-27b", Gemma2(256000, 4608, 46, 32, 16, 128, mlp=36864, query_scale=144))


def gemma3_270m() -> Run:
    """Gemma 3 270M: 268 M parameters, of which 168 M are the embedding."""
    return _gemma("gemma3-270m", Gemma3(262144, 640, 18, 4, 1, 256, mlp=2048, query_scale=256))


def gemma3_1b() -> Run:
    """Gemma 3 1B: 1.00 B parameters (arXiv:2503.19786, table 1)."""
    return _gemma("gemma3-1b", Gemma3(262144, 1152, 26, 4, 1, 256, mlp=6912, query_scale=256))


def gemma3_4b() -> Run:
    """Gemma 3 4B: 3.88 B parameters in the text model (arXiv:2503.19786, table 1)."""
    model = Gemma3(
        262208,
        2560,
        34,
        8,
        4,
        256,
        mlp=10240,
        sliding_window=1024,
        rope_factor=8.0,
        query_scale=256,
    )
    return _gemma("gemma3-4b", model)


def gemma3_12b() -> Run:
    """Gemma 3 12B: 11.8 B parameters in the text model (arXiv:2503.19786, table 1)."""
    model = Gemma3(
        262208,
        3840,
        48,
        16,
        8,
        256,
        mlp=15360,
        sliding_window=1024,
        rope_factor=8.0,
        query_scale=256,
    )
    return _gemma("gemma3-12b", model)


def gemma3_27b() -> Run:
    """Gemma 3 27B: 27 B parameters in the text model (arXiv:2503.19786, table 1)."""
    model = Gemma3(
        262208,
        5376,
        62,
        32,
        16,
        128,
        mlp=21504,
        sliding_window=1024,
        rope_factor=8.0,
        query_scale=168,
    )
    return _gemma("gemma3-27b", model)


def gemma4_12b() -> Run:
    """Gemma 4 12B: 11.9 B parameters in the text model."""
    model = Gemma4(262144, 3840, 48, 16, 8, 256, mlp=15360, global_kv_heads=1)
    return _gemma("gemma4-12b", model)


def gemma4_26b_a4b() -> Run:
    """Gemma 4 26B-A4B: 25.2 B parameters in the text model, of which a token uses 3.8 B."""
    model = Gemma4(
        262144,
        2816,
        30,
        16,
        8,
        256,
        mlp=2112,
        global_kv_heads=2,
        experts=128,
        experts_per_token=8,
        expert_mlp=704,
        expert_buffer_factor=1.5,
    )
    return _gemma("gemma4-26b-a4b", model)


def gemma4_31b() -> Run:
    """Gemma 4 31B: 30.7 B parameters in the text model."""
    model = Gemma4(262144, 5376, 60, 32, 16, 256, mlp=21504, global_kv_heads=4)
    return _gemma("gemma4-31b", model)

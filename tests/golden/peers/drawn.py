"""What the peers' scripts and the tests share: random values by name, and what is kept of large arrays. NumPy only."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILES = Path(__file__).parents[1] / "files"
"""The committed golden files: NAME.json with what was made by what, NAME.npz with its arrays."""

NOT_SCRIPTS = ("drawn.py", "language_models.py", "theirs.py", "write_inputs.py")
"""Files of this folder that write no golden file."""

BATCH, SEQ, VOCAB = 4, 16, 50
STEPS, LEARNING_RATE, BETAS, EPSILON, DECAY = 8, 1e-3, (0.9, 0.95), 1e-4, 0.1
"""AdamW of the comparison of steps. A smaller epsilon would divide gradients that are rounding alone by themselves."""
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
"""Random tokens, int32 [B, T + 1]."""
PROMPT, GREEDY = 5, 12
"""Tokens of each text that greedy decoding starts from, and how many it adds."""

_PROMPTS = np.random.default_rng(1)
PROMPTS = [_PROMPTS.integers(0, VOCAB, length).astype(np.int32) for length in (5, 11, 2)]
"""Prompts of unequal length."""

KEPT = 256
"""Elements kept of a larger array, at fixed random places."""


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def draw(
    name: str, shape: tuple[int, ...], center: float = 0.0, spread: float = 0.054
) -> np.ndarray:
    """Returns normal float32 values that depend on the name and the shape alone."""
    return (center + spread * _rng(name).standard_normal(shape)).astype(np.float32)


def draw_tensors(table: dict[str, Any]) -> dict[str, np.ndarray]:
    """Draws every tensor of a golden file's table: name -> (dtype, shape, center, spread)."""
    return {
        name: draw(name, tuple(shape), center, spread).astype(dtype)
        for name, (dtype, shape, center, spread) in table.items()
    }


def split_fused(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns Phi's tensors under the names of Mistral: its fused projections, split."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    found = dict[str, np.ndarray]()
    for name, values in tensors.items():
        if "qkv_proj" in name:
            q, k, v = np.split(values, [heads * size, (heads + kv_heads) * size])
            found |= {
                name.replace("qkv", letter): part for letter, part in (("q", q), ("k", k), ("v", v))
            }
        elif "gate_up_proj" in name:
            gate, up = np.split(values, 2)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            found[name] = values
    return found


def digest(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns what is kept of an array: all of a small one; else KEPT elements, a signed sum of each row, the largest.

    A wrong element outside of the sample changes the sum of its row by its error.
    """
    values = np.asarray(values, np.float32)
    if values.size <= KEPT:
        return {name: values.reshape(-1)}
    rng = _rng(f"digest of {name}")
    places = np.sort(rng.choice(values.size, KEPT, replace=False))
    sums = values.astype(np.float64) @ rng.choice(np.array([-1.0, 1.0]), values.shape[-1])
    return {
        name: values.reshape(-1)[places], f"{name}|sums": sums.astype(np.float32).reshape(-1),
        f"{name}|largest": np.abs(values).max(),
    }  # fmt: skip


def gap(name: str, values: np.ndarray, golden: Any) -> float:
    """Returns the largest difference of an array from its digest in `golden`, over its largest element.

    The error of a sum over n elements is divided by sqrt(n): that of each of them if errors are independent.
    """
    own = digest(name, values)
    largest = float(golden.get(f"{name}|largest", np.abs(golden[name]).max()))
    apart = float(np.abs(own[name] - golden[name]).max())
    if f"{name}|sums" in own:
        sums = np.abs(own[f"{name}|sums"] - golden[f"{name}|sums"]).max()
        apart = max(apart, float(sums) / values.shape[-1] ** 0.5)
    if largest == 0.0:  # the gradient of an expert without tokens
        return 0.0 if apart == 0.0 else float("inf")
    return apart / largest


def digests(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Digests of several arrays under `prefix/NAME`."""
    return {
        k: v
        for name, values in arrays.items()
        for k, v in digest(f"{prefix}/{name}", values).items()
    }


def names_under(prefix: str, golden: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays whose digests are under `prefix/`."""
    return [
        n.removeprefix(f"{prefix}/") for n in golden if n.startswith(f"{prefix}/") and "|" not in n
    ]


def read(name: str, folder: Path = FILES) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the golden file `name`: what describes it, and its arrays."""
    about = json.loads((folder / f"{name}.json").read_text())
    with np.load(folder / f"{name}.npz") as arrays:
        return about, dict(arrays)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(
    folder: Path, name: str, scripts: list[Path], versions: dict[str, str], about: Any, arrays: Any
) -> None:
    """Writes a golden file with the versions and the SHA-256 of the scripts and inputs that made it."""
    root = Path(__file__).parent
    made = {
        str(path.relative_to(root.parent)): sha256(path) for path in [root / "drawn.py", *scripts]
    }
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    record = {
        "versions": versions,
        "made_by": made,
        "arrays_sha256": sha256(folder / f"{name}.npz"),
        **about,
    }
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

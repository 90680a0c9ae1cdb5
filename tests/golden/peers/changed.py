"""Writes which fields of every configuration change the logits of `transformers`: each field changed by itself."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import theirs
import torch
from drawn import write

HERE = Path(__file__).resolve()
_OTHER_TEXTS = {
    "silu": "gelu",
    "gelu_new": "relu",
    "gelu_pytorch_tanh": "silu",
    "sigmoid": "softmax",
    "softmax": "sigmoid",
    "greedy": "group_limited_greedy",
    "noaux_tc": "greedy",
    "eager": "sdpa",
}
_NEW_NUMBER = 3
"""Value of a field that has none."""


def changed(value: Any) -> Any:
    """Another value of the same kind; None where there is none to try."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return _OTHER_TEXTS.get(value)
    return _NEW_NUMBER if value is None else None


def logits_with(config: dict[str, Any], folder: Path) -> np.ndarray:
    """Logits of the folder's weights with another configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return np.asarray(theirs.logits_of(theirs.load(folder)))


def effects(row: str) -> dict[str, Any]:
    """Each field with its changed value, and whether the logits change; a text says why there are none."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save(row, folder)
        written = json.loads((folder / "config.json").read_text())
        whole = json.loads(theirs.config_of(row).to_json_string(use_diff=False))
        config = {**whole, **written}
        before = logits_with(config, folder)
        for field, value in config.items():
            other = changed(value)
            if other is None or field in ("architectures", "model_type", "transformers_version"):
                continue
            try:
                after = logits_with({**config, field: other}, folder)
            except Exception as refused:
                effect: Any = f"{type(refused).__name__}"
            else:
                same_shape = after.shape == before.shape
                effect = not same_shape or not np.array_equal(before, after)
            found[field] = {"value": other, "effect": effect}
    return {"config": config, "changed": found}


def main(out: Path) -> None:
    rows = {}
    for row in theirs.ROWS:
        rows[row] = effects(row)
        print(row, flush=True)
    scripts = [HERE, HERE.parent / "theirs.py"]
    write(
        out,
        "changed-fields",
        scripts,
        theirs.versions(),
        {"rows": rows},
        {"rows": np.arange(len(rows))},
    )


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

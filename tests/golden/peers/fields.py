"""Writes what `transformers` takes for each missing field of every architecture with 40 layers.

Defaults that depend on the number of layers, such as Qwen's `max_window_layers`, have no effect in small models.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import theirs
from drawn import write

HERE = Path(__file__).resolve()
LAYERS = 40
_WINDOWED = {"use_sliding_window": True, "sliding_window": 5}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": LAYERS},
    "qwen2": {"num_hidden_layers": LAYERS, **_WINDOWED, "max_window_layers": 0},
    "qwen3": {"num_hidden_layers": LAYERS, **_WINDOWED, "max_window_layers": 0},
    "qwen3-moe": {"num_hidden_layers": LAYERS, **_WINDOWED},
}
"""Row -> its changes; `num_hidden_layers` of any other."""


def main(out: Path) -> None:
    fields = {}
    for row, (name, settings) in list(theirs.ROWS.items()):
        changes = CHANGES.get(row, {"num_hidden_layers": LAYERS})
        changed = {n: v for n, v in {**settings, **changes}.items() if n != "layer_types"}
        theirs.ROWS[row] = (name, changed)
        fields[row] = {
            "architecture": theirs.model_class(name).__name__,
            **theirs.missing_fields(row, out),
        }
    scripts = [HERE, HERE.parent / "theirs.py"]
    write(
        out,
        "fields-of-40-layers",
        scripts,
        theirs.versions(),
        {"fields": fields},
        {"layers": np.array([LAYERS])},
    )


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

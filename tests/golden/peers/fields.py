"""Writes what `transformers` takes for each missing field of every architecture with 40 layers.

Defaults that depend on the number of layers, such as Qwen's `max_window_layers`, have no effect in small models. The kinds
of layers are left out too (`layer_types`): where they are written, the fields that they follow from have no effect.
"""

import json
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


def completed(config_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Every field of a configuration as `transformers` has it from those that are given."""
    copy = json.loads(json.dumps(given))
    return dict(json.loads(config_class.from_dict(copy).to_json_string(use_diff=False)))


def missing_fields(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration without `layer_types`, what is added to it, and what changes where one of its fields is missing."""
    model_class = theirs.model_class(name)
    written = completed(model_class.config_class, settings)
    config = {field: value for field, value in written.items() if field != "layer_types"}
    of_all = completed(model_class.config_class, config)
    added = {field: value for field, value in of_all.items() if field not in config}
    without: dict[str, Any] = {}
    for missing in config:
        given = {field: value for field, value in config.items() if field != missing}
        try:
            filled = completed(model_class.config_class, given)
        except Exception as refused:
            without[missing] = f"{type(refused).__name__}: {refused}"
            continue
        changed = {n: v for n, v in filled.items() if n not in of_all or v != of_all[n]}
        gone = [field for field in config if field not in filled]
        without[missing] = {"changed": changed, "gone": gone}
    return {
        "architecture": model_class.__name__,
        "config": config,
        "added": added,
        "without": without,
    }


def main(out: Path) -> None:
    fields = {}
    for row, (name, settings) in theirs.ROWS.items():
        changes = CHANGES.get(row, {"num_hidden_layers": LAYERS})
        given = {n: v for n, v in {**settings, **changes}.items() if n != "layer_types"}
        fields[row] = missing_fields(name, given)
    scripts = [HERE, HERE.parent / "theirs.py"]
    arrays = {"layers": np.array([LAYERS])}
    write(out, "fields-of-40-layers", scripts, theirs.versions(), {"fields": fields}, arrays)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

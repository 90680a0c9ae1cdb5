"""Compares every architecture with `transformers` and prints the table of docs/families.md.

    python bench/families.py [ROW...]          # computes rows, all by default, into bench/results/families.json
    python bench/families.py --table           # prints the table of what is there

Small random models in float32 on eight simulated devices, as in tests/contracts/test_families.py.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# As in tests/conftest.py, whose compiled programs are used again.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = ROOT / "bench" / "results" / "families.json"
COLUMNS = {
    "logits": "logits", "meshes": "logits, pipeline and context", "gradients": "gradients", "losses": "8 losses",
    "params": "parameters after 8 steps", "decode": "decoding", "greedy": "greedy text", "round trip": "round trip",
}  # fmt: skip


def compare(row: str) -> dict[str, Any]:
    """Returns the largest differences of one row."""
    import hf_models
    import numpy as np
    from hf_models import EIGHT_DEVICES, MESHES

    import meshwright as mw
    from meshwright.hugging_face.safetensors_files import SafetensorsFile

    def tensors(folder: Path) -> dict[str, bytes]:
        file = SafetensorsFile(folder / "model.safetensors")
        return {name: file.tensor(name).tobytes() for name in file.entries}

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        model = hf_models.save(row, folder)
        logits, gradients = hf_models.reference(model)
        losses, values = hf_models.reference_steps(row, folder)
        found = hf_models.gradients_of(folder, MESHES.get(row, EIGHT_DEVICES))
        stored = hf_models.stored_gradients(row, gradients)
        steps, params = hf_models.steps_of(folder, "fsdp=2,tensor=2")
        mw.convert(folder, Path(temporary) / "run")
        mw.convert(Path(temporary) / "run", Path(temporary) / "back")
        greedy = hf_models.greedy_of(folder, "fsdp=2,context=2,tensor=2", 12)
        return {
            "logits": float(np.abs(hf_models.logits_of(folder, "data=1") - logits).max()),
            "meshes": float(np.abs(hf_models.logits_of(folder, "stage=2,context=2,tensor=2") - logits).max()),
            "gradients": max(hf_models.largest_gap(found[name], g) for name, g in stored.items()),
            "losses": max(abs(a / b - 1) for a, b in zip(steps, losses, strict=True)),
            "params": max(hf_models.largest_gap(params[name], value) for name, value in values.items()),
            "decode": float(np.abs(hf_models.decoded_logits_of(folder, "data=1") - logits).max()),
            "greedy": bool((greedy == hf_models.reference_greedy(model, 12)).all()),
            "round trip": tensors(folder) == tensors(Path(temporary) / "back"),
        }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table in Markdown."""

    def cell(value: Any) -> str:
        return {True: "equal", False: "**differs**"}[value] if isinstance(value, bool) else f"{value:.0e}"

    lines = [f"| row | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row, found in results.items():
        lines.append(f"| {row} | {' | '.join(cell(found[column]) for column in COLUMNS)} |")
    return "\n".join(lines)


def main() -> None:
    """Computes rows, or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if not arguments.table:
        from meshwright.hardware.mesh import enable_compilation_cache, prepare_host

        prepare_host(8)
        enable_compilation_cache(ROOT / ".pytest_cache" / "compiled")
        from hf_models import ROWS

        for row in arguments.rows or ROWS:
            results[row] = compare(row)
            print(row, results[row], flush=True)
            ordered = {name: results[name] for name in ROWS if name in results}
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()

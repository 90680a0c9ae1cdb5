"""Compares every architecture with `transformers` and writes the largest differences down (docs/families.md).

    python bench/families.py [ROW...]          # adds what is not yet in bench/results/families.json
    python bench/families.py --table           # writes the table of what is there, bench/results/families.md

Small random models in float32 on eight simulated devices, as in tests/contracts/test_families.py.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_table import put_rows

# As in tests/conftest.py, whose compiled programs are used again.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULTS = ROOT / "bench" / "results" / "families.json"


class Comparison:
    """One row: its folder, and the numbers of `transformers` in its golden file."""

    def __init__(self, row: str, folder: Path):
        import hf_models

        self.row, self.folder, self.hf = row, folder, hf_models
        hf_models.write_folder(row, folder)
        self.golden = hf_models.read(row)[1]

    def logits(self, mesh: str) -> float:
        """Returns the largest difference of the logits on a mesh."""
        return float(abs(self.hf.logits_of(self.folder, mesh) - self.golden["logits"]).max())

    def steps(self) -> dict[str, float]:
        """Returns the largest differences of eight AdamW steps: first gradients, losses, and parameters after them."""
        losses, gradients, params = self.hf.steps_of(
            self.folder, self.hf.MESHES.get(self.row, self.hf.EIGHT_DEVICES)
        )

        def largest(prefix: str, found: dict[str, Any]) -> float:
            names = self.hf.names_under(prefix, self.golden)
            return max(self.hf.gap(f"{prefix}/{name}", found[name], self.golden) for name in names)

        return {
            "gradients": largest("gradient", gradients),
            "losses": max(
                abs(a / b - 1) for a, b in zip(losses, self.golden["losses"].tolist(), strict=True)
            ),
            "params": largest("after steps", params),
        }

    def decode(self) -> float:
        """Returns the largest difference of the logits of every position, each from the cache of those before it."""
        return float(
            abs(self.hf.decoded_logits_of(self.folder, "data=1") - self.golden["logits"]).max()
        )

    def greedy(self) -> bool:
        """Returns whether greedy text on eight devices is that of `transformers`."""
        found = self.hf.greedy_of(
            self.folder, self.hf.DECODE_MESHES.get(self.row, "fsdp=2,context=2,tensor=2")
        )
        return bool((found == self.golden["greedy"]).all())

    def round_trip(self) -> bool:
        """Returns whether all tensors have the same bytes after a checkpoint and back."""
        import meshwright as mw

        run, back = (self.folder.parent / name for name in ("run", "back"))
        mw.convert(self.folder, run)
        mw.convert(run, back)
        return _tensors(self.folder) == _tensors(back)


def _tensors(folder: Path) -> dict[str, bytes]:
    from meshwright.hugging_face.safetensors_files import SafetensorsFile

    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file.tensor(name).tobytes() for name in file.entries}


WITHOUT_CONTEXT = {"qwen3-next": "stage=2,data=2,tensor=2"}
"""Mesh of a row whose layers do not go with `context`."""
PARTS: dict[str, Callable[[Comparison], Any]] = {
    "logits": lambda c: c.logits("data=1"),
    "decode": Comparison.decode,
    "round trip": Comparison.round_trip,
    "steps": Comparison.steps,
    "greedy": Comparison.greedy,
    "meshes": lambda c: c.logits(WITHOUT_CONTEXT.get(c.row, "stage=2,context=2,tensor=2")),
}
"""Part of a row -> its comparison; each is kept as soon as it is there."""
COLUMNS = {
    "logits": "logits", "meshes": "logits, pipeline and context", "gradients": "gradients", "losses": "8 losses",
    "params": "parameters after 8 steps", "decode": "decoding", "greedy": "greedy text", "round trip": "round trip",
}  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table in Markdown."""

    def cell(value: Any) -> str:
        if value is None:
            return ""
        return (
            {True: "equal", False: "**differs**"}[value]
            if isinstance(value, bool)
            else f"{value:.0e}"
        )

    lines = [f"| row | {' | '.join(COLUMNS.values())} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row, found in results.items():
        lines.append(f"| {row} | {' | '.join(cell(found.get(column)) for column in COLUMNS)} |")
    return "\n".join(lines)


def main() -> None:
    """Computes rows, and writes the table."""
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
            with tempfile.TemporaryDirectory() as temporary:
                comparison, found = (
                    Comparison(row, Path(temporary) / "model"),
                    dict(results.get(row, {})),
                )
                for part, compare in PARTS.items():
                    if part in found or (part == "steps" and "losses" in found):
                        continue
                    value = compare(comparison)
                    found |= value if isinstance(value, dict) else {part: value}
                    results[row] = found
                    print(row, part, value, flush=True)
                    ordered = {name: results[name] for name in ROWS if name in results}
                    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    put_rows(
        "families.py",
        "Architectures against transformers: largest differences",
        table(results) + "\n",
    )


if __name__ == "__main__":
    main()

"""Writes golden files of a step's named tensors, as `parity --against transformers` takes them from `transformers`.

The environment needs Meshwright and its dependencies besides. Only small tensors are kept: activations, their gradients,
and gradients of norms and biases.
"""

import json
import sys
import tempfile
from pathlib import Path

import newer
import theirs
from drawn import TOKENS, write

from meshwright.hugging_face.folder import open_folder
from meshwright.trainer.transformers_source import TransformersSource

HERE = Path(__file__).resolve()
SCRIPTS = [HERE, HERE.parent / "theirs.py", HERE.parent / "newer.py"]
ROWS = ("qwen3-moe", "granite-4")
"""Experts; factors on what halves add and on logits, and a state space."""
LENGTH = 4
"""Tokens of a document; there are two."""
LARGEST = 2 * LENGTH * 96
"""Elements of the largest array that is kept."""


def main(out: Path) -> None:
    theirs.ROWS = theirs.ROWS | newer.ROWS
    for row in ROWS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "model")
            table = theirs.save(row, folder)
            documents = TOKENS[:2, : LENGTH + 1]
            source = TransformersSource(open_folder(f"hf:{folder}"), documents)
            arrays = {
                f"{found.of}|{'' if found.layer is None else found.layer}|{found.name}": array
                for found, array in source
                if array.size <= LARGEST
            }
            config = json.loads((folder / "config.json").read_text())
            about = {"config": config, "tensors": table}
            write(out, f"tensors-{row}", SCRIPTS, theirs.versions(), about, arrays)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

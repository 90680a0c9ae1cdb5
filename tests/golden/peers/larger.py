"""Writes a golden file for every larger model: logits, gradients and greedy text of the text model inside it."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import theirs
from drawn import digests, write

HERE = Path(__file__).resolve()


def main(out: Path) -> None:
    for row in theirs.LARGER:
        with tempfile.TemporaryDirectory() as name:
            folder, scratch = Path(name, "model"), Path(name, "scratch")
            table = theirs.save(row, folder)
            greedy = theirs.greedy(theirs.load(folder))
            logits, gradients = theirs.reference(folder, scratch)
            config = json.loads((folder / "config.json").read_text())
        # The towers take no part in the loss of a text.
        sizes = {name: int(np.prod(fields[1])) for name, fields in table.items()}
        text = sum(
            size for name, size in sizes.items() if "language_model" in name or "lm_head" in name
        )
        about = {
            "config": config,
            "parameters": text,
            "tensors": table,
        }
        arrays = {"logits": logits, "greedy": greedy.astype(np.int32)}
        arrays |= digests("gradient", gradients)
        write(out, row, [HERE, HERE.parent / "theirs.py"], theirs.versions(), about, arrays)
        print(row, flush=True)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

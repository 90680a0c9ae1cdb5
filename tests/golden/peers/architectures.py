"""Writes a golden file for every architecture: logits, gradients, eight AdamW steps, greedy text, default fields."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import theirs
from drawn import digests, split_fused, write
from safetensors.numpy import save_file

HERE = Path(__file__).resolve()
WRITTEN = HERE.parent / "written"
"""The config.json that Meshwright writes for a row from its model: `transformers` computes the same bits with it."""


def main(out: Path) -> None:
    for row in theirs.ROWS:
        with tempfile.TemporaryDirectory() as name:
            folder, scratch = Path(name, "model"), Path(name, "scratch")
            table = theirs.save(row, folder)
            model = theirs.load(folder)
            greedy = theirs.greedy(model)
            logits, gradients = theirs.reference(folder, scratch)
            losses, values = theirs.steps(folder, scratch)
            config = (folder / "config.json").read_text()
            scripts, own = [HERE, HERE.parent / "theirs.py"], WRITTEN / f"{row}.json"
            if own.exists():
                (folder / "config.json").write_text(own.read_text())
                if row in theirs.WRITTEN_AS:
                    fused = split_fused(theirs.load_tensors(folder), theirs.json.loads(config))
                    save_file(fused, folder / "model.safetensors", {"format": "pt"})
                with_own = theirs.load(folder)
                assert type(with_own).__name__ == theirs.WRITTEN_AS.get(
                    row, type(model).__name__
                ), row
                assert (theirs.logits_of(with_own) == theirs.logits_of(model)).all(), row
                scripts.append(own)
            about = {
                "config": theirs.json.loads(config), "parameters": sum(int(np.prod(t[1])) for t in table.values()),
                "tensors": table, "fields": theirs.missing_fields(row, folder),
            }  # fmt: skip
            arrays = {
                "logits": logits,
                "losses": np.array(losses, np.float32),
                "greedy": greedy.astype(np.int32),
            }
            arrays |= digests("gradient", gradients) | digests("after steps", values)
            write(out, row, scripts, theirs.versions(), about, arrays)
            print(row, flush=True)


if __name__ == "__main__":
    with theirs.quiet():
        main(Path(sys.argv[1]))

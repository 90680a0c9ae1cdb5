"""Converts an 8 GB model both ways in a process whose data segment the kernel limits to 2 GiB.

    python bench/convert_capped.py FOLDER [GB]

Writes a Llama of random bfloat16 weights into FOLDER, in several files, converts it into a run and back, compares the
bytes, and prints peak memory and time of both directions. FOLDER needs three times the size of the model.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from meshwright.hugging_face.architectures import architecture_of
from meshwright.hugging_face.safetensors_files import (
    NewSafetensorsFile,
    file_names,
    split_into_files,
)
from meshwright.models.families.llama import Llama
from meshwright.sharding.params import named_leaves

LIMIT = 2 * 2**30
VOCAB, WIDTH, MLP = 32000, 4096, 14336
_LAYER_BYTES = 2 * (WIDTH * WIDTH * 2 + WIDTH * 1024 * 2 + 3 * WIDTH * MLP + 2 * WIDTH)


def write_model(folder: Path, size: float) -> int:
    """Writes a model of about `size` bytes; returns its bytes."""
    layers = max(1, round((size - 4 * VOCAB * WIDTH) / _LAYER_BYTES))
    model = Llama(VOCAB, WIDTH, layers, 32, kv_heads=8, mlp=MLP)
    architecture, config = architecture_of(model)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    stored = architecture.tensors(model)
    shapes = {n: stored[path].stored_shape(p) for path, p in named_leaves(model.params()).items()
              for n in stored[path].names(p)}  # fmt: skip
    groups = split_into_files({n: 2 * int(np.prod(s)) for n, s in shapes.items()}, 2 * 10**9)
    rng = np.random.default_rng(0)
    noise = (0.02 * rng.standard_normal(2**24, np.float32)).astype(ml_dtypes.bfloat16)
    weight_map = {}
    for name, group in zip(file_names(len(groups)), groups, strict=True):
        file = NewSafetensorsFile(folder / name, {n: ("BF16", shapes[n]) for n in group})
        for tensor in group:
            flat = file.tensor(tensor).reshape(-1)
            for start in range(0, flat.size, noise.size // 2):
                part = flat[start : start + noise.size // 2]
                first = int(rng.integers(noise.size - part.size + 1))
                part[...] = noise[first : first + part.size]
            file.release()
        weight_map |= dict.fromkeys(group, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * int(np.prod(s)) for s in shapes.values())


def convert(source: Path, out: Path) -> tuple[int, float]:
    """Runs `meshwright convert` with a limited data segment; returns its peak memory and its seconds."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    command = [
        sys.executable,
        "-m",
        "meshwright",
        "convert",
        str(source),
        str(out),
        "--json",
        "--max-file-mib",
        "1907",
    ]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=limit)
    return json.loads(done.stdout)["peak_bytes"], time.perf_counter() - began


def main() -> None:
    """Converts and prints the figures."""
    base, size = Path(sys.argv[1]), float(sys.argv[2]) * 1e9 if len(sys.argv) > 2 else 8e9
    nbytes = write_model(base / "model", size)
    print(f"{nbytes / 1e9:.2f} GB of weights, at most {LIMIT / 2**30:.0f} GiB of data")
    for source, out in (("model", "run"), ("run", "back")):
        peak, seconds = convert(base / source, base / out)
        print(f"{source} -> {out}: {peak / 2**30:.2f} GiB at most, {seconds:.0f} s")
    files = sorted(p.name for p in (base / "model").glob("*.safetensors"))
    for name in files:
        command = ["cmp", str(base / "model" / name), str(base / "back" / name)]
        assert subprocess.run(command, check=False).returncode == 0, name
    print(f"{len(files)} files with the same bytes")


if __name__ == "__main__":
    main()

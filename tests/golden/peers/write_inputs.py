"""Writes the inputs of the peers' scripts that Meshwright makes: config.json of each row, an adapter, packed pairs."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from meshwright.hardware.mesh import prepare_host

prepare_host(8)

import hf_models
import test_finetune

import meshwright as mw
from meshwright.trainer.loop import prepare_run

OUT = hf_models.PEERS / "written"
for row in hf_models.ROWS:
    with tempfile.TemporaryDirectory() as name:
        hf_models.write_folder(row, Path(name, "model"))
        mw.convert(Path(name, "model"), Path(name, "run"))
        # Not the configuration that came with the weights, but one written from the model.
        shutil.rmtree(Path(name, "run", "huggingface"))
        written = mw.convert(Path(name, "run"), Path(name, "written"), dtype="float32").out
        config = json.loads((written / "config.json").read_text())
        (OUT / f"{row}.json").write_text(json.dumps(config, indent=1) + "\n")

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    test_finetune.write_base(folder / "base")
    test_finetune.write_sums(folder / "chat.jsonl")
    settings = {**test_finetune.SETTINGS, "steps": 1}
    data = str(folder / "chat.jsonl")
    mw.finetune(f"hf:{folder}/base", data, folder / "run", mesh="data=1", cache=folder, **settings)
    mw.convert(folder / "run", folder / "adapter", weights="adapter")
    adapter = test_finetune.adapter_written(folder / "adapter")
    (OUT / "adapter.json").write_text(json.dumps(adapter, indent=1) + "\n")

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    test_finetune.write_base(folder / "base", "qwen3")
    test_finetune.write_preferences(folder / "pairs.jsonl")
    source = test_finetune.adapted_run(folder, hf_models.read("adapter")[0]["config"])
    run = test_finetune.preference_run(source, folder / "pairs.jsonl", "data=1")
    prepared = prepare_run(run, cache=folder)
    samples = [prepared.train[0][i] for i in range(run.training.batch)]
    batch = {
        n: np.stack([s[n] for s in samples]) for n in ("inputs", "targets", "segments", "weights")
    }
    np.savez_compressed(OUT / "preferences.npz", **batch)

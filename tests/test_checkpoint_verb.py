"""The verb `checkpoint`: what is on disk, without devices."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint.blocks import write_tensor
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.cli.verbs import run_verb
from meshwright.config import Optimizer
from meshwright.errors import CheckpointError, ConfigError
from meshwright.models.families.gpt2 import Gpt2
from meshwright.runs.run import Run


def save(out: Path, step: int, **changed: np.ndarray) -> Path:
    """A checkpoint of two tensors, as converted weights are written."""
    folder = out / "checkpoints" / str(step)
    (folder / "state").mkdir(parents=True)
    tensors = {
        "params.a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "params.b": np.ones(5, np.float32),
    }
    records = {}
    for name, values in (
        tensors | {f"params.{name}": value for name, value in changed.items()}
    ).items():
        total = write_tensor(
            folder / "state", name, values.shape, values.dtype, lambda index, x=values: x[index]
        )
        records[name] = TensorRecord(values.shape, "float32", total)
    run = Run(model=Gpt2(50, 32, 1, 4), optimizer=Optimizer(learning_rate=step * 1e-3))
    data = {"tokenizer": "t", "sources": [["d", 1.0]], "held_out": 0.1, "sequence": 8, "seed": 0}
    Manifest(step, step * 16, run, records, None, data, ((32, 16),)).write(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    save(tmp_path, 2)
    changed = np.ones(5, np.float32)
    changed[3] = 1.5
    save(tmp_path, 4, b=changed)
    (tmp_path / "checkpoints" / "6").mkdir()
    return tmp_path


def test_checkpoints_are_listed_and_inspected(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb("checkpoint", ["list", str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["samples"], row["tensors"]) for row in rows] == [
        (2, 32, 2),
        (4, 64, 2),
        (6, None, 0),
    ]
    assert [row["state"].partition(":")[0] for row in rows] == ["whole", "whole", "not whole"]
    assert (
        run_verb("checkpoint", ["list", str(out)])
        == run_verb("checkpoint", ["inspect", str(out)])
        == 0
    )
    text = capsys.readouterr()
    assert (
        "step 4, 64 samples read\nleft out: samples 32 to 47" in text.out
        and "params.a  float32[3, 4]" in text.out
    )
    assert "left out, it is not whole; step 4 is taken" in text.err
    assert run_verb("checkpoint", ["inspect", str(out), "--at", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    with pytest.raises(CheckpointError, match="there are none"):
        run_verb("checkpoint", ["list", str(out / "nowhere")])
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        run_verb("checkpoint", ["verfy", str(out)])
    with pytest.raises(ConfigError, match="it takes one of list, inspect, verify, move, then OUT"):
        run_verb("checkpoint", [])
    assert run_verb("checkpoint", ["--help"]) == 0
    assert "list|inspect|verify|move" in capsys.readouterr().out


def test_a_damaged_tensor_is_found(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("checkpoint", ["verify", str(out), "--at", "4"]) == 0
    assert "step 4: every tensor is as it was saved" in capsys.readouterr().out
    file = out / "checkpoints" / "4" / "state" / "params.b" / "0"
    raw = bytearray(file.read_bytes())
    raw[6] ^= 1
    file.write_bytes(bytes(raw))
    assert run_verb("checkpoint", ["verify", str(out), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)["damaged"]
    assert found["2"] == [] and "'params.b' is not what was saved" in found["4"][0]
    assert "it is not whole" in found["6"][0]

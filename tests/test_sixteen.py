"""What takes sixteen devices, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_sixteen_devices(tmp_path: Path) -> None:
    script = Path(__file__).parent / "sixteen.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["devices"] == 16
    for mesh in ("data=2,fsdp=2,tensor=2,stage=2", "fsdp=2,context=2,expert=4"):
        assert told[mesh]["losses"] < 1e-5 and told[mesh]["gradients"] < 1e-5
    # A checkpoint of the pipeline goes on elsewhere as it would have at home.
    assert len(told["stayed"]) == 4
    for losses in told["moved"].values():
        assert losses == pytest.approx(told["stayed"], rel=1e-5)

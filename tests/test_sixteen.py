"""Meshes of four axes on sixteen simulated devices, in a separate process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.exhaustive
def test_sixteen_devices(tmp_path: Path) -> None:
    script = Path(__file__).parent / "sixteen.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["devices"] == 16
    for mesh in (
        "data=2,fsdp=2,tensor=2,stage=2",
        "fsdp=2,context=2,expert=4",
        "fsdp=2,expert=2,context=2,tensor=2",
    ):
        assert results[mesh]["losses"] < 1e-5 and results[mesh]["gradients"] < 1e-5
    assert len(results["exchange"]) == 4 and max(results["exchange"].values()) < 2e-6
    # A checkpoint of the pipeline continues on other meshes as on its own.
    assert len(results["stayed"]) == 4
    for losses in results["moved"].values():
        assert losses == pytest.approx(results["stayed"], rel=1e-5)

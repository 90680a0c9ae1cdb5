"""The five lines of a bad step through `train`, on every kind of mesh and in several processes."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted
import pytest
from ranks import ranks

import meshwright as mw

MESHES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "llama",
        "stage=2,data=2",
        {
            "layers": 4,
            "microbatches": 2,
            "pipeline_schedule": "interleaved",
            "virtual_stages": 2,
        },
    ),
    ("llama", "context=2,data=2", {"microbatches": 2}),
    ("mixtral", "fsdp=2,expert=2", {}),
    ("llama", "fsdp=2,tensor=2", {}),
]
NAMES = [f"{family} {mesh}" for family, mesh, _ in MESHES]


def lines_of(out: Path) -> dict[int, list[str]]:
    """Returns the lines of each bad step."""
    records = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return {record["bad"]: record["lines"] for record in records if "lines" in record}


def check_lines(out: Path, device_name: str) -> None:
    """Compares the lines with what was planted. device_name: pattern of the device whose copy is spoilt."""
    found = lines_of(out)
    assert found.keys() == {planted.SPIKE, planted.NOT_A_NUMBER}
    bad, tensor, samples, _, more = found[planted.SPIKE]
    assert re.match(rf"step {planted.SPIKE}: .* times its median", bad)
    assert re.match(r"first tensor: parameter norm of embed is .* times its median", tensor)
    sample = 16 * (planted.SPIKE - 1) + planted.SEQUENCE
    ids = " ".join([str(planted.RARE)] * 12)
    words = (
        f"samples: {sample} in sequence {planted.SEQUENCE}, which begins '{'~' * 16}' (ids {ids})"
    )
    assert samples == words
    assert more == f"figures of every tensor: meshwright view {out}"
    bad, tensor, _, device, _ = found[planted.NOT_A_NUMBER]
    assert bad == f"step {planted.NOT_A_NUMBER}: not finite"
    assert tensor == "first tensor: parameter norm of final_norm is nan"
    copy = "its copy of final_norm differs from the others"
    assert re.fullmatch(f"device: {device_name}: {copy}", device)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "mesh", "changes"), MESHES, ids=NAMES)
def test_a_spike_and_a_spoilt_copy_are_named(
    family: str,
    mesh: str,
    changes: dict[str, Any],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted.plant(monkeypatch.setattr)
    run = planted.planted_run(tmp_path, mesh, family, **changes)
    mw.train(run, out=tmp_path / "out", cache=cache, devices=4, progress="none")
    host = re.escape(socket.gethostname())
    check_lines(tmp_path / "out", rf"device {planted.DEVICE} of process 0 \({host}\)")


@pytest.mark.exhaustive
def test_a_device_of_another_host_is_named_with_its_host(tmp_path: Path) -> None:
    """Two processes, each of which takes itself for another host, on stages whose parameters are sharded."""
    words = [sys.executable, planted.__file__, "stage=2,fsdp=2", str(tmp_path)]
    processes = [
        subprocess.Popen(
            words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        for environment in ranks(2)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said[-3000:]
    check_lines(tmp_path / "out", r"device \d+ of process 1 \(node1\)")
    table = json.loads((tmp_path / "out" / "processes.json").read_text())
    assert [row["host"] for row in table["processes"]] == ["node0", "node1"]

"""`meshwright prove` from the command line: printed tables, files, comparisons and refusals."""

import json
from pathlib import Path

import pytest
from test_cli import SMALL, in_process, meshwright

from meshwright.cli.main import run
from meshwright.errors import ConfigError

PROVE = ["prove", "tiny", "--mesh", "data=2,fsdp=2,tensor=2", *SMALL]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One proof that wrote all its files."""
    out = tmp_path_factory.mktemp("proof")
    printed = meshwright(
        *PROVE, "--save", str(out / "census.json"),
        "--hlo", str(out / "step.hlo"), "--html", str(out / "page.html"),
    )  # fmt: skip
    (out / "printed.txt").write_text(printed)
    return out


def test_it_prints_and_writes(proved: Path) -> None:
    printed = (proved / "printed.txt").read_text()
    for part in (
        "at the peak",
        "saved activations",
        "all-gather",
        "decoder.py:",
        "2 D F per matrix",
        "padding vocabulary",
    ):
        assert part in printed
    assert (proved / "step.hlo").read_text().startswith("HloModule")
    document = json.loads((proved / "census.json").read_text())
    assert sum(document["memory"]["categories"].values()) == document["memory"]["peak"]
    assert {"kind", "axes", "payload", "count", "total", "sent", "line", "tensor"} <= set(
        document["ledger"][0]
    )
    assert (
        document["provenance"]["simulated"] == ["simulated_schedule"]
        and document["simulated_schedule"] is None
    )
    assert document["unread"] == [] and document["memory"]["live"] <= document["memory"]["peak"]
    assert document["mesh"]["fsdp"] == 2 and document["flops"]["compiled"] > 0


def test_two_meshes_and_two_commits(proved: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    meshes = in_process(*PROVE, "--against", "fsdp=8", "--html", str(page))
    assert "all-gather over tensor" in meshes and "parameters" in meshes
    drawn = page.read_text()
    assert "data=2,fsdp=2,tensor=2 against fsdp=8" in drawn
    assert "Communication ledger: data=2,fsdp=2,tensor=2" in drawn
    assert "Communication ledger: fsdp=8" in drawn
    same = in_process(*PROVE, "--against", str(proved / "census.json"))
    peak = next(line for line in same.splitlines() if line.strip().startswith("peak"))
    assert float(peak.split()[-1]) == 1.0
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    assert "it is not a census" in in_process(*PROVE, "--against", str(broken), code=6)
    plan = tmp_path / "plan.json"
    in_process(
        "plan", "llama32-1b", "--on", "h100:8", "--tokens-per-step", "64k", "--out", str(plan)
    )
    assert "--on h100:1x8" in in_process(*PROVE, "--against", str(plan), code=2)
    assert "it cannot be read" in in_process(
        *PROVE, "--against", str(tmp_path / "none.json"), code=6
    )
    assert "did you mean 'tensor'?" in in_process(*PROVE, "--against", "tensr=2", code=2)


def test_json_and_the_evaluation_step() -> None:
    document = json.loads(in_process(*PROVE, "--step", "evaluate", "--json"))
    assert (
        document["name"] == "evaluation step"
        and "gradients" not in document["memory"]["categories"]
    )


def test_files_that_cannot_be_written_are_named_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.api.proving.compile_step", None)
    kept = tmp_path / "kept.html"
    kept.write_text("kept")
    for flag in ("--hlo", "--save", "--html"):
        for file in (tmp_path / "none" / "file", tmp_path):
            with pytest.raises(ConfigError, match=f"writing {file}"):
                run([*PROVE, flag, str(file)])
    assert kept.read_text() == "kept" and list(tmp_path.iterdir()) == [kept]


def test_pictures_on_the_command_line() -> None:
    words = ["show", "llama3-8b", "--mesh", "fsdp=4,tensor=2"]
    drawn = in_process(*words, "--draw", "blocks.query", "--machine", "h100:2x4")
    assert (
        "blocks.query, gathered[L, D, N/tensor, H]" in drawn and "tensor=2: within a node" in drawn
    )
    assert "did you mean 'blocks.query'?" in in_process(*words, "--draw", "blocks.qury", code=2)
    assert "the machine has 16 devices, and the mesh 8" in in_process(
        *words, "--machine", "h100:4x4", code=2
    )
    assert "cannot be written" in in_process(*words, "--html", "/proc/none", code=2)

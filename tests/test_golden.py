"""Golden files belong to the scripts and inputs that made them, and all of them together stay small."""

import hashlib
from pathlib import Path

import hf_models
import pytest
from drawn import FILES, NOT_SCRIPTS, read, sha256

NAMES = sorted(file.stem for file in FILES.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_file_belongs_to_its_script(name: str) -> None:
    """A script that changed since is run again by `make golden`."""
    about, arrays = read(name)
    assert arrays and {"torch", "transformers", "numpy"} <= about["versions"].keys()
    assert (
        about["arrays_sha256"] == hashlib.sha256((FILES / f"{name}.npz").read_bytes()).hexdigest()
    )
    assert {file: sha256(FILES.parent / file) for file in about["made_by"]} == about["made_by"]


def test_every_script_has_its_files_and_they_are_small() -> None:
    made_by = {Path(file).name for name in NAMES for file in read(name)[0]["made_by"]}
    scripts = {path.name for path in hf_models.PEERS.glob("*.py")} - set(NOT_SCRIPTS)
    assert scripts <= made_by and set(hf_models.ROWS) <= set(NAMES)
    assert sum(file.stat().st_size for file in FILES.iterdir()) < 12.75e6

"""A Run as a JSON file; `run_file` reads it."""

import json
from pathlib import Path
from typing import Any

import msgspec

from meshwright.documents import write_atomically
from meshwright.models.families import family_name
from meshwright.runs.run import Run


def run_to_dict(run: Run) -> dict[str, Any]:
    """Returns every field of the run as JSON values; the model's also name its family."""
    document = msgspec.to_builtins(run)
    document["model"] = {"family": family_name(run.model), **document["model"]}
    return dict(document)


def write_run(run: Run, file: Path) -> None:
    """Writes `run` as JSON; a crash leaves the old file or the new one."""
    write_atomically(file, json.dumps(run_to_dict(run), indent=1) + "\n")

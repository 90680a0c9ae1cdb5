"""A Run as a JSON file, and back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import Run
from meshwright.errors import CheckpointError, ConfigError, nearest
from meshwright.models.families import family_name, find_family


def run_to_dict(run: Run) -> dict[str, Any]:
    """Returns every field of the run as JSON values; the model's also name its family."""
    document = msgspec.to_builtins(run)
    document["model"] = {"family": family_name(run.model), **document["model"]}
    return dict(document)


def run_from_dict(document: dict[str, Any]) -> Run:
    """Returns the run of `run_to_dict`. Raises ConfigError naming an unknown or ill-typed field."""
    rest = dict(document)
    model = dict(rest.pop("model", {}))
    config = find_family(str(model.pop("family", "")))
    _check_names(model, config, "model")
    _check_names(rest, Run, "run")
    for name in ("training", "optimizer", "data", "finetune"):
        _check_names(rest.get(name, {}), type(getattr(Run, name)), name)
    try:
        built = msgspec.convert(model, config)
        others = {
            field.name: msgspec.convert(rest[field.name], field.type)
            for field in dataclasses.fields(Run)
            if field.name in rest
        }
    except msgspec.ValidationError as error:
        raise ConfigError("a run file", str(error), "the type that the message names") from error
    return Run(model=built, **others)


def _check_names(document: dict[str, Any], kind: type, where: str) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in document:
        if name not in known:
            raise ConfigError(f"{where}.{name}", "there is no such field", nearest(name, known))


def write_run(run: Run, file: Path) -> None:
    """Writes `run` as JSON."""
    file.write_text(json.dumps(run_to_dict(run), indent=1) + "\n", encoding="utf-8")


def read_run(file: Path) -> Run:
    """Reads a Run. Raises ConfigError where the file is missing or is not a run."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run file {file}", f"it cannot be read: {error}", "the run.json of an output folder"
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(f"run file {file}", "it is not a JSON object", "the run.json of an output folder")
    return run_from_dict(document)


def run_in_folder(folder: Path) -> Run:
    """Reads the Run of an output folder. Raises CheckpointError where it has none."""
    if not (folder / "run.json").is_file():
        raise CheckpointError(f"the run in {folder}", "it has no run.json", "the output folder of a run")
    return read_run(folder / "run.json")

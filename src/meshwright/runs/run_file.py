"""A Run from a JSON file, whoever wrote it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import Run
from meshwright.documents import check_inside, read_json
from meshwright.errors import CheckpointError, ConfigError, nearest
from meshwright.models.families import find_family
from meshwright.plugins import note_names

_WRITES = re.compile("dump|path|file|dir|profile", re.IGNORECASE)
"""Part of the names of compiler options that read or write files."""


def run_from_dict(document: dict[str, Any], origin: str) -> Run:
    """Returns the run of `run_to_dict`, read from the file `origin`.

    Raises ConfigError naming an unknown or ill-typed field, and a name of code that a file may not choose (`trust`).
    """
    _check_values(document, origin)
    note_names(document, origin)
    rest = dict(document)
    model = dict(rest.pop("model", {}))
    config = find_family(str(model.pop("family", "")))
    _check_names(model, config, "model")
    _check_names(rest, Run, "run")
    for name in ("training", "optimizer", "data", "finetune", "faults"):
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


def _check_values(document: Any, origin: str) -> None:
    """Raises ConfigError for a document of the wrong form, and for a value that reaches outside of what it is for."""
    form = {
        "model": dict,
        "training": dict,
        "optimizer": dict,
        "data": dict,
        "finetune": dict,
        "faults": dict,
        "name": str,
    }
    for name, kind in form.items():
        if not isinstance(document, dict) or not isinstance(document.get(name, kind()), kind):
            raise ConfigError(f"the run in {origin}", f"its {name} is no {kind.__name__}", "what training wrote")
    name = document.get("name", "run")
    if not name.isprintable() or "/" in name or name.startswith("."):
        raise ConfigError(f"the run in {origin}", f"its name {name[:80]!r} is no name of a folder", '"name": "run"')
    for option in document.get("training", {}).get("compiler_options", ()):
        if _WRITES.search(str(option).partition("=")[0]):
            fix = f"--training.compiler-options {option} on the command line, and no such option in the file"
            raise ConfigError(f"the compiler option {option!r} of {origin}", "it makes XLA write files", fix)


def _check_names(document: dict[str, Any], kind: type, where: str) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in document:
        if name not in known:
            raise ConfigError(f"{where}.{name}", "there is no such field", nearest(name, known))


def read_run(file: Path) -> Run:
    """Reads a Run. Raises ConfigError where the file is missing or is not a run."""
    try:
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run file {file}", f"it cannot be read: {error}", "the run.json of an output folder"
        ) from error
    return run_from_dict(document, str(file))


def run_in_folder(folder: Path) -> Run:
    """Reads the Run of an output folder. Raises CheckpointError where it has none."""
    if not (folder / "run.json").is_file():
        raise CheckpointError(f"the run in {folder}", "it has no run.json", "the output folder of a run")
    try:
        check_inside(folder, [folder / "run.json", folder / "tokenizer.json", folder / "checkpoints"])
    except ValueError as error:
        raise CheckpointError(f"the run in {folder}", str(error), "a folder whose files are in it") from error
    return read_run(folder / "run.json")

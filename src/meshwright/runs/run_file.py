"""A Run as a JSON file: written, and read back whoever wrote it."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import MeshShape
from meshwright.data.chat import TEMPLATES
from meshwright.documents import (
    SMALL,
    check_inside,
    parse_document,
    read_text,
    unique_object,
)
from meshwright.errors import CheckpointError, ConfigError, by_class, nearest, reason_of
from meshwright.models.families import family_name, find_family
from meshwright.path_kinds import find_path_kind
from meshwright.runs.run import Run
from meshwright.statuses import with_place
from meshwright.storage.paths import path_of, place_of
from meshwright.storage.writing import write_atomically
from meshwright.trust import derive, foreign, plain_text

_WRITES = re.compile("dump|path|file|dir|profile", re.IGNORECASE)
"""Part of the names of compiler options that read or write files."""
_PARTS = ("training", "optimizer", "data", "finetune", "faults", "local_checkpoints")


def run_to_dict(run: Run) -> dict[str, Any]:
    """Returns every field of the run as JSON values; the model's also name its family."""
    document = msgspec.to_builtins(run, enc_hook=plain_text)
    document["model"] = {"family": str(family_name(run.model)), **document["model"]}
    return dict(document)


def fields_to_compare(run: Run) -> dict[str, Any]:
    """Returns the fields of a run as JSON values, without who chose them.

    Equal values are equal runs.
    """
    fields, _ = split_chosen(run_to_dict(run))
    return fields


def split_chosen(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Returns the fields of a run as JSON values, and the choices among them by dotted field.

    The second is None for a document from before choices were recorded, or a damaged one.
    """
    fields = dict(document)
    chosen = fields.pop("chosen", None)
    return fields, chosen if isinstance(chosen, dict) else None


def with_absolute_paths(run: Run) -> Run:
    """Returns the run with absolute paths, so that its folder can be used from anywhere."""
    template = run.finetune.template
    if template is not None and template not in TEMPLATES:
        template = place_of(template)
    paths = tuple(_absolute_source(text) for text in run.data.paths)
    data = dataclasses.replace(run.data, paths=paths, tokenizer=place_of(run.data.tokenizer))
    local = run.local_checkpoints
    if local.path:
        local = dataclasses.replace(local, path=str(path_of(local.path)))
    return dataclasses.replace(
        run,
        data=data,
        finetune=dataclasses.replace(run.finetune, template=template),
        local_checkpoints=local,
        init_from=None if run.init_from is None else place_of(run.init_from),
    )


def _absolute_source(text: str) -> str:
    """Returns PATH or PATH=WEIGHT with an absolute path."""
    path, weight, number = text.rpartition("=")
    if not weight or place_of(text) != text:
        return place_of(text)
    return derive(text, f"{place_of(derive(text, path))}={number}")


def write_run(run: Run, file: Path) -> None:
    """Writes `run` as JSON; a crash leaves the old file or the new one."""
    write_atomically(file, json.dumps(run_to_dict(run), indent=1) + "\n")


def run_from_dict(document: dict[str, Any], origin: str) -> Run:
    """Returns the run of `run_to_dict`, read from the file `origin`.

    Raises ConfigError naming an unknown or ill-typed field, and a name of code that a file may not
    choose (`trust`).
    """
    _check_values(document, origin)
    rest = foreign(document, origin)
    model = dict(rest.pop("model", {}))
    config = find_family(model.pop("family", ""))
    types = {
        "model": config,
        "run": Run,
        "mesh": MeshShape,
        **{name: type(getattr(Run, name)) for name in _PARTS},
    }
    given = {
        "model": model,
        "run": rest,
        "mesh": rest.get("mesh") or {},
        **{n: rest.get(n, {}) for n in _PARTS},
    }
    for where, kind in types.items():
        known = [field.name for field in dataclasses.fields(kind)]
        for name in given[where]:
            if name not in known:
                raise ConfigError(f"{where}.{name}", "there is no such field", nearest(name, known))
    kinds = {field.name: field.type for field in dataclasses.fields(Run) if field.name in rest}
    fields = {name: _converted(rest[name], kind, name, origin) for name, kind in kinds.items()}
    return Run(model=_converted(model, config, "model", origin), **fields)


def _converted(value: Any, kind: Any, name: str, origin: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        truth = with_place(error, name)
        fix = "a value of the type that is expected there"
        raise ConfigError(f"the run in {origin}", truth, fix) from error


def _check_values(document: Any, origin: str) -> None:
    """Raises ConfigError for a document of the wrong form.

    A value with effects that a file may not have is refused too.
    """
    asked, wrote = f"the run in {origin}", "what training wrote"
    if not isinstance(document, dict):
        raise ConfigError(asked, "it is not an object", wrote)
    if not isinstance(document.get("mesh") or {}, dict):
        raise ConfigError(asked, "its mesh is not an object", '"mesh": {"fsdp": 8}')
    for name in ("model", *_PARTS):
        if not isinstance(document.get(name, {}), dict):
            raise ConfigError(asked, f"its {name} is not an object", wrote)
    name = document.get("name", "run")
    if not isinstance(name, str):
        raise ConfigError(asked, "its name is not text", wrote)
    if not name.isprintable() or "/" in name or name.startswith("."):
        raise ConfigError(asked, f"its name {name[:80]!r} cannot name a folder", '"name": "run"')
    options = document.get("training", {}).get("compiler_options", [])
    if not isinstance(options, list | tuple):
        truth = f"its training.compiler_options is {options!r}, not a list"
        raise ConfigError(asked, truth, '"compiler_options": ["auto"]')
    for option in options:
        if _WRITES.search(str(option).partition("=")[0]):
            fix = (
                f"--training.compiler-options {option} on the command line, and no such option "
                f"in the file"
            )
            raise ConfigError(
                f"the compiler option {option!r} of {origin}", "it makes XLA write files", fix
            )


def read_unique_json(file: Path, largest: int = SMALL) -> Any:
    """Returns the JSON value in a file.

    Raises OSError, and ValueError also where an object has a name twice.
    """
    return parse_document(read_text(file, largest), unique_object)


def read_run(file: Path) -> Run:
    """Reads a Run. Raises ConfigError where the file is missing or is not a run."""
    try:
        document = read_unique_json(file)
    except (OSError, ValueError) as error:
        raise by_class(
            error,
            ConfigError(
                f"run file {file}",
                f"it cannot be read: {reason_of(error)}",
                "the run.json of an output folder",
            ),
        ) from error
    return run_from_dict(document, str(file))


def run_in_folder(folder: Path) -> Run:
    """Reads the Run of an output folder. Raises CheckpointError where it has none."""
    folder = path_of(folder)
    if not (folder / "run.json").is_file():
        kind = find_path_kind(str(folder))
        fix = "the output folder of a run"
        if kind is not None:
            fix = f"{kind.weights}, as it is {kind.summary}"
        raise CheckpointError(f"the run in {folder}", "it has no run.json", fix)
    try:
        check_inside(
            folder, [folder / "run.json", folder / "tokenizer.json", folder / "checkpoints"]
        )
    except ValueError as error:
        raise CheckpointError(
            f"the run in {folder}", str(error), "a folder whose files are in it"
        ) from error
    return read_run(folder / "run.json")

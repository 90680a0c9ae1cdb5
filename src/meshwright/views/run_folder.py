"""Output folders of runs, read as data while they grow: metrics, events, configuration, samples.

Nothing here runs code that a folder names, and a file that is a link out of its folder is left out.
"""

import array
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import check_inside, parse_json, read_json, step_of
from meshwright.errors import ConfigError

_LONGEST = 2**20
"""Most bytes of a line; a sample has a few thousand."""
_LARGEST = 64 * 2**20
"""Most bytes that are read at a time."""
_DOCUMENTS = ("run.json", "foresight.json", "profile.json")


@dataclasses.dataclass
class Curve:
    """Values of one metric by step, in the order of the file."""

    steps: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    values: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    """NaN where the file has null: a loss that was not finite."""

    def thinned(self, most: int) -> tuple[list[float], list[float]]:
        """Returns at most about `most` points: of each stretch its first, least and greatest, and the very last."""
        count = len(self.steps)
        if count <= most:
            return list(self.steps), list(self.values)
        kept: set[int] = {count - 1}
        stretches = max(1, most // 3)
        for n in range(stretches):
            first, end = n * count // stretches, (n + 1) * count // stretches
            finite = [i for i in range(first, end) if math.isfinite(self.values[i])]
            kept.add(first)
            if finite:
                kept |= {
                    min(finite, key=self.values.__getitem__),
                    max(finite, key=self.values.__getitem__),
                }
        order = sorted(kept)
        return [self.steps[i] for i in order], [self.values[i] for i in order]


class _LinesFile:
    """A file of JSON lines that another process appends to, and now and then writes anew."""

    def __init__(self, file: Path):
        self._file, self._offset, self._identity = file, 0, (0, 0)

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Returns whether the file was written anew since the last call, and the objects of its new lines."""
        try:
            check_inside(self._file.parent, [self._file])
            descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError):
            anew, self._offset, self._identity = self._offset > 0, 0, (0, 0)
            return anew, []
        with open(descriptor, "rb") as opened:
            status = os.fstat(opened.fileno())
            identity = (status.st_dev, status.st_ino)
            anew = identity != self._identity or status.st_size < self._offset
            if anew:
                self._offset, self._identity = 0, identity
            opened.seek(self._offset)
            content = opened.read(_LARGEST)
        complete = content[: content.rfind(b"\n") + 1]
        if not complete and len(content) > _LONGEST:
            complete = content  # not lines at all
        self._offset += len(complete)
        found = []
        for line in complete.split(b"\n"):
            if line.strip() and len(line) <= _LONGEST:
                try:
                    found.append(parse_json(line.decode("utf-8", "replace")))
                except ValueError:
                    continue  # damaged
        return anew, [value for value in found if isinstance(value, dict)]


class RunFolder:
    """One output folder. `refresh` reads what is new in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = folder.resolve().name
        self.curves: dict[str, Curve] = {}
        self.events: list[dict[str, Any]] = []
        self._metrics, self._log = (
            _LinesFile(folder / "metrics.jsonl"),
            _LinesFile(folder / "events.jsonl"),
        )

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        anew, lines = self._metrics.read()
        if anew:
            self.curves = {}
        for line in lines:
            step = step_of(line)
            line.pop("step", None)
            if step is None:
                continue
            for name, value in line.items():
                # The writer has null for what is not finite; a number that is neither comes from elsewhere.
                number = math.nan if value is None else real(value)
                if number is not None and name != "step":
                    curve = self.curves.setdefault(name, Curve())
                    curve.steps.append(step)
                    curve.values.append(number)
        anew, lines = self._log.read()
        lines = [line for line in lines if step_of(line) is not None]
        self.events = lines if anew else [*self.events, *lines]

    @property
    def version(self) -> tuple[Any, ...]:
        """Numbers that change when what is shown does."""
        found: list[tuple[int, ...]] = []
        for name in ("metrics.jsonl", "events.jsonl", *_DOCUMENTS):
            try:
                status = (self.folder / name).stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append((0,))
        return tuple(found)

    def document(self, name: str) -> dict[str, Any]:
        """Returns a JSON object of the folder; empty where there is none, or it is damaged."""
        try:
            check_inside(self.folder, [self.folder / name])
            value = read_json(self.folder / name)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def bad_steps(self) -> list[tuple[int, str]]:
        """Returns the steps with a folder of evidence, and the reason that each gives."""
        found = []
        for folder in sorted(self.folder.glob("evidence-step-*")):
            text = folder.name.removeprefix("evidence-step-").partition(".")[0]
            if text.isdigit():
                record = self.document(f"{folder.name}/metrics.json")
                found.append((int(text), str(record.get("reason", ""))))
        return sorted(found)


def real(value: Any) -> float | None:
    """Returns a finite JSON number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = math.nan
    with contextlib.suppress(OverflowError):
        number = float(value)
    return number if math.isfinite(number) else None


def objects(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the JSON objects in a list of a document; none where it has no such list."""
    rows = document.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list | tuple) else []


def open_folders(paths: Iterable[Path]) -> list[RunFolder]:
    """Opens output folders. Raises ConfigError for one that has neither a Run nor metrics."""
    folders = []
    for path in paths:
        if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl")):
            truth = (
                "it has no run.json and no metrics.jsonl"
                if path.is_dir()
                else "there is no such folder"
            )
            raise ConfigError(
                f"view {path}", truth, "the output folder of a training, OUT of train --out OUT"
            )
        folders.append(RunFolder(path))
        folders[-1].refresh()
    return folders


def flat_fields(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the fields of nested JSON values under dotted names, each as text; a mesh is one field."""
    found: dict[str, str] = {}
    for name, value in record.items():
        if name == "mesh" and isinstance(value, Mapping):  # over one slice, no axis crosses slices
            crossed = value.get("slices", 1) != 1
            degrees = [
                f"{a}={n}"
                for a, n in value.items()
                if n not in (1, None) and (crossed or a != "dcn_axis")
            ]
            found[f"{prefix}{name}"] = ",".join(degrees) or "data=1"
        elif isinstance(value, Mapping):
            found |= flat_fields(value, f"{prefix}{name}.")
        else:
            text = (
                value if isinstance(value, str) else "none" if value is None else json.dumps(value)
            )
            found[f"{prefix}{name}"] = text
    return found

"""Conversions into a new folder: written beside it, resumable, moved when whole, with checksums."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.documents import LARGE, check_inside, read_json, read_text
from meshwright.errors import ConfigError, WeightsError

SUMS = "SHA256SUMS"
"""File of checksums, as `sha256sum --check` reads it."""
_JOURNAL = "progress.json"
_CHUNK = 8 * 2**20


class Journal:
    """A folder under construction: `OUT.partial`, with the tensors that are done."""

    def __init__(self, out: Path, source: Any):
        """Starts, or goes on where an earlier conversion of the same `source` was interrupted.

        source: JSON values that identify what is converted. Raises ConfigError where `out` exists.
        """
        if out.exists():
            raise ConfigError(f"converting into {out}", "it exists already", "a folder that does not exist yet")
        self.out, self.folder = out, out.with_name(f"{out.name}.partial")
        self._file = self.folder / _JOURNAL
        self._source = json.loads(json.dumps(source))
        self.done: dict[str, Any] = self._read()
        self.resumed = len(self.done)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self._file, LARGE)
            if found["source"] == self._source:
                return dict(found["done"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if self.folder.exists() and not self._file.is_file() and any(self.folder.iterdir()):
            raise ConfigError(
                f"converting into {self.out}", f"{self.folder} exists, and no conversion wrote it", "another folder"
            )
        # Another source, or another version of it: what is there is of no use.
        shutil.rmtree(self.folder, ignore_errors=True)
        return {}

    def add(self, name: str, value: Any) -> None:
        """Records a tensor that is on disk."""
        self.done[name] = value
        self._write()

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump({"source": self._source, "done": self.done}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)

    def commit(self) -> None:
        """Moves the whole folder to its name."""
        self._file.unlink()
        os.sync()
        self.folder.rename(self.out)


def write_sums(folder: Path) -> None:
    """Writes the checksums of the weights in `folder`."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.glob("*.safetensors"))]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, say: Callable[[str], None]) -> None:
    """Compares the files of a folder with its checksums, where it has them. Raises WeightsError where one differs."""
    if not (folder / SUMS).is_file():
        return
    try:
        check_inside(folder, [folder / SUMS])
        lines = read_text(folder / SUMS).splitlines()
    except ValueError as error:
        raise WeightsError(f"checksums of {folder}", str(error), "copy it again") from error
    for line in lines:
        expected, _, name = line.partition("  ")
        if "\0" in name or Path(name).name != name or not (folder / name).is_file():
            raise WeightsError(f"checksums of {folder}", f"{SUMS} names {name!r}, and there is no such file", "copy it")
        found = sha256(folder / name)
        if found != expected:
            raise WeightsError(
                f"reading {folder / name}", f"its SHA-256 is {found[:16]}..., and {SUMS} has {expected[:16]}...",
                "copy the file again",
            )  # fmt: skip
    say(f"checksums of {len(lines)} file{'s' if len(lines) > 1 else ''} agree")


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while part := data.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()

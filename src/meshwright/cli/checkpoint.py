"""The verb `checkpoint`: the checkpoints of a run, without devices."""

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from meshwright.checkpoint.blocks import stored_tensors
from meshwright.checkpoint.inspect import find_checkpoints, list_checkpoints, verify_checkpoint
from meshwright.checkpoint.manifest import manifest_of
from meshwright.checkpoint.move import move_checkpoints, plan_move
from meshwright.cli.output import write, write_json, write_table
from meshwright.cli.parse import parse
from meshwright.errors import CheckpointError, ConfigError, nearest
from meshwright.ranges import NonNegativeInt, Ranged
from meshwright.reporters.console import open_console
from meshwright.runs.run_file import run_to_dict
from meshwright.storage.paths import path_of
from meshwright.trainer.lock import locked
from meshwright.views.blocks import Column, Table
from meshwright.views.run_folder import flat_fields
from meshwright.views.terminal import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FolderOptions(Ranged):
    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOptions(_FolderOptions):
    """List the checkpoints in the output folder OUT, also those that are incomplete."""

    def act(self) -> int:
        """Lists; returns the exit code."""
        listed = list_checkpoints(find_checkpoints(self.out))
        if self.json:
            write_json({"checkpoints": [dataclasses.asdict(row) for row in listed]})
            return 0
        columns = [
            Column("step", cell="step"),
            Column("samples", "integer", "samples"),
            Column("tensors", "integer", lambda row: None if row.samples is None else row.tensors),
            Column("bytes", "bytes", "bytes"),
            Column("written", cell=lambda row: _written_at(row.written)),
            Column("state", cell="state"),
        ]
        print_table(open_console(), Table.of(listed, columns, printed=None))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(_FolderOptions):
    """Show what a checkpoint of the output folder OUT holds: its place, its data, its Run, every tensor."""

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default the last."""

    def act(self) -> int:
        """Prints the manifest; returns the exit code."""
        manifest = manifest_of(find_checkpoints(self.out), self.at)
        if self.json:
            write_json(manifest.to_dict())
            return 0
        write(f"step {manifest.step}, {manifest.cursor:,} samples read\n")
        for first, count in manifest.skipped:
            write(f"left out: samples {first:,} to {first + count - 1:,}\n")
        corpus = manifest.corpus or {"data": "no fingerprint: the weights were converted"}
        fields = {**flat_fields(corpus), **flat_fields({"run": run_to_dict(manifest.run)})}
        columns = [
            Column("tensor", cell=lambda item: item[0]),
            Column("type and shape", cell=lambda item: f"{item[1].dtype}{list(item[1].shape)}"),
            Column("fingerprint", cell=lambda item: "".join(f"{word:08x}" for word in item[1].fingerprint)),
        ]
        console = open_console()
        print_table(console, Table([Column("field"), Column("value")], list(fields.items()), printed=None))
        console.print()
        print_table(console, Table.of(manifest.tensors.items(), columns, printed=None))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(_FolderOptions):
    """Read every tensor of the checkpoints in OUT and compare its fingerprint; exit code 4 where one is damaged."""

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default all of them."""

    def act(self) -> int:
        """Compares; returns the exit code."""
        folder = find_checkpoints(self.out)
        steps = [self.at] if self.at is not None else [row.step for row in list_checkpoints(folder)]
        found: dict[str, list[str]] = {}
        for step in steps:
            try:
                damaged = verify_checkpoint(stored_tensors(folder, step), _say)
            except CheckpointError as error:
                damaged = [error.truth]
            found[str(step)] = damaged
            if not self.json:
                write(f"step {step}: {'; '.join(damaged) or 'every tensor is as it was saved'}\n")
        if self.json:
            write_json({"damaged": found})
        return CheckpointError.exit_code if any(found.values()) else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoveOptions(_FolderOptions):
    """Move the checkpoints and files of the run in OUT to TARGET: a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.
    Every copy is read back and compared before the source is deleted; an interrupted move continues."""

    target: Annotated[Path, tyro.conf.Positional]
    """Folder to move to."""
    at: NonNegativeInt | None = None
    """Step of the only checkpoint to move; by default all of them."""
    copy: bool = False
    """Leave the source as it is."""
    dry_run: bool = False
    """Show what would be moved, and move nothing."""

    def act(self) -> int:
        """Moves, or shows what would be moved; returns the exit code."""
        source, target = path_of(self.out), path_of(self.target)
        if self.dry_run:
            rows = plan_move(source, target, self.at)
        else:
            find_checkpoints(source)
            with locked(source), locked(target):
                rows = move_checkpoints(source, target, self.at, then="keep" if self.copy else "delete", say=_say)
        if self.json:
            write_json({"dry_run": self.dry_run, "moved": [dataclasses.asdict(row) for row in rows]})
            return 0
        copied = "would be" if self.dry_run else "is"
        verbs = {"copy": copied, "there": "is already", "left out": "stays: not whole, not"}
        columns = [
            Column("part", cell="what"),
            Column("files", "integer", "files"),
            Column("bytes", "bytes", "bytes"),
            Column(f"in {target}", cell=lambda row: verbs[row.action]),
        ]
        print_table(open_console(), Table.of(rows, columns, printed=None))
        return 0


ACTIONS = {
    "list": ListOptions,
    "inspect": InspectOptions,
    "verify": VerifyOptions,
    "move": MoveOptions,
}


def main(args: Sequence[str]) -> int:
    """Runs `meshwright checkpoint list|inspect|verify|move`. Raises CheckpointError where there is none."""
    if not args or args[0] in ("-h", "--help"):
        write(f"usage: meshwright checkpoint {'|'.join(ACTIONS)} OUT [options]\n\n")
        summaries = {name: str(kind.__doc__) for name, kind in ACTIONS.items()}
        write_table(summaries, shutil.get_terminal_size((120, 24)).columns)
        return 0
    if args[0] not in ACTIONS:
        raise ConfigError(f"meshwright checkpoint {args[0]}", "there is no such action", nearest(args[0], ACTIONS))
    # Fingerprints are all that is computed.
    jax.config.update("jax_platforms", "cpu")
    options: Any = parse(ACTIONS[args[0]], f"checkpoint {args[0]}", args[1:])
    code: int = options.act()
    return code


def _written_at(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _say(line: str) -> None:
    print(line, file=sys.stderr)

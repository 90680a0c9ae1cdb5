"""The verb `checkpoint`: the checkpoints of a run, without devices."""

import abc
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from meshwright.api.verb import Call, Outcome
from meshwright.checkpoint.blocks import stored_tensors
from meshwright.checkpoint.inspect import find_checkpoints, list_checkpoints, verify_checkpoint
from meshwright.checkpoint.manifest import Manifest, manifest_of
from meshwright.checkpoint.move import move_checkpoints, plan_move
from meshwright.errors import CheckpointError
from meshwright.ranges import NonNegativeInt, Ranged
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

    def act(self, call: Call) -> Outcome:
        """Runs the action without devices. Raises CheckpointError where there is no checkpoint."""
        # Fingerprints are all that is computed.
        jax.config.update("jax_platforms", "cpu")
        return self.outcome()

    @abc.abstractmethod
    def outcome(self) -> Outcome:
        """Returns the result of the action."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOptions(_FolderOptions):
    """List the checkpoints in the output folder OUT, also those that are incomplete."""

    def outcome(self) -> Outcome:
        """Lists."""
        listed = list_checkpoints(find_checkpoints(self.out))
        columns = [
            Column("step", cell="step"),
            Column("samples", "integer", "samples"),
            Column("tensors", "integer", lambda row: None if row.samples is None else row.tensors),
            Column("bytes", "bytes", "bytes"),
            Column("written", cell=lambda row: _written_at(row.written)),
            Column("state", cell="state"),
        ]
        table = Table.of(listed, columns, printed=None)
        record = {"checkpoints": [dataclasses.asdict(row) for row in listed]}
        return Outcome(lambda console: print_table(console, table), record)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(_FolderOptions):
    """Show what a checkpoint of the output folder OUT holds: its place, its data, its Run, every
    tensor.
    """

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default the last."""

    def outcome(self) -> Outcome:
        """Reads the manifest."""
        manifest = manifest_of(find_checkpoints(self.out), self.at)
        lines = [f"step {manifest.step}, {manifest.cursor:,} samples read"]
        lines += [
            f"left out: samples {first:,} to {first + count - 1:,}"
            for first, count in manifest.skipped
        ]
        corpus = manifest.corpus or {"data": "no fingerprint: the weights were converted"}
        fields = {**flat_fields(corpus), **flat_fields({"run": run_to_dict(manifest.run)})}
        show = functools.partial(_print_checkpoint, lines, fields, manifest)
        return Outcome(show, manifest.to_dict())


def _print_checkpoint(
    lines: Sequence[str], fields: Mapping[str, str], manifest: Manifest, console: Console
) -> None:
    """Prints a checkpoint: its place, a table of fields, and a table of tensors."""
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    table = Table([Column("field"), Column("value")], list(fields.items()), printed=None)
    print_table(console, table)
    rows = []
    for name, tensor in manifest.tensors.items():
        fingerprint = "".join(f"{word:08x}" for word in tensor.fingerprint)
        rows.append((name, f"{tensor.dtype}{list(tensor.shape)}", fingerprint))
    columns = [Column("tensor"), Column("type and shape"), Column("fingerprint")]
    console.print()
    print_table(console, Table(columns, rows, printed=None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(_FolderOptions):
    """Read every tensor of the checkpoints in OUT and compare its fingerprint; exit code 4 where
    one is damaged.
    """

    at: NonNegativeInt | None = None
    """Step of the checkpoint; by default all of them."""

    def outcome(self) -> Outcome:
        """Reads and compares."""
        folder = find_checkpoints(self.out)
        steps = [self.at] if self.at is not None else [row.step for row in list_checkpoints(folder)]
        found: dict[str, list[str]] = {}
        for step in steps:
            try:
                damaged = verify_checkpoint(stored_tensors(folder, step), _say)
            except CheckpointError as error:
                damaged = [error.truth]
            found[str(step)] = damaged
        shown = (
            f"step {step}: {'; '.join(bad) or 'every tensor is as it was saved'}\n"
            for step, bad in found.items()
        )
        return Outcome(
            "".join(shown),
            {"damaged": found},
            CheckpointError.exit_code if any(found.values()) else 0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoveOptions(_FolderOptions):
    """Move the checkpoints and files of the run in OUT to TARGET: a folder, gs://BUCKET/FOLDER or
    s3://BUCKET/FOLDER. Every copy is read back and compared before the source is deleted; an
    interrupted move continues.
    """

    target: Annotated[Path, tyro.conf.Positional]
    """Folder to move to."""
    at: NonNegativeInt | None = None
    """Step of the only checkpoint to move; by default all of them."""
    copy: bool = False
    """Leave the source as it is."""
    dry_run: bool = False
    """Show what would be moved, and move nothing."""

    def outcome(self) -> Outcome:
        """Moves, or shows what would be moved."""
        source, target = path_of(self.out), path_of(self.target)
        if self.dry_run:
            rows = plan_move(source, target, self.at)
        else:
            find_checkpoints(source)
            with locked(source), locked(target):
                rows = move_checkpoints(
                    source, target, self.at, then="keep" if self.copy else "delete", say=_say
                )
        copied = "would be" if self.dry_run else "is"
        verbs = {"copy": copied, "there": "is already", "left out": "stays: not whole, not"}
        columns = [
            Column("part", cell="what"),
            Column("files", "integer", "files"),
            Column("bytes", "bytes", "bytes"),
            Column(f"in {target}", cell=lambda row: verbs[row.action]),
        ]
        table = Table.of(rows, columns, printed=None)
        record = {"dry_run": self.dry_run, "moved": [dataclasses.asdict(row) for row in rows]}
        return Outcome(lambda console: print_table(console, table), record)


ACTIONS = {
    "list": ListOptions,
    "inspect": InspectOptions,
    "verify": VerifyOptions,
    "move": MoveOptions,
}


def _written_at(seconds: float | None) -> str | None:
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _say(line: str) -> None:
    print(line, file=sys.stderr)

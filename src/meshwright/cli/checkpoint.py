"""The verb `checkpoint`: the checkpoints of a run, without devices."""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.markup import escape

from meshwright.checkpoint.inspect import (
    compare_checkpoints,
    find_checkpoints,
    list_checkpoints,
    verify_checkpoint,
)
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.restore import manifest_of
from meshwright.cli.output import write, write_json, write_table
from meshwright.cli.parse import parse
from meshwright.errors import CheckpointError, ConfigError, nearest
from meshwright.formatting import format_bytes
from meshwright.report.console import open_console
from meshwright.runs.run_file import run_to_dict
from meshwright.storage.paths import path_of
from meshwright.views.plain_table import plain_table
from meshwright.views.run_folder import flat_fields

_SHOWN = 20
"""Tensors that `diff` shows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the checkpoints in the output folder OUT, those that are not whole included."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show what a checkpoint of the output folder OUT holds: its place, its data, its Run, every tensor."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    at: int | None = None
    """Step of the checkpoint; by default the last."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every tensor of the checkpoints in OUT and compare its fingerprint; exit code 4 where one is damaged."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    at: int | None = None
    """Step of the checkpoint; by default all of them."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Compare two checkpoints, of one run or of two: their Runs, their data, and every tensor."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    other: Annotated[Path | None, tyro.conf.Positional] = None
    """Output folder of the other; by default the same."""
    at: int | None = None
    """Step of the first; by default the last."""
    other_at: int | None = None
    """Step of the second; by default the last, or in the same folder the one before the first."""
    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoveOptions:
    """Move the checkpoints and files of the run in OUT to TARGET: a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.
    Every copy is read back and compared before the source is deleted; a move that was cut off goes on."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    target: Annotated[Path, tyro.conf.Positional]
    """Folder to move to."""
    at: int | None = None
    """Step of the only checkpoint to move; by default all of them."""
    copy: bool = False
    """Leave the source as it is."""
    dry_run: bool = False
    """Show what would be moved, and move nothing."""
    json: bool = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright checkpoint list|inspect|verify|diff|move`. Raises CheckpointError where there is none."""
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "list": _list, "inspect": _inspect, "verify": _verify, "diff": _diff, "move": _move
    }  # fmt: skip
    if not args or args[0] in ("-h", "--help"):
        write("usage: meshwright checkpoint list|inspect|verify|diff|move OUT [options]\n\n")
        kinds = {"list": ListOptions, "inspect": InspectOptions, "verify": VerifyOptions, "diff": DiffOptions,
                 "move": MoveOptions}  # fmt: skip
        write_table(
            {name: str(kind.__doc__) for name, kind in kinds.items()}, shutil.get_terminal_size((120, 24)).columns
        )
        return 0
    if args[0] not in actions:
        raise ConfigError(f"meshwright checkpoint {args[0]}", "there is no such action", nearest(args[0], actions))
    # Fingerprints are all that is computed.
    jax.config.update("jax_platforms", "cpu")
    return actions[args[0]](args[1:])


def _list(args: Sequence[str]) -> int:
    options = parse(ListOptions, "checkpoint list", args)
    listed = list_checkpoints(find_checkpoints(options.out))
    if options.json:
        write_json({"checkpoints": [dataclasses.asdict(row) for row in listed]})
        return 0
    right = ("step", "samples", "tensors", "bytes", "written")
    table = plain_table(*right, "state", right=right)
    for row in listed:
        counts = ("", "") if row.samples is None else (f"{row.samples:,}", str(row.tensors))
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        table.add_row(str(row.step), *counts, format_bytes(row.bytes), date, escape(row.state))
    open_console().print(table)
    return 0


def _inspect(args: Sequence[str]) -> int:
    options = parse(InspectOptions, "checkpoint inspect", args)
    manifest = manifest_of(find_checkpoints(options.out), options.at)
    if options.json:
        write_json(manifest.to_dict())
        return 0
    write(f"step {manifest.step}, {manifest.cursor:,} samples read\n")
    for part in manifest.skipped:
        write(f"left out: samples {part[0]:,} to {part[0] + part[1] - 1:,}\n")
    corpus = manifest.corpus or {"data": "no fingerprint: written by an earlier version, or converted"}
    fields = plain_table("field", "value", unwrapped=("field",))
    for name, text in {**flat_fields(corpus), **flat_fields({"run": run_to_dict(manifest.run)})}.items():
        fields.add_row(escape(name), escape(text))
    tensors = plain_table("tensor", "type and shape", "fingerprint", unwrapped=("tensor",))
    for name, record in manifest.tensors.items():
        fingerprint = "".join(f"{word:08x}" for word in record.fingerprint)
        tensors.add_row(escape(name), escape(f"{record.dtype}{list(record.shape)}"), fingerprint)
    console = open_console()
    console.print(fields)
    console.print()
    console.print(tensors)
    return 0


def _verify(args: Sequence[str]) -> int:
    options = parse(VerifyOptions, "checkpoint verify", args)
    folder = find_checkpoints(options.out)
    steps = [options.at] if options.at is not None else [row.step for row in list_checkpoints(folder)]
    found: dict[str, list[str]] = {}
    for step in steps:
        try:
            damaged = verify_checkpoint(folder, manifest_of(folder, step), lambda line: print(line, file=sys.stderr))
        except CheckpointError as error:
            damaged = [error.truth]
        found[str(step)] = damaged
        if not options.json:
            write(f"step {step}: {'every tensor is as it was saved' if not damaged else '; '.join(damaged)}\n")
    if options.json:
        write_json({"damaged": found})
    return CheckpointError.exit_code if any(found.values()) else 0


def _diff(args: Sequence[str]) -> int:
    options = parse(DiffOptions, "checkpoint diff", args)
    first = find_checkpoints(options.out)
    second = first if options.other is None else find_checkpoints(options.other)
    manifest = manifest_of(first, options.at)
    other_at = options.other_at
    if other_at is None and second == first:
        earlier = [row.step for row in list_checkpoints(first) if row.step < manifest.step and row.state == "whole"]
        if not earlier:
            raise CheckpointError(
                f"comparing the checkpoint of step {manifest.step} with the one before it",
                "there is none",
                "--other-at",
            )
        other_at = earlier[-1]
    other = manifest_of(second, other_at)
    changed, tensors = compare_checkpoints((second, other), (first, manifest))
    if options.json:
        document: dict[str, Any] = {"from": _place(second, other), "to": _place(first, manifest), "fields": changed}
        write_json({**document, "tensors": {row.name: row.summary for row in tensors}})
        return 0
    write(f"{second / str(other.step)} -> {first / str(manifest.step)}\n")
    for line in changed:
        write(f"{line}\n")
    for row in tensors[:_SHOWN]:
        write(f"{row.name}: {row.summary}\n")
    if len(tensors) > _SHOWN:
        write(f"and {len(tensors) - _SHOWN} more tensors (--json has all)\n")
    if not tensors:
        write("every tensor is equal\n")
    return 0


def _move(args: Sequence[str]) -> int:
    from meshwright.checkpoint.move import move_checkpoints, plan_move
    from meshwright.trainer.lock import locked

    options = parse(MoveOptions, "checkpoint move", args)
    source, target = path_of(options.out), path_of(options.target)
    if options.dry_run:
        rows = plan_move(source, target, options.at)
    else:
        find_checkpoints(source)
        with locked(source), locked(target):
            rows = move_checkpoints(
                source, target, options.at, then="keep" if options.copy else "delete",
                say=lambda line: print(line, file=sys.stderr),
            )  # fmt: skip
    if options.json:
        write_json({"dry_run": options.dry_run, "moved": [dataclasses.asdict(row) for row in rows]})
        return 0
    verbs = {
        "copy": "would be" if options.dry_run else "is",
        "there": "is already",
        "left out": "stays: not whole, not",
    }
    table = plain_table("part", "files", "bytes", f"in {target}", right=("files", "bytes"), unwrapped=("part",))
    for row in rows:
        table.add_row(escape(row.what), str(row.files), format_bytes(row.bytes), verbs[row.action])
    open_console().print(table)
    return 0


def _place(folder: Path, manifest: Manifest) -> str:
    return str(folder / str(manifest.step))

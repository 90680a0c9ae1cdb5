"""The verb `checkpoint`: the checkpoints of a run, without devices."""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

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
from meshwright.runs.write_run import run_to_dict

_SHOWN = 20
"""Tensors that `diff` shows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the checkpoints in the output folder OUT, those that are not whole included."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show what a checkpoint of the output folder OUT holds: its place, its data, its Run, every tensor."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    at: int | None = None
    """Step of the checkpoint; by default the last."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every tensor of the checkpoints in OUT and compare its fingerprint; exit code 4 where one is damaged."""

    out: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    at: int | None = None
    """Step of the checkpoint; by default all of them."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
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
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright checkpoint list|inspect|verify|diff`. Raises CheckpointError where there is none."""
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "list": _list, "inspect": _inspect, "verify": _verify, "diff": _diff
    }  # fmt: skip
    if not args or args[0] in ("-h", "--help"):
        write("usage: meshwright checkpoint list|inspect|verify|diff OUT [options]\n\n")
        kinds = {"list": ListOptions, "inspect": InspectOptions, "verify": VerifyOptions, "diff": DiffOptions}
        write_table({name: str(kind.__doc__) for name, kind in kinds.items()}, 120)
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
    for row in listed:
        samples = "" if row.samples is None else f"{row.samples:>12,} samples  {row.tensors:>5} tensors  "
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        write(f"step {row.step:>8}  {samples}{format_bytes(row.bytes):>10}  {date}  {row.state}\n")
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
    for name, value in (
        manifest.corpus or {"data": "no fingerprint: written by an earlier version, or converted"}
    ).items():
        write(f"{name}: {value}\n")
    for section, value in run_to_dict(manifest.run).items():
        write(f"run.{section}: {value}\n")
    for name, record in manifest.tensors.items():
        fingerprint = "".join(f"{word:08x}" for word in record.fingerprint)
        write(f"{name}  {record.dtype}{list(record.shape)}  {fingerprint}\n")
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


def _place(folder: Path, manifest: Manifest) -> str:
    return str(folder / str(manifest.step))

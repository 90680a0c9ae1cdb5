"""Restores of checkpoints: manifests read and checked, tensors read and verified by their fingerprints."""

import operator
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.checkpoint.blocks import StoredTensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import abstract_in_layer_order, to_row_order
from meshwright.checkpoint.manifest import FORMAT, Manifest, TensorRecord, seal
from meshwright.checkpoint.steps import STARTED, all_steps, committed_steps, partial_steps
from meshwright.checkpoint.writer import ShardWriter
from meshwright.documents import LARGE, check_inside, read_json
from meshwright.errors import CheckpointError, StorageError
from meshwright.runs.run_file import run_from_dict
from meshwright.sharding.params import Tree, named_leaves
from meshwright.step.device_run import DeviceRun, State
from meshwright.storage.move import move_tree
from meshwright.storage.paths import in_bucket, store_of

_FLOATING = ("float32", "bfloat16")


def manifest_from_dict(data: dict[str, Any], origin: str) -> Manifest:
    """Returns the manifest of `Manifest.to_dict`, read from the file `origin`.

    Raises KeyError, TypeError, ValueError or ConfigError for anything else.
    """
    found = data["format"]
    if found not in (1, FORMAT):
        raise ValueError(f"it is of format {found}, and this version reads {FORMAT}")
    # A bit that changes 2 into another format is caught here too: only the old format has no checksum.
    if (found == FORMAT or "checksum" in data) and seal(data) != data:
        raise ValueError("it is not what was saved: its checksum differs")
    tensors = {name: _read_record(record) for name, record in data["tensors"].items()}
    skipped = tuple((operator.index(first), operator.index(count)) for first, count in data.get("skipped", ()))
    run = run_from_dict(data["run"], origin)
    return Manifest(int(data["step"]), int(data["cursor"]), run, tensors, data.get("data"), data.get("corpus"), skipped)


def _read_record(record: dict[str, Any]) -> TensorRecord:
    first, second = record["fingerprint"]
    shape = tuple(operator.index(size) for size in record["shape"])
    if min(shape, default=0) < 0:
        raise ValueError(f"a tensor of shape {list(shape)}")
    return TensorRecord(shape, str(record["dtype"]), (int(first), int(second)))


def read_manifest(step_folder: Path) -> Manifest:
    """Reads the manifest in the folder of one checkpoint.

    Raises OSError, ValueError, KeyError, TypeError, AttributeError or ConfigError where it is none, or a link leaves
    the folder.
    """
    check_inside(step_folder.parent, [step_folder])
    if not in_bucket(step_folder):  # a bucket has no links
        _check_tree(step_folder)
    file = step_folder / "manifest" / "metadata"
    return manifest_from_dict(read_json(file, LARGE), str(file))


def check_tensors(manifest: Manifest, expected: dict[str, Any], params: Tree) -> None:
    """Raises CheckpointError naming the first of the `expected` tensors whose name, shape or type differs.

    Tables that differ only in the padding of the vocabulary agree. expected: arrays or ShapeDtypeStructs by dotted
    name, with one row per layer. params: descriptions of the model's parameters.
    """
    padded = {name: p.rows for name, p in named_leaves(params).items() if p.rows is not None}
    # Parameters first: a parameter that differs makes its optimizer state differ too.
    for name, x in sorted(expected.items(), key=lambda item: not item[0].startswith("params.")):
        record = manifest.tensors.get(name)
        if record is None:
            raise _mismatch(manifest, f"the model has a tensor {name!r}, and the checkpoint does not")
        rows = next((rows for param, rows in padded.items() if name.endswith(f".{param}")), None)
        other_padding = (
            rows is not None and record.shape[1:] == x.shape[1:] and min(record.shape[0], x.shape[0]) >= rows
        )
        if record.dtype != str(x.dtype) or (record.shape != x.shape and not other_padding):
            raise _mismatch(
                manifest,
                f"{name!r} is {record.dtype}{list(record.shape)} in the checkpoint and {x.dtype}{list(x.shape)} in "
                "the model",
            )


def check_no_other_tensors(manifest: Manifest, expected: Iterable[str]) -> None:
    """Raises CheckpointError naming the first tensor of the checkpoint that is not `expected`."""
    expected = set(expected)
    other = next((name for name in manifest.tensors if name not in expected), None)
    if other is not None:
        raise _mismatch(manifest, f"the checkpoint has a tensor {other!r}, and the model does not")


def _mismatch(manifest: Manifest, truth: str) -> CheckpointError:
    fix = "the recipe that wrote this checkpoint, or another folder"
    return CheckpointError(f"the checkpoint of step {manifest.step} for this model", truth, fix)


def manifest_of(folder: Path, step: int | None) -> Manifest:
    """Returns the manifest of a checkpoint in the folder `folder`: that of `step`, or of the last whole one.

    One that is newer and not whole is left out with a line on standard error. Raises CheckpointError.
    """
    step = _choose(folder, step)
    try:
        return read_manifest(folder / str(step))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, step, "its manifest cannot be read", error) from error


def _choose(folder: Path, step: int | None) -> int:
    steps, partial = committed_steps(folder), partial_steps(folder)
    if step in partial:
        raise damaged(folder, step, "it is not whole: its writing or copying was cut off", None)
    if not steps:
        raise CheckpointError(f"a checkpoint in {folder}", "none was committed there", "another folder")
    if step is None:
        for newer in (s for s in partial if s > steps[-1]):
            print(f"{folder / str(newer)}: left out, it is not whole; step {steps[-1]} is taken", file=sys.stderr)
        return steps[-1]
    if step not in steps:
        raise CheckpointError(
            f"the checkpoint of step {step}",
            "the folder has those of steps " + ", ".join(map(str, steps)),
            f"--at {steps[-1]}",
        )
    return step


def damaged(folder: Path, step: int, damage: str, error: Exception | None) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be read, with the one before it."""
    earlier = [s for s in committed_steps(folder) if s < step]
    detail = f" ({type(error).__name__}: {str(error).splitlines()[0][:160]})" if error and str(error) else ""
    return CheckpointError(
        f"the checkpoint of step {step} in {folder}",
        damage + detail,
        f"the one before it: --at {earlier[-1]}" if earlier else "no earlier checkpoint exists: start a new run",
    )


def saved_fields(state: State) -> dict[str, Any]:
    """Fields of the state that a checkpoint has; `healthy` is not saved, because only a healthy state is."""
    fields = {"step": state.step, "params": state.params, "optimizer": state.optimizer}
    return fields | ({"variables": state.variables} if state.variables else {})


def named_tensors(state: State) -> dict[str, Any]:
    """Returns the tensors that a checkpoint of `state` has, by dotted name."""
    return named_leaves(saved_fields(state))


def restore_state(writer: ShardWriter, folder: Path, manifest: Manifest, device_run: DeviceRun) -> State:
    """Returns the verified state of a checkpoint. writer: of `folder`."""
    expected = named_tensors(device_run.abstract)
    if "step" not in manifest.tensors:
        truth = "it has weights alone, and no optimizer state: they were converted"
        fix = f"--init-from {folder.parent} and another --out, which starts at step 0"
        raise CheckpointError(f"resuming from {folder}", truth, fix)
    tensors = _read_tensors(writer, folder, manifest, expected, device_run, exactly=True)
    healthy = jax.device_put(np.ones((), np.bool_), device_run.abstract.healthy.sharding)
    tree = jax.tree.unflatten(jax.tree.structure(saved_fields(device_run.abstract)), list(tensors.values()))
    return State(healthy=healthy, **tree)


def restore_params(writer: ShardWriter, folder: Path, manifest: Manifest, device_run: DeviceRun) -> Tree:
    """Returns the verified parameters of a checkpoint, converted to the type of `device_run` after that."""
    wanted = {name: x for name, x in named_tensors(device_run.abstract).items() if name.startswith("params.")}
    types = {name: np.dtype(t.dtype) for name, t in manifest.tensors.items() if t.dtype in _FLOATING}
    expected = {name: x.update(dtype=types.get(name, x.dtype)) for name, x in wanted.items()}
    tensors = _read_tensors(writer, folder, manifest, expected, device_run)
    converted = [x.astype(wanted[name].dtype) for name, x in tensors.items()]
    return jax.tree.unflatten(jax.tree.structure(device_run.abstract.params), converted)


def _read_tensors(
    writer: ShardWriter,
    folder: Path,
    manifest: Manifest,
    expected: dict[str, Any],
    device_run: DeviceRun,
    *,
    exactly: bool = False,
) -> dict[str, jax.Array]:
    """Returns the tensors of a checkpoint in the rows and shardings of `expected`, verified.

    exactly: refuses a checkpoint that has other tensors too.
    """
    abstract = abstract_in_layer_order(expected, device_run.params)
    check_tensors(manifest, abstract, device_run.params)
    if exactly:
        check_no_other_tensors(manifest, abstract)
    StoredTensors(folder / str(manifest.step), manifest).check(abstract)
    try:
        tensors = writer.restore(manifest.step, abstract)
    except StorageError:
        raise
    except Exception as error:  # TensorStore raises several types, with pages of text
        text = str(error)
        name = next((name for name in abstract if name in text), None)
        damage = "a file is damaged" if name is None else f"tensor {name!r} cannot be read"
        raise damaged(folder, manifest.step, damage, error) from error
    hashes = jax.device_get(fingerprints(tensors))
    changed = [n for n in abstract if tuple(int(v) for v in hashes[n]) != manifest.tensors[n].fingerprint]
    if changed:
        damage = f"tensor {changed[0]!r} is not what was saved ({len(changed)} of {len(abstract)} differ)"
        raise damaged(folder, manifest.step, damage, None)
    return to_row_order(tensors, expected, device_run.params)


def set_aside(folder: Path, after: int) -> None:
    """Moves checkpoints newer than `after`, whole or not, into the folder `set-aside` beside `folder`."""
    aside = folder.parent / "set-aside"
    if jax.process_index() == 0:
        for step in sorted(all_steps(folder)):
            if step > after:
                target, number = aside / str(step), 1
                while target.exists():
                    target, number = aside / f"{step}.{number}", number + 1
                if store_of(folder).renames:
                    aside.mkdir(exist_ok=True)
                    os.replace(folder / str(step), target)
                else:
                    move_tree(folder / str(step), target, last=("manifest/metadata",))
                (folder / STARTED / str(step)).unlink(missing_ok=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")


def _check_tree(folder: Path) -> None:
    """Raises ValueError naming a link in `folder` that leaves it, or an entry that is no file and no folder."""
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():  # known from the listing, without a request for each file
                    check_inside(folder, [path])
                elif entry.is_dir():
                    pending.append(path)
                elif not entry.is_file():
                    raise ValueError(f"{path.relative_to(folder)} is neither a file nor a folder")

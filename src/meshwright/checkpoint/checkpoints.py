"""Checkpoints of a training run: written in the background, committed atomically, verified
by fingerprints.

Every process writes the shards on its devices. A checkpoint is committed when the shards of all
processes are written: on a file system its folder has a temporary name (`600.tmp`) until then, and
in a bucket, which has no renames, the manifest is written last. A folder without a manifest is not
a checkpoint.

The fingerprint of every tensor is stored in the checkpoint's manifest and compared after the
restore. Fingerprints do not depend on the layout: a checkpoint written on one mesh is verified on
another, and each device reads and hashes only its own shards.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright import last_words
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.checkpoint.layer_order import (
    abstract_in_layer_order,
    permuted_in_layer_order,
    permuted_params,
    to_row_order,
)
from meshwright.checkpoint.manifest import Manifest, TensorRecord, damaged, manifest_of
from meshwright.checkpoint.steps import (
    MANIFEST,
    STARTED,
    all_steps,
    committed_steps,
    partial_steps,
    remove_checkpoint,
    unwritable,
)
from meshwright.checkpoint.tensors import (
    Shards,
    from_first_replica,
    host_shards,
    layout_of,
    read_shards,
    write_shards,
)
from meshwright.errors import (
    FOR_NOW,
    NO_ROOM,
    CheckpointError,
    MeshwrightError,
    RoomError,
    StorageError,
    UnavailableError,
    by_class,
    class_of,
    reason_of,
)
from meshwright.hardware.agreement import answer_of_the_first, choose_together
from meshwright.hardware.hosts import store
from meshwright.sharding.params import Tree, named_leaves
from meshwright.signs import NOBODY, waiting
from meshwright.step.device_run import DeviceRun
from meshwright.step.state import State
from meshwright.storage.attempts import attempt
from meshwright.storage.folder_identity import FolderIdentity
from meshwright.storage.paths import bucket_path, in_bucket, path_of
from meshwright.storage.removing import (
    remove_empty_folder,
    remove_file,
    remove_tree,
    replace_durably,
)
from meshwright.storage.transfer import move_tree
from meshwright.storage.writing import make_folder, write_atomically, write_text

_READERS = 8
"""Tensors that are read at a time."""
_BARRIER_SECONDS = 7 * 24 * 3600
"""The watchdog ends a save that stalls: how long one may take depends on its bytes and
on the store."""
_shared_saves = itertools.count()
"""Number of the next save into a shared folder;
all processes make those in the same order, others each alone."""
LAYOUT = "layout.json"
"""File of a checkpoint of a single process: which slices of the tensors it has."""
_FLOATING = ("float32", "bfloat16")


class UnreadableError(CheckpointError):
    """Checkpoint whose files a process may not open, whatever their bytes are."""


_KINDS = ("store", "for now", "request", "damage")
"""Failures to read a checkpoint.
That of a bucket is named before that of a host, and damage last."""


def _saved_fields(state: State) -> dict[str, Any]:
    """Fields of the state that a checkpoint has;
    `healthy` is not saved, because only a healthy state is."""
    fields = {"step": state.step, "params": state.params, "optimizer": state.optimizer}
    return fields | ({"variables": state.variables} if state.variables else {})


def named_tensors(state: State) -> dict[str, Any]:
    """Returns the tensors that a checkpoint of `state` has, by dotted name."""
    return named_leaves(_saved_fields(state))


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Checkpoints in one folder. Close it, or use it in a `with` statement,
    so that the last one is committed.

    max_to_keep: checkpoints to keep when another is saved; None opens it only for reading.
    reach: `shared` for a folder that all processes write to, each the shards that it owns;
    `process` for a folder of this process, into which it writes all shards that it has
    (`trainer.tiers`).
    saves: called as `Phases.saves`.
    patience: seconds in which one of the tensors that are read has to come; None waits for ever.
    root: folder, this one or one that it is in, that must stay the one that it is now;
    it is made here and never again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int | None,
        reach: Literal["shared", "process"] = "shared",
        saves: Callable[[str], None] = lambda phase: None,
        patience: float | None = None,
        root: Path | None = None,
    ) -> None:
        self.folder = path_of(folder).absolute()
        self._max_to_keep = max_to_keep
        self._reach = reach
        self._saves = saves
        self._patience = patience
        self.abandoned = False
        """Whether nothing is written any more, because a thread that writes does not return."""
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[None] | None = None
        self._writer: int | None = None
        self._root: FolderIdentity | None = None
        if max_to_keep is None:
            return
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        with self._explained("opening checkpoints"):
            root = self.folder if root is None else path_of(root).absolute()
            if self._commits and not in_bucket(root):
                root.mkdir(parents=True, exist_ok=True)
            if in_bucket(root) or root.is_dir():
                self._root = FolderIdentity(root)
            if self._commits:
                self._remove_partial()

    def _remove_partial(self) -> None:
        """Removes what a writer left that died: this process holds the lock of the folder."""
        if in_bucket(self.folder):
            for step in partial_steps(self.folder):
                remove_checkpoint(self.folder, step)
        else:
            for partial in self.folder.glob("*.tmp"):
                remove_tree(partial, below=self.folder.parent, ignore_errors=True)

    @property
    def _commits(self) -> bool:
        """Whether this process writes the descriptions of the arrays and the manifest."""
        return self._reach == "process" or jax.process_index() == 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_root(self, action: str) -> None:
        """Raises CheckpointError where the folder is another than when this was opened."""
        if self._root is not None:
            self._root.check(action)

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        return committed_steps(self.folder)

    def save(self, state: State, device_run: DeviceRun, **place: Any) -> None:
        """Starts to write `state` and returns as soon as its buffers may be donated.

        place: `step`, `cursor`, and further fields of the `Manifest`.
        Raises CheckpointError where this save or the one before it fails.
        """
        self.wait()  # the host's memory has the shards of one checkpoint at a time
        self._check_root(f"saving step {place['step']}")
        tensors = named_tensors(state)
        owned = self._reach == "shared"
        permuted = permuted_params(tensors, device_run.layout.params)
        in_order = {name: x for name, x in tensors.items() if name not in permuted}
        with waiting("the devices"):
            hashes = jax.device_get(fingerprints(in_order))
        shards = host_shards(in_order, owned=owned)
        # One tensor at a time is on the devices in the order of the layers,
        # in addition to the state.
        for name, x in permuted_in_layer_order(tensors, device_run.layout.params):
            with waiting("the devices"):
                hashes |= jax.device_get(fingerprints({name: x}))
            shards |= host_shards({name: x}, owned=owned)
            del x  # before the next one is made
        abstract = abstract_in_layer_order(tensors, device_run.layout.params)
        records: dict[str, TensorRecord] = {}
        for name, x in abstract.items():
            first, second = hashes[name]
            records[name] = TensorRecord(x.shape, str(x.dtype), (int(first), int(second)))
        manifest = Manifest(run=device_run.run, tensors=records, **place)
        if self.abandoned:
            return
        assert self._thread is not None
        # A process alone may leave out what it saves for itself: no barrier is named after that.
        number = next(_shared_saves) if self._reach == "shared" else 0
        self._pending = self._thread.submit(self._write, abstract, shards, manifest, number)

    def _write(
        self, abstract: dict[str, Any], shards: Shards, manifest: Manifest, number: int
    ) -> None:
        self._writer = threading.get_ident()
        with waiting(f"the checkpoint in {self.folder}", NOBODY):
            self._write_parts(abstract, shards, manifest, number)

    def _write_parts(
        self, abstract: dict[str, Any], shards: Shards, manifest: Manifest, number: int
    ) -> None:
        step = str(manifest.step)
        bucket = in_bucket(self.folder)
        folder = self.folder / (step if bucket else f"{step}.tmp")
        self._check_root(f"saving step {step}")
        if self._commits:
            if bucket:
                write_text(self.folder / STARTED / step, str(time.time()))
            else:
                remove_tree(folder, below=self.folder.parent, ignore_errors=True)
                assert self._root is not None
                self._root.make(folder / "state")
        self._barrier(f"begun-{number}")
        if not bucket and not folder.is_dir():
            raise CheckpointError(
                f"saving step {step} in {self.folder}",
                f"process {jax.process_index()} does not see the folder that process 0 made",
                "an --out that all hosts share, or in a bucket",
            )
        wrote = functools.partial(self._saves, "save")
        write_shards(folder / "state", abstract, shards, creates=self._commits, wrote=wrote)
        if self._reach == "process":
            write_atomically(folder / LAYOUT, json.dumps({"layout": layout_of(abstract)}))
        self._barrier(f"written-{number}")
        self._check_root(f"committing step {step}")
        if self._commits:
            manifest.write(folder)
            if not bucket:
                remove_checkpoint(self.folder, manifest.step)
                replace_durably(folder, self.folder / step, below=self.folder.parent)
            assert self._max_to_keep is not None
            for old in committed_steps(self.folder)[: -self._max_to_keep]:
                remove_checkpoint(self.folder, old)
        self._barrier(f"committed-{number}")

    def _barrier(self, name: str) -> None:
        """Waits for the other processes, without a device: the train step is running there."""
        if self._reach == "shared" and jax.process_count() > 1:
            self._saves("commit")
            with waiting("the other hosts' parts of a checkpoint"):
                store().wait_at_barrier(f"meshwright/checkpoint/{name}", 1000 * _BARRIER_SECONDS)
            self._saves("save")

    def wait(self) -> None:
        """Waits until the last save is committed.
        Raises CheckpointError where it could not be written."""
        if self.abandoned:
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._explained("saving"), waiting("its save", NOBODY, self._writer):
                pending.result()

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._pending is not None and not self._pending.done()

    def abandon(self) -> None:
        """Gives up a store that does not answer: no save is waited for, and none is begun."""
        self.abandoned = True
        last_words.wait_for_nothing()

    def check(self) -> None:
        """Raises CheckpointError where the save in progress has failed on this host;
        the others wait for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Waits like `wait` and ends the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=not self.abandoned)
            if self._root is not None:
                self._root.close()

    def manifest(self, step: int | None = None) -> Manifest:
        """Returns the manifest of the checkpoint of `step`, or of the last complete one;
        process 0 reads it for all."""
        return manifest_of(self.folder, step, answer_of_the_first)

    def restore(self, device_run: DeviceRun, step: int | None = None) -> tuple[State, Manifest]:
        """Returns the state of `step`, or of the last complete checkpoint,
        in the shardings of `device_run`, verified.

        Raises CheckpointError naming the first tensor that differs from the model's
        in shape or type, or is damaged.
        """
        manifest = self.manifest(step)
        return self.read(device_run, manifest), manifest

    def read(self, device_run: DeviceRun, manifest: Manifest, *, sends: bool = True) -> State:
        """Returns the verified state of the checkpoint that `manifest` describes.

        sends: a slice of a tensor is read by the first of the processes that have it, and sent to
        the others over the devices; without it each process reads all that it has.
        """
        abstract = device_run.abstract
        if "step" not in manifest.tensors:
            truth = "it has weights alone, and no optimizer state: they were converted"
            fix = f"--init-from {self.folder.parent} and another --out, which starts at step 0"
            raise CheckpointError(f"resuming from {self.folder}", truth, fix)
        expected = named_tensors(abstract)
        other = next((name for name in manifest.tensors if name not in expected), None)
        tensors = self._read(manifest, expected, device_run, other, sends)
        healthy = jax.device_put(np.ones((), np.bool_), abstract.healthy.sharding)
        tree = jax.tree.unflatten(
            jax.tree.structure(_saved_fields(abstract)), list(tensors.values())
        )
        return State(healthy=healthy, **tree)

    def restore_params(
        self, device_run: DeviceRun, step: int | None = None
    ) -> tuple[Tree, Manifest]:
        """Returns the verified parameters of `step`,
        or of the last complete checkpoint, without the optimizer state.

        A checkpoint of another type is converted after it is verified.
        """
        manifest = self.manifest(step)
        expected: dict[str, Any] = {}
        dtypes: dict[str, Any] = {}
        for name, x in named_tensors(device_run.abstract).items():
            if not name.startswith("params."):
                continue
            dtypes[name] = x.dtype
            record = manifest.tensors.get(name)
            if record is not None and record.dtype in _FLOATING:
                x = x.update(dtype=np.dtype(record.dtype))
            expected[name] = x
        tensors = self._read(manifest, expected, device_run, None, True)
        converted = [x.astype(dtypes[name]) for name, x in tensors.items()]
        structure = jax.tree.structure(device_run.abstract.params)
        return jax.tree.unflatten(structure, converted), manifest

    def _read(
        self,
        manifest: Manifest,
        expected: dict[str, Any],
        device_run: DeviceRun,
        other: str | None,
        sends: bool,
    ) -> dict[str, jax.Array]:
        """Returns the tensors of a checkpoint in the rows and shardings of `expected`, verified.

        other: tensor of the checkpoint that the model does not have, for which it is refused.
        sends: as of `read`.
        """
        abstract = abstract_in_layer_order(expected, device_run.layout.params)
        _check_tensors(manifest, abstract, device_run.layout.params)
        if other is not None:
            raise _mismatch(
                manifest, f"the checkpoint has a tensor {other!r}, and the model does not"
            )
        tensors = self._read_shards(manifest, abstract, owned=sends and self._reach == "shared")
        with waiting("the devices"):
            if sends:
                tensors = {
                    name: from_first_replica(x, abstract[name].sharding)
                    for name, x in tensors.items()
                }
            hashes = jax.device_get(fingerprints(tensors))
        changed: list[str] = []
        for name in abstract:
            first, second = hashes[name]
            if (int(first), int(second)) != manifest.tensors[name].fingerprint:
                changed.append(name)
        # Each process has compared its own replica.
        failure: tuple[str, str] | None = None
        if changed:
            count = f"{len(changed)} of {len(abstract)} differ"
            failure = ("damage", f"tensor {changed[0]!r} is not what was saved ({count})")
        self._fail_together(manifest, failure)
        return to_row_order(tensors, expected, device_run.layout.params)

    def _read_shards(
        self, manifest: Manifest, abstract: dict[str, Any], *, owned: bool
    ) -> dict[str, jax.Array]:
        """Returns tensors in the shapes and shardings of `abstract`;
        those of another shape are cut or padded.

        owned: as of `read_shards`.  All processes take what they have read, or none does.
        """
        state = self.folder / str(manifest.step) / "state"
        failure: tuple[str, str] | None = None
        cause: Exception | None = None
        tensors: dict[str, jax.Array] = {}
        reading: str | None = None
        try:
            pool = concurrent.futures.ThreadPoolExecutor(_READERS)
            futures = {
                name: pool.submit(read_shards, state, name, x, manifest.tensors[name], owned=owned)
                for name, x in abstract.items()
            }
            with waiting(f"the checkpoint in {self.folder}", NOBODY):
                self._wait_for_tensors(list(futures.values()))
            pool.shutdown()
            for name, future in futures.items():
                reading = name
                tensors[name] = future.result()
        except Exception as error:  # TensorStore raises several types, with pages of text
            cause = error
            failure = (_kind_of(error), _unreadable(reading, error))
            tensors = {}
        self._fail_together(manifest, failure, cause)
        return tensors

    def _wait_for_tensors(self, futures: list[concurrent.futures.Future[Any]]) -> None:
        """Waits until all tensors are read.
        Raises TimeoutError where the store has answered none for `patience`."""
        remaining = set(futures)
        while remaining:
            done, remaining = concurrent.futures.wait(
                remaining, self._patience, concurrent.futures.FIRST_COMPLETED
            )
            if not done:
                for future in remaining:
                    future.cancel()
                self.abandon()
                raise TimeoutError(
                    f"the disk timed out: it gave nothing for {self._patience:.0f} s"
                )

    def _fail_together(
        self, manifest: Manifest, failure: tuple[str, str] | None, cause: Exception | None = None
    ) -> None:
        """Raises the same error in all processes where one has met a failure: its kind,
        and what is wrong.

        The first of `_KINDS` counts, of whichever process.
        """
        failures = choose_together(
            f"checkpoint of step {manifest.step}", failure, _failures_by_process
        )
        if not failures:
            return
        process, kind, truth = min(failures, key=lambda each: _KINDS.index(each[1]))
        if jax.process_count() > 1:
            truth = f"process {process}: {truth}"
        asked = f"the checkpoint of step {manifest.step} in {self.folder}"
        if kind == "damage":
            raise damaged(self.folder, manifest.step, truth, None) from cause
        if kind == "request":
            fix = "make its files readable for that process"
            raise UnreadableError(asked, truth, fix) from cause
        if kind == "for now":
            fix = "a look at that host and its mounts; the same command when they answer"
            raise UnavailableError(asked, truth, fix) from cause
        if isinstance(cause, StorageError):
            raise cause
        raise StorageError(asked, truth, "the same command later")

    def set_aside(self, after: int) -> None:
        """Moves checkpoints newer than `after`, complete or not,
        into the folder `set-aside` beside this one."""
        if jax.process_index() == 0:
            for step in sorted(all_steps(self.folder)):
                if step > after:
                    self._set_aside(step)
        if jax.process_count() > 1:
            with waiting("the other hosts, which have set checkpoints aside"):
                multihost_utils.sync_global_devices("checkpoints set aside")

    def _set_aside(self, step: int) -> None:
        """Moves one checkpoint, under a name that is free."""
        aside = self.folder.parent / "set-aside"
        target = aside / str(step)
        number = 1
        while target.exists():
            target = aside / f"{step}.{number}"
            number += 1
        source = self.folder / str(step)
        if in_bucket(self.folder):
            move_tree(source, target, last=(MANIFEST,))
            remove_file(self.folder / STARTED / str(step), below=aside.parent, missing_ok=True)
        else:
            make_folder(aside.parent, aside.name)
            replace_durably(source, target, below=aside.parent)

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raises an error of the store as one that names the folder
        and the last intact checkpoint."""
        try:
            yield
        except MeshwrightError:
            raise
        except Exception as error:
            self._check_root(action)  # a folder that went away meanwhile is no full disk
            raise write_error(action, self.folder, error) from error


def _failures_by_process(failures: Sequence[Any]) -> list[list[Any]]:
    """Returns process, kind and text of each failure.
    failures: of each process, None where it has none."""
    return [[process, *failure] for process, failure in enumerate(failures) if failure]


def _unreadable(tensor: str | None, error: Exception) -> str:
    """Says that a tensor cannot be read, and why. tensor: its name; None where it is not known."""
    name = "a tensor" if tensor is None else f"tensor {tensor!r}"
    return f"{name} cannot be read ({reason_of(error)})"


def _kind_of(error: Exception) -> str:
    """Returns which of `_KINDS` a failure to read a tensor is."""
    if isinstance(error, StorageError):
        return "store"
    if class_of(error) in FOR_NOW:
        return "for now"
    # A file that is not there is a part of the checkpoint that is missing.
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return "request"
    return "damage"


def _check_tensors(manifest: Manifest, expected: dict[str, Any], params: Tree) -> None:
    """Raises CheckpointError naming the first of the `expected` tensors whose name, shape
    or type differs.

    Tables that differ only in the padding of the vocabulary agree. expected: arrays or
    ShapeDtypeStructs by dotted name, with one row per layer. params: descriptions of the model's
    parameters.
    """
    padded = {name: p.rows for name, p in named_leaves(params).items() if p.rows is not None}
    # Parameters first: a parameter that differs makes its optimizer state differ too.
    for name, x in sorted(expected.items(), key=lambda item: not item[0].startswith("params.")):
        record = manifest.tensors.get(name)
        if record is None:
            raise _mismatch(
                manifest, f"the model has a tensor {name!r}, and the checkpoint does not"
            )
        rows = next((rows for param, rows in padded.items() if name.endswith(f".{param}")), None)
        same_shape = record.shape == x.shape or _differs_in_padding(record.shape, x.shape, rows)
        if record.dtype != str(x.dtype) or not same_shape:
            stored = f"{record.dtype}{list(record.shape)} in the checkpoint"
            expects = f"{x.dtype}{list(x.shape)} in the model"
            raise _mismatch(manifest, f"{name!r} is {stored} and {expects}")


def _differs_in_padding(
    stored: tuple[int, ...], expected: tuple[int, ...], rows: int | None
) -> bool:
    """Returns whether two shapes of a table differ only in padding after `rows` rows;
    None is of another tensor."""
    if rows is None or stored[1:] != expected[1:]:
        return False
    return min(stored[0], expected[0]) >= rows


def _mismatch(manifest: Manifest, truth: str) -> CheckpointError:
    fix = "the recipe that wrote this checkpoint, or another folder"
    return CheckpointError(f"the checkpoint of step {manifest.step} for this model", truth, fix)


def write_error(action: str, folder: Path, error: Exception) -> MeshwrightError:
    """Returns the error of an operation that the store refused. action: what was done.

    A store without room is RoomError, one that did not answer UnavailableError, all
    else CheckpointError.
    """
    asked = f"{action} in {folder}"
    full = getattr(error, "errno", None) in NO_ROOM
    if class_of(error) in FOR_NOW and not full:  # the store is not asked for more
        return by_class(error, CheckpointError(asked, reason_of(error), "another --out"))
    if not in_bucket(folder) and not folder.is_dir():
        truth = (
            "the folder is gone: it was removed, or its disk unmounted, while the run wrote into it"
        )
        return CheckpointError(asked, truth, "another --out, or the same with its folder there")
    truth = f"{reason_of(error)}; {_last_intact(folder, with_size=full)}"
    if full and not in_bucket(folder):
        free = shutil.disk_usage(folder).free / 2**20
        return RoomError(
            asked, truth, f"free some space ({free:.1f} MiB are free), or another --out"
        )
    return CheckpointError(asked, truth, "another --out")


def _last_intact(folder: Path, *, with_size: bool) -> str:
    """Says which checkpoint is intact after a failure, and how large it is."""
    intact = committed_steps(folder)
    if not intact:
        return "no checkpoint was committed"
    text = f"the checkpoint of step {intact[-1]} is intact"
    if with_size:
        with contextlib.suppress(MeshwrightError):
            records = manifest_of(folder, intact[-1]).tensors.values()
            size = sum(record.bytes for record in records)
            text += f" and takes {size / 2**20:.1f} MiB"
    return text


def check_writable(folder: Path) -> None:
    """Raises CheckpointError where a local output folder cannot be made or written;
    leaves nothing there."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        attempt(lambda: folder.mkdir(parents=True, exist_ok=True))
        attempt(lambda: tempfile.TemporaryFile(dir=folder).close())
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        for place in missing:
            with contextlib.suppress(OSError):  # another process may have begun to write there
                remove_empty_folder(place, below=place.parent)


def check_room(folder: Path, device_run: DeviceRun, max_to_keep: int, replaced: int = 0) -> None:
    """Raises RoomError (of a bucket: StorageError) where `folder` cannot take `max_to_keep` +
    1 checkpoints.

    replaced: checkpoints that are there, and will make room for newer ones.
    """
    if in_bucket(folder):
        bucket_path(folder).check_writable()
        return
    check_writable(folder)
    try:
        make_folder(folder.parent, folder.name)
        free = attempt(lambda: shutil.disk_usage(folder).free)
    except OSError as error:
        raise unwritable(folder, error) from error
    tensors = named_tensors(device_run.abstract).values()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors)
    more = max(1, max_to_keep + 1 - replaced)
    if free >= size * more:
        return
    kept = f"{max_to_keep} are kept while another is written"
    if replaced:
        kept += f" ({replaced} of them are there, so {more} more need room)"
    raise RoomError(
        f"output folder {folder}",
        f"a checkpoint takes up to {size / 2**20:.1f} MiB, {kept}, and {free / 2**20:.1f} MiB are "
        "free",
        "a folder with more space, or a smaller --training.max-to-keep",
    )

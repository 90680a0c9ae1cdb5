"""Token files of a run on several hosts: one tokenises, the others wait and take what they lack from it.

Hosts with a shared cache find the files there. To the others process 0 sends them, over the same links as arrays.
"""

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.data.reading import Progress
from meshwright.data.tokens import TokenFile, is_token_file, open_tokens
from meshwright.errors import DataError
from meshwright.hardware.agreement import store
from meshwright.heartbeat import beating

PATIENCE = 600.0
"""Seconds for which a process waits without a sign of process 0."""
_BEAT = 5.0
"""Seconds between two signs of process 0."""
_EVERY = 30.0
"""Seconds between two lines of a process that waits."""
_PIECE = 2**26
"""Bytes that are sent at a time."""
_rounds = itertools.count()


def share_folders(cache: Path, progress: Progress | None, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Returns the token folders that `make` returns in process 0, each of them inside `cache`.

    Every process calls this. Those that have no such folder in their cache receive it. Raises DataError in all where
    `make` does so in process 0, or where that gives no sign for ten minutes.
    """
    client, key = store(), f"meshwright/tokens/{next(_rounds)}"
    if jax.process_index() == 0:
        folders = _make(client, key, make)
    else:
        names = _wait(client, key, progress)
        folders = {path: cache / name for path, name in names.items()}
    for folder in dict.fromkeys(folders.values()):
        _send(folder)
    return folders


def share_token_files(
    cache: Path, progress: Progress | None, make: Callable[[], dict[str, TokenFile]]
) -> dict[str, TokenFile]:  # fmt: skip
    """Returns the token files that `make` returns in process 0; see `share_folders`."""
    folders = share_folders(cache, progress, lambda: {path: file.folder for path, file in make().items()})
    return {path: open_tokens(folder) for path, folder in folders.items()}


def _make(client: Any, key: str, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Calls `make`, and tells the other processes that it is under way, what it returned, or why it failed."""
    numbers = itertools.count()
    with beating(lambda: client.key_value_set(f"{key}/sign", str(next(numbers)), True), _BEAT, "signs of tokenisation"):
        try:
            folders = make()
        except DataError as error:
            failure = [error.asked, error.truth, error.fix]
            client.key_value_set(f"{key}/result", json.dumps({"failure": failure}))
            raise
        except BaseException as error:
            failure = ["tokenising in process 0", f"{type(error).__name__}: {error}", "see the output of process 0"]
            client.key_value_set(f"{key}/result", json.dumps({"failure": failure}))
            raise
    client.key_value_set(
        f"{key}/result", json.dumps({"folders": {path: folder.name for path, folder in folders.items()}})
    )
    return folders


def _wait(client: Any, key: str, progress: Progress | None) -> dict[str, str]:
    """Returns what process 0 made: the folder's name by source. Raises DataError where it failed, or gives no sign."""
    start = until = time.monotonic()
    until, said, sign = until + PATIENCE, start, ""
    while True:
        found = _get(client, f"{key}/result", 2000)
        if found is not None:
            break
        now, newest = time.monotonic(), _get(client, f"{key}/sign", 1) or ""
        if newest != sign:
            until, sign = now + PATIENCE, newest
        if now > until:
            raise DataError(
                "waiting for process 0 to tokenise", f"it gave no sign for {PATIENCE:.0f} s",
                "see the output of process 0; or tokenise beforehand: meshwright tokenize",
            )  # fmt: skip
        if progress is not None and now - said > _EVERY:
            progress.write(f"waiting for process 0, which tokenises: {now - start:.0f} s")
            said = now
    record = json.loads(found)
    if "failure" in record:
        asked, truth, fix = record["failure"]
        raise DataError(f"{asked} (in process 0)", truth, fix)
    return dict(record["folders"])


def _get(client: Any, key: str, milliseconds: int) -> str | None:
    try:
        return str(client.blocking_key_value_get(key, milliseconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise DataError(
            "waiting for process 0 to tokenise", f"it does not answer: {str(error).splitlines()[0]}",
            "see the output of process 0",
        ) from error  # fmt: skip


def _send(folder: Path) -> None:
    """Copies a folder of process 0 to the processes that have none. All of them call this at the same time."""
    missing = not is_token_file(str(folder))
    if not multihost_utils.process_allgather(np.array(missing)).any():
        return
    chief = jax.process_index() == 0
    listing = sorted((file.name, file.stat().st_size) for file in folder.iterdir()) if chief else []
    names = json.loads(bytes(_broadcast(json.dumps(listing).encode() if chief else b"")))
    part = folder.with_name(f".{folder.name}.{jax.process_index()}.part")
    if missing:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    for name, size in names:
        _send_file(folder / name, size, part / name if missing else None)
    if missing:
        try:
            os.replace(part, folder)
        except OSError:  # another process of this host was first
            shutil.rmtree(part, ignore_errors=True)
            if not is_token_file(str(folder)):
                raise


def _send_file(source: Path, size: int, target: Path | None) -> None:
    """Sends a file of process 0 in pieces; `target` is written where it is given."""
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(source.open("rb")) if jax.process_index() == 0 else None
        writer = stack.enter_context(target.open("wb")) if target is not None else None
        for start in range(0, size, _PIECE):
            count = min(_PIECE, size - start)
            piece = np.frombuffer(reader.read(count), np.uint8) if reader else np.zeros(count, np.uint8)
            piece = np.asarray(multihost_utils.broadcast_one_to_all(piece))
            if writer is not None:
                piece.tofile(writer)


def _broadcast(data: bytes) -> np.ndarray:
    """Returns the bytes that process 0 gives, in every process."""
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(data))))
    buffer = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer))

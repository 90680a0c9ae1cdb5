"""Token files of process 0 for the other processes of a run, over the links of the arrays."""

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

from meshwright.data.corpus import Progress
from meshwright.data.tokens import is_token_file
from meshwright.errors import DataError
from meshwright.hardware.hosts import store
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
    """Returns the token folders, each inside `cache`, that `make` returns in process 0.

    Every process calls this. Those that have no such folder in their cache receive it. Raises DataError in all where
    `make` does so in process 0, or where that gives no sign for ten minutes.
    """
    client, key = store(), f"meshwright/tokens/{next(_rounds)}"
    if jax.process_index() == 0:
        folders = _make(client, key, make)
    else:
        folders = {path: cache / name for path, name in _wait(client, key, progress).items()}
    for folder in dict.fromkeys(folders.values()):
        _send(folder)
    return folders


def _make(client: Any, key: str, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Calls `make`, and tells the other processes that it is under way, what it returned, or why it failed."""
    numbers = itertools.count()
    result: dict[str, Any] = {}
    with beating(lambda: client.key_value_set(f"{key}/sign", str(next(numbers)), True), _BEAT, "signs of tokenisation"):
        try:
            folders = make()
            result = {"folders": {path: folder.name for path, folder in folders.items()}}
        except DataError as error:
            result = {"failure": [error.asked, error.truth, error.fix]}
            raise
        except BaseException as error:
            truth = f"{type(error).__name__}: {error}"
            result = {"failure": ["tokenising in process 0", truth, "see the output of process 0"]}
            raise
        finally:
            client.key_value_set(f"{key}/result", json.dumps(result))
    return folders


def _wait(client: Any, key: str, progress: Progress | None) -> dict[str, str]:
    """Returns what process 0 made: the folder's name by source. Raises DataError where it failed, or gives no sign."""
    start = said = time.monotonic()
    until, sign = start + PATIENCE, ""
    while (found := _get(client, f"{key}/result", 2000)) is None:
        now, newest = time.monotonic(), _get(client, f"{key}/sign", 1) or ""
        if newest != sign:
            until, sign = now + PATIENCE, newest
        if now > until:
            raise DataError(
                "waiting for process 0 to tokenise",
                f"it gave no sign for {PATIENCE:.0f} s",
                "see the output of process 0; or tokenise beforehand: meshwright tokenize",
            )
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
        truth = f"it does not answer: {str(error).splitlines()[0]}"
        raise DataError("waiting for process 0 to tokenise", truth, "see the output of process 0") from error


def _send(folder: Path) -> None:
    """Copies a folder of process 0 to the processes that have none. All of them call this at the same time."""
    missing, first = not is_token_file(folder), jax.process_index() == 0
    if not multihost_utils.process_allgather(np.array(missing)).any():
        return
    listing = json.dumps([(file.name, file.stat().st_size) for file in sorted(folder.iterdir())] if first else [])
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(listing.encode()))))
    part = folder.with_name(f".{folder.name}.{jax.process_index()}.part")
    if missing:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    for name, length in json.loads(_broadcast(listing.encode() if first else bytes(size)).tobytes()):
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context((folder / name).open("rb")) if first else None
            writer = stack.enter_context((part / name).open("wb")) if missing else None
            for start in range(0, length, _PIECE):
                count = min(_PIECE, length - start)
                piece = _broadcast(reader.read(count) if reader else bytes(count))
                if writer is not None:
                    piece.tofile(writer)
    if missing:
        try:
            os.replace(part, folder)
        except OSError:  # another process of this host was first
            shutil.rmtree(part, ignore_errors=True)
            if not is_token_file(folder):
                raise


def _broadcast(data: bytes) -> np.ndarray:
    """Returns the bytes that process 0 gives, in every process, uint8 [bytes]; the others give as many."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(data, np.uint8)))

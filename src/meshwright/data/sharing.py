"""Token files of process 0 for the other processes of a run, over the links of the arrays."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.data.tokens import Progress, is_token_file
from meshwright.hardware.agreement import answer_of_the_first

_PIECE = 2**26
"""Bytes that are sent at a time."""


def share_folders(cache: Path, progress: Progress | None, make: Callable[[], dict[str, Path]]) -> dict[str, Path]:
    """Returns the token folders, each inside `cache`, that `make` returns in process 0.

    Every process calls this. Those that have no such folder in their cache receive it. What `make` raises in process 0
    is raised in all.
    """
    if progress is not None and jax.process_index():
        progress.write("waiting for process 0, which tokenises")
    names = answer_of_the_first(lambda: {path: folder.name for path, folder in make().items()})
    folders = {path: cache / name for path, name in names.items()}
    for folder in dict.fromkeys(folders.values()):
        _send(folder)
    return folders


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

"""Files that grow where the store has no appending: kept in memory, and written whole at intervals and saves."""

import contextlib
import io
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.activity import Activity, watched_by
from meshwright.errors import StorageError

INTERVAL = 30.0
"""Seconds between two times that a file is written, unless a checkpoint is saved or it is closed before."""


class WholeFile(io.BytesIO):
    """File in a bucket to which lines are added; the object is replaced every `INTERVAL` seconds, and on `close`.

    It is a watcher: before a checkpoint is saved the object is replaced too, so that a run which dies and goes on from
    there has every line until then. A bucket that is away for a while ends no run: the lines stay in memory until it is
    back.
    """

    def __init__(self, path: Path, content: bytes):
        super().__init__()
        super().write(content)
        self.name = str(path)
        self._path, self._written_at, self._changed = path, time.monotonic(), False
        self._watching = contextlib.ExitStack()
        self._watching.enter_context(watched_by(self))

    def began(self, activity: Activity) -> None:
        """Writes the object before a save."""
        if activity.kind == "save":
            self._try()

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Does nothing."""

    def write(self, data: Any) -> int:
        """Adds bytes; returns their number."""
        self._changed = True
        count = super().write(data)
        if time.monotonic() - self._written_at >= INTERVAL:
            self._try()
        return count

    def _try(self) -> None:
        self._written_at = time.monotonic()
        with contextlib.suppress(StorageError):
            self._put()

    def _put(self) -> None:
        self._path.write_bytes(self.getvalue())
        self._changed = False

    def close(self) -> None:
        """Writes the object a last time; lines that cannot be written are named on standard error."""
        if not self.closed and self._changed:
            try:
                self._put()
            except StorageError as error:
                print(f"{self.name}: its last lines could not be written: {error.truth}", file=sys.stderr)
        if not self.closed:
            self._watching.close()
        super().close()

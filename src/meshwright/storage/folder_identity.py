"""Identity of a folder: whether its path still leads to the folder that was opened."""

import os
import sys
import threading
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.storage.attempts import attempt
from meshwright.storage.paths import in_bucket
from meshwright.storage.writing import make_folder_below


class FolderIdentity:
    """Folder that a run writes into, as it was when the run began.

    `rm -r`, `umount -l` and a failover of the storage leave a path that leads nowhere, or into
    another folder: the mount point, for instance. What is written there is lost to the run. The
    folder is kept open, so that its inode number is given to no other. A bucket has no such
    identity.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lost = ""
        """Why the folder is not the one that was opened; empty while it is."""
        self._identity: tuple[int, int] | None = None
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        if not in_bucket(folder):
            self._descriptor = attempt(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            status = os.fstat(self._descriptor)
            self._identity = (status.st_dev, status.st_ino)

    def look(self) -> None:
        """Compares the path with the folder;
        the first difference is printed on standard error at once."""
        if self._identity is None:
            return
        with self._lock:
            if self.lost:
                return
            try:
                status = os.stat(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                self.lost = (
                    "the folder is gone: it was removed, or its disk unmounted, while the run "
                    "wrote into it"
                )
            except OSError:
                return  # a network that is away for a while
            else:
                if (status.st_dev, status.st_ino) != self._identity:
                    self.lost = (
                        "another folder is in its place: it was removed and made again, or its "
                        "disk was unmounted"
                    )
            if self.lost:
                text = (
                    f"{self.folder}: {self.lost}; what is written there from now on would be lost"
                )
                print(text, file=sys.stderr, flush=True)

    def check(self, action: str) -> None:
        """Raises CheckpointError where the path does not lead to the folder that was opened.

        action: what is about to be done, such as `saving step 40`.
        """
        self.look()
        self.check_seen(action)

    def check_seen(self, action: str) -> None:
        """Raises CheckpointError where an earlier look found another folder; asks no disk."""
        if self.lost:
            raise CheckpointError(
                f"{action} in {self.folder}",
                self.lost,
                "the same command with --resume when the disk is mounted again, or another --out",
            )

    def make(self, folder: Path) -> None:
        """Makes a folder below this one, and those between; never this one. Raises OSError."""
        names = folder.relative_to(self.folder).parts
        make_folder_below(self.folder, *names, descriptor=self._descriptor)

    def close(self) -> None:
        """Releases the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

"""The verb `cache`: token files and copies of buckets that runs keep on this machine."""

import dataclasses
import time
from typing import Annotated

import tyro

from meshwright.api.verb import Call, Outcome
from meshwright.data.cache_entries import delete_entry, list_entries
from meshwright.formatting import format_bytes
from meshwright.ranges import Ranged
from meshwright.storage.paths import default_cache_folder
from meshwright.views.blocks import Column, Table
from meshwright.views.terminal import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions(Ranged):
    """List the token files and the copies of buckets in the cache (MESHWRIGHT_CACHE), or delete
    some of them. Nothing else deletes them: other runs may read them.
    """

    delete: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Entries to delete, by the names that the list has. One that a process reads or writes is
    refused."""
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Lists or deletes.

        Raises ConfigError for a name that the cache does not have, DataError for one in use.
        """
        cache = default_cache_folder()
        if self.delete:
            freed = {name: delete_entry(cache, name) for name in self.delete}
            lines = [f"deleted {name}: {format_bytes(size)}\n" for name, size in freed.items()]
            return Outcome("".join(lines), {"cache": cache, "deleted": freed})
        entries = list_entries(cache)
        record = {"cache": cache, "entries": [dataclasses.asdict(entry) for entry in entries]}
        if not entries:
            return Outcome(f"{cache} has no token files and no copies of buckets\n", record)
        columns = [
            Column("entry", cell="name"),
            Column("bytes", "bytes", "bytes"),
            Column("written", cell=lambda entry: _day(entry.written)),
            Column(
                "state", cell=lambda entry: f"{entry.state}, in use" if entry.used else entry.state
            ),
            Column("source", cell="source"),
        ]
        table = Table.of(entries, columns, printed=None)
        return Outcome(lambda console: print_table(console, table), record)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))

"""The verb `view`: the page of a run, as a file or while it trains."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from meshwright.api.viewing import PAGE, view
from meshwright.cli.output import write
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError
from meshwright.ranges import Ranged
from meshwright.views.live_server import LivePage, LiveServer
from meshwright.views.run_page import run_page


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions(Ranged):
    """Show the runs in the output folders OUT: curves, times, events, samples, configuration. Several are drawn over
    each other."""

    out: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs."""
    html: Path | None = None
    """File to write; by default view.html in the first folder."""
    live: bool = False
    """Serve the page on this machine (127.0.0.1) instead, and update it while the runs train; Ctrl-C ends it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of --live; 0 takes a free one."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright view`. Raises ConfigError where a folder has no run."""
    options = parse(ViewOptions, "view", args)
    if not options.out:
        raise ConfigError("meshwright view", "OUT is missing", "meshwright view OUT, an output folder of a run")
    if options.port and not options.live:
        raise ConfigError(f"--port {options.port} without --live", "a file has no port", "--live")
    if not options.live:
        write(f"{view(*options.out).write(options.html)}\n")
        return 0
    if options.html is not None:
        raise ConfigError("--html with --live", f"a server writes no file such as {PAGE}", "one of them")
    with LiveServer(LivePage(options.out, run_page), options.port) as server:
        write(f"{server.url} (Ctrl-C ends it)\n")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            write("\n")
    return 0

"""The verb `view`: the page of a run, as a file or while it trains."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from meshwright.api.verb import Call, Outcome
from meshwright.errors import ConfigError
from meshwright.formatting import Brief
from meshwright.ranges import Ranged
from meshwright.storage.paths import path_of
from meshwright.storage.writing import refuse_link
from meshwright.views.live_server import LivePage, LiveServer
from meshwright.views.report import Report
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import run_page
from meshwright.views.run_status import RunStatus, run_status

PAGE = "view.html"
"""Name of a run's page in its output folder."""


@dataclasses.dataclass(frozen=True, repr=False)
class View(Brief):
    """Page of one or several runs.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "viewed", progress="none", cache=tmp, devices=1)
        >>> page = mw.view(tmp / "viewed").write()
        >>> page.name, "Held-out" in page.read_text() or "held-out loss" in page.read_text()
        ('view.html', True)
    """

    page: Report
    out: Path
    """Output folder of the first run."""
    statuses: Mapping[str, RunStatus] = dataclasses.field(default_factory=dict)
    """What each run does: whether it runs, is late or silent, and what its restarts lost; by
    folder."""

    def brief(self) -> str:
        """Returns what the page shows, and where a file of it is written."""
        return f"of {self.page.title}; write() makes {self.out / PAGE}"

    def write(self, file: str | Path | None = None) -> Path:
        """Writes the page as one HTML file that loads nothing, by default OUT/view.html.

        Returns the file.
        """
        path = path_of(file) if file is not None else self.out / PAGE
        if file is None:  # a file that the user names may be a link, or a pipe
            refuse_link(path)
        self.page.write(path)
        return path

    def to_json(self) -> dict[str, Any]:
        """Returns the statuses of the runs as JSON values."""
        return {name: status.to_json() for name, status in self.statuses.items()}

    def __str__(self) -> str:
        if len(self.statuses) == 1:
            return "\n".join(str(status) for status in self.statuses.values())
        return "\n".join(f"{name}: {status}" for name, status in self.statuses.items())

    def _repr_html_(self) -> str:
        return self.page.frame()


def view(*outs: str | Path) -> View:
    """Returns the page of the runs in these output folders, over each other where they are several.

    Raises ConfigError for a folder without a run.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=1", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "seen", progress="none", cache=tmp, devices=1)
        >>> mw.view(tmp / "seen").page.title
        'seen'
    """
    folders = open_folders([path_of(out) for out in outs])
    statuses = {str(folder.folder): run_status(folder) for folder in folders}
    return View(run_page(folders), folders[0].folder, statuses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOptions(Ranged):
    """Show the runs in the output folders OUT: curves, times, events, samples, configuration.
    Several are drawn over each other.
    """

    out: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs."""
    html: Path | None = None
    """File to write; by default view.html in the first folder."""
    live: bool = False
    """Serve the page on this machine (127.0.0.1) instead, and update it while the runs train;
    Ctrl-C ends it."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Port of --live; 0 takes a free one."""
    json: bool = False
    """Print the page's file and the status of each run as JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright view`. Raises ConfigError where a folder has no run."""
        if not self.out:
            raise ConfigError(
                "meshwright view",
                "OUT is missing",
                "meshwright view OUT, an output folder of a run",
            )
        if self.port and not self.live:
            raise ConfigError(f"--port {self.port} without --live", "a file has no port", "--live")
        if not self.live:
            result = view(*self.out)
            file = result.write(self.html)
            return Outcome(f"{file}\n{result}\n", {"page": str(file), "runs": result.to_json()})
        if self.html is not None:
            raise ConfigError(
                "--html with --live", f"a server writes no file such as {PAGE}", "one of them"
            )
        if self.json:
            raise ConfigError(
                "--json with --live", "a server has no result to print", "--json without --live"
            )
        with LiveServer(LivePage(self.out, run_page), self.port) as server:
            call.console.out(f"{server.url} (Ctrl-C ends it)", highlight=False)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return Outcome("\n")

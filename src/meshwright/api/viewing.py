"""Pages of runs, from Python."""

import dataclasses
from pathlib import Path

from meshwright.storage.paths import path_of
from meshwright.views.report import Report
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import run_page

PAGE = "view.html"
"""Name of a run's page in its output folder."""


@dataclasses.dataclass(frozen=True)
class View:
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

    def write(self, file: str | Path | None = None) -> Path:
        """Writes the page as one HTML file that loads nothing, by default OUT/view.html; returns the file."""
        path = path_of(file) if file is not None else self.out / PAGE
        self.page.write(path)
        return path

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
    return View(run_page(folders), folders[0].folder)

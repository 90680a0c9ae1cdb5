"""The verb `atlas`: published training runs beside what the planner predicts and what it would have chosen."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.errors import ConfigError
from meshwright.planner.published import Chapter, price_published, read_published
from meshwright.report.console import open_console
from meshwright.views.atlas_tables import chapter_json, print_chapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtlasOptions:
    """Price published training runs from files of facts (docs/atlas/runs), and search for the plan that Meshwright
    would have chosen for the same model, batch and machine. It needs no device."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files of facts, TOML."""
    out: Path | None = None
    """Write a page for each run and an index into this folder."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright atlas`. Raises ConfigError where a file's facts cannot be placed, or a page not be written."""
    options = parse(AtlasOptions, "atlas", args)
    console = open_console()
    _check_names(options.files)
    runs = [read_published(file) for file in options.files]  # before the searches, which take long
    chapters: list[Chapter] = []
    for run in runs:
        with console.status(f"{run.title}: pricing and searching"):
            chapters.append(price_published(run))
    if options.out is not None:
        _write_pages(chapters, options.out)
    if options.json:
        write_json([chapter_json(chapter) for chapter in chapters])
    else:
        print_chapters(console, chapters)
    return 0


def _check_names(files: Sequence[Path]) -> None:
    """Refuses files whose pages would overwrite one another."""
    taken: dict[str, Path] = {"index": Path("index.html")}
    for file in files:
        if file.stem in taken:
            raise ConfigError(
                f"page {file.stem}.html of {file}", f"{taken[file.stem]} has that name too", "rename the file of facts"
            )
        taken[file.stem] = file


def _write_pages(chapters: Sequence[Chapter], folder: Path) -> None:
    from meshwright.views.atlas_page import chapter_page, index_page  # without --out no page is drawn

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"writing {folder}", f"the folder cannot be made: {error.strerror}", "--out with another folder"
        ) from error
    for chapter in chapters:
        chapter_page(chapter).write(folder / f"{chapter.run.name}.html")
    index_page(chapters).write(folder / "index.html")

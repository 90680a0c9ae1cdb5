"""Runs the chapters of the ladder and the notebooks of the docs, and writes their pages.

    python docs/ladder/build.py [CHAPTER ...]        # pages of the named chapters, or of all, with their pictures
    python docs/ladder/build.py --print CHAPTER      # one page, on the terminal
    python docs/ladder/build.py --notebooks FOLDER   # all chapters as Jupyter notebooks (.ipynb)

A chapter is a Python file of cells in jupytext's percent format: `# %% [markdown]` is text, `# %%` is code whose output
is shown (tests/seeds compares it with the committed page), `# %% loose` is code whose figures may differ from machine
to machine, and `answer` (code or text) is folded away under an exercise. A cell whose last line is a picture, or a row
of them, shows it.
"""

import ast
import contextlib
import io
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = (HERE, HERE.parent / "notebooks")
_LOOSE = "<!-- figures of the machine that wrote this page -->"
_CELL = re.compile(r"^# %%(.*)\n", re.M)


@dataclass(frozen=True)
class Cell:
    """Cell of a chapter."""

    kind: str
    """markdown, code, or loose."""
    source: str
    line: int
    """Line of the chapter at which the source begins."""
    folded: bool
    """Whether it is part of the answer to an exercise."""


def chapters() -> list[Path]:
    """Lists the chapters in their order, then the notebooks."""
    number = re.compile(r"\d+")
    ladder = sorted(HERE.glob("[0-9]*.py"), key=lambda path: int(number.match(path.name)[0]))  # type: ignore[index]
    return [*ladder, *sorted(FOLDERS[1].glob("*.py"))]


def chapter_named(name: str) -> Path:
    """Returns the file of a chapter or notebook."""
    return next(path for path in chapters() if path.stem == name)


def cells_of(chapter: Path) -> list[Cell]:
    """Splits a chapter into its cells."""
    text = chapter.read_text(encoding="utf-8")
    marks = list(_CELL.finditer(text))
    cells = []
    for mark, end in zip(marks, [*(m.start() for m in marks[1:]), len(text)], strict=True):
        tag, source, line = mark[1], text[mark.end() : end], text.count("\n", 0, mark.end()) + 1
        kind = "markdown" if "markdown" in tag else "loose" if "loose" in tag else "code"
        if kind == "markdown":
            source = "".join(re.sub(r"^# ?", "", line) for line in source.splitlines(keepends=True))
        line += len(source) - len(source.lstrip("\n"))
        cells.append(Cell(kind, source.strip("\n"), line, "answer" in tag))
    return cells


def run_cell(cell: Cell, file: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Runs a cell; returns what it prints, and the value of its last line if that is an expression."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    return printed.getvalue(), value


def run_chapter(chapter: Path, images: Path | None = None) -> list[tuple[Cell, str, list[tuple[str, str]]]]:
    """Runs a chapter in its folder; returns each cell with its output, and the file and title of each picture.

    images: folder to write the pictures to; None writes none.
    """
    from meshwright.views.draw import standalone

    names: dict[str, Any] = {"__name__": "__main__"}
    done = []
    with contextlib.chdir(chapter.parent):
        for number, cell in enumerate(cells_of(chapter)):
            if cell.kind == "markdown":
                done.append((cell, "", []))
                continue
            printed, value = run_cell(cell, chapter.name, names)
            drawn = []
            for i, picture in enumerate(getattr(value, "pictures", [value])):
                if hasattr(picture, "svg"):
                    drawn.append((f"{chapter.stem}-{number}{chr(97 + i)}.svg", getattr(picture, "title", "a picture")))
                    if images:
                        (images / drawn[-1][0]).write_text(standalone(picture.svg()), encoding="utf-8")
            done.append((cell, printed, drawn))
    return done


def as_markdown(done: list[tuple[Cell, str, list[tuple[str, str]]]], notebook: str) -> str:
    """Returns the page of a chapter that has run. notebook: name of its notebook, which lies beside the page."""
    parts = []
    for folded, cells in itertools.groupby(done, lambda entry: entry[0].folded):
        # HTML with Markdown inside: pages show it folded, and so does every viewer of the repository.
        parts += ['<details markdown="1">\n<summary>Answer</summary>'] if folded else []
        for cell, printed, drawn in cells:
            if cell.kind == "markdown":
                parts.append(cell.source)
                continue
            parts.append(f"```python\n{cell.source}\n```")
            if printed.strip():
                note = "" if cell.kind == "code" else f"{_LOOSE}\n\n"
                parts.append(f"{note}```text\n{printed.rstrip()}\n```")
            if drawn:
                parts.append(
                    "\n".join(f"![{title.replace('[', '(').replace(']', ')')}](img/{name})" for name, title in drawn)
                )
        parts += ["</details>"] if folded else []
    heading, _, rest = ("\n\n".join(parts) + "\n").partition("\n")
    return (
        f"{heading}\n\n[As a notebook]({notebook}), which runs on any computer where Meshwright is "
        f"[installed](../install.md).\n{rest}"
    )


def as_notebook(chapter: Path) -> str:
    """Returns a chapter as a Jupyter notebook, without outputs; the code of answers is folded."""
    import jupytext

    notebook = jupytext.reads(chapter.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for i, cell in enumerate(notebook.cells):
        title = cell.metadata.pop("title", "")
        cell.metadata["tags"] = title.split()
        if cell.cell_type == "code" and "answer" in title:
            cell.metadata["jupyter"] = {"source_hidden": True}
        cell["id"], cell["source"] = f"cell-{i}", cell["source"].strip("\n")
    return str(jupytext.writes(notebook, fmt="ipynb"))


def main(names: list[str]) -> None:
    """Writes the pages of the named chapters, or of all."""
    if names[:1] == ["--print"]:
        print(as_markdown(run_chapter(chapter_named(names[1])), f"{names[1]}.ipynb"))
        return
    if names[:1] == ["--notebooks"]:
        for chapter in chapters():
            (Path(names[1]) / f"{chapter.stem}.ipynb").write_text(as_notebook(chapter), encoding="utf-8")
        return
    if len(names) != 1:
        # One process per chapter: JAX's configuration of one chapter must not reach the next.
        for name in names or [path.stem for path in chapters()]:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    chapter = chapter_named(names[0])
    images = chapter.parent / "img"
    images.mkdir(exist_ok=True)
    for stale in images.glob(f"{chapter.stem}-*.svg"):
        stale.unlink()
    page = as_markdown(run_chapter(chapter, images), f"{chapter.stem}.ipynb")
    chapter.with_suffix(".md").write_text(page, encoding="utf-8")
    print(f"{chapter.stem}.md")


if __name__ == "__main__":
    main(sys.argv[1:])

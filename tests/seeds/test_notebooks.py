"""The notebooks of the docs run in a Jupyter kernel and show what their pages show; chapters are notebooks too."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DOCS = Path(__file__).parents[2] / "docs"
_SPEC = importlib.util.spec_from_file_location("build", DOCS / "ladder" / "build.py")
assert _SPEC is not None and _SPEC.loader is not None
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)

_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def words(text: str) -> str:
    """The text without its numbers, which differ from machine to machine, and without the spaces that they shift."""
    return re.sub(r"\s+", " ", _NUMBER.sub("#", text))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.stem for path in (DOCS / "notebooks").glob("*.py")))
def test_a_notebook_runs_and_prints_what_its_page_prints(name: str) -> None:
    notebook = nbformat.reads(build.as_notebook(build.chapter_named(name)), as_version=4)
    folder = {"metadata": {"path": str(DOCS / "notebooks")}}
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources=folder).execute()
    page = words((DOCS / "notebooks" / f"{name}.md").read_text(encoding="utf-8"))
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    for printed in (o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"):
        assert words(printed.strip()) in page
    shown = "".join(o.data["text/html"] for o in outputs if "text/html" in o.get("data", {}))
    assert name == "your_own_model" or "<svg" in shown or "<iframe" in shown  # a picture, or a page


def test_every_chapter_is_a_valid_notebook_with_the_code_of_its_file() -> None:
    for chapter in build.chapters():
        notebook = nbformat.reads(build.as_notebook(chapter), as_version=4)
        nbformat.validate(notebook)
        cells = build.cells_of(chapter)
        assert [c.source for c in notebook.cells if c.cell_type == "code"] == [
            c.source for c in cells if c.kind != "markdown"
        ]
        hidden = [c for c in notebook.cells if c.metadata.get("jupyter", {}).get("source_hidden")]
        assert len(hidden) == sum(c.folded and c.kind != "markdown" for c in cells)

"""Tables that the scripts of this folder write into pages of the documentation."""

from pathlib import Path

_END = "<!-- end of the table -->\n"


def put_table(page: Path, script: str, table: str) -> None:
    """Writes `table` between the marks of `script` in `page`. Raises ValueError where the page has none."""
    begin = f"<!-- table: bench/{script} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + table + _END + rest.split(_END, 1)[1], encoding="utf-8")


def put_rows(script: str, title: str, rows: str) -> None:
    """Writes the single rows behind a page's table to results/, in a file named after `script`."""
    file = Path(__file__).parent / "results" / Path(script).with_suffix(".md").name
    file.write_text(f"# {title}\n\nWritten by `python bench/{script}`.\n\n{rows}", encoding="utf-8")

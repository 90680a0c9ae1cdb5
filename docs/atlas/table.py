"""Writes the table of docs/atlas/index.md from atlas.json, and the present style and script into the pages.

`meshwright atlas` prints atlas.json and writes the pages. After a change of what draws pages this alone is enough.
"""

import json
import re
from pathlib import Path
from typing import Any

from meshwright.views.pages import document

HERE = Path(__file__).parent
_BEGIN, _END = "<!-- table: docs/atlas/table.py -->\n", "<!-- end of the table -->\n"


def table(records: list[dict[str, Any]]) -> str:
    """Returns the table of published and predicted steps, and what the planner's choice saves."""
    lines = [
        "| run | machine | published mesh | step: published | predicted | error | MFU: published | predicted "
        "| planner's plan | saves |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        best, saved = r["best"], r["saved"]
        choice = best["name"] if best else "nothing fits"
        lines.append(
            f"| [{r['title']}](pages/{r['name']}.html) ({r['year']}) | {r['target']} | {r['mesh']} | "
            f"{r['published_seconds']:.3g} s | {r['predicted']['seconds']:.3g} s | {r['error']:+.0%} | "
            f"{r['published_mfu']:.1%} | {r['predicted']['mfu']:.1%} | {choice} | "
            f"{'-' if saved is None else f'{saved:.0%}'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Puts the table into index.md, and the present style and script into the pages."""
    page = HERE / "index.md"
    before, rest = page.read_text(encoding="utf-8").split(_BEGIN)
    text = before + _BEGIN + table(json.loads((HERE / "atlas.json").read_text())) + _END + rest.split(_END, 1)[1]
    page.write_text(text, encoding="utf-8")
    for file in sorted((HERE / "pages").glob("*.html")):
        file.write_text(current(file.read_text(encoding="utf-8")), encoding="utf-8")


def current(page: str) -> str:
    """Returns a page with its own data and the present style and script."""
    data = re.search(r'id="page-data">(.*?)</script>', page, re.DOTALL)
    assert data
    return document(json.loads(data[1]))


if __name__ == "__main__":
    main()

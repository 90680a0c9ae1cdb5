"""Data of a written page, for tests that read what a page shows."""

import json
import re
from collections.abc import Iterator
from typing import Any


def page_data(html: str) -> dict[str, Any]:
    """Document of a page's HTML."""
    found = re.search(
        r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL
    )
    assert found
    return json.loads(found[1])


def blocks_of(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every block of a page, those in grids as well."""
    pending = [block for section in data["sections"] for block in section["blocks"]]
    while pending:
        block = pending.pop(0)
        if block["block"] == "Grid":
            pending = [*block["blocks"], *pending]
        else:
            yield block

"""Draws a command's output as a picture: `python docs/terminal.py TITLE IMAGE.svg < output`."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

title, image = sys.argv[1:]
lines = Text(sys.stdin.read().rstrip())
console = Console(record=True, width=max(len(line) for line in lines.plain.splitlines()), file=io.StringIO())
console.print(lines, soft_wrap=True)
picture = console.export_svg(title=title, font_aspect_ratio=0.61)
# The picture loads nothing: a reader's own monospaced font will do.
picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S)
Path(image).write_text(re.sub(r"<!-- Generated.*?-->", "", picture), encoding="utf-8")

"""Offline HTML pages: sections, tables, bars, and pictures side by side."""

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --faint: #8881; --bad: #c0392b; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: .5rem 0 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem;
  border-bottom: 1px solid var(--line); } p.lead { margin: .2rem 0 1rem; opacity: .8; }
nav a { margin-right: 1rem; } .scroll { overflow-x: auto; } .side { display: flex; flex-wrap: wrap; gap: 1.2rem; }
.group { display: flex; flex-wrap: wrap; gap: .4rem; max-width: 100%; padding: .3rem; background: var(--faint);
  border-radius: 4px; } .group > div { max-width: 100%; overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; } th { text-align: left; font-weight: 600; opacity: .75; }
th, td { padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--faint); white-space: nowrap; }
td:last-child { white-space: normal; min-width: 9rem; }
td.number { white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
.finding { border-left: 4px solid var(--bad); padding: .2rem .8rem; margin: .6rem 0; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .92em; }
"""


def html_page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """Returns a whole page that needs no network. sections: heading and HTML of each."""
    anchored = [(f"part-{i}", heading, body) for i, (heading, body) in enumerate(sections)]
    links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading, _ in anchored)
    parts = "".join(f'<h2 id="{anchor}">{escape(heading)}</h2>\n{body}\n' for anchor, heading, body in anchored)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p><nav>{links}</nav>\n{parts}</body></html>\n'
    )


def side_by_side(groups: Sequence[Sequence[str]]) -> str:
    """Arranges SVGs in as many columns as fit; those of a group stay together."""
    drawn = ("".join(f"<div>{svg}</div>" for svg in group) for group in groups)
    return '<div class="side">' + "".join(f'<div class="group">{group}</div>' for group in drawn) + "</div>"


class Html(str):
    """Text that is HTML already and was written here; any other is escaped."""


def html_table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a table. numbers: columns that are aligned right. Cells are escaped unless they are `Html`."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if i in numbers else ''}>{cell if isinstance(cell, Html) else escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def bar(fraction: float) -> Html:
    """Returns a horizontal bar of `fraction` of 20 rem."""
    # Styled inline, because a notebook shows it without the page's style sheet.
    look = "background:#4a7fb5;height:.8rem;min-width:2px;border-radius:2px"
    return Html(f'<div style="{look};width:{max(0.0, fraction) * 20:.2f}rem"></div>')

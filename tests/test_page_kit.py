"""Pages as text: strict data, everything escaped, no network, no name declared twice, colours told apart."""

import html
import html.parser
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import meshwright as mw
from meshwright.formatting import format_time
from meshwright.generation.generator import Generated, GenerationReport
from meshwright.trainer.evaluation import BatchEvaluation, Evaluation
from meshwright.trainer.parity import Parity, StepParity
from meshwright.views.blocks import Column, Grid, Table, Text
from meshwright.views.charts import Axis, Chart, Series
from meshwright.views.colours import (
    PALETTE,
    TASKS,
    block_colour,
    css_variables,
    ink_on,
    task_colour,
)
from meshwright.views.draw import picture_of
from meshwright.views.report import SCRIPTS, Live, Report, Section, to_json
from xlacensus.hlo.scopes import scopes_of

SCRIPT = "</script><script>alert(1)</script><!-- & \u2028"


def page(live: Live | None = None) -> Report:
    chart = Chart(
        Axis("x", "seconds"),
        Axis("y"),
        [Series(SCRIPT, [0.0, 1.0], [float("nan"), 2.0])],
        title=SCRIPT,
    )
    table = Table(
        [Column(SCRIPT), Column("n", "number")], [[SCRIPT, np.float32(1.5)], ["b", float("inf")]]
    )
    return Report(
        SCRIPT,
        [Section(SCRIPT, [Text([SCRIPT]), Grid([chart, table])]), Section("Two", [])],
        live=live,
    )


def data_of(html: str) -> dict:
    found = re.search(
        r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL
    )
    assert found

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(found[1], parse_constant=refuse)


def test_data_is_strict_and_cannot_end_its_element() -> None:
    html = page().html()
    assert data_of(html)["sections"][0]["title"] == SCRIPT
    assert SCRIPT not in html and html.count("<script") == 2
    grid = data_of(html)["sections"][0]["blocks"][1]["blocks"]
    assert grid[0]["series"][0]["y"] == [None, 2] and grid[1]["rows"] == [
        [SCRIPT, 1.5],
        ["b", None],
    ]


def test_the_policy_allows_no_source_but_the_page() -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page().html())
    live = re.search(
        r'http-equiv="Content-Security-Policy" content="([^"]+)"', page(Live("/data.json")).html()
    )
    assert policy and live
    assert (
        "default-src 'none'" in policy[1]
        and "connect-src" not in policy[1]
        and "unsafe" not in policy[1]
    )
    assert "connect-src 'self'" in live[1] and "http" not in live[1]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    """The page is the value of an attribute: nothing of it is an element of the notebook."""
    elements: list[tuple[str, dict[str, str | None]]] = []

    class Elements(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            elements.append((tag, dict(attrs)))

    shown = page()
    Elements().feed(shown.frame())
    ((tag, attributes),) = elements
    assert tag == "iframe" and attributes["sandbox"] == "allow-scripts"
    assert attributes["srcdoc"] == shown.html()


def test_modules_declare_no_name_twice() -> None:
    folder = resources.files("meshwright.views") / "assets"
    assert {f"{name}.js" for name in SCRIPTS} == {
        f.name for f in folder.iterdir() if f.name.endswith(".js")
    }
    names: Counter[str] = Counter()
    seen: list[str] = []
    for name in SCRIPTS:
        text = (folder / f"{name}.js").read_text()
        for imported in re.findall(r'from "\./(\w+)\.js"', text):
            assert imported in seen, f"{name}.js imports {imported}.js, which comes later"
        seen.append(name)
        names.update(
            re.findall(
                r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", text, re.MULTILINE
            )
        )
        assert "innerHTML" not in text and "eval(" not in text
    assert [name for name, n in names.items() if n > 1] == []


def test_a_page_holds_no_objects() -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        to_json({"a": {1, 2}.__class__()})


# Machado, Oliveira and Fernandes (2009), severity 1.
_SIGHT = {
    "normal": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    t = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("which", "paper"), [(0, "#ffffff"), (1, "#16191f")])
def test_colours_can_be_told_apart(which: int, paper: str) -> None:
    luminance = np.array([0.2126, 0.7152, 0.0722])
    colours = [pair[which] for pair in PALETTE.values()]
    for colour in colours:
        low, high = sorted([luminance @ linear(colour), luminance @ linear(paper)])
        assert (high + 0.05) / (low + 0.05) >= 3, colour
    for sight, matrix in _SIGHT.items():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in colours]
        for (a, one), (b, other) in itertools.combinations(zip(colours, seen, strict=True), 2):
            assert np.linalg.norm(one - other) >= 11, (sight, a, b)


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in values]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_drawings_have_the_palette_of_the_pages_and_ink_that_is_readable_on_it() -> None:
    fills = [block_colour(n) for n in range(32)] + [
        task_colour(kind, stage) for kind in TASKS for stage in range(4)
    ]
    assert len({block_colour(n) for n in range(32)}) == 32 and block_colour(32) == block_colour(0)
    assert min(contrast(fill, ink_on(fill)) for fill in fills) > 4.2
    css = css_variables()
    assert all(f"--{name}:{pair[0]}" in css for name, pair in PALETTE.items())
    drawn = picture_of("w", (8, 8), "DF", (("fsdp",), ("tensor",)), {"fsdp": 2, "tensor": 2})
    boxes = [block_colour(n) for n in range(4)]
    assert re.findall(r'<rect [^>]*fill="(#\w{6})"', drawn.svg()) == boxes
    printed = io.StringIO()
    Console(file=printed, force_terminal=True, color_system="truecolor", no_color=False).print(
        drawn
    )
    assert all(
        f"48;2;{';'.join(str(int(box[i : i + 2], 16)) for i in (1, 3, 5))}" in printed.getvalue()
        for box in boxes
    )


def _generated() -> Generated:
    report = GenerationReport(1, 4, 3, 0.5, 0.1, 0.2, "gathered", 2**20, 2**16, 2**16, 2**10)
    return Generated(("<b>three</b> words",), ((5, 6, 7),), ((-1.0, -2.0, -3.0),), report)


RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "run": (lambda: mw.recipe("tiny", mesh="fsdp=2", steps=7), "differences from the recipe tiny"),
    "parity": (
        lambda: Parity(("fsdp=2", "data=1"), (), (StepParity(1, (2.0, 2.0), 1e-7, "embed"),)),
        "gradients differ",
    ),
    "evaluation": (lambda: Evaluation(40, 2.0, 16, 2048, 9000), "7.389"),
    "wrapped evaluation": (
        lambda: BatchEvaluation(3, 0.25, {"loss": 0.25, "accuracy": 0.75}),
        "accuracy",
    ),
    "generated": (_generated, "mean log-probability -2.000"),
    "plan": (
        lambda: mw.plan("llama32-1b", on="v6e:2x2", tokens_per_step="256K")[0],
        "Where the bytes go",
    ),
}
"""Result -> how it is made, and what its page holds."""


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_shows_the_page_of_every_result(name: str) -> None:
    make, text = RESULTS[name]
    shown = make()._repr_html_()
    assert shown.startswith("<iframe") and text in html.unescape(shown)
    assert "<b>three" not in shown


def test_the_instruction_that_xla_made_of_several_names_the_first_and_how_many_more() -> None:
    name = "jit(f)/shard_map/transpose(jvp())/while/body/(blocks.out/psum:blocks.up/psum:blocks.gate/psum)"
    assert scopes_of(name, {}) == ("blocks.out and 2 more",)
    assert scopes_of("jit(f)/while/body/attention/(a/add:a/mul)", {}) == ("attention", "a")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.23, "4.2 s"),
        (200, "3 min 20 s"),
        (600, "10 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
        (178_140, "2 days 1 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_time(seconds) == text

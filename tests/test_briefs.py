"""Results of the public functions print as short texts, and as small pages in a notebook."""

import dataclasses
import inspect
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.checkpoint.conversion import Conversion
from meshwright.formatting import Brief
from meshwright.generation.generator import Generated, Generator
from meshwright.trainer.evaluation import BatchEvaluation, Evaluation
from meshwright.trainer.parity import StepParity
from meshwright.views.blocks import Column, Table
from meshwright.views.report import FRAME_BYTES, Report, Section

LONG = "x" * 100_000


def plans() -> Any:
    return mw.plan("llama32-1b", on="v5p:4x4x4", tokens_per_step="1M")


def summary() -> mw.Summary:
    numbers = {field.name: 1 for field in dataclasses.fields(mw.Summary)}
    return mw.Summary(
        **{**numbers, "goodput": {"goodput": 0.91}, "out": Path("runs/a"), "sample": LONG}
    )  # type: ignore[arg-type]


def generated() -> Generated:
    report: Any = SimpleNamespace(new_tokens=9)
    return Generated((LONG,) * 99, ((1,) * 999,) * 99, ((0.1,) * 999,) * 99, report)


def census() -> mw.Census:
    import jax

    return mw.census(jax.jit(lambda x: x @ x), jax.numpy.ones((8, 8)))


STEPS = tuple(StepParity(step, (1.0, 1.0), 0.0, "w") for step in range(999))
ROWS: dict[str, Any] = {
    "Plans": plans,
    "Plan": lambda: plans()[0],
    "Offers": lambda: mw.offers("llama32-1b", on="h100:8..16", tokens="10B"),
    "Offer": lambda: mw.offers("llama32-1b", on="h100:8", tokens="10B")[0],
    "Proof": lambda: mw.Proof(plans()[0], 1.0, 2.0**30, 3.0, census={"a": LONG}, page=LONG * 9),
    "Summary": summary,
    "Parity": lambda: mw.Parity(("fsdp=2", "data=1"), (), STEPS),
    "Census": census,
    "LayoutView": lambda: mw.show("llama32-1b", mesh="fsdp=8"),
    "Evaluation": lambda: Evaluation(1, 2.0, 3, 4, 5),
    "BatchEvaluation": lambda: BatchEvaluation(1, 2.0, {f"m{i}": 1.0 for i in range(999)}),
    "Generated": generated,
    "Conversion": lambda: Conversion(Path("o"), "Llama", 9, 9, "bfloat16", 0, (LONG,) * 99),
}
"""Result -> an example, with as much in it as a long run has."""
OTHERS = ("Generator", "View", "Run", "Wrapped", "ArrayPicture", "PanelPicture", "dict")
"""Results that need a folder or a model, are a configuration, or are pictures."""


@pytest.mark.parametrize("name", ROWS)
def test_a_result_is_a_short_text(name: str) -> None:
    result = ROWS[name]()
    assert type(result).__name__ == name
    text = repr(result)
    assert len(text) < 4000 and "\x1b" not in text
    assert name in ("Plans", "Offers") or text.startswith(f"<{name} ")
    if name in ("Plans", "Plan", "Offers", "Proof", "Parity", "Census", "LayoutView"):
        assert len(result._repr_html_().encode()) <= FRAME_BYTES


def test_every_result_of_a_public_function_has_a_row() -> None:
    results = set()
    for name in mw.__all__:
        function = getattr(mw, name)
        if inspect.isfunction(function):
            found = function.__annotations__["return"]
            results |= set(typing.get_args(found)) if "|" in str(found) else {found}
    names = {getattr(result, "__name__", str(result)) for result in results}
    assert names <= {*ROWS, *OTHERS, "dict[str, str]"}, names
    assert issubclass(Generator, Brief)


def test_a_page_in_a_notebook_is_cut_and_a_file_is_not() -> None:
    rows = [[f"row {number} {'x' * 50}"] for number in range(20_000)]
    report = Report("Large", [Section("Rows", [Table([Column("a")], rows)])])
    framed = report.frame()
    assert len(framed.encode()) <= FRAME_BYTES
    assert "rows are in this notebook" in framed and "row 0 " in framed
    assert "row 19999 " in report.html()

"""Errors of predictions that the pages print: those of the result files, and printed by the scripts that have the rows."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import left_out
import pytest
import report
from rows import read_rows

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
RESULTS = json.loads(report.RESULTS.read_text(encoding="utf-8"))
LEFT_OUT = json.loads(report.LEFT_OUT.read_text(encoding="utf-8"))
FIGURES = report.figures(RESULTS, LEFT_OUT, json.loads(report.MEASURED.read_text(encoding="utf-8")))


def module_of_bench(name: str) -> ModuleType:
    """Imports a script of bench/ by its name."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))


page_table = module_of_bench("page_table")
nanogpt_step = module_of_bench("nanogpt_step")
STEPS = json.loads(nanogpt_step.RESULTS.read_text(encoding="utf-8"))
SCRIPTS = {report.SCRIPT: FIGURES, nanogpt_step.SCRIPT: nanogpt_step.figures(STEPS)}
"""Script -> its figures, as its result files have them."""


def test_every_printed_figure_is_that_of_the_results() -> None:
    used = set()
    for page in page_table.pages():
        text = page.read_text(encoding="utf-8")
        for script, figures in SCRIPTS.items():
            assert page_table.with_figures(text, script, figures) == text, (
                f"{page.relative_to(ROOT)}: python bench/{script}"
            )
        used |= set(page_table.marks_of(text))
    made = {(f"bench/{script}", name) for script, of in SCRIPTS.items() for name in of}
    assert used == made


def test_the_step_of_nanogpt_is_printed_on_every_number_of_cores_that_was_measured() -> None:
    """The better of two runs is not the result: both stand in README.md, and in the result file."""
    assert STEPS.keys() >= {"1", "2"}
    for cores, run in STEPS.items():
        for theirs in ("eager", "compiled"):
            ratio = f"{run['results'][theirs]['ratio']:.2f}"
            assert ratio in nanogpt_step.sentence_of(cores, run)
        assert nanogpt_step.sentence_of(cores, run) in (ROOT / "README.md").read_text(
            encoding="utf-8"
        )


def test_a_stale_figure_is_found() -> None:
    text = "a <!-- figures: bench/foresight/report.py median -->median error of 1%<!-- end of the figures -->."
    found = page_table.with_figures(text, report.SCRIPT, FIGURES)
    assert FIGURES["median"] in found and "of 1%" not in found
    assert page_table.with_figures(text, "other.py", {}) == text
    with pytest.raises(KeyError):
        page_table.with_figures(text, report.SCRIPT, {})


def test_the_table_of_foresight_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "foresight.md").read_text(encoding="utf-8")
    for line in report.lines_of_spread(RESULTS["spread"]):
        assert f"{line}\n" in page
    for name, (layouts, regret) in RESULTS["sweeps"].items():
        assert f"| {name} | {layouts} | {regret:+.1%} |\n" in page


def test_the_results_are_those_of_the_rows() -> None:
    """`python bench/foresight/report.py` prices them again."""
    rows, _ = read_rows()
    errors = {name: error for name, (_, _, error) in report.results_of(rows).items()}
    assert errors.keys() == RESULTS["errors"].keys()
    assert errors == pytest.approx(RESULTS["errors"], rel=1e-6, abs=1e-9)
    spread = report.spread(errors.values())
    assert spread == pytest.approx(RESULTS["spread"]["all rows, both halves"], rel=1e-6)


def test_the_table_without_each_program_is_that_of_the_results() -> None:
    page = left_out.PAGE.read_text(encoding="utf-8")
    assert left_out.table(LEFT_OUT) in page


def test_the_errors_without_each_program_are_those_of_its_constants() -> None:
    """`python bench/foresight/left_out.py` fits them again."""
    rows, _ = read_rows()
    errors = {}
    for program, constants in LEFT_OUT["constants"].items():
        values = left_out.read_constants(constants)
        errors |= left_out.errors_of(rows, program, values)
    assert errors.keys() == {row.id for row in rows}
    assert errors == pytest.approx(LEFT_OUT["errors"], rel=1e-6, abs=1e-9)
    spreads = left_out.spreads(rows, errors)
    assert spreads.keys() == LEFT_OUT["spread"].keys()
    for name, spread in spreads.items():
        assert spread == pytest.approx(LEFT_OUT["spread"][name], rel=1e-6, abs=1e-9), name


def test_no_constant_is_fitted_on_the_program_left_out() -> None:
    """A change of that program's measured times, and of the half kept apart, changes no constant."""
    rows, _ = read_rows()
    chosen = [row for row in rows if row.system in ("AXLearn", "nanotron", "Meta (4D)")]
    chosen += [row for row in rows if row.system == "PyTorch FSDP"]
    program = "PyTorch FSDP"
    fitted = left_out.without(chosen, program, left_out.Prices())
    changed = []
    for row in chosen:
        apart = not row.is_fitted or left_out.program_of(row) == program
        changed.append(dataclasses.replace(row, measured=3 * row.measured) if apart else row)
    assert changed != chosen
    assert left_out.without(changed, program, left_out.Prices()) == fitted
    others = [dataclasses.replace(row, measured=3 * row.measured) for row in chosen]
    assert left_out.without(others, program, left_out.Prices()) != fitted


def test_the_table_of_compiled_plans_is_that_of_the_rows() -> None:
    """`python bench/compiled_plans.py --table` prices them again."""
    compiled_plans = module_of_bench("compiled_plans")
    rows = json.loads(compiled_plans.RESULTS.read_text(encoding="utf-8"))
    priced = [compiled_plans.with_prediction(row) for row in rows]
    assert compiled_plans.table(priced) in compiled_plans.PAGE.read_text(encoding="utf-8")


_RATE = re.compile(
    r"\b(median error|errors? of|percentile|at the median|than (planned|predicted))\b", re.I
)
_PERCENT = re.compile(r"\d ?%")
_SENTENCE = re.compile(r"(?<=[.])\s|\n\s*\n|\n\s*[-|]")
EXEMPT = {
    "docs/plan.md": "Above the\nwork of one device",  # how far plans are above a lower bound
}
"""Page -> start of a sentence with a figure that is not the error of a prediction."""


def test_no_error_of_a_prediction_is_typed_by_hand() -> None:
    """The log and the changelog say what was found on their day; lessons and outputs of commands show one run."""
    faults = []
    for page in page_table.pages():
        if page.name in ("log.md", "changelog.md") or "ladder" in page.parts:
            continue
        name = str(page.relative_to(ROOT))
        text = page_table.without_figures(page.read_text(encoding="utf-8"))
        text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
        for sentence in _SENTENCE.split(text):
            exempt = EXEMPT.get(name)
            if exempt is not None and exempt in sentence:
                continue
            if _RATE.search(sentence) and _PERCENT.search(sentence):
                faults.append(f"{name}: {sentence.strip()}")
    assert not faults, "\n".join(faults)

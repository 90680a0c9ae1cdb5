"""The ten published runs of docs/atlas: priced as their table says, with a page for each."""

import json
import sys
from pathlib import Path

import pytest
from other_programs import SOFTWARE, estimate_program
from page_data import page_data

ATLAS = Path(__file__).parents[1] / "docs" / "atlas"
sys.path.insert(0, str(ATLAS))
try:
    import table
finally:
    sys.path.remove(str(ATLAS))
FILES = sorted((ATLAS / "runs").glob("*.toml"))
RECORDS = {
    record["name"]: record
    for record in json.loads((ATLAS / "atlas.json").read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_run_is_priced_as_the_table_says(file: Path) -> None:
    facts, record = table.read_facts(file), RECORDS[file.stem]
    predicted = estimate_program(facts.placed(), facts.target(), SOFTWARE[facts.step.program])
    seconds, mfu = facts.published_step(predicted)
    assert predicted.seconds == pytest.approx(record["predicted_seconds"], rel=1e-9)
    assert predicted.mfu == pytest.approx(record["predicted_mfu"], rel=1e-9)
    assert (seconds, mfu) == pytest.approx(
        (record["published_seconds"], record["published_mfu"]), rel=1e-9
    )
    assert facts.reason or abs(predicted.seconds / seconds - 1) <= 0.1, (
        "a file says why its prediction is off"
    )
    assert all(source.url.startswith("https://") for source in facts.sources) and facts.sources
    data = page_data((ATLAS / "pages" / f"{file.stem}.html").read_text(encoding="utf-8"))
    assert data["title"] == facts.title and record["plan"] in data["lead"]


def test_the_table_and_the_pages_are_those_of_the_results() -> None:
    assert len(FILES) >= 10 and {file.stem for file in FILES} == RECORDS.keys()
    assert {page.stem for page in (ATLAS / "pages").glob("*.html")} == RECORDS.keys()
    assert table.table(list(RECORDS.values())) in (ATLAS / "index.md").read_text(encoding="utf-8")


def test_a_plan_that_is_slower_is_printed_so_and_its_rule_is_on_the_page() -> None:
    """Savings have their sign, and sentences follow from the figures."""
    index = (ATLAS / "index.md").read_text(encoding="utf-8")
    records = list(RECORDS.values())
    assert table.sentences(records) in index
    slower = [r for r in records if r["saved"] is not None and r["saved"] < 0]
    assert slower, "two published meshes are faster by the planner's own prices"
    for record in slower:
        assert record["plan_seconds"] > record["own_seconds"]
        assert record["rule"] and record["rule"] in index
        assert f"| {record['saved']:+.1%} |" in index
    for record in records:
        if record["saved"] is not None:
            saved = 1 - record["plan_seconds"] / record["own_seconds"]
            assert record["saved"] == pytest.approx(saved, abs=1e-12)

"""Published runs from files of facts: read, priced as docs/atlas says, and searched; mistakes are named."""

import json
import sys
from pathlib import Path

import pytest
from page_data import blocks_of, page_data
from test_cli import meshwright

from meshwright.cli.atlas import main
from meshwright.errors import MeshwrightError
from meshwright.planner.estimate import estimate
from meshwright.planner.published import price_published, read_published
from meshwright.views.atlas_page import chapter_page, index_page
from meshwright.views.atlas_tables import saving

ATLAS = Path(__file__).parents[1] / "docs" / "atlas"
FILES = sorted((ATLAS / "runs").glob("*.toml"))
RECORDS = {record["name"]: record for record in json.loads((ATLAS / "atlas.json").read_text(encoding="utf-8"))}

SMALL = """
title = "Llama 3.2 1B on 8 H100 <script>alert(1)</script>"
summary = "A run that nobody published."
year = 2026
recipe = "llama32-1b"
[step]
on = "h100:8"
program = "torchtitan"
mesh = "fsdp=8"
[step.training]
batch = 64
seq = 4096
remat = "full"
[published]
tokens_per_second = 400000
[[sources]]
states = "nothing"
where = "this test"
url = "https://example.org"
"""


def facts(tmp_path: Path, text: str = SMALL) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_atlas_has_ten_runs_with_their_pages() -> None:
    assert len(FILES) >= 10 and {file.stem for file in FILES} == RECORDS.keys()
    pages = {page.stem for page in (ATLAS / "pages").glob("*.html")}
    assert pages == {*RECORDS, "index"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_run_is_priced_as_its_page_says(file: Path) -> None:
    run, record = read_published(file), RECORDS[file.stem]
    predicted = estimate(run.placed, run.target, run.software)
    assert predicted.seconds == pytest.approx(record["predicted"]["seconds"], rel=1e-9)
    assert run.published_seconds(predicted)[0] == pytest.approx(record["published_seconds"], rel=1e-9)
    assert run.published_mfu(predicted)[0] == pytest.approx(record["published_mfu"], rel=1e-9)
    assert run.reason or abs(record["error"]) <= 0.1, "a page says why its prediction is off"
    page = (ATLAS / "pages" / f"{file.stem}.html").read_text(encoding="utf-8")
    assert len(page) < 2**20
    data = page_data(page)
    assert (data["title"], data["lead"]) == (run.title, run.summary)
    texts = [text for block in blocks_of(data) for text in block.get("paragraphs", ())]
    (inspector,) = (block for block in blocks_of(data) if block["block"] == "Inspector")
    ranks = [item["facts"][inspector["names"].index("rank")] for item in inspector["items"].values()]
    ranked = [rank for rank in ranks if rank is not None]
    assert ranked == list(range(1, len(ranked) + 1)) and ranks[len(ranked) :] == [None] * (len(ranks) - len(ranked))
    assert texts == [*([run.reason] if run.reason else []), *run.differs]


def test_the_table_of_the_docs_is_that_of_the_results() -> None:
    sys.path.insert(0, str(ATLAS))
    try:
        import table
    finally:
        sys.path.remove(str(ATLAS))
    assert table.table(list(RECORDS.values())) in (ATLAS / "index.md").read_text(encoding="utf-8")
    for page in sorted((ATLAS / "pages").glob("*.html")):
        assert page.read_text(encoding="utf-8") == table.current(page.read_text(encoding="utf-8")), (
            "docs/atlas/table.py"
        )


def test_a_run_of_ones_own(tmp_path: Path) -> None:
    chapter = price_published(read_published(facts(tmp_path)))
    assert chapter.best is not None and chapter.same_mesh is not None
    # The search includes the published mesh, so its choice is at least as fast.
    assert chapter.best.estimate.seconds <= chapter.same_mesh.estimate.seconds
    published = 64 * 4096 / 400000
    assert chapter.error == pytest.approx(chapter.predicted.seconds / published - 1)
    page, index = chapter_page(chapter).html(), index_page([chapter]).html()
    assert "<script>alert" not in page + index and "blocks.query" in page
    assert f"{chapter.saved:.0%} less" in saving(chapter)


def test_a_run_that_fits_nowhere(tmp_path: Path) -> None:
    # 405 billion parameters in 8 x 80 GB: 6.5 TB of float32 parameters and moments alone.
    text = SMALL.replace("llama32-1b", "llama3-405b").replace("batch = 64", "batch = 8")
    chapter = price_published(read_published(facts(tmp_path, text)))
    assert chapter.best is None and chapter.same_mesh is None and chapter.saved is None
    assert saving(chapter).startswith("Nothing fits: no mesh has the memory")
    data = page_data(chapter_page(chapter).html())
    (plans,) = (b for b in blocks_of(data) if b["block"] == "Table" and b["title"] == "Every plan and its reason")
    assert {row[7] for row in plans["rows"]} == {"does not fit"} and len(plans["rows"]) > 3
    assert page_data(index_page([chapter]).html())["title"].startswith("Atlas")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "pages"
    printed = meshwright("atlas", str(facts(tmp_path)), "--out", str(out), "--json")
    (record,) = json.loads(printed)
    assert record["published_seconds"] == pytest.approx(64 * 4096 / 400000)
    assert sorted(page.name for page in out.iterdir()) == ["index.html", "small.html"]


def test_the_example_of_the_docs_is_read(tmp_path: Path) -> None:
    page = (ATLAS / "index.md").read_text(encoding="utf-8")
    example = page.split("<!-- example -->\n```toml\n")[1].split("```")[0]
    run = read_published(facts(tmp_path, example))
    assert abs(estimate(run.placed, run.target, run.software).seconds / (256 * 4096 / 128 / 2150) - 1) < 0.1


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("title =", "titel =", "titel is no field.*\n.*did you mean 'title'"),
        ('recipe = "llama32-1b"\n', "", "recipe is missing.*\n.*meshwright recipes"),
        ("year = 2026", 'year = "2026"', "year is '2026'.*\n.*without quotes"),
        ("year = 2026", "year = ", "facts .*small.toml\n.*line 4"),
        ("batch = 64", "batchs = 64", "step.training.batchs, in .*\n.*\n.*did you mean 'batch'"),
        ("batch = 64", 'batch = "64"', "step.training.batch '64'.*\n.*int"),
        ('remat = "full"', 'remat = "ful"', "step.training.remat.*\n.*\n.*did you mean 'full'"),
        ("batch = 64", "batch = 63", "batch of 63 .*in .*small.toml"),
        ("fsdp=8", "fsdp=4", "4 devices"),
        ("torchtitan", "torchtitam", "did you mean 'torchtitan'"),
        ("llama32-1b", "llama32-1c", "did you mean 'llama32-1b'"),
        ("tokens_per_second = 400000", "tokens = 1e12", "no speed"),
        ("tokens_per_second = 400000", "mfu = 41", "published.mfu is 41.*\n.*0.41 for 41 %"),
        ("tokens_per_second = 400000", "seconds = inf", "published.seconds is inf.*\n.*positive"),
        ("[published]", "[publishd]", "did you mean 'published'"),
        ("[[sources]]", "[[source]]", "did you mean 'sources'"),
        ("states =", "state =", "sources.state is no field.*\n.*did you mean 'states'"),
        ("https://example.org", "javascript:alert(1)", "sources.url.*\n.*https://"),
        ("mesh =", "nvlink_bandwidth = 50\nmesh =", "nvlink_bandwidth is 50.*\n.*450e9"),
        ("[step.training]", "[model]\nwidht = 5\n[step.training]", "model.widht.*\n.*\n.*did you mean 'width'"),
        ("h100:8", "h101:8", "h101"),
    ],
)
def test_mistakes_are_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=named):
        read_published(facts(tmp_path, SMALL.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"llama32-1b"', '"FILE"'),
        ('"llama32-1b"', '"FILE:recipe"'),
        ('"llama32-1b"', '"hf:FOLDER"'),
        ("mesh =", 'layout = "FILE:recipe"\nmesh ='),
        ('remat = "full"', 'matmul_precision = "FILE:recipe"'),
    ],
)
def test_a_file_of_facts_runs_no_code(old: str, new: str, tmp_path: Path) -> None:
    code, ran = tmp_path / "code.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')\ndef recipe(): pass\n", encoding="utf-8")
    changed = SMALL.replace(old, new.replace("FILE", str(code)).replace("FOLDER", str(tmp_path)))
    with pytest.raises(MeshwrightError):
        price_published(read_published(facts(tmp_path, changed)))
    assert not ran.exists()


def test_files_whose_pages_have_one_name_are_refused(tmp_path: Path) -> None:
    file = facts(tmp_path)
    for other in (file, file.rename(tmp_path / "index.toml")):
        with pytest.raises(MeshwrightError, match="has that name too"):
            main([str(other), str(other), "--out", str(tmp_path / "pages")])
        facts(tmp_path)

"""Memory that reading data takes: tables that decode to much more than they have, and records without number."""

import json
from pathlib import Path

import pytest

from meshwright.config import Data
from meshwright.data import conversations
from meshwright.data.readers import read_documents
from meshwright.data.sources import FileDocuments, Records
from meshwright.errors import DataError
from meshwright.fine_tuning import FineTune

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def test_a_text_that_many_rows_share_is_in_memory_once(tmp_path: Path) -> None:
    file, rows, size = tmp_path / "a.parquet", 300, 2**19
    table = pyarrow.table({"text": ["a" * size, "b" * size] * (rows // 2)})
    parquet.write_table(table, file, dictionary_pagesize_limit=2**22)
    del table
    before, most = pyarrow.total_allocated_bytes(), 0
    read = []
    for text in read_documents(FileDocuments((file,)), Records(str(file))):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        read.append((text[0], len(text)))
    assert read == [("ab"[row % 2], size) for row in range(rows)]
    assert most < 16 * size, (
        f"{most:,} bytes for {rows * size:,} of text in {file.stat().st_size:,}"
    )


def test_a_table_that_decodes_to_far_more_than_it_has_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.data import columns

    monkeypatch.setattr(columns, "_DECODED", 2**20)
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["x" * 2**20] * 4})
    parquet.write_table(table, file, compression="zstd", use_dictionary=False)
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(DataError, match=r"row group 0 has .* 4 MiB, .* times as many, in 4 rows"):
        list(read_documents(FileDocuments((file,)), Records(str(file))))
    assert pyarrow.total_allocated_bytes() - before < 2**20


def test_places_of_records_are_not_limited_by_the_size_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a document is as if there were more than eight million records."""
    monkeypatch.setattr(conversations, "LARGE", 2**10)
    folder = tmp_path / "chat"
    folder.mkdir()
    for name in ("a", "b"):
        records = [{"prompt": f"{n}", "completion": "yes"} for n in range(100)]
        if name == "b":
            records[41]["completion"] = "long " * 20
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    data, tuning = Data(paths=(str(folder),)), FineTune(objective="answers")
    with pytest.raises(DataError, match=r"b.jsonl, line 42(.|\n)*takes 10\d positions"):
        conversations.load_conversations(data, 32, tuning, tmp_path / "cache")
    corpus, _ = conversations.load_conversations(data, 128, tuning, tmp_path / "cache")
    assert corpus.files[0].documents == 200

"""Nobody deletes what another may read: entries of the cache, and every place in the package that deletes or renames."""

import ast
import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.data import tokens
from meshwright.data.conversations import load_conversations
from meshwright.data.corpus import load_corpus

SOURCE = Path(meshwright.__file__).parent

BAD = '{"text": "one"}\n{"text": \n{"text": "two", "other": "three"}\n'
TALK = json.dumps({"prompt": "hello there", "completion": "good morning"}) + "\n"

CALLS = {
    # Parameters of `load_corpus`, each with values other than the first process has.
    "own": "load_corpus([text], 'bytes', cache, own=own, bad_records=0.5)",
    "bad_records": "load_corpus([text], 'bytes', cache, bad_records=0.0)",
    "text_field": "load_corpus([text], 'bytes', cache, bad_records=0.5, text_field='other')",
    "progress": "load_corpus([text], 'bytes', cache, bad_records=0.5, progress=None)",
    "check": "load_corpus([text], 'bytes', cache, bad_records=0.5, check=refuse)",
    # Those of `load_conversations`.
    "data": "load_conversations(Data(paths=(talk,), held_out=0.5), 128, answers, cache)",
    "seq": "load_conversations(Data(paths=(talk,)), 8, answers, cache)",
    "tuning": "load_conversations(Data(paths=(talk,)), 8, dropping, cache)",
}
"""What a second process does with the same cache, by the option in which it differs."""

SECOND = """
import json, sys
from pathlib import Path
from meshwright.config import Data
from meshwright.data.conversations import load_conversations
from meshwright.data.corpus import load_corpus
from meshwright.errors import DataError
from meshwright.fine_tuning import FineTune

text, talk, own, cache = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
answers = FineTune(objective="answers", template=None)
dropping = FineTune(objective="answers", too_long="drop")

def refuse(tokenizer, name):
    raise DataError("the tokenizer", "is refused here", "another")

for call in json.loads(sys.argv[5]):
    try:
        eval(call)
        print("used")
    except DataError as error:
        print("refused", " ".join(str(error).split()))
"""


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Inode, time and content of every file."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            status = file.stat()
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found[str(file.relative_to(folder))] = (status.st_ino, status.st_mtime_ns, content)
    return found


def in_second_process(tmp_path: Path, calls: list[str]) -> list[str]:
    words = [str(tmp_path / name) for name in ("a.jsonl", "talk.jsonl", "own.json", "cache")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", SECOND, *words, json.dumps(calls)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_an_option_that_is_not_in_the_key_of_the_cache_leaves_what_another_process_reads(
    tmp_path: Path,
) -> None:
    from meshwright.config import Data
    from meshwright.fine_tuning import FineTune

    options = {
        name
        for function in (load_corpus, load_conversations)
        for name in inspect.signature(function).parameters
    }
    assert options - {"paths", "spec", "cache"} == set(CALLS), "an option without a row"
    (tmp_path / "a.jsonl").write_text(BAD)
    (tmp_path / "talk.jsonl").write_text(TALK * 20)
    cache = tmp_path / "cache"
    reader = load_corpus([str(tmp_path / "a.jsonl")], "bytes", cache, bad_records=0.5).files[0]
    (tmp_path / "own.json").write_text(reader.tokenizer.to_json())
    talk = Data(paths=(str(tmp_path / "talk.jsonl"),))
    load_conversations(talk, 128, FineTune(objective="answers"), cache)
    before = snapshot(cache)

    said = dict(zip(CALLS, in_second_process(tmp_path, list(CALLS.values())), strict=True))

    after = snapshot(cache)
    assert {name: after.get(name) for name in before} == before
    assert bytes(reader.tokens[:].tolist()[:3]) == b"one"
    assert said["bad_records"].startswith("refused") and "a.jsonl, line 2" in said["bad_records"]
    assert "bad_records=0.34" in said["bad_records"]
    assert said["check"].startswith("refused the tokenizer")
    assert said["seq"].startswith("refused") and said["own"] == said["progress"] == "used"


DELETES = {
    "api/proofs.py": "log of its own child, under a random name",
    "api/verb.py": "probe of its own, under a random name",
    "checkpoint/checkpoints.py": "under the lock of the output folder: what a save that was cut off left",
    "checkpoint/conversion.py": "OUT.partial under its lock, or a folder under a random name",
    "checkpoint/move.py": "verb `checkpoint move`, under the locks of both folders",
    "checkpoint/steps.py": "oldest checkpoints of the run that holds the lock of the folder",
    "bench/hardware/run.py": "results of an earlier run in the folder that the user named",
    "bench/slow_steps.py": "traces that this process took, in its own folder, after it has read them",
    "data/cache_entries.py": "verb `cache`, under the lock of the entry",
    "data/conversations.py": "folder of its own, under a random name",
    "data/tokenizing.py": "unfinished token file, under its lock",
    "launching/supervise.py": "file that only this process writes",
    "reporters/files.py": "under the lock of the output folder: metrics that cannot be read are kept aside",
    "storage/bucket.py": "the primitives of a bucket",
    "storage/removing.py": "the primitives that the others call",
    "storage/transfer.py": "source of a move, and files of its own under random names",
    "storage/writing.py": "replaces a file as a whole: a reader has the old one open, or finds the new one",
    "trainer/bucket_lock.py": "lock that this process holds",
    "trainer/hosts.py": "files of its own, under random names",
    "trainer/tiers.py": "this process's folder on its own disk, under the lock of the output folder",
}
"""Modules that delete, rename or replace files, and why no other process reads what they delete."""

FUNCTIONS = {
    "rmtree", "remove_tree", "remove_file", "remove_empty_folder", "remove_checkpoint", "unlink", "rmdir",
    "rename", "renames",
    "removedirs", "replace_durably", "delete_range", "move_tree",
}  # fmt: skip


def deletes(node: ast.AST) -> bool:
    """Whether a call deletes, renames or replaces a file."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in FUNCTIONS:
        return True
    if name in ("replace", "remove") and isinstance(node.func, ast.Attribute):
        owner = getattr(node.func.value, "id", "")
        if owner == "os":
            return True
        # `Path.replace` has one argument, `str.replace` has two.
        return name == "replace" and len(node.args) == 1 and owner != "dataclasses"
    return False


def test_every_module_that_deletes_says_why_nobody_else_reads_it() -> None:
    found = set()
    for file in sorted(SOURCE.rglob("*.py")):
        if any(map(deletes, ast.walk(ast.parse(file.read_text(encoding="utf-8"))))):
            found.add(str(file.relative_to(SOURCE)))
    moved = {"api/tokenizing.py"}  # moves a token file that it made to where it was asked for
    assert found - moved == set(DELETES), "say here why no other process reads what is deleted"


def test_an_entry_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    from meshwright.data.cache_entries import delete_entry, list_entries
    from meshwright.errors import ConfigError, DataError

    (tmp_path / "a.jsonl").write_text(BAD)
    (tmp_path / "talk.jsonl").write_text(TALK * 20)
    cache = tmp_path / "cache"
    in_second_process(tmp_path, ["load_corpus([text], 'bytes', cache, bad_records=0.5)"])
    (entry,) = list_entries(cache)
    assert (entry.state, entry.used, entry.source) == (
        "complete", False, str(tmp_path / "a.jsonl"),
    )  # fmt: skip
    reader = load_corpus([str(tmp_path / "a.jsonl")], "bytes", cache, bad_records=0.5)
    assert list_entries(cache)[0].used
    with pytest.raises(DataError, match="reads or writes it now"):
        delete_entry(cache, entry.name)
    assert bytes(reader.files[0].tokens[:].tolist()[:3]) == b"one"
    with pytest.raises(ConfigError, match="no such entry"):
        delete_entry(cache, "tokens/..")
    del reader
    tokens._open_file.cache_clear()  # open shards keep their reader
    assert delete_entry(cache, entry.name) == entry.bytes
    assert not list_entries(cache) and not list((cache / "tokens").iterdir())

"""Links in a folder from elsewhere: nothing that the package writes there goes through one, whatever it is called."""

import ast
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.api import training
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.conversion import Journal
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.checkpoint.steps import remove_checkpoint
from meshwright.config import Training
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.hardware.hosts import ALONE
from meshwright.hugging_face.safetensors_files import NewSafetensorsFile
from meshwright.launching import supervise
from meshwright.launching.restarts import Restarts
from meshwright.models.families.gpt2 import Gpt2
from meshwright.reporters.files import EventLog, JsonLines
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run
from meshwright.storage import transfer
from meshwright.storage.removing import remove_tree
from meshwright.storage.writing import make_folder, open_file, write_atomically
from meshwright.trainer.lock import locked
from meshwright.trainer.watchdog import Watchdog

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "meshwright"
RUN = Run(model=Gpt2(257, 32, 1, 4, positions=32), training=Training(seq=32, batch=4))
PRECIOUS = "everything that was there\n"


def write_events(out: Path) -> None:
    events = EventLog(out / "events.jsonl")
    events.add("start", identity="$(touch /tmp/x)")
    events.release()


def write_metrics(out: Path) -> None:
    lines = JsonLines(out / "metrics.jsonl", upto=0)
    lines.write(1, {"loss": 2.0})
    lines.close()


def hold_lock(out: Path) -> None:
    with locked(out):
        pass


def write_manifest(out: Path) -> None:
    record = {"params.w": TensorRecord((4, 8), "float32", (1, 2))}
    Manifest(0, 0, RUN, record).write(out)


def write_journal(out: Path) -> None:
    limits = (Restarts(), Watchdog())
    supervise.Supervisor("train", [], RUN, out, ALONE, None, *limits)._note("starting", 0)


def write_start(out: Path) -> None:
    supervise.Meeting(out, ALONE, Restarts(wait=1)).next_start(RUN, None)


def write_weights(out: Path) -> None:
    file = NewSafetensorsFile(out / "model.safetensors", {"w": ("F32", (2, 2))})
    file.tensor("w")[...] = 1
    file.release()


def copy_from_store(out: Path) -> None:
    transfer.copy_file(Path(__file__), out / "run.json")


def write_evidence(out: Path) -> None:
    make_folder(out, "evidence-step-3")
    with open_file(out / "evidence-step-3" / "batch-process-0.npz", "wb") as file:
        np.savez(file, x=np.zeros(3))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "events": write_events,
    "metrics": write_metrics,
    "lock": hold_lock,
    "run": lambda out: write_run(RUN, out / "run.json"),
    "manifest": write_manifest,
    "journal of the supervisor": write_journal,
    "start of the supervisor": write_start,
    "weights": write_weights,
    "copy": copy_from_store,
    "evidence": write_evidence,
}
"""What writes into a folder that may come from elsewhere."""


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("writer", WRITERS)
def test_no_file_is_written_through_a_link(writer: str, tmp_path: Path) -> None:
    """A link stands at every name that the writer makes, in turn: to a file, to a folder, and to nothing."""
    write, first = WRITERS[writer], tmp_path / "first"
    first.mkdir()
    write(first)
    names = names_in(first)
    assert names
    for number, name in enumerate(names):
        for kind in ("file", "folder", "missing"):
            out, victim = tmp_path / f"{number}-{kind}", tmp_path / f"victim-{number}-{kind}"
            (out / name).parent.mkdir(parents=True)
            if kind == "file":
                victim.write_text(PRECIOUS)
            elif kind == "folder":
                victim.mkdir()
            (out / name).symlink_to(victim)
            with pytest.raises(ConfigError, match=f"link to '{victim}'"):
                write(out)
            assert os.readlink(out / name) == str(victim)
            if kind == "file":
                assert victim.read_text() == PRECIOUS
            elif kind == "folder":
                assert not list(victim.iterdir())
            else:
                assert not victim.exists()


def test_a_pipe_is_not_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match="not a regular file"):
        write_events(tmp_path)


def test_a_training_refuses_links_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name of a folder that was trained in is tried; the run is refused before its text is read."""
    run = mw.recipe("tiny", mesh="data=1", layers=1, width=16, mlp=16, seq=16, batch=2, steps=2)
    run = dataclasses.replace(
        run,
        training=dataclasses.replace(run.training, save_every=1, eval_samples=2, max_to_keep=1),
        data=dataclasses.replace(run.data, sample=2, tokenizer="bytes"),
    )
    out, cache = tmp_path / "out", tmp_path / "cache"
    mw.train(run, out, progress="none", cache=cache, devices=1)
    names = {path.relative_to(out) for path in out.rglob("*")}
    names = {name for name in names if len(name.parts) <= 2}
    assert {"events.jsonl", "metrics.jsonl", "sample.txt", ".lock", "checkpoints"} <= set(
        map(str, names)
    )
    monkeypatch.setattr(training.loop, "prepare_run", lambda *a, **k: pytest.fail("it began"))
    for number, name in enumerate(sorted(names)):
        hostile = tmp_path / f"hostile-{number}"
        (hostile / name).parent.mkdir(parents=True)
        (hostile / name).symlink_to(tmp_path / "victim")
        for start in ("fresh", "resume"):
            with pytest.raises(ConfigError, match="it is a link to"):
                mw.train(run, hostile, start=start, progress="none", cache=cache, devices=1)
    assert not (tmp_path / "victim").exists()


def test_the_folder_that_the_user_names_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    write_events(tmp_path / "runs")
    write_atomically(tmp_path / "runs" / "run.json", "{}")
    assert make_folder(tmp_path / "runs", "a", "b").is_dir()
    assert names_in(tmp_path / "disk") == ["a", "a/b", "events.jsonl", "run.json"]


TYPED = {
    "analysis/programs.py",
    "api/proving.py",
    "api/verb.py",
    "bench/microbenchmarks.py",
    "cli/launch.py",
    "views/report.py",
}
"""Modules that write a file which the user names, and may be a pipe or a link."""
OWN = {
    "api/proofs.py",
    "cli/main.py",
    "cli/output.py",
    "data/conversations.py",
    "data/tokens.py",
    "reporters/console.py",
}
"""Modules that write in the cache, in a scratch folder that they have just made, or to a device."""


def writes(file: Path) -> Iterator[int]:
    """Yields the lines of a module that open a file for writing by themselves."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method, arguments = name.rpartition(".")[2], [ast.unparse(a) for a in node.args]
        mode = next((a for a in arguments if re.fullmatch(r"'[wax]b?\+?'|'r\+b?'", a)), "")
        creates = name == "os.open" and "O_RDONLY" not in arguments[1]
        copies = method in ("write_bytes", "touch") or name.startswith("shutil.copy")
        writes_text = method == "write_text" and isinstance(node.func, ast.Attribute)
        if creates or copies or writes_text or (method == "open" and mode):
            yield node.lineno


def remove_old_checkpoint(out: Path) -> None:
    remove_checkpoint(out / "checkpoints", 4)


def open_checkpoints(out: Path) -> None:
    Checkpoints(out / "checkpoints", max_to_keep=2).close()


def set_checkpoints_aside(out: Path) -> None:
    Checkpoints(out / "checkpoints", max_to_keep=None).set_aside(3)


def meet_again(out: Path) -> None:
    supervise.Meeting(out, ALONE, Restarts(wait=1))


def begin_conversion_again(out: Path) -> None:
    (out / "weights.partial" / "progress.json").write_text("{}")
    Journal(out / "weights", {"of": "another source"}, 1, lambda text: None)


REMOVERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "old checkpoint": (remove_old_checkpoint, "checkpoints/4/state/precious"),
    "remains of a save": (open_checkpoints, "checkpoints/4.tmp/state/precious"),
    "checkpoint set aside": (set_checkpoints_aside, "checkpoints/4/precious"),
    "earlier meeting": (meet_again, ".supervise/meeting-1/0"),
    "conversion that was begun": (begin_conversion_again, "weights.partial/old/precious"),
}
"""What deletes or renames in a folder that may come from elsewhere, and a file that it deletes with its folders."""


@pytest.mark.parametrize("remover", REMOVERS)
def test_nothing_is_deleted_or_renamed_through_a_link(remover: str, tmp_path: Path) -> None:
    """A link stands at the place of every folder on the way, in turn: what it leads to stays as it is."""
    remove, name = REMOVERS[remover]
    parts = Path(name).parts
    for number in range(1, len(parts)):
        out, victim = tmp_path / f"out-{number}", tmp_path / f"victim-{number}"
        link = out.joinpath(*parts[:number])
        precious = victim.joinpath(*parts[number:])
        precious.parent.mkdir(parents=True)
        precious.write_text(PRECIOUS)
        link.parent.mkdir(parents=True)
        link.symlink_to(victim)
        with contextlib.suppress(MeshwrightError, OSError):
            remove(out)
        assert precious.read_text() == PRECIOUS, link


def test_what_is_in_the_folder_itself_is_deleted(tmp_path: Path) -> None:
    """Each remover of the test above, without links; the folder that the user named is reached through one."""
    for number, (remove, name) in enumerate(REMOVERS.values()):
        out, disk = tmp_path / f"out-{number}", tmp_path / f"disk-{number}"
        (disk / name).parent.mkdir(parents=True)
        (disk / name).write_text(PRECIOUS)
        out.symlink_to(disk)
        remove(out)
        assert not (out / name).exists(), name


def test_a_link_in_a_deleted_folder_is_deleted_and_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "out" / "4"
    victim.mkdir()
    (victim / "precious").write_text(PRECIOUS)
    folder.mkdir(parents=True)
    (folder / "inner").symlink_to(victim)
    (tmp_path / "out" / "link").symlink_to(victim)
    remove_tree(folder, below=tmp_path)
    remove_tree(tmp_path / "out" / "link", below=tmp_path)
    assert not list((tmp_path / "out").iterdir())
    assert (victim / "precious").read_text() == PRECIOUS


PATHS = {
    "os.remove", "os.unlink", "os.rmdir", "os.removedirs", "os.rename", "os.renames", "os.replace",
    "shutil.rmtree", "shutil.move",
}  # fmt: skip
"""Functions that delete or rename by path."""


def removes(file: Path) -> Iterator[int]:
    """Yields the lines of a module that delete or rename by themselves."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        # `Path.replace` has one argument, `str.replace` two; copy.replace and dataclasses.replace have keywords.
        replaces = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        if (
            ast.unparse(node.func) in PATHS
            or node.func.attr in ("unlink", "rmdir", "rename")
            or replaces
        ):
            yield node.lineno


def test_every_deletion_uses_the_one_that_follows_no_links() -> None:
    """`storage/removing.py` and `storage/writing.py` have a descriptor; `storage/bucket.py` has objects."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name not in ("storage/removing.py", "storage/writing.py", "storage/bucket.py"):
            found += [f"{name}:{line}" for line in removes(file)]
    assert found == []


def test_every_writer_uses_the_one_that_follows_no_links() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if name.startswith("storage/") or name in TYPED | OWN:
            continue
        found += [f"{name}:{line}" for line in writes(file)]
    assert found == []

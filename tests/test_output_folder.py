"""The output folder as an identity: it goes away, is replaced, deleted and submitted again; a resume says where it begins."""

import dataclasses
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import programs_are_compiled_once, text_run, train_into

from meshwright.checkpoint import steps as checkpoint_steps
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.steps import committed_steps, remove_checkpoint
from meshwright.errors import CheckpointError
from meshwright.runs.run import Run
from meshwright.storage.tiers import LocalCheckpoints
from meshwright.trainer import loop
from meshwright.trainer.preemption import Preemption

__all__ = ["programs_are_compiled_once"]  # a fixture of this file too

STEPS = 6


class At:
    """Does something once a step is reported."""

    def __init__(self, step: int, action: Callable[[], None]):
        self.step, self.action = step, action

    def write(self, step: int, values: dict[str, float]) -> None:
        if step == self.step:
            self.action()

    def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return text_run(tmp_path, "data=1", steps=STEPS, save_every=2, max_to_keep=9, remat="none")


def train_at(
    run: Run, out: Path, cache: Path, step: int, action: Callable[[], Any], **how: Any
) -> Any:
    prepared = loop.prepare_run(run, cache=cache)
    return loop.train(prepared, out, reporters=lambda start: [At(step, action)], **how)


def remove(out: Path) -> None:
    shutil.rmtree(out)


def replace(out: Path) -> None:
    out.rename(out.with_name("unmounted"))
    out.mkdir()  # the mount point


def replace_with_checkpoints(out: Path) -> None:
    out.rename(out.with_name("unmounted"))
    (out / "checkpoints").mkdir(parents=True)


@pytest.mark.parametrize("harm", [remove, replace, replace_with_checkpoints])
@pytest.mark.parametrize("save_every", [2, 0])
def test_an_output_folder_that_goes_away_ends_the_run_and_is_not_made_anew(
    run: Run,
    tmp_path: Path,
    cache: Path,
    save_every: int,
    harm: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    run = dataclasses.replace(
        run, training=dataclasses.replace(run.training, save_every=save_every)
    )
    with pytest.raises(
        CheckpointError, match=r"the folder is gone|another folder is in its place"
    ) as error:
        train_at(run, out, cache, 1, lambda: harm(out))
    assert error.value.exit_code == 4
    assert f"{out}: " in capfd.readouterr().err, "said at once"
    assert not [path for path in out.rglob("*") if path.is_file()], "nothing is written there"
    assert out.exists() == (harm is not remove)


@pytest.mark.parametrize("harm", [remove, replace])
def test_a_host_whose_own_disk_goes_away_trains_without_local_checkpoints(
    run: Run, tmp_path: Path, cache: Path, harm: Callable[[Path], None]
) -> None:
    disk = tmp_path / "disk"
    local = LocalCheckpoints(path=str(disk), every=1)
    run = dataclasses.replace(run, local_checkpoints=local)
    summary = train_at(run, tmp_path / "out", cache, 1, lambda: harm(disk))
    assert summary.steps == STEPS
    assert not list(disk.rglob("*")), "no folder is made under the mount point"


def killed(run: Run, out: Path, cache: Path, step: int, **how: Any) -> None:
    def kill() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_at(run, out, cache, step, kill, **how)


def events_of(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_every_resume_says_the_step_and_what_is_taken_again(
    run: Run, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"
    local = LocalCheckpoints(path=str(disk), every=1)
    run = dataclasses.replace(
        run,
        training=dataclasses.replace(run.training, save_every=2),
        local_checkpoints=local,
    )
    killed(run, out, cache, STEPS)
    shutil.rmtree(disk)  # replaced
    capfd.readouterr()
    train_into(run, out, cache, start="resume")
    said = capfd.readouterr().err
    assert said.count("going on from step 4; steps 5 to 5 are taken again\n") == 1
    (restored,) = events_of(out, "restore")
    assert (restored["restored"], restored["taken again"]) == (4, 1)
    train_into(run, out, cache, start="resume")
    assert f"going on from step {STEPS}\n" in capfd.readouterr().err
    assert events_of(out, "restore")[-1]["taken again"] == 0


def test_a_signal_before_the_first_step_keeps_what_only_a_local_disk_has(
    run: Run, tmp_path: Path, cache: Path
) -> None:
    """The hosts' own checkpoints are forgotten at the end: the output folder has got their state before."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    run = dataclasses.replace(
        run,
        training=dataclasses.replace(run.training, save_every=0),
        local_checkpoints=LocalCheckpoints(path=str(disk), every=1),
    )
    killed(run, out, cache, 3)
    assert not committed_steps(out / "checkpoints")
    preemption = Preemption()
    preemption.received = signal.SIGTERM
    stopped = train_into(run, out, cache, start="resume", preemption=preemption)
    assert stopped.steps_taken == 0 and stopped.steps > 0
    assert committed_steps(out / "checkpoints") == [stopped.steps]
    assert not list(disk.rglob("manifest"))


def test_a_folder_that_was_deleted_and_submitted_again_is_a_new_run(
    run: Run, tmp_path: Path, cache: Path
) -> None:
    out, disk = tmp_path / "out", tmp_path / "disk"
    run = dataclasses.replace(run, local_checkpoints=LocalCheckpoints(path=str(disk), every=1))
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, save_every=0))
    killed(run, out, cache, 5)
    assert list(disk.rglob("manifest"))
    before = events_of(out, "start")[0]["identity"]
    shutil.rmtree(out)
    with pytest.raises(CheckpointError, match="no checkpoint was committed there"):
        train_into(run, out, cache, start="resume")
    shutil.rmtree(out)
    killed(run, out, cache, 4, start="resume if exists")
    assert events_of(out, "start")[0]["how"] == "fresh"
    assert events_of(out, "start")[0]["identity"] != before
    # The same command once more: its own checkpoints are taken.
    summary = train_into(run, out, cache, start="resume if exists")
    assert summary.steps == STEPS and summary.steps_taken < STEPS


def test_remains_of_a_deletion_that_was_cut_off_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (2, 4):
        (folder / str(step) / "manifest").mkdir(parents=True)
        (folder / str(step) / "manifest" / "metadata").write_text("{}")
        (folder / str(step) / "state").mkdir()

    class Killed(BaseException):
        pass

    calls = []

    def cut_off(path: Path, **options: Any) -> None:
        calls.append(path)
        if path.exists():
            raise Killed

    monkeypatch.setattr(checkpoint_steps, "remove_tree", cut_off)
    with pytest.raises(Killed):
        remove_checkpoint(folder, 2)
    monkeypatch.undo()
    assert committed_steps(folder) == [4]
    Checkpoints(folder, max_to_keep=2).close()
    assert [path.name for path in folder.iterdir()] == ["4"]

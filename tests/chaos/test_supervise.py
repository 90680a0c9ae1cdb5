"""Supervisors: what they start again, on which hosts and from which checkpoint; short chaos of two real processes."""

import dataclasses
import importlib.util
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, HostError, MeshwrightError
from meshwright.hardware.hosts import ALONE, Hosts
from meshwright.hardware.targets import parse_target
from meshwright.launching import supervise as supervision
from meshwright.launching.restarts import NoProgressError, Restarts
from meshwright.launching.supervise import Meeting, Start, Supervisor, _without
from meshwright.planner.fewer_devices import plan_for_fewer
from meshwright.planner.search import search
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.trainer.watchdog import Watchdog

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def run() -> Run:
    return dataclasses.replace(find_recipe("tiny"), mesh=MeshShape(data=2, fsdp=4))


def hosts(process: int, processes: int = 3) -> Hosts:
    return Hosts("test", processes, process, "127.0.0.1:9911")


def meet(out: Path, run: Run, living: list[int], restarts: Restarts) -> dict[int, Any]:
    """What the supervisors of the living hosts start, each in a thread."""
    found: dict[int, Any] = {}
    meetings = {process: Meeting(out, hosts(process), restarts) for process in living}

    def one(process: int) -> None:
        try:
            found[process] = meetings[process].next_start(run, 12)
        except HostError as error:
            found[process] = error

    threads = [threading.Thread(target=one, args=(process,)) for process in living]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_hosts_meet_once_for_each_restart(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_POLL", 0.05)
    everyone = Start((0, 1, 2), "127.0.0.1:9911")
    assert meet(tmp_path, run, [0, 1, 2], Restarts(wait=30)) == dict.fromkeys((0, 1, 2), everyone)
    # A later job, whose files of an earlier one are of another form.
    (tmp_path / ".supervise" / "start-7.json").write_text("[1, 2")
    (tmp_path / ".supervise" / "start-x.json").mkdir()
    (tmp_path / "events.jsonl").write_text('[]\n{"event": "start", "devices": "many"}\n')
    assert meet(tmp_path, run, [0, 1, 2], Restarts(wait=30)) == dict.fromkeys((0, 1, 2), everyone)


def test_the_hosts_that_are_left_go_on_without_the_first(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_POLL", 0.05)
    monkeypatch.setattr(supervision, "_TURN", 0.2)
    wide = dataclasses.replace(
        run, mesh=MeshShape(data=3, fsdp=4), training=dataclasses.replace(run.training, batch=48)
    )
    found = meet(tmp_path, wide, [1, 2], Restarts(wait=1, hosts="left"))
    assert found[1] == found[2]
    start = found[1]
    assert start.members == (1, 2) and start.coordinator == "127.0.0.1:9911"
    assert MeshShape.parse(start.mesh).size == 8
    # The one that comes later is told so.
    late = Meeting(tmp_path, hosts(0), Restarts(wait=1, hosts="left"))
    late.number = 0
    with pytest.raises(HostError, match=r"hosts \(1, 2\) went on without this one"):
        late.next_start(wide, 12)


def test_the_planner_chooses_the_smaller_mesh(run: Run) -> None:
    simulated = plan_for_fewer(run, 1, 4, "cpu")
    assert simulated.mesh.size == 4 and not simulated.training
    assert "nothing is known of cpu" in simulated.why and "ranked as on h100:1x4" in simulated.why
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, remat="full"))
    known = plan_for_fewer(run, 1, 4, "NVIDIA H100 80GB HBM3")
    best = search(
        dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=1024)),
        parse_target("h100:1x4"),
    )
    chosen = best.plans[0].run.training
    assert known.mesh == best.plans[0].mesh
    assert known.training == {"remat": chosen.remat, "microbatches": chosen.microbatches}
    assert known.why.startswith(best.plans[0].name) and "the fastest of" in known.why
    with pytest.raises(ConfigError, match="the batch of 16"):
        plan_for_fewer(run, 1, 17, "cpu")
    large = find_recipe("llama3-70b")
    with pytest.raises(
        ConfigError, match=r"none of \d+ plans fits; closest on .* which does not fit: "
    ):
        plan_for_fewer(large, 1, 2, "NVIDIA H100 80GB HBM3")


def test_restarts_are_limited(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [75]
    monkeypatch.setattr(
        "meshwright.launching.supervise.Supervisor._attempt",
        lambda self, start, attempt: codes[attempt % len(codes)],
    )
    limits = (Restarts(most=2, backoff=0), Watchdog())
    with pytest.raises(NoProgressError, match="started again 2 times without a checkpoint"):
        Supervisor("train", [], run, tmp_path, ALONE, None, *limits).supervise()
    # A mistake in the run is met again by every start, and so is damage that no host can go round; a full disk may not.
    for codes[:], code in (([2], 2), ([4], 4), ([10, -9, 0], 0)):
        assert Supervisor("train", [], run, tmp_path, ALONE, None, *limits).supervise() == code


def test_a_host_that_starts_nothing_more_tells_the_others(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their children would wait for its child, five minutes at each start."""
    codes = {0: [75] * 9, 1: [3]}
    # The supervisor of another run, which was refused the folder, tells those of this one nothing.
    monkeypatch.setattr("meshwright.launching.supervise.Supervisor._attempt", lambda *_: 9)
    second = (Restarts(most=5, backoff=0.2), Watchdog())
    other = Supervisor("train", [], run, tmp_path, hosts(1, 2), None, *second)
    assert other.supervise() == 9 and not (tmp_path / ".supervise" / "stopped").exists()
    monkeypatch.setattr(
        "meshwright.launching.supervise.Supervisor._attempt",
        lambda self, start, attempt: codes[self.hosts.process][attempt],
    )
    limits = (Restarts(most=5, backoff=0.2), Watchdog())
    ended: dict[int, int] = {}
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def one(process: int) -> None:
        ended[process] = Supervisor(
            "train", [], run, tmp_path, hosts(process, 2), None, *limits
        ).supervise()

    threads = [threading.Thread(target=one, args=(process,)) for process in (0, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(20)
    assert ended == {0: 75, 1: 3}
    assert "it starts nothing more: process 1 ended with exit code 3" in capfd.readouterr().err
    # While all goes well no supervisor reads what is of another: each writes its own journal.
    assert {path.name for path in (tmp_path / ".supervise").iterdir()} == {
        "journal-0.jsonl", "journal-1.jsonl", "stopped",
    }  # fmt: skip


def test_several_starts_print_one_json(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    child, ran = tmp_path / "python", tmp_path / "ran"
    child.write_text(
        f"#!/bin/sh\nls {ran} >/dev/null 2>&1 && echo second && exit 0\necho first; touch {ran}; exit 143\n"
    )
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    limits = (Restarts(most=2, backoff=0), Watchdog())
    assert (
        Supervisor("train", ["--json"], run, tmp_path / "out", ALONE, None, *limits).supervise()
        == 0
    )
    assert capfd.readouterr().out == "second\n"
    ran.unlink()
    assert Supervisor("train", [], run, tmp_path / "out", ALONE, None, *limits).supervise() == 0
    assert capfd.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize(
    ("phase", "words"),
    [("", "gave no sign for"), ("load", "in one place, last at 0 load"), ("step", "in one place, last at 4 step")],
)  # fmt: skip
def test_a_child_that_hangs_is_killed(
    phase: str,
    words: str,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before its first sign, in its imports, and in a step."""
    child = tmp_path / "python"
    step = 4 if phase == "step" else 0
    sign = f'[{step}, "{phase}", 1e6, ""]'
    give = f"echo '{sign}' >&$MESHWRIGHT_BEATS" if phase else "true"
    child.write_text(f"#!/bin/bash\n{give}\nexec sleep 600\n")
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    monkeypatch.setattr(supervision, "_STARTING", 0.1, raising=False)
    limits = (Restarts(most=0, backoff=0), Watchdog(silence=2))
    with pytest.raises(MeshwrightError, match="after exit code 137"):
        Supervisor("train", [], run, tmp_path / "out", ALONE, None, *limits).supervise()
    assert words in capfd.readouterr().err


def test_a_child_may_prepare_for_hours(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is tokenised for as long as it takes; the child gives signs all the while."""
    child = tmp_path / "python"
    sign = '[0, "prepare", 1e6, ""]'
    child.write_text(f"#!/bin/bash\necho '{sign}' >&$MESHWRIGHT_BEATS\nsleep 1\n")
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    limits = (Restarts(most=0, backoff=0), Watchdog(silence=2))
    assert Supervisor("train", [], run, tmp_path / "out", ALONE, None, *limits).supervise() == 0


def test_arguments_of_a_restart() -> None:
    words = ["tiny", "--at", "4", "--steps=9", "--at=5", "--resume", "--out", "x"]
    assert _without(words, {"--at": 1, "--resume": 0}) == ["tiny", "--steps=9", "--out", "x"]
    assert _without(["--training.stage_saves", "input", "--x"], {"--training.stage-saves": 1}) == [
        "--x"
    ]


@pytest.fixture(scope="module")
def chaos(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[types.ModuleType, Path, dict[str, Any]]:
    """The bench, its folder, and the result of the undisturbed run."""
    import sys

    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("chaos", BENCH / "chaos.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    folder = tmp_path_factory.mktemp("chaos")
    reference = module.start("none", folder / "reference")
    assert reference.finish() == [0, 0]
    return module, folder, module.result(reference.out)


MORE = ("SIGSTOP", "truncated file", "full disk", "network cut", "host lost")


@pytest.mark.parametrize(
    "kind", ["SIGKILL of one", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in MORE)]
)
def test_chaos(kind: str, chaos: tuple[types.ModuleType, Path, dict[str, Any]]) -> None:
    module, folder, expected = chaos
    if kind == "network cut" and module.Pair.apart:
        pytest.skip(module.Pair.apart)
    row = module.row(3, kind, folder / kind.replace(" ", "-"), expected)
    assert row["ended by itself"] and row["equal"] and row["named by the other"] in (True, None), (
        row
    )
    assert row["starts"] >= 2
    logs = "".join((folder / kind.replace(" ", "-") / f"log-{i}").read_text() for i in range(2))
    if kind == "SIGKILL of one":
        assert (
            "error: training on 2 hosts, seen by process" in logs and "the last whole one" in logs
        )


HANGS = (
    "its start", "joining", "metrics.jsonl", "events.jsonl", "data", "shared save", "sample.txt", "local tier",
    "the end",
)  # fmt: skip


@pytest.mark.parametrize("place", HANGS)
def test_a_host_that_hangs_is_named(
    place: str, chaos: tuple[types.ModuleType, Path, dict[str, Any]]
) -> None:
    """The host that waits for no other is named by the rest, which wait for it; the run goes on without its hang."""
    module, folder, expected = chaos
    assert tuple(module.HANGS) == HANGS
    kind = f"hang in {place}"
    row = module.row(0, kind, folder / kind.replace(" ", "-"), expected)
    assert row["ended by itself"] and row["equal"] and row["named by the other"], row
    assert (row["starts"] == 1) == (kind in module.UNHARMED), row

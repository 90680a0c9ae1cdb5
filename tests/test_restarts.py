"""Starts without progress: how many a supervisor and a scheduler's job make, over weeks that are simulated."""

import dataclasses
import random
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config import MeshShape
from meshwright.hardware.hosts import ALONE
from meshwright.launching import job_starts, schedulers
from meshwright.launching import supervise as supervision
from meshwright.launching.job_starts import JobStarts
from meshwright.launching.restarts import (
    EXCEPTIONS,
    NO_PROGRESS,
    NoProgressError,
    Restarts,
    Tally,
    restarts,
)
from meshwright.launching.supervise import Supervisor
from meshwright.runs.recipe import find_recipe
from meshwright.trainer.watchdog import Watchdog

DAYS, INTERRUPTIONS, NOTICES = 54, 419, 20
"""Of the training of Llama 3 405B (arXiv:2407.21783, section 3.3.4); notices of maintenance are made up."""
DAY = 86400.0
STEP, SAVE, START = 20.0, 100, 600.0
"""Seconds of a step, steps between two checkpoints, seconds until a start has restored and compiled."""
MAINTENANCE = 3600.0
"""Seconds for which a notice stands."""


class World:
    """A machine with a clock, interruptions and notices, and a run that is trained on it."""

    def __init__(self, out: Path, seed: int = 0):
        draw = random.Random(seed)
        self.out, self.now, self.saved = out, 0.0, 0
        self.interruptions = sorted(draw.uniform(0, DAYS * DAY) for _ in range(INTERRUPTIONS))
        self.notices = sorted(draw.uniform(0, DAYS * DAY) for _ in range(NOTICES))
        self.last = int(DAYS * DAY / STEP)
        self.starts = 0

    def notice(self) -> str | None:
        stands = any(at <= self.now < at + MAINTENANCE for at in self.notices)
        return "maintenance-event TERMINATE_ON_HOST_MAINTENANCE" if stands else None

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1.0)

    def train(self) -> tuple[int, int]:
        """One start, until it is interrupted or the days are over: its exit code and its first step (0: none)."""
        self.starts += 1
        if self.notice():
            self.now += 60
            return 143, 0  # it sees the notice, and trains nothing
        began = self.now
        ends = [at for at in (*self.interruptions, *self.notices) if at > began]
        end = min([*ends, DAYS * DAY])
        steps = max(0, int((end - began - START) / STEP))
        announced = end in self.notices
        self.now = end
        first = self.saved + 1 if steps else 0
        reached = self.saved + steps
        self.saved = reached if announced else reached // SAVE * SAVE
        self.commit()
        if end >= DAYS * DAY:
            return 0, first
        return (143 if announced else 137), first

    def commit(self) -> None:
        if self.saved:
            for old in (self.out / "checkpoints").glob("*"):
                (old / "manifest" / "metadata").unlink()
                (old / "manifest").rmdir()
                old.rmdir()
            manifest = self.out / "checkpoints" / str(self.saved) / "manifest" / "metadata"
            manifest.parent.mkdir(parents=True)
            manifest.write_text("{}")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)

    def one_start(self: Supervisor, start: Any, attempt: int) -> int:
        code, self.first = world.train()
        self.reached = max(self.first, world.saved)
        return code

    clock = types.SimpleNamespace(
        monotonic=lambda: world.now, sleep=world.sleep, time=lambda: world.now
    )
    monkeypatch.setattr(supervision, "time", clock)
    monkeypatch.setattr(Supervisor, "_attempt", one_start)
    monkeypatch.setattr(supervision, "has_metadata_server", lambda: True)
    monkeypatch.setattr(supervision, "announced", world.notice)
    return world


def supervisor(out: Path, **limits: Any) -> Supervisor:
    run = dataclasses.replace(find_recipe("tiny"), mesh=MeshShape(data=1))
    return Supervisor("train", [], run, out, ALONE, None, Restarts(**limits), Watchdog())


def test_a_supervised_run_survives_54_days(world: World) -> None:
    assert supervisor(world.out).supervise() == 0
    assert world.now >= DAYS * DAY
    # Each interruption and notice costs one start; two that come during one start cost one together.
    assert INTERRUPTIONS * 0.9 < world.starts <= INTERRUPTIONS + NOTICES + 1


def test_a_notice_that_stands_costs_no_restart(world: World) -> None:
    """With one start without progress allowed, a notice of an hour at the first start ends nothing."""
    world.notices, world.interruptions = [0.0], []
    assert supervisor(world.out, most=0).supervise() == 0
    assert world.starts == 2


def test_a_run_that_repeats_its_steps_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 steps in each start are no progress where none is saved, and are where one is."""

    def failing(saved_each: int, codes: list[int]) -> tuple[Any, int]:
        starts = 0

        def one_start(self: Supervisor, start: Any, attempt: int) -> int:
            nonlocal starts
            starts += 1
            world.saved += saved_each
            world.commit()
            self.first, self.reached = world.saved + 1, world.saved + 900
            return codes[attempt] if attempt < len(codes) else 0

        monkeypatch.setattr(Supervisor, "_attempt", one_start)
        try:
            return supervisor(world.out, most=20).supervise(), starts
        except NoProgressError as error:
            return error, starts

    assert failing(900, [75] * 50) == (0, 51)
    error, starts = failing(0, [75] * 50)
    assert starts == 21 and "started again 20 times without a checkpoint" in str(error)
    error, starts = failing(0, [1] * 50)
    assert starts == EXCEPTIONS and "ended with an exception" in str(error)
    assert not restarts(error.exit_code)
    # An exception that passes is not one of every start.
    assert failing(0, [1, 1, 75, 1, 1, 137]) == (0, 7)


def scheduled(world: World, most: int, environment: dict[str, str], steps: Any) -> tuple[int, int]:
    """Runs a job as a scheduler does; returns its last exit code, and the number of its starts.

    steps: returns the exit code of a start, or None for one that is killed.
    """
    for count in range(INTERRUPTIONS * schedulers.BACKSTOP):
        variables = environment | {job_starts.ATTEMPT: str(count)}
        starts = JobStarts(world.out, most, variables)
        try:
            starts.begin()
            code = steps()
            code = 137 if code is None else starts.ended(code)
        except NoProgressError as error:
            code = error.exit_code
        if not restarts(code) and code:
            return code, count + 1
        if code == 0:
            return 0, count + 1
    raise AssertionError("the job never ended")


JOBS = (
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
    {"SKYPILOT_TASK_ID": "a", "SKYPILOT_NODE_RANK": "1"},
    {},
)


@pytest.mark.parametrize("environment", JOBS)
def test_a_job_survives_54_days_with_ten_starts_without_progress(
    environment: dict[str, str], world: World
) -> None:
    def one_start() -> int | None:
        code, _ = world.train()
        return None if code == 137 else code

    code, starts = scheduled(world, 10, environment, one_start)
    assert (code, world.now) == (0, DAYS * DAY) and starts == world.starts
    assert starts > INTERRUPTIONS * 0.9


@pytest.mark.parametrize(
    ("code", "starts"), [(75, 11), (None, 12), (1, EXCEPTIONS), (10, 11), (2, 1)]
)
def test_a_job_without_progress_ends(code: int | None, starts: int, world: World) -> None:
    """A start that was killed is counted by the next one."""
    last, made = scheduled(world, 10, JOBS[0], lambda: code)
    assert made == starts and last == (2 if code == 2 else NO_PROGRESS)
    # Who submits it again begins to count again.
    again = JobStarts(world.out, 10, JOBS[0] | {"SLURM_JOB_ID": "8"})
    again.begin()
    assert again.record.tally == Tally(10)


def test_every_scheduler_gives_the_run_its_limit() -> None:
    """And makes itself as many starts as 54 days take, and more."""
    job = schedulers.Job(name="a", command=("meshwright", "train"), image="i", restarts=10)
    texts = {name: write(job) for name, (write, _) in schedulers.SCHEDULERS.items()}
    for name, text in texts.items():
        assert "MESHWRIGHT_RESTARTS" in text, name
        assert str(10 * schedulers.BACKSTOP) in text, name
    assert 10 * schedulers.BACKSTOP > INTERRUPTIONS + NOTICES
    script = texts["slurm"]
    assert f" {NO_PROGRESS} |" in script
    jobset = yaml.safe_load(texts["jobset"])["spec"]
    rules = jobset["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert NO_PROGRESS in rules[0]["onExitCodes"]["values"]
    recovery = yaml.safe_load(texts["skypilot"])["resources"]["job_recovery"]
    assert NO_PROGRESS not in recovery["recover_on_exit_codes"]
    assert {1, 75, 137} <= {*recovery["recover_on_exit_codes"]}


def test_the_command_line_counts_the_starts_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a user's own code is printed each time, and ends the job at the third start."""
    import importlib

    main = importlib.import_module("meshwright.cli.main")
    monkeypatch.setenv("MESHWRIGHT_RESTARTS", "10")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(args: Any) -> int:
        raise ZeroDivisionError("theirs")

    monkeypatch.setattr(main, "run", run)
    words = ["train", "tiny", f"--out={tmp_path}", "--resume-if-exists"]
    ends = [main._run_counted(words) for _ in range(EXCEPTIONS)]
    assert [code for code, _ in ends] == [1, 1, NO_PROGRESS]
    assert all("ZeroDivisionError: theirs" in text for _, text in ends)
    # Other verbs have no output folder in which to count.
    with pytest.raises(ZeroDivisionError):
        main._run_counted(["doctor"])

"""Starts of a scheduler's job, counted since the last progress.

Slurm, Kubernetes and SkyPilot count the starts of a job in all, and a run of weeks is interrupted
more often than any number that one would write there. So a job file gives the run its limit in a
variable, and every process of the run counts its own starts in a small file of the output folder. A
run that makes no progress ends with an exit code after which the scheduler starts nothing more.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright.checkpoint.steps import committed_steps
from meshwright.documents import read_json
from meshwright.errors import MeshwrightError, StorageError
from meshwright.launching import LIMIT
from meshwright.launching.restarts import NoProgressError, Tally, restarts
from meshwright.storage.paths import path_of
from meshwright.storage.writing import make_folder, make_folder_below, write_atomically

ATTEMPT = "MESHWRIGHT_ATTEMPT"
"""Variable with the number of the start, where a scheduler tells it: 0 is a new job."""
_JOBS = ("SLURM_JOB_ID", "SKYPILOT_TASK_ID")
"""Variables that name a job, and stay the same when it is started again."""
_RANKS = (
    "SLURM_PROCID",
    "MEGASCALE_SLICE_ID",
    "TPU_WORKER_ID",
    "JOB_COMPLETION_INDEX",
    "SKYPILOT_NODE_RANK",
    "MESHWRIGHT_PROCESS",
)
"""Variables that tell a process of a job from the others, in every start."""
_PREEMPTED = (138, 143)
"""Exit codes after SIGUSR1 and SIGTERM, with which a scheduler preempts a run."""


class Record(msgspec.Struct):
    """Starts of a job, as they are kept in the output folder."""

    job: str
    tally: Tally
    running: bool = False
    """Whether the last start has not ended by itself so far: it was killed,
    where another begins."""


class JobStarts:
    """Starts of this process of a job."""

    def __init__(self, out: Path, most: int, environment: Mapping[str, str]):
        rank = "-".join(environment[name] for name in _RANKS if name in environment)
        self.out, self.file = out, out / ".starts" / f"process-{rank or 0}.json"
        self.job = " ".join(environment[name] for name in _JOBS if name in environment)
        self.record = Record(self.job, Tally(most))
        found = self._read()
        if found is not None and found.job == self.job and environment.get(ATTEMPT) != "0":
            self.record = found
            self.record.tally.most = most

    def begin(self) -> None:
        """Notes that a start begins.
        Raises NoProgressError where those before it made no progress."""
        if self.record.running:
            self.record.tally.add(137, self._newest())
        self.record.running = True
        reason = self.record.tally.verdict()
        if reason is not None:
            raise self._refusal(reason)
        with contextlib.suppress(OSError, StorageError):
            make_folder(self.out)
        self._write()

    def ended(self, code: int) -> int:
        """Notes the exit code of this start; returns the one to exit with.
        Raises NoProgressError."""
        self.record.running = False
        reason = self.record.tally.add(code, self._newest(), preempted=code in _PREEMPTED)
        self._write()
        if reason is None or not restarts(code):
            return code
        raise self._refusal(reason)

    def _refusal(self, reason: str) -> NoProgressError:
        return NoProgressError(
            f"starting the run in {self.out} once more",
            reason,
            "look at the errors of these starts; a new job of the same command begins to count "
            "again",
        )

    def _newest(self) -> int:
        """Returns the step of the newest checkpoint in the output folder;
        that of before where it cannot be listed."""
        try:
            return max(committed_steps(self.out / "checkpoints"), default=0)
        except (OSError, MeshwrightError):
            return self.record.tally.step

    def _read(self) -> Record | None:
        try:
            return msgspec.convert(read_json(self.file), Record)
        except (OSError, ValueError, MeshwrightError):
            return None

    def _write(self) -> None:
        with contextlib.suppress(OSError, StorageError):  # a full disk ends no run here
            # An output folder that is gone is not made again.
            make_folder_below(self.out, self.file.parent.name)
            write_atomically(self.file, json.dumps(msgspec.to_builtins(self.record)))


def job_starts(
    words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> JobStarts | None:
    """Returns the starts of the job that runs this command;
    None where no scheduler's job file limits them.

    words: of the command line.
    """
    limit = environment.get(LIMIT, "")
    out = _value_of(words, "--out")
    if not limit.isdecimal() or out is None or not words or words[0] not in ("train", "finetune"):
        return None
    return JobStarts(path_of(out), int(limit), environment)


def _value_of(words: Sequence[str], option: str) -> str | None:
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option and equals:
            return value
        if name == option and number + 1 < len(words):
            return words[number + 1]
    return None

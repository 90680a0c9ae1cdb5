"""Destinations of a run's metrics.

Files, a console, experiment trackers, and functions of the user's.
"""

from pathlib import Path
from typing import Any, Protocol

from meshwright.errors import ConfigError, TrainingError, foreign_code
from meshwright.plugins import PARTS, resolve
from meshwright.storage.paths import in_bucket

Values = dict[str, float]
"""Metrics of one step, by name: `loss`, `gradient norm`, `learning rate`, `tokens/s`, `MFU`,
`held-out loss`, ..."""
BETWEEN = ("saving", "evaluating", "sampling", "compiling")
"""What a loop does between steps, each with a metric of its own (`saving seconds`). `step seconds`,
the rates and MFU of a step contain none of them; waiting for data (`input wait seconds`) is part of
a step."""


class Reporter(Protocol):
    """Destination of metrics.

    Anything with these two methods is one.
    Further methods are called where a reporter has them: `sample(step, text)` with text from the
    model, `health(step, record)` with the health of every tensor (`reporters.health.HealthRecord`),
    and `rewind(step)` where the run goes on after an earlier step, at the start of a resumed
    run and when a run returns to a checkpoint. What was written of later steps is then void, and
    those steps are written again. A destination that can delete has one value for each step and
    metric; one that cannot marks the return, and the last value is the one that counts.
    """

    def write(self, step: int, values: Values) -> None:
        """Takes the metrics of a step; called on process 0 only, in the order of the steps."""
        ...

    def close(self) -> None:
        """Called once, at the end of the run or when it stops."""
        ...


def build_reporters(out: Path, run: Any) -> list[Reporter]:
    """Builds the reporters that `run.reporters` names.

    Each is a tracker, or a function `(out: Path, run: Run) -> Reporter`.
    Raises ConfigError where a name is unknown, or where the function fails or does not return a
    `Reporter`.
    """
    found: list[Reporter] = []
    for name, factory in find_reporters(out, run):
        asked = f"--report {name}"
        with foreign_code(asked, "a function (out: Path, run: Run) -> Reporter"):
            reporter = factory(out) if name in PARTS["reporter"] else factory(out, run)
        if not all(callable(getattr(reporter, method, None)) for method in ("write", "close")):
            truth = f"it returned an object of type {type(reporter).__name__}"
            raise ConfigError(
                asked, truth, "an object with methods write(step, values) and close()"
            )
        found.append(_Checked(name, reporter))
    return found


def find_reporters(out: Path, run: Any) -> list[tuple[str, Any]]:
    """Returns the names of the reporters of a run, each with the function that builds it.

    Raises ConfigError where a name is unknown, and for a tracker where the output is in a bucket.
    """
    factories = list[tuple[str, Any]]()
    for name in run.reporters:
        if name in PARTS["reporter"] and in_bucket(out):
            raise ConfigError(
                f"--report {name} with the output in {out}",
                "it keeps files there that grow, and what is in a bucket cannot",
                "a local --out, or metrics.jsonl, which every run writes",
            )
        factories.append((name, resolve("reporter", name)))
    return factories


class _Checked:
    """Reporter whose failures end the run with an error that names it."""

    def __init__(self, name: str, reporter: Reporter):
        self._name, self._reporter = name, reporter

    def write(self, step: int, values: Values) -> None:
        self._call("write", f"step {step}", step, dict(values))

    def rewind(self, step: int) -> None:
        self._call("rewind", f"returning to step {step}", step)

    def sample(self, step: int, text: str) -> None:
        self._call("sample", f"the sample of step {step}", step, text)

    def health(self, step: int, record: Any) -> None:
        self._call("health", f"the health of step {step}", step, record)

    def close(self) -> None:
        self._call("close", "closing")

    def _call(self, method: str, place: str, *arguments: Any) -> None:
        """Calls a method of the reporter; one that it does not have is left out."""
        asked = f"--report {self._name}, {place}"
        with foreign_code(asked, "correct the reporter, then --resume", kind=TrainingError):
            getattr(self._reporter, method, lambda *arguments: None)(*arguments)

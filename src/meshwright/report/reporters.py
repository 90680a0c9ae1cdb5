"""Reporters that a run names: experiment trackers (report/trackers.py), or functions from outside the package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError, TrainingError, describe_failure
from meshwright.plugins import PARTS, resolve
from meshwright.report import Reporter, Values
from meshwright.storage.paths import in_bucket


def build_reporters(out: Path, run: Any) -> list[Reporter]:
    """Builds the reporters that `run.reporters` names, each a function `(out: Path, run: Run) -> Reporter`.

    Raises ConfigError where a name is unknown, or where the function fails or does not return a `Reporter`.
    """
    return [_Checked(name, _build(name, out, run)) for name in run.reporters]


def _build(name: str, out: Path, run: Any) -> Reporter:
    is_tracker = name in PARTS["reporter"]
    if is_tracker and in_bucket(out):
        raise ConfigError(
            f"--report {name} with the output in {out}",
            "it keeps files there that grow, and what is in a bucket cannot",
            "a local --out, or metrics.jsonl, which every run writes",
        )
    factory = resolve("reporter", name)
    try:
        reporter = factory(out) if is_tracker else factory(out, run)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--report {name}", f"it {describe_failure(error)}", "a function (out: Path, run: Run) -> Reporter"
        ) from error
    if not all(callable(getattr(reporter, method, None)) for method in ("write", "close")):
        raise ConfigError(
            f"--report {name}",
            f"it returned an object of type {type(reporter).__name__}",
            "an object with methods write(step, values) and close()",
        )
    checked: Reporter = reporter
    return checked


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

    def keep_page(self, page: Callable[[], Path]) -> None:
        self._call("keep_page", "the page", page)

    def close(self) -> None:
        self._call("close", "closing")

    def _call(self, method: str, place: str, *arguments: Any) -> None:
        """Calls a method of the reporter; one that it does not have is left out."""
        try:
            getattr(self._reporter, method, lambda *arguments: None)(*arguments)
        except MeshwrightError:
            raise
        except Exception as error:
            failure, fix = f"it {describe_failure(error)}", "correct the reporter, then --resume"
            raise TrainingError(f"--report {self._name}, {place}", failure, fix) from error

"""Errors in three parts: the request, the reason it is refused, and the smallest change that fixes it."""

import contextlib
import difflib
import errno
import math
import os
import resource
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from meshwright.callers import in_python, reads_options


class MeshwrightError(Exception):
    """Refused request, with its reason and a fix.

    asked: the request.  truth: the reason, with the arithmetic.  fix: the smallest change that makes it work.
    fix_in_python: the smallest change for a caller in Python, where that is another.
    All are written with options of the command line; a caller in Python reads arguments (`callers`).
    """

    exit_code = 2

    def __init__(self, asked: str, truth: str, fix: str, fix_in_python: str | None = None):
        if not reads_options():
            asked = in_python(asked)
            truth = in_python(truth)
            fix = in_python(fix) if fix_in_python is None else fix_in_python
        self.asked, self.truth, self.fix = asked, truth, fix
        super().__init__(f"{asked}\n  because: {truth}\n  fix:     {fix}")


class ConfigError(MeshwrightError):
    """Run configuration that cannot be trained or planned."""


class DataError(MeshwrightError):
    """Text or token file that cannot be used."""

    exit_code = 3


class CheckpointError(MeshwrightError):
    """Checkpoint that cannot be written, read or verified."""

    exit_code = 4


class DamagedError(CheckpointError):
    """Checkpoint whose bytes are not those that were saved, or of which a part is missing."""


class RoomError(CheckpointError):
    """Store that takes no more bytes, or failed to take them: starting again may help."""

    exit_code = 10


class StorageError(MeshwrightError):
    """Bucket that cannot be reached, read or written."""

    exit_code = 8


class TrainingError(MeshwrightError):
    """Training run that had to stop."""

    exit_code = 5


class HostError(MeshwrightError):
    """Run on several hosts that had to stop because of one of them: restarting it may help (EX_TEMPFAIL)."""

    exit_code = 75


class WeightsError(MeshwrightError):
    """Weights of another program that are missing, damaged, or not those of the model."""

    exit_code = 7


class CensusError(MeshwrightError):
    """Compiled program that cannot be parsed, or does not fit the memory."""

    exit_code = 6


def refuse(*cases: tuple[bool, str, str, str]) -> None:
    """Raises the ConfigError of the first case `(wrong, asked, truth, fix)` that is wrong."""
    for wrong, asked, truth, fix in cases:
        if wrong:
            raise ConfigError(asked, truth, fix)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" for a misspelt name, or the list of known names where none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)


def limit_of(error: Exception) -> tuple[str, str] | None:
    """Returns which limit of the system an error comes from, and what raises it; None for other errors."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limits = {
        errno.ENFILE: (
            "all processes have as many files open as this machine allows",
            "a higher fs.file-max",
        ),
        errno.EMFILE: (
            f"this process has {most:,} files open, its limit",
            "`ulimit -n 65536` before the command",
        ),
        errno.ENOMEM: (
            "no memory is left, or no map of a file",
            "more memory, or a higher vm.max_map_count",
        ),
    }
    # Errors of TensorStore have the system's words and no number; those of EMFILE begin those of ENFILE.
    return next(
        (limit for number, limit in limits.items() if os.strerror(number) in str(error)), None
    )


def reason_of(error: Exception) -> str:
    """Returns why the system refused, without names of files; a limit with what raises it."""
    if limit := limit_of(error):
        return f"{limit[0]} ({limit[1]})"
    return (
        getattr(error, "strerror", None)
        or (str(error).splitlines() or [type(error).__name__])[0][:300]
    )


def divisors(n: int) -> list[int]:
    """Returns the divisors of `n` in ascending order, for errors that list legal sizes."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@contextlib.contextmanager
def foreign_code(
    asked: str, fix: str, truth: str = "it {}", kind: type[MeshwrightError] = ConfigError
) -> Iterator[None]:
    """Raises an error of `kind` in place of one by code from outside the package; errors of the package pass.

    truth: with `{}` where `describe_failure` stands.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        raise kind(asked, truth.format(describe_failure(error)), fix) from error


def describe_failure(error: BaseException) -> str:
    """Formats an exception raised by code outside the package: `raised KeyError: 'x' (mine.py, line 3)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"


def first_error(error: BaseException) -> MeshwrightError | None:
    """Returns the error of this package during whose handling `error` was raised; None where there is none.

    What fails while a run is closed after an error (a file that cannot be opened any more) does not replace it.
    """
    found = None
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, MeshwrightError):
            found = current
        current = current.__cause__ or current.__context__
    return found


class Closing(contextlib.ExitStack):
    """Exit stack in which the first error wins: what fails while it closes after an error is added to that as a note."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Literal[False]:
        """Closes all. Raises the first error of closing where there was none before."""
        try:
            super().__exit__(kind, error, trace)
        except Exception as later:
            if error is None or later is error:
                raise
            error.add_note(f"while closing: {describe_failure(later)}")
        return False

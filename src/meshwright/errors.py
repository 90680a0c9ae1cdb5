"""Errors in three parts: the request, the reason it is refused,
and the smallest change that fixes it."""

import contextlib
import difflib
import enum
import errno
import math
import resource
import shlex
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from meshwright.callers import in_python, reads_options


class ErrorClass(enum.Enum):
    """Class of an error: whether another start of the same run can help."""

    REQUEST = "request"
    """A wrong option, a missing permission,
    or code of the user's own: every start meets it again."""
    BYTES = "bytes"
    """Data that is not what was written: every start reads it again."""
    HOST = "this host for now"
    """Limits, memory or a device of this machine: another start,
    or another machine, may have no such trouble."""
    STORE = "store for now"
    """A disk, a file server, a network or a bucket that did not answer, or has no room now."""
    PREEMPTED = "preempted"
    """A signal asked the process to stop."""


FOR_NOW = (ErrorClass.HOST, ErrorClass.STORE)
"""Classes of errors that may pass: the system call is made again,
and then the run asks for another start."""
_NUMBERS = {
    ErrorClass.HOST: "EAGAIN EINTR EMFILE ENFILE ENOBUFS ENOLCK ENOMEM ETXTBSY",
    ErrorClass.STORE: "EBADMSG EBUSY ECANCELED ECOMM ECONNABORTED ECONNREFUSED ECONNRESET "
    "EDQUOT EFBIG EHOSTDOWN EHOSTUNREACH EIO EKEYEXPIRED EKEYREJECTED EKEYREVOKED ENETDOWN "
    "ENETRESET ENETUNREACH ENODEV ENOKEY ENOLINK ENOSPC ENOTCONN ENXIO EPROTO EREMOTEIO EROFS "
    "ESHUTDOWN ESTALE ETIME ETIMEDOUT EUCLEAN",
}
NUMBERS: dict[int, ErrorClass] = {
    getattr(errno, name): kind
    for kind, names in _NUMBERS.items()
    for name in names.split()
    if hasattr(errno, name)
}
"""Class of a failed system call by its number;
calls with any other number (ENOENT, EACCES, EISDIR) are requests."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers with which a file system takes no more bytes: calling again at once changes nothing."""


class MeshwrightError(Exception):
    """Refused request, with its reason and a fix.

    asked: the request.
    truth: the reason, with the arithmetic.
    fix: the smallest change that makes it work.
    fix_in_python: the smallest change for a caller in Python, where that is another. All are
    written with options of the command line; a caller in Python reads arguments (`callers`).
    """

    exit_code = 2
    error_class = ErrorClass.REQUEST

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
    error_class = ErrorClass.BYTES


class CheckpointError(MeshwrightError):
    """Checkpoint that cannot be written, read or verified."""

    exit_code = 4


class DamagedError(CheckpointError):
    """Checkpoint whose bytes are not those that were saved, or of which a part is missing."""

    error_class = ErrorClass.BYTES


class RoomError(CheckpointError):
    """Store that takes no more bytes, or failed to take them: starting again may help."""

    exit_code = 10
    error_class = ErrorClass.STORE


class StorageError(MeshwrightError):
    """Bucket that cannot be reached, read or written."""

    exit_code = 8
    error_class = ErrorClass.STORE


class TrainingError(MeshwrightError):
    """Training run that had to stop."""

    exit_code = 5


class HostError(MeshwrightError):
    """Run on several hosts that had to stop because of one
    of them: restarting it may help (EX_TEMPFAIL)."""

    exit_code = 75
    error_class = ErrorClass.HOST


class UnavailableError(HostError):
    """File, disk or server that this host cannot use
    for now: another start may help (EX_TEMPFAIL)."""


class WeightsError(MeshwrightError):
    """Weights of another program that are missing, damaged, or not those of the model."""

    exit_code = 7
    error_class = ErrorClass.BYTES


class CensusError(MeshwrightError):
    """Compiled program that cannot be parsed, or does not fit the memory."""

    exit_code = 6


class CompilerError(CensusError):
    """Compiler that is missing or ended without an answer: nothing is known of the program."""

    exit_code = 12


def refuse(*cases: tuple[bool, str, str, str]) -> None:
    """Raises the ConfigError of the first case `(wrong, asked, truth, fix)` that is wrong."""
    for wrong, asked, truth, fix in cases:
        if wrong:
            raise ConfigError(asked, truth, fix)


def shell_word(value: object) -> str:
    """Returns a value as a word of a command in a fix: quoted where a shell would split it."""
    return shlex.quote(str(value))


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" for a misspelt name,
    or the list of known names where none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)


def class_of(error: BaseException) -> ErrorClass:
    """Returns the class of an error, by its type and, of a failed system call, its number.

    Example:
        >>> class_of(OSError(errno.ESTALE, "stale"))
        <ErrorClass.STORE: 'store for now'>
        >>> class_of(FileNotFoundError(errno.ENOENT, "no"))
        <ErrorClass.REQUEST: 'request'>
    """
    if isinstance(error, MeshwrightError):
        return error.error_class
    if isinstance(error, KeyboardInterrupt):
        return ErrorClass.PREEMPTED
    if isinstance(error, MemoryError):
        return ErrorClass.HOST
    if isinstance(error, OSError) and error.errno is not None:
        return NUMBERS.get(error.errno, ErrorClass.REQUEST)
    if isinstance(error, TimeoutError | ConnectionError):
        return ErrorClass.STORE
    if isinstance(error, ValueError | EOFError):
        return ErrorClass.BYTES
    return ErrorClass.REQUEST


def by_class(error: BaseException, refusal: MeshwrightError) -> MeshwrightError:
    """Returns the error to raise where `error` stopped what `refusal` describes.

    That is `refusal`, the error of a request or of bytes, unless `error` may pass: then it is
    RoomError for a store that takes no more bytes, and UnavailableError for all else, with which a
    run asks for another start.
    """
    if class_of(error) not in FOR_NOW or class_of(refusal) in FOR_NOW:
        return refusal
    if isinstance(error, MeshwrightError):
        return error
    reason = reason_of(error)
    truth = refusal.truth if reason in refusal.truth else f"{refusal.truth}: {reason}"
    if getattr(error, "errno", None) in NO_ROOM:
        return RoomError(refusal.asked, truth, "free some space there, or another folder")
    limit = limit_of(error)
    if limit is not None:
        return UnavailableError(refusal.asked, truth, f"{limit[1]}; then the same command")
    fix = "a look at this host's disks, mounts and network; the same command when they answer"
    return UnavailableError(refusal.asked, truth, fix)


def unwritable_file(file: Path | str, error: OSError) -> MeshwrightError:
    """Returns the error of a file of the user's that cannot be written, for now or at all."""
    fix = "a folder that exists"
    if Path(file).is_dir():
        fix = f"a file in it, such as {Path(file) / 'result'}"
    elif Path(file).parent.is_dir():
        fix = "the name of a file that you may write"
    truth = f"the file cannot be written: {reason_of(error)}"
    return by_class(error, ConfigError(f"writing {file}", truth, fix))


def limit_of(error: BaseException) -> tuple[str, str] | None:
    """Returns which limit of the system an error comes from, and what raises it;
    None for other errors."""
    if isinstance(error, MemoryError):
        return "no memory is left", "more memory"
    number = getattr(error, "errno", None)
    if number == errno.ENFILE:
        truth = "all processes have as many files open as this machine allows"
        return truth, "a higher fs.file-max"
    if number == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        truth = f"this process has {most:,} files open, its limit"
        return truth, "`ulimit -n 65536` before the command"
    if number == errno.ENOMEM:
        truth = "no memory is left, or no map of a file"
        return truth, "more memory, or a higher vm.max_map_count"
    return None


_NO_ROOM_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than `ulimit -f` or the file system allows",
}


_LONGEST_REASON = 300
"""Characters of an exception's text that `reason_of` quotes."""


def reason_of(error: BaseException) -> str:
    """Returns the text of an exception for a user: one line, without error numbers and file names.

    It is the reason for which the system refused a call, with what raises the limit where it was a
    limit; what a document lacks, for a KeyError; else the first line of the exception's own text.
    """
    limit = limit_of(error)
    if limit is not None:
        return f"{limit[0]} ({limit[1]})"
    number = getattr(error, "errno", None)
    if number in _NO_ROOM_REASONS:
        return _NO_ROOM_REASONS[number]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError) and error.args:
        return f"it has no {error.args[0]!r}"
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if len(lines[0]) > _LONGEST_REASON:
        return f"{lines[0][:_LONGEST_REASON]} ..."
    return lines[0]


def divisors(n: int) -> list[int]:
    """Returns the divisors of `n` in ascending order, for errors that list legal sizes."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@contextlib.contextmanager
def foreign_code(
    asked: str, fix: str, truth: str = "it {}", kind: type[MeshwrightError] = ConfigError
) -> Iterator[None]:
    """Raises an error of `kind` in place of one by code from outside the package;
    errors of the package pass.

    An error that may pass (a connection that was reset) is raised as `by_class` has it.

    truth: with `{}` where `describe_failure` stands.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        refusal = kind(asked, truth.format(describe_failure(error)), fix)
        raise by_class(error, refusal) from error


def describe_failure(error: BaseException) -> str:
    """Formats an exception raised by code outside the package:
    `raised KeyError: 'x' (mine.py, line 3)`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"


def first_error(error: BaseException) -> MeshwrightError | None:
    """Returns the error of this package during whose handling `error` was raised;
    None where there is none.

    What fails while a run is closed after an error (a file
    that cannot be opened any more) does not replace it.
    """
    found = None
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, MeshwrightError):
            found = current
        current = current.__cause__ or current.__context__
    return found


class Closing(contextlib.ExitStack):
    """Exit stack in which the first error wins: what fails while it closes
    after an error is added to that as a note."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Literal[False]:
        """Closes all. Raises the first error of closing where there was none before."""
        try:
            super().__exit__(kind, error, trace)
        except Exception as later:
            if error is None or later is error:
                raise
            error.add_note(f"while closing: {describe_failure(later)}")
        return False

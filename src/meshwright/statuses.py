"""Fields of the errors of other libraries that have one Python type for every failure.

XLA and TensorStore write a status (absl::StatusCode) before the text, `NOT_FOUND: no such key`;
TensorStore adds the number of the system call, `[os_error_code='28']`. Clients of buckets, the
options of XLA and msgspec have no field either. What they write is read here and in no other module
(tests/test_error_classes.py).
"""

import enum
import os
import re

_STATUSES = (
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNKNOWN",
)
_STATUS = re.compile(rf"(?<![A-Z_])({'|'.join(_STATUSES)})(?![A-Z_])")
_SYSTEM_NUMBER = re.compile(r"\[os_error_code='(\d+)'\]")
_UNKNOWN_OPTION = re.compile(r"No such compile option: '?(\w+)'?")


def status_of(error: BaseException) -> str | None:
    """Returns the status with which the text of an error begins; None for no status.

    Example:
        >>> status_of(ValueError("UNAVAILABLE: Error reading"))
        'UNAVAILABLE'
    """
    found = _STATUS.match(str(error))
    return None if found is None else found[1]


def statuses_of(error: BaseException) -> frozenset[str]:
    """Returns all statuses in an error: XLA puts that of one device inside that of the program."""
    return frozenset(_STATUS.findall(str(error)))


def system_error(error: BaseException) -> OSError | None:
    """Returns the error of the system call that made a request to TensorStore fail;
    None where none did."""
    found = _SYSTEM_NUMBER.search(str(error))
    if found is None:
        return None
    number = int(found[1])
    return OSError(number, os.strerror(number))


class BucketFailure(enum.Enum):
    """Reason for which a bucket did not answer a request,
    with the words that its drivers have for it."""

    NO_BUCKET = ("NoSuchBucket", "bucket does not exist", "bucket not found", "Bucket not found")
    NO_CREDENTIALS = (
        "AWS_AUTH_CREDENTIALS_PROVIDER",
        "Failed to get credentials",
        "credentials provider",
    )
    FORBIDDEN = ("PERMISSION_DENIED", "UNAUTHENTICATED", "'403'", "'401'")
    UNREACHABLE = (
        "Could not connect",
        "Could not resolve",
        "Couldn't connect",
        "Couldn't resolve",
        "Timeout was reached",
    )
    UNWELL = ("retry attempts failed", "UNAVAILABLE")


def bucket_failure(error: BaseException) -> BucketFailure | None:
    """Returns why a bucket did not answer, the first reason that the error has words of;
    None for another."""
    text = str(error)
    for failure in BucketFailure:
        if any(sign in text for sign in failure.value):
            return failure
    return None


def unknown_option(error: BaseException) -> str | None:
    """Returns the compiler option that XLA does not know; None for another error."""
    found = _UNKNOWN_OPTION.search(str(error))
    return None if found is None else found[1]


def with_place(error: BaseException, name: str) -> str:
    """Returns the text of a msgspec.ValidationError with the path from `name`,
    which msgspec calls `$` or leaves out."""
    text = str(error)
    if "$" in text:
        return text.replace("$", name)
    return f"{text} - at `{name}`"

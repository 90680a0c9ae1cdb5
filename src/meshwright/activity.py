"""Work besides the training steps (tokenising, compiling, saving), announced
to those who show it."""

import contextlib
import contextvars
import dataclasses
import re
import time
from collections.abc import Iterator
from typing import Any, Protocol


@dataclasses.dataclass
class Activity:
    """Work that is under way."""

    kind: str
    """Its name for programs: tokenise, initialise, restore, compile, save, evaluate, sample."""
    doing: str
    """The work while it lasts: `compiling the train step`."""
    done: str
    """The same when it is over: `compiled the train step`."""
    step: int | None = None
    """Training step after which it happens."""
    began: float = 0.0
    """Time of `time.perf_counter` at which it began."""
    seconds: float = 0.0
    """Duration, once it is over."""
    result: str = ""
    """What came of it, in words: `held-out loss 2.3141`."""
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What came of it, as JSON values."""


_NOTICE = re.compile(r"meshwright[^:\n]*: (.+) \.\.\.")


def notice(command: str, doing: str) -> str:
    """Returns the notice of what a command is doing, one line.

    Example:
        >>> notice("meshwright prove", "compiling the train step")
        'meshwright prove: compiling the train step ...'
    """
    return f"{command}: {doing} ..."


def doing_of(line: str) -> str | None:
    """Returns what a command is doing, from its notice; None where a line is none.

    Example:
        >>> doing_of("meshwright prove: compiling the train step ..."), doing_of("W0000 libtpu")
        ('compiling the train step', None)
    """
    said = _NOTICE.fullmatch(line.strip())
    return said[1] if said else None


class Watcher(Protocol):
    """Receiver of activities, in the thread in which they run."""

    def began(self, activity: Activity) -> None:
        """Called when an activity begins."""
        ...

    def ended(self, activity: Activity, *, failed: bool) -> None:
        """Called when it is over. failed: whether it raised an error."""
        ...


_WATCHERS: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar(
    "watchers", default=()
)


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Announces the activities of this block to `watcher`, besides those who watch already."""
    token = _WATCHERS.set((*_WATCHERS.get(), watcher))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


@contextlib.contextmanager
def activity(kind: str, doing: str, done: str, step: int | None = None) -> Iterator[Activity]:
    """Announces the block as work under way, and how long it took;
    the block may state its `result`."""
    current = Activity(kind, doing, done, step, time.perf_counter())
    watchers = _WATCHERS.get()
    for watcher in watchers:
        watcher.began(current)
    try:
        yield current
    except BaseException:
        current.seconds = time.perf_counter() - current.began
        for watcher in watchers:
            with contextlib.suppress(Exception):  # the error of the work is the one that counts
                watcher.ended(current, failed=True)
        raise
    current.seconds = time.perf_counter() - current.began
    for watcher in watchers:
        watcher.ended(current, failed=False)

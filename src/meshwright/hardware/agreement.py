"""Agreement of the processes of a run.

Each publishes what it is about to do, and all stop if they differ.
Texts go through the key-value store of JAX's coordination service, which runs in process 0 from
`jax.distributed` on. Process 0 compares, so that a thousand processes cost a thousand short
messages.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import ConfigError, HostError, MeshwrightError
from meshwright.hardware.hosts import installed_versions, store
from meshwright.signs import waiting
from meshwright.statuses import statuses_of

DEADLINE = 600.0
"""Seconds for which processes wait for one that does not get further (`note_progress`)."""
_NOTED_EVERY = 2.0
"""Seconds between two notes of a process that it has got further."""
_READING, _PRINTING = 10.0, 0.5
"""Seconds that others have to read a verdict, and to print it."""
_SHOWN = 12
"""Differences that an error lists."""
_LONGEST = 60
"""Characters of a value in an error."""
_rounds: collections.Counter[str] = collections.Counter()
_PROGRESS = "meshwright/progress"
"""Folder of the store in which each process counts how often it has got further."""


def digest(text: str | bytes) -> str:
    """Returns a short digest of a text, to publish in its place."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def versions_of_program() -> dict[str, str]:
    """Returns the versions of what decides on numbers, and a digest of this package's files.

    An installation in place has no version that tells changes.
    """
    root = Path(__file__).parents[1]
    files = sorted(file for file in root.rglob("*") if _is_source(file))
    contents = b"".join(str(file.relative_to(root)).encode() + file.read_bytes() for file in files)
    return {**installed_versions(), "meshwright's source": digest(contents)}


def _is_source(file: Path) -> bool:
    """Whether a file of the package decides what a run computes: code, or a table that it reads."""
    return file.is_file() and "__pycache__" not in file.parts


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Returns the leaves of nested mappings by dotted name, as JSON.

    Example:
        >>> flatten({"training": {"lr": 0.1}, "name": "a"})
        {'training.lr': '0.1', 'name': '"a"'}
    """
    if isinstance(value, Mapping) and value:
        parts = (
            flatten(item, f"{prefix}.{name}" if prefix else str(name))
            for name, item in value.items()
        )
        return dict(itertools.chain.from_iterable(part.items() for part in parts))
    return {prefix: json.dumps(value, sort_keys=True, default=str)}


def agree(subject: str, fields: Mapping[str, str], seconds: float = DEADLINE) -> None:
    """Compares `fields` with those of all other processes.

    All must call this for the same subject.
    subject: what the fields describe, for the error.  Does nothing in a process that is alone.
    Raises ConfigError in every process where a field differs, and HostError where a process does
    not answer within `seconds`.
    """
    compare = functools.partial(_refuse_differences, subject)
    choose_together(subject, dict(fields), compare, seconds)


def _refuse_differences(subject: str, answers: list[dict[str, str]]) -> None:
    """Raises ConfigError where the fields of processes differ."""
    found = differences(dict(enumerate(answers)))
    if not found:
        return
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ConfigError(
        f"training on {len(answers)} hosts that differ in their {subject}",
        "; ".join(found[:_SHOWN]) + more,
        "the same command, versions and files on every host",
    )


def choose_together(
    subject: str, mine: Any, choose: Callable[[list[Any]], Any], seconds: float = DEADLINE
) -> Any:
    """Returns in every process what process 0 chooses from the values of all.

    They come in order, as JSON values.
    Each process writes one text and reads one; process 0 reads all. All must call this in the same
    order. An error of `choose` is raised in all of them, and HostError where a process neither
    answers nor gets further (`note_progress`) within `seconds`: one may read many times longer than
    another.
    """
    client = store()
    folder = f"meshwright/agreement/{subject}/{_rounds[subject]}"
    _rounds[subject] += 1
    if client is None or jax.process_count() == 1:
        return answer_of_the_first(functools.partial(choose, [mine]))
    client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(mine))
    collect = functools.partial(_answers_of_all, client, folder, subject, seconds)
    return answer_of_the_first(lambda: choose(collect()))


def _answers_of_all(client: Any, folder: str, subject: str, seconds: float) -> list[Any]:
    """Returns what each process has published, in order. Raises HostError without an answer."""
    processes = jax.process_count()
    answers = []
    patience = _Patience(client, seconds)
    for other in range(processes):
        with waiting(f"process {other}, to agree on the {subject}", other):
            text = patience.wait_for(f"{folder}/{other}", other)
        if text is None:
            silent = [i for i in range(processes) if not _there(client, f"{folder}/{i}")]
            raise HostError(
                f"comparing the {subject} of {processes} hosts",
                f"{_hosts(silent)} did not answer within {seconds:.0f} s, nor get further "
                "meanwhile",
                "look at the output of those hosts; all must start the same command",
            )
        answers.append(json.loads(text))
    return answers


class _Patience:
    """Waiting for the other processes: for `seconds` since the awaited one last made progress."""

    def __init__(self, client: Any, seconds: float):
        self.client, self.seconds = client, seconds
        self.until = time.monotonic() + seconds
        self.counts: dict[int, str | None] = {}

    def wait_for(self, key: str, process: int) -> str | None:
        """Returns the value of a key that a process sets.

        None if the process makes no more progress.
        """
        while True:
            now = time.monotonic()
            slice_end = min(self.until, now + max(self.seconds / 10, _NOTED_EVERY))
            text = _wait(self.client, key, slice_end)
            if text is not None:
                return text
            count = _value(self.client, f"{_PROGRESS}/{process}")
            if count != self.counts.get(process):
                self.counts[process] = count
                self.until = time.monotonic() + self.seconds
            if time.monotonic() >= self.until:
                return None


_noted = {"count": 0, "at": 0.0}


def note_progress() -> None:
    """Tells the processes that wait for this one that it has got further; most calls cost nothing.

    Called by what may take long on one host and not on another: reading a checkpoint, reading the
    records of a text or of conversations, writing token files.
    """
    now = time.monotonic()
    if now - _noted["at"] < _NOTED_EVERY:
        return
    client = store()
    # A process that has joined no others has no store: it is not asked for its devices here.
    if client is None or jax.process_count() == 1:
        return
    _noted["at"] = now
    _noted["count"] += 1
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        key = f"{_PROGRESS}/{jax.process_index()}"
        client.key_value_set(key, str(_noted["count"]), allow_overwrite=True)


def agree_on_program(text: str) -> None:
    """Compares a lowered train step with those of all other processes.

    Hosts that compile differing programs hang.
    """
    agree("program", {"lowered train step": digest(text)})


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Keeps process 0 alive until the others have met the error too.

    It holds the store, and without it JAX aborts them unheard.
    """
    try:
        yield
    except MeshwrightError:
        if store() is not None and jax.process_count() > 1:
            _wait_for_readers(store(), "meshwright/failed")
        raise


def answer_of_the_first(compute: Callable[[], Any]) -> Any:
    """Returns in every process what process 0 computes, as JSON values.

    The others wait, however long it takes.
    All processes must call this in the same order. An error of process 0 is raised in all.
    """
    client, process = store(), jax.process_index()
    if client is None or jax.process_count() == 1:
        return compute()
    key = f"meshwright/answers/{_rounds['answer']}"
    _rounds["answer"] += 1
    if process == 0:
        try:
            answer = compute()
        except MeshwrightError as error:
            kind = next(
                kind
                for kind in type(error).__mro__
                if "__init__" not in vars(kind) or kind is MeshwrightError
            )
            failed = [kind.__name__, error.asked, error.truth, error.fix]
            client.key_value_set(key, json.dumps({"failed": failed}))
            _wait_for_readers(client, key)
            raise
        except BaseException as error:
            stopped = (
                "waiting for host 0",
                f"it stopped: {type(error).__name__}",
                "look at the output of host 0",
            )
            client.key_value_set(key, json.dumps({"failed": [HostError.__name__, *stopped]}))
            raise
        client.key_value_set(key, json.dumps({"answer": answer}))
        return json.loads(json.dumps(answer))
    text = None
    while text is None:
        with waiting("the answer of process 0", 0):
            # Signals are handled between two waits.
            text = _wait(client, key, time.monotonic() + 2.0)
    found = json.loads(text)
    if "failed" in found:
        _wait_for_readers(client, key)
        name, *parts = found["failed"]
        kinds = [MeshwrightError]
        for kind in kinds:  # with the kinds of kinds
            kinds += kind.__subclasses__()
        raise next(kind for kind in kinds if kind.__name__ == name)(*parts)
    return found["answer"]


def differences(answers: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Describes the fields that differ between hosts, one line each.

    Example:
        >>> differences({0: {"lr": "3e-4"}, 1: {"lr": "3e-4"}, 2: {"lr": "1e-4"}})
        ['lr: 3e-4 on hosts 0 and 1, 1e-4 on host 2']
    """
    found = []
    names = dict.fromkeys(itertools.chain.from_iterable(answers.values()))
    for name in names:
        holders: dict[str, list[int]] = {}
        for host, fields in answers.items():
            holders.setdefault(fields.get(name, "absent"), []).append(host)
        if len(holders) > 1:
            values = sorted(holders.items(), key=lambda item: -len(item[1]))
            shown = (
                (v if len(v) <= _LONGEST else f"{v[:_LONGEST]}...", _hosts(hosts))
                for v, hosts in values
            )
            found.append(f"{name}: " + ", ".join(f"{value} on {who}" for value, who in shown))
    return found


def _hosts(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"host {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"hosts {numbers[0]} to {numbers[-1]}"
    shown, last = (
        (numbers[:-1], numbers[-1])
        if len(numbers) <= 8
        else (numbers[:8], f"{len(numbers) - 8} more")
    )
    return f"hosts {', '.join(map(str, shown))} and {last}"


def _wait_for_readers(client: Any, folder: str) -> None:
    """Keeps process 0 alive until the others have read what is in `folder`.

    It holds the store. seconds: the longest wait.
    """
    client.key_value_set(f"{folder}/read/{jax.process_index()}", "")
    if jax.process_index():
        return
    until = time.monotonic() + _READING
    for reader in range(1, jax.process_count()):
        _wait(client, f"{folder}/read/{reader}", until)
    time.sleep(_PRINTING)


def _there(client: Any, key: str) -> bool:
    return _value(client, key) is not None


def _value(client: Any, key: str) -> str | None:
    """Returns the value of a key that is there now, else None."""
    try:
        return str(client.key_value_try_get(key))
    except jax.errors.JaxRuntimeError:
        return None


def _wait(client: Any, key: str, until: float) -> str | None:
    """Returns the value of a key once it is there; None when the time is up.

    Raises HostError without process 0.
    """
    milliseconds = max(1, int(1000 * (until - time.monotonic())))
    try:
        return str(client.blocking_key_value_get(key, milliseconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in statuses_of(error):
            return None
        raise HostError(
            "comparing hosts",
            f"host 0 does not answer: {str(error).splitlines()[0]}",
            "look at the output of host 0",
        ) from error

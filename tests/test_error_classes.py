"""Classes of errors: what may pass is tried again and asks for another start; what does not is final, whoever reads."""

import ast
import builtins
import contextlib
import errno
import functools
import importlib
import io
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from meshwright import documents
from meshwright.checkpoint.checkpoints import write_error
from meshwright.checkpoint.steps import committed_steps
from meshwright.data import conversations, tokens
from meshwright.data.readers import read_documents
from meshwright.data.sources import Records, open_source
from meshwright.data.tokenizing import tokenize
from meshwright.errors import (
    FOR_NOW,
    NO_ROOM,
    NUMBERS,
    CheckpointError,
    ConfigError,
    DataError,
    ErrorClass,
    HostError,
    MeshwrightError,
    RoomError,
    UnavailableError,
    WeightsError,
    by_class,
    class_of,
    limit_of,
    reason_of,
    shell_word,
)
from meshwright.hardware import agreement
from meshwright.launching.restarts import REFUSED, restarts
from meshwright.storage import attempts, hub
from meshwright.storage.attempts import attempt, store_error
from meshwright.storage.writing import write_atomically

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
REFUSALS = (ConfigError, DataError, CheckpointError, WeightsError)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("kind", REFUSALS)
def test_who_reads_does_not_decide(kind: type[MeshwrightError]) -> None:
    """Each number of a system call has one end, for readers of options, data, checkpoints and weights alike."""
    for number in errno.errorcode:
        error = OSError(number, os.strerror(number))
        found = by_class(error, kind("reading x", "it cannot be read", "y"))
        assert restarts(found.exit_code) == (class_of(error) in FOR_NOW), number
        if number in NO_ROOM:
            assert isinstance(found, RoomError) and "free some space" in found.fix
        elif class_of(error) in FOR_NOW:
            limit = limit_of(error)
            assert found.exit_code == 75 and (limit or (os.strerror(number),))[0] in found.truth
            assert "free some space" not in found.fix
        else:
            assert type(found) is kind


def _hub_errors() -> dict[str, tuple[Exception, type[MeshwrightError], str]]:
    """Failures of a download as the hub's library raises them, the error of each, and words of its fix."""

    def answer(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
        response: Any = types.SimpleNamespace(status_code=status, headers={}, request=None)
        return kind("refused", response=response)

    return {
        "gated": (answer(errors.GatedRepoError, 403), WeightsError, "accept them on"),
        "private": (answer(errors.RepositoryNotFoundError, 401), WeightsError, "hf auth login"),
        "revision": (answer(errors.RevisionNotFoundError, 404), WeightsError, "one of https"),
        "busy": (answer(errors.HfHubHTTPError, 429), UnavailableError, "a network"),
        "down": (answer(errors.HfHubHTTPError, 503), UnavailableError, "a network"),
        "no network": (errors.LocalEntryNotFoundError("none"), UnavailableError, "a network"),
        "offline": (errors.OfflineModeIsEnabled("offline"), UnavailableError, "a network"),
        "cut": (errors.HTTPError("too slow"), UnavailableError, "a network"),
        "disk": (OSError(errno.ENOSPC, "full"), RoomError, "free some space"),
        "other": (answer(errors.HfHubHTTPError, 400), WeightsError, "the path of a folder"),
    }


@pytest.mark.parametrize("repository", [hub.MODEL, hub.DATASET])
@pytest.mark.parametrize("row", _hub_errors())
def test_a_failed_download_names_who_keeps_it_or_what_does_not_answer(
    row: str, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, kind, fix = _hub_errors()[row]

    def snapshot_download(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refusal = functools.partial(WeightsError, "hf:a/b")
    with pytest.raises(kind) as found:
        hub.download_from_hub("a/b", repository, ["*"], refusal)
    assert type(found.value) is kind and found.value.asked == "hf:a/b"
    assert fix in found.value.fix


@pytest.mark.parametrize(
    ("repository", "revision", "command"),
    [
        (hub.MODEL, None, "`hf download a/b`"),
        (hub.MODEL, "v1", "`hf download a/b --revision v1`"),
        (hub.DATASET, None, "`hf download a/b --repo-type dataset`"),
        (hub.DATASET, "v1", "`hf download a/b --repo-type dataset --revision v1`"),
    ],
)
def test_the_download_that_is_named_is_of_the_same_repository_and_revision(
    repository: str, revision: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*args: Any, **options: Any) -> str:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refusal = functools.partial(WeightsError, "hf:a/b")
    with pytest.raises(UnavailableError) as found:
        hub.download_from_hub("a/b", repository, ["*"], refusal, revision)
    assert command in found.value.fix


def test_every_error_of_the_package_has_a_class() -> None:
    kinds = [MeshwrightError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        assert (kind.exit_code in REFUSED) == (kind.error_class not in FOR_NOW), kind
    assert {class_of(e) for e in (MemoryError(), ConnectionResetError(), TimeoutError())} <= {
        *FOR_NOW
    }
    assert class_of(KeyboardInterrupt()) is ErrorClass.PREEMPTED
    assert class_of(UnicodeDecodeError("utf-8", b"", 0, 1, "")) is ErrorClass.BYTES


def test_a_call_is_made_again_where_that_helps() -> None:
    def failing(number: int, times: int) -> Callable[[], str]:
        numbers = iter([number] * times)

        def call() -> str:
            for left in numbers:
                raise OSError(left, os.strerror(left))
            return "read"

        return call

    for number in NUMBERS:
        if number in NO_ROOM:
            with pytest.raises(OSError):
                attempt(failing(number, 1))
            continue
        assert attempt(failing(number, 2)) == "read"
        with pytest.raises(OSError):
            attempt(failing(number, 3))
    with pytest.raises(FileNotFoundError):
        attempt(failing(errno.ENOENT, 1))


def test_errors_of_tensorstore_are_read_by_their_number(tmp_path: Path) -> None:
    import tensorstore

    with pytest.raises(ValueError) as caught:
        tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": "/dev/null/x/"}},
            create=True, dtype="int32", shape=[1],
        ).result()  # fmt: skip
    found = store_error(tmp_path, caught.value)
    assert isinstance(found, NotADirectoryError)
    # Words are no class: a folder may be named after an error.
    assert store_error(tmp_path, ValueError("NOT_FOUND: /Stale file handle/timed out/x")) is None
    away = store_error(Path("s3://b/x"), ValueError("UNAVAILABLE: Error reading"))
    assert away is not None and class_of(away) in FOR_NOW


def once(number: int, name: str, monkeypatch: pytest.MonkeyPatch, inside: Path) -> list[int]:
    """Makes the first call of a function of `os` on files in a folder fail; returns a list that it empties."""
    left, real = [number], getattr(os, name)

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        path = first
        folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
        if isinstance(first, int):
            folder = first
        if folder is not None:
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{folder}")
        if left and str(inside) in str(path):
            raise OSError(left.pop(), os.strerror(number))
        return real(first, *args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return left


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_a_token_file_that_fails_once_is_read(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some text " * 30_000)
    expected = tokenize(str(tmp_path / "a.txt"), "bytes", tmp_path / "tokens").tokens[:99]
    for name in ("open", "pread", "preadv", "stat", "listdir"):
        tokens._open_file.cache_clear()
        with monkeypatch.context() as patched:
            left = once(number, name, patched, tmp_path / "tokens")
            found = tokens.open_tokens(tmp_path / "tokens").tokens[:99]
        assert (found == expected).all() and not left, name
    # Where it does not answer at all, the tokens are not called damaged.
    file = tokens.open_tokens(tmp_path / "tokens")
    monkeypatch.setattr(os, "pread", lambda *_: failed(number))
    with pytest.raises(UnavailableError, match=os.strerror(number)) as caught:
        _ = file.tokens[:99]
    assert restarts(caught.value.exit_code) and "tokenise again" not in caught.value.fix


def failed(number: int) -> Any:
    raise OSError(number, os.strerror(number))


def test_a_file_that_is_replaced_survives_each_failure_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    for name in ("fsync", "replace", "open"):
        with monkeypatch.context() as patched:
            left = once(errno.EIO, name, patched, tmp_path)
            write_atomically(file, name)
        assert file.read_text() == name and not left
    # A server that renamed the file and lost its answer.
    real = os.replace

    def renamed(source: Path, target: Path, **folders: int) -> None:
        monkeypatch.setattr(os, "replace", real)
        real(source, target, **folders)
        failed(errno.ETIMEDOUT)

    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(file, "once more")
    assert file.read_text() == "once more" and list(tmp_path.iterdir()) == [file]


def test_a_checkpoint_that_does_not_answer_is_not_taken_for_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 200):
        manifest = tmp_path / str(step) / "manifest" / "metadata"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
    left = once(errno.ESTALE, "stat", monkeypatch, tmp_path / "200")
    assert committed_steps(tmp_path) == [100, 200] and not left
    monkeypatch.setattr(os, "stat", lambda *_, **__: failed(errno.EIO))
    with pytest.raises(UnavailableError):
        committed_steps(tmp_path)


def test_a_failed_save_tells_room_from_a_store_that_is_away(tmp_path: Path) -> None:
    ends: dict[str, set[int]] = {
        "free some space": {errno.ENOSPC, errno.EDQUOT, errno.EFBIG},
        "mounts": {errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT},
        "another --out": {errno.EACCES, errno.EPERM, errno.EISDIR},
    }
    codes = {"free some space": 10, "mounts": 75, "another --out": 4}
    for fix, numbers in ends.items():
        for number in numbers:
            found = write_error("saving", tmp_path, OSError(number, os.strerror(number)))
            assert fix in found.fix and found.exit_code == codes[fix], number


WIDE = {
    "OSError",
    "IOError",
    "EnvironmentError",
    "TimeoutError",
    "ConnectionError",
    "Exception",
    "BaseException",
}
"""Types that hold errors that may pass."""
EXPLAINERS = {
    "by_class",
    "unwritable",
    "unwritable_file",
    "unreadable",
    "write_error",
    "_fail_together",
}
"""Functions that return an error by the class of its cause."""
NOT_FILES = {
    "hardware.hosts": "sockets with which hosts join: whoever waits there has a deadline of its own",
    "hardware.agreement": "an error of process 0, raised in the others as it is",
    "errors": "the functions themselves",
    "storage.bucket": "a bucket without an answer is an error of the store already",
}


def caught_by(kind: ast.expr | None, constants: dict[str, ast.expr]) -> set[str]:
    """Names of the types that an `except` catches."""
    if kind is None:
        return {"BaseException"}
    if isinstance(kind, ast.Tuple):
        return set().union(*(caught_by(part, constants) for part in kind.elts))
    if isinstance(kind, ast.Name) and kind.id in constants:
        return caught_by(constants[kind.id], constants)
    return {ast.unparse(kind)}


def unclassified(tree: ast.Module) -> list[int]:
    """Lines that raise an error of the package in place of one that may pass, without asking for its class."""
    constants = {
        statement.targets[0].id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Tuple)
    }
    found = []
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler):
            continue
        if not caught_by(handler.type, constants) & WIDE:
            continue
        for node in ast.walk(handler):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                function = ast.unparse(node.exc.func).rpartition(".")[2]
                if function not in EXPLAINERS:
                    found.append(node.lineno)
    return found


SEARCHES = {
    "search",
    "match",
    "fullmatch",
    "findall",
    "finditer",
    "startswith",
    "endswith",
    "find",
    "index",
    "count",
    "partition",
    "rpartition",
}
"""Methods that look for words in a text, of the text or of a regular expression."""


def _errors_of(function: ast.AST) -> set[str]:
    """Names in a function that are bound to exceptions: by a handler, or as an argument of such a type."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        annotated = isinstance(node, ast.arg) and node.annotation is not None
        if annotated and re.search("Error|Exception", ast.unparse(node.annotation)):
            names.add(node.arg)
    return names


def _has_text_of(node: ast.AST, errors: set[str], texts: set[str]) -> bool:
    """Whether an expression is made of the text of one of `errors`, or of one of the names `texts`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in texts:
            return True
        made: list[str] = []
        if isinstance(part, ast.Call) and ast.unparse(part.func) in ("str", "repr"):
            made = [ast.unparse(argument) for argument in part.args]
        if isinstance(part, ast.JoinedStr):
            fields = [v for v in part.values if isinstance(v, ast.FormattedValue)]
            made = [ast.unparse(field.value) for field in fields]
        if isinstance(part, ast.Attribute) and part.attr in ("args", "strerror", "msg"):
            made = [ast.unparse(part.value)]
        if errors.intersection(made):
            return True
    return False


def decided_by_words(tree: ast.Module) -> list[int]:
    """Lines that look for words in the text of an error, under whichever name it has."""
    found = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        errors = _errors_of(function)
        texts = set[str]()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _has_text_of(node.value, errors, set()):
                names = [part for target in node.targets for part in ast.walk(target)]
                texts |= {part.id for part in names if isinstance(part, ast.Name)}
        for node in ast.walk(function):
            searched: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                looks = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
                if any(isinstance(operator, looks) for operator in node.ops):
                    searched = [node.left, *node.comparators]
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in SEARCHES
            ):
                searched = [node.func.value, *node.args]
            if any(_has_text_of(part, errors, texts) for part in searched):
                found.add(node.lineno)
    return sorted(found)


WORDS = {
    "statuses": "the one reader of errors of libraries that have no type and no number",
    "hardware.mesh": "leaves JAX's advice out of the reason; every error of opening devices has one class",
}


def modules() -> list[tuple[str, ast.Module]]:
    files = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]
    return [(name, ast.parse(file.read_text())) for name, file in zip(names, files, strict=True)]


def test_every_reader_asks_for_the_class_of_an_error() -> None:
    wrong = {
        name: lines
        for name, tree in modules()
        if name not in NOT_FILES and (lines := unclassified(tree))
    }
    assert wrong == {}
    assert unclassified(ast.parse("try: x()\nexcept OSError as e: raise DataError(e)")) == [2]


def test_no_class_is_decided_by_words() -> None:
    wrong = {
        name: lines
        for name, tree in modules()
        if name not in WORDS and (lines := decided_by_words(tree))
    }
    assert wrong == {}


HANDLER = "def f():\n    try: x()\n    except OSError as fault:\n        {}"


@pytest.mark.parametrize(
    "line",
    [
        "return 'stale' in str(fault)",
        "text = str(fault); return any(word in text for word in words)",
        "return PATTERN.search(f'{fault}')",
        "return fault.args[0].startswith('no')",
        "return fault.strerror == 'Stale file handle'",
    ],
)
def test_words_of_an_error_are_found_under_any_name(line: str) -> None:
    assert decided_by_words(ast.parse(HANDLER.format(line))) == [4]


def test_the_text_of_an_error_may_be_printed() -> None:
    printed = "raise ConfigError(asked, str(fault).splitlines()[0], fix) from fault"
    assert decided_by_words(ast.parse(HANDLER.format(printed))) == []


RAW = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and (issubclass(kind, OSError | LookupError) or kind in (Exception, BaseException))
}
"""Types whose own text is not a sentence for a user: `[Errno 2] ...: 'file'`, or a bare key."""
WRITES_ITSELF = {
    "errors": "reason_of and describe_failure themselves",
    "statuses": "reads the status in the text of a library's error",
    "data.chat_renderer": "a program in a sandbox, which runs without the package",
}


def unexplained(tree: ast.Module) -> list[int]:
    """Lines that put the raw text of such an exception into a text, without `reason_of`."""
    constants = {
        statement.targets[0].id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    scopes: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            scopes += [(node, node.name)] if caught_by(node.type, constants) & RAW else []
        if isinstance(node, ast.FunctionDef):
            for argument in node.args.args:
                named = "" if argument.annotation is None else ast.unparse(argument.annotation)
                if RAW.intersection(re.findall(r"\w+", named)):
                    scopes.append((node, argument.arg))
    found = set()
    for scope, name in scopes:
        for node in ast.walk(scope):
            if _writes_raw(node, name):
                found.add(node.lineno)
    return sorted(found)


def _writes_raw(node: ast.AST, name: str) -> bool:
    """Whether a node makes a text of the exception of this name, or may hand it on as one."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.FormattedValue):
        parts = [node.value]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr", "format"):
        parts = node.args
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        parts = node.values
    if isinstance(node, ast.Attribute) and node.attr == "strerror":
        parts = [node.value]
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


def test_an_error_is_written_by_its_reason() -> None:
    wrong = {
        name: lines
        for name, tree in modules()
        if name not in WRITES_ITSELF and (lines := unexplained(tree))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "raise E(f'it cannot be read: {fault}')",
        "raise E(str(fault).splitlines()[0][:200])",
        "truth = reason_of(fault) if isinstance(fault, OSError) else fault",
        "raise E(f'no table: {fault!r}')",
        "raise E(fault.strerror)",
    ],
)
def test_a_raw_text_is_found(line: str) -> None:
    assert unexplained(ast.parse(HANDLER.format(line))) == [4]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), "No such file"),
        (OSError("  two\nlines"), "two"),
        (KeyError("shards"), "it has no 'shards'"),
        (RecursionError("maximum recursion depth exceeded"), "it is nested too deeply"),
        (EOFError(), "EOFError"),
        (ValueError("x" * 301), "x" * 300 + " ..."),
    ],
)
def test_a_reason_is_a_line_for_a_user(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_an_error_that_is_not_explained_asks_for_another_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a verb calls: what may pass ends with 75 and no traceback."""
    main = importlib.import_module("meshwright.cli.main")  # the package's `main` is the function

    def end_of(error: BaseException) -> int:
        def run(args: Any) -> int:
            raise error

        monkeypatch.setattr(main, "run", run)
        code, words = main._run_explained(["train"])
        print(words, file=sys.stderr)
        return int(code)

    assert end_of(OSError(errno.ESTALE, "Stale file handle", "x/run.json")) == 75
    assert "x/run.json" in capsys.readouterr().err
    assert (end_of(MemoryError()), end_of(OSError(errno.ENOSPC, "full"))) == (75, 10)
    with pytest.raises(FileNotFoundError):
        end_of(FileNotFoundError(errno.ENOENT, "no", "y"))


def test_a_file_is_read_through_a_stale_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 999)
    left = once(errno.ESTALE, "preadv", monkeypatch, tmp_path)
    with documents.open_bytes(tmp_path / "a") as opened:
        assert opened.read(3) == b"\0\1\2" and opened.tell() == 3
        opened.seek(-1, io.SEEK_END)
        assert opened.read() == b"\xff" and not left


def test_a_host_that_gets_further_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host reads five times longer than the deadline, and one stands still."""

    clock, answered = [0.0], 50.0

    class Store:
        def key_value_try_get(self, key: str) -> str:
            return str(int(clock[0])) if key.endswith("/1") else "0"

    def wait(client: Any, key: str, until: float) -> str | None:
        clock[0] = min(until, answered) if key.startswith("slow") else until
        return "read" if key.startswith("slow") and clock[0] >= answered else None

    monkeypatch.setattr(agreement, "_wait", wait)
    monkeypatch.setattr(agreement, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    patience = agreement._Patience(Store(), 10.0)
    assert patience.wait_for("slow/1", 1) == "read" and clock[0] == answered
    patience = agreement._Patience(Store(), 10.0)
    assert patience.wait_for("hung/2", 2) is None and clock[0] <= answered + 2 * 10.0


class CountingStore:
    """Store of a run of two processes that counts the notes of one that gets further."""

    def __init__(self) -> None:
        self.notes = 0

    def key_value_set(self, key: str, value: str, **options: Any) -> None:
        self.notes += key.startswith(agreement._PROGRESS)


@pytest.fixture
def counting_store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    store = CountingStore()
    monkeypatch.setattr(agreement, "_NOTED_EVERY", 0.0)
    monkeypatch.setattr(agreement, "store", lambda: store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    return store


ANSWER = {"prompt": "Hello", "completion": " you"}
PAIR = {"prompt": "Hello", "chosen": " you", "rejected": " stranger"}
RECORDS = 40
"""Records of each source; a host that reads them gets further with each."""


def tokenise_text(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "some words"}\n' * RECORDS)
    tokenize(str(folder / "text.jsonl"), "bytes", folder / "tokens")


def learn_vocabulary(folder: Path) -> None:
    (folder / "text.jsonl").write_text('{"text": "some words"}\n' * RECORDS)
    source = open_source(str(folder / "text.jsonl"))
    list(read_documents(source, Records("text.jsonl")))


def tokenise_conversations(folder: Path) -> None:
    (folder / "talk.jsonl").write_text((json.dumps(ANSWER) + "\n") * RECORDS)
    tokenisation = conversations._Tokenisation("bytes", None, "answers", folder / "cache")
    tokenisation.tokenise(str(folder / "talk.jsonl"))


def tokenise_preferences(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text((json.dumps(PAIR) + "\n") * RECORDS)
    tokenisation = conversations._Tokenisation("bytes", None, "preferences", folder / "cache")
    tokenisation.tokenise(str(folder / "pairs.jsonl"))


@pytest.mark.parametrize(
    "prepare_data",
    [tokenise_text, learn_vocabulary, tokenise_conversations, tokenise_preferences],
)
def test_a_host_that_prepares_data_gets_further(
    prepare_data: Any, tmp_path: Path, counting_store: CountingStore
) -> None:
    """Others wait for it as long as it reads another record."""
    prepare_data(tmp_path)
    assert counting_store.notes >= RECORDS


def test_a_process_that_is_alone_is_not_asked_for_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`meshwright tokenize` on the host of a TPU, which a training holds."""
    monkeypatch.setattr(agreement, "_NOTED_EVERY", 0.0)
    monkeypatch.setattr("jax.process_count", lambda: pytest.fail("it was asked"))
    agreement.note_progress()


def test_host_errors_restart() -> None:
    assert restarts(HostError.exit_code) and restarts(UnavailableError.exit_code)


_COMMAND = re.compile(r"meshwright [a-z ]+(--[a-z]+ )?$")
"""Literal part of a command, before a value."""
_NO_PATH = frozenset(
    {"self.verb", "verb", "run.name", "machine", "self.on", "arg", "hosts.process", "found[1]"}
)
"""Values of such commands that are no paths: verbs, recipes, machines, numbers; a word of a command as it is."""


def unquoted_paths(tree: ast.AST) -> list[int]:
    """Lines with an f-string of a command whose value a shell would split at a space."""
    found = []
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        before = ""
        for part in text.values:
            if isinstance(part, ast.Constant):
                before = str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            quoted = value.startswith("shell_word(") or "join(" in value
            if _COMMAND.search(before) and not quoted and value not in _NO_PATH:
                found.append(part.lineno)
            before = ""
    return found


def test_paths_in_printed_commands_are_quoted() -> None:
    """A run in `my runs/a` is resumed by the command that its error prints."""
    assert {name: lines for name, tree in modules() if (lines := unquoted_paths(tree))} == {}
    assert unquoted_paths(ast.parse('f"meshwright train --out {out} --resume"')) == [1]
    assert unquoted_paths(ast.parse('f"meshwright view {shell_word(out)}"')) == []
    assert shell_word(Path("my runs/a")) == "'my runs/a'"

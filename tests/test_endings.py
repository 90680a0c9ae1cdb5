"""How a process ends: the first error wins, last words block nothing, and every wait for others is announced."""

import ast
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import straggling
from ranks import ranks

from meshwright import signs
from meshwright.errors import Closing, DataError, RoomError, first_error
from meshwright.reporters.files import JsonLines
from meshwright.signs import EVERYBODY, NOBODY, Phases, wait_of_main_thread, waiting
from meshwright.trainer.alarms import AlarmOptions, Alarms
from meshwright.trainer.hosts import Sign, _Watch, slow_data, slow_work, verdict
from meshwright.trainer.loop import _longest
from meshwright.trainer.watchdog import Watchdog
from meshwright.views.run_folder import RunFolder

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"

HARMLESS = {
    "cancel", "set", "reset", "remove", "pop", "join", "kill", "wait", "shutdown", "perf_counter", "monotonic",
    "signal", "set_wakeup_fd", "update", "items", "close", "process_index", "leave", "min", "rmtree", "dup2",
    "seek", "read", "decode", "splitlines", "append", "_tell", "gethostname", "sleep",
}  # fmt: skip
"""Calls in a `finally` that fail only with the program: none of them asks a disk or another host for something new."""

WAITS = {
    "broadcast_one_to_all", "process_allgather", "sync_global_devices", "wait_at_barrier", "device_get",
    "train_step", "eval_step", "_wait_for_tensors", "initialize",
}  # fmt: skip
"""Calls that return when other hosts, or the devices that compute with them, have come as far."""
WAITING_ROOMS = ("trainer", "checkpoint", "data", "hardware")
OWN_WAITS = {
    "trainer/evaluation.py": "a verb, which nobody watches",
    "trainer/parity.py": "its gradients are compared by a verb, which nobody watches",
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def unguarded(node: ast.AST, guard: str) -> Iterator[ast.Call]:
    """Calls below a node that are in no `with` of the function `guard`."""
    if isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items]
        if any(isinstance(c, ast.Call) and name_of(c.func) == guard for c in calls):
            return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from unguarded(child, guard)


def test_what_fails_in_a_finally_replaces_no_error() -> None:
    found = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            for statement in node.finalbody if isinstance(node, ast.Try) else ():
                found += [
                    f"{module}:{call.lineno}: {ast.unparse(call)}"
                    for call in unguarded(statement, "suppress")
                    if name_of(call.func) not in HARMLESS and name_of(call.func) != "suppress"
                ]
    assert not found, (
        "put these into `with contextlib.suppress(...)`, or a `Closing`:\n" + "\n".join(found)
    )


def test_processes_end_in_one_place() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "_exit" and module != "last_words.py"
    ]
    assert found == ["bench/hardware/section.py:168"], (
        "last_words.leave waits for no reader and no lock"
    )


def test_every_wait_for_others_is_announced() -> None:
    found = []
    for module, tree in trees().items():
        if not module.startswith(WAITING_ROOMS) or module in OWN_WAITS:
            continue
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for function in functions:
            found += [
                f"{module}:{call.lineno}: {ast.unparse(call)[:60]}"
                for statement in function.body
                for call in unguarded(statement, "waiting")
                if name_of(call.func) in WAITS
            ]
    assert not found, "\n".join(sorted(set(found)))


FULL_PIPE = """
import sys, threading, time
from meshwright import last_words
def leave():
    time.sleep(0.5)
    last_words.say("a line that is not read")
    last_words.leave(75, "error: the last words\\n" * 2**12)
threading.Thread(target=leave, daemon=True).start()
threading.Thread(target=lambda: sys.stderr.write("x" * 2**20), daemon=True).start()
sys.stdout.write("y" * 2**20)
"""


def test_last_words_wait_for_no_reader() -> None:
    """Two threads stand in a full pipe and hold the streams; the process leaves all the same, with its code."""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", FULL_PIPE], stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(60) == 75
    os.close(reader)


def test_last_words_are_read() -> None:
    words = "from meshwright import last_words; last_words.leave(3, 'error: one\\n')"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "error: one\n")


def test_the_first_error_wins() -> None:
    first = DataError("reading", "203 shards and 128 files", "ulimit -n 1024")

    def fails() -> None:
        raise OSError(24, "Too many open files")

    closed = []
    with pytest.raises(DataError) as caught, Closing() as stack:
        stack.callback(closed.append, 1)
        stack.callback(fails)
        raise first
    assert caught.value is first and closed == [1]
    assert "Too many open files" in first.__notes__[0]
    with pytest.raises(OSError, match="Too many"), Closing() as stack:
        stack.callback(fails)
    try:
        try:
            raise first
        finally:
            fails()
    except OSError as error:
        assert first_error(error) is first
    try:
        raise OSError("alone")
    except OSError as error:
        assert first_error(error) is None
    assert first_error(RoomError("a", "b", "c")) is not None


@pytest.mark.parametrize(
    "step", ["NaN", "Infinity", "-Infinity", "1e400", '"x"', "null", "[1]", "true", "-5", "0.5", "{}", "1" * 400]
)  # fmt: skip
def test_a_step_that_is_no_number_of_steps_is_left_out(step: str, tmp_path: Path) -> None:
    good = '{"step": 1, "loss": 2.0}\n'
    bad = f'{{"step": {step}, "loss": 2.0, "event": "sample", "text": "x"}}\n'
    (tmp_path / "metrics.jsonl").write_text(good + bad)
    (tmp_path / "events.jsonl").write_text(bad.replace('"loss"', '"to"'))
    (tmp_path / "run.json").write_text("{}")
    from meshwright.views.run_page import run_page

    folder = RunFolder(tmp_path)
    folder.refresh()
    assert list(folder.curves["loss"].steps) == [1.0] and not folder.recent_events
    run_page([folder])
    lines = JsonLines(tmp_path / "metrics.jsonl", upto=5)
    lines.close()
    assert (tmp_path / "metrics.jsonl").read_text() == good


def sign(process: int, step: int, phase: str, host: int, seconds: float = 70.0) -> Sign:
    return Sign(
        process, f"node{process}", 9, 1, step, phase, seconds, 100.0, "", host=host, what="x"
    )


BLAME = {
    "storage outside the save": ([("step", NOBODY), ("step", EVERYBODY)], 0),
    "the same on the other host": ([("step", EVERYBODY), ("step", NOBODY)], 1),
    "a local tier": ([("step", EVERYBODY), ("save", NOBODY)], 1),
    "held-out text": ([("evaluate", EVERYBODY), ("evaluate", NOBODY)], 1),
    "the first of a chain": ([("start", 2), ("start", 0), ("start", NOBODY)], 2),
    "a chain into a collective": ([("start", 1), ("start", EVERYBODY), ("start", 0)], 1),
    "a barrier that one has not come to": ([("commit", EVERYBODY), ("save", NOBODY)], 1),
    "a process that has gone further": ([("step", EVERYBODY), ("leave", NOBODY)], 1),
}


@pytest.mark.parametrize("kind", BLAME)
def test_the_host_that_waits_for_no_other_is_blamed(kind: str) -> None:
    states, blamed = BLAME[kind]
    found = {i: sign(i, 6, phase, host, 7000.0) for i, (phase, host) in enumerate(states)}
    assert (verdict(found, Watchdog(stall=60), 100.0) or "").startswith(f"process {blamed} ")


def test_where_all_hosts_wait_alike_none_is_named() -> None:
    found = verdict({i: sign(i, 6, "step", EVERYBODY) for i in range(3)}, Watchdog(stall=60), 100.0)
    assert found is not None and found.startswith("all 3 processes wait alike, so none is named")
    later = {0: sign(0, 6, "step", EVERYBODY), 1: sign(1, 7, "step", EVERYBODY)}
    assert (verdict(later, Watchdog(stall=60), 100.0) or "").startswith("process 0 ")


def test_a_process_that_was_stopped_itself_says_so(tmp_path: Path) -> None:
    watch = _Watch(tmp_path, Phases(), Watchdog(silence=6), None)
    now = watch.judged_at
    assert watch._own_pause(now + 1) == ""
    assert watch._own_pause(now + 8) == "this process was itself stopped for 8 s, and "
    watch.judged_at, watch.pause = now + 8.1, (now + 8.1, 8.1)
    assert watch._own_pause(now + 9) == "this process was itself stopped for 8 s, and "
    watch.judged_at = now + 60
    assert watch._own_pause(now + 60) == ""


def test_the_longest_wait_for_data_is_the_summary_s() -> None:
    assert _longest([0.0, 7.5, 3.0]) == {"seconds": 7.5, "host": 1}


def test_slow_data_is_named() -> None:
    def at(now: float, waited: float) -> Sign:
        return Sign(0, "node", 9, 1, 6, "step", 0.0, now, "", waited=waited)

    before = {i: at(100.0, 5.0) for i in range(3)}
    assert not slow_data(before, {i: at(110.0, 5.1) for i in range(3)})
    named = slow_data(before, {0: at(110.0, 5.1), 1: at(110.0, 14.0), 2: at(110.0, 5.0)})
    assert list(named) == [1] and "waits for its data 90 % of the time" in named[1]
    # Where all wait alike, no host keeps the others.
    assert not slow_data(before, {i: at(110.0, 14.0) for i in range(3)})
    assert not slow_data({}, before)


def test_a_straggler_is_named() -> None:
    def at(now: float, step: int, worked: float) -> Sign:
        sign = Sign(0, "node", 9, 1, step, "step", 0.0, now, "", worked=worked)
        return dataclasses.replace(sign, what="reporter.py, line 10")

    before = {i: at(100.0, 20, 5.0) for i in range(4)}
    assert not slow_work(before, {i: at(110.0, 30, 5.2) for i in range(4)})
    after = {i: at(110.0, 30, 5.1) for i in range(4)} | {2: at(110.0, 30, 9.0)}
    named = slow_work(before, after)
    assert list(named) == [2]
    assert (
        "takes 0.4 s of each step for itself (reporter.py, line 10), 40 % of the time" in named[2]
    )
    # Where all have as much to do, none is waited for; of short steps the share says nothing.
    assert not slow_work(before, {i: at(110.0, 30, 9.0) for i in range(4)})
    assert not slow_work(before, after | {2: at(110.0, 1020, 9.0)})
    assert not slow_work({}, before)


def test_work_in_steps_is_what_is_no_wait_for_others() -> None:
    assert threading.current_thread() is threading.main_thread()
    phases = Phases()
    phases.enter("step", 1)
    time.sleep(0.1)
    with waiting("the devices"), waiting("process 1", 1):
        time.sleep(0.2)
    with waiting("a file", NOBODY):
        time.sleep(0.1)
    phases.enter("data", 1)
    time.sleep(0.1)
    assert phases.worked == pytest.approx(0.2, abs=0.08)
    phases.enter("step", 2)
    time.sleep(0.1)
    assert phases.worked == pytest.approx(0.3, abs=0.1)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_one_slow_host_of_four_is_named_by_what_it_takes_for_itself(tmp_path: Path) -> None:
    words = [sys.executable, straggling.__file__, str(tmp_path)]
    processes = [
        subprocess.Popen(
            words, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        for environment in ranks(4)
    ]
    said = [process.communicate(timeout=500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    (line,) = [line for line in said[0].splitlines() if "of each step for itself" in line]
    assert line.startswith(f"process {straggling.SLOW} (node{straggling.SLOW}, pid ")


def test_a_sign_says_what_the_main_thread_waits_for() -> None:
    assert threading.current_thread() is threading.main_thread()
    with waiting("process 3, to agree", 3):
        found = wait_of_main_thread()
        assert (found.what, found.host) == ("process 3, to agree", 3)
    assert wait_of_main_thread().host == NOBODY
    ready, done = threading.Event(), threading.Event()

    def save() -> None:
        with waiting("the other hosts' parts"):
            ready.set()
            done.wait(60)

    thread = threading.Thread(target=save)
    thread.start()
    ready.wait(60)
    with waiting("its save", NOBODY, thread.ident):
        assert wait_of_main_thread() == signs.Wait("the other hosts' parts", EVERYBODY)
    done.set()
    thread.join()


IN_A_PIPE = """
import os, sys, threading, time
from meshwright import signs
def look():
    time.sleep(0.5)
    os.write(int(sys.argv[2]), signs.wait_of_main_thread().what.encode())
    os._exit(0)
threading.Thread(target=look, daemon=True).start()
if sys.argv[1] == "pipe":
    sys.stdout.write("x" * 2**20)
elif sys.argv[1].endswith("thread"):
    threading.Thread(target=os.open, args=(sys.argv[1].removesuffix("thread"), os.O_RDONLY)).start()
    with signs.waiting("its data", signs.NOBODY):
        threading.Event().wait()
else:
    os.open(sys.argv[1], os.O_RDONLY)
"""


@pytest.mark.parametrize("kind", ["pipe", "file", "file of a thread"])
def test_the_file_of_a_system_call_is_named(kind: str, tmp_path: Path) -> None:
    """A process stands in a write to a full pipe, and in opening a file that does not answer: a FIFO without a writer."""
    fifo = tmp_path / "shared"
    os.mkfifo(fifo)
    reader, writer = os.pipe()
    answer, answers = os.pipe()
    place = "pipe" if kind == "pipe" else f"{fifo}{'thread' * kind.endswith('thread')}"
    command = [sys.executable, "-c", IN_A_PIPE, place, str(answers)]
    process = subprocess.Popen(command, stdout=writer, pass_fds=(answers,))
    os.close(writer)
    os.close(answers)
    process.wait(60)
    said = os.read(answer, 4096).decode()
    os.close(reader)
    os.close(answer)
    if not Path(f"/proc/self/task/{threading.get_native_id()}/syscall").exists():
        pytest.skip("this kernel does not say in which call a thread is")
    assert (
        "the pipe of standard output, which is not read" if kind == "pipe" else str(fifo)
    ) in said


def test_signs_are_given_from_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signs, "_unsupervised", threading.Event())
    reader, writer = os.pipe()
    monkeypatch.setenv(signs.BEATS, str(writer))
    monkeypatch.setattr(signs, "PERIOD", 0.01)
    with signs.in_phases(Phases("load")) as phases:
        signs.give_signs()
        assert json.loads(os.read(reader, 4096).splitlines()[0])[:2] == [0, "load"]
        phases.enter("step", 7)
        until = time.monotonic() + 60
        last: list[object] = []
        while last[:2] != [7, "step"] and time.monotonic() < until:
            last = json.loads(os.read(reader, 4096).splitlines()[-1])
        assert last[:2] == [7, "step"]
        assert not signs.supervisor_has_gone()
        monkeypatch.setattr("meshwright.trainer.alarms._PERIOD", 0.01)
        events: list[dict[str, Any]] = []
        alarms = Alarms(AlarmOptions(), tmp_path)
        with alarms.watching(phases, lambda event, **values: events.append(values)):
            os.close(reader)
            while not events and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)
    (event,) = events
    assert event["alarm"] == "no supervisor" and "--resume" in event["said"]
    assert "alarm: the supervisor of this process has gone" in capfd.readouterr().err

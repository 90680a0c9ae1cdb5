"""Alarms: real commands, a real web server, and real runs that hang, fail and are killed."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import ranks

from meshwright.errors import ConfigError
from meshwright.launching.supervise import AlarmClaims
from meshwright.signs import Phases
from meshwright.trainer.alarms import AlarmOptions, Alarms, StepWatch
from meshwright.views.run_folder import RunFolder
from meshwright.views.run_page import run_page

REPORTER = """
import os, signal, time
from pathlib import Path

class Trouble:
    def write(self, step, values):
        if "loss" not in values:
            return
        if os.environ["TROUBLE"] == "hang" and step == 12:
            time.sleep(8)
        if os.environ["TROUBLE"] == "hang" and step == 14:
            raise RuntimeError("the tracker is gone")
        mark = Path(os.environ["MARK"])
        if os.environ["TROUBLE"] == "kill" and step == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass

def trouble(out, run):
    return Trouble()
"""


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """URL of a web server, and the documents that it has received."""
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(json.loads(body))
            self.send_response(404 if self.path == "/gone" else 204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def appending(file: Path) -> str:
    """Returns a command that appends its standard input to a file."""
    return f"sh -c 'cat >> {file}'"


def documents(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_command_and_webhook_get_the_same_document(
    tmp_path: Path, webhook: tuple[str, list[Any]]
) -> None:
    url, received = webhook
    file = tmp_path / "alarms.jsonl"
    alarms = Alarms(AlarmOptions(command=appending(file), webhook=url), tmp_path / "out")
    with alarms.sending():
        sick = {
            "event": "machine",
            "step": 7,
            "host": "node3",
            "warning": "link 14: 505 recoveries",
        }
        alarms.note(sick)
        alarms.note({"event": "save", "step": 8})
    (document,) = documents(file)
    assert received == [document]
    assert document["alarm"] == "machine"
    assert document["text"] == "link 14: 505 recoveries"
    assert (document["host"], document["step"]) == ("node3", 7)
    assert document["run"] == str(tmp_path / "out")


def test_a_second_alarm_of_its_kind_is_suppressed_and_said(
    tmp_path: Path, webhook: tuple[str, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    url, received = webhook
    alarms = Alarms(AlarmOptions(webhook=url, every=2), tmp_path)
    with alarms.sending():
        for number in range(5):
            alarms.tell("bad step", f"step {number}")
        alarms.tell("machine", "another kind")
        wait_for(lambda: len(received) == 2)
        time.sleep(2.1)
        alarms.tell("bad step", "later")
    assert [document["text"] for document in received] == ["step 0", "another kind", "later"]
    assert [document["suppressed"] for document in received] == [0, 0, 4]
    time.sleep(0.2)
    error = capfd.readouterr().err
    assert error.count("suppressed") == 1
    assert "--alarm.every 2" in error


@pytest.mark.parametrize(
    ("command", "path", "reason"),
    [
        ("sh -c 'echo no battery >&2; exit 3'", "", "exit code 3, no battery"),
        ("", "/gone", "404"),
        ("", "http://127.0.0.1:9", "refused"),
    ],
)
def test_a_hook_that_fails_is_one_line(
    tmp_path: Path,
    webhook: tuple[str, list[Any]],
    capfd: pytest.CaptureFixture[str],
    command: str,
    path: str,
    reason: str,
) -> None:
    url = webhook[0] + path if path.startswith("/") else path
    alarms = Alarms(AlarmOptions(command=command, webhook=url), tmp_path)
    with alarms.sending():
        alarms.tell("bad step", "step 3")
    time.sleep(0.2)
    (line,) = capfd.readouterr().err.splitlines()
    assert reason in line
    assert "/gone" not in line  # a path may be a secret


def test_a_hook_that_hangs_keeps_no_other_alarm_waiting(tmp_path: Path) -> None:
    file = tmp_path / "alarms.jsonl"
    command = f"sh -c 'cat >> {file}; sleep 8'"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes a request, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        alarms = Alarms(AlarmOptions(command=command, webhook=url), tmp_path)
        with alarms.sending():
            began = time.monotonic()
            alarms.tell("slow host", "process 1")
            alarms.tell("failed", "the end")
            assert time.monotonic() - began < 0.5
    assert sorted(document["alarm"] for document in documents(file)) == ["failed", "slow host"]


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"command": "no-such-program --now"}, "no program 'no-such-program'"),
        ({"command": "sh -c 'open"}, "closed quotes"),
        ({"webhook": "file:///etc/passwd"}, "http or https"),
        ({"webhook": "https://"}, "http or https"),
    ],
)
def test_what_cannot_be_called_is_refused(options: dict[str, str], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        AlarmOptions(**options)  # type: ignore[arg-type]


def test_the_age_of_a_step_is_measured_by_the_steps_before() -> None:
    phases, watch = Phases(), StepWatch(0)
    now = 1000.0

    def look(step: int, phase: str, seconds: float, since: float) -> Any:
        nonlocal now
        now += seconds
        phases.now = (step, phase, now - since)
        return watch.look(phases, now)

    for step in range(1, 30):  # steps of 10 s, of which one has a save of 300 s
        assert look(step, "step", 10, 0) is None
        if step == 20:
            for second in range(300):
                assert look(step, "save", 1, second) is None
    for _ in range(200):  # 20 times the median
        assert look(29, "step", 1, 0) is None
    missed = look(29, "data", 1, 0)
    assert missed is not None
    assert missed["usual"] == pytest.approx(10)
    assert missed["age"] == pytest.approx(201)
    assert look(29, "data", 1, 0) is None  # once
    assert look(30, "step", 1, 0) is None
    assert look(30, "step", 205, 0) is not None


def test_the_age_of_a_step_that_is_shorter_than_the_time_between_two_looks() -> None:
    phases, watch = Phases(), StepWatch(0)
    for second in range(10):
        phases.now = (1 + 14 * second, "step", float(second))
        assert watch.look(phases, float(second)) is None
    assert watch.look(phases, 69.0) is None
    missed = watch.look(phases, 70.0)
    assert missed is not None
    assert missed["usual"] == pytest.approx(1 / 14)


def command(tmp_path: Path, trouble: str, *options: str) -> tuple[list[str], dict[str, str]]:
    """Returns a training with a reporter that is trouble: its command and its environment."""
    reporter = tmp_path / "reporter.py"
    reporter.write_text(REPORTER)
    words = [
        "train",
        "tiny",
        "--mesh",
        "data=1",
        "--model.layers",
        "1",
        "--steps",
        "20",
        "--devices",
        "1",
    ]
    words += ["--report", f"{reporter}:trouble", "--out", str(tmp_path / "out")]
    words += ["--data.sample", "0", "--training.save-every", "2", *options]
    environment = {**os.environ, "TROUBLE": trouble, "MARK": str(tmp_path / "mark")}
    return [sys.executable, "-m", "meshwright", *words], environment


def train(tmp_path: Path, trouble: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Trains in a process of its own, with a reporter that is trouble."""
    words, environment = command(tmp_path, trouble, *options)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=400)


def test_a_run_whose_main_thread_hangs_and_then_fails_calls_the_command(tmp_path: Path) -> None:
    file = tmp_path / "alarms.jsonl"
    done = train(tmp_path, "hang", "--alarm.command", appending(file), "--alarm.step-age", "3")
    assert done.returncode != 0
    no_step, failed = documents(file)
    assert no_step["alarm"] == "no step"
    assert no_step["age"] == pytest.approx(3, abs=2.5)
    assert "reporter.py" in no_step["waits for"] or "reporters" in no_step["waits for"]
    assert failed["alarm"] == "failed"
    assert "the tracker is gone" in failed["text"]
    assert "alarm: no step for" in done.stderr
    folder = RunFolder(tmp_path / "out")
    folder.refresh()
    assert no_step["text"] in [event["said"] for event in folder.events_of("alarm")]
    assert no_step["text"] in str(run_page([folder]))


def test_the_supervisor_of_a_killed_process_calls_the_webhook(
    tmp_path: Path, webhook: tuple[str, list[Any]]
) -> None:
    url, received = webhook
    done = train(
        tmp_path, "kill", "--supervise", "--restarts.backoff", "0.1", "--alarm.webhook", url
    )
    assert done.returncode == 0, done.stderr
    (killed,) = received
    assert killed["alarm"] == "killed"
    assert "signal 9" in killed["text"]


def test_of_several_supervisors_one_sends_each_kind(tmp_path: Path) -> None:
    """Eight hosts that find the newest file too old at the same time."""
    out = tmp_path / "out"
    out.mkdir()
    at_once = threading.Barrier(8)
    answers: list[bool] = []

    def ask(claims: AlarmClaims) -> None:
        at_once.wait()
        answers.append(claims.take("failed"))

    for _ in range(3):
        answers.clear()
        threads = [
            threading.Thread(target=ask, args=(AlarmClaims(out, every=0.5),)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == [False] * 7 + [True]
        assert AlarmClaims(out, every=60).take("failed") is False
        time.sleep(0.6)
    assert AlarmClaims(out, every=60).take("killed")
    AlarmClaims(out, every=60).forget()
    assert AlarmClaims(out, every=60).take("killed")
    assert AlarmClaims(tmp_path / "gone", every=60).take("killed")
    (out / ".supervise" / "alarm-failed-9").write_text(f"{time.time() + 3600:.3f}")
    assert AlarmClaims(out, every=60).take("failed")  # the clock was set back by an hour


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_supervisors_of_two_hosts_send_each_alarm_once(
    tmp_path: Path, webhook: tuple[str, list[Any]]
) -> None:
    """Two real processes: one is killed, the other is left by it, and neither is started again."""
    url, received = webhook
    options = ("--supervise", "--restarts.most", "0", "--restarts.backoff", "0.1")
    options += ("--mesh", "data=2", "--devices", "2", "--watchdog.silence", "10")
    words, environment = command(tmp_path, "kill", *options, "--alarm.webhook", url)
    processes = [
        subprocess.Popen(
            words,
            env={**environment, **each},
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for each in ranks(2)
    ]
    said = [process.communicate(timeout=400)[1] for process in processes]
    assert [process.returncode for process in processes] == [11, 11], said
    assert sorted(document["alarm"] for document in received) == ["failed", "killed"]
    assert sum("another host has sent one" in text for text in said) == 1


def test_a_run_that_fails_before_its_first_step_is_an_alarm(
    tmp_path: Path, webhook: tuple[str, list[Any]]
) -> None:
    url, received = webhook
    done = train(tmp_path, "none", "--data", str(tmp_path / "nothere.txt"), "--alarm.webhook", url)
    assert done.returncode != 0
    (failed,) = received
    assert failed["alarm"] == "failed"
    assert "nothere.txt" in failed["text"]


def test_a_slow_command_does_not_cost_the_last_webhook(
    tmp_path: Path, webhook: tuple[str, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    url, received = webhook
    alarms = Alarms(AlarmOptions(command="sleep 8", webhook=url), tmp_path)
    with alarms.sending():
        alarms.tell("failed", "the last")
    assert [document["text"] for document in received] == ["the last"]
    time.sleep(0.2)
    assert "was not taken within 5 s" in capfd.readouterr().err


def test_without_a_hook_nothing_is_said_to_be_suppressed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alarms = Alarms(AlarmOptions(), tmp_path)
    with alarms.sending():
        alarms.tell("bad step", "step 3")
        alarms.tell("bad step", "step 4")
    assert capfd.readouterr().err == ""

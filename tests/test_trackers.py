"""Each experiment tracker's own store holds what was sent: configuration, metrics, samples."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Training
from meshwright.errors import ConfigError
from meshwright.models.families.llama import Llama
from meshwright.plugins import PARTS
from meshwright.reporters import build_reporters
from meshwright.reporters.files import JsonLines
from meshwright.runs.run import Run
from meshwright.runs.run_file import write_run

pytestmark = pytest.mark.exhaustive

METRICS = {
    1: {"loss": 2.5, "tokens/s": 1000.0},
    2: {"loss": 2.25, "tokens/s": 1100.0},
    3: {"held-out loss": 2.0},
}
SAMPLE = "<b>to be</b>\nor not"
Read = tuple[dict[str, Any], dict[str, list[tuple[int, float]]], str]
"""Configuration, curves and sample as a store holds them."""


def sent(tmp_path: Path, name: str) -> Path:
    """Sends a run to a tracker, as the training loop does; returns its output folder."""
    out = tmp_path / "out-1"
    out.mkdir()
    run = Run(Llama(), name="mine", training=Training(steps=7), reporters=(name,))
    write_run(run, out / "run.json")
    (reporter,) = build_reporters(out, run)
    assert not isinstance(reporter, type)
    for step, values in METRICS.items():
        reporter.write(step, dict(values))
    later: Any = reporter
    later.sample(2, SAMPLE)
    reporter.close()
    return out


def read_tensorboard(out: Path) -> Read:
    from tensorboardX.proto.event_pb2 import Event

    files = sorted((out / "tensorboard").iterdir(), key=lambda file: file.stat().st_ctime_ns)
    content, at = b"".join(file.read_bytes() for file in files), 0
    curves: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16
        if event.HasField("session_log"):
            # A TensorBoard that reads the files as they grow forgets these steps here.
            assert all(step < event.step for points in curves.values() for step, _ in points)
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts[value.tag.partition("/")[0]] = value.tensor.string_val[0].decode()
            else:
                # TensorBoard's names have no spaces.
                curves.setdefault(value.tag.replace("_", " "), []).append(
                    (event.step, round(value.simple_value, 4))
                )
    unindented = {
        name: "\n".join(line[4:] for line in text.splitlines()) for name, text in texts.items()
    }
    return json.loads(unindented["configuration"]), curves, unindented.get("sample", "")


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of W&B's transaction log: LevelDB's format, in blocks of 32 KiB after a header of 7 bytes."""
    at, block, record = 7, 2**15, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block  # too short for another header
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(out: Path) -> Read:
    from wandb.proto.wandb_internal_pb2 import Record

    configuration: dict[str, Any] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    sample = ""
    records = list[bytes]()
    for file in sorted(out.glob("wandb/offline-run-*/run-*.wandb")):
        content, until = file.read_bytes(), time.monotonic() + 30
        # A process of wandb's own writes the file, on a busy machine after the run has ended.
        while not list(wandb_records(content)) and time.monotonic() < until:
            time.sleep(0.5)
            content = file.read_bytes()
        records += wandb_records(content)
    for data in records:
        record = Record.FromString(data)
        for item in (*record.run.config.update, *record.config.update):
            if item.key:
                configuration[item.key] = json.loads(item.value_json)
        values = {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "sample.path" in values:
            sample = (file.parent / "files" / values["sample.path"]).read_text()
        # Its history keeps what was before a return; the last value of a step is the one that counts.
        for points in curves.values() if "returned to step" in values else ():
            points[:] = [point for point in points if point[0] <= values["returned to step"]]
        for name, value in values.items():
            if name in ("loss", "tokens/s", "held-out loss"):
                curves.setdefault(name, []).append((values["step"], value))
    return configuration, curves, sample


def read_json_lines(out: Path) -> Read:
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in values.keys() - {"step"}:
            curves.setdefault(name, []).append((values["step"], values[name]))
    return {}, curves, ""


READERS: dict[str, Callable[[Path], Read]] = {"tensorboard": read_tensorboard, "wandb": read_wandb}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores in the test's folder, and no server."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "DO_NOT_TRACK": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)


def test_every_tracker_has_a_reader() -> None:
    assert READERS.keys() == PARTS["reporter"].keys()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
@pytest.mark.usefixtures("offline")
def test_a_tracker_holds_what_was_sent(name: str, tmp_path: Path) -> None:
    configuration, curves, sample = READERS[name](sent(tmp_path, name))
    assert configuration["name"] == "mine" and configuration["training"]["steps"] == 7
    for metric in ("loss", "tokens/s", "held-out loss"):
        expected = [(step, values[metric]) for step, values in METRICS.items() if metric in values]
        assert sorted(curves[metric]) == expected
    assert SAMPLE in sample or "&lt;b&gt;to be&lt;/b&gt;\nor not" in sample


def opened(out: Path, name: str, upto: int) -> Any:
    """The reporter of a run that begins, or goes on after step `upto`, as the training loop opens it."""
    if name == "metrics.jsonl":
        return JsonLines(out / "metrics.jsonl", upto=upto)
    (reporter,) = build_reporters(out, Run(Llama(), name="mine", reporters=(name,)))
    rewinding: Any = reporter
    if upto:
        rewinding.rewind(upto)
    return reporter


@pytest.mark.parametrize("name", ["metrics.jsonl", *READERS])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
@pytest.mark.usefixtures("offline")
def test_every_reporter_rewinds(name: str, tmp_path: Path) -> None:
    """A step has one value, the last that was written, after a return to a checkpoint and after a resume."""
    out = tmp_path / "out"
    out.mkdir()
    write_run(Run(Llama(), name="mine"), out / "run.json")
    first = opened(out, name, 0)
    for step in range(1, 6):
        first.write(step, {"loss": 10.0 + step})
    first.rewind(3)
    for step in (4, 5, 6):
        first.write(step, {"loss": 20.0 + step})
    first.close()
    second = opened(out, name, 5)
    second.write(6, {"loss": 36.0})
    second.write(7, {"loss": 37.0})
    second.close()
    _, curves, _ = {**READERS, "metrics.jsonl": read_json_lines}[name](out)
    expected = [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0), (6, 36.0), (7, 37.0)]
    assert sorted(curves["loss"]) == expected


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_that_is_not_installed_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"tensorboard": "tensorboardX"}.get(name, name)
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(
        ConfigError, match=rf"{module}.* is not installed\n.*pip install 'meshwright\[{name}\]'"
    ):
        build_reporters(tmp_path, Run(Llama(), name="mine", reporters=(name,)))


def test_metrics_that_are_not_finite_are_sent(tmp_path: Path) -> None:
    (reporter,) = build_reporters(tmp_path, Run(Llama(), reporters=("tensorboard",)))
    reporter.write(1, {"loss": math.nan})
    reporter.close()

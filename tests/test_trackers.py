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
    later.rewind(2)
    reporter.close()
    return out


def read_tensorboard(out: Path) -> Read:
    from tensorboardX.proto.event_pb2 import Event

    (file,) = (out / "tensorboard").glob("events.*")
    content, at = file.read_bytes(), 0
    curves: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16
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
    return json.loads(unindented["configuration"]), curves, unindented["sample"]


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

    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    configuration: dict[str, Any] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    sample = ""
    content, until = file.read_bytes(), time.monotonic() + 30
    # A process of wandb's own writes the file, on a busy machine after the run has ended.
    while not list(wandb_records(content)) and time.monotonic() < until:
        time.sleep(0.5)
        content = file.read_bytes()
    for data in wandb_records(content):
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
        for name, value in values.items():
            if name in ("loss", "tokens/s", "held-out loss"):
                curves.setdefault(name, []).append((values["step"], value))
    return configuration, curves, sample


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

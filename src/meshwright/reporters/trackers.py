"""Experiment trackers that a run names as its reporters.

Each is given the output folder of a run and takes its configuration from run.json there. Servers,
projects and offline mode are chosen as each library documents it, by its environment variables.
"""

import html
import importlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

from meshwright.documents import read_json
from meshwright.errors import ConfigError
from meshwright.reporters import Values
from meshwright.reporters.health import HealthRecord
from meshwright.storage.writing import write_atomically

PROJECT = "meshwright"
"""Project, or experiment, of a run whose environment names none."""


class _TensorBoard:
    """Reporter that writes TensorBoard events into OUT/tensorboard (extra `tensorboard`)."""

    def __init__(self, out: Path):
        self._open: Any = _library("tensorboard", "tensorboardX").SummaryWriter
        self._folder = out / "tensorboard"
        self._writer: Any = self._open(str(self._folder), filename_suffix=_unique_suffix())
        self._writer.add_text(
            "configuration", _indented(json.dumps(_configuration(out), indent=1)), 0
        )

    def rewind(self, step: int) -> None:
        """Drops the events of steps after `step` from the files.

        A TensorBoard that has read them gets a mark.
        """
        self._writer.close()
        for file in self._folder.glob("events.out.tfevents.*"):
            _drop_events_after(file, step)
        # With `purge_step` a writer begins its file with the event that purges this and later
        # steps.
        self._writer = self._open(
            str(self._folder), purge_step=step + 1, filename_suffix=_unique_suffix()
        )

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def health(self, step: int, record: HealthRecord) -> None:
        self.write(step, record.curves())

    def sample(self, step: int, text: str) -> None:
        self._writer.add_text("sample", _indented(text), step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Reporter to Weights & Biases (needs the extra `wandb`).

    WANDB_MODE=offline keeps it all in OUT/wandb.
    """

    def __init__(self, out: Path):
        self._wandb: Any = _library("wandb", "wandb")
        try:
            settings = self._wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False
            )
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self._run: Any = self._wandb.init(
                project=project,
                name=out.name,
                id=_kept_id(out),
                resume="allow",
                dir=str(out),
                config=_configuration(out),
                settings=settings,
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError(
                "--report wandb",
                f"W&B refuses: {error}",
                "wandb login, or WANDB_MODE=offline and later wandb sync",
            ) from error
        # W&B's own steps may not decrease, which they do after a return to an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def rewind(self, step: int) -> None:
        """Marks that a run went back.

        W&B deletes nothing of a history, so the last value of a step counts.
        """
        self._run.log({"step": step, "returned to step": step})

    def write(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values})

    def health(self, step: int, record: HealthRecord) -> None:
        self.write(step, record.curves())

    def sample(self, step: int, text: str) -> None:
        self._run.log(
            {
                "step": step,
                "sample": self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False),
            }
        )

    def close(self) -> None:
        self._run.finish()


def _unique_suffix() -> str:
    """Returns the end of an event file's name.

    Its beginning is the second, in which two files may be opened.
    """
    return f".{uuid.uuid4().hex[:8]}"


def _drop_events_after(file: Path, step: int) -> None:
    """Rewrites a TensorBoard event file without the events of steps after `step`.

    A torn last event is dropped too.
    A record is its length (8 bytes), a checksum of that (4), the event, and a checksum of it (4).
    """
    proto: Any = _library("tensorboard", "tensorboardX.proto.event_pb2")
    content, at, kept = file.read_bytes(), 0, list[bytes]()
    while at + 12 <= len(content):
        stop = at + 12 + int.from_bytes(content[at : at + 8], "little") + 4
        if stop > len(content):
            break
        event = proto.Event.FromString(content[at + 12 : stop - 4])
        if event.step <= step or event.HasField("file_version"):
            kept.append(content[at:stop])
        at = stop
    remaining = b"".join(kept)
    if remaining != content:
        write_atomically(file, remaining)


def _library(extra: str, module: str) -> Any:
    """Imports a tracker's library; an absent one is a ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--report {extra}",
            f"{error.name or module} is not installed",
            f"pip install 'meshwright[{extra}]'",
        ) from error


def _configuration(out: Path) -> dict[str, Any]:
    file = out / "run.json"
    return dict(read_json(file)) if file.is_file() else {}


def _kept_id(out: Path) -> str:
    """Returns the id under which W&B knows the run in `out`, the same after a resume."""
    file = out / "wandb-run"
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex[:16])
    return file.read_text(encoding="utf-8").strip()


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())

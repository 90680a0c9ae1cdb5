"""Experiment trackers that a run names as its reporters.

Each is given the output folder of a run and takes its configuration from run.json there. Servers, projects and
offline mode are chosen as each library documents it, by its environment variables.
"""

import html
import importlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import read_json, write_atomically
from meshwright.errors import ConfigError
from meshwright.reporters import Values

PROJECT = "meshwright"
"""Project, or experiment, of a run whose environment names none."""


class _TensorBoard:
    """Reporter that writes TensorBoard events into OUT/tensorboard (needs the extra `tensorboard`)."""

    def __init__(self, out: Path):
        writer: Any = _library("tensorboard", "tensorboardX").SummaryWriter
        self._writer = writer(str(out / "tensorboard"))
        self._writer.add_text("configuration", _indented(json.dumps(_configuration(out), indent=1)), 0)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def sample(self, step: int, text: str) -> None:
        self._writer.add_text("sample", _indented(text), step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Reporter to Weights & Biases (needs the extra `wandb`). WANDB_MODE=offline keeps it all in OUT/wandb."""

    def __init__(self, out: Path):
        self._wandb: Any = _library("wandb", "wandb")
        try:
            settings = self._wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self._run: Any = self._wandb.init(
                project=project,
                name=out.name,
                id=_kept_id(out, "wandb"),
                resume="allow",
                dir=str(out),
                config=_configuration(out),
                settings=settings,
            )
        except self._wandb.errors.UsageError as error:
            raise ConfigError(
                "--report wandb", f"W&B refuses: {error}", "wandb login, or WANDB_MODE=offline and later wandb sync"
            ) from error
        # W&B's own steps may not decrease, which they do after a return to an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values})

    def sample(self, step: int, text: str) -> None:
        self._run.log({"step": step, "sample": self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Reporter to trackio's local database (needs the extra `trackio`). TRACKIO_DIR is its folder."""

    def __init__(self, out: Path):
        self._trackio: Any = _library("trackio", "trackio")
        self._project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name, config = f"{out.name}-{_kept_id(out, 'trackio')[:8]}", _flat(_configuration(out))
        self._run: Any = self._trackio.init(
            project=self._project, name=name, resume="allow", config=config, embed=False, auto_log_gpu=False
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def sample(self, step: int, text: str) -> None:
        self._run.log({"sample": self._trackio.Markdown(_indented(text))}, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """Reporter to MLflow (needs the extra `mlflow`): MLFLOW_TRACKING_URI, or a database and files in OUT/mlflow."""

    _EVERY = 5.0
    """Seconds between writes."""

    def __init__(self, out: Path):
        mlflow: Any = _library("mlflow", "mlflow.tracking", "mlflow.entities")
        folder = (out / "mlflow").resolve()
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if uri is None:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._entities, self._client = mlflow.entities, mlflow.tracking.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name, artifacts)
        file = out / "mlflow-run"
        if file.is_file():
            self._run = file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(number, run_name=out.name).info.run_id
            write_atomically(file, self._run)
            for key, value in _flat(_configuration(out)).items():
                self._client.log_param(self._run, key, value)
        self._waiting: list[Any] = []
        self._written = time.monotonic()

    def write(self, step: int, values: Values) -> None:
        now = round(time.time() * 1e3)
        self._waiting += [self._entities.Metric(_mlflow_name(name), v, now, step) for name, v in values.items()]
        if time.monotonic() - self._written > self._EVERY or len(self._waiting) > 900:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            part, self._waiting = self._waiting[:900], self._waiting[900:]
            self._client.log_batch(self._run, metrics=part)
        self._written = time.monotonic()

    def sample(self, step: int, text: str) -> None:
        self._client.log_text(self._run, text, f"samples/step-{step}.txt")

    def close(self) -> None:
        self._flush()
        self._client.set_terminated(self._run)


def _library(extra: str, *modules: str) -> Any:
    """Imports the modules of a tracker and returns the package of the last; an absent one is a ConfigError."""
    try:
        package = importlib.import_module(modules[0].partition(".")[0])
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--report {extra}", f"{error.name or modules[0]} is not installed", f"pip install 'meshwright[{extra}]'"
        ) from error
    return package


def _configuration(out: Path) -> dict[str, Any]:
    file = out / "run.json"
    return dict(read_json(file)) if file.is_file() else {}


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, list) else value
    return found


def _kept_id(out: Path, tracker: str) -> str:
    """Returns the id under which a tracker knows the run in `out`, the same after a resume."""
    file = out / f"{tracker}-run"
    if not file.is_file():
        write_atomically(file, uuid.uuid4().hex[:16])
    return file.read_text(encoding="utf-8").strip()


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())

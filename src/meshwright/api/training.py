"""Training and evaluation from Python."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from meshwright.api.choices import choose_for_devices
from meshwright.config import MeshShape, Run
from meshwright.hardware.mesh import default_cache_folder
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.plugins import keep_own_names
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, open_console
from meshwright.runs.run_file import run_in_folder
from meshwright.runs.write_run import run_to_dict
from meshwright.trainer import evaluation, loop
from meshwright.trainer.parity import Parity, compare_meshes
from meshwright.wrapped.model import Wrapped, is_wrapped
from meshwright.wrapped.parity import compare_wrapped
from meshwright.wrapped.prepared import WrappedEvaluation, evaluate_wrapped, prepare_wrapped


def train(
    run: Run,
    out: str | Path | None = None,
    *,
    start: Literal["fresh", "resume"] = "fresh",
    at: int | None = None,
    data: Literal["same", "new"] = "same",
    devices: int | None = None,
    progress: Literal["console", "none"] = "console",
    cache: Path | None = None,
) -> loop.Summary:
    """Trains `run` and returns a summary.

    out: output folder for checkpoints, metrics, the Run and a text sample; None makes a new one under `runs`.
    start: `resume` continues from the last checkpoint in `out`, or from that of step `at`.
    data: `new` resumes although the text, its order or its mixture differ from those of the checkpoint.
    devices: use the first so many devices; None uses all.  progress: where metrics are shown while it trains.
    cache: folder of token files and compiled programs; None takes the user's cache.
    Raises ConfigError before anything is traced, DataError, CheckpointError, TrainingError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "mine", progress="none", cache=tmp)
        >>> result.steps, result.loss > 0
        (2, True)
    """
    folder = Path(out) if out is not None else Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    own = folder / "tokenizer.json" if start == "resume" else None
    keep_own_names(run_to_dict(run))  # before a checkpoint names them too
    prepared = _prepare(run, cache or default_cache_folder(), devices, own)

    def reporters(first: int) -> list[Reporter]:
        if progress == "none" or jax.process_index() != 0:
            return []
        return [ConsoleReport(open_console(), start=first, steps=run.training.steps)]

    return loop.train(prepared, folder, start=start, at=at, data=data, reporters=reporters)


def _prepare(run: Run, cache: Path, devices: int | None, own: Path | None) -> loop.Trainable:
    if is_wrapped(run):
        return prepare_wrapped(run, cache=cache, devices=devices)
    return loop.prepare_run(run, cache=cache, devices=devices, choose=choose_for_devices, own=own)


def evaluate(
    out: str | Path,
    *,
    data: Sequence[str] = (),
    at: int | None = None,
    mesh: str | MeshShape | None = None,
    model: Wrapped | None = None,
    cache: Path | None = None,
) -> evaluation.Evaluation | WrappedEvaluation:
    """Evaluates a run's checkpoint on its held-out text or batches, or on the text `data`.

    out: output folder of the run, or hf:PATH of a Hugging Face model.  data: other text, all of which is evaluated.
    at: step of the checkpoint; None takes the last.  mesh: mesh to evaluate on; None takes the run's own.
    model: wrapped model of the run, where run.json cannot name it.
    Raises CheckpointError, ConfigError, DataError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "evaluated", progress="none", cache=tmp)
        >>> evaluation = mw.evaluate(tmp / "evaluated", mesh="fsdp=2", cache=tmp)
        >>> evaluation.step, abs(evaluation.loss - result.held_out_loss) < 1e-3
        (2, True)
    """
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    if not is_hugging_face(str(out)) and is_wrapped(wrapped := run_in_folder(Path(out))):
        wrapped = dataclasses.replace(wrapped, model=model or wrapped.model, mesh=shape or wrapped.mesh)
        return evaluate_wrapped(Path(out), wrapped, cache=cache or default_cache_folder(), at=at)
    run = evaluation.run_to_evaluate(out, data, shape)
    return evaluation.evaluate_checkpoint(out, run, cache=cache or default_cache_folder(), whole=bool(data), at=at)


def parity(
    run: Run,
    against: MeshShape | str = "data=1",
    *,
    steps: int = 5,
    cache: Path | None = None,
    devices: int | None = None,
) -> Parity:
    """Compares `steps` steps of `run` on its own mesh with the same steps on the mesh `against`, in float32.

    cache: folder of token files and compiled programs; None takes the user's cache folder.
    devices: use the first so many; None uses all. A run without a mesh takes the default mesh over them.
    Raises ConfigError where the run does not fit one of the meshes, and DataError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, batch=2, seq=32)
        >>> print(mw.parity(run, against="data=1", steps=1, cache=tmp).first_divergence)
        None
    """
    other = MeshShape.parse(against) if isinstance(against, str) else against
    if is_wrapped(run):
        return compare_wrapped(run, other, cache=cache or default_cache_folder(), devices=devices, steps=steps)
    prepared = loop.prepare_run(run, cache=cache or default_cache_folder(), devices=devices)
    return compare_meshes(prepared.device_run, other, prepared.train, prepared.corpus.weights, steps=steps)

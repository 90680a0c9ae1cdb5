"""Training and evaluation from Python."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from meshwright.activity import watched_by
from meshwright.api.choices import choose_for_devices
from meshwright.api.memory_remedies import memory_explained
from meshwright.api.viewing import view
from meshwright.config import MeshShape
from meshwright.hardware.mesh import default_cache_folder
from meshwright.hugging_face.hub import is_hugging_face
from meshwright.plugins import keep_own_names
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, Period, open_console
from meshwright.report.tokenizing import TokenizeReport
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.runs.write_run import run_to_dict
from meshwright.storage.paths import path_of
from meshwright.trainer import evaluation, loop
from meshwright.trainer.parity import Parity, check_processes, compare_meshes
from meshwright.wrapped.model import Wrapped, is_wrapped
from meshwright.wrapped.parity import compare_wrapped
from meshwright.wrapped.prepared import WrappedEvaluation, evaluate_wrapped, prepare_wrapped


def train(
    run: Run,
    out: str | Path | None = None,
    *,
    start: Literal["fresh", "resume"] | int = "fresh",
    data: Literal["same", "new"] = "same",
    devices: int | None = None,
    progress: str = "30s,10",
    profile: str | None = None,
    cache: Path | None = None,
) -> loop.Summary:
    """Trains `run` and returns a summary.

    out: output folder for checkpoints, metrics, the Run and a text sample; None makes a new one under `runs`.
    start: `resume` continues from the last checkpoint in `out`, a number from that of this step.
    data: `new` resumes although the text, its order or its mixture differ from those of the checkpoint.
    devices: use the first so many devices; None uses all.
    progress: time between lasting lines on standard output: seconds (`30s`), steps (`10`), or both, of which the later
    counts; `none` shows nothing.
    profile: first and last step to trace into `out`/profile, as `10:13`, and to set beside the simulated schedule, in
    `out`/profile.json and, unless `progress` is `none`, on standard output.
    cache: folder of token files and compiled programs; None takes the user's cache.
    Raises ConfigError before anything is traced, DataError, CheckpointError, TrainingError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "mine", progress="none", cache=tmp)
        >>> result.steps, result.loss > 0
        (2, True)
    """
    folder = path_of(out) if out is not None else Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    at = start if isinstance(start, int) else None
    own = None if start == "fresh" else folder / "tokenizer.json"
    keep_own_names(run_to_dict(run))  # before a checkpoint names them too
    console = ConsoleReport(open_console(), Period.parse("30s,10" if progress == "none" else progress))
    display = None if progress == "none" else TokenizeReport(open_console(sys.stderr))

    def reporters(first: int) -> list[Reporter]:
        if progress == "none" or jax.process_index():
            return []
        return [console.begin(first, run.training.steps, run.optimizer.warmup_steps)]

    with contextlib.nullcontext() if progress == "none" else watched_by(console), contextlib.closing(console):
        prepared = _prepare(run, cache or default_cache_folder(), devices, own, display)
        shown = None if progress == "none" else open_console()
        with memory_explained(prepared), _profiled(prepared, profile, folder, shown) as profiled:
            return loop.train(
                profiled, folder, start="fresh" if start == "fresh" else "resume", at=at, data=data,
                reporters=reporters, page=lambda: view(folder).write(),
            )  # fmt: skip


def _profiled(
    prepared: loop.Trainable, steps: str | None, out: Path, console: Console | None
) -> AbstractContextManager[loop.Trainable]:
    if steps is None:
        return contextlib.nullcontext(prepared)
    from meshwright.api.profiling import profiled  # most trainings have no profile

    return profiled(prepared, steps, out, console)


def _prepare(
    run: Run, cache: Path, devices: int | None, own: Path | None, progress: TokenizeReport | None
) -> loop.Trainable:
    if is_wrapped(run):
        return prepare_wrapped(run, cache=cache, devices=devices)
    return loop.prepare_run(run, cache=cache, devices=devices, choose=choose_for_devices, own=own, progress=progress)


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
    if not is_hugging_face(str(out)) and is_wrapped(wrapped := run_in_folder(path_of(out))):
        wrapped = dataclasses.replace(wrapped, model=model or wrapped.model, mesh=shape or wrapped.mesh)
        return evaluate_wrapped(path_of(out), wrapped, cache=cache or default_cache_folder(), at=at)
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
    Of several processes all compute the run's mesh; a mesh `against` that fits process 0 is computed by it alone.
    Raises ConfigError where the run does not fit one of the meshes, DataError, and HostError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, batch=2, seq=32)
        >>> print(mw.parity(run, against="data=1", steps=1, cache=tmp).first_divergence)
        None
    """
    other = MeshShape.parse(against) if isinstance(against, str) else against
    check_processes(run.mesh, other)
    if is_wrapped(run):
        return compare_wrapped(run, other, cache=cache or default_cache_folder(), devices=devices, steps=steps)
    prepared = loop.prepare_run(run, cache=cache or default_cache_folder(), devices=devices)
    return compare_meshes(prepared.device_run, other, prepared.train, prepared.corpus.weights, steps=steps)

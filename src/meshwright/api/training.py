"""Training and evaluation from Python."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from meshwright.api.choices import choose_for_devices
from meshwright.config import MeshShape, Run
from meshwright.hardware.mesh import default_cache_folder
from meshwright.report import Reporter
from meshwright.report.console import ConsoleReport, open_console
from meshwright.trainer import evaluation, loop


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
    prepared = loop.prepare_run(
        run, cache=cache or default_cache_folder(), devices=devices, choose=choose_for_devices,
        own=folder / "tokenizer.json" if start == "resume" else None,
    )  # fmt: skip

    def reporters(first: int) -> list[Reporter]:
        if progress == "none" or jax.process_index() != 0:
            return []
        return [ConsoleReport(open_console(), start=first, steps=run.training.steps)]

    return loop.train(prepared, folder, start=start, at=at, data=data, reporters=reporters)


def evaluate(
    out: str | Path,
    *,
    data: Sequence[str] = (),
    at: int | None = None,
    mesh: str | MeshShape | None = None,
    cache: Path | None = None,
) -> evaluation.Evaluation:
    """Evaluates a run's checkpoint on its held-out text, or on `data`.

    out: output folder of the run, or hf:PATH of a Hugging Face model.  data: other text, all of which is evaluated.
    at: step of the checkpoint; None takes the last.  mesh: mesh to evaluate on; None takes the run's own.
    Raises CheckpointError, ConfigError, DataError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "evaluated", progress="none", cache=tmp)
        >>> evaluation = mw.evaluate(tmp / "evaluated", mesh="fsdp=2", cache=tmp)
        >>> evaluation.step, abs(evaluation.loss - result.held_out_loss) < 1e-3
        (2, True)
    """
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    run = evaluation.run_to_evaluate(out, data, shape)
    return evaluation.evaluate_checkpoint(out, run, cache=cache or default_cache_folder(), whole=bool(data), at=at)

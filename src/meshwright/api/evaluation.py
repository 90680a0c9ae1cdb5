"""Evaluation of checkpoints, benchmarks of `lm-eval`, and comparison of meshes from Python."""

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.generation.generator import Generator
from meshwright.generation.lm_eval_model import RequestAnswers
from meshwright.models.model import Model
from meshwright.runs.run import Run
from meshwright.storage.paths import default_cache_folder, path_of, place_of
from meshwright.trainer import evaluation, loop
from meshwright.trainer.hosts import agree_on
from meshwright.trainer.parity import Parity, check_processes, compare_meshes


def evaluate(
    out: str | Path,
    *,
    data: Sequence[str] = (),
    at: int | None = None,
    mesh: str | MeshShape | None = None,
    devices: int | None = None,
    model: Model | None = None,
    cache: Path | None = None,
) -> evaluation.Evaluation | evaluation.BatchEvaluation:
    """Evaluates a run's checkpoint on its held-out text or batches, or on the text `data`.

    out: output folder of the run, or hf:PATH of a Hugging Face model.  data: other text, all of which is evaluated.
    at: step of the checkpoint; None takes the last.  mesh: mesh to evaluate on; None takes the run's own.
    devices: use the first so many; None uses all.  model: wrapped model of the run, where run.json cannot name it.
    Raises CheckpointError, ConfigError, DataError.

    Example:
        >>> run = mw.recipe("tiny", mesh="data=2", layers=1, steps=2, sample=0, eval_samples=16)
        >>> result = mw.train(run, out=tmp / "evaluated", progress="none", cache=tmp)
        >>> evaluation = mw.evaluate(tmp / "evaluated", mesh="fsdp=2", cache=tmp)
        >>> evaluation.step, abs(evaluation.loss - result.held_out_loss) < 1e-3
        (2, True)
    """
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh
    out = place_of(str(out))
    run = evaluation.run_to_evaluate(out, data, shape, model)
    return evaluation.evaluate_checkpoint(
        out, run, cache=path_of(cache or default_cache_folder()), whole=bool(data), at=at, devices=devices
    )


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
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        agree_on(run)
    check_processes(run.mesh, other)
    prepared = loop.prepare_run(run, cache=path_of(cache or default_cache_folder()), devices=devices)
    return compare_meshes(prepared, other, steps=steps)


def check_lm_eval() -> None:
    """Raises ConfigError where `lm-eval` is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("benchmark tasks", "lm-eval is not installed", "pip install 'meshwright[lm-eval]'")


def run_tasks(
    generator: Generator,
    tasks: Sequence[str],
    *,
    batch: int = 8,
    shots: int | None = None,
    limit: int | None = None,
    task_folder: Path | None = None,
) -> dict[str, Any]:
    """Runs tasks of `lm-eval`; returns its results: task -> metric -> value.

    batch: requests computed together.  shots: examples before each question; None
    takes the task's own.  limit: first questions of each task; None takes all.  task_folder: YAML files of further
    tasks. Raises ConfigError for a task that does not exist, and where `lm-eval` is not installed.
    """
    check_lm_eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its dependencies
        import lm_eval
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager

        class MeshwrightLM(RequestAnswers, TemplateLM):
            """Language model of lm-eval."""

        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if unknown:
            raise ConfigError(
                f"--tasks {' '.join(tasks)}",
                f"lm-eval has no task {unknown[0]!r}",
                "a name that `lm-eval ls tasks` lists, or --task-folder with its YAML file",
            )
        results = lm_eval.simple_evaluate(
            model=MeshwrightLM(generator, longest=generator.seq, batch=batch),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    return {task: dict(values) for task, values in results["results"].items()}

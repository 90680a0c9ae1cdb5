"""Benchmarks of `lm-eval` over a run's model."""

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.generation.generator import Generator
from meshwright.generation.lm_eval_model import RequestAnswers


def check_lm_eval() -> None:
    """Raises ConfigError where `lm-eval` is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("benchmark tasks", "lm-eval is not installed", "pip install 'meshwright[lm-eval]'")


def run_tasks(
    generator: Generator,
    tasks: Sequence[str],
    *,
    longest: int,
    batch: int = 8,
    shots: int | None = None,
    limit: int | None = None,
    task_folder: Path | None = None,
) -> dict[str, Any]:
    """Runs tasks of `lm-eval`; returns its results: task -> metric -> value.

    longest: tokens of the longest text.  batch: requests computed together.  shots: examples before each question; None
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
            model=MeshwrightLM(generator, longest=longest, batch=batch),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=False,
        )
    return {task: dict(values) for task, values in results["results"].items()}

"""The verb `evaluate`: the loss of a checkpoint, and its results on benchmarks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshwright.api.evaluation import check_lm_eval, evaluate, run_tasks
from meshwright.api.generation import open_generator
from meshwright.cli.devices import CheckpointOptions, start_devices
from meshwright.cli.output import write, write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.agreement import failing_together
from meshwright.ranges import NonNegativeInt, PositiveInt
from meshwright.trainer.evaluation import Evaluation, run_to_evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(CheckpointOptions):
    """Compute loss, perplexity and bits per byte of a run's last checkpoint, or of hf:PATH, on its held-out text or on
    --data; or its results on the benchmarks --tasks."""

    folder: Annotated[str, tyro.conf.Positional]
    """Output folder of a run, or hf:PATH of a Hugging Face model."""
    data: tuple[str, ...] = ()
    """Other text, all of which is evaluated: what `train --data` takes."""
    tasks: tuple[str, ...] = ()
    """Benchmarks of lm-eval to run instead, by name (needs the extra `lm-eval`)."""
    shots: NonNegativeInt | None = None
    """Examples before each question of --tasks; by default the task's own number."""
    limit: PositiveInt | None = None
    """Questions of each task, the first so many; by default all."""
    batch: PositiveInt = 8
    """Questions of --tasks computed together."""
    task_folder: Path | None = None
    """Folder of YAML files with tasks of your own for --tasks."""
    json: bool = False
    """Print JSON."""


@failing_together()
def main(args: Sequence[str]) -> int:
    """Runs `meshwright evaluate`. Raises CheckpointError where there is no run, ConfigError where there is no text."""
    options = parse(EvaluateOptions, "evaluate", args)
    if options.tasks and options.data:
        raise ConfigError("--tasks and --data", "tasks bring their own text", "one of them")
    shape = options.shape()
    hosts = options.hosts.hosts()
    start_devices(options.devices, run_to_evaluate(options.folder, options.data, shape).mesh, hosts)
    shown, record = _tasks(options, shape) if options.tasks else _losses(options, shape)
    if hosts.process == 0:
        write_json(record) if options.json else write(shown)
    return 0


def _losses(options: EvaluateOptions, shape: MeshShape | None) -> tuple[str, Any]:
    """Returns loss, perplexity and bits per byte, or a wrapped model's metrics, as text and as a record."""
    evaluation = evaluate(options.folder, data=options.data, at=options.at, mesh=shape, devices=options.devices)
    if not isinstance(evaluation, Evaluation):
        return "".join(f"{name:<20} {value:.6g}\n" for name, value in evaluation.metrics.items()), evaluation.metrics
    text = (
        f"step {evaluation.step}: loss {evaluation.loss:.4f} per token over {evaluation.samples} samples "
        f"({evaluation.tokens:,} tokens, {evaluation.text_bytes:,} bytes)\n"
        f"perplexity {evaluation.perplexity:.5g} per token, {evaluation.bits_per_byte:.4f} bits per byte\n"
    )
    more = {"perplexity": evaluation.perplexity, "bits_per_byte": evaluation.bits_per_byte}
    return text, {**dataclasses.asdict(evaluation), **more}


def _tasks(options: EvaluateOptions, shape: MeshShape | None) -> tuple[str, Any]:
    """Returns the results of the benchmarks, as text and as a record."""
    check_lm_eval()
    generator = open_generator(options.folder, mesh=shape, at=options.at, devices=options.devices)
    results = run_tasks(
        generator,
        options.tasks,
        batch=options.batch,
        shots=options.shots,
        limit=options.limit,
        task_folder=options.task_folder,
    )
    lines = [f"{generator.origin}, texts of at most {generator.seq} tokens"]
    for task, values in results.items():
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        lines += [f"{task:<24} {name.removesuffix(',none'):<16} {value:.4f}" for name, value in numbers.items()]
    return "\n".join(lines) + "\n", results

"""The verb `evaluate`: the loss of a checkpoint."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from meshwright.cli.devices import start_devices
from meshwright.cli.output import write, write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.hardware.mesh import default_cache_folder
from meshwright.trainer.evaluation import evaluate_checkpoint, run_to_evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Compute the mean loss per token of a run's last checkpoint, or of hf:PATH, on its held-out text or on --data."""

    folder: Annotated[str, tyro.conf.Positional]
    """Output folder of a run, or hf:PATH of a Hugging Face model."""
    data: tuple[str, ...] = ()
    """Other text, all of which is evaluated: what `train --data` takes."""
    at: int | None = None
    """Step of the checkpoint; by default the last."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh to evaluate on, as axis=degree,...; by default the run's own."""
    devices: int | None = None
    """Devices to use; simulated where there is no accelerator."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright evaluate`. Raises CheckpointError where there is no run, ConfigError where there is no text."""
    options = parse(EvaluateOptions, "evaluate", args)
    shape = MeshShape.parse(options.mesh) if options.mesh else None
    run = run_to_evaluate(options.folder, options.data, shape)
    start_devices(options.devices, run)
    evaluation = evaluate_checkpoint(
        options.folder,
        run,
        cache=default_cache_folder(),
        whole=bool(options.data),
        at=options.at,
        devices=options.devices,
    )
    if options.json:
        write_json(dataclasses.asdict(evaluation))
    else:
        write(f"step {evaluation.step}: loss {evaluation.loss:.4f} per token over {evaluation.samples} samples\n")
    return 0

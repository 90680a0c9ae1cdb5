"""Checks of what a run saves between forward and backward pass, before anything is traced."""

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.models.remat import REMAT_POLICIES
from meshwright.runs.run import Run


def check_saved(run: Run, shape: MeshShape) -> None:
    """Raises ConfigError for saved layers, and for what pipeline stages keep, where the run cannot have them."""
    _check_saved_layers(run, shape)
    _check_stage_saves(run, shape)


def _check_saved_layers(run: Run, shape: MeshShape) -> None:
    saved, layers = run.training.saved_layers, len(run.model.spec().layers)
    if not 0 <= saved <= layers:
        raise ConfigError(f"{saved} saved layers", f"the model has {layers} layers", f"0 to {layers}")
    if saved and shape.stage > 1:
        raise ConfigError(
            f"{saved} saved layers on mesh {shape}",
            "a pipeline stage runs the same program as every other, so all layers have one remat policy",
            "--training.saved-layers 0 and --training.remat projections, or stage=1",
        )


def _check_stage_saves(run: Run, shape: MeshShape) -> None:
    training = run.training
    if shape.stage > 1 and training.stage_saves == "layers" and REMAT_POLICIES[training.remat].offloaded:
        raise ConfigError(
            f"--training.stage-saves layers with --training.remat {training.remat} on mesh {shape}",
            "what a stage keeps of several microbatches is in the memory of the device",
            "--training.stage-saves input, or a remat policy that does not offload",
        )

"""Weights that a run starts from: a Hugging Face folder, or the last checkpoint of another run."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.config import Model, Run
from meshwright.errors import WeightsError
from meshwright.hugging_face.folder import KEPT, keep_files, open_folder, read_model
from meshwright.hugging_face.hub import find_folder, is_hugging_face
from meshwright.hugging_face.load import load_params
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun

_FREE = ("vocab_multiple",)
"""Fields of a model in which a run may differ from its weights without a word: they change no number."""


def load_initial_weights(device_run: DeviceRun, out: Path | None = None) -> Tree:
    """Returns the weights that `Run.init_from` names, in the shardings and the type of the run's parameters.

    out: output folder, into which tokenizer files, chat template and configuration of the weights are copied.
    Raises WeightsError or CheckpointError where they are not those of the run's model, are missing or damaged.
    """
    run = device_run.run
    assert run.init_from is not None
    changed_fields(run)
    if out is not None and jax.process_index() == 0:
        _keep_description(run.init_from, out)
    if is_hugging_face(run.init_from):
        weights = open_folder(run.init_from)
        return load_params(weights, device_run.params, device_run.state_shardings.params, run.training.param_dtype)
    folder = Path(run.init_from)
    with Checkpoints(folder / "checkpoints", max_to_keep=None) as checkpoints:
        params, _ = checkpoints.restore_params(device_run)
    return params


def changed_fields(run: Run) -> dict[str, tuple[Any, Any]]:
    """Returns the fields of the model that differ from those its weights were trained with: (theirs, the run's).

    Raises WeightsError where the weights are of another family, or fields differ that change shapes.
    """
    assert run.init_from is not None
    own = _model_of(run.init_from)
    if type(own) is not type(run.model):
        raise WeightsError(
            f"a {type(run.model).__name__} that starts from {run.init_from}",
            f"the weights there are of a {type(own).__name__}",
            f"{run.init_from} in the place of the recipe"
            if is_hugging_face(run.init_from)
            else f"--run {run.init_from}/run.json",
        )
    names = [field.name for field in dataclasses.fields(own) if field.name not in _FREE]
    pairs = {name: (getattr(own, name), getattr(run.model, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair[1] is not None}


def describe_initial_weights(run: Run) -> str:
    """Returns one line about the weights that a run starts from."""
    changed = ", ".join(f"{name} {theirs} -> {ours}" for name, (theirs, ours) in changed_fields(run).items())
    text = f"starts from the weights of {run.init_from} at step 0, without optimizer state"
    return text + (f"; the model is changed: {changed}" if changed else "")


def _keep_description(init_from: str, out: Path) -> None:
    if is_hugging_face(init_from):
        keep_files(find_folder(init_from, weights=False), out)
    elif (Path(init_from) / KEPT).is_dir():
        shutil.copytree(Path(init_from) / KEPT, out / KEPT, dirs_exist_ok=True)


def _model_of(init_from: str) -> Model:
    if is_hugging_face(init_from):
        return read_model(init_from).model
    return run_in_folder(Path(init_from)).model

"""Weights that a run starts from: a Hugging Face folder, or the last checkpoint of another run."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.data.chat import TEMPLATES
from meshwright.errors import WeightsError, shell_word
from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.folder import (
    keep_files,
    load_params,
    note_of_length,
    open_folder,
    read_model,
)
from meshwright.hugging_face.hub import find_folder, is_hugging_face
from meshwright.models.adapters import ADAPTERS, merged, quantise
from meshwright.path_kinds import KEPT
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.initial_values import init_params
from meshwright.sharding.params import Param, Tree, is_param, named_leaves, trained_only
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import path_of
from meshwright.storage.transfer import copy_file, files_of
from meshwright.storage.writing import write_atomically

_FREE = ("vocab_multiple",)
"""Fields of a model in which a run may differ from its weights
without a word: they change no number."""

Then = Callable[[str, jax.Array], Any]
"""`(path, weight) -> what is kept of it`."""


def load_initial_weights(device_run: DeviceRun, out: Path | None = None) -> Tree:
    """Returns the weights that `Run.init_from` names,
    in the shardings and the type of the run's parameters.

    out: output folder, into which tokenizer files, chat template and configuration of the weights
    are copied. Raises WeightsError or CheckpointError where they are not those of the run's model,
    are missing or damaged.
    """
    run = device_run.run
    assert run.init_from is not None
    changed_fields(run)
    if out is not None and jax.process_index() == 0:
        kept = path_of(run.init_from) / KEPT
        if is_hugging_face(run.init_from):
            keep_files(find_folder(run.init_from, weights=True), out)
        elif kept.is_dir():
            for name in files_of(kept):
                copy_file(kept / name, out / KEPT / name)
        if run.finetune.template is not None:
            _keep_template(run.finetune.template, out / KEPT / "chat_template.jinja")
    load = functools.partial(_load, run.init_from)
    if run.finetune.method == "lora":
        return add_adapters(device_run, load)
    if run.finetune.objective == "preferences":
        device_run = without_adapters(device_run)  # the reference is a copy of the weights
    return load(device_run, lambda path, w: w)


def _keep_template(template: str, target: Path) -> None:
    """Writes the chat template that a run names, a file or one by name, into its output folder."""
    if template in TEMPLATES:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, TEMPLATES[template])
    else:
        copy_file(path_of(template), target)


def _load(init_from: str, device_run: DeviceRun, then: Then) -> Tree:
    """Returns the weights of a run without adapters;
    each is given to `then` before the next is loaded."""
    if is_hugging_face(init_from):
        weights = open_folder(init_from)
        dtype = device_run.run.training.param_dtype
        return load_params(
            weights, device_run.layout.params, device_run.abstract.shardings.params, dtype, then
        )
    params = load_run(path_of(init_from), device_run)
    treedef: Any = jax.tree.structure(params)
    return treedef.unflatten([then(path, w) for path, w in named_leaves(params).items()])


def load_run(folder: Path, device_run: DeviceRun) -> Tree:
    """Returns the weights of another run's last checkpoint; its adapters are merged."""
    theirs = run_in_folder(folder)
    with Checkpoints(folder / "checkpoints", max_to_keep=None) as checkpoints:
        if theirs.finetune.method != "lora":
            return checkpoints.restore_params(device_run)[0]
        training = dataclasses.replace(
            device_run.run.training, param_dtype=theirs.training.param_dtype
        )
        adapted = dataclasses.replace(device_run.run, finetune=theirs.finetune, training=training)
        other = place_on_devices(adapted, device_run.mesh)
        params = merge_adapters(other, checkpoints.restore_params(other)[0])[1]
    return jax.tree.map(lambda w, like: w.astype(like.dtype), params, device_run.abstract.params)


def changed_fields(run: Run) -> dict[str, tuple[Any, Any]]:
    """Returns the fields of the model that differ
    from those its weights were trained with: (theirs, the run's).

    Raises WeightsError where the weights are of another family,
    or fields differ that change shapes.
    """
    assert run.init_from is not None
    foreign = is_hugging_face(run.init_from)
    own = (
        read_model(run.init_from).model if foreign else run_in_folder(path_of(run.init_from)).model
    )
    if type(own) is not type(run.model):
        theirs = f"the weights there are of a {type(own).__name__}"
        fix = (
            f"{run.init_from} in the place of the recipe"
            if foreign
            else f"--run {shell_word(f'{run.init_from}/run.json')}"
        )
        raise WeightsError(
            f"a {type(run.model).__name__} that starts from {run.init_from}", theirs, fix
        )
    names = [field.name for field in dataclasses.fields(own) if field.name not in _FREE]
    pairs = {name: (getattr(own, name), getattr(run.model, name)) for name in names}
    return {
        name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair[1] is not None
    }


def describe_initial_weights(run: Run) -> str:
    """Returns one line about the weights that a run starts from."""
    changed = ", ".join(
        f"{name} {theirs} -> {ours}" for name, (theirs, ours) in changed_fields(run).items()
    )
    text = f"starts from the weights of {run.init_from} at step 0, without optimizer state"
    if changed:
        text += f"; the model is changed: {changed}"
    if run.init_from is not None and is_hugging_face(run.init_from):
        positions = read_model(run.init_from).max_seq
        if note := note_of_length(run.training.seq, positions, run.init_from):
            text += f"; {note}"
    return text


def without_adapters(device_run: DeviceRun) -> DeviceRun:
    """Returns the run without adapters or reference on the same devices.

    Its parameters have the type of those of the run;
    with a frozen base that is the compute dtype, or float32.
    """
    run = device_run.run
    dtype = "float32" if run.finetune.base == "float32" else run.training.compute_dtype
    dtype = dtype if run.finetune.method == "lora" else run.training.param_dtype
    training = dataclasses.replace(run.training, param_dtype=dtype)
    return place_on_devices(
        dataclasses.replace(run, finetune=FineTune(), training=training), device_run.mesh
    )


def merge_adapters(device_run: DeviceRun, params: Tree) -> tuple[DeviceRun, Tree]:
    """Returns the run without adapters or reference,
    and its parameters W + (alpha / r) A B, summed in float32."""
    base = without_adapters(device_run)
    together = functools.partial(
        merged, scale=device_run.run.finetune.scale, like=base.abstract.params
    )
    return base, jax.jit(together, out_shardings=base.abstract.shardings.params)(params)


def add_adapters(device_run: DeviceRun, load: Callable[[DeviceRun, Then], Tree]) -> Tree:
    """Returns the parameters of a run with adapters: its base, kept as the run asks,
    and adapters to begin with.

    load: `(run without adapters, then) -> weights`, which gives each weight to `then` before it
    loads the next, so that only one at a time is unquantised. The adapters are drawn from the run's
    seed.
    """
    base = without_adapters(device_run)
    unquantised = named_leaves(base.layout.params)
    params = dict(load(base, functools.partial(_keep_weight, device_run, unquantised)))

    descriptions = device_run.layout.params
    shardings = trained_only(descriptions, device_run.abstract.shardings.params)
    training = device_run.run.training
    adapters = init_params(
        trained_only(descriptions, descriptions),
        shardings,
        seed=training.seed,
        dtype=training.param_dtype,
    )
    for name, tree in params.items():
        if isinstance(tree, dict) and ADAPTERS in adapters[name]:
            params[name] = {**tree, ADAPTERS: adapters[name][ADAPTERS]}
    return params


def _keep_weight(
    device_run: DeviceRun, unquantised: dict[str, Param], path: str, w: jax.Array
) -> Any:
    """Returns a weight of the base as the run keeps it; one that is quantised is deleted."""
    description: Any = device_run.layout.params
    sharding: Any = device_run.abstract.shardings.params
    for name in path.split("."):
        description = description[name]
        sharding = sharding[name]
    base = device_run.run.finetune.base
    if is_param(description) or base not in ("int8", "nf4"):
        return w.astype(description.stored)
    convert = functools.partial(quantise, path, unquantised[path], base=base)
    quantised = jax.block_until_ready(jax.jit(convert, out_shardings=sharding)(w))
    w.delete()
    return quantised

"""Sources of weights: a run's folder, or a Hugging Face folder.

`open_weights` is the one place where a source is opened;
another kind of source is another branch of it.
"""

import dataclasses
from pathlib import Path

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.initial_weights import load_initial_weights, merge_adapters
from meshwright.config import MeshShape
from meshwright.data.chat import ChatTemplate, read_chat_template, read_end_tokens
from meshwright.data.tokenizers import Tokenizer, build_tokenizer
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import build_mesh, default_mesh_shape, first_devices
from meshwright.hugging_face.folder import read_model
from meshwright.hugging_face.hub import find_folder, is_hugging_face
from meshwright.path_kinds import KEPT, find_path_kind, looks_like_hub_name
from meshwright.runs.recipe import run_of_hugging_face
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.sharding.params import Tree
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import path_of


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """Model with its weights on the devices, and its tokenizer."""

    device_run: DeviceRun
    params: Tree
    """Parameters in the layout of training."""
    tokenizer: Tokenizer
    stops: tuple[int, ...]
    """Tokens that end a text."""
    origin: str
    """Where the weights are from, for reports: `runs/mine, step 500`."""
    chat: ChatTemplate | None = None
    positions: int | None = None
    """Positions that the configuration of the weights names, `max_position_embeddings`, or more of
    a run that trained them on longer sequences; None without such a configuration."""


def open_weights(
    source: str | Path,
    *,
    mesh: MeshShape | None = None,
    at: int | None = None,
    devices: int | None = None,
) -> OpenedModel:
    """Opens a run's folder and restores its last checkpoint, or that of step `at`, on a mesh;
    or loads `hf:PATH`.

    mesh: None takes the run's own, or the default one of the devices found.
    devices: use the first so many. Raises ConfigError for a recipe, which has no weights,
    CheckpointError where there is no run.
    """
    name = str(source)
    if is_hugging_face(name) and at is not None:
        raise ConfigError(
            f"{name} at step {at}",
            "a Hugging Face folder has one version of its weights",
            "no --at",
        )
    run = run_of_source(source)
    device_run = place_for_decoding(run, mesh, devices)
    trained = 0
    if is_hugging_face(name):
        tokenizer, origin = build_tokenizer(run.data.tokenizer, iter(())), name
        params = load_initial_weights(device_run)
        folder = kept = find_folder(run.init_from or name, weights=False)
    else:
        folder, kept = path_of(source), path_of(source) / KEPT
        tokenizer = build_tokenizer(str(folder / "tokenizer.json"), iter(()))
        with Checkpoints(folder / "checkpoints", max_to_keep=None) as checkpoints:
            params, manifest = checkpoints.restore_params(device_run, at)
        origin = f"{folder}, step {manifest.step}"
        trained = run.training.seq if manifest.step else 0
    if run.finetune.method == "lora" or run.finetune.objective == "preferences":
        # A decode step reads a weight and its adapter as one, and no reference.
        device_run, params = merge_adapters(device_run, params)
    stops = read_end_tokens(kept) or (tokenizer.end,)
    chat = read_chat_template(folder)
    positions = None
    if (kept / "config.json").is_file():
        named = read_model(f"hf:{kept}").max_seq
        positions = named if named is None else max(named, trained)
    return OpenedModel(device_run, params, tokenizer, stops, origin, chat, positions)


def run_of_source(source: str | Path) -> Run:
    """Returns the Run of what `open_weights` opens.
    Raises ConfigError for a recipe that has no weights."""
    if is_hugging_face(str(source)):
        return run_of_hugging_face(str(source))
    if path_of(source).is_dir():
        return run_in_folder(path_of(source))
    kind = find_path_kind(str(source))
    if kind is not None:
        raise ConfigError(f"weights of {source}", f"it is {kind.summary}", kind.weights)
    truth = "it is not a folder; a recipe names a model and has no weights before it is trained"
    fix = "the output folder of `meshwright train`, or hf:PATH of a Hugging Face model"
    if looks_like_hub_name(str(source)):
        fix = f"hf:{source}, if it is a model of the Hugging Face hub, or {fix}"
    raise ConfigError(f"weights of {source}", truth, fix)


def place_for_decoding(run: Run, mesh: MeshShape | None, devices: int | None) -> DeviceRun:
    """Places a run on devices to decode with.
    Raises ConfigError where the model does not fit the mesh."""
    available = first_devices(devices)
    run = run_for_decoding(run, mesh or run.mesh or default_mesh_shape(len(available)))
    assert run.mesh is not None
    return place_on_devices(run, build_mesh(run.mesh, available))


def run_for_decoding(run: Run, shape: MeshShape) -> Run:
    """Returns a run on a mesh with a batch and a sequence length that fit it;
    kernels of training are left out.

    The sizes of a training step do not matter here: prompts, slots and chunks have sizes
    of their own.
    """
    multiple = (2 if shape.context > 1 else 1) * shape.context * shape.tensor
    longest = run.model.spec().max_seq
    training = dataclasses.replace(
        run.training,
        batch=shape.over(BATCH_AXES),
        microbatches=1,
        seq=multiple if longest is None else max(multiple, longest // multiple * multiple),
        remat="full",
        saved_layers=0,
        stage_saves="input",
        context_strategy="all_gather",
        attention_kernel="blocked",
        tensor_strategy="gather",
        gather_ahead="none",
    )
    return dataclasses.replace(run, mesh=shape, training=training)

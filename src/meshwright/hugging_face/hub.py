"""Folders that `hf:` names: a path, or a model of the Hugging Face hub
in the cache of `huggingface_hub`."""

import functools
from pathlib import Path

from meshwright.errors import WeightsError
from meshwright.path_kinds import find_path_kind, looks_like_hub_name
from meshwright.storage.hub import MODEL, download_from_hub
from meshwright.storage.paths import path_of

PREFIX = "hf:"
_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model"]


def is_hugging_face(name: str) -> bool:
    """Whether `name` has the form `hf:PATH` or `hf:OWNER/MODEL`."""
    return name.startswith(PREFIX)


def find_folder(name: str, *, weights: bool) -> Path:
    """Returns the folder that `hf:NAME` names. A path that exists is taken first, then the hub.

    weights: whether the weights are needed, or only the configuration and the tokenizer. Raises
    WeightsError where there is neither a folder nor a model of that name, or `huggingface_hub` is
    missing.
    """
    text = name.removeprefix(PREFIX)
    folder = path_of(text)
    if folder.is_dir():
        return folder
    if folder.is_file():
        kind = find_path_kind(text)
        raise WeightsError(
            f"the model {PREFIX}{text}",
            "it is a file, and a model is a folder" if kind is None else f"it is {kind.summary}",
            "a folder with config.json and .safetensors" if kind is None else kind.weights,
        )
    if not looks_like_hub_name(text):
        raise WeightsError(
            f"the model {PREFIX}{text}",
            "there is no such folder",
            "a folder with config.json, or OWNER/MODEL of the hub",
        )
    patterns = [*_DESCRIPTION, "*.safetensors"] if weights else _DESCRIPTION
    refusal = functools.partial(WeightsError, f"the model {PREFIX}{text}")
    return download_from_hub(text, MODEL, patterns, refusal)

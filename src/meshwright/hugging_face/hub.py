"""Folders that `hf:` names: a path, or a model of the Hugging Face hub in the cache of `huggingface_hub`."""

import re
from pathlib import Path

from meshwright.documents import GGUF_KIND
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.storage.paths import path_of

PREFIX = "hf:"
_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model"]


def is_hugging_face(name: str) -> bool:
    """Whether `name` has the form `hf:PATH` or `hf:OWNER/MODEL`."""
    return name.startswith(PREFIX)


def find_folder(name: str, *, weights: bool) -> Path:
    """Returns the folder that `hf:NAME` names. A path that exists is taken first, then the hub.

    weights: whether the weights are needed, or only the configuration and the tokenizer.
    Raises WeightsError where there is neither a folder nor a model of that name, or `huggingface_hub` is missing.
    """
    text = name.removeprefix(PREFIX)
    folder = path_of(text)
    if folder.is_dir():
        return folder
    if folder.is_file():
        is_gguf = folder.suffix.lower() == ".gguf"
        kind = GGUF_KIND if is_gguf else "a file, and a model is a folder"
        raise WeightsError(
            f"the model {PREFIX}{text}",
            f"it is {kind}",
            "a folder with config.json and .safetensors",
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise WeightsError(
            f"the model {PREFIX}{text}",
            "there is no such folder",
            "a folder with config.json, or OWNER/MODEL of the hub",
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsError(
            f"the model {PREFIX}{text}",
            "there is no such folder, and `huggingface_hub`, which downloads models, is not installed",
            "pip install 'meshwright[hub]', or the path of a folder",
        ) from error
    patterns = [*_DESCRIPTION, "*.safetensors"] if weights else _DESCRIPTION
    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=patterns))
    except Exception as error:  # the library raises its own, and those of its HTTP client
        raise by_class(
            error,
            WeightsError(
                f"downloading {text} from the Hugging Face hub",
                reason_of(error),
                "a model that exists and that `hf auth login` may read, or the path of a folder",
            ),
        ) from error

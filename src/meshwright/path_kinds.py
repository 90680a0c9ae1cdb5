"""A path that was given where another kind of name is expected: what it is, and how to give it.

Recipes, runs, weights and plans are named in different ways, and users type a path for each of them.
Every error about such a path takes its words from here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.documents import GGUF_KIND
from meshwright.storage.paths import path_of

_MODEL_FILES = ("config.json", "adapter_config.json")
"""Files that make a folder one of Hugging Face."""
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class PathKind:
    """Kind of a path, and the names that stand for it where a Run or weights are expected."""

    summary: str
    """Noun phrase, as in `it is SUMMARY`."""
    run: str
    """What to write where a Run is expected: a recipe, or `--run`."""
    weights: str
    """What to write where a model with weights is expected."""


def find_path_kind(name: str) -> PathKind | None:
    """Returns what an existing path is; None where it does not exist, or is nothing that is known.

    It looks at names of files only, and opens none.
    """
    path = path_of(name)
    if not path.exists():
        return None
    folders = [path, *path.absolute().parents[:2]]
    for folder in folders:
        if (folder / "run.json").is_file():
            return _run_folder(folder, path)
    if _is_model_folder(path):
        return _model_folder(path, "a folder of Hugging Face")
    if _is_model_folder(path.parent) and path.suffix in (".json", ".safetensors"):
        return _model_folder(path.parent, "a file in a folder of Hugging Face")
    if path.suffix.lower() == ".gguf":
        fix = "hf:PATH of the model's folder with config.json and .safetensors files"
        return PathKind(GGUF_KIND, fix, fix)
    if (path / ".metadata").is_file():
        fix = f"meshwright convert {path} OUT, then its weights are OUT"
        return PathKind("a folder of torch.distributed.checkpoint", fix, fix)
    if path.suffix in _TORCH_SUFFIXES:
        fix = "hf:PATH of the model's folder with config.json and .safetensors files"
        return PathKind("a pickle of torch, which can run code when it is read", fix, fix)
    return None


def looks_like_hub_name(name: str) -> bool:
    """Whether a name has the form OWNER/MODEL of the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None


def _is_model_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MODEL_FILES)


def _run_folder(folder: Path, path: Path) -> PathKind:
    """Describes a run's output folder, or a path inside it."""
    summary = "the output folder of a run"
    if path != folder:
        summary = f"inside the output folder {folder} of a run"
    run = f"--run {folder / 'run.json'} for its Run, or --out {folder} --resume to continue it"
    return PathKind(summary, run, str(folder))


def _model_folder(folder: Path, summary: str) -> PathKind:
    """Describes a folder of Hugging Face, or a file in it."""
    return PathKind(summary, f"hf:{folder}", f"hf:{folder}")

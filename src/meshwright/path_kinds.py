"""A path that was given where another kind of name is expected: what it is, and how to give it.

Recipes, runs, weights and plans are named in different ways, and users type a path for each of
them. Every error about such a path takes its words from here.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from meshwright.documents import GGUF_KIND
from meshwright.errors import shell_word
from meshwright.storage.paths import path_of

_MODEL_FILES = ("config.json", "adapter_config.json")
"""Files that make a folder one of Hugging Face."""
KEPT = "huggingface"
"""Folder inside an output folder with the files that come back out: tokenizer, chat
template, configuration."""
_CHECKPOINTS = {
    ".metadata": "a folder of torch.distributed.checkpoint (torchtitan, Megatron)",
    "_METADATA": "a checkpoint of Orbax (MaxText)",
    "items/_METADATA": "a checkpoint of Orbax (MaxText)",
}
"""Files that make a folder a checkpoint of another program, and what it is then."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")
"""Ends of files that `torch.save` writes, in lower case."""
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
    folder = path if path.is_dir() else path.absolute().parent
    if _is_run_folder(folder):
        return _run_folder(folder, path)
    # What the path itself is comes before the run in whose folder it lies: it has other weights.
    found = _kind_of_folder(path) or _kind_of_file(path)
    if found is not None and not _is_kept(folder.absolute()):
        return found
    for ancestor in path.absolute().parents[:2]:
        if _is_run_folder(ancestor):
            return _run_folder(ancestor, path)
    return found


def find_checkpoint_kind(folder: Path) -> PathKind | None:
    """Returns which program's checkpoint a folder is, of those that `convert` reads;
    None for any other folder."""
    for file, summary in _CHECKPOINTS.items():
        if (folder / file).is_file():
            fix = f"hf:OUT, after meshwright convert {shell_word(folder)} OUT"
            return PathKind(summary, fix, fix)
    return None


def _kind_of_folder(path: Path) -> PathKind | None:
    """Returns what a folder is that is not the output folder of a run;
    None where nothing is known."""
    checkpoint = find_checkpoint_kind(path)
    if checkpoint is not None:
        # A config.json was copied into it for `convert`, and makes it no folder of Hugging Face.
        return checkpoint
    if _is_model_folder(path):
        return _model_folder(path, "a folder of Hugging Face")
    return None


def _kind_of_file(path: Path) -> PathKind | None:
    """Returns what a file is; None where nothing is known."""
    suffix = path.suffix.lower()
    if _is_model_folder(path.parent) and suffix in (".json", ".safetensors"):
        return _model_folder(path.parent, "a file in a folder of Hugging Face")
    fix = "hf:PATH of the model's folder with config.json and .safetensors files"
    if suffix == ".gguf":
        return PathKind(GGUF_KIND, fix, fix)
    # Other .bin files are tokens, such as a dataset of Megatron.
    if suffix in TORCH_SUFFIXES or (suffix == ".bin" and "model" in path.stem.lower()):
        return PathKind("a pickle of torch, which can run code when it is read", fix, fix)
    return None


def looks_like_hub_name(name: str) -> bool:
    """Whether a name has the form OWNER/MODEL of the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None


def _is_run_folder(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _is_kept(folder: Path) -> bool:
    """Whether a folder is the one in a run's folder that has its configuration, and no weights."""
    return folder.name == KEPT and _is_run_folder(folder.parent)


def _is_model_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MODEL_FILES)


def _run_folder(folder: Path, path: Path) -> PathKind:
    """Describes a run's output folder, or a path inside it."""
    summary = "the output folder of a run"
    if path != folder:
        summary = f"inside the output folder {folder} of a run"
    # Only `train` has --resume; the Run is named for every verb.
    run = (
        f"--run {shell_word(folder / 'run.json')}; to continue it: meshwright train --out "
        f"{shell_word(folder)} --resume"
    )
    return PathKind(summary, run, str(folder))


def _model_folder(folder: Path, summary: str) -> PathKind:
    """Describes a folder of Hugging Face, or a file in it."""
    return PathKind(summary, f"hf:{folder}", f"hf:{folder}")

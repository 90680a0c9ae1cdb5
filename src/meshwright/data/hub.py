"""Datasets of the Hugging Face hub: `hf://datasets/OWNER/NAME[@REVISION][/FOLDER or GLOB]`, through its own library."""

from pathlib import Path

from meshwright.data.opening import SUFFIXES
from meshwright.errors import DataError

_FORM = "hf://datasets/OWNER/NAME, or hf://datasets/OWNER/NAME@REVISION/FOLDER"


def download_dataset(path: str) -> list[Path]:
    """Returns the files of a dataset, in the hub's cache; downloads what is not there.

    Raises DataError where huggingface_hub is not installed, the name is none, or the hub does not give it.
    """
    kind, _, rest = path.removeprefix("hf://").partition("/")
    owner, _, rest = rest.partition("/")
    name, _, inside = rest.partition("/")
    name, _, revision = name.partition("@")
    if kind != "datasets" or not owner or not name:
        raise DataError(f"--data {path}", "it names no dataset of the hub", _FORM)
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise DataError(
            f"--data {path}", "huggingface_hub is not installed", "pip install 'meshwright[hub]'"
        ) from error
    wanted = [f"{inside}{end}" for end in ("", "/**")] if inside else [f"*{end}" for end in SUFFIXES]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                f"{owner}/{name}", repo_type="dataset", revision=revision or None, allow_patterns=wanted
            )
        )
    except (OSError, ValueError) as error:  # those of the hub's library are subclasses
        raise DataError(
            f"--data {path}", f"the hub does not give it: {str(error).strip().splitlines()[0]}",
            "the name as the hub writes it; HF_TOKEN for one that is not public; or a download beforehand",
        ) from error  # fmt: skip
    from meshwright.data.sources import find_files

    return find_files(str(folder / inside) if inside else str(folder))

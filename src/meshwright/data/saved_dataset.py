"""Folders that `save_to_disk` of Hugging Face `datasets` wrote, read without that library."""

from pathlib import Path
from typing import Any

from meshwright.documents import check_inside, read_json
from meshwright.errors import DataError


def saved_files(folder: Path) -> list[Path] | None:
    """Returns the Arrow files of a saved dataset in its order; None where `state.json` is not of one.

    Raises DataError where the folder has several splits, the description names a file outside it, or rows are selected
    by an index that is kept beside them.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder, "dataset_dict.json").get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        if not names or any(Path(name).name != name or name == ".." for name in names):
            truth = f"it names no splits that are folders in it: {', '.join(names) or 'none'}"
            raise DataError(f"reading {folder / 'dataset_dict.json'}", truth, "save the dataset again")
        if len(names) > 1:
            truth = f"it is a dataset with the splits {', '.join(names)}"
            raise DataError(f"--data {folder}", truth, f"--data {folder / names[0]}")
        try:
            check_inside(folder, [folder / names[0]])
        except ValueError as error:
            raise DataError(f"reading {folder}", f"{error}", "save the dataset again") from error
        return saved_files(folder / names[0])
    state = _read(folder, "state.json")
    if "_data_files" not in state:
        return None
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names:
            raise ValueError("it names no files")
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("it names a file outside the folder")
        if len(set(names)) < len(names) or any(not name.endswith(".arrow") for name in names):
            raise ValueError("it names a file twice, or one that is not .arrow")
        files = [folder / name for name in names]
        check_inside(folder, files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"reading {folder / 'state.json'}", f"{error}", "save the dataset again") from error
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"--data {folder}", "an index beside it selects its rows", "dataset.flatten_indices() and save")
    return files


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = read_json(folder / name)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise DataError(f"reading {folder / name}", f"{error}", "save the dataset again") from error
    return value

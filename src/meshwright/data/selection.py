"""Files of a folder that are its data: which are taken, which are left out, and why.

A folder of text, or a data set of the hub, has other files as well: a README, a licence, scripts,
other splits, the checkpoints of a notebook. One rule, for text and for conversations, selects them:

1. Hidden files and folders (`.git`, `.ipynb_checkpoints`) and `__pycache__` are left out.
2. So are files about the data, by name: README, LICENSE, CITATION, requirements.txt and their like.
3. Where there are files of data (lines of JSON, tables, `.txt`), scripts and pages (`.py`, `.md`,
   `.rst`) are left out.
   A folder that has nothing else is a folder of code or of pages, and they are its text.
4. Of several splits only that of training is taken: files of validation and test, by the words of
   `datasets`, are left
   out where there are others.
"""

import collections
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

_ABOUT = re.compile(
    r"(read_?me|licen[cs]e|copying|notice|citation|changelog|changes"
    r"|contributing|code_of_conduct|authors|security)([._-].*)?"
    r"|requirements.*\.txt|cmakelists\.txt|robots\.txt|dataset_infos?\.json|sha256sums(\.txt)?",
    re.IGNORECASE,
)
"""Names of files about the data."""
_OTHER_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])(validation|valid|val|dev|testing|test|evaluation|eval)(?=[-._ 0-9/]|$)"
)
_TRAINING = re.compile(r"(?:^|[-._ 0-9/])(train|training)(?=[-._ 0-9/]|$)")
"""Words that name a split in a path, as `datasets` finds them."""
_HIDDEN = re.compile(r"(?:^|/)(?:\.|__pycache__(?:/|$))")
"""A part of a path that begins with a dot, or the folder of compiled Python."""
_SHOWN = 6
"""Kinds of files that the line names."""


class Selection(NamedTuple):
    """Files of a folder that are taken, and one line about them and the others."""

    files: tuple[str, ...]
    """Paths relative to the folder, in their order."""
    note: str
    """`12 files taken (10 .jsonl, 2 .txt); left out: 1 about the data (README.md), 3 of the split
    test`."""


def select_data(
    names: Sequence[str], data: tuple[str, ...], prose: tuple[str, ...] = ()
) -> Selection:
    """Selects the data of a folder.

    names: files by their paths relative to it, in order.  data: ends of names of data files.
    prose: ends of files that are text only where there is no data file.
    """
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    taken: list[str] = []
    pages: list[str] = []
    for name in names:
        reason, lower = _reason(name), name.lower()
        if reason:
            reasons[reason].append(name)
        elif lower.endswith(data):
            taken.append(name)
        elif prose and lower.endswith(prose):
            pages.append(name)
        else:
            reasons["of other kinds"].append(name)
    if taken:
        reasons["scripts or pages beside the data"] += pages
        taken = _training_split(taken, reasons)
    else:
        taken = pages
    return Selection(tuple(taken), _note(taken, reasons))


def _reason(name: str) -> str:
    """Returns why a file is left out by its name alone; "" where it is not."""
    if _HIDDEN.search(name):
        return "hidden"
    if _ABOUT.fullmatch(name.rpartition("/")[2]):
        return "about the data"
    return ""


def _training_split(names: list[str], reasons: dict[str, list[str]]) -> list[str]:
    """Returns the files of the training split, and adds those of others to the reasons."""
    others = {name: _split_of(name) for name in names}
    if not any(split == "" for split in others.values()):
        return names
    for name, split in others.items():
        if split:
            reasons[f"of the split {split}"].append(name)
    return [name for name in names if not others[name]]


def _split_of(name: str) -> str:
    """Returns the word in a path that names a split other than training; "" without one.

    The file's own name comes first.
    """
    if not _OTHER_SPLIT.search(name.lower()):
        return ""
    for part in reversed(name.lower().split("/")):
        if _TRAINING.search(part):
            return ""
        found = _OTHER_SPLIT.search(part)
        if found:
            return found[1]
    return ""


def _note(taken: Sequence[str], reasons: dict[str, list[str]]) -> str:
    plural = "" if len(taken) == 1 else "s"
    kinds = f" ({_kinds(taken)})" if taken else ""
    text = f"{len(taken):,} file{plural} taken{kinds}"
    left = [
        f"{len(files):,} {reason} ({_kinds(files)})" for reason, files in reasons.items() if files
    ]
    return f"{text}; left out: {', '.join(left) if left else 'none'}"


def _kinds(names: Sequence[str]) -> str:
    """Returns the number of files of each kind, the most frequent first."""
    counts = collections.Counter(map(_kind, names))
    texts = [f"{count:,} {kind}" for kind, count in counts.most_common(_SHOWN)]
    if len(counts) > _SHOWN:
        texts.append(f"and {len(counts) - _SHOWN} more kinds")
    return ", ".join(texts)


def _kind(name: str) -> str:
    file = name.rpartition("/")[2]
    start, end = os.path.splitext(file)
    if end in (".gz", ".zst"):
        end = os.path.splitext(start)[1] + end
    return end or file


def relative_names(folder: str, files: Sequence[str]) -> list[str]:
    """Returns files by their paths relative to a folder that they are in."""
    start = os.path.join(folder, "")
    return [file.removeprefix(start) for file in files]

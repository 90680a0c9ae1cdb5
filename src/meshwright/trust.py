"""Names of code in files from elsewhere: which of them may be imported.

A Run names what a user added from outside the package by `module:attribute` or `FILE.py:attribute`. A name is the
user's own where it was typed on the command line, or comes from Python code that was: a recipe, a script. One that was
read from a run file, a plan or a checkpoint is imported if it is one of these too, or names an installed package. What
a process has imported, where a file is, and which process started this one make no name the user's own.
"""

import importlib.metadata
import json
import site
import sys
import sysconfig
import urllib.parse
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

TRUST = "--trust-code"
"""Option of every verb: files that are read may name any code, or with `=NAME` the code of that name."""
_typed: list[str] = []
"""The options `--trust-code` and `--trust-code=NAME` of this process."""
_chosen: set[str] = set()


def take_options(words: Iterable[str]) -> list[str]:
    """Trusts what the words of a command line name, and returns the words without those of `--trust-code`."""
    rest: list[str] = []
    for word in words:
        option, _, name = word.partition("=")
        trust_names([name if option == TRUST else word])
        (_typed if option == TRUST else rest).append(word)
    return rest


def trust_options() -> list[str]:
    """Returns the options by which a child process with the same command line trusts what the user said."""
    return list(_typed)


def trust_names(words: Iterable[str]) -> None:
    """Trusts the names that occur in the words of a command line: NAME, OPTION=NAME, NAME=WEIGHT or 2*NAME:SIZE."""
    for word in words:
        for part in (word, *word.split("=")):
            names = (part, part.rpartition(":")[0].rpartition("*")[2])
            _chosen.update(_canonical(name) for name in names if ":" in name)


def is_chosen(name: str) -> bool:
    """Whether the user gave the name, however its file was spelt."""
    return _canonical(name) in _chosen


def _canonical(name: str) -> str:
    """Returns a name with the path of its file resolved: links and `..` make no second name for the same code."""
    module, _, attribute = name.rpartition(":")
    return f"{Path(module).expanduser().resolve()}:{attribute}" if module.endswith(".py") else name


def check_name(kind: str, name: str, origin: str) -> None:
    """Raises ConfigError where the code called `name`, read from the file `origin`, may not be imported.

    kind: the word used in errors, such as "optimizer". Nothing is imported to find out.
    """
    if TRUST in _typed or is_chosen(name):
        return
    module = name.rpartition(":")[0]
    top = module.partition(".")[0]
    if module.endswith(".py"):
        raise _refused(kind, name, origin, f"it would run {Path(module).expanduser().resolve()}")
    if top in sys.stdlib_module_names or top == "__main__":
        raise _refused(kind, name, origin, f"it names Python's own module {top!r}")
    found = _files_of(module)
    if found is None:
        raise _refused(kind, name, origin, f"no installed package has the module {module!r}")
    for file in found:
        if not _is_installed(top, file):
            raise _refused(kind, name, origin, f"it would run {file}")


def check_value(kind: str, name: str, origin: str, value: Any) -> None:
    """Raises ConfigError where `name` led to an object of Python's own modules, such as `package.os:abort`, or to one
    of this module."""
    home = str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    foreign = home.partition(".")[0] in sys.stdlib_module_names and home != "__main__"
    if (foreign or home == __name__) and not (TRUST in _typed or is_chosen(name)):
        whose = "Python's own" if foreign else "the"
        raise _refused(kind, name, origin, f"it names an object of {whose} module {home!r}")


def _refused(kind: str, name: str, origin: str, truth: str) -> ConfigError:
    return ConfigError(
        f"{kind} {name!r} of {origin}",
        f"{truth}, and a file chooses no code: installed packages and names that you give are imported",
        f"{TRUST}={name} where you would run that code yourself ({TRUST}: whatever the files name); or the recipe that "
        "wrote it as the first argument, with the options it was given",
    )


def _files_of(module: str) -> list[Path] | None:
    """Returns the files that importing a module would run, its packages' included; None where it is not found."""
    files, path, name = [], None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = getattr(sys.modules.get(name), "__spec__", None)
        try:
            finders = sys.meta_path if path is None else [PathFinder]
            spec = spec or next(
                (found for f in finders if (found := f.find_spec(name, path))), None
            )
        except (
            AttributeError,
            ImportError,
            KeyError,
            ValueError,
        ):  # of a finder, or of a namespace in a namespace
            spec = None
        if spec is None:
            return None
        if spec.origin is not None:
            files.append(Path(spec.origin))
        path = list(spec.submodule_search_locations or ())
    return files if spec is not None and spec.origin is not None else None


def _is_installed(top: str, file: Path) -> bool:
    """Whether a package is where packages are installed, or where an editable installation places it."""
    installed = {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(sysconfig.get_path, ("purelib", "platlib")),
    }
    folders = [Path(folder) for folder in installed]
    folders += [folder.resolve() for folder in folders]
    if all(any(f.is_relative_to(folder) for folder in folders) for f in (file, file.resolve())):
        return True
    if top == __name__.partition(".")[0]:
        return True
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("direct_url.json")
        url = urllib.parse.urlparse(str(json.loads(record).get("url", ""))) if record else None
        place = urllib.parse.unquote(url.path) if url and url.scheme == "file" else None
        if place and file.resolve().is_relative_to(Path(place).resolve()):
            return True
    return False

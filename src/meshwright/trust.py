"""Names of code in files from elsewhere: which of them may be imported.

A Run names what a user added from outside the package by `module:attribute` or `FILE.py:attribute`. A name that came
from a recipe or the command line is the user's own. One that was read from a run file, a plan or a checkpoint is
imported only where that runs nothing that the user did not choose: from an installed package, from a module that is
imported already (the recipe on the command line and what it imports), or where the user passed `--trust-code`.
"""

import importlib.machinery
import importlib.metadata
import json
import site
import sys
import sysconfig
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

_chosen: set[str] = set()
_everything = False


def trust_everything() -> None:
    """Lets files name any code, as `--trust-code` does."""
    global _everything
    _everything = True


def trusts_everything() -> bool:
    """Whether `trust_everything` was called."""
    return _everything


def trust_option() -> list[str]:
    """Returns the option that lets a child process with the same command line trust what this one trusts."""
    return ["--trust-code"] if _everything else []


def trust_names(words: Iterable[str]) -> None:
    """Trusts the names that occur in the words of a command line: NAME, OPTION=NAME or NAME=WEIGHT."""
    for word in words:
        _chosen.update(part for part in (word, *word.split("=")) if ":" in part)


def check_name(kind: str, name: str, origin: str) -> None:
    """Raises ConfigError where the code called `name`, read from the file `origin`, may not be imported.

    kind: the word used in errors, such as "optimizer". Nothing is imported to find out.
    """
    if _everything or name in _chosen:
        return
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        if not _is_loaded(file):
            raise _refused(kind, name, origin, f"it would run {file}")
        return
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise _refused(kind, name, origin, f"it names Python's own module {top!r}")
    found = _file_of(top)
    if module not in sys.modules and found is not None and not _is_installed(top, found):
        raise _refused(kind, name, origin, f"it would run {found}")


def check_value(kind: str, name: str, origin: str, value: Any) -> None:
    """Raises ConfigError where `name` led to an object of Python's own modules, such as `package.os:abort`."""
    home = str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).partition(".")[0]
    if not (_everything or name in _chosen) and home in sys.stdlib_module_names and home != "__main__":
        raise _refused(kind, name, origin, f"it names an object of Python's own module {home!r}")


def _refused(kind: str, name: str, origin: str, truth: str) -> ConfigError:
    return ConfigError(
        f"{kind} {name!r} of {origin}",
        f"{truth}, and a file chooses no code: installed packages and the recipe on the command line are imported",
        "the same command with --trust-code, where you would run that code yourself; or the recipe that wrote it as "
        "the first argument, with the options it was given",
    )


def _is_loaded(file: Path) -> bool:
    """Whether a module of this process came from `file`."""
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(Path(path).resolve() == file for path in paths if path and Path(path).name == file.name)


def _file_of(top: str) -> Path | None:
    """Returns the file or the folder that importing the module `top` would read."""
    spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None:
        return None
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    return Path(place).resolve() if place else None


def _is_installed(top: str, file: Path) -> bool:
    """Whether a package lies where packages are installed, or where an editable installation places it."""
    folders = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    if any(file.is_relative_to(Path(folder).resolve()) for folder in folders) or top == __name__.partition(".")[0]:
        return True
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("direct_url.json")
        url = urllib.parse.urlparse(str(json.loads(record).get("url", ""))) if record else None
        if url and url.scheme == "file" and file.is_relative_to(Path(urllib.parse.unquote(url.path)).resolve()):
            return True
    return False

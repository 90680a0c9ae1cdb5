"""Names of code, by who gave them: the user, or a file.
Only a name that the user gave is resolved to code.

A Run names what a user added from outside the package by `module:attribute` or `FILE.py:attribute`.
The type of a name states whose it is:

- `OwnName`: given by the user, on the command line, in Python code that calls the package, or by
  the user's own recipe. `own` makes it, and is called at these boundaries only (a test lists them).
- `ForeignName`: read from a file, with the file's name.
  `foreign` makes it, where a run or a plan is read.
- A plain `str` is what everything else yields: a slice, a join, a formatted text. It is treated as
  a foreign name is, so a transformation that forgets the type can only lose trust. One that has to
  keep it uses `derive`.

`accept` exchanges a name for an `OwnName`, and `plugins` imports nothing else. A foreign name is
exchanged where the user gave the same code by name, or for the public attribute of an installed
package.
"""

import ast
import copy
import dataclasses
import importlib.metadata
import itertools
import json
import re
import site
import sys
import sysconfig
import types
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Self, cast

from meshwright.errors import ConfigError

TRUST = "--trust-code"
"""Option of every verb: files that are read may name any code,
or with `=NAME` the code of that name."""


class _Name(str):
    """Text that may name code, in a class that states whose it is."""

    __slots__ = ()

    def derived(self, text: str) -> Self:
        """Returns `text`, which was made of this name, in this name's class."""
        return type(self)(text)


class OwnName(_Name):
    """Name that the user gave."""

    __slots__ = ()


class ForeignName(_Name):
    """Name that was read from a file.

    origin: the file.
    """

    __slots__ = ("origin",)
    origin: str

    def __new__(cls, text: str, origin: str = "a file") -> Self:
        name = super().__new__(cls, text)
        name.origin = origin
        return name

    def derived(self, text: str) -> Self:
        """Returns `text`, which was made of this name, as read from the same file."""
        return type(self)(text, self.origin)


class _User:
    """Names and options that the user gave to this process."""

    def __init__(self) -> None:
        self.options: list[str] = []
        """The options `--trust-code` and `--trust-code=NAME`."""
        self.names: dict[str, OwnName] = {}
        """Names that the user gave, by `_canonical`."""

    def give(self, name: OwnName) -> None:
        """Keeps the references in a name that the user gave."""
        for reference in references_in(name):
            self.names[_canonical(reference)] = OwnName(reference)

    def given(self, name: str) -> OwnName | None:
        """Returns the user's own name of the same code, however its file was spelt."""
        return self.names.get(_canonical(name))


_user = _User()


def own[T](value: T) -> T:
    """Returns a value that the user gave,
    with every plain text in it that may name code as an `OwnName`.

    value: a text, a dataclass, or a list, tuple or mapping of them.
    Foreign names in it stay foreign.
    """
    return cast(T, _mapped(value, _owned))


def _owned(text: str) -> str:
    if isinstance(text, ForeignName) or not (":" in text or text.endswith(".py")):
        return text
    name = text if isinstance(text, OwnName) else OwnName(text)
    _user.give(name)
    return name


def foreign[T](value: T, origin: str) -> T:
    """Returns a value that was read from the file `origin`,
    with every text in it as a `ForeignName`."""
    return cast(T, _mapped(value, lambda text: ForeignName(text, origin)))


def derive(source: str, text: str) -> str:
    """Returns `text`, which was made of `source`, as a name of the same class."""
    return source.derived(text) if isinstance(source, _Name) else text


def plain_text(value: Any) -> str:
    """Returns a name as plain text, for encoders of exact types.
    Raises NotImplementedError for other values."""
    if not isinstance(value, str):
        raise NotImplementedError(type(value).__name__)
    return str(value)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value with every text in it changed;
    what has none that changes stays the same object."""
    if isinstance(value, str):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changed = {}
    for field in dataclasses.fields(value):
        before = getattr(value, field.name)
        after = _mapped(before, change)
        if after is not before:
            changed[field.name] = after
    if not changed:
        return value
    # The checks of the dataclass have been made, and its cached properties stay.
    value = copy.copy(value)
    for name, after in changed.items():
        object.__setattr__(value, name, after)
    return value


def is_reference(name: str) -> bool:
    """Whether `name` has the form `module:attribute` or `FILE.py:attribute`."""
    module, _, attribute = name.rpartition(":")
    parts = attribute.split(".")
    if not module.endswith(".py"):
        parts += module.split(".")
    return all(part.isidentifier() for part in parts)


def references_in(text: str) -> Iterator[str]:
    """Yields the names of code in NAME, NAME=WEIGHT,
    and a list of targets such as 2*NAME:SIZE,NAME:SIZE."""
    for part in (text, *text.split(",")):
        part = part.strip()
        weighted = part.rpartition("=")[0]
        sized = part.rpartition(":")[0]
        slices, _, chip = sized.partition("*")
        for name in (part, weighted, sized, chip if slices.isdecimal() else ""):
            if is_reference(name):
                yield name


def own_references(value: Any) -> list[str]:
    """Returns the names of code in a value that the user gave in it,
    or gave elsewhere and it repeats."""
    found: set[str] = set()

    def look(text: str) -> str:
        for reference in references_in(text):
            if isinstance(text, OwnName) or _user.given(reference) is not None:
                found.add(reference)
        return text

    _mapped(value, look)
    return sorted(found)


def take_options(words: Iterable[str]) -> list[str]:
    """Takes the options `--trust-code` and `--trust-code=NAME`,
    and returns the other words of a command line."""
    rest: list[str] = []
    for word in words:
        option, _, name = word.partition("=")
        if option != TRUST:
            rest.append(word)
            continue
        _user.options.append(word)
        own(name)
    return rest


def trust_options() -> list[str]:
    """Returns the options by which a child process with the same command line trusts what the
    user trusts."""
    return list(_user.options)


def options_of_child(*values: Any) -> list[str]:
    """Returns the options with which a child process that reads `values`
    from a file trusts the user's own names."""
    return [*trust_options(), *(f"{TRUST}={name}" for name in own_references(list(values)))]


def _canonical(name: str) -> str:
    """Returns a name with the path of its file resolved: links and `..` make no second name
    for the same code."""
    module, _, attribute = name.rpartition(":")
    if not module.endswith(".py"):
        return str(name)
    return f"{Path(module).expanduser().resolve()}:{attribute}"


def accept(kind: str, name: str) -> OwnName:
    """Returns the user's own name for what `name` names.
    Raises ConfigError where only a file named it.

    kind: the word used in errors, such as "optimizer". Nothing is imported to find out.
    """
    if isinstance(name, OwnName):
        return name
    given = _user.given(name)
    if given is not None:
        return given
    if TRUST not in _user.options:
        _check_installed(kind, name)
    return OwnName(name)


def is_given(name: str) -> bool:
    """Whether the user gave a name, or trusts every name."""
    return isinstance(name, OwnName) or _user.given(name) is not None or TRUST in _user.options


def _check_installed(kind: str, name: str) -> None:
    """Raises ConfigError unless `name` is that of a public attribute of an installed package."""
    module, _, attribute = name.rpartition(":")
    top = module.partition(".")[0]
    if module.endswith(".py"):
        raise _refused(kind, name, f"it would run {Path(module).expanduser().resolve()}")
    if not is_reference(name):
        raise _refused(kind, name, "it is not module:attribute")
    if top in sys.stdlib_module_names or top == "__main__":
        raise _refused(kind, name, f"it names Python's own module {top!r}")
    private = [part for part in attribute.split(".") if part.startswith("_")]
    if private:
        raise _refused(kind, name, f"{private[0]!r} is private to its module")
    if module in _OURS:
        raise _refused(kind, name, f"it names an object of the module {module!r}")
    found = _files_of(module)
    if found is None:
        raise _refused(kind, name, f"no installed package has the module {module!r}")
    for file in found:
        if not _is_installed(top, file):
            raise _refused(kind, name, f"it would run {file}")


_OURS = (__name__, __name__.replace("trust", "plugins"))
"""Modules that decide what is imported, and import it."""
_METHODS = (types.BuiltinFunctionType, types.MethodWrapperType)
"""Types of the methods of built-in objects, which have no module."""


def check_value(kind: str, name: str, holder: Any, value: Any) -> None:
    """Raises ConfigError where a name that the user did not give led to something other
    than a package's own object.

    holder: what has `value` as its attribute. Only classes are walked through: neither modules nor
    instances, whose methods change them. Objects of Python's own modules and of this one are
    refused, as are methods of built-in types, which have no module.
    """
    if is_given(name):
        return
    if not isinstance(holder, types.ModuleType | type):
        raise _refused(kind, name, f"it names a part of an object of type {type(holder).__name__}")
    if isinstance(value, types.ModuleType):
        raise _refused(kind, name, f"it names the module {value.__name__!r}")
    bound_to = getattr(value, "__self__", None)
    if isinstance(value, _METHODS) and not isinstance(bound_to, types.ModuleType | None):
        owner = type(bound_to).__name__
        raise _refused(kind, name, f"it names a method of an object of type {owner}")
    home = str(getattr(value, "__module__", None) or type(value).__module__)
    if home.partition(".")[0] in sys.stdlib_module_names and home != "__main__":
        raise _refused(kind, name, f"it names an object of Python's own module {home!r}")
    if home in _OURS:
        raise _refused(kind, name, f"it names an object of the module {home!r}")


def _refused(kind: str, name: str, truth: str) -> ConfigError:
    origin = name.origin if isinstance(name, ForeignName) else "a text that no user gave"
    return ConfigError(
        f"{kind} {str(name)!r} of {origin}",
        f"{truth}, and a file chooses no code: installed packages and names that you give are "
        "imported",
        f"{TRUST}={name} where you would run that code yourself ({TRUST}: whatever the files "
        "name); or the recipe that wrote it as the first argument, with the options it was given",
    )


def _files_of(module: str) -> list[Path] | None:
    """Returns the files that importing a module would run, its packages' included;
    None where it is not found."""
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
    """Whether a file of the top-level module `top` stands where an installation placed that module.

    Everything in a folder of installed packages counts: whoever writes there runs code at every
    start of Python (by `.pth` files). Of an editable installation the packages count that it maps,
    and nothing else of their checkout.
    """
    if top == __name__.partition(".")[0]:
        return True
    folders = _site_folders()
    roots = itertools.chain(folders, _links_of(top, folders), _editable_roots(top, folders))
    return any(_is_in(file, root) and _is_in(file.resolve(), root.resolve()) for root in roots)


def _is_in(file: Path, root: Path) -> bool:
    """Whether a file is `root`, or below it."""
    return file.is_relative_to(root) or file.is_relative_to(root.resolve())


def _site_folders() -> list[Path]:
    """Returns the folders in which this Python has installed packages."""
    installed = {
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(sysconfig.get_path, ("purelib", "platlib")),
    }
    return [Path(folder) for folder in sorted(installed)]


def _links_of(top: str, folders: list[Path]) -> list[Path]:
    """Returns the links by which a package was installed (`flit install --symlink`)."""
    names = [folder / name for folder in folders for name in (top, f"{top}.py")]
    return [name for name in names if name.is_symlink()]


def _editable_roots(top: str, folders: list[Path]) -> Iterator[Path]:
    """Yields the packages and modules called `top` that editable installations map.

    folders: those of installed packages. What calls itself a distribution elsewhere on the path,
    such as a `.dist-info` in the working directory, is not asked.
    """
    for distribution in importlib.metadata.distributions(path=[str(f) for f in folders]):
        checkout = _checkout_of(distribution)
        if checkout is None:
            continue
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if path.suffix == ".pth":
                yield from _mapped_by_path(top, path, checkout, distribution)
            elif path.match("__editable__*_finder.py"):
                yield from _mapped_by_finder(top, path)


def _checkout_of(distribution: importlib.metadata.Distribution) -> Path | None:
    """Returns the checkout of an editable installation; None for another."""
    record = distribution.read_text("direct_url.json")
    if record is None:
        return None
    origin = json.loads(record)
    url = urllib.parse.urlparse(str(origin.get("url", "")))
    if url.scheme != "file" or not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(urllib.parse.unquote(url.path)).resolve()


def _mapped_by_path(
    top: str, file: Path, checkout: Path, distribution: importlib.metadata.Distribution
) -> Iterator[Path]:
    """Yields what is called `top` in the folders that a `.pth` file
    of an editable installation adds to the path.

    The folder may be the checkout itself, with its tests, examples and whatever lies in it: then
    only the top-level names that the distribution states count, or else its own name.
    """
    stated = _top_level_names(distribution)
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith(("#", "import ", "import\t")):
            continue
        folder = file.parent / line.strip()
        names = stated
        if not names and folder.resolve() == checkout:
            names = {re.sub(r"[-.]+", "_", distribution.name)}
        if not names or top in names:
            yield from (folder / top, folder / f"{top}.py")


def _top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """Returns the top-level modules that a distribution states (`Import-Name`, `top_level.txt`)."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    for field in ("Import-Name", "Import-Namespace"):
        for value in distribution.metadata.get_all(field) or ():
            names.add(value.partition(";")[0].strip().partition(".")[0])
    return names - {""}


def _mapped_by_finder(top: str, file: Path) -> Iterator[Path]:
    """Yields where the finder that setuptools writes for an editable installation looks
    for `top`; it is not run."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.AnnAssign) or statement.value is None:
            continue
        if ast.unparse(statement.target) not in ("MAPPING", "NAMESPACES"):
            continue
        for name, places in ast.literal_eval(statement.value).items():
            if name.partition(".")[0] != top:
                continue
            for place in [places] if isinstance(places, str) else places:
                yield from (Path(place), Path(f"{place}.py"))

"""Names of objects: the module or file, and the attribute, by which another process finds an object again."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import ConfigError


def find_name(value: Any, file_module: str) -> str:
    """Returns `module:attribute` or `FILE.py:attribute` of an object. Raises ConfigError for one without a name.

    file_module: prefix of the modules that were made from files given by path.
    """
    attribute = getattr(value, "__qualname__", None)
    module = sys.modules.get(getattr(value, "__module__", ""))
    if attribute is None or module is None or _attribute(module, attribute) is not value:
        module, attribute = _holder(value)
    if module.__name__ != "__main__" and not module.__name__.startswith(file_module):
        return f"{module.__name__}:{attribute}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise _nameless(value, "it is defined in an interactive session")
    return f"{Path(file).resolve()}:{attribute}"


def _attribute(module: ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _holder(value: Any) -> tuple[ModuleType, str]:
    """Returns the module and attribute of an object that does not know its own name, such as an instance.

    The script comes last: what it imports is found in the module that another process would import.
    """
    for module in sorted(sys.modules.values(), key=lambda module: module is sys.modules["__main__"]):
        for attribute, candidate in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if candidate is value and not attribute.startswith("_"):
                return module, attribute
    raise _nameless(value, "it is not an attribute of any module")


def _nameless(value: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{value!r} in a Run",
        f"{reason}, so run.json could not name it and no other process could import it",
        "define it at the top level of a .py file",
    )

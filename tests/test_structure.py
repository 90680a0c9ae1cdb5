"""Budgets and vocabulary of the source tree, read from its syntax: nothing of the package is imported here.

`python tests/test_structure.py` prints all violations.
"""

import ast
import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "meshwright"

FUNCTION_LINES = 60
ARGUMENTS = 8

TOP_LEVEL = {
    "__init__", "__main__", "activity", "aliases", "config", "documents", "errors", "faults", "fine_tuning",
    "formatting", "heartbeat", "plugins", "trust", "words",
}  # fmt: skip
"""Modules that live in no room."""

FRAGMENT = re.compile(r"(What|Of|That|Beside|After\.|The same|It\b|Those|Such)\b")
"""Beginnings of docstrings that need the line before them."""

# `held-out` is the field's word for text that is evaluated and never trained on.
PRIVATE_WORDS = re.compile(r"\b(told|Told|Sight|held(?!-out)|says|wires|spell_[a-z]+|somebody|nobody)\b")

FIELD_WORDS: dict[str, tuple[str, str]] = {
    "activation checkpointing": ("models/remat.py", "notation.md"),
    "bubble": ("sharding/schedules.py", "parallelism.md"),
    "DCN": ("hardware/interconnect.py", "parallelism.md"),
    "FSDP": ("sharding/layouts.py", "notation.md"),
    "GQA": ("models/families/llama.py", "notation.md"),
    "HSDP": ("sharding/layouts.py", "notation.md"),
    "ICI": ("hardware/interconnect.py", "plan.md"),
    "load balancing": ("models/blocks/experts.py", "parallelism.md"),
    "log-sum-exp": ("models/loss.py", "notation.md"),
    "MFU": ("models/flops.py", "notation.md"),
    "NVLink": ("hardware/interconnect.py", "plan.md"),
    "overlap": ("analysis/simulate.py", "census.md"),
    "rematerialisation": ("models/remat.py", "notation.md"),
    "sequence parallel": ("comm/collectives.py", "notation.md"),
    "SwiGLU": ("models/families/llama.py", "notation.md"),
    "virtual stages": ("sharding/schedules.py", "parallelism.md"),
    "ZeRO-1": ("sharding/layouts.py", "notation.md"),
    "ZeRO-3": ("sharding/layouts.py", "notation.md"),
}
"""Term of the field -> file of the package and page of the docs in which a search must find it."""


@functools.cache
def sources() -> dict[str, tuple[Path, str, ast.Module]]:
    """Module name -> path, text and syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[".".join(path.relative_to(SRC).with_suffix("").parts)] = (path, text, ast.parse(text))
    return found


def imports_of(module: str, nested: bool = True) -> set[str]:
    """Modules of the package that `module` imports, types alone excepted.

    nested: whether imports inside functions count. Importing a module runs the `__init__` of its packages, which
    therefore count as well.
    """
    names: set[str] = set()
    pending: deque[ast.AST] = deque([sources()[module][2]])
    while pending:
        node = pending.popleft()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if not nested and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        pending.extend(ast.iter_child_nodes(node))
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "meshwright":
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                found |= {candidate for candidate in (part, f"{part}.__init__") if candidate in sources()}
    return found


def closure(start: str, nested: bool = True) -> dict[str, tuple[str, ...]]:
    """Every module that importing `start` imports -> the shortest chain of imports to it.

    nested: an upper bound, in which imports inside functions count, whether or not a run calls them.
    """
    chains = {start: (start,)}
    pending = deque([start])
    while pending:
        module = pending.popleft()
        for name in sorted(imports_of(module, nested) - chains.keys()):
            chains[name] = (*chains[module], name)
            pending.append(name)
    return chains


def room_of(module: str) -> str:
    """First part of a module's name inside the package."""
    return module.split(".")[1] if "." in module else module


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}:"


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, _, tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def long_functions() -> list[str]:
    """From `def` to the last line, the docstring included."""
    found = []
    for path, node in functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            found.append(f"{place(path, node.lineno)} {node.name}: {lines} lines, at most {FUNCTION_LINES}")
    return found


def wide_functions() -> list[str]:
    """Positional and keyword arguments, `self` and `cls` not counted."""
    found = []
    for path, node in functions():
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        number = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
        if number > ARGUMENTS:
            found.append(f"{place(path, node.lineno)} {node.name}: {number} arguments, at most {ARGUMENTS}")
    return found


def stray_modules() -> list[str]:
    return [
        f"{place(path, 1)} a module outside the rooms"
        for path, _, _ in sources().values()
        if path.parent == PACKAGE and path.stem not in TOP_LEVEL
    ]


def foreign_letters() -> list[str]:
    """Suffixes of upper-case letters that are no dimension of words.py, as in `x_BTD`."""
    _, _, words = sources()["meshwright.words"]
    table = next(
        node.value
        for node in words.body
        if isinstance(node, ast.AnnAssign | ast.Assign)
        and "DIMENSIONS" in ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
    )
    letters = set(ast.literal_eval(table))  # type: ignore[arg-type]
    found = set()
    for path, _, tree in sources().values():
        for node in ast.walk(tree):
            for field in ("id", "arg", "attr", "name", "asname"):
                name = getattr(node, field, None)
                match = isinstance(name, str) and re.fullmatch(r"_?[a-z][a-z0-9_]*_([A-Z]+)", name)
                if match and not set(match[1]) <= letters:
                    line = getattr(node, "lineno", 1)
                    found.add(f"{place(path, line)} {name}: not a dimension letter: {set(match[1]) - letters}")
    return sorted(found)


def _documented(tree: ast.Module) -> Iterator[tuple[str, ast.AST, bool]]:
    """Name, node and publicity of every module, class, function and method; functions inside functions are private."""

    def walk(node: ast.AST, prefix: str, public: bool) -> Iterator[tuple[str, ast.AST, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                shown = public and not child.name.startswith("_")
                yield name, child, shown and not _overload(child)
                yield from walk(child, f"{name}.", shown and isinstance(child, ast.ClassDef))
            else:
                yield from walk(child, prefix, public)

    yield "module", tree, True
    yield from walk(tree, "", True)


def _overload(node: ast.AST) -> bool:
    """Whether a definition repeats one that is documented: an overload or the setter of a property."""
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(d.endswith(("overload", ".setter")) for d in decorators)


def docstrings() -> list[str]:
    found = []
    for path, _, tree in sources().values():
        for name, node, public in _documented(tree):
            text = ast.get_docstring(node)  # type: ignore[arg-type]
            first = (text or "").split("\n")[0]
            if public and not first.strip():
                found.append(f"{place(path, getattr(node, 'lineno', 1))} {name}: no docstring")
            if FRAGMENT.match(first):
                found.append(f"{place(path, getattr(node, 'lineno', 1))} {name}: does not stand alone: {first[:80]}")
    return found


def private_words() -> list[str]:
    return [
        f"{place(path, number)} {match[0]}: {line.strip()[:80]}"
        for path, text, _ in sources().values()
        for number, line in enumerate(text.splitlines(), 1)
        for match in PRIVATE_WORDS.finditer(line)
    ]


def missing_field_words() -> list[str]:
    """As a person searches: upper and lower case alike, a hyphen or a line's end in place of a space."""
    found = []
    for word, (module, page) in FIELD_WORDS.items():
        pattern = re.compile(r"[\s#-]+".join(map(re.escape, word.split())), re.I)
        for path in (PACKAGE / module, ROOT / "docs" / page):
            if not path.is_file() or not pattern.search(path.read_text(encoding="utf-8")):
                found.append(f"{place(path, 1)} does not mention {word!r}")
    return found


def train_closure() -> list[str]:
    return _forbidden("meshwright.trainer.loop", {"planner", "analysis", "views", "cli", "api", "bench"})


def _forbidden(start: str, rooms: set[str]) -> list[str]:
    """Chains of imports from `start` into `rooms`."""
    path = sources()[start][0]
    return [
        f"{place(path, 1)} reaches {room_of(module)}: {' -> '.join(chain)}"
        for module, chain in closure(start).items()
        if room_of(module) in rooms and room_of(chain[-2]) not in rooms
    ]


def census_closure() -> list[str]:
    """A census reads any jitted function: it knows no model and no trainer."""
    return _forbidden(
        "meshwright.analysis.census", {"step", "models", "sharding", "data", "trainer", "checkpoint", "runs", "views"}
    )


def hlo_imports() -> list[str]:
    """The reader of compiled programs could be a package of its own."""
    allowed = {"meshwright.__init__", "meshwright.errors", "meshwright.formatting"}
    return [
        f"{place(path, 1)} imports {name}"
        for module, (path, _, _) in sources().items()
        if room_of(module) == "hlo"
        for name in sorted(imports_of(module))
        if room_of(name) != "hlo" and name not in allowed
    ]


RULES: dict[str, Callable[[], list[str]]] = {
    "closure of train": train_closure,
    "closure of the census": census_closure,
    "imports of hlo": hlo_imports,
    "lines of a function": long_functions,
    "arguments of a function": wide_functions,
    "modules outside the rooms": stray_modules,
    "dimension letters": foreign_letters,
    "docstrings": docstrings,
    "private words": private_words,
    "words of the field": missing_field_words,
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_broken(rule: str) -> None:
    assert RULES[rule]() == []


if __name__ == "__main__":
    for rule, violations in RULES.items():
        found = violations()
        print(f"## {rule}: {len(found)}", *found, "", sep="\n")

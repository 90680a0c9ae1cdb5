"""Rules of the source tree: which way imports point, and which words are used. All are read from its syntax.

`python tests/test_structure.py` prints all violations. Nothing here counts: how much a reader meets is printed by `make
reading`, and is not a limit.
"""

import ast
import functools
import itertools
import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.update_rules import UPDATE_RULES

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "meshwright"
CENSUS = SRC / "xlacensus"

IMPORTED_BY_NAME = {
    "meshwright.__init__",
    "meshwright.cli.main",
    "meshwright.plugins",
}
"""Modules that may import others by a string: the tables of public names, of verbs and of the parts of a run."""

FRAGMENT = re.compile(r"(What|Of|That|Beside|After\.|The same|It\b|Those|Such)\b")
"""Beginnings of docstrings that need the line before them."""

# `held-out` is the field's word for text that is evaluated and never trained on.
PRIVATE_WORDS = re.compile(
    r"\b(told|Told|Sight|held(?!-out)|says|wires|spell_[a-z]+|somebody|nobody)\b"
)

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
    "overlap": ("models/gather_ahead.py", "census.md"),
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
    for path in sorted([*PACKAGE.rglob("*.py"), *CENSUS.rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        found[".".join(path.relative_to(SRC).with_suffix("").parts)] = (path, text, ast.parse(text))
    return found


def _run_time_nodes(module: str) -> Iterator[tuple[ast.AST, bool]]:
    """Nodes of a module without what only type checkers read, and whether each is inside a function."""
    pending: deque[tuple[ast.AST, bool]] = deque([(sources()[module][2], False)])
    while pending:
        node, nested = pending.popleft()
        yield node, nested
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            pending.extend((child, nested) for child in node.orelse)
            continue
        nested = nested or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        pending.extend((child, nested) for child in ast.iter_child_nodes(node))


def _module(name: str) -> str | None:
    """Module of the package called `name`, or the one in which the object `name` is."""
    owner = name.rpartition(".")[0]
    candidates = (name, f"{name}.__init__", owner, f"{owner}.__init__")
    return next((candidate for candidate in candidates if candidate in sources()), None)


def _imported(node: ast.AST) -> set[str]:
    """Modules of the two packages that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f"line {node.lineno}: a relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return {
        found
        for name in names
        if name.split(".")[0] in ("meshwright", "xlacensus") and (found := _module(name))
    }


def _named_by_string(node: ast.AST) -> set[str]:
    """Modules that a string names: `"meshwright.a.b"`, `"meshwright.a.b:name"`, or all of `f"meshwright.a.{b}"`.

    A string after "-m" starts another process, which imports nothing here.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = re.fullmatch(r"(meshwright(?:\.\w+)+)(?::\w+)?", node.value)
        return {name[1]} & sources().keys() if name else set()
    if (
        isinstance(node, ast.JoinedStr)
        and isinstance(node.values[0], ast.Constant)
        and len(node.values) > 1
    ):
        prefix = str(node.values[0].value)
        if re.fullmatch(r"meshwright\.([a-z_]+\.)*", prefix):
            return {
                name
                for name in sources()
                if name.startswith(prefix) and name.removeprefix(prefix).isidentifier()
            } - {f"{prefix}__init__"}
    return set()


def _strings(module: str) -> Iterator[tuple[int, set[str]]]:
    """Line and modules of every import by a string."""
    processes = {
        id(after)
        for node, _ in _run_time_nodes(module)
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
        for before, after in itertools.pairwise(
            node.args if isinstance(node, ast.Call) else node.elts
        )
        if isinstance(before, ast.Constant) and before.value == "-m"
    }
    for node, _ in _run_time_nodes(module):
        if id(node) not in processes and (found := _named_by_string(node)):
            yield getattr(node, "lineno", 1), found


@functools.cache
def imports() -> dict[str, set[str]]:
    """Import graph of the package: module -> modules that it imports, also inside functions and by a string."""
    graph = {}
    for module in sources():
        found: set[str] = set().union(*(_imported(node) for node, _ in _run_time_nodes(module)))
        if module not in IMPORTED_BY_NAME:
            found = found.union(*(names for _, names in _strings(module)))
        graph[module] = found - {module}
    return graph


def _reached(start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = imports()[pending.pop()] - seen
        seen |= new
        pending.extend(new)
    return seen


def circular_imports() -> list[str]:
    """Modules that import themselves by way of others."""
    reached = {module: _reached(module) for module in sources()}
    circles = {
        module: sorted(n for n in reached[module] if module in reached[n]) for module in sources()
    }
    return [
        f"{place(sources()[module][0], 1)} in a circle of {len(names)}: {', '.join(names[:6])}"
        for module, names in circles.items()
        if names
    ]


def imports_upward() -> list[str]:
    """Imports from a lower to a higher layer of pyproject.toml, also those that import-linter does not see."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    layers = next(
        contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"
    )
    height = {room: -n for n, layer in enumerate(layers) for room in re.split(r"\s*[|:]\s*", layer)}
    upward = {
        (module, room_of(name))
        for module, names in imports().items()
        for name in names
        if height.get(room_of(module), 1) < height.get(room_of(name), -len(layers))
    }
    return [f"{place(sources()[module][0], 1)} imports {room}" for module, room in sorted(upward)]


def imports_by_string() -> list[str]:
    """Modules that import others by a string, with the lines in which they name them."""
    return [
        f"{place(path, lines[0])} lines {', '.join(map(str, lines))}"
        for module, (path, _, _) in sources().items()
        if module not in IMPORTED_BY_NAME and (lines := [line for line, _ in _strings(module)])
    ]


def unformatted() -> list[str]:
    return [
        f"{place(path, number)} {line.strip()[:80]}"
        for path, text, _ in sources().values()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"# fmt: skip", line)
    ]


def room_of(module: str) -> str:
    """First part of a module's name inside the package; of xlacensus, the name of that package."""
    parts = module.split(".")
    return parts[1] if parts[0] == "meshwright" and parts[1:] else parts[0]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}:"


def foreign_letters() -> list[str]:
    """Suffixes of upper-case letters that are no dimension of words.py, as in `x_BTD`."""
    _, _, words = sources()["meshwright.words"]
    table = next(
        node.value
        for node in words.body
        if isinstance(node, ast.AnnAssign | ast.Assign)
        and "DIMENSIONS"
        in ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
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
                    found.add(
                        f"{place(path, line)} {name}: not a dimension letter: {set(match[1]) - letters}"
                    )
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
                found.append(
                    f"{place(path, getattr(node, 'lineno', 1))} {name}: does not stand alone: {first[:80]}"
                )
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


def imports_of_meshwright() -> list[str]:
    """Lines of xlacensus that import or name Meshwright: it reads any program, and Meshwright depends on it."""
    return [
        f"{place(path, number)} {line.strip()[:80]}"
        for path, text, _ in sources().values()
        if path.is_relative_to(CENSUS)
        for number, line in enumerate(text.splitlines(), 1)
        if "meshwright" in line.lower()
    ]


RAISING = {
    "CensusError",
    "OutOfMemory",
    "census",
    "compile_function",
    "compiler_error",
    "parse_module",
    "simulate_schedule",
}
"""Errors of xlacensus, and its functions that raise them."""


def foreign_errors() -> list[str]:
    """Imports of what raises errors of xlacensus: `analysis.programs` alone raises them as errors of this package."""
    return [
        f"{place(path, node.lineno)} imports {alias.name}"
        for module, (path, _, tree) in sources().items()
        if path.is_relative_to(PACKAGE) and module != "meshwright.analysis.programs"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xlacensus"
        for alias in node.names
        if alias.name in RAISING
    ]


def optimizers_by_name() -> list[str]:
    """Places that ask which built-in optimizer a run has: its row (update_rules.py) says what they need to know."""
    names = set(UPDATE_RULES)
    found = []
    for module, (path, _, tree) in sources().items():
        if module == "meshwright.update_rules":
            continue
        for node in ast.walk(tree):
            asked: list[ast.AST] = []
            if isinstance(node, ast.Compare):
                asked = [node.left, *node.comparators]
            elif isinstance(node, ast.Tuple | ast.List | ast.Set):
                asked = list(node.elts)
            elif isinstance(node, ast.Dict):
                asked = [key for key in node.keys if key is not None]
            constants = {part.value for part in asked if isinstance(part, ast.Constant)}
            if constants & names:
                found.append(f"{place(path, node.lineno)} {ast.unparse(node)[:80]}")
    return found


def kinds_by_name() -> list[str]:
    """Places outside layer kinds and families that name a kind or the class of its facts.

    A kind states its parameters, computation, FLOPs, work and cache itself, so that no other room has to know it.
    """
    bases = {"Kind", "Recurrence"}
    rooms = ("meshwright.models.blocks", "meshwright.models.families")
    names = {
        node.name
        for _, _, tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and bases & {ast.unparse(base) for base in node.bases}
    }
    assert {"Attention", "DeltaNet", "DeltaSpec"} <= names
    found = []
    for module, (path, _, tree) in sources().items():
        if module.startswith(rooms):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            named = names & {alias.name for alias in node.names}
            if named:
                found.append(f"{place(path, node.lineno)} imports {', '.join(sorted(named))}")
    return found


def questions_about_models() -> list[str]:
    """Places outside wrapped models that ask which kind of model a run has.

    `Model` has a method or a fact for each such question, that families and wrapped models both have.
    """
    found = []
    for module, (path, _, tree) in sources().items():
        if room_of(module) == "wrapped":
            continue
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.expr) else ""
            asked = ""
            if isinstance(node, ast.Compare) and re.search(r"\bmodel\.unit\b", text):
                asked = "compares the unit of a model"
            elif isinstance(node, ast.Call) and re.match(r"isinstance\(.*\bWrapped\b", text):
                asked = "asks for the class of wrapped models"
            elif isinstance(node, ast.UnaryOp | ast.If | ast.IfExp | ast.BoolOp):
                tests = {
                    ast.UnaryOp: lambda n: [n.operand],
                    ast.If: lambda n: [n.test],
                    ast.IfExp: lambda n: [n.test],
                    ast.BoolOp: lambda n: n.values,
                }[type(node)](node)
                if any(
                    re.fullmatch(r"[\w.()]*\bspec(\(\))?\.layers", ast.unparse(t)) for t in tests
                ):
                    asked = "asks whether a model has layers"
            elif isinstance(node, ast.Attribute | ast.Name) and text.endswith("singledispatch"):
                asked = "dispatches on a class"
            if asked:
                found.append(f"{place(path, node.lineno)} {asked}: {text[:80]}")
    return found


def forwarding_properties() -> list[str]:
    """Properties of what runs a step that only return a field of the same name of the run that they hold.

    Whoever reads such a field asks for it where it is. Reports of the planner are read by users, and may forward.
    """
    found = []
    for module, (path, _, tree) in sources().items():
        if room_of(module) not in {"generation", "models", "runs", "step", "trainer", "wrapped"}:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            holders = "(run|placed|settled|layout|stages|device_run|local_model|execution)"
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if not decorators & {"property", "functools.cached_property"}:
                continue
            last = node.body[-1]
            returned = ""
            if isinstance(last, ast.Return) and last.value is not None:
                returned = ast.unparse(last.value)
            if re.fullmatch(rf"self\.{holders}(\.\w+)*\.{node.name}", returned):
                found.append(f"{place(path, node.lineno)} {node.name} returns {returned}")
    return found


def fields_of(node: ast.ClassDef) -> dict[str, str]:
    """Fields that a class declares, with their types."""
    declared = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {ast.unparse(item.target): ast.unparse(item.annotation) for item in declared}


def execution_declared_again() -> list[str]:
    """Classes that declare several fields of `Execution` again, with the same types.

    What a run's passes follow is one value, passed on as it is; a class that needs it holds or extends it.
    """
    _, _, tree = sources()["meshwright.models.execution"]
    (execution,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    fields = fields_of(execution)
    assert "kernels" in fields
    found = []
    for path, _, tree in sources().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or node.name == execution.name:
                continue
            again = sorted(dict(fields.items() & fields_of(node).items()))
            if len(again) > 1:
                found.append(f"{place(path, node.lineno)} {node.name}: {', '.join(again)}")
    return found


RULES: dict[str, Callable[[], list[str]]] = {
    "circles of imports": circular_imports,
    "imports from a higher layer": imports_upward,
    "imports by a string": imports_by_string,
    "lines that are not formatted": unformatted,
    "imports of Meshwright": imports_of_meshwright,
    "errors of xlacensus": foreign_errors,
    "dimension letters": foreign_letters,
    "docstrings": docstrings,
    "layer kinds by name": kinds_by_name,
    "questions about models": questions_about_models,
    "optimizers by name": optimizers_by_name,
    "properties that forward": forwarding_properties,
    "fields of Execution": execution_declared_again,
    "private words": private_words,
    "words of the field": missing_field_words,
}


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_broken(rule: str) -> None:
    assert RULES[rule]() == []


if __name__ == "__main__":
    for rule, violations in RULES.items():
        found = violations()
        print(f"\n## {rule}: {len(found)}", *found, sep="\n")

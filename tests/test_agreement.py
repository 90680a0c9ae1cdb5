"""What one process alone knows decides nothing about a collective: read from the syntax of the package."""

import ast
import functools
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"

COLLECTIVES = {
    # Agreements and barriers of hosts.
    "agree", "answer_of_the_first", "choose_together", "failing_together", "wait_at_barrier",
    "broadcast_one_to_all", "process_allgather", "sync_global_devices", "reached_preemption_sync_point",
    # Programs that run on the devices of all hosts.
    "evaluator", "eval_step", "train_step", "fingerprints", "from_first_replica", "shard_sums", "sample_tokens",
    "replicas_differ", "replace_replicas",
    "initial_state", "load_initial_weights",
    # Functions with a collective whose names several classes have.
    "resume", "restore", "restore_params", "save", "save_locally", "set_aside", "_sample", "_save", "_roll_back",
    "_choices",
}  # fmt: skip
"""Names of functions that all processes must call alike; every function that calls one of them is another."""

LOCAL = {
    # Signals, clocks and names of this process.
    "received", "signal", "monotonic", "perf_counter", "time", "getpid", "gethostname", "environ", "getenv",
    "process_index", "local_devices", "addressable_shards",
    # Its threads.
    "done", "is_set", "is_alive",
    # Its disks.
    "is_file", "is_dir", "exists", "glob", "iterdir", "stat", "disk_usage", "committed_steps", "all_steps",
    "partial_steps", "getsize",
}  # fmt: skip
"""Names of what may differ between processes; every variable, attribute and function made of one is another."""

AGREED = {
    "answer_of_the_first", "choose_together", "broadcast_one_to_all", "process_allgather", "stops",
    "manifest_of", "share", "spans_processes",
}  # fmt: skip
"""Functions whose result is the same in all processes, whatever their arguments are."""

OF_THE_FIRST = {"answer_of_the_first": 0, "choose_together": 2}
"""Function -> argument that only process 0 calls."""

RAISED_BY_ALL = {"_RollBack"}
"""Errors that all processes raise at the same place: of a step's metrics, which are the same in all."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


OF_ONE_PROCESS = {
    "api/proving.py": "a verb of one process, which compiles for devices that are not here",
    "bench/hardware/section.py": "measures in one process; its `save` writes a file",
    "data/corpus.py: vocab_of_corpus": "asked by verbs of one process, before any have joined",
}
"""Modules and functions that no second process ever calls, and why."""


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> set[str]:
    return {name_of(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}


def mentioned(node: ast.AST) -> Iterator[str]:
    """Names and attributes that an expression is made of, without what is agreed on or computed later."""
    if isinstance(node, ast.Lambda) or (
        isinstance(node, ast.Call) and name_of(node.func) in AGREED
    ):
        return
    yield name_of(node)
    for child in ast.iter_child_nodes(node):
        yield from mentioned(child)


class Package:
    """Functions of some modules, which of them contain a collective, and which names are of one process alone."""

    def __init__(self, modules: dict[str, ast.Module]):
        self.functions: list[tuple[str, Function]] = []
        for module, tree in modules.items():
            self.functions += [(module, n) for n in ast.walk(tree) if isinstance(n, Function)]
        counts = Counter(function.name for _, function in self.functions)
        unique = {f.name: called(f) for _, f in self.functions if counts[f.name] == 1}
        self.collectives = set(COLLECTIVES)
        while more := {n for n, c in unique.items() if c & self.collectives} - self.collectives:
            self.collectives |= more
        self.local: dict[str, set[str]] = {module: set(LOCAL) for module in modules}
        answers = [
            (m, f) for m, f in self.functions if counts[f.name] == 1 and answers_yes_or_no(f)
        ]
        size = -1
        while size != sum(map(len, self.local.values())):
            size = sum(map(len, self.local.values()))
            for module, function in answers:
                if any(self.is_local(value, module, function) for value in returned(function)):
                    for names in self.local.values():
                        names.add(function.name)
        for module, function in self.functions:
            if function.name == "__init__":
                self.local[module] |= set(self._attributes(module, function))

    def _attributes(self, module: str, function: Function) -> Iterator[str]:
        """Attributes of a class that hold a truth, or an answer, which only this process knows."""
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    decides = isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Call)
                    if not (decides and isinstance(target, ast.Attribute)):
                        continue
                    if self.is_local(value, module, function):
                        yield target.attr

    def is_local(self, node: ast.AST, module: str, function: Function) -> bool:
        """Whether an expression is made of what one process alone knows."""
        return bool(set(mentioned(node)) & (self.local[module] | self.variables(module, function)))

    def variables(self, module: str, function: Function) -> set[str]:
        """Variables of a function that are made of what one process alone knows."""
        found: set[str] = set()
        made = [
            (target.id, set(mentioned(value)))
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
            for target, value in pairs(node)
            if isinstance(target, ast.Name)
        ]
        made += [
            (variable.id, set(mentioned(node.iter)))
            for node in ast.walk(function)
            if isinstance(node, ast.For)
            for variable in ast.walk(node.target)
            if isinstance(variable, ast.Name)
        ]
        while more := {n for n, of in made if of & (self.local[module] | found)} - found:
            found |= more
        return found

    def violations(self) -> list[str]:
        """Calls of a collective that depend on what one process alone knows: `module:line: why`."""
        found = []
        for module, function in self.functions:
            alone = {module, f"{module}: {function.name}"} & OF_ONE_PROCESS.keys()
            if called(function) & self.collectives and not alone:
                reader = Reader(self, module, function)
                reader.block(function.body, "")
                found += [f"{module}:{line}: {name} {why}" for line, name, why in reader.found]
        return sorted(set(found))


def answers_yes_or_no(function: Function) -> bool:
    """Whether a function is a property, or states that it returns a truth value."""
    a_property = any(name_of(decorator) == "property" for decorator in function.decorator_list)
    return a_property or (function.returns is not None and name_of(function.returns) == "bool")


def returned(function: Function) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def pairs(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment, each with its value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is None:
        return
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        elif isinstance(target, ast.Tuple):
            yield from ((element, node.value) for element in target.elts)
        else:
            yield target, node.value


class Reader:
    """Walk through one function with the reason for which a statement is not reached by all processes."""

    def __init__(self, package: Package, module: str, function: Function):
        self.collectives = package.collectives
        self.names = package.local[module] | package.variables(module, function)
        self.found: list[tuple[int, str, str]] = []

    def local(self, node: ast.AST) -> str:
        return f"after `{ast.unparse(node)[:80]}`" if set(mentioned(node)) & self.names else ""

    def block(self, statements: Sequence[ast.stmt], why: str) -> str:
        """Reads statements; returns the reason for which what follows them is not reached by all."""
        for statement in statements:
            why = self.statement(statement, why) or why
        return why

    def statement(self, node: ast.stmt, why: str) -> str:
        """Reads a statement; returns the reason for which the next one is not reached by all."""
        if isinstance(node, ast.If | ast.While):
            self.expression(node.test, why)
            local = self.local(node.test)
            left = self.branches([node.body, node.orelse], why or local)
            return left or (local if leaves([*node.body, *node.orelse]) else "")
        if isinstance(node, ast.For):
            self.expression(node.iter, why)
            return self.branches([node.body, node.orelse], why or self.local(node.iter))
        if isinstance(node, ast.Try):
            self.attempt(node.body, [n for n in node.handlers if not raises(n.body)], why)
            handled = [
                handler
                for handler in node.handlers
                if name_of(handler.type or handler) not in RAISED_BY_ALL
            ]
            self.branches([h.body for h in handled], why or "in an error's handler")
            self.branches([node.orelse, node.finalbody], why)
            return ""
        if isinstance(node, ast.With):
            for item in node.items:
                self.expression(item.context_expr, why)
            suppressed = any("suppress" in called(item.context_expr) for item in node.items)
            self.attempt(node.body, ["suppressed"] if suppressed else [], why)
            return ""
        if isinstance(node, Function | ast.ClassDef):
            return ""  # read by itself
        self.expression(node, why)
        return ""

    def branches(self, blocks: Sequence[Sequence[ast.stmt]], why: str) -> str:
        left = ""
        for statements in blocks:
            found = self.block(statements, why)
            left = left or ("" if found == why else found)
        return left

    def attempt(self, body: Sequence[ast.stmt], caught: Sequence[object], why: str) -> None:
        """Reads a block whose errors are caught: what follows a call in it may be left out."""
        for number, statement in enumerate(body):
            before = any(called(each) for each in body[:number])
            inner = why or ("after a call whose error is caught" if caught and before else "")
            self.block([statement], inner)

    def expression(self, node: ast.AST, why: str) -> None:
        """Reads an expression, or a statement without others in it."""
        if isinstance(node, Function):
            return
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if why and name in self.collectives:
                self.found.append((node.lineno, name, why))
            first = OF_THE_FIRST.get(name)
            for number, argument in enumerate(node.args):
                inner = "in process 0 alone" if number == first else why
                self.expression(argument, inner)
                if number == first and name_of(argument) in self.collectives:
                    self.found.append((node.lineno, name_of(argument), inner))
            for keyword in node.keywords:
                self.expression(keyword.value, why)
            self.expression(node.func, why)
            return
        if isinstance(node, ast.BoolOp):
            for number, value in enumerate(node.values):
                local = [self.local(before) for before in node.values[:number]]
                self.expression(value, why or next(filter(None, local), ""))
            return
        if isinstance(node, ast.IfExp):
            self.expression(node.test, why)
            for branch in (node.body, node.orelse):
                self.expression(branch, why or self.local(node.test))
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            for generator in node.generators:
                conditions = [self.local(part) for part in (generator.iter, *generator.ifs)]
                why = why or next(filter(None, conditions), "")
        for child in ast.iter_child_nodes(node):
            self.expression(child, why)


def leaves(statements: Sequence[ast.stmt]) -> bool:
    """Whether a block may go somewhere else than to the next statement, without an error."""
    return any(
        isinstance(node, ast.Return | ast.Continue | ast.Break)
        for statement in statements
        for node in ast.walk(statement)
    )


def raises(statements: Sequence[ast.stmt]) -> bool:
    return isinstance(statements[-1], ast.Raise)


@functools.cache
def package() -> Package:
    return Package(
        {
            str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
            for path in PACKAGE.rglob("*.py")
        }
    )


def test_nothing_that_one_process_alone_knows_decides_about_a_collective() -> None:
    assert not package().violations(), "\n".join(package().violations())


PLANTED = {
    "a signal of this process": "def f(self):\n if not self.received:\n  self.evaluator(1)",
    "a return before it": "def f(p):\n if p.is_file():\n  return\n agree('x', {})",
    "through a variable": "def f():\n first = process_index() == 0\n if first:\n  agree('x', {})",
    "through an attribute": "class A:\n def __init__(self):\n  self.first = process_index() == 0\n"
    " def f(self):\n  if self.first:\n   agree('x', {})",
    "through a property": "class A:\n @property\n def writes(self):\n  return process_index() == 0\n"
    " def f(self):\n  if self.writes:\n   agree('x', {})",
    "inside a function that is called": "def g():\n agree('x', {})\ndef f(p):\n if p.exists():\n  g()",
    "of a loop": "def f(p):\n for step in committed_steps(p):\n  agree('x', {})",
    "while there is time": "def f():\n while monotonic() < 3:\n  agree('x', {})",
    "by and": "def f(p):\n return p.is_dir() and agree('x', {})",
    "by a conditional expression": "def f(p):\n return agree('x', {}) if p.is_dir() else 0",
    "in a comprehension": "def f(p):\n return [agree('x', {}) for x in p.iterdir()]",
    "in a handler": "def f(p):\n try:\n  p()\n except OSError:\n  agree('x', {})",
    "after a call that may fail": "def f(p):\n try:\n  p()\n  agree('x', {})\n except OSError:\n  pass",
    "suppressed": "def f(p):\n with suppress(OSError):\n  p()\n  agree('x', {})",
    "in what process 0 computes": "def f():\n answer_of_the_first(lambda: agree('x', {}))",
}
INNOCENT = {
    "the number of processes": "def f():\n if process_count() > 1:\n  agree('x', {})",
    "an agreed answer": "def f(p):\n there = answer_of_the_first(lambda: p.is_file())\n if there:\n  agree('x', {})",
    "an error that ends the process": "def f(p):\n if p.is_file():\n  raise ValueError\n agree('x', {})",
    "a handler that raises": "def f(p):\n try:\n  p()\n  agree('x', {})\n except OSError as e:\n  raise ValueError from e",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_decisions_are_found(kind: str) -> None:
    assert Package({"planted": ast.parse(textwrap.dedent(PLANTED[kind]))}).violations()


@pytest.mark.parametrize("kind", INNOCENT)
def test_what_all_processes_know_is_innocent(kind: str) -> None:
    assert not Package({"innocent": ast.parse(textwrap.dedent(INNOCENT[kind]))}).violations()

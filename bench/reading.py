#!/usr/bin/env python3
"""What a reader of a Python package meets: python reading.py src/meshwright [--worst 20] [--step]

Prints, by room (first folder): lines, tokens of code (no comments, docstrings, imports), tokens per
line of code, and the share of lines over 100 columns; then the functions that ask most of a reader. A
function's load is the number of names it binds (parameters, locals, loop and comprehension variables),
plus twice the functions nested in it, plus its deepest expression beyond six levels. It only reads, and
asserts nothing.

With --step it prints what one has to open to read a dense train step: every file of the package with a
function that runs while the step of a small Llama on fsdp=8 is built and traced (forward pass, loss,
gradients, update), with the tokens of these functions and those of the whole file.
"""

import argparse
import ast
import collections
import io
import pathlib
import sys
import token
import tokenize
from types import CodeType, FrameType
from typing import Any

LAYOUT = {token.COMMENT, token.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER}


def skipped_lines(tree: ast.AST) -> set[int]:
    """Lines of docstrings and imports."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def depth(node: ast.AST) -> int:
    """Levels of expressions inside a node."""
    inner = [
        depth(c)
        for c in ast.iter_child_nodes(node)
        if isinstance(c, ast.expr | ast.comprehension | ast.keyword)
    ]
    return 1 + max(inner, default=0)


def load(function: ast.FunctionDef) -> tuple[int, int, int, int]:
    """Returns a function's load, names, nested functions and deepest expression."""
    names = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    names |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    nested = sum(isinstance(n, ast.FunctionDef | ast.Lambda) for n in ast.walk(function)) - 1
    deepest = max((depth(n) for n in ast.walk(function) if isinstance(n, ast.expr)), default=0)
    return len(names) + 2 * nested + max(0, deepest - 6), len(names), nested, deepest


def format_row(name: str, room: "collections.Counter[str]") -> str:
    """Returns a room's line of the table."""
    per_line = room["tokens"] / room["code"]
    wide = room["wide"] / room["lines"]
    counts = f"{room['files']:5d} {room['lines']:7,d} {room['tokens']:8,d}"
    return f"{name:16s} {counts} {per_line:8.1f} {wide:6.1%}"


def code_tokens(source: str) -> list[int]:
    """Returns the line of every token of code."""
    skip = skipped_lines(ast.parse(source))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t.start[0] for t in found if t.type not in LAYOUT and t.start[0] not in skip]


def traced_step() -> set[CodeType]:
    """Returns the code of all Python functions that run while a dense train step is built and traced."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import meshwright as mw
    from meshwright.hardware.mesh import build_mesh
    from meshwright.step.device_run import place_on_devices
    from meshwright.step.train_step import build_train_step

    model = mw.Llama(vocab=512, width=64, layers=2, heads=4)
    run = mw.recipe("tiny", model=model, mesh="fsdp=8", vocab=512, seq=64, batch=16)
    device_run = place_on_devices(run, build_mesh(run.mesh))
    entered: set[CodeType] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    batch = device_run.abstract_batch
    sys.setprofile(enter)
    try:
        build_train_step(device_run).lower(device_run.abstract, batch)
    finally:
        sys.setprofile(None)
    return entered


def function_lines(code: CodeType) -> set[int]:
    """Returns the lines of a function, its decorators and those of nested functions included."""
    lines = {line for *_, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            lines |= function_lines(constant)
    return set(range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1))


def print_step(package: pathlib.Path) -> None:
    """Prints the files of a dense train step, with tokens of the functions that run and of the files."""
    lines: dict[pathlib.Path, set[int]] = collections.defaultdict(set)
    for code in traced_step():
        path = pathlib.Path(code.co_filename).resolve()
        if path.is_relative_to(package.resolve()):
            lines[path] |= function_lines(code)
    print(f"{'functions':>9s} {'file':>8s}")
    sums = collections.Counter[str]()
    for path in sorted(lines):
        tokens = code_tokens(path.read_text())
        entered = sum(line in lines[path] for line in tokens)
        sums.update(files=1, entered=entered, tokens=len(tokens))
        print(f"{entered:9,d} {len(tokens):8,d}  {path.relative_to(package.resolve())}")
    print(f"{sums['entered']:9,d} {sums['tokens']:8,d}  {sums['files']} files")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=pathlib.Path)
    parser.add_argument("--worst", type=int, default=20)
    parser.add_argument("--step", action="store_true", help="files of a dense train step")
    args = parser.parse_args()
    if args.step:
        print_step(args.package)
        return
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    functions = []
    for path in sorted(args.package.rglob("*.py")):
        source = path.read_text()
        tree, parts = ast.parse(source), path.relative_to(args.package).parts
        room, skip = rooms[parts[0] if len(parts) > 1 else "."], skipped_lines(tree)
        lines = source.splitlines()
        code = [
            n
            for n, s in enumerate(lines, 1)
            if n not in skip and s.strip() and not s.strip().startswith("#")
        ]
        found = tokenize.generate_tokens(io.StringIO(source).readline)
        room["files"] += 1
        room["lines"] += len(lines)
        room["code"] += len(code)
        room["wide"] += sum(len(s) > 100 for s in lines)
        room["tokens"] += sum(t.type not in LAYOUT and t.start[0] not in skip for t in found)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.append(
                    (*load(node), f"{path.relative_to(args.package)}:{node.lineno} {node.name}")
                )
    total: collections.Counter[str] = collections.Counter()
    print(f"{'room':16s} {'files':>5s} {'lines':>7s} {'tokens':>8s} {'per line':>8s} {'>100':>6s}")
    for name, room in sorted(rooms.items(), key=lambda item: -item[1]["tokens"]):
        total += room
        print(format_row(name, room))
    print(format_row("all", total))
    print("\nload = names + 2 x nested functions + depth beyond six")
    for row in sorted(functions, reverse=True)[: args.worst]:
        print(f"{row[0]:5d}  names {row[1]:3d}  nested {row[2]:2d}  depth {row[3]:2d}  {row[4]}")


if __name__ == "__main__":
    main()

"""Command line: `python -m xlacensus PROGRAM`.

PROGRAM is a file with the text of a compiled program (`compiled.as_text()`, or
`*after_optimizations.txt` of `XLA_FLAGS=--xla_dump_to=FOLDER`), or `module:function`. The function
is called without arguments, and returns what JAX makes of a function on the way
(`jax.jit(f).trace(x)`, `.lower(x)` or `.lower(x).compile()`), or the function and its arguments,
`(f, x)`.
"""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xlacensus.errors import CensusError
from xlacensus.program_census import Census, census, format_finding
from xlacensus.program_text import read_program_text

_EXAMPLE = "a file with `compiled.as_text()`, or module:function"


def main(words: Sequence[str] | None = None) -> int:
    """Prints what a program stores, sends and multiplies.
    Returns the exit code: 0, or 2 for what cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m xlacensus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", metavar="PROGRAM", help=_EXAMPLE)
    parser.add_argument(
        "--mesh", help="degree of each mesh axis, outermost first: data=2,model=4", default=""
    )
    parser.add_argument("--json", action="store_true", help="print JSON (module:function only)")
    options = parser.parse_args(words)
    try:
        mesh = parse_mesh(options.mesh)
        if re.fullmatch(r"[\w.]+:\w+", options.program):
            print(_described(census_of_name(options.program, mesh), options.json))
        elif options.json:
            raise CensusError(
                f"--json of {options.program}",
                "the text of a program is not all that a census reads",
                "module:function, or no --json",
            )
        else:
            print(_text_of(options.program, mesh))
    except CensusError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse_mesh(text: str) -> dict[str, int] | None:
    """Parses `data=2,model=4`; None for an empty text. Raises CensusError for anything else."""
    if not text:
        return None
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, degree = part.partition("=")
        if not axis.isidentifier() or not degree.isdecimal() or int(degree) < 1 or axis in mesh:
            truth = f"{part!r} is not an axis and its degree, or the axis is there twice"
            raise CensusError(f"--mesh {text}", truth, "--mesh data=2,model=4")
        mesh[axis] = int(degree)
    return mesh


def census_of_name(name: str, mesh: dict[str, int] | None) -> Census:
    """Imports `module:function`, calls it, and takes the census of what it returns.
    Raises CensusError."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        fix = f"the name of the module: {Path(module_name).stem}:{attribute}"
        raise CensusError(name, f"{module_name} is a file", fix)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise CensusError(name, f"it cannot be imported: {error}", _EXAMPLE) from error
    try:
        made: Any = make()
    except TypeError as error:
        fix = "a function without arguments that returns (f, x, ...), or jax.jit(f).lower(x, ...)"
        raise CensusError(name, f"called without arguments it raises {error}", fix) from error
    parts = made if isinstance(made, tuple) else (made,)
    try:
        return census(*parts, mesh=mesh)
    except TypeError as error:
        given = ", ".join(type(part).__name__ for part in parts)
        raise CensusError(
            name,
            f"it returned ({given}), and calling the first with the others raises {error}",
            "each argument by itself: (f, x, y), not (f, (x, y))",
        ) from error


def _described(found: Census, as_json: bool) -> str:
    return json.dumps(found.to_json(), indent=1) if as_json else str(found)


def _text_of(file: str, mesh: dict[str, int] | None) -> str:
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CensusError(file, f"it cannot be read: {error}", _EXAMPLE) from error
    program = read_program_text(text, mesh)
    parts = [str(program), str(program.ledger) if len(program.ledger) else "No collectives"]
    parts += [f"not in the ledger: {instruction}" for instruction in program.ledger.unread]
    parts += map(format_finding, program.findings)
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())

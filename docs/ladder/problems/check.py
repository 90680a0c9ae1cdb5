"""Checks your answer to a problem of the ladder.

    python docs/ladder/problems/check.py                # lists the problems
    python docs/ladder/problems/check.py 7 --read       # statement and picture
    python docs/ladder/problems/check.py 7              # checks `answer` in the problem's own file
    python docs/ladder/problems/check.py 7 mine.py      # ... or in another file
    python docs/ladder/problems/check.py 7 --hint 1     # the first of three hints

The exit code is 0 for a right answer, 1 for any other, 2 for a mistake in the command. Times are predicted: with the
compiler of the v5p or the H100 where it is installed (`pip install libtpu`), otherwise by simulating the program that
is compiled for CPUs. `check.py --pages` writes the pictures and the table of `index.md`.
"""

import argparse
import ast
import dataclasses
import json
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import grading
import jax
from grading import HEADINGS, Figures, Task, Verdict

from meshwright.views.draw import standalone


def show(found: Task) -> str:
    """Returns the statement of a problem, with its picture and the prediction to write down."""
    problem = found.problem
    parts = [
        f"{found.number}. {found.title}",
        f"after lesson {problem.lesson}; mesh {problem.mesh}; {problem.takes} -> {problem.gives}",
        found.statement,
        str(grading.pictures(found)),
        f"First write down a prediction (PREDICTION in {found.file.name}):\n{_question(found)}",
        f"Then write `answer` in {found.file}, and run check.py {found.number}",
    ]
    return "\n\n".join(parts)


def _question(found: Task) -> str:
    return f"{found.problem.predict.partition(':')[2].strip()}, with {found.problem.full}?"


UNITS = {"sent": (1e6, "MB"), "memory": (1e6, "MB"), "flops": (1e9, "GFLOPs")}


def prediction_lines(found: Task, prediction: float, figures: Figures) -> list[str]:
    """Compares the learner's prediction with the program, and explains the number."""
    problem = found.problem
    name = problem.predict.partition(": ")[0]
    scale, unit = UNITS.get(name, (1e-3, "ms"))
    truth = figures.quantity(name) / scale
    close = abs(prediction - truth) <= 0.1 * abs(truth)
    computed = arithmetic(found) / scale
    return [
        f"You predicted {_short(prediction)} {unit}, and it is {_short(truth)}: {'close' if close else 'not close'}.",
        f"{problem.arithmetic} = {_short(computed)} {unit}",
        *textwrap.wrap(problem.because, 100),
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def arithmetic(found: Task) -> float:
    """Evaluates the arithmetic of a problem at the full sizes: bytes, FLOPs or seconds."""
    return float(eval(found.problem.arithmetic, {}, dict(grading.read_sizes(found.problem.full))))


def table(rows: dict[str, Figures], axes: list[str]) -> list[str]:
    """Returns the figures of several programs side by side."""
    first = next(iter(rows.values()))
    labels = list(dict.fromkeys([*(a for f in rows.values() for a in f.sent)]))

    def line(name: str, values: list[float], unit: str, digits: int = 1) -> str:
        return f"{name:24}" + "".join(f"{value:>12,.{digits}f} {unit:6}" for value in values)

    lines = [" " * 24 + "".join(f"{name:>18} " for name in rows).rstrip()]
    lines += [line(f"sent over {a}", [f.sent.get(a, 0) / 1e6 for f in rows.values()], "MB") for a in labels or axes[:1]]
    lines.append(line("memory", [f.memory / 1e6 for f in rows.values()], "MB"))
    lines.append(line("computed", [f.flops / 1e9 for f in rows.values()], "GFLOPs", 0))
    for machine in first.seconds:
        cells = "".join(f"{f.seconds[machine] * 1e3:>12,.3f} ms    " for f in rows.values())
        lines.append(f"{'predicted ' + machine:24}{cells}".rstrip())
    lines = [text.rstrip() for text in lines]
    for basis in dict.fromkeys(first.basis.values()):
        machines = ", ".join(m for m, b in first.basis.items() if b == basis)
        lines.append(f"  {machines}: {basis}")
    return lines


def with_compilers(found: Task, file: Path, rows: dict[str, Figures]) -> dict[str, Figures]:
    """Replaces simulated times by those of programs compiled for the machine, where its compiler is installed."""
    if hasattr(found.module, "measure"):
        return rows
    for machine in found.problem.targets:
        compiled = grading.compiled_for(found.number, file, machine)
        if isinstance(compiled, str):
            reason = f"{grading.SIMULATED} ({compiled})"
            changes = {name: (f.seconds[machine], reason) for name, f in rows.items()}
        else:
            basis = "compiled for it with its own compiler, and simulated; nothing ran there"
            changes = {name: (compiled[name][0], basis) for name in rows}
        rows = {
            name: dataclasses.replace(
                f,
                seconds={**f.seconds, machine: changes[name][0]},
                basis={**f.basis, machine: changes[name][1]},
            )
            for name, f in rows.items()
        }
    return rows


def check(found: Task, file: Path) -> tuple[Verdict, str]:
    """Grades the answer of a file; returns the verdict and the text of it."""
    try:
        module = grading.load(file)
        answer = module.answer
        prediction = _prediction_of(module)
    except (Exception, SystemExit) as error:  # whatever the learner's file does
        return Verdict("error", ()), f"ERROR: {file.name} cannot be read.\n{type(error).__name__}: {error}"
    verdict = grading.grade(found, answer)
    lines = [f"{found.number}. {found.title}", "", HEADINGS[verdict.kind], *map(_wrapped, verdict.lines)]
    if verdict.kind == "todo":
        lines += ["", f"Read it with: check.py {found.number} --read"]
    if verdict.figures is not None and verdict.reference is not None:
        lines.append("")
        if prediction is None:
            lines.append(f"The figures are shown once PREDICTION has a number: {_question(found)}")
        else:
            best = grading.measure(found.module, found.best)
            rows = {"yours": verdict.figures, "reference": verdict.reference, "best known": best}
            lines += table(with_compilers(found, file, rows), list(found.problem.degrees))
            lines += ["", *prediction_lines(found, prediction, verdict.reference)]
    elif verdict.kind != "todo":
        lines += ["", f"A hint: check.py {found.number} --hint 1 (then 2, 3)"]
    return verdict, "\n".join(lines)


def _prediction_of(module: ModuleType) -> float | None:
    """Returns the learner's prediction. Raises TypeError where it is not a number."""
    prediction = getattr(module, "PREDICTION", None)
    if prediction is not None and (isinstance(prediction, bool) or not isinstance(prediction, int | float)):
        raise TypeError(f"PREDICTION is {prediction!r}: write a number, or None")
    return prediction


def _wrapped(line: str) -> str:
    return line if line.startswith("  ") else textwrap.fill(line, 110)


def pages() -> None:
    """Writes the pictures of all problems, and the table in `index.md`."""
    for stale in (grading.HERE / "img").glob("*.svg"):
        stale.unlink()
    for name, svg in drawings().items():
        (grading.HERE / "img" / name).write_text(svg, encoding="utf-8")
    file = grading.HERE / "index.md"
    before, rest = file.read_text(encoding="utf-8").split(TABLE_BEGINS)
    file.write_text(f"{before}{table_of_problems()}{rest.partition(TABLE_ENDS)[2]}", encoding="utf-8")


TABLE_BEGINS, TABLE_ENDS = "<!-- table: check.py --pages -->\n", "<!-- end of the table -->\n"
_SOURCE = "https://github.com/meshwright/meshwright/blob/main/docs/ladder/problems"


def table_of_problems() -> str:
    """Returns the table of `index.md`: number, file, lesson."""
    lines = ["| | problem | after |", "|---|---|---|"]
    for file in grading.problem_files():
        found = grading.task(int(file.name[:2]))
        lesson = found.problem.lesson
        lines.append(
            f"| {found.number} | [{found.title}]({_SOURCE}/{file.name}) "
            f"| [{lesson.partition('_')[0]}](../{lesson}.md) |"
        )
    return TABLE_BEGINS + "\n".join(lines) + "\n" + TABLE_ENDS


def drawings() -> dict[str, str]:
    """Returns the pictures of all problems as SVG, by file name."""
    drawn = {}
    for file in grading.problem_files():
        found = grading.task(int(file.name[:2]))
        picture = grading.pictures(found)
        for letter, one in zip("abcdefgh", getattr(picture, "pictures", [picture]), strict=False):
            drawn[f"{found.number:02}{letter}.svg"] = standalone(one.svg())
    return drawn


def problems_as_markdown() -> str:
    """Returns all problems for the page of the site: statement, pictures, prediction, what to write, hints."""
    parts = []
    names = sorted(drawings())
    for file in grading.problem_files():
        found = grading.task(int(file.name[:2]))
        problem, source = found.problem, file.read_text(encoding="utf-8")
        code = "\n\n".join(
            ast.get_source_segment(source, node) or ""
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef) and node.name in ("one_device", "answer")
        )
        images = "\n".join(f"![{found.title}](img/{n})" for n in names if n.startswith(f"{found.number:02}"))
        hints = "\n".join(
            f'<details markdown="1">\n<summary>Hint {i}</summary>\n\n{hint}\n\n</details>'
            for i, hint in enumerate(problem.hints, 1)
        )
        parts += [
            f"## {found.number}. {found.title}",
            f"After [lesson {problem.lesson.partition('_')[0]}](../{problem.lesson}.md), on `{problem.mesh}`: "
            f"`{problem.takes}` to `{problem.gives}`.",
            found.statement,
            images,
            f"**Predict first:** {_question(found)}",
            f"```python\n{code}\n```",
            hints,
        ]
    return "\n\n".join(parts)


def main(words: list[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, help="problem")
    parser.add_argument("file", nargs="?", type=Path, help="file with your `answer`; by default the problem's own")
    parser.add_argument("--read", action="store_true", help="print the statement and the picture")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), help="print a hint")
    parser.add_argument("--pages", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-for", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.pages:
        pages()
        return 0
    if options.number is None:
        for file in grading.problem_files():
            title = grading.load(file).__doc__.splitlines()[0]
            print(f"{int(file.name[:2]):3}. {title}")
        return 0
    try:
        found = grading.task(options.number)
    except LookupError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    file = options.file or found.file
    if options.file is not None and not file.is_file():
        print(f"error: there is no file {file}", file=sys.stderr)
        return 2
    if options.compile_for:
        answers = {
            "yours": grading.load(file).answer,
            "reference": found.solution.reference,
            "best known": found.best,
        }
        print(json.dumps(grading.compiled_here(found.module, answers, options.compile_for)))
        return 0
    if options.hint:
        print(textwrap.fill(found.problem.hints[options.hint - 1], 100))
        return 0
    if options.read:
        print(show(found))
        return 0
    verdict, text = check(found, file)
    print(text)
    return 0 if verdict.kind == "right" else 1


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # simulated devices, also where there is an accelerator
    if "--compile-for" not in sys.argv:
        jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main(sys.argv[1:]))

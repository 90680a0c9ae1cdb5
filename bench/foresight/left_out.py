"""Each program's steps predicted without it: `python bench/foresight/left_out.py`.

For each program whose runs were published, the constants of `fit.py` are fitted anew on the rows of
all other programs, and price the rows of that program. A fit starts from values that no published
step was used for (`START`), and moves on the fitted half of the rows only.

    rows of all other programs, fitted half -> fit.fit -> constants -> rows of the program, both halves

It writes bench/results/foresight-left-out.json and the table of docs/foresight.md.
`report.py` writes the same figures into the other pages, so it runs afterwards.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from fit import (
    FAMILIES,
    FITTED,
    Constant,
    Prices,
    Values,
    constants_of,
    current,
    error,
    family_of,
    fit,
)
from report import ALONE, LEFT_OUT, ROOT, put_table, spread
from rows import Row, read_rows

from meshwright.hardware.chips import CHIPS, GPU_EFFICIENCY, Torus

SCRIPT = "foresight/left_out.py"
PAGE = ROOT / "docs" / "foresight.md"

PROGRAMS = (
    ("MaxText", "MaxText"),
    ("AXLearn", "AXLearn"),
    ("PAX", "PAX"),
    ("NeMo", "Megatron-Core, NeMo, Megatron-Bridge"),
    ("Megatron-Bridge", "Megatron-Core, NeMo, Megatron-Bridge"),
    ("Megatron-Core", "Megatron-Core, NeMo, Megatron-Bridge"),
    ("Megatron-LM", "Megatron-LM"),
    ("torchtitan", "torchtitan"),
    ("PyTorch FSDP", "PyTorch FSDP"),
    ("LLM-Foundry", "LLM-Foundry"),
    ("nanotron", "nanotron"),
    ("Meta", "Meta"),
)
"""Start of the system of a row, and its program: NeMo and Megatron-Bridge train with Megatron-Core."""

KINDS: dict[str, Callable[[Row], bool]] = {
    "dense": lambda row: not has_experts(row),
    "experts": lambda row: has_experts(row),
    "mxfp8": lambda row: row.placed.run.training.matmul_precision == "mxfp8",
    "`tensor`": lambda row: row.placed.layout.shape.tensor > 1,
    "tpu7x": lambda row: family_of(row) == "tpu7x",
    "fitted half": lambda row: row.is_fitted,
    "other half": lambda row: not row.is_fitted,
}

TPU_DEFAULTS = CHIPS["v4"].efficiency
"""Assumptions of chips.toml for TPUs: v4 states no fraction but that of matmuls."""
COUNTED = 1.0
"""Traffic as it is counted, overlap as the chip's, and a kernel as fast as the chip's own."""

READ_BY_HAND: dict[Constant, tuple[str, str, float]] = {
    ("v5e", "tensor_overlap"): ("MaxText", "steps of MaxText", TPU_DEFAULTS.tensor_overlap),
    ("v5p", "tensor_overlap"): ("MaxText", "steps of MaxText", TPU_DEFAULTS.tensor_overlap),
    ("v6e", "matmul"): ("MaxText", "profiles (`kinds.py`)", ALONE["v6e"]),
    ("v6e", "grouped_matmul"): ("MaxText", "steps of MaxText", TPU_DEFAULTS.grouped_matmul),
    ("v6e", "attention"): ("MaxText", "steps of MaxText", TPU_DEFAULTS.attention),
    ("v6e", "hbm"): ("MaxText", "profiles (`kinds.py`)", TPU_DEFAULTS.hbm),
    ("v6e", "overlap"): ("MaxText", "profiles (`kinds.py`)", TPU_DEFAULTS.overlap),
    ("b300", "attention"): (
        "Megatron-Core, NeMo, Megatron-Bridge", "no recorded source; B200's fit until 2026-11-24",
        GPU_EFFICIENCY.attention,
    ),
}  # fmt: skip
"""Constants that were read from one program's steps or profiles by hand, or have no source, and which no fit sets:
the program whose rows they may be of, what they were read from, and the value that replaces them without that program."""


def has_experts(row: Row) -> bool:
    """Whether a row's model has layers with experts."""
    return any(layer.experts is not None for layer in row.placed.layout.spec.layers)


def is_tpu(owner: str) -> bool:
    """Whether the owner of a constant is a family of TPUs."""
    return owner in FAMILIES and isinstance(CHIPS[FAMILIES[owner][0]].interconnect, Torus)


def program_of(row: Row) -> str:
    """Returns the program that ran a row."""
    return next(program for start, program in PROGRAMS if row.system.startswith(start))


def start_of(constant: Constant) -> float:
    """Returns where the fit of a constant starts: a value that comes from no published step."""
    owner, name = constant
    if name == "matmul":
        return ALONE[owner]
    if name in ("attention", "grouped_matmul"):
        defaults = TPU_DEFAULTS if is_tpu(owner) else GPU_EFFICIENCY
        return float(getattr(defaults, name))
    return COUNTED


START: dict[Constant, float] = {constant: start_of(constant) for constant in FITTED}


def rows_to_fit(rows: Iterable[Row], program: str) -> list[Row]:
    """Returns the rows of all other programs that constants may be fitted on."""
    return [row for row in rows if row.is_fitted and program_of(row) != program]


def informed(rows: list[Row]) -> list[Constant]:
    """Returns the fitted constants that may change the price of some row."""
    found = {constant for row in rows for constant in constants_of(row)}
    return [constant for constant in FITTED if constant in found]


def without(rows: list[Row], program: str, prices: Prices) -> dict[Constant, float]:
    """Returns the constants fitted without a program.

    A constant that no other program's row informs is that of the others of its kind: the mean of the
    other chips (TPU or GPU; all where none is left) or programs. A large matmul is scaled by that of
    one matmul alone.
    """
    remaining = rows_to_fit(rows, program)
    known = informed(remaining)
    values = fit(remaining, START, known, prices)
    for constant in FITTED:
        if constant not in known:
            values[constant] = mean_of_others(constant, {name: values[name] for name in known})
    for constant, (owner, _, replacement) in READ_BY_HAND.items():
        if owner == program:
            values[constant] = replacement
    return values


def mean_of_others(constant: Constant, known: Values) -> float:
    """Returns a constant from those of the same name that were fitted, or its start where none was."""
    owner, name = constant
    others = {other: value for (other, n), value in known.items() if n == name}
    if owner in FAMILIES:
        alike = {
            o: value for o, value in others.items() if o in FAMILIES and is_tpu(o) == is_tpu(owner)
        }
        others = alike or others
    if not others:
        return START[constant]
    if name == "matmul":
        ratio = statistics.mean(value / ALONE[other] for other, value in others.items())
        return round(min(1.0, ALONE[owner] * ratio), 3)
    return round(statistics.mean(others.values()), 3)


def results_of_folds(rows: list[Row]) -> dict[str, Any]:
    """Returns the constants of each fold, the error of each row with those of its program's fold, and their spread."""
    constants: dict[str, dict[str, float]] = {}
    errors: dict[str, float] = {}
    prices = Prices()
    for program in dict.fromkeys(name for _, name in PROGRAMS):
        values = without(rows, program, prices)
        constants[program] = {f"{owner} {name}": value for (owner, name), value in values.items()}
        errors |= errors_of(rows, program, values)
        print(program, flush=True)
    return {"constants": constants, "spread": spreads(rows, errors), "errors": errors}


def errors_of(rows: Iterable[Row], program: str, values: Values) -> dict[str, float]:
    """Returns predicted over measured step time less one, of each row of a program."""
    return {row.id: math.exp(error(row, values)) - 1 for row in rows if program_of(row) == program}


def errors_without_chip_and_program(
    rows: list[Row], folds: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Returns each row's error with constants of neither its chip nor its program.

    The constants are those that `without` fitted for its program, and every constant of its chip is
    that of the other chips. What programs and GPUs have in common was fitted with the chip's rows of
    other programs.

    folds: constants of each program's fold, as the results have them.
    """
    errors: dict[str, float] = {}
    for program, fold in folds.items():
        informed_elsewhere = informed(rows_to_fit(rows, program))
        of_program = [row for row in rows if program_of(row) == program]
        for family in dict.fromkeys(family_of(row) for row in of_program):
            values = read_constants(fold)
            others = {c: values[c] for c in informed_elsewhere if c[0] != family}
            for constant in FITTED:
                if constant[0] == family:
                    values[constant] = mean_of_others(constant, others)
            for constant, (_, _, replacement) in READ_BY_HAND.items():
                if constant[0] == family:
                    values[constant] = replacement
            chosen = [row for row in of_program if family_of(row) == family]
            errors |= errors_of(chosen, program, values)
    return errors


def read_constants(fold: dict[str, float]) -> dict[Constant, float]:
    """Reads the constants of a fold from the results."""
    values = {}
    for key, value in fold.items():
        owner, name = key.rsplit(" ", 1)
        values[owner, name] = value
    return values


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each line of the table."""
    found = {"all programs": rows}
    for program in dict.fromkeys(name for _, name in PROGRAMS):
        found[program] = [row for row in rows if program_of(row) == program]
    for kind, chosen in KINDS.items():
        found[kind] = [row for row in rows if chosen(row)]
    return found


def spreads(rows: list[Row], errors: dict[str, float]) -> dict[str, dict[str, float]]:
    """Returns the spread of errors of each line of the table, and the median with the package's constants."""
    values = current()
    shipped = {row.id: math.exp(error(row, values)) - 1 for row in rows}
    result = {}
    for name, chosen in groups(rows).items():
        usual = spread(shipped[row.id] for row in chosen)
        result[name] = {**spread(errors[row.id] for row in chosen), "shipped": usual["median"]}
    return result


def table(results: dict[str, Any]) -> str:
    """Returns the page's tables: errors, fitted constants, and constants that were read by hand."""
    lines = [
        "| rows | number | median error | 90th percentile | bias | median with the package's constants |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, found in results["spread"].items():
        lines.append(
            f"| {name} | {found['rows']} | {found['median']:.1%} | {found['90th']:.1%} "
            f"| {found['bias']:+.1%} | {found['shipped']:.1%} |"
        )
    lines += [
        "",
        "| constant | fit starts at | without a program | in the package |",
        "|---|---|---|---|",
    ]
    folds = [read_constants(fold) for fold in results["constants"].values()]
    for (owner, name), value in current().items():
        found = [fold[owner, name] for fold in folds]
        lines.append(
            f"| {owner} `{name}` | {START[owner, name]:.2f} | {min(found):.2f} to {max(found):.2f} "
            f"| {value:.2f} |"
        )
    lines += ["", "| not fitted now | set from | without that program |", "|---|---|---|"]
    for (owner, name), (_, source, replacement) in READ_BY_HAND.items():
        lines.append(f"| {owner} `{name}` | {source} | {replacement:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows, _ = read_rows()
    results = results_of_folds(rows)
    LEFT_OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    put_table(PAGE, SCRIPT, table(results))


if __name__ == "__main__":
    main()

"""Fits the constants of hardware/chips.toml and other_programs.py: `python bench/foresight/fit.py`.

It uses the rows whose id has an even hash. Each constant moves in small
steps while the mean absolute logarithm of predicted over measured step time falls.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from other_programs import SOFTWARE, SPEEDS, FusedKernel, estimate_program
from rows import Row, read_rows

from meshwright.hardware.chips import CHIPS, Nodes

FAMILIES: dict[str, list[str]] = {}
"""Chips by family, which have the same fractions of peak."""
for _name, _chip in CHIPS.items():
    FAMILIES.setdefault(_chip.family, []).append(_name)

Constant = tuple[str, str]
"""A family of chips or a program, and the name of its constant."""
Values = Mapping[Constant, float]

# No rate of v6e is fitted here: matmuls, HBM and overlap are read from profiles of others by kind of operation
# (kinds.py); attention and grouped matmuls were fitted earlier, on steps of MaxText. Nor is the attention of b300.
_CHIPS = {
    "matmul": ("v4", "v5e", "v5p", "tpu7x", "a100", "h100", "b200", "b300"),
    "attention": ("v5e", "v5p", "tpu7x", "a100", "h100", "b200"),
    "grouped_matmul": ("tpu7x", "GPU"),
    "flash2": ("h100",),
    "triton": ("a100", "h100"),
}
_PROGRAMS = {
    "sorting": ("Megatron-Core", "Megatron-Core 2026.06"),
    "elementwise": ("MaxText", "PAX", "Megatron-Core", "Megatron-LM", "torchtitan", "PyTorch"),
    "overlap": ("MaxText", "PyTorch"),
    "tensor_overlap": ("Megatron-Core", "torchtitan"),
}
RELEASE_OF = {"PAX": "MaxText", "Megatron-Core 2026.06": "Megatron-Core"}
"""Programs that share the fitted constants of another, except for their own: one compiler, one library."""
FITTED: tuple[Constant, ...] = tuple(
    (owner, name)
    for table in (_CHIPS, _PROGRAMS)
    for name, owners in table.items()
    for owner in owners
)
"""All fitted constants."""


def _first(owner: str) -> str:
    return "h100" if owner == "GPU" else owner


def owners_of(row: Row) -> set[str]:
    """Returns whose constants price a row: its chip's, its program's, and those of all GPUs."""
    name = row.software.name
    owners = {family_of(row), name, RELEASE_OF.get(name, name)}
    owners |= {"GPU"} if isinstance(row.target.chip.interconnect, Nodes) else set()
    return owners


def family_of(row: Row) -> str:
    """Returns the family of a row's chip."""
    return next(name for name, chips in FAMILIES.items() if row.target.name in chips)


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Splits the rows into those to fit on and those to validate on."""
    return [row for row in rows if row.is_fitted], [row for row in rows if not row.is_fitted]


def current() -> dict[Constant, float]:
    """Returns the fitted constants as the package has them."""
    values = {}
    for owner, name in FITTED:
        source = (
            CHIPS[FAMILIES[_first(owner)][0]].efficiency
            if owner in (*FAMILIES, "GPU")
            else SOFTWARE[owner]
        )
        values[owner, name] = (
            SPEEDS[owner, name] if (owner, name) in SPEEDS else float(getattr(source, name))
        )
    return values


def error(row: Row, values: Values) -> float:
    """Returns the logarithm of predicted over measured step time with these constants."""
    family, program, owners = family_of(row), row.software, owners_of(row)
    chips = {
        key: value
        for key, value in values.items()
        if key[0] in (family, "GPU") and key[0] in owners
    }
    own = {name: value for (owner, name), value in chips.items() if (owner, name) not in SPEEDS}
    efficiency = dataclasses.replace(row.target.efficiency, **own)
    theirs: dict[str, float] = {}
    for name in (RELEASE_OF.get(program.name), program.name):
        theirs |= {constant: value for (owner, constant), value in values.items() if owner == name}
    if not program.tensor_overlap:
        theirs.pop("tensor_overlap", None)  # the row says that nothing is cut into pieces
    if isinstance(program.kernel, FusedKernel):
        keys = row.placed.run.training.seq / row.placed.layout.shape.context
        program = dataclasses.replace(
            program, kernel=program.kernel.at(keys, family, {**SPEEDS, **values})
        )
    target = dataclasses.replace(row.target, given_efficiency=efficiency)
    return math.log(
        estimate_program(row.placed, target, dataclasses.replace(program, **theirs)).seconds
        / row.measured
    )


def constants_of(row: Row) -> list[Constant]:
    """Returns the fitted constants that may change a row's price."""
    shape, kernel = row.placed.layout.shape, row.software.kernel
    has_experts = any(layer.experts is not None for layer in row.placed.layout.spec.layers)
    on_gpus = isinstance(row.target.chip.interconnect, Nodes)
    applies = {
        "elementwise": on_gpus,
        "overlap": on_gpus,
        "grouped_matmul": has_experts,
        "sorting": has_experts,
        "tensor_overlap": shape.tensor > 1,
        "flash2": isinstance(kernel, FusedKernel) and kernel.name == "flash2",
        "triton": isinstance(kernel, FusedKernel) and kernel.name == "triton",
    }
    owners = owners_of(row)
    return [(owner, name) for owner, name in FITTED if owner in owners and applies.get(name, True)]


class Prices:
    """Errors of rows, each computed once for the values of the constants that may change it."""

    def __init__(self) -> None:
        self._constants: dict[str, list[Constant]] = {}
        self._logarithms: dict[tuple[str, tuple[float, ...]], float] = {}

    def error(self, row: Row, values: Values) -> float:
        """Returns `error(row, values)`."""
        if row.id not in self._constants:
            self._constants[row.id] = constants_of(row)
        key = (row.id, tuple(values[constant] for constant in self._constants[row.id]))
        if key not in self._logarithms:
            self._logarithms[key] = error(row, values) + math.log(row.measured)
        return self._logarithms[key] - math.log(row.measured)


def fit(
    rows: list[Row], start: Values, fitted: Iterable[Constant], prices: Prices
) -> dict[Constant, float]:
    """Returns the constants with the least error; `fitted` of them move."""
    values, errors = dict(start), {row.id: abs(prices.error(row, start)) for row in rows}
    rows_of = {
        constant: [row for row in rows if constant in constants_of(row)] for constant in fitted
    }
    step = 0.08
    while step > 0.006:
        moved = False
        for constant, affected in rows_of.items():
            for sign in (1, -1):
                traffic = constant[1] in ("elementwise", "sorting")
                most = 3.5 if traffic else 1.3 if constant[1] == "tensor_overlap" else 0.93
                size = step * (4 if traffic else 1)
                least = {"elementwise": 0.8, "sorting": 0.4, "overlap": 0.3}.get(constant[1], 0.1)
                value = round(min(most, max(least, values[constant] + sign * size)), 3)
                changed = {**values, constant: value}
                found = {row.id: abs(prices.error(row, changed)) for row in affected}
                gain = sum(errors[name] - now for name, now in found.items())
                # Constants stay where the rows hardly say otherwise.
                away = abs(value - start[constant]) - abs(values[constant] - start[constant])
                if gain > 1e-6 + (0.05 if constant[1] == "sorting" else 0.3) * away:
                    values, moved = changed, True
                    errors |= found
        step = step if moved else step / 2
    return values


def main() -> None:
    fitted, _ = halves(read_rows()[0])
    for (owner, name), value in fit(fitted, current(), FITTED, Prices()).items():
        print(f"{owner:14} {name:16} {value:.2f}")


if __name__ == "__main__":
    main()

"""Prices of chips: a table with the source and date of every number, which a user can replace.

`data/prices.csv` holds list prices in dollars per chip-hour. A chip without a row has no price: nothing is estimated.
"""

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from meshwright.errors import ConfigError, nearest

PriceTerms = Literal["on-demand", "spot", "committed"]

PRICES_FILE = Path(__file__).with_name("data") / "prices.csv"
TERMS: tuple[PriceTerms, ...] = get_args(PriceTerms)


@dataclasses.dataclass(frozen=True)
class Price:
    """List price of a chip."""

    chip: str
    """Name of the chip, as `--on` takes it."""
    provider: str
    region: str
    terms: PriceTerms
    dollars: float
    """Dollars per chip-hour."""
    source: str
    read_on: str
    """Date at which the source was read."""

    def __str__(self) -> str:
        return f"${self.dollars:g} per chip-hour ({self.provider}, {self.region}, {self.terms})"


def read_prices(file: Path | None = None) -> tuple[Price, ...]:
    """Reads a table of prices, by default the package's own.

    Columns: chip, provider, region, terms (one of `TERMS`), usd_per_chip_hour, source, read_on. Raises ConfigError with
    the line that is wrong.
    """
    file = file or PRICES_FILE
    prices = []
    for line, row in _rows(file, ("chip", "provider", "region", "terms", "usd_per_chip_hour", "source", "read_on")):
        if row["terms"] not in TERMS:
            raise ConfigError(
                f"{file}, line {line}", f"there are no terms {row['terms']!r}", nearest(row["terms"], TERMS)
            )
        dollars = _positive(file, line, row, "usd_per_chip_hour")
        terms = next(terms for terms in TERMS if terms == row["terms"])
        prices.append(Price(row["chip"], row["provider"], row["region"], terms, dollars, row["source"], row["read_on"]))
    return tuple(prices)


def cheapest(prices: Iterable[Price], chip: str, terms: PriceTerms) -> Price | None:
    """Returns the lowest price of a chip on these terms, of all providers and regions; None without one."""
    return min(
        (p for p in prices if p.chip == chip and p.terms == terms), key=lambda price: price.dollars, default=None
    )


def _rows(file: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Line numbers and rows of a table. Raises ConfigError where it cannot be read or lacks a column."""
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"table {file}", f"it cannot be read: {error}", "a CSV file") from error
    lacking = [name for name in columns if name not in (reader.fieldnames or ())]
    if lacking:
        raise ConfigError(f"table {file}", f"it has no column {lacking[0]!r}", f"its first line: {','.join(columns)}")
    for line, row in rows:
        empty = next((name for name in columns if not (row[name] or "").strip()), None)
        if empty:
            raise ConfigError(f"{file}, line {line}", f"{empty} is empty", f"give all of {', '.join(columns)}")
    return rows


def _positive(file: Path, line: int, row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{file}, line {line}", f"{column} is {row[column]!r}", "a positive number")
    return value

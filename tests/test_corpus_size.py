"""What a corpus of 15 T tokens costs before and between steps: no time, memory or open file grows with it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from meshwright.data.feed import build_stream, held_out_border, held_out_order

TRILLIONS = 15 * 10**12


@dataclasses.dataclass(frozen=True)
class Long:
    """Samples of a source, without tokens."""

    size: int
    seq: int = 8192

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": np.int64(index)}


@pytest.mark.parametrize("sizes", [[5], [3, 0, 7], [1, 1, 4, 2]])
def test_held_out_windows_are_taken_from_the_sources_in_turn(sizes: list[int]) -> None:
    parts: list[Any] = [Long(size) for size in sizes]
    expected = [(part, i) for i in range(max(sizes)) for part in parts if i < len(part)]
    for samples in (0, 1, 4, 99):
        assert list(held_out_order(parts, samples)) == expected[: samples or None]


def test_taking_windows_costs_what_is_taken() -> None:
    parts: list[Any] = [Long(TRILLIONS // 8192), Long(3), Long(TRILLIONS // 512)]
    taken = list(held_out_order(parts, 256))
    assert [len([i for part, i in taken if part is p]) for p in parts] == [127, 3, 126]
    stream = build_stream(parts, [0.5, 0.25, 0.25], 0)
    found = [int(stream[10**9 + i]["index"]) for i in range(200)]
    assert len(set(found)) > 100 and max(found) > 2**33


@pytest.mark.parametrize(
    ("total", "held_out", "border"),
    [(1000, None, 900), (2_533_041, None, round(2_533_041 * 0.9)), (10**8, None, 9 * 10**7),
     (TRILLIONS, None, TRILLIONS - 10**7), (TRILLIONS, 0.1, round(TRILLIONS * 0.9)), (1000, 0, 1000)],
)  # fmt: skip
def test_the_default_holds_out_a_tenth_and_no_more_than_an_evaluation_needs(
    total: int, held_out: float | None, border: int
) -> None:
    assert held_out_border(total, held_out) == border

"""The first tensor, in the order of computation,
whose difference between two sources is more than rounding explains.

    first       embedding   layer 0, input   ...   token loss   gradient of token loss   ...
    reference   embedding   layer 0, input   ...
    perturbed   embedding   layer 0, input   ...      the reference, its parameters changed by
                                                      one unit in the last place

A source yields (name, tensor): a recorded step on a mesh, of another checkout or on other devices,
or another program that computes the same model. Sources are read together, so none of them has to
hold all of its tensors at once.

What rounding explains is measured for each tensor, since it depends on how many numbers were
summed, on what cancels, and on the layers before. It is the difference between the reference and
the reference at perturbed parameters: each element is multiplied by 1 + 2^-23 or 1 - 2^-23 at
random (Parker 1997, "Monte Carlo Arithmetic"). Every product of the step then has an error of the
size that rounding gives it, at random, and every sum adds them as it adds its own; sums in another
order, which is what meshes and programs differ by, have errors of that size. The order of sums
itself is not permuted, because that takes a permutation of the model's dimensions, which heads and
rotary pairs do not allow.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from meshwright.models.recording import TensorName

ROUNDING_FACTOR = 8
"""Differences that rounding may cause, in units of the measured rounding error. Measured ratios are
0.3 to 2.4, over families, meshes and tensors of the test suite."""
_ULP = np.float32(2**-23)

Source = Iterable[tuple[TensorName, np.ndarray]]
"""Names and tensors in the order of computation."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of one tensor between two sources, relative to the largest element
    of the reference."""

    name: TensorName
    largest: float
    """Largest difference of an element."""
    rounding: float
    """Largest difference that rounding explains."""
    excess: float
    """Difference over what rounding explains: above 1 it is more. Of the largest element or of the
    root mean square, whichever is more."""
    place: tuple[int, ...]
    """Index of the element with the largest difference;
    of activations the sequence and the position come first."""

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the difference."""
        # `<=` rather than `not >`: a difference that is NaN is not explained.
        return self.excess <= 1

    def __str__(self) -> str:
        return (
            f"{self.name}: differs by {self.largest:.1e} of its scale, and rounding explains "
            f"{self.rounding:.1e}"
        )


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Comparison of two sources, tensor by tensor."""

    sources: tuple[str, str]
    differences: tuple[Difference, ...]
    """In the order of computation."""
    only: tuple[str, ...] = ()
    """Tensors that one source has and the other does not."""

    @property
    def first(self) -> Difference | None:
        """First difference that rounding does not explain; None where it explains all."""
        return next((d for d in self.differences if not d.is_explained), None)

    def by_layer(self) -> list[tuple[str, dict[str, Difference]]]:
        """Returns each layer's worst difference of each pass (`recording.Pass`),
        in the order of the forward pass."""
        rows: dict[tuple[int, int], dict[str, Difference]] = {}
        for difference in self.differences:
            row = rows.setdefault(difference.name.row, {})
            worst = row.get(difference.name.of)
            if worst is None or difference.excess > worst.excess:
                row[difference.name.of] = difference
        return [(_row_name(*place), rows[place]) for place in sorted(rows)]


def _row_name(part: int, layer: int) -> str:
    """Returns the name of a row of the table by layer.
    part: before the layers (0), in them, or after (2)."""
    if part == 1:
        return f"layer {layer}"
    return "before the layers" if part == 0 else "after the layers"


def compare(
    names: tuple[str, str], first: Source, reference: Source, perturbed: Source
) -> Divergence:
    """Compares two sources. names: of the two.
    perturbed: the reference at perturbed parameters (`perturb`).

    A tensor that only one of them yields is not compared, and is named in the result.
    """
    differences: list[Difference] = []
    only: list[str] = []
    for name, arrays in _together((first, reference, perturbed)):
        if len(arrays) < 3:
            only.append(str(name))
            continue
        differences.append(_difference(name, *arrays))
    return Divergence(names, tuple(differences), tuple(only))


def _together(sources: Sequence[Source]) -> Iterator[tuple[TensorName, list[np.ndarray]]]:
    """Yields each name once, in order, with the tensors of the sources that have it."""
    iterators = [iter(source) for source in sources]
    heads = [next(iterator, None) for iterator in iterators]
    while True:
        waiting = [head for head in heads if head is not None]
        if not waiting:
            return
        name = min((head[0] for head in waiting), key=lambda name: (name.order, name))
        arrays = [array for found, array in waiting if found == name]
        yield name, arrays
        for i, head in enumerate(heads):
            if head is not None and head[0] == name:
                heads[i] = next(iterators[i], None)


def _difference(
    name: TensorName, first: np.ndarray, reference: np.ndarray, perturbed: np.ndarray
) -> Difference:
    """Compares one tensor. Where the reference has no number, the first must have none either."""
    if first.shape != reference.shape:
        return Difference(name, math.inf, 0.0, math.inf, ())
    expected = reference.astype(np.float64)
    errors = np.abs(first - expected)
    spread = np.abs(perturbed - expected)
    absent = np.isnan(expected) & np.isnan(first)
    errors[absent] = 0
    spread[absent] = 0
    scale = float(np.nanmax(np.abs(expected), initial=0.0)) or 1.0
    place = np.unravel_index(int(np.argmax(np.nan_to_num(errors, nan=np.inf))), errors.shape)
    largest = float(errors.max(initial=0.0))
    explained = ROUNDING_FACTOR * float(spread.max(initial=0.0))
    excess = max(
        _over(largest, explained),
        _over(_root_mean_square(errors), ROUNDING_FACTOR * _root_mean_square(spread)),
    )
    if math.isnan(largest):
        excess = math.inf
    return Difference(
        name, largest / scale, explained / scale, excess, tuple(int(i) for i in place)
    )


def _root_mean_square(x: np.ndarray) -> float:
    """Returns the root mean square of an array."""
    return math.sqrt(float(np.square(x).mean())) if x.size else 0.0


def _over(difference: float, explained: float) -> float:
    """Returns a difference over what rounding explains; 0 where there is no difference."""
    if not difference:
        return 0.0
    return difference / explained if explained else math.inf


def perturb(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Multiplies each element by 1 + 2^-23 or 1 - 2^-23 at random; zeros stay zero."""
    signs = rng.integers(0, 2, x.shape, np.int8).astype(np.float32) * 2 - 1
    return (x * (1 + _ULP * signs)).astype(np.float32)


def as_json(divergence: Divergence) -> dict[str, Any]:
    """Returns a comparison as JSON has it: a process tells it to others."""
    rows = [
        [*d.name, d.largest, d.rounding, d.excess, list(d.place)] for d in divergence.differences
    ]
    return {"differences": rows, "only": list(divergence.only)}


def divergence_of(sources: tuple[str, str], values: dict[str, Any]) -> Divergence:
    """Inverts `as_json`."""
    differences = []
    for of, name, layer, largest, rounding, excess, place in values["differences"]:
        found = TensorName(of, name, layer)
        differences.append(Difference(found, largest, rounding, excess, tuple(place)))
    return Divergence(sources, tuple(differences), tuple(values["only"]))

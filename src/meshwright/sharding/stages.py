"""Pipeline stages: where each part of the model is, and which layers it has.

Stacked parameters have their rows in this order.
A model of `stages * virtual_stages` parts of consecutive layers is spread over the pipeline stages
by a placement: a loop (part p on stage p mod P) or a V (down the stages and back up). A stacked
parameter keeps its rows in the order of the stages, so that splitting its first dimension over
`stage` gives every device its own layers. Parts of unequal numbers of layers are padded with rows
of zeros that are never read.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

NO_LAYER = -1
"""Row of a stack that holds no layer: padding."""

PartPlacement = Callable[[int, int], int]
"""`(part, stages) -> stage` of a part of the model, parts counted in the order of the layers."""


@dataclasses.dataclass(frozen=True)
class PartMap:
    """Stage and virtual stage of each part of the model."""

    stages: int
    virtual_stages: int
    stage_of: tuple[int, ...]
    """Stage of each part, in the order of the layers."""

    @property
    def last_part(self) -> int:
        """Index of the last part."""
        return len(self.stage_of) - 1

    @property
    def last_stage(self) -> int:
        """Stage of the last part, whose output enters the loss."""
        return self.stage_of[-1]

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Parts of each stage in the order of its virtual stages."""
        parts: list[list[int]] = [[] for _ in range(self.stages)]
        for part, stage in enumerate(self.stage_of):
            parts[stage].append(part)
        return tuple(map(tuple, parts))

    def part(self, stage: int, virtual_stage: int) -> int:
        """Returns the part that is a virtual stage of a stage."""
        return self.parts[stage][virtual_stage]

    def virtual_stage_of(self, part: int) -> int:
        """Returns the virtual stage that a part is on its stage."""
        return self.parts[self.stage_of[part]].index(part)

    def hop(self, part: int) -> int:
        """Returns the stages that the output of a part moves to reach the next part.

        1, -1, or 0 for the same stage.
        """
        distance = (self.stage_of[part + 1] - self.stage_of[part]) % self.stages
        return distance if distance <= 1 else -1


@dataclasses.dataclass(frozen=True)
class StageAssignment(PartMap):
    """Layers of each pipeline stage: the layers cut into parts, and the stage of each part."""

    layer_costs: tuple[float, ...]
    """Cost of each layer, in FLOPs per token."""
    boundaries: tuple[int, ...]
    """First layer of each part, and the number of layers."""

    def layers_in(self, virtual_stage: int, stage: int) -> range:
        """Returns the layers of one virtual stage of a stage."""
        part = self.part(stage, virtual_stage)
        return range(self.boundaries[part], self.boundaries[part + 1])

    def layers_of(self, stage: int) -> list[range]:
        """Returns the layers of a stage, one range for each of its virtual stages."""
        return [self.layers_in(v, stage) for v in range(self.virtual_stages)]

    @property
    def part_costs(self) -> list[float]:
        """Cost of the layers of each part."""
        return [
            sum(self.layer_costs[first:end]) for first, end in itertools.pairwise(self.boundaries)
        ]

    def cost_fraction(self, stage: int) -> float:
        """Returns the fraction of the layers' cost that a stage has."""
        return sum(self.layer_costs[i] for part in self.layers_of(stage) for i in part) / sum(
            self.layer_costs
        )

    @functools.cached_property
    def busiest_fraction(self) -> float:
        """Fraction of the layers' cost that the stage with the most has."""
        return max(self.cost_fraction(stage) for stage in range(self.stages))

    def rows(self, layers: Sequence[int]) -> np.ndarray:
        """Returns the layer in each row of a stack, int32 [stages, virtual_stages, rows].

        NO_LAYER is padding.
        layers: those that the stack holds, counted from the first layer of the model.
        """
        wanted = frozenset(layers)
        parts = []
        for stage in range(self.stages):
            for v in range(self.virtual_stages):
                parts.append([i for i in self.layers_in(v, stage) if i in wanted])
        longest = max(map(len, parts))
        padded = [part + [NO_LAYER] * (longest - len(part)) for part in parts]
        rows = np.array(padded, np.int32)
        return rows.reshape(self.stages, self.virtual_stages, longest)

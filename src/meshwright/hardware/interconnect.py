"""Interconnect model.

Where mesh axes are in the hardware of a target, and which path a collective takes.
Paths, bandwidths and times of groups of devices are those of `xlacensus.interconnect`.
"""

import dataclasses
import functools
import itertools
import math

from meshwright.hardware.chips import chip_name
from meshwright.hardware.machine import Machine
from meshwright.hardware.targets import Target
from meshwright.mesh_shape import MeshShape
from meshwright.words import AXES
from xlacensus.interconnect import GroupSpan, Route, route


@dataclasses.dataclass(frozen=True, eq=False)
class AxisMapping:
    """Extent of each mesh axis in the hardware."""

    target: Target
    spans: dict[str, GroupSpan]
    """Extent of one group of each axis; axes of degree 1 are absent."""
    _routes: dict[tuple[str, ...], Route | None] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def route(self, axes: tuple[str, ...]) -> Route | None:
        """Returns the path of a group over several axes, or None where all have degree 1."""
        if axes not in self._routes:
            span, target = self.span(axes), self.target
            self._routes[axes] = (
                None
                if span is None
                else route(target.chip, target.topology, span, target.efficiency)
            )
        return self._routes[axes]

    def span(self, axes: tuple[str, ...]) -> GroupSpan | None:
        """Returns the extent of a group over several axes, or None where all have degree 1."""
        known = self.spans | self._levels
        spans = [known[axis] for axis in axes if axis in known]
        if not spans:
            return None
        domains = math.prod(span.domains for span in spans)
        chips = tuple(math.prod(along) for along in zip(*(s.chips for s in spans), strict=True))
        return GroupSpan(domains, chips, math.prod(span.cores for span in spans))

    @functools.cached_property
    def _levels(self) -> dict[str, GroupSpan]:
        """Extents of the parts of axes that span slices or nodes.

        Names are those of `hlo.collectives.axes_of_groups`.
        """
        levels = {}
        for axis, span in self.spans.items():
            if 1 < span.domains < span.devices:
                levels[f"{axis} between {span.domains}"] = GroupSpan(
                    span.domains, (1,) * len(span.chips)
                )
                levels[f"{axis} within {span.devices // span.domains}"] = dataclasses.replace(
                    span, domains=1
                )
        return levels

    def __str__(self) -> str:
        return ", ".join(f"{axis} on {format_span(span)}" for axis, span in self.spans.items())


def format_span(span: GroupSpan) -> str:
    """Formats an extent: `ICI x4 y2`, `2 slices x ICI x16`, `8 nodes x 2 GPUs (NVLink)`."""
    on_torus, dims = (
        len(span.chips) > 1,
        [f"{'xyz'[d]}{n}" for d, n in enumerate(span.chips) if n > 1],
    )
    parts = (
        [f"{span.domains} {'slices (DCN)' if on_torus else 'nodes'}"] if span.domains > 1 else []
    )
    parts += (
        ["ICI " + " ".join(dims) if on_torus else f"{span.chips[0]} GPUs (NVLink)"] if dims else []
    )
    return " x ".join([*parts, *([f"{span.cores} devices of a chip"] if span.cores > 1 else [])])


@functools.lru_cache(maxsize=65536)
def map_axes(shape: MeshShape, target: Target) -> AxisMapping:
    """Maps the axes of a mesh to the devices of a target.

    The innermost axis comes first, as in `build_mesh`.
    On a torus an axis takes whole dimensions where its degree is the product of some (as many as
    possible, as JAX's `mesh_utils` does), and factors of several dimensions otherwise. On GPUs the
    innermost axes fill a node.
    """
    degrees = {axis: n for axis, n in shape.degrees().items() if n > 1}
    if not target.chip.on_torus:
        return _map_to_nodes(degrees, target)
    slices = {axis: (shape.slices if axis == shape.dcn_axis else 1) for axis in degrees}
    free, cores = list(target.topology), target.chip.devices_per_chip
    spans: dict[str, GroupSpan] = {}
    for axis in reversed([axis for axis in AXES if axis in degrees]):
        degree = degrees[axis] // slices[axis]
        axis_cores = 1
        if cores > 1 and degree % cores == 0:
            axis_cores = cores
            degree //= cores
            cores = 1
        chips = _take_dimensions(degree, free)
        free = [n // taken for n, taken in zip(free, chips, strict=True)]
        spans[axis] = GroupSpan(slices[axis], chips, axis_cores)
    return AxisMapping(target, {axis: spans[axis] for axis in AXES if axis in spans})


def _take_dimensions(degree: int, free: list[int]) -> tuple[int, ...]:
    """Returns how many free chips an axis of `degree` takes along each dimension."""
    for count in range(len(free), 0, -1):
        for dims in itertools.combinations(range(len(free)), count):
            if all(free[d] > 1 for d in dims) and math.prod(free[d] for d in dims) == degree:
                return tuple(free[d] if d in dims else 1 for d in range(len(free)))
    chips = [1] * len(free)
    # The largest factor of a single dimension first, so that an axis spans as few dimensions as
    # possible.
    while degree > 1:
        factors = [math.gcd(degree, n // taken) for n, taken in zip(free, chips, strict=True)]
        d = max(range(len(free)), key=lambda d: factors[d])
        if factors[d] == 1:
            chips[0] *= degree  # no dimension has such a factor: modelled as one long open chain
            break
        chips[d] *= factors[d]
        degree //= factors[d]
    return tuple(chips)


def _map_to_nodes(degrees: dict[str, int], target: Target) -> AxisMapping:
    """Maps axes to GPU nodes: the innermost axes fill a node, the others span several."""
    node, inner = target.topology[-1], 1
    spans: dict[str, GroupSpan] = {}
    for axis in reversed([axis for axis in AXES if axis in degrees]):
        degree = degrees[axis]
        inside = math.gcd(degree, max(1, node // inner)) if inner < node else 1
        spans[axis] = GroupSpan(degree // inside, (inside,))
        inner *= degree
    return AxisMapping(target, {axis: spans[axis] for axis in AXES if axis in spans})


@functools.lru_cache(maxsize=65536)
def machine_of_target(target: Target, shape: MeshShape) -> Machine:
    """Returns the machine that a mesh of `shape` has on a target."""
    chip, mapping = target.chip, map_axes(shape, target)
    spans = ((axis, tuple(n for n in span.chips if n > 1)) for axis, span in mapping.spans.items())
    torus = tuple((axis, chips) for axis, chips in spans if len(chips) > 1)
    return Machine(chip.platform, chip_name(chip.name), True, chip.name, torus, chip, mapping)

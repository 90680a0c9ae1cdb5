"""Degrees of the mesh axes: how many devices each way of splitting a run has."""

import dataclasses
import math
from typing import Annotated

from meshwright.declarations import changes, refused
from meshwright.errors import ConfigError, nearest
from meshwright.words import AXES, AXIS_ALIASES

_STATED_BY_FAMILIES = refused(
    "wrap",
    because="it splits parts of a transformer that only a model family states",
    instead="axes among data, fsdp, tensor",
)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Degrees of the mesh axes. An axis of degree 1 costs nothing.

    Example:
        >>> shape = mw.MeshShape.parse("data=2,fsdp=4,tensor=8")
        >>> shape.size, shape == mw.MeshShape(data=2, fsdp=4, tensor=8)
        (64, True)
    """

    stage: Annotated[
        int,
        changes("program", "evaluation", "plan"),
        refused(
            "preferences",
            because=(
                "the reference is a second forward pass of each microbatch, which a schedule of "
                "stages does not have"
            ),
            instead="fsdp={fsdp} instead of stage={stage}",
        ),
        _STATED_BY_FAMILIES,
    ] = 1
    data: Annotated[int, changes("program", "evaluation", "plan")] = 1
    fsdp: Annotated[int, changes("program", "evaluation", "plan")] = 1
    expert: Annotated[int, changes("program", "evaluation", "plan"), _STATED_BY_FAMILIES] = 1
    context: Annotated[int, changes("program", "evaluation", "plan"), _STATED_BY_FAMILIES] = 1
    tensor: Annotated[int, changes("program", "evaluation", "plan")] = 1
    slices: Annotated[int, changes("program", "plan")] = 1
    """Parts of the machine joined by the data-centre network: slices of TPUs, nodes of GPUs."""
    dcn_axis: Annotated[str, changes("program", "evaluation", "plan")] = "data"
    """DCN axis: the one axis that crosses slices; all others lie inside a slice."""

    def __post_init__(self) -> None:
        if self.dcn_axis not in AXES or self.slices < 1:
            raise ConfigError(
                f"{self.slices} slices with DCN axis {self.dcn_axis!r}",
                "a mesh has at least one slice, and one of its axes crosses them",
                f"one of {', '.join(AXES)}",
            )
        degree = self.degrees()[self.dcn_axis]
        if degree % self.slices:
            raise ConfigError(
                f"mesh axis {self.dcn_axis}={degree} across {self.slices} slices",
                f"{degree} = {degree // self.slices} * {self.slices} + {degree % self.slices}",
                f"{self.dcn_axis}={self.slices}*{max(1, round(degree / self.slices))}",
            )
        for axis, count in self.degrees().items():
            if count < 1:
                raise ConfigError(
                    f"mesh axis {axis}={count}",
                    "a degree is a number of devices, so at least 1",
                    f"{axis}=1",
                )

    def degrees(self) -> dict[str, int]:
        """Returns the degree of every axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """Number of devices: the product of all degrees."""
        return self.over(tuple(AXES))

    def over(self, axes: tuple[str, ...]) -> int:
        """Returns the product of the degrees of `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def __str__(self) -> str:
        def text(axis: str, degree: int) -> str:
            crosses = axis == self.dcn_axis and self.slices > 1
            return (
                f"{axis}={self.slices}*{degree // self.slices}" if crosses else f"{axis}={degree}"
            )

        return (
            ",".join(text(axis, degree) for axis, degree in self.degrees().items() if degree > 1)
            or "data=1"
        )

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parses `data=2,fsdp=2,tensor=2`; `data=4*2` means 4 slices of 2.
        Raises ConfigError on anything else."""
        degrees: dict[str, int] = {}
        slices, dcn_axis = 1, "data"
        for part in text.split(","):
            axis, equals, degree = part.strip().partition("=")
            if axis not in AXES:
                known = next(
                    (ours for ours, names in AXIS_ALIASES.items() if axis.lower() in names.split()),
                    None,
                )
                fix = f"{known}={degree or 'N'}" if known else nearest(axis.lower(), AXES)
                raise ConfigError(f"mesh {text!r}", f"{axis!r} is not a mesh axis", fix)
            if axis in degrees:
                raise ConfigError(
                    f"mesh {text!r}", f"{axis!r} is given twice", "give each axis once"
                )
            outer, star, inner = degree.partition("*")
            if (
                not equals
                or not outer.isdecimal()
                or (star and not inner.isdecimal())
                or len(degree) > 18
            ):
                raise ConfigError(
                    f"mesh {text!r}", f"{part!r} is not axis=degree", "for example data=2,fsdp=4"
                )
            if star and slices > 1:
                raise ConfigError(
                    f"mesh {text!r}",
                    f"{dcn_axis} and {axis} both cross slices",
                    "one axis that does, say data=4*2",
                )
            if star:
                slices, dcn_axis = int(outer), axis
            degrees[axis] = int(outer) * int(inner or 1)
        return cls(**degrees, slices=slices, dcn_axis=dcn_axis)

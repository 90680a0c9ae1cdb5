"""Several pictures side by side."""

import dataclasses
from typing import Any, Protocol


class Picture(Protocol):
    """Picture that renders itself as SVG and prints as text: an array, a mesh, a machine or a schedule."""

    def svg(self) -> str:
        """Returns the picture as SVG."""


@dataclasses.dataclass(frozen=True)
class PictureRow:
    """Pictures side by side in a notebook, one below the other in a terminal."""

    pictures: tuple[Picture, ...]

    def _repr_html_(self) -> str:
        cells = "".join(f"<div>{picture.svg()}</div>" for picture in self.pictures)
        return f'<div style="display:flex;flex-wrap:wrap;gap:1.2rem;align-items:flex-start">{cells}</div>'

    def __str__(self) -> str:
        return "\n".join(str(picture) for picture in self.pictures)


def side_by_side(*pictures: Any) -> PictureRow:
    """Returns a row of pictures, for the last line of a notebook's cell: `side_by_side(draw(x), draw(y))`."""
    return PictureRow(pictures)

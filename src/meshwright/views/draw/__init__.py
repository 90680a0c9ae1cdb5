"""Pictures of arrays, meshes, machines and pipeline schedules from abstract shapes: terminal, SVG, notebooks."""

from meshwright.views.draw.blocks import ArrayPicture, LocalPicture, draw, local_view, picture_of
from meshwright.views.draw.machine import MachinePicture, draw_machine, machine_of, parse_machine
from meshwright.views.draw.row import PictureRow, side_by_side
from meshwright.views.draw.timeline import PipelineTimeline

__all__ = [
    "ArrayPicture", "LocalPicture", "MachinePicture", "PictureRow", "PipelineTimeline", "draw", "draw_machine",
    "local_view", "machine_of", "parse_machine", "picture_of", "side_by_side",
]  # fmt: skip

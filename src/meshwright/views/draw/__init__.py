"""Pictures of arrays, meshes, machines and pipeline schedules from abstract shapes: terminal, SVG, notebooks."""

from meshwright.views.draw.arrays import ArrayPicture as ArrayPicture
from meshwright.views.draw.arrays import LocalPicture as LocalPicture
from meshwright.views.draw.arrays import draw as draw
from meshwright.views.draw.arrays import local_view as local_view
from meshwright.views.draw.arrays import picture_of as picture_of
from meshwright.views.draw.machine import MachinePicture as MachinePicture
from meshwright.views.draw.machine import draw_machine as draw_machine
from meshwright.views.draw.machine import machine_of as machine_of
from meshwright.views.draw.machine import parse_machine as parse_machine
from meshwright.views.draw.picture import PictureRow as PictureRow
from meshwright.views.draw.picture import side_by_side as side_by_side
from meshwright.views.draw.timeline import PipelineTimeline as PipelineTimeline

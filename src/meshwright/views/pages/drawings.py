"""Blocks of a page that draw devices: a mesh over a machine, the blocks of tensors, the ticks of a pipeline."""

import dataclasses
from collections.abc import Mapping, Sequence

from meshwright.views.pages.blocks import Block


@dataclasses.dataclass(frozen=True)
class Panel:
    """Devices of one node, or of one plane of a torus."""

    caption: str
    rows: int
    columns: int
    cells: Sequence[tuple[int, int, int]]
    """Device, row and column of each cell."""


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Axes of a mesh on a machine."""

    axes: Sequence[tuple[str, int]]
    """Name and degree of each mesh axis of more than one device, outermost first."""
    summaries: Sequence[str]
    """Links along each of these axes."""


@dataclasses.dataclass(frozen=True)
class Machine(Block):
    """Mesh over a machine; the devices that communicate along the chosen axis have one colour."""

    mesh: MeshAxes
    panels: Sequence[Panel]
    link: str = ""
    """Selection whose mesh is shown, where `meshes` has it."""
    meshes: Mapping[str, MeshAxes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TensorPlacement:
    """One tensor, sharded and gathered."""

    name: str
    dims: Sequence[str]
    """Letter of each dimension."""
    shape: Sequence[int]
    sharded: Sequence[Sequence[int]]
    """For each dimension the axes that split it, as indices into the axes of the block."""
    gathered: Sequence[Sequence[int]]
    sharded_text: str
    gathered_text: str
    bytes_sharded: int
    """Bytes on one device between steps."""
    bytes_gathered: int
    """Bytes on one device while it is used, of one layer where it is stacked."""
    stacked: bool
    """Whether its first dimension counts layers, which are gathered one at a time."""


@dataclasses.dataclass(frozen=True)
class Placement(Block):
    """Blocks of any tensor and the devices that hold them; sliders over tensors, sharded and gathered."""

    axes: Sequence[tuple[str, int]]
    devices: int
    tensors: Sequence[TensorPlacement]
    first: str
    """Tensor that is shown when the page opens."""


@dataclasses.dataclass(frozen=True)
class PipelineTasks:
    """Tasks of a schedule, a list for each field."""

    tick: Sequence[int]
    stage: Sequence[int]
    place: Sequence[int]
    """Row of the task in its stage."""
    kind: Sequence[int]
    """1 forward, 2 backward, 3 input gradient, 4 weight gradient (`sharding.schedule_table`)."""
    part: Sequence[int]
    """Virtual stage."""
    microbatch: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Pipeline(Block):
    """Schedule of a pipeline; hovering a task shows its microbatch on all stages, and live inputs are drawn below."""

    stages: int
    ticks: int
    places: int
    virtual_stages: int
    microbatches: int
    tasks: PipelineTasks
    live: Sequence[Sequence[int]]
    """Inputs that each stage holds in each tick."""

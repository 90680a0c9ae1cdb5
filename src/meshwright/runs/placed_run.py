"""A run placed on a mesh, computed once: parameters, placements, stages, schedule, sequence.

Everything here is arithmetic on shapes: no device and no array is needed. A run that does not fit
its mesh is refused here, before anything is traced.
"""

import dataclasses
import functools
import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.comm.hierarchical import Axes, DcnAxis
from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.models.flops import layer_flops
from meshwright.models.model import Model, ModelSpec, vocab_size
from meshwright.runs.checks import (
    check_batch,
    check_composition,
    check_fine_tuning,
    check_saved,
    check_sequence,
    check_sizes,
    check_ulysses,
)
from meshwright.runs.run import Run
from meshwright.sharding.layer_cuts import assign_layers, loop_placement
from meshwright.sharding.layouts import VOCAB_AXES, find_layout
from meshwright.sharding.params import Param, Tree, named_leaves
from meshwright.sharding.placed_params import REFERENCE, frozen_params, place_params, reorder_stacks
from meshwright.sharding.placement import Placements
from meshwright.sharding.sequence import SequenceSplit, split_sequence
from meshwright.sharding.stages import NO_LAYER, PartPlacement, StageAssignment

if TYPE_CHECKING:
    from meshwright.sharding.schedule_table import ScheduleTable

Leaves = tuple[tuple[str, Param, Placements], ...]
"""Path, description and placements of parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLayout:
    """Parameters of a model on a mesh, whatever the options of training.

    `place_run` gives equal layouts as one object, so a function of a layout can be cached:
    `functools.lru_cache`.
    """

    model: Model
    """The model, its vocabulary padded so that `stage` and `tensor` divide it."""
    shape: MeshShape
    """Degrees of the mesh axes."""
    params: Tree
    """Descriptions of the parameters (`Param`), the rows of stacks in the order of the stages."""
    placements: Tree
    """The same tree of `Placements`."""
    stages: StageAssignment
    """Layers of each pipeline stage."""
    spec: ModelSpec
    """Facts of the model."""
    expert_axes: Axes = ()
    """Axes that split experts, those with more than one device."""

    @property
    def routed_parts(self) -> int:
        """Parts of a sequence, one for each device of `tensor`, that are sent to experts.

        1: each sends all of it.
        """
        return self.shape.tensor if "tensor" in self.expert_axes else 1

    @functools.cached_property
    def leaves(self) -> Leaves:
        """Path, description and placements of every parameter."""
        by_path = named_leaves(self.placements)
        return tuple((path, p, by_path[path]) for path, p in named_leaves(self.params).items())


@dataclasses.dataclass(frozen=True)
class PlacedRun:
    """A run that knows its mesh: parameters, placements, pipeline stages and the split sequence."""

    run: Run
    """The run, its mesh filled in and its vocabulary padded so that `stage` and `tensor` divide it.
    """
    layout: ModelLayout
    """Its parameters on the mesh."""

    @property
    def dcn(self) -> DcnAxis:
        """Axis that crosses slices."""
        return DcnAxis(self.layout.shape.slices, self.layout.shape.dcn_axis)

    @property
    def sums_gradients_last(self) -> bool:
        """Whether replicas sum all gradients once, after the backward pass.

        Otherwise they do so layer by layer.
        So do several microbatches, pipeline stages and low precision, and models whose layers are
        not known.
        """
        training = self.run.training
        several = training.microbatches > 1 or self.layout.shape.stage > 1
        return several or training.matmul_precision != "compute" or not self.run.model.states_layers

    @property
    def units(self) -> int:
        """Units of the model in a sample: the tokens of its sequence, or one example."""
        return self.run.model.units(self.run.training.seq)

    @functools.cached_property
    def sequence(self) -> SequenceSplit:
        """Positions of the sequence on each device of `context`."""
        training, heads = self.run.training, self.layout.spec.kv_heads
        local_heads = 1 if heads is None else max(1, heads // self.layout.shape.tensor)
        return split_sequence(
            training.context_strategy, training.seq, self.layout.shape.context, local_heads
        )

    @functools.cached_property
    def schedule_table(self) -> "ScheduleTable":
        """Tasks of each pipeline stage in each tick of a training step."""
        training = self.run.training
        table = _schedules().build_table(
            training.pipeline_schedule,
            self.layout.shape.stage,
            training.microbatches,
            self.layout.stages.virtual_stages,
        )
        if training.stage_saves == "layers" and table.splits_backward:
            # Simulated devices crash in such a program (docs/log.md); no accelerator has run it.
            raise ConfigError(
                f"--training.stage-saves layers with the pipeline schedule "
                f"{training.pipeline_schedule}",
                "its backward passes are split in two, and the second would read what the first "
                "has kept",
                "--training.stage-saves input, or a schedule with undivided backward passes: "
                "1f1b, interleaved, zbv",
            )
        return table

    def forward_table(self, microbatches: int) -> "ScheduleTable":
        """Returns the tasks of a forward pass only: evaluation and sampling."""
        name = self.run.training.pipeline_schedule
        return _schedules().build_forward_table(
            name, self.layout.shape.stage, microbatches, self.layout.stages.virtual_stages
        )


def place_run(run: Run, shape: MeshShape | None = None) -> PlacedRun:
    """Places `run` on the mesh `shape` (its own mesh, or one device, where none is given).

    Raises ConfigError where the batch, the sequence or a parameter does not divide, naming it and
    the nearest legal sizes, and where two features of the run do not go together.
    """
    check_sizes(run)
    shape = shape or run.mesh or MeshShape()
    placed: PlacedRun = run.model.place(with_safe_choices(run), shape, _place_by_layers)
    return placed


def _place_by_layers(model: Model, run: Run, shape: MeshShape) -> PlacedRun:
    training = run.training
    run = dataclasses.replace(run, mesh=shape)
    for check in (check_batch, check_saved, check_fine_tuning, check_sequence):
        check(run, shape)
    vocab_size(run.model)
    check_composition(run)
    multiple = math.lcm(run.model.vocab_multiple, shape.over(VOCAB_AXES))
    if multiple != run.model.vocab_multiple:
        run = dataclasses.replace(
            run, model=dataclasses.replace(run.model, vocab_multiple=multiple)
        )
    # Without adapters nothing in the layout depends on dtypes.
    adapts = (
        run.finetune
        if run.finetune.method == "lora" or run.finetune.objective == "preferences"
        else None
    )
    layout = _place_params(
        run.model,
        shape,
        run.layout,
        run.fsdp_min_size,
        training.seq,
        (training.pipeline_schedule, training.virtual_stages),
        adapts,
        training.compute_dtype if adapts else "",
    )
    check_ulysses(run, shape)
    return PlacedRun(run, layout)


_SAFE: dict[str, Any] = {
    "microbatches": 1,
    "remat": "full",
    "stage_saves": "input",
    "pipeline_schedule": "1f1b",
    "context_strategy": "ring",
}
"""Values of options still open here: where the chip is known, the planner has chosen before
(`with_choices`)."""


def with_safe_choices(run: Run) -> Run:
    """Returns the run with choices that hold on any chip.

    They replace `auto` and open microbatches.
    Where layers are not known, the remat policy stays: there `auto` is a policy of its own.
    """
    names = _SAFE if run.model.states_layers else ("microbatches",)
    chosen = {name: _SAFE[name] for name in names if getattr(run.training, name) in ("auto", 0)}
    training = dataclasses.replace(run.training, **chosen) if chosen else run.training
    return dataclasses.replace(
        run, layout="fsdp" if run.layout == "auto" else run.layout, training=training
    )


def _schedules() -> ModuleType:
    from meshwright.sharding import schedules  # most runs have one stage

    return schedules


@functools.lru_cache(maxsize=4096)
def _place_params(
    model: Model,
    shape: MeshShape,
    layout: str,
    min_size: int,
    seq: int,
    schedule: tuple[str, int],
    tuning: FineTune | None,
    dtype: Any,
) -> ModelLayout:
    """Returns the layout of a model on a mesh.

    schedule: name of the pipeline schedule and `training.virtual_stages`.  tuning: None trains all
    parameters.  dtype: compute dtype of a fine-tuning run, "" for others.
    """
    described = model.params()
    _check_sizes(model, described)
    spec = model.spec()
    stages = _assign_stages(model, spec, shape.stage, schedule, seq)
    if tuning is not None and tuning.method == "lora":
        from meshwright.models.adapters import adapted_params

        described = adapted_params(described, tuning, dtype)
    elif tuning is not None:
        described = {**described, REFERENCE: frozen_params(described, dtype)}
    params = reorder_stacks(described, _orders_of_stacks(spec, stages))
    table = find_layout(layout)
    placements = place_params(params, layout=table, mesh=shape, min_size=min_size)
    expert_axes = tuple(axis for axis in table.table.get("E", ()) if shape.degrees()[axis] > 1)
    return ModelLayout(model, shape, params, placements, stages, spec, expert_axes)


def _check_sizes(model: Model, described: Tree) -> None:
    """Raises ConfigError for a parameter with a dimension below 1.

    The sizes of a family from outside the package have any name, and no range.
    """
    for path, param in named_leaves(described).items():
        if min(param.shape, default=1) < 1:
            shape = list(param.shape)
            truth = f"its parameter {path} has the shape {shape}: a dimension is at least 1"
            raise ConfigError(f"the model {model}", truth, "sizes of the model above 0")


def _assign_stages(
    model: Model, spec: ModelSpec, stages: int, schedule: tuple[str, int], seq: int
) -> StageAssignment:
    """Returns the layers of each pipeline stage, cut so that stages cost about the same FLOPs."""
    name, asked = schedule
    virtual_stages = 1
    placement: PartPlacement = loop_placement
    if stages > 1 or name != _SAFE["pipeline_schedule"]:
        pipeline = _schedules().find_schedule(name)  # refuses an unknown name on any mesh
        if stages > 1:
            virtual_stages = pipeline.virtual_stages_for(asked)
            placement = pipeline.placement
    return assign_layers(layer_flops(model, seq), stages, virtual_stages, placement, spec.period)


def _orders_of_stacks(spec: ModelSpec, stages: StageAssignment) -> dict[str, tuple[int, ...]]:
    """Returns, for each stack of parameters, the layer in each row; NO_LAYER is padding."""
    orders = {}
    for stack in spec.stacks:
        layers = spec.layers_of(stack)
        row_of = {layer: row for row, layer in enumerate(layers)}
        row_of[NO_LAYER] = NO_LAYER
        orders[stack] = tuple(row_of[int(layer)] for layer in stages.rows(layers).flat)
    return orders

"""A run placed on a mesh, computed once: parameters, placements, stages, schedule, sequence.

Everything here is arithmetic on shapes: no device and no array is needed. A run that does not fit its mesh is refused
here, before anything is traced.
"""

import dataclasses
import functools
import math
import operator
from typing import TYPE_CHECKING, Any, cast

from meshwright.comm.hierarchical import DcnAxis
from meshwright.config import MeshShape, Training
from meshwright.data.ramp import ramp_of
from meshwright.errors import ConfigError, divisors
from meshwright.fine_tuning import FineTune
from meshwright.models.flops import layer_flops
from meshwright.models.model import Model, ModelSpec, vocab_size
from meshwright.runs.composition import check_composition
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, VOCAB_AXES, find_layout
from meshwright.sharding.params import Param, Tree, named_leaves, place_params, reorder_stacks
from meshwright.sharding.placement import Placements
from meshwright.sharding.sequence import SequenceSplit, split_sequence
from meshwright.sharding.stages import NO_LAYER, PartPlacement, StageAssignment, assign_layers, loop_placement

if TYPE_CHECKING:
    from meshwright.sharding.schedule_table import ScheduleTable
    from meshwright.sharding.schedules import PipelineSchedule

Leaves = tuple[tuple[str, Param, Placements], ...]
"""Path, description and placements of parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLayout:
    """Parameters of a model on a mesh, whatever the options of training.

    `place_run` gives equal layouts as one object, so a function of a layout can be cached: `functools.lru_cache`.
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

    @functools.cached_property
    def leaves(self) -> Leaves:
        """Path, description and placements of every parameter."""
        by_path = named_leaves(self.placements)
        return tuple((path, p, by_path[path]) for path, p in named_leaves(self.params).items())

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Facts of the model."""
        return _spec(self.model)


@dataclasses.dataclass(frozen=True)
class PlacedRun:
    """A run that fits its mesh, with everything that follows from the two."""

    run: Run
    """The run, its mesh filled in and its vocabulary padded so that `stage` and `tensor` divide it."""
    layout: ModelLayout
    """Its parameters on the mesh."""

    @property
    def params(self) -> Tree:
        """Descriptions of the parameters (`Param`), the rows of stacks in the order of the stages."""
        return self.layout.params

    @property
    def placements(self) -> Tree:
        """Placements of the parameters."""
        return self.layout.placements

    @property
    def stages(self) -> StageAssignment:
        """Layers of each pipeline stage."""
        return self.layout.stages

    @property
    def leaves(self) -> Leaves:
        """Path, description and placements of every parameter."""
        return self.layout.leaves

    @property
    def shape(self) -> MeshShape:
        """Degrees of the mesh axes."""
        return self.layout.shape

    @property
    def spec(self) -> ModelSpec:
        """Facts of the model."""
        return self.layout.spec

    @property
    def dcn(self) -> DcnAxis:
        """Axis that crosses slices."""
        return DcnAxis(self.shape.slices, self.shape.dcn_axis)

    @property
    def virtual_stages(self) -> int:
        """Chunks of layers on each pipeline stage."""
        return self.stages.virtual_stages

    @property
    def sums_gradients_last(self) -> bool:
        """Whether replicas sum all gradients once, after the backward pass, and not layer by layer within it.

        So do several microbatches, pipeline stages and low precision.
        """
        training = self.run.training
        return training.microbatches > 1 or self.shape.stage > 1 or training.matmul_precision != "compute"

    @functools.cached_property
    def sequence(self) -> SequenceSplit:
        """Positions of the sequence on each device of `context`."""
        training, heads = self.run.training, self.spec.kv_heads
        local_heads = 1 if heads is None else max(1, heads // self.shape.tensor)
        return split_sequence(training.context_strategy, training.seq, self.shape.context, local_heads)

    @property
    def schedule(self) -> "PipelineSchedule":
        """Pipeline schedule of the run."""
        from meshwright.sharding.schedules import find_schedule  # loaded for runs with stages

        return find_schedule(self.run.training.pipeline_schedule)

    @functools.cached_property
    def schedule_table(self) -> "ScheduleTable":
        """Tasks of each pipeline stage in each tick of a training step."""
        from meshwright.sharding.schedules import build_table

        training = self.run.training
        table = build_table(training.pipeline_schedule, self.shape.stage, training.microbatches, self.virtual_stages)
        if training.stage_saves == "layers" and table.splits_backward:
            # Simulated devices crash in such a program (docs/log.md); no accelerator has run it.
            raise ConfigError(
                f"--training.stage-saves layers with the pipeline schedule {training.pipeline_schedule}",
                "its backward passes are split in two, and the second would read what the first has kept",
                "--training.stage-saves input, or a schedule with whole backward passes: 1f1b, interleaved, zbv",
            )
        return table

    def forward_table(self, microbatches: int) -> "ScheduleTable":
        """Returns the tasks of a forward pass alone: evaluation and sampling."""
        from meshwright.sharding.schedules import build_forward_table

        name = self.run.training.pipeline_schedule
        return build_forward_table(name, self.shape.stage, microbatches, self.virtual_stages)


def place_run(run: Run, shape: MeshShape | None = None) -> PlacedRun:
    """Places `run` on the mesh `shape` (its own mesh, or one device, where none is given).

    Raises ConfigError where the batch, the sequence or a parameter does not divide, naming it and the nearest legal
    sizes, and where two features of the run do not go together.
    """
    check_sizes(run)
    shape = shape or run.mesh or MeshShape()
    run = dataclasses.replace(run, training=_without_auto(run.training))
    _check_batch(run, shape)
    if run.training.saved_layers or run.training.stage_saves == "layers":
        from meshwright.runs.saved import check_saved  # most runs recompute by one policy

        check_saved(run, shape)
    if run.finetune != FineTune():
        from meshwright.runs.fine_tuning import check_fine_tuning  # most runs train all parameters on all of a text

        check_fine_tuning(run, shape)
    _check_sequence(run, shape)
    vocab_size(run.model)
    check_composition(dataclasses.replace(run, mesh=shape), uneven=False)
    multiple = math.lcm(run.model.vocab_multiple, shape.over(VOCAB_AXES))
    model = run.model
    if multiple != model.vocab_multiple:
        model = dataclasses.replace(model, vocab_multiple=multiple)
    training = run.training
    schedule = (training.pipeline_schedule, training.virtual_stages)
    # Without adapters nothing of the layout depends on the types.
    adapts = run.finetune if run.finetune.method == "lora" or run.finetune.objective == "preferences" else None
    dtype = training.compute_dtype if adapts else ""
    layout = _place_params(model, shape, run.layout, run.fsdp_min_size, training.seq, schedule, adapts, dtype)
    placed = PlacedRun(dataclasses.replace(run, mesh=shape, model=model), layout)
    check_composition(placed.run, uneven=_uneven(layout))
    if shape.context > 1 and run.training.context_strategy == "ulysses":
        from meshwright.runs.ulysses import check_ulysses  # loaded for runs that ask for it

        check_ulysses(placed)
    return placed


_SAFE: dict[str, Any] = {"remat": "full", "stage_saves": "input", "pipeline_schedule": "1f1b"}
"""Values for `auto`: the planner chooses before, where it knows the chip."""


def _without_auto(training: Training) -> Training:
    return dataclasses.replace(
        training, **{name: value for name, value in _SAFE.items() if getattr(training, name) == "auto"}
    )


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
    """The layout of a run, which depends on nothing else of it."""
    chunks, placement = 1, cast(PartPlacement, loop_placement)
    if shape.stage > 1 or schedule[0] != _SAFE["pipeline_schedule"]:
        from meshwright.sharding.schedules import find_schedule

        pipeline = find_schedule(schedule[0])  # refuses an unknown name on any mesh
        if shape.stage > 1:
            chunks, placement = pipeline.virtual_stages_for(schedule[1]), pipeline.placement
    described = model.params()
    for path, param in named_leaves(described).items():
        if min(param.shape, default=1) < 1:  # sizes of a family from outside the package have any name
            truth = f"its parameter {path} has the shape {list(param.shape)}: a dimension is at least 1"
            raise ConfigError(f"the model {model}", truth, "sizes of the model above 0")
    spec = model.spec()
    stages = assign_layers(layer_flops(model, seq), shape.stage, chunks, placement, spec.period)
    orders = {}
    for stack in spec.stacks:
        layers = spec.layers_of(stack)
        place = {layer: row for row, layer in enumerate(layers)} | {NO_LAYER: NO_LAYER}
        orders[stack] = tuple(place[int(layer)] for layer in stages.rows(layers).flat)
    if tuning is not None:
        # Loaded for runs with frozen parameters.
        from meshwright.models.preferences import tuned_params

        described = tuned_params(described, tuning, dtype)
    params = reorder_stacks(described, orders)
    placements = place_params(params, layout=find_layout(layout), mesh=shape, min_size=min_size)
    return ModelLayout(model, shape, params, placements, stages)


@functools.lru_cache(maxsize=256)
def _spec(model: Model) -> ModelSpec:
    return model.spec()


@functools.lru_cache(maxsize=4096)
def _uneven(layout: ModelLayout) -> bool:
    """Whether some stage has padding rows in some stack."""
    return any(NO_LAYER in layout.stages.rows(layout.spec.layers_of(stack)) for stack in layout.spec.stacks)


def _check_batch(run: Run, shape: MeshShape) -> None:
    training = run.training
    parts = shape.over(BATCH_AXES) * training.microbatches
    for batch in ramp_of(training).sizes:
        if batch < 1 or batch % parts:
            below, above = batch // parts * parts, (batch // parts + 1) * parts
            option = "--batch" if batch == training.batch else "--training.batch-ramp with"
            raise ConfigError(
                f"batch of {batch} sequences on mesh {shape} in {training.microbatches} microbatch(es)",
                f"{' * '.join(BATCH_AXES)} * microbatches = {parts}, and {batch} = "
                f"{batch // parts} * {parts} + {batch % parts}",
                f"{option} {above}" + (f" or {below}" if below > 0 else ""),
            )


def _check_sequence(run: Run, shape: MeshShape) -> None:
    seq = run.training.seq
    # With context parallelism each device has one chunk from the front and one from the back (load balancing).
    parts = (2 if shape.context > 1 else 1) * shape.context * shape.tensor
    if seq < 1 or seq % parts:
        legal = ", ".join(str(d) for d in divisors(max(seq, 1)) if d <= 64)
        axes = f"tensor={shape.tensor}" + (f", context={shape.context}" if shape.context > 1 else "")
        raise ConfigError(
            f"sequences of {seq} tokens on {axes}",
            f"between blocks the sequence is split into {parts}, and {seq} = {seq // parts} * {parts} + {seq % parts}",
            f"--seq {(seq // parts + 1) * parts}, or tensor"
            + (" * context" if shape.context > 1 else "")
            + f" of {legal}",
        )
    longest = run.model.spec().max_seq
    if longest is not None and seq > longest:
        raise ConfigError(
            f"sequences of {seq} tokens", f"the model has {longest} positions", f"--seq {longest}, or more positions"
        )


_COUNTED = frozenset({"vocab", "vocab_multiple", "width", "layers", "heads", "kv_heads", "head_size", "mlp"})
"""Sizes that every model has one of at least; others, such as shared experts, may be 0."""
_FROM_1 = "steps batch seq microbatches virtual_stages unroll logits_mib max_to_keep log_every attention_block"
_FROM_0 = "data.sample data.sample_every optimizer.warmup_steps training.eval_every training.eval_samples fsdp_min_size"
"""Whole numbers, of the training those of at least 1, and those of at least 0."""


def check_sizes(run: Run) -> None:
    """Raises ConfigError for a number of the run that is out of range, and for a size of its model that is none."""
    low = {**{f"training.{name}": 1 for name in _FROM_1.split()}, **dict.fromkeys(_FROM_0.split(), 0)}
    given = [(name, operator.attrgetter(name)(run), least) for name, least in low.items()]
    for field in dataclasses.fields(run.model):
        counted = field.name in _COUNTED and field.default != 0  # of DeepSeek's key/value heads there are none
        given.append((f"model.{field.name}", getattr(run.model, field.name), int(counted)))
    for name, size, least in given:
        most = 10**5 if name == "model.layers" else 2**62
        if (type(size) is int and not least <= size <= most) or (type(size) is float and not math.isfinite(size)):
            option = f"--{name.replace('_', '-')}"
            truth = f"it is at least {least}" if size < least else f"it is a number up to {most}"
            raise ConfigError(f"{option} {size}", truth, f"{option} {max(1, -size)}")
    _check_numbers(run)


def _check_numbers(run: Run) -> None:
    t, o, d, inf = run.training, run.optimizer, run.data, math.inf
    for option, value, truth, right, fix in (
        ("training.steps", t.steps, "its samples are counted in 64 bits", t.steps * t.batch < 2**62, "1000000"),
        ("training.save-every", t.save_every, "it counts steps; 0 saves at the end", t.save_every >= 0, 0),
        ("training.seed", t.seed, "it is from 0 to 2^32 - 1", 0 <= t.seed < 2**32, t.seed % 2**32),
        ("training.dropout", t.dropout, "it must be at least 0 and below 1", 0 <= t.dropout < 1, 0.1),
        ("training.z-loss", t.z_loss, "it is at least 0, and finite", 0 <= t.z_loss < inf, 1e-4),
        ("training.attention-block", t.attention_block, "it is a multiple of 128", t.attention_block % 128 == 0, 512),
        ("lr", o.learning_rate, "it must be positive, and finite", 0 < o.learning_rate < inf, 3e-4),
        ("optimizer.final-lr-fraction", o.final_lr_fraction, "it lies in [0, 1]", 0 <= o.final_lr_fraction <= 1, 0.1),
        *((f"optimizer.{n}", b, "within [0, 1)", 0 <= b < 1, 0.9) for n, b in (("beta1", o.beta1), ("beta2", o.beta2))),
        ("optimizer.epsilon", o.epsilon, "it is at least 0, and finite", 0 <= o.epsilon < inf, 1e-8),
        ("optimizer.weight-decay", o.weight_decay, "it is at least 0, and finite", 0 <= o.weight_decay < inf, 0.1),
        ("optimizer.grad-clip-norm", o.grad_clip_norm, "it is at least 0, which disables it", o.grad_clip_norm >= 0, 1),
        ("data.held-out", d.held_out, "it must be at least 0 and below 1", 0 <= d.held_out < 1, 0.1),
        ("name", repr(run.name), "it is the name of a folder",
            0 < len(run.name) < 200 and run.name.isprintable() and "/" not in run.name and run.name[0] != ".", "run"),
    ):  # fmt: skip
        if not right:
            raise ConfigError(f"--{option} {value}", truth, f"--{option} {fix}")

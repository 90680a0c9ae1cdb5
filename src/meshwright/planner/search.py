"""Search over the meshes, pipeline schedules, microbatches and remat policies of a run on a target.

Only what the trainer itself accepts is priced (`runs.placed_run.place_run`). On each mesh all remat
policies are priced with a growing number of microbatches: fewer tokens at a time leave memory for a
policy that recomputes less, which is often faster than the smallest number of microbatches that
fits. Pricing stops where no policy, whether it fits or not, is as fast as the best plan of the
mesh, because more microbatches make every policy slower.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

from meshwright.config import MeshShape, Remat, StageSaves, Training
from meshwright.errors import ConfigError, divisors
from meshwright.formatting import Shown, format_bytes
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.targets import Target, parse_target
from meshwright.models.quantisation import check_precision
from meshwright.models.remat import REMAT_POLICIES
from meshwright.planner.compute import WithoutCopies
from meshwright.planner.estimate import Estimate, StepModel, estimate, training_with, with_remat
from meshwright.planner.records import record_note
from meshwright.runs.checks import check_sizes
from meshwright.runs.placed_run import PlacedRun, place_run, with_safe_choices
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES, FOLDED, find_layout
from meshwright.sharding.params import named_leaves
from meshwright.sharding.placement import replicates_kv_heads
from meshwright.sharding.schedules import find_schedule

_MAX_TENSOR, _MAX_STAGES, _MAX_CONTEXT = 64, 32, 64
_MAX_MICROBATCHES = 128
"""Microbatches of a pipeline."""
SCHEDULES_TRIED = ("1f1b", "interleaved", "zbv")
"""Pipeline schedules that are priced. Of the others gpipe and circular take as long as 1f1b and
interleaved and hold more inputs, and zero_bubble repeats work."""
_MIN_LOCAL_SEQ = 1024
"""Tokens per device below which a sequence is not split further."""
REMAT_ORDER = tuple(cast("dict[Remat, Any]", REMAT_POLICIES))
"""Remat policies, from the one that recomputes least to the one that saves least on the device."""
STAGE_SAVES: tuple[StageSaves, ...] = ("layers", "input")
"""What a pipeline stage may save, from that which recomputes less."""
OFFLOADING = tuple(name for name in REMAT_ORDER if REMAT_POLICIES[name].offloaded)
"""Remat policies that use the memory of the host. They run where they are named and are never
chosen: four compiled programs needed up to 31 % more memory than planned with libtpu 0.0.52 and 11
to 73 % more with 0.0.50.1 (docs/log.md).
"""
CHOSEN_REMAT = tuple(name for name in REMAT_ORDER if name not in OFFLOADING)
"""Remat policies that are chosen from."""
_SLOWER = 1.5
"""Step time over that of the best plan above which the remaining remat policies
of a mesh, all slower, are skipped."""


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A run placed on a mesh of the target, with its predicted step time and memory.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4", tokens_per_step="1M")[0]
        >>> best.name, best.estimate.bound_by
        ('fsdp=64, projections', 'matmuls')
        >>> best
        <Plan of llama3-8b on v5p:4x4x4: fsdp=64, projections; 2.73 s, 67% MFU,
         53 of 96 GiB, predicted>
    """

    placed: PlacedRun
    estimate: Estimate

    def brief(self) -> str:
        """Returns the run, the machine, the layout, and what is predicted."""
        e = self.estimate
        memory = f"{e.bytes / 2**30:.0f} of {e.hbm_bytes / 2**30:.0f} GiB"
        return (
            f"of {self.run.name} on {self.target}: {self.name}; {e.seconds:.3g} s, {e.mfu:.0%} "
            f"MFU, {memory}, predicted"
        )

    @property
    def record_note(self) -> str | None:
        """Sentence for an MFU above everything published for its chip,
        or where nothing is published; else None."""
        return record_note(self.estimate, self.run.training.matmul_precision)

    @property
    def run(self) -> Run:
        """The run, its mesh filled in."""
        return self.placed.run

    @property
    def mesh(self) -> MeshShape:
        """Degrees of the mesh axes."""
        return self.placed.layout.shape

    @property
    def target(self) -> Target:
        """Machine that the plan is for."""
        return self.estimate.target

    @property
    def name(self) -> str:
        """Mesh, remat policy and what differs from the default:
        `fsdp=64,tensor=4, full, 2 microbatches`."""
        training = self.run.training
        features: list[str] = [training.remat]
        if training.saved_layers:
            features.append(f"{training.saved_layers} layers saved")
        if training.microbatches > 1:
            features.append(f"{training.microbatches} microbatches")
        if self.mesh.stage > 1:
            virtual_stages = self.placed.layout.stages.virtual_stages
            features.append(
                training.pipeline_schedule + (f" x{virtual_stages}" if virtual_stages > 1 else "")
            )
            features += ["stage inputs saved"] if training.stage_saves == "input" else []
        if self.mesh.context > 1:
            features.append(training.context_strategy)
        features += [] if self.run.layout == "fsdp" else [self.run.layout]
        return f"{self.mesh}, {', '.join(features)}"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Ranked plans of a search."""

    target: Target
    plans: tuple[Plan, ...]
    """Plans that fit, the fastest first; one for each mesh and pipeline schedule."""
    too_large: tuple[Plan, ...]
    """Plans that do not fit, the one that needs least memory first."""
    refused: dict[str, str]
    """Mesh -> error of the trainer."""
    priced: int
    """Number of plans that were priced."""
    bound: float = 0.0
    """Least seconds of any searched mesh by the same rates, without its bubble (`least_seconds`),
    which shows what the search missed and bounds no measured step; 0 for wrapped models, and where
    nothing fits."""


def check_size(shape: MeshShape, target: Target) -> None:
    """Raises ConfigError where a mesh has another number of devices than the target."""
    if shape.size != target.devices:
        truth = f"it has {shape.size} devices, and {target} has {target.devices}"
        raise ConfigError(
            f"mesh {shape} on {target}", truth, f"choose degrees that multiply to {target.devices}"
        )


def _split_sizes(run: Run, axis: str) -> list[tuple[str, int]]:
    """Returns letter and size of the parameter dimensions over a mesh axis,
    without the vocabulary, which is padded."""
    table = find_layout(with_safe_choices(run).layout).table
    return [
        (letter, size)
        for param in named_leaves(run.model.params()).values()
        for letter, size in zip(param.dims, param.shape, strict=True)
        if letter != "V" and axis in table.get(letter, ())
    ]


def split_size(run: Run, axis: str) -> int:
    """Returns the number that the degree of a mesh axis must divide, 1
    where the axis splits no parameter."""
    return math.gcd(*(size for _, size in _split_sizes(run, axis))) or 1


def tensor_degrees(run: Run) -> list[int]:
    """Returns the degrees of `tensor` that divide what it splits, in ascending order.

    Key/value heads are the exception: where they are fewer than the devices,
    and divide them, every device has all.
    """
    sizes = set(_split_sizes(run, "tensor"))
    kv_heads = [size for letter, size in sizes if letter == "K"]
    degrees = divisors(math.gcd(*(size for letter, size in sizes if letter != "K")) or 1)
    return [t for t in degrees if all(k % t == 0 or replicates_kv_heads(k, t) for k in kv_heads)]


def candidate_meshes(run: Run, target: Target) -> Iterator[MeshShape]:
    """Yields the meshes over all devices of a target that are worth pricing.

    Degrees of `tensor` and `expert` divide the parameter dimensions they split; `tensor` stays
    inside a GPU node, so that its collectives use NVLink. `data` > 1 with `fsdp` > 1 is HSDP.
    """
    devices = target.devices
    tensors, stages, contexts, experts = _degrees(run, target)
    for tensor, stage, context, expert in itertools.product(tensors, stages, contexts, experts):
        model_parallel = tensor * stage * context * expert
        if devices % model_parallel:
            continue
        for data in _replica_counts(devices // model_parallel, stage, target):
            fsdp = devices // model_parallel // data
            shape = MeshShape(
                stage=stage, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor
            )
            sliced = _across_slices(shape, target)
            if sliced is not None and run.training.batch % sliced.over(BATCH_AXES) == 0:
                yield sliced


def _degrees(run: Run, target: Target) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the degrees of `tensor`, `stage`, `context` and `expert` that are tried.

    Raises ConfigError where the degree of `tensor` of a model without known layers, which only its
    author can choose, does not divide the devices.
    """
    devices = target.devices
    if not run.model.states_layers:
        tensor = run.mesh.tensor if run.mesh else 1
        if devices % tensor:
            truth = (
                f"its mesh has tensor={tensor}, and {devices} devices = {devices // tensor} * "
                f"{tensor} + "
            )
            fix = "a degree of tensor that divides the devices"
            raise ConfigError(f"{run.name} on {target}", f"{truth}{devices % tensor}", fix)
        return [tensor], [1], [1], [1]
    seq, layers = run.training.seq, len(run.model.spec().layers)
    node = _MAX_TENSOR if target.chip.on_torus else target.topology[-1]
    return (
        [t for t in tensor_degrees(run) if t <= min(_MAX_TENSOR, node)],
        [s for s in divisors(devices) if s <= min(layers, _MAX_STAGES)],
        [
            c
            for c in divisors(devices)
            if c == 1 or (c <= _MAX_CONTEXT and seq // c >= _MIN_LOCAL_SEQ)
        ],
        divisors(split_size(run, "expert")),
    )


def _replica_counts(devices: int, stages: int, target: Target) -> list[int]:
    """Returns the degrees of `data`: 1 (FSDP), all devices,
    and between them groups of devices that shard (HSDP).

    A pipeline's groups are only the slices or nodes: it has many more meshes,
    and its stages shard already.
    """
    counts = divisors(devices) if stages == 1 else (1, target.domains, devices)
    return sorted({data for data in counts if devices % data == 0})


def _across_slices(shape: MeshShape, target: Target) -> MeshShape | None:
    """Returns the mesh with its outermost possible axis across the slices (DCN),
    or None where no axis divides."""
    if target.slices == 1:
        return shape
    for axis in ("data", "stage", "fsdp"):
        if shape.degrees()[axis] % target.slices == 0:
            return dataclasses.replace(shape, slices=target.slices, dcn_axis=axis)
    return None


def idle_stages(run: Run, shape: MeshShape) -> str | None:
    """States why a pipeline is not priced that has fewer sequences than stages;
    None for other meshes.

    With m microbatches in s stages a stage waits during (s - 1) / (m + s - 1)
    of the step: most of it where m < s.
    """
    sequences = run.training.batch // shape.over(BATCH_AXES)
    if shape.stage == 1 or sequences >= shape.stage or run.training.microbatches:
        return None
    waiting = (shape.stage - 1) / (max(1, sequences) + shape.stage - 1)
    return str(
        ConfigError(
            f"{shape.stage} pipeline stages for {sequences} sequence(s) of a replica",
            f"with a microbatch for each sequence a stage waits during {waiting:.0%} of a step",
            f"--batch {shape.stage * shape.over(BATCH_AXES)} or more, --why {shape} to price it, "
            "or fewer stages",
        )
    )


def candidate_schedules(run: Run, shape: MeshShape) -> Iterator[Run]:
    """Yields the run on a mesh with each pipeline schedule and number
    of microbatches worth pricing.

    What the run names is kept: its layout, microbatches, schedule, and the virtual stages of that
    schedule. Without a pipeline the microbatches stay open.
    """
    training = run.training
    if shape.context > 1 and training.context_strategy == "auto":
        local_heads = max(1, (run.model.spec().kv_heads or 1) // shape.tensor)
        is_divisible = local_heads % shape.context == 0
        run = _with_training(run, context_strategy="ulysses" if is_divisible else "ring")
    laid_out = [
        dataclasses.replace(run, mesh=shape, layout=layout) for layout in _layouts(run, shape)
    ]
    if shape.stage == 1:
        yield from laid_out
        return
    layers = len(run.model.spec().layers)
    is_open = training.pipeline_schedule == "auto"
    schedules = SCHEDULES_TRIED if is_open else (training.pipeline_schedule,)
    for microbatches in _microbatch_counts(training, shape):
        for schedule in schedules:
            parts = [training.virtual_stages]
            if is_open:
                parts = _virtual_stages(schedule, shape.stage, layers)
            for each, virtual_stages in itertools.product(laid_out, parts):
                yield _with_training(
                    each,
                    microbatches=microbatches,
                    pipeline_schedule=schedule,
                    virtual_stages=virtual_stages,
                )


def _microbatch_counts(training: Training, shape: MeshShape) -> list[int]:
    """Returns the microbatches that the run names,
    or the possible numbers that are nearest to 2, 4 and 8 for each stage."""
    if training.microbatches:
        return [training.microbatches]
    local_batch = max(1, training.batch // shape.over(BATCH_AXES))
    possible = [m for m in divisors(local_batch) if shape.stage <= m <= _MAX_MICROBATCHES]
    possible = possible or [min(local_batch, shape.stage)]
    nearest = set()
    for per_stage in (2, 4, 8):
        wanted = per_stage * shape.stage
        nearest.add(min(possible, key=lambda m: abs(m - wanted)))
    return sorted(nearest)


def _layouts(run: Run, shape: MeshShape) -> list[str]:
    """Returns the layouts of a mesh that are priced: the one that the run names,
    or each that `auto` may be.

    Instead of `fsdp`, a pipeline's replicas share the optimizer state too (`zero1`): they sum their
    gradients after the last microbatch in either layout, and a reduce-scatter and an all-gather
    send no more than the all-reduce.
    """
    if run.layout != "auto" or not run.model.states_layers:
        return [run.layout]
    plain, folded = (
        ("zero1", "folded_zero1") if shape.stage > 1 and shape.data > 1 else ("auto", "folded")
    )
    experts = [
        layer.experts.experts for layer in run.model.spec().layers if layer.experts is not None
    ]
    can_fold = (
        experts
        and shape.context * shape.tensor > 1
        and getattr(run.model, "dispatch", None) != "capacity"
    )
    even = not any(number % shape.over(FOLDED["E"]) for number in experts)
    return [plain, folded] if can_fold and even else [plain]


def _with_training(run: Run, **changes: Any) -> Run:
    return dataclasses.replace(run, training=training_with(run.training, **changes))


def _virtual_stages(schedule: str, stages: int, layers: int) -> list[int]:
    """Returns the virtual stages of a schedule that are priced: 2, 4, 8 and so on
    where it takes any number.

    Fewer than one part of each stage may be empty (sharding/stages.py).
    """
    asked = [2**n for n in range(1, layers.bit_length() + 1)]
    taken = dict.fromkeys(find_schedule(schedule).virtual_stages_for(number) for number in asked)
    return [number for number in taken if number == 1 or stages * number - layers < stages]


def accumulation_counts(run: Run, shape: MeshShape) -> list[int]:
    """Returns the numbers of microbatches of a mesh without a pipeline: the divisors
    of a device's sequences."""
    return divisors(max(1, run.training.batch // shape.over(BATCH_AXES)))


def price_run(run: Run, target: Target) -> Plan:
    """Prices a run on its own mesh. Raises ConfigError where it does not fit the mesh."""
    return price_placed(place_run(run), target)


def price_placed(placed: PlacedRun, target: Target) -> Plan:
    """Prices a placed run."""
    return Plan(placed, estimate(placed, target))


def stage_saves_of(placed: PlacedRun) -> tuple[StageSaves, ...]:
    """Returns what the stages of a run can save: with frozen weights
    or a split backward pass only inputs."""
    if placed.run.finetune.method == "lora":
        return ("input",)
    if placed.run.training.pipeline_schedule in SCHEDULES_TRIED:  # none of them splits it
        return STAGE_SAVES
    with_inputs = with_remat(placed, placed.run.training.remat, stage_saves="input")
    return ("input",) if with_inputs.schedule_table.splits_backward else STAGE_SAVES


def remat_policies(target: Target) -> tuple[Remat, ...]:
    """Returns the remat policies of a target: offloading is only for TPUs,
    because XLA ignores it on GPUs."""
    return REMAT_ORDER if target.chip.on_torus else CHOSEN_REMAT


def with_saved_layers(plan: Plan) -> Plan:
    """Returns a plan that fits with as many layers saved as fit, where that is faster."""
    layers, target = len(plan.placed.layout.spec.layers), plan.target
    if plan.mesh.stage > 1 or (target.chip.on_torus and not target.chip.saves_some_layers):
        return plan
    saving = price_placed(with_remat(plan.placed, "projections"), plan.target).estimate
    spare = target.chip.roomy_bytes - plan.estimate.bytes
    each = (saving.memory["activations"] - plan.estimate.memory["activations"]) / layers
    fitting = layers if each <= 0 else min(layers, int(spare / each))
    while fitting > 0:
        changed = price_placed(
            with_remat(plan.placed, plan.run.training.remat, fitting), plan.target
        )
        if changed.estimate.bytes <= target.chip.roomy_bytes:
            return changed if changed.estimate.seconds < plan.estimate.seconds else plan
        fitting -= 1
    return plan


def search(run: Run, target: Target, include: tuple[MeshShape, ...] = ()) -> SearchResult:
    """Ranks the plans of `run` on all devices of `target`;
    its own mesh, remat and microbatches are not used.

    include: meshes that are priced in full besides the candidates, so that they are ranked with
    them. Raises ConfigError where one of them has another number of devices than the target.
    """
    check_sizes(run)
    # Any mesh tells what the chip can multiply.
    shape_of_chip = _across_slices(MeshShape(fsdp=target.devices), target) or MeshShape()
    check_precision(run.training.matmul_precision, machine_of_target(target, shape_of_chip))
    for shape in include:
        check_size(shape, target)
    plans: list[Plan] = []
    too_large: list[Plan] = []
    refused: dict[str, str] = {}
    priced, fastest = 0, math.inf
    # A schedule that is named is priced besides those that are always tried.
    named, runs = run.training.pipeline_schedule, [with_open_choices(run)]
    if named not in ("auto", *SCHEDULES_TRIED):
        runs.append(
            _with_training(
                runs[0], pipeline_schedule=named, virtual_stages=run.training.virtual_stages
            )
        )
    # Meshes without a pipeline first: they are far fewer, and their best time prunes the others.
    candidates = dict.fromkeys([*candidate_meshes(run, target), *include])
    for shape in sorted(candidates, key=lambda shape: (shape.stage, shape.tensor * shape.context)):
        idle = idle_stages(run, shape)
        if idle is not None and shape not in include:
            refused[str(shape)] = idle
            continue
        without_bubble: dict[tuple[str, int, str], float] = {}
        tried = runs if shape.stage > 1 else runs[:1]
        for scheduled in itertools.chain.from_iterable(
            candidate_schedules(run, shape) for run in tried
        ):
            # Of the schedules that are always tried 1F1B comes first. The others, and more virtual
            # stages, make the bubble smaller and nothing else, so none is below 1F1B without a
            # bubble. Tabulating a schedule takes longer than pricing it.
            schedule = scheduled.training.pipeline_schedule
            schedule = "" if schedule in SCHEDULES_TRIED else schedule
            pipeline = (schedule, scheduled.training.microbatches, scheduled.layout)
            if shape not in include and without_bubble.get(pipeline, 0.0) > fastest:
                continue
            limit = math.inf if shape in include else fastest * _SLOWER
            found = _best_of_mesh(scheduled, target, refused, limit)
            # A schedule that the trainer refuses has no price, and rules out no other.
            if found.without_bubble < math.inf:
                without_bubble[pipeline] = min(
                    found.without_bubble, without_bubble.get(pipeline, math.inf)
                )
            priced += found.priced
            if found.best is not None:
                plans.append(found.best)
                # A plan without room may be the only one that fits: it prunes by more
                # than those with room.
                fastest = min(
                    fastest,
                    found.best.estimate.seconds * (1.0 if is_roomy(found.best) else _SLOWER),
                )
            elif found.smallest is not None:
                too_large.append(found.smallest)
    plans.sort(key=preference)
    too_large.sort(key=closeness)
    bound = 0.0
    if plans and run.model.states_layers:
        bound = least_seconds(runs[0], target, plans[0])
    return SearchResult(target, tuple(plans), tuple(too_large), refused, priced, bound)


def with_open_choices(run: Run) -> Run:
    """Returns the run with everything left open that a plan chooses;
    without known layers, its remat policy stays."""
    if not run.model.states_layers:
        return run
    run = dataclasses.replace(run, layout="auto" if run.layout == "fsdp" else run.layout)
    return _with_training(
        run,
        remat="auto",
        saved_layers=0,
        microbatches=0,
        pipeline_schedule="auto",
        stage_saves="auto",
        context_strategy="auto",
    )


def least_seconds(run: Run, target: Target, best: Plan) -> float:
    """Returns the least predicted seconds of any mesh and schedule of the search
    that fits as `best` does.

    It shows what the search missed. It is not a bound on hardware, which can be faster than the
    rates of `Efficiency`. Pipelines are taken to have no bubble, any fraction of the layers may be
    saved (`_least_of_policies`), and more microbatches are taken to be no faster (not proved).
    """
    chip = target.chip
    room = chip.roomy_bytes if is_roomy(best) else chip.hbm_bytes / chip.fragmentation
    bound = best.estimate.seconds
    left_out = set[tuple[MeshShape, int]]()
    for shape in candidate_meshes(run, target):
        if idle_stages(run, shape) is not None:
            continue
        for scheduled in candidate_schedules(run, shape):
            named = scheduled.training.microbatches
            for microbatches in [named] if named else accumulation_counts(scheduled, shape):
                if (shape, microbatches) in left_out:
                    break
                try:
                    placed = place_run(
                        _with_training(scheduled, microbatches=microbatches, remat="full")
                    )
                    least = _without_copies(placed, target)
                except ConfigError:
                    break
                if least >= bound:
                    left_out.add((shape, microbatches))
                    break  # more microbatches take no less
                bound = min(bound, _least_of_policies(placed, target, room))
    return bound


def _without_copies(placed: PlacedRun, target: Target) -> float:
    """Returns the seconds of a step that recomputes and copies nothing and has no bubble.

    Its layers are divided evenly over the stages, as another schedule may do.
    """
    model = StepModel(computation=WithoutCopies)
    saves = _saves_of_stages(placed)[0]
    step = estimate(with_remat(placed, "none", 0, saves), target, model)
    even = 1 / (placed.layout.shape.stage * placed.layout.stages.busiest_fraction)
    return even * (step.seconds - step.parts["bubble"])


def _least_of_policies(placed: PlacedRun, target: Target, room: float) -> float:
    """Returns the least seconds without bubble of any remat policy that fits in `room` bytes.

    A policy that leaves memory free saves the projections of a fraction f of the layers:

        f = min(1, free bytes / bytes that `projections` needs more)
        seconds = (1 - f) x seconds(policy) + f x seconds(projections)
    """
    chip = target.chip
    saves_some = placed.layout.shape.stage == 1 and (chip.saves_some_layers or not chip.on_torus)
    least = math.inf
    for saves in _saves_of_stages(placed):
        prices = {
            remat: estimate(with_remat(placed, remat, 0, saves), target) for remat in CHOSEN_REMAT
        }
        seconds = {name: price.seconds - price.parts["bubble"] for name, price in prices.items()}
        most_saved = prices["projections"].memory["activations"]
        for remat, price in prices.items():
            free = room - price.bytes
            if free < 0:
                continue
            more = most_saved - price.memory["activations"]
            fraction = min(1.0, free / more) if saves_some and more > 0 else 0.0
            mixed = (1 - fraction) * seconds[remat] + fraction * seconds["projections"]
            least = min(least, seconds[remat], mixed)
    return least


def _saves_of_stages(placed: PlacedRun) -> tuple[StageSaves | None, ...]:
    """Returns what the stages of a pipeline may save; None alone without a pipeline."""
    return stage_saves_of(placed) if placed.layout.shape.stage > 1 else (None,)


def is_roomy(plan: Plan) -> bool:
    """Returns whether a plan that fits leaves the compiler the memory that it needs to be
    as fast as priced."""
    return plan.estimate.bytes <= plan.target.chip.roomy_bytes


def preference(plan: Plan) -> tuple[bool, float]:
    """Sorts plans that fit: those with room first, the fastest first."""
    return not is_roomy(plan), plan.estimate.seconds


def closeness(plan: Plan) -> tuple[float, bool, float]:
    """Sorts plans that do not fit: those that need least memory first,
    in the phase that needs most.

    What a save or a start needs does not depend on the remat policy. Where such a phase decides,
    the fastest plan whose step fits comes first.
    """
    e = plan.estimate
    return e.bytes_in(e.peak_phase), not e.fits_in("step"), e.seconds


@dataclasses.dataclass
class _MeshSearch:
    run: Run
    """With its mesh and pipeline schedule; what else it names is kept."""
    target: Target
    best: Plan | None = None
    """Plan that fits and is preferred to all others."""
    smallest: Plan | None = None
    """Plan that comes closest to fitting of those that do not (`closeness`)."""
    priced: int = 0
    without_bubble: float = math.inf
    """Shortest step of any plan, whether it fits or not, less its pipeline bubble."""

    @property
    def seconds(self) -> float:
        """Step time of the best plan; infinity without one that has room."""
        return (
            math.inf if self.best is None or not is_roomy(self.best) else self.best.estimate.seconds
        )

    def price(self, placed: PlacedRun, limit: float) -> float:
        """Prices the remat policies of a placed run;
        returns the shortest step of any, whether it fits or not.

        limit: seconds above which the policies after the first,
        which is the fastest on most runs, are left out.
        """
        plans, named = list[Plan](), self.run.training.stage_saves
        staged = placed.layout.shape.stage > 1
        for saves in (
            (None,) if not staged else stage_saves_of(placed) if named == "auto" else (named,)
        ):
            for remat, layers in self._remat(saves):
                plans.append(self._add(with_remat(placed, remat, layers, saves)))
                if plans[0].estimate.seconds > limit:
                    break
        saving = next(
            (plan.estimate.seconds for plan in plans if plan.run.training.remat == "projections"),
            math.inf,
        )
        for plan in plans if self.run.training.remat == "auto" else ():
            # Some layers saved: between the policy's time and that of `projections`.
            if plan.estimate.fits and saving < min(self.seconds, plan.estimate.seconds):
                self._take(with_saved_layers(plan))
                self.priced += 2
        return min((plan.estimate.seconds for plan in plans), default=math.inf)

    def _remat(self, saves: StageSaves | None) -> list[tuple[Remat, int]]:
        """Returns the policies to price, each with its layers saved."""
        training = self.run.training
        if training.remat == "auto" and self.run.model.states_layers:
            return [(name, 0) for name in CHOSEN_REMAT]
        return (
            []
            if saves == "layers" and training.remat in OFFLOADING
            else [(training.remat, training.saved_layers)]
        )

    def _add(self, placed: PlacedRun) -> Plan:
        plan = price_placed(placed, self.target)
        self.priced += 1
        self.without_bubble = min(
            self.without_bubble, plan.estimate.seconds - plan.estimate.parts["bubble"]
        )
        if plan.estimate.fits:
            self._take(plan)
        elif self.smallest is None or closeness(plan) < closeness(self.smallest):
            self.smallest = plan
        return plan

    def _take(self, plan: Plan) -> None:
        if self.best is None or preference(plan) < preference(self.best):
            self.best = plan


def _best_of_mesh(
    scheduled: Run, target: Target, refused: dict[str, str], limit: float
) -> _MeshSearch:
    """Prices the numbers of microbatches and remat policies of a run with its mesh
    and pipeline schedule.

    refused: receives the trainer's error by mesh. limit: seconds above which pricing stops.
    """
    result, shape = _MeshSearch(scheduled, target), scheduled.mesh or MeshShape()
    named = scheduled.training.microbatches
    for microbatches in [named] if named else accumulation_counts(scheduled, shape):
        try:
            placed = place_run(
                _with_training(scheduled, microbatches=microbatches, remat="full", saved_layers=0)
            )
            if result.price(placed, limit) >= min(result.seconds, limit):
                break
        except ConfigError as error:
            refused[str(shape)] = str(error)
            break
    return result


def price_mesh(run: Run, target: Target, shape: MeshShape) -> tuple[Plan | None, Plan | None]:
    """Returns the best plan on one mesh that fits,
    and of those that do not the one that needs least memory.

    What the run names is kept. Raises ConfigError where the trainer refuses the mesh.
    """
    refused: dict[str, str] = {}
    found = [
        _best_of_mesh(scheduled, target, refused, math.inf)
        for scheduled in candidate_schedules(run, shape)
    ]
    fitting, misses = [f.best for f in found if f.best], [f.smallest for f in found if f.smallest]
    best = min(fitting, key=preference, default=None)
    smallest = min(misses, key=closeness, default=None)
    if best is None and smallest is None:
        place_run(run, shape)
        reason = next(iter(refused.values()), "no pipeline schedule fits it")
        raise ConfigError(f"mesh {shape}", reason, "choose another mesh")
    return best, smallest


def variants(run: Run, target: Target, shape: MeshShape) -> tuple[Plan, list[tuple[str, Plan]]]:
    """Prices `run` on a mesh, and with one option changed: remat, microbatches,
    or half of an axis given to `tensor`.

    Returns the plan and (command-line option, plan with it).
    Variants that the trainer refuses are left out.
    """
    base = price_run(dataclasses.replace(run, mesh=shape), target)
    run = base.run
    policies = [name for name in CHOSEN_REMAT if name != run.training.remat]
    changed = [(f"--training.remat {name}", _with_training(run, remat=name)) for name in policies]
    for microbatches in (2 * run.training.microbatches, 4 * run.training.microbatches):
        changed.append(
            (
                f"--training.microbatches {microbatches}",
                _with_training(run, microbatches=microbatches),
            )
        )
    for axis in ("fsdp", "data"):
        degree = shape.degrees()[axis]
        if degree % 2 == 0 and shape.slices == 1:
            degrees: dict[str, Any] = {axis: degree // 2, "tensor": shape.tensor * 2}
            narrower = dataclasses.replace(shape, **degrees)
            changed.append((f"--mesh {narrower}", dataclasses.replace(run, mesh=narrower)))
    plans = []
    for option, variant in changed:
        with contextlib.suppress(ConfigError):
            plans.append((option, price_run(variant, target)))
    return base, plans


def with_tokens_per_step(run: Run, tokens: int) -> Run:
    """Returns the run with a batch of about `tokens` tokens per step.

    The number of sequences is a multiple of the largest power of two that is at most a quarter of
    it, so that many meshes divide it. Raises ConfigError for less than one sequence.
    """
    seq = run.training.seq
    if tokens < seq:
        raise ConfigError(
            f"--tokens-per-step {tokens}",
            f"a sequence of this run has {seq:,} tokens, and a step takes at least one",
            f"--tokens-per-step {seq}, or --seq {tokens}",
        )
    sequences = round(tokens / seq)
    multiple = 2 ** int(math.log2(max(1, sequences / 4)))
    batch = round(sequences / multiple) * multiple
    return _with_training(run, batch=batch)


def rounding_note(run: Run, tokens: int) -> str | None:
    """Says how far the batch of a run is from the tokens per step that were asked for;
    None where it is equal."""
    seq, batch = run.training.seq, run.training.batch
    planned = batch * seq
    if planned == tokens:
        return None
    return (
        f"{tokens:,} tokens per step are {tokens / seq:,.1f} sequences of {seq:,}; planned with "
        f"{batch:,} sequences, {planned:,} tokens ({planned / tokens - 1:+.1%}), a number that "
        "many meshes divide; --batch takes any other"
    )


def with_choices(run: Run, target: Target) -> Run:
    """Returns the run with the choices of the best plan on its mesh,
    where it leaves them open (`auto`, 0).

    They are the layout, the remat policy with its saved layers, the microbatches, the strategy of
    `context`, and with pipeline stages the schedule and what a stage saves. Where nothing fits they
    are those that need least memory. Raises ConfigError where the run does not fit its mesh.
    """
    shape, training = run.mesh or MeshShape(), run.training
    names = ["microbatches", "remat", *(["context_strategy"] if shape.context > 1 else [])]
    names += ["pipeline_schedule", "stage_saves"] if shape.stage > 1 else []
    left_open = [name for name in names if getattr(training, name) in ("auto", 0)]
    # No policies are known for a model without known layers.
    if not run.model.states_layers or not (left_open or len(_layouts(run, shape)) > 1):
        return run
    best, smallest = price_mesh(run, target, shape)
    plan = best or smallest
    assert plan is not None  # price_mesh raises where there is neither
    left_open += [name for of, name in _WITH.items() if of in left_open]
    chosen = {name: getattr(plan.run.training, name) for name in left_open}
    layout = run.layout if shape.stage == 1 and plan.run.layout == "fsdp" else plan.run.layout
    return _with_training(dataclasses.replace(run, layout=layout), **chosen)


_WITH = {"remat": "saved_layers", "pipeline_schedule": "virtual_stages"}
"""Choice -> field that is chosen with it."""
_TRIES = 3
"""Most choices of a run that are compiled."""


def with_choices_that_fit(
    run: Run, target: Target, needed: Callable[[Run], float], say: Callable[[str], None]
) -> Run:
    """Returns the run with the choices of `with_choices`,
    or those after them, that fit as compiled.

    needed: bytes of a device that a compiled run needs.
    say: receives why a choice is given up. After a choice that does not fit the next is planned for
    as much less memory as it needed more; the third is the last, whether it fits or not.
    """
    room, available = target, target.chip.hbm_bytes
    for tried in range(1, _TRIES + 1):
        chosen = with_choices(run, room)
        if chosen == run:  # nothing is left open
            return run
        planned = price_run(chosen, room).estimate
        if tried == 1 and not planned.fits:
            say(f"no choice on mesh {run.mesh} is planned to fit; the closest {planned.shortfall}")
        compiled = needed(chosen)
        if compiled <= available or tried == _TRIES:
            return chosen
        plan = price_run(chosen, target)
        less = room.chip.hbm_bytes * available / compiled
        say(
            f"{plan.name} does not fit: planned {format_bytes(plan.estimate.bytes)}, compiled "
            f"{format_bytes(compiled)} of {format_bytes(available)}; planning for "
            f"{format_bytes(less)} instead"
        )
        room = dataclasses.replace(room, chip=dataclasses.replace(room.chip, hbm_bytes=less))
    raise AssertionError("the last choice is returned")


_MACHINES = (
    "v5p:2x2x1",
    "v5p:2x2x4",
    "v5p:4x4x4",
    "v5p:4x4x8",
    "v5p:8x8x8",
    "v5p:8x8x16",
    "v5p:8x16x16",
)
"""Machines that an error may name, the smallest first."""
_VOCAB = 2**15
"""Vocabulary of a run whose tokenizer decides it."""


def machine_for(run: Run) -> str:
    """Returns the smallest of a few machines on which the run is predicted to fit
    with FSDP alone, else the largest."""
    model = dataclasses.replace(run.model, vocab=run.model.vocab or _VOCAB)
    for name in _MACHINES:
        target = parse_target(name)
        with contextlib.suppress(ConfigError):
            placed = dataclasses.replace(run, model=model, mesh=MeshShape(fsdp=target.devices))
            if price_run(with_choices(placed, target), target).estimate.fits:
                return name
    return _MACHINES[-1]

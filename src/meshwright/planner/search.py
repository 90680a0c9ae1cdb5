"""Search over the meshes, pipeline schedules, microbatches and remat policies of a run on a target.

Only what the trainer itself accepts is priced (`runs.placed_run.place_run`). On each mesh the remat policies are tried
from the one that recomputes least to the one that saves least, with a growing number of microbatches, until a plan
fits: later ones would only be slower.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from meshwright.config import ContextStrategy, MeshShape, Remat, Run, StageSaves
from meshwright.errors import ConfigError, divisors
from meshwright.hardware.chips import Nodes, Torus
from meshwright.hardware.targets import Target
from meshwright.models.remat import REMAT_POLICIES
from meshwright.planner.estimate import Estimate, estimate, with_remat
from meshwright.planner.memory_model import FRAGMENTATION
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.sharding.layouts import BATCH_AXES, find_layout
from meshwright.sharding.params import named_leaves
from meshwright.sharding.schedules import find_schedule

REMAT_ORDER: tuple[Remat, ...] = (
    "none",
    "attention",
    "projections",
    "feed_forward",
    "attention_out",
    "offload_attention",
    "full",
    "offload",
)
"""Remat policies, from the one that recomputes least to the one that saves least on the device."""
SCHEDULES_TRIED = ("1f1b", "interleaved", "zbv")
"""Pipeline schedules that `auto` chooses from. Of the others gpipe and circular take as long as 1f1b and interleaved
and hold more inputs, and zero_bubble repeats work."""
STAGE_SAVES: tuple[StageSaves, ...] = ("layers", "input")
OFFLOADING = tuple(name for name in REMAT_ORDER if REMAT_POLICIES[name].offloaded)
"""Remat policies that use the memory of the host."""
_SLOWER = 1.5
"""Step time over that of the best plan above which the remaining remat policies of a mesh, all slower, are skipped."""
_MAX_TENSOR, _MAX_STAGES, _MAX_CONTEXT = 64, 32, 64
_MAX_MICROBATCHES = 128
_MIN_LOCAL_SEQ = 1024
"""Tokens per device below which a sequence is not split further."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run placed on a mesh of the target, with its predicted step time and memory.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4", tokens_per_step="1M")[0]
        >>> best.name, best.estimate.bound_by
        ('fsdp=64, projections', 'compute')
    """

    placed: PlacedRun
    estimate: Estimate

    @property
    def run(self) -> Run:
        """The run, its mesh filled in."""
        return self.placed.run

    @property
    def mesh(self) -> MeshShape:
        """Degrees of the mesh axes."""
        return self.placed.shape

    @property
    def target(self) -> Target:
        """Machine that the plan is for."""
        return self.estimate.target

    @property
    def name(self) -> str:
        """Mesh, remat policy and what differs from the default: `fsdp=64,tensor=4, full, 2 microbatches`."""
        training = self.run.training
        features: list[str] = [training.remat]
        if training.saved_layers:
            features.append(f"{training.saved_layers} layers saved")
        if training.microbatches > 1:
            features.append(f"{training.microbatches} microbatches")
        if self.mesh.stage > 1:
            virtual_stages = self.placed.virtual_stages
            features.append(training.pipeline_schedule + (f" x{virtual_stages}" if virtual_stages > 1 else ""))
            features += ["stage inputs saved"] if training.stage_saves == "input" else []
        if self.mesh.context > 1:
            features.append(training.context_strategy)
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


def price_run(run: Run, target: Target) -> Plan:
    """Prices a run on its own mesh. Raises ConfigError where it does not fit the mesh."""
    placed = place_run(run)
    return Plan(placed, estimate(placed, target))


def remat_policies(target: Target, stage_saves: StageSaves | None = None) -> tuple[Remat, ...]:
    """Returns the remat policies of a target: offloading is for TPUs alone, because XLA ignores it on GPUs.

    stage_saves: of a run with pipeline stages; one that keeps layers offloads none of them.
    """
    on_tpu = isinstance(target.chip.interconnect, Torus)
    return (
        REMAT_ORDER
        if on_tpu and stage_saves != "layers"
        else tuple(name for name in REMAT_ORDER if name not in OFFLOADING)
    )


_GPU_ROOM = 0.75
"""Fraction of a GPU's memory above which XLA recomputes and overlaps less: Llama 2 70B on 64 H100 takes 4.8 s with 57
GiB, 5.6 s with 61 and 5.9 s with 64 of its 75 (docs/log.md)."""


def room_of(target: Target) -> float:
    """Returns the bytes that a step may take without being slowed down."""
    hbm = target.chip.hbm_bytes
    return hbm * _GPU_ROOM if isinstance(target.chip.interconnect, Nodes) else hbm / FRAGMENTATION


def with_saved_layers(plan: Plan) -> Plan:
    """Returns a plan that fits with as many layers saved as fit, where that is faster."""
    layers, target = len(plan.placed.spec.layers), plan.target
    proved = isinstance(target.chip.interconnect, Nodes) or target.name == "v5p"
    if plan.mesh.stage > 1 or not proved:
        return plan  # on v6e the compiler needs 33.5 GiB where 24 are planned (docs/log.md)
    saving = price_placed(with_remat(plan.placed, "projections"), plan.target).estimate
    spare = room_of(plan.target) - plan.estimate.bytes
    each = (saving.memory["activations"] - plan.estimate.memory["activations"]) / layers
    fitting = layers if each <= 0 else min(layers, int(spare / each))
    while fitting > 0:
        changed = price_placed(with_remat(plan.placed, plan.run.training.remat, fitting), plan.target)
        if changed.estimate.bytes <= room_of(plan.target):
            return changed if changed.estimate.seconds < plan.estimate.seconds else plan
        fitting -= 1
    return plan


def search(run: Run, target: Target, include: tuple[MeshShape, ...] = ()) -> SearchResult:
    """Ranks the plans of `run` on all devices of `target`; its own mesh, remat and microbatches are not used.

    include: meshes that are priced in full besides the candidates, so that they are ranked with them. Raises
    ConfigError where one of them has another number of devices than the target.
    """
    for shape in include:
        check_size(shape, target)
    plans: list[Plan] = []
    too_large: list[Plan] = []
    refused: dict[str, str] = {}
    priced, fastest = 0, math.inf
    # Meshes without a pipeline first: they are far fewer, and their best time prunes the others.
    candidates = dict.fromkeys([*candidate_meshes(run, target), *include])
    for shape in sorted(candidates, key=lambda shape: (shape.stage, shape.tensor * shape.context)):
        for scheduled in candidate_schedules(run, shape):
            limit = math.inf if shape in include else fastest * _SLOWER
            best, smallest, count = _best_of_mesh(scheduled, target, refused, limit)
            priced += count
            if best is not None:
                plans.append(best)
                fastest = min(fastest, best.estimate.seconds)
            elif smallest is not None:
                too_large.append(smallest)
    plans.sort(key=lambda plan: plan.estimate.seconds)
    too_large.sort(key=lambda plan: plan.estimate.bytes)
    return SearchResult(target, tuple(plans), tuple(too_large), refused, priced)


def check_size(shape: MeshShape, target: Target) -> None:
    """Raises ConfigError where a mesh has another number of devices than the target."""
    if shape.size != target.devices:
        raise ConfigError(
            f"mesh {shape} on {target}", f"it has {shape.size} devices, and {target} has {target.devices}",
            f"choose degrees that multiply to {target.devices}",
        )  # fmt: skip


def split_size(run: Run, axis: str) -> int:
    """Returns the number that the degree of a mesh axis must divide: the gcd of the parameter dimensions over it.

    The layout's table lists the axes of each dimension. The vocabulary is left out, because it is padded. 1 where
    the axis splits no parameter.
    """
    table = find_layout(run.layout).table
    sizes = (
        size
        for param in named_leaves(run.model.params()).values()
        for letter, size in zip(param.dims, param.shape, strict=True)
        if letter != "V" and axis in table.get(letter, ())
    )
    return math.gcd(*sizes) or 1


def candidate_meshes(run: Run, target: Target) -> Iterator[MeshShape]:
    """Yields the meshes over all devices of a target that are worth pricing.

    Degrees of `tensor` and `expert` divide the parameter dimensions they split; `tensor` stays inside a GPU node, so
    that its collectives use NVLink. `data` > 1 with `fsdp` > 1 is HSDP.
    """
    seq, devices, layers = run.training.seq, target.devices, len(run.model.spec().layers)
    node = target.topology[-1] if isinstance(target.chip.interconnect, Nodes) else _MAX_TENSOR
    tensors = [t for t in divisors(split_size(run, "tensor")) if t <= min(_MAX_TENSOR, node)]
    stages = [s for s in divisors(devices) if s <= min(layers, _MAX_STAGES)]
    contexts = [c for c in divisors(devices) if c == 1 or (c <= _MAX_CONTEXT and seq // c >= _MIN_LOCAL_SEQ)]
    experts = divisors(split_size(run, "expert"))
    for tensor, stage, context, expert in itertools.product(tensors, stages, contexts, experts):
        model_parallel = tensor * stage * context * expert
        if devices % model_parallel:
            continue
        for data in _replica_counts(devices // model_parallel, target):
            fsdp = devices // model_parallel // data
            shape = MeshShape(stage=stage, data=data, fsdp=fsdp, expert=expert, context=context, tensor=tensor)
            sliced = _across_slices(shape, target)
            if sliced is not None and run.training.batch % sliced.over(BATCH_AXES) == 0:
                yield sliced


def _replica_counts(devices: int, target: Target) -> list[int]:
    """Returns the degrees of `data`: 1 (FSDP), one replica per slice or node (HSDP), and all devices."""
    return sorted({data for data in (1, target.domains, devices) if devices % data == 0})


def _across_slices(shape: MeshShape, target: Target) -> MeshShape | None:
    """Returns the mesh with its outermost possible axis across the slices (DCN), or None where no axis divides."""
    if isinstance(target.chip.interconnect, Nodes) or target.slices == 1:
        return shape
    for axis in ("data", "stage", "fsdp"):
        if shape.degrees()[axis] % target.slices == 0:
            return dataclasses.replace(shape, slices=target.slices, dcn_axis=axis)
    return None


def candidate_schedules(run: Run, shape: MeshShape) -> Iterator[Run]:
    """Yields the run on a mesh with each pipeline schedule and number of microbatches worth pricing."""
    training = run.training
    if shape.context > 1:
        training = dataclasses.replace(training, context_strategy=_context_strategy(run, shape))
    if shape.stage == 1:
        yield dataclasses.replace(run, mesh=shape, training=dataclasses.replace(training, microbatches=1))
        return
    local_batch = max(1, training.batch // shape.over(BATCH_AXES))
    counts = [m for m in divisors(local_batch) if shape.stage <= m <= _MAX_MICROBATCHES]
    counts = counts or [min(local_batch, shape.stage)]
    chosen = sorted({min(counts, key=lambda m: abs(m - k * shape.stage)) for k in (2, 4, 8)})
    for microbatches in chosen:
        for schedule in dict.fromkeys((*SCHEDULES_TRIED, training.pipeline_schedule)):
            if schedule == "auto":
                continue
            parts = shape.stage * find_schedule(schedule).virtual_stages_for(2)
            if parts > shape.stage and parts > len(run.model.spec().layers):
                continue
            changed = dataclasses.replace(
                training, microbatches=microbatches, pipeline_schedule=schedule, virtual_stages=2
            )
            yield dataclasses.replace(run, mesh=shape, training=changed)


def _context_strategy(run: Run, shape: MeshShape) -> ContextStrategy:
    """Returns the context strategy of a mesh: Ulysses where the heads divide, else a ring."""
    kv_heads = run.model.spec().kv_heads
    if kv_heads is not None and kv_heads // shape.tensor % shape.context == 0:
        return "ulysses"
    return "ring"


def _best_of_mesh(
    scheduled: Run, target: Target, refused: dict[str, str], limit: float
) -> tuple[Plan | None, Plan | None, int]:  # fmt: skip
    """Returns the fastest plan that fits, else the one that needs least memory, and the number of plans priced.

    scheduled: the run with its mesh and pipeline schedule. limit: seconds above which pricing stops.
    """
    best: Plan | None = None
    smallest: Plan | None = None
    count = 0
    shape, training = scheduled.mesh or MeshShape(), scheduled.training
    local_batch = max(1, training.batch // shape.over(BATCH_AXES))
    for microbatches in [training.microbatches] if shape.stage > 1 else _accumulation_counts(local_batch):
        try:
            changed = dataclasses.replace(training, microbatches=microbatches, remat="full")
            placed = place_run(dataclasses.replace(scheduled, training=changed))
        except ConfigError as error:
            refused[str(shape)] = str(error)
            return best, smallest, count
        for saves in STAGE_SAVES if shape.stage > 1 else (None,):
            for remat in remat_policies(target, saves):
                plan = price_placed(with_remat(placed, remat, stage_saves=saves), target)
                count += 1
                if plan.estimate.fits:
                    if best is None or plan.estimate.seconds < best.estimate.seconds:
                        best = plan
                    if remat not in OFFLOADING:
                        break
                elif smallest is None or plan.estimate.bytes < smallest.estimate.bytes:
                    smallest = plan
                if plan.estimate.seconds > limit:
                    break
        if best is not None:
            break
    return best if best is None else with_saved_layers(best), smallest, count


def price_placed(placed: PlacedRun, target: Target) -> Plan:
    """Prices a placed run."""
    return Plan(placed, estimate(placed, target))


def _accumulation_counts(local_batch: int) -> list[int]:
    """Returns the microbatches tried without a pipeline: powers of two, and one sequence each."""
    return [m for m in divisors(local_batch) if m & (m - 1) == 0 or m == local_batch]


def price_mesh(run: Run, target: Target, shape: MeshShape) -> tuple[Plan | None, Plan | None]:
    """Returns the fastest plan on one mesh that fits, and of those that do not the one that needs least memory.

    Raises ConfigError where the trainer refuses the mesh.
    """
    best: Plan | None = None
    smallest: Plan | None = None
    refused: dict[str, str] = {}
    for scheduled in candidate_schedules(run, shape):
        fastest, misses, _ = _best_of_mesh(scheduled, target, refused, math.inf)
        if fastest is not None and (best is None or fastest.estimate.seconds < best.estimate.seconds):
            best = fastest
        if misses is not None and (smallest is None or misses.estimate.bytes < smallest.estimate.bytes):
            smallest = misses
    if best is None and smallest is None:
        place_run(run, shape)
        reason = next(iter(refused.values()), "no pipeline schedule fits it")
        raise ConfigError(f"mesh {shape}", reason, "choose another mesh")
    return best, smallest


def variants(run: Run, target: Target, shape: MeshShape) -> tuple[Plan, list[tuple[str, Plan]]]:
    """Prices `run` on a mesh, and with one option changed: remat, microbatches, or half of an axis given to `tensor`.

    Returns the plan and (command-line option, plan with it). Variants that the trainer refuses are left out.
    """
    run = dataclasses.replace(run, mesh=shape)
    base = price_run(run, target)
    training = run.training
    changed: list[tuple[str, Run]] = []
    for remat in remat_policies(target):
        if remat != training.remat:
            other = dataclasses.replace(training, remat=remat)
            changed.append((f"--training.remat {remat}", dataclasses.replace(run, training=other)))
    for microbatches in (2 * training.microbatches, 4 * training.microbatches):
        other = dataclasses.replace(training, microbatches=microbatches)
        changed.append((f"--training.microbatches {microbatches}", dataclasses.replace(run, training=other)))
    for axis in ("fsdp", "data"):
        degree = shape.degrees()[axis]
        if degree % 2 == 0 and shape.slices == 1:
            degrees: dict[str, Any] = {axis: degree // 2, "tensor": shape.tensor * 2}
            narrower = dataclasses.replace(shape, **degrees)
            changed.append((f"--mesh {narrower}", dataclasses.replace(run, mesh=narrower)))
    plans = []
    for option, variant in changed:
        try:
            plans.append((option, price_run(variant, target)))
        except ConfigError:
            continue
    return base, plans


def with_tokens_per_step(run: Run, tokens: int) -> Run:
    """Returns the run with a batch of about `tokens` tokens per step.

    The number of sequences is a multiple of the largest power of two that is at most a quarter of it, so that many
    meshes divide it.
    """
    batch = max(1, round(tokens / run.training.seq))
    multiple = 2 ** max(0, int(math.log2(max(1, batch / 4))))
    batch = max(1, round(batch / multiple)) * multiple
    return dataclasses.replace(run, training=dataclasses.replace(run.training, batch=batch))

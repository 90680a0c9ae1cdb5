"""Search over the meshes, pipeline schedules, microbatches and remat policies of a run on a target.

Only what the trainer itself accepts is priced (`runs.placed_run.place_run`). On each mesh all remat policies are priced
with a growing number of microbatches: fewer tokens at a time leave memory for a policy that recomputes less, which is
often faster than the smallest number of microbatches that fits. Pricing stops where no policy, whether it fits or not,
is as fast as the best plan of the mesh, because more microbatches make every policy slower.
"""

import dataclasses
import functools
import math
from typing import Any

from meshwright.config import MeshShape, Remat, StageSaves
from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target
from meshwright.models.model import Model
from meshwright.models.remat import REMAT_POLICIES
from meshwright.planner.candidates import accumulation_counts, candidate_meshes, candidate_schedules, check_size
from meshwright.planner.estimate import Estimate, estimate, with_remat
from meshwright.plugins import Shown
from meshwright.runs.checks import check_sizes
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run

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
STAGE_SAVES: tuple[StageSaves, ...] = ("layers", "input")
"""What a pipeline stage may save, from that which recomputes less."""
OFFLOADING = tuple(name for name in REMAT_ORDER if REMAT_POLICIES[name].offloaded)
"""Remat policies that use the memory of the host."""
_SLOWER = 1.5
"""Step time over that of the best plan above which the remaining remat policies of a mesh, all slower, are skipped."""


@dataclasses.dataclass(frozen=True)
class Plan(Shown):
    """A run placed on a mesh of the target, with its predicted step time and memory.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4", tokens_per_step="1M")[0]
        >>> best.name, best.estimate.bound_by
        ('fsdp=64, projections', 'matmuls')
        >>> best
        <Plan of llama3-8b on v5p:4x4x4: fsdp=64, projections; 2.54 s, 72% MFU, 53 of 95 GiB, predicted>
    """

    placed: PlacedRun
    estimate: Estimate

    def __repr__(self) -> str:
        e = self.estimate
        memory = f"{e.bytes / 2**30:.0f} of {e.hbm_bytes / 2**30:.0f} GiB"
        return (
            f"<Plan of {self.run.name} on {self.target}: {self.name}; {e.seconds:.3g} s, {e.mfu:.0%} MFU, {memory}, "
            "predicted>"
        )

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


def price_run(run: Run, target: Target) -> Plan:
    """Prices a run on its own mesh. Raises ConfigError where it does not fit the mesh."""
    placed = place_run(run)
    return Plan(placed, estimate(placed, target))


def stage_saves_of(placed: PlacedRun) -> tuple[StageSaves, ...]:
    """Returns what the stages of a run can save: with frozen weights inputs alone (runs/recipe.py)."""
    return ("input",) if placed.run.finetune.method == "lora" else STAGE_SAVES


def remat_policies(target: Target, stage_saves: StageSaves | None = None) -> tuple[Remat, ...]:
    """Returns the remat policies of a target: offloading is for TPUs alone, because XLA ignores it on GPUs.

    stage_saves: of a run with pipeline stages; one that keeps layers offloads none of them.
    """
    if target.chip.on_torus and stage_saves != "layers":
        return REMAT_ORDER
    return tuple(name for name in REMAT_ORDER if name not in OFFLOADING)


def with_saved_layers(plan: Plan) -> Plan:
    """Returns a plan that fits with as many layers saved as fit, where that is faster."""
    layers, target = len(plan.placed.spec.layers), plan.target
    if plan.mesh.stage > 1 or (target.chip.on_torus and not target.chip.saves_some_layers):
        return plan
    saving = price_placed(with_remat(plan.placed, "projections"), plan.target).estimate
    spare = target.chip.roomy_bytes - plan.estimate.bytes
    each = (saving.memory["activations"] - plan.estimate.memory["activations"]) / layers
    fitting = layers if each <= 0 else min(layers, int(spare / each))
    while fitting > 0:
        changed = price_placed(with_remat(plan.placed, plan.run.training.remat, fitting), plan.target)
        if changed.estimate.bytes <= target.chip.roomy_bytes:
            return changed if changed.estimate.seconds < plan.estimate.seconds else plan
        fitting -= 1
    return plan


def search(run: Run, target: Target, include: tuple[MeshShape, ...] = ()) -> SearchResult:
    """Ranks the plans of `run` on all devices of `target`; its own mesh, remat and microbatches are not used.

    include: meshes that are priced in full besides the candidates, so that they are ranked with them. Raises
    ConfigError where one of them has another number of devices than the target.
    """
    check_sizes(run)
    for shape in include:
        check_size(shape, target)
    return search_model(run.model, run, target, include)


@functools.singledispatch
def search_model(model: Model, run: Run, target: Target, include: tuple[MeshShape, ...]) -> SearchResult:
    """Ranks the plans of a model family; another kind of model registers its own function (`wrapped`)."""
    plans: list[Plan] = []
    too_large: list[Plan] = []
    refused: dict[str, str] = {}
    priced, fastest = 0, math.inf
    # Meshes without a pipeline first: they are far fewer, and their best time prunes the others.
    candidates = dict.fromkeys([*candidate_meshes(run, target), *include])
    for shape in sorted(candidates, key=lambda shape: (shape.stage, shape.tensor * shape.context)):
        without_bubble: dict[tuple[int, str], float] = {}
        for scheduled in candidate_schedules(run, shape):
            # More virtual stages make the bubble smaller, and nothing else.
            schedule = (scheduled.training.microbatches, scheduled.training.pipeline_schedule)
            if shape not in include and without_bubble.get(schedule, 0.0) > fastest:
                continue
            limit = math.inf if shape in include else fastest * _SLOWER
            found = _best_of_mesh(scheduled, target, refused, limit)
            without_bubble[schedule] = found.without_bubble
            priced += found.priced
            if found.best is not None:
                plans.append(found.best)
                fastest = min(fastest, found.seconds)
            elif found.smallest is not None:
                too_large.append(found.smallest)
    plans.sort(key=lambda plan: plan.estimate.seconds)
    too_large.sort(key=lambda plan: plan.estimate.bytes)
    return SearchResult(target, tuple(plans), tuple(too_large), refused, priced)


@dataclasses.dataclass
class _MeshSearch:
    """Plans of one mesh and pipeline schedule."""

    target: Target
    best: Plan | None = None
    """Fastest plan that fits."""
    smallest: Plan | None = None
    """Plan that needs least memory of those that do not fit."""
    priced: int = 0
    without_bubble: float = math.inf
    """Shortest step of any plan, whether it fits or not, less its pipeline bubble."""

    @property
    def seconds(self) -> float:
        """Step time of the best plan; infinity without one."""
        return math.inf if self.best is None else self.best.estimate.seconds

    def price(self, placed: PlacedRun, limit: float) -> float:
        """Prices the remat policies of a placed run; returns the shortest step of any, whether it fits or not.

        limit: seconds above which the policies after the first, which is the fastest on most runs, are left out.
        """
        plans: list[Plan] = []
        for saves in stage_saves_of(placed) if placed.shape.stage > 1 else (None,):
            for remat in remat_policies(self.target, saves):
                plans.append(self._add(with_remat(placed, remat, stage_saves=saves)))
                if plans[0].estimate.seconds > limit:
                    break
        saving = next((plan.estimate.seconds for plan in plans if plan.run.training.remat == "projections"), math.inf)
        for plan in plans:
            # Some layers saved: between the policy's time and that of `projections`.
            if plan.estimate.fits and saving < min(self.seconds, plan.estimate.seconds):
                self._take(with_saved_layers(plan))
                self.priced += 2
        return min(plan.estimate.seconds for plan in plans)

    def _add(self, placed: PlacedRun) -> Plan:
        plan = price_placed(placed, self.target)
        self.priced += 1
        self.without_bubble = min(self.without_bubble, plan.estimate.seconds - plan.estimate.parts["bubble"])
        if plan.estimate.fits:
            self._take(plan)
        elif self.smallest is None or plan.estimate.bytes < self.smallest.estimate.bytes:
            self.smallest = plan
        return plan

    def _take(self, plan: Plan) -> None:
        if plan.estimate.seconds < self.seconds:
            self.best = plan


def _best_of_mesh(scheduled: Run, target: Target, refused: dict[str, str], limit: float) -> _MeshSearch:
    """Prices the numbers of microbatches and remat policies of a run with its mesh and pipeline schedule.

    refused: receives the trainer's error by mesh. limit: seconds above which pricing stops.
    """
    result = _MeshSearch(target)
    shape, training = scheduled.mesh or MeshShape(), scheduled.training
    for microbatches in [training.microbatches] if shape.stage > 1 else accumulation_counts(scheduled, shape):
        try:
            changed = dataclasses.replace(training, microbatches=microbatches, remat="full", saved_layers=0)
            placed = place_run(dataclasses.replace(scheduled, training=changed))
        except ConfigError as error:
            refused[str(shape)] = str(error)
            break
        if result.price(placed, limit) >= min(result.seconds, limit):
            break
    return result


def price_placed(placed: PlacedRun, target: Target) -> Plan:
    """Prices a placed run."""
    return Plan(placed, estimate(placed, target))


def price_mesh(run: Run, target: Target, shape: MeshShape) -> tuple[Plan | None, Plan | None]:
    """Returns the fastest plan on one mesh that fits, and of those that do not the one that needs least memory.

    Raises ConfigError where the trainer refuses the mesh.
    """
    best: Plan | None = None
    smallest: Plan | None = None
    refused: dict[str, str] = {}
    for scheduled in candidate_schedules(run, shape):
        found = _best_of_mesh(scheduled, target, refused, math.inf)
        if found.best is not None and (best is None or found.seconds < best.estimate.seconds):
            best = found.best
        misses = found.smallest
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

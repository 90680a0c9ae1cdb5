"""Explanations of a search: why other meshes lose, two plans side by side,
what does not divide, what saves memory."""

import dataclasses
import math
from collections.abc import Sequence

from meshwright.config import MeshShape
from meshwright.errors import ConfigError, divisors
from meshwright.formatting import format_bytes, format_step
from meshwright.hardware.chips import Torus
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.targets import Target, slices_by_chips
from meshwright.planner.search import (
    Plan,
    SearchResult,
    check_size,
    is_roomy,
    search,
    variants,
    with_open_choices,
)
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.words import AXES

STEP_PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "recomputation": "recomputation",
    "elementwise": "norms, residuals, rotary",
    "optimizer": "optimizer update",
    "exposed": "exposed communication",
    "host": "exposed host transfers",
    "bubble": "pipeline bubble",
}
"""Part of `Estimate.parts` -> its name in tables."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Best plan that splits over one set of mesh axes, and why it loses."""

    axes: str
    """Mesh axes that the plan uses."""
    best: Plan
    """Fastest of the plans with these axes that fit,
    or where none fits the one that needs least memory."""
    fits: bool
    """Whether `best` fits the memory."""
    reason: str
    """Why `best` loses against the winner."""


def mesh_axes(plan: Plan) -> str:
    """Names the axes that a plan's mesh splits over: `fsdp + tensor`, `data + fsdp (HSDP)`."""
    degrees = plan.mesh.degrees()
    axes = " + ".join(axis for axis in AXES if degrees[axis] > 1) or "one device"
    return f"{axes} (HSDP)" if degrees["data"] > 1 and degrees["fsdp"] > 1 else axes


def alternatives(result: SearchResult) -> list[Alternative]:
    """Returns, for each set of mesh axes but the winner's, its best plan and why that loses."""
    winner = result.plans[0] if result.plans else None
    best: dict[str, tuple[Plan, bool]] = {}
    for plans, fits in ((result.plans, True), (result.too_large, False)):
        for plan in plans:
            best.setdefault(mesh_axes(plan), (plan, fits))
    losers = [
        Alternative(
            axes, plan, fits, slowdown_reason(plan, winner) if fits else plan.estimate.shortfall
        )
        for axes, (plan, fits) in best.items()
        if winner is None or axes != mesh_axes(winner)
    ]
    return sorted(losers, key=lambda loser: (not loser.fits, loser.best.estimate.seconds))


def slowdown_reason(plan: Plan, winner: Plan | None) -> str:
    """Names the part of a step on which a plan spends most more than the winner."""
    if winner is None:
        return ""
    slow, fast = plan.estimate, winner.estimate
    part = max(STEP_PARTS, key=lambda part: slow.parts[part] - fast.parts[part])
    more = slow.parts[part] - fast.parts[part]
    text = f"{slow.seconds / fast.seconds - 1:+.0%}: {format_step(more)} more of {STEP_PARTS[part]}"
    if part == "exposed" and slow.exposed:
        axes = max(slow.exposed, key=lambda axes: slow.exposed[axes])
        text += f", over {axes} ({slow.routes[axes]})"
    return text


def explain_mesh(result: SearchResult, shape: MeshShape) -> str:
    """States the rank of a mesh in a search that included it, and why it is not the first.

    Raises ConfigError where the mesh has another number of devices than the target.
    """
    check_size(shape, result.target)
    best = next((plan for plan in result.plans if plan.mesh == shape), None)
    if best is None:
        too_large = next((plan for plan in result.too_large if plan.mesh == shape), None)
        if too_large is not None:
            return f"{shape}: {too_large.estimate.shortfall}\n  (even with {too_large.name})"
        if str(shape) in result.refused:
            return f"{shape}: the trainer refuses it.\n{result.refused[str(shape)]}"
        return f"{shape}: this search has no plan on it"
    rank = 1 + result.plans.index(best)
    e = best.estimate
    lines = [
        f"{best.name}: {e.seconds:.3g} s per step, {e.mfu:.0%} MFU, {format_bytes(e.bytes)} per "
        f"device; bound by {e.bound_by}; rank {rank} of {len(result.plans)}"
    ]
    if str(e.axis_mapping):
        lines.append(f"  mesh axes: {e.axis_mapping}")
    if rank > 1:
        lines.append(f"  against {result.plans[0].name}: {slowdown_reason(best, result.plans[0])}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Change of one option that reduces the memory of a run."""

    option: str
    """Command-line option and its value."""
    saved_bytes: float
    """Bytes per device that it saves."""
    extra_seconds: float
    """Seconds per step that it costs."""


def memory_remedies(
    run: Run, target: Target, shape: MeshShape, over: float, phase: str = "step"
) -> list[Remedy]:
    """Returns the three cheapest options that save `over` bytes per device,
    or where none does, that save anything.

    phase: of the training, in which the bytes are too many.
    """
    base, changed = variants(run, target, shape)
    savings = []
    for option, plan in changed:
        saved = base.estimate.bytes_in(phase) - plan.estimate.bytes_in(phase)
        if saved > 0:
            extra_seconds = plan.estimate.seconds - base.estimate.seconds
            savings.append(Remedy(option, saved, extra_seconds))
    enough = [remedy for remedy in savings if remedy.saved_bytes >= over]
    return sorted(
        enough or savings, key=lambda remedy: (remedy.extra_seconds, -remedy.saved_bytes)
    )[:3]


def nothing_fits(run: Run, result: SearchResult) -> ConfigError:
    """Builds the error for a search without a plan that fits,
    with the plans that need least memory."""
    target = result.target
    if not result.too_large:
        everywhere = refusal_of_one_device(run)
        if everywhere is not None:
            return everywhere
        batch = batch_note(run, target)
        reasons = [_first_reason(result)] if batch is None else [batch, _first_reason(result)]
        return ConfigError(
            f"{run.name} on {target}",
            f"every mesh of {target.devices} devices is refused: {'; '.join(reasons)}",
            _batch_that_is_planned(run, target) or "another number of devices",
        )
    smallest = result.too_large[:3]
    estimate = smallest[0].estimate
    phase = estimate.peak_phase
    needed = estimate.bytes_in(phase) * target.chip.fragmentation
    fix = f"about {needed / estimate.hbm_bytes:.1f} times the chips, or a chip with more memory"
    if phase in ("step", "evaluation"):
        fix += ", or fewer tokens per step"
    return ConfigError(
        f"{run.name} on {target}",
        "no mesh has the memory; the closest:\n"
        + "\n".join(f"    {plan.name}: {plan.estimate.shortfall}" for plan in smallest),
        fix,
    )


def refusal_of_one_device(run: Run) -> ConfigError | None:
    """Returns why one device cannot train a run, whatever its memory; None if it can.

    One device divides every batch, sequence, head and layer, so no mesh can train what it cannot.
    """
    one = with_open_choices(run)
    training = dataclasses.replace(one.training, remat="full", microbatches=1)
    try:
        place_run(dataclasses.replace(one, training=training), MeshShape())
    except ConfigError as error:
        return error
    return None


def _first_reason(result: SearchResult) -> str:
    """Returns why the mesh that splits least is refused, in a line."""
    if not result.refused:
        return "none divides its batch, heads and layers"
    mesh, reason = next(iter(result.refused.items()))
    return f"{mesh}: {_in_a_line(reason)}"


def _in_a_line(reason: str) -> str:
    """Returns an error of the trainer in a line, without its fix."""
    lines = [line.strip() for line in reason.splitlines()]
    causes = [line.removeprefix("because:").strip() for line in lines if line.startswith("because")]
    if not causes:
        return lines[0]
    return f"{lines[0]}, because {'; '.join(causes)}"


def _batch_that_is_planned(run: Run, target: Target) -> str | None:
    """Returns the option with the nearest batch that has a plan; None where no batch near has one.

    Near are the batches that a part of the devices divides, one below and one above
    for each such part.
    """
    batch = run.training.batch
    near = set[int]()
    for part in divisors(target.devices):
        near |= {batch // part * part, (batch // part + 1) * part}
    for size in sorted(near - {0, batch}, key=lambda size: (abs(size - batch), size)):
        changed = dataclasses.replace(run.training, batch=size)
        if search(dataclasses.replace(run, training=changed), target).plans:
            return f"--batch {size}"
    return None


def _odd_part(n: int) -> int:
    return n // (n & -n)


def nearest_batches(run: Run, target: Target) -> list[int]:
    """Returns the batches next to that of the run which all devices divide;
    none where only powers of two are lacking.

    A power of two that the batch lacks is left to `tensor`, which divides heads and widths; other
    factors divide few dimensions of a model.
    """
    batch, devices = run.training.batch, target.devices
    if _odd_part(devices // math.gcd(batch, devices)) == 1:
        return []
    # Of the powers of two only those that the batch has: the others stay with `tensor`.
    step = _odd_part(devices) * math.gcd(batch & -batch, devices)
    step = min(step, devices)
    return [n for n in (batch // step * step, (batch // step + 1) * step) if n]


def batch_note(run: Run, target: Target) -> str | None:
    """States which factor of the devices does not divide the batch,
    and the nearest batches that it divides."""
    nearest = nearest_batches(run, target)
    if not nearest:
        return None
    batch, devices = run.training.batch, target.devices
    lacking = devices // math.gcd(batch, devices)
    return (
        f"{devices} devices do not divide a batch of {batch} sequences: {batch} = "
        f"{batch // devices} * {devices} + {batch % devices}, so a factor of {lacking} must be in "
        f"stage, context or tensor; --batch {' or '.join(map(str, nearest))} leaves it to data and "
        "fsdp"
    )


def compare_batches(run: Run, target: Target, result: SearchResult) -> str | None:
    """Prices the nearest batches that the devices divide against the run's own."""
    rates = []
    for batch in nearest_batches(run, target):
        changed = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=batch))
        plans = search(changed, target).plans
        if plans:
            rates.append(
                f"batch {batch}: {plans[0].estimate.tokens_per_second:,.0f} tokens/s "
                f"({plans[0].name})"
            )
    if not rates or not result.plans:
        return None
    own = result.plans[0].estimate.tokens_per_second
    return f"{'; '.join(rates)}; against {own:,.0f} tokens/s with {run.training.batch}"


def sharding_note(result: SearchResult) -> str | None:
    """States the factor of the devices that shards no parameter,
    where FSDP over all devices is refused for it."""
    devices = result.target.devices
    odd = _odd_part(devices)
    refused = [mesh for mesh, reason in result.refused.items() if "no dimension divides" in reason]
    sharding = [plan.mesh.fsdp for plan in (*result.plans, *result.too_large)]
    if odd == 1 or not refused or any(fsdp % odd == 0 for fsdp in sharding):
        return None
    return (
        f"{devices} = {devices // odd} * {odd}: {odd} divides no dimension of some parameters, "
        f"which are split evenly or not at all, so fsdp has at most {max(sharding, default=1)} "
        f"here, and {odd} is in data, stage or context; {refused[0]} and {len(refused) - 1} more "
        "meshes are refused"
    )


def exchange_note(result: SearchResult) -> str | None:
    """States why meshes are refused on which too many devices
    of an NVLink domain send rows to experts."""
    reasons = [reason for reason in result.refused.values() if "NVLink domain" in reason]
    if not reasons:
        return None
    return (
        f"layouts are refused on {len(reasons)} of the meshes, as this one: "
        f"{_in_a_line(reasons[0])}"
    )


def sends_note(result: SearchResult) -> str | None:
    """States what the first plan's exchange between GPU nodes relies on."""
    if not result.plans:
        return None
    best = result.plans[0]
    return settle(best.placed, machine_of_target(result.target, best.mesh)).sends_note


def room_note(plan: Plan) -> str | None:
    """States that a plan which comes first takes more of a GPU's memory than XLA is fast in.

    Plans with room come first, so none has it (`search.preference`).
    """
    e = plan.estimate
    if is_roomy(plan):
        return None
    return (
        f"no plan on {plan.target} leaves a quarter of the memory free; {plan.name} takes "
        f"{e.bytes / e.hbm_bytes:.0%}, and above {plan.target.chip.roomy_bytes / e.hbm_bytes:.0%} "
        "XLA recomputes more and overlaps less than is priced here"
    )


def fewer_are_faster(plans: Sequence[Plan]) -> list[str]:
    """States which plans are slower than another of fewer devices of the same chip,
    for the same tokens per step."""
    found = []
    for plan in plans:
        fewer = [
            other
            for other in plans
            if other.target.name == plan.target.name
            and other.target.devices < plan.target.devices
            and other.estimate.tokens == plan.estimate.tokens
            and other.estimate.seconds <= plan.estimate.seconds
        ]
        if fewer:
            best = min(fewer, key=lambda other: other.estimate.seconds)
            found.append(
                f"{plan.target.devices} devices are slower than {best.target.devices}: {plan.name} "
                f"takes {format_step(plan.estimate.seconds)} on {plan.target}, and {best.name} "
                f"takes {format_step(best.estimate.seconds)} on {best.target}"
            )
    return found


def smaller_target(target: Target) -> Target | None:
    """Returns the next smaller machine of the same chips, with a power of two of devices;
    None if there is none."""
    devices = 2 ** ((target.devices - 1).bit_length() - 1)
    if target.devices < 2 or target.slices > 1:
        return None
    interconnect = target.chip.interconnect
    if isinstance(interconnect, Torus):
        shape = slices_by_chips(interconnect).get(devices // target.chip.devices_per_chip)
        return None if shape is None else dataclasses.replace(target, topology=shape)
    _, each = target.topology
    # Nodes like the target's, or full ones where those do not divide the devices,
    # as 6 do not divide 8.
    for node in (each, interconnect.devices_per_node):
        if devices <= node:
            return dataclasses.replace(target, topology=(1, devices))
        if devices % node == 0:
            return dataclasses.replace(target, topology=(devices // node, node))
    return None


def smaller_machine_note(run: Run, result: SearchResult) -> str | None:
    """States that fewer devices are faster, where the devices divide the batch badly and it is so.

    Only then another search is made: where the devices are no power of two,
    or more than the sequences of a batch.
    """
    target = result.target
    if not result.plans or (
        _odd_part(target.devices) == 1 and run.training.batch >= target.devices
    ):
        return None
    smaller = smaller_target(target)
    if smaller is None:
        return None
    plans = search(run, smaller).plans
    return next(iter(fewer_are_faster([result.plans[0], *plans[:1]])), None)


def announced_note(target: Target) -> str | None:
    """States that a chip is only announced, and where each figure is from that was not,
    or not in full."""
    chip = target.chip
    if not chip.announced:
        return None
    unsaid = [
        f"{field} is {source}"
        for field, source in chip.sources.items()
        if "derived" in source or "assumed" in source
    ]
    return "; ".join([f"{chip.name} is announced, not measured ({chip.announced})", *unsaid])


def notes(run: Run, result: SearchResult) -> list[str]:
    """Returns what does not divide on a target,
    and how much faster other batches or fewer devices are."""
    target = result.target
    found = [
        announced_note(target),
        batch_note(run, target),
        compare_batches(run, target, result),
        sharding_note(result),
        exchange_note(result),
        sends_note(result),
        room_note(result.plans[0]) if result.plans else None,
        smaller_machine_note(run, result),
        result.plans[0].record_note if result.plans else None,
    ]
    return [note for note in found if note is not None]

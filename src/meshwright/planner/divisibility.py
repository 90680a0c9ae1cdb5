"""Numbers of devices with factors such as 3 or 9: what they do not divide, and the nearest batches that they do."""

import dataclasses
import math

from meshwright.hardware.targets import Target
from meshwright.planner.search import SearchResult, search
from meshwright.runs.run import Run


def odd_part(n: int) -> int:
    """Returns `n` without its factors of two."""
    return n // (n & -n)


def nearest_batches(run: Run, target: Target) -> list[int]:
    """Returns the batches next to that of the run which all devices divide; none where only powers of two are lacking.

    A power of two that the batch lacks is left to `tensor`, which divides heads and widths; other factors divide few
    dimensions of a model.
    """
    batch, devices = run.training.batch, target.devices
    if odd_part(devices // math.gcd(batch, devices)) == 1:
        return []
    # Of the powers of two only those that the batch has: the others stay with `tensor`.
    step = odd_part(devices) * math.gcd(batch & -batch, devices)
    step = min(step, devices)
    return [n for n in (batch // step * step, (batch // step + 1) * step) if n]


def batch_note(run: Run, target: Target) -> str | None:
    """States which factor of the devices does not divide the batch, and the nearest batches that it divides."""
    nearest = nearest_batches(run, target)
    if not nearest:
        return None
    batch, devices = run.training.batch, target.devices
    lacking = devices // math.gcd(batch, devices)
    return (
        f"{devices} devices do not divide a batch of {batch} sequences: {batch} = {batch // devices} * {devices} + "
        f"{batch % devices}, so a factor of {lacking} must be in stage, context or tensor; "
        f"--batch {' or '.join(map(str, nearest))} leaves it to data and fsdp"
    )


def compare_batches(run: Run, target: Target, result: SearchResult) -> str | None:
    """Prices the nearest batches that the devices divide against the run's own."""
    rates = []
    for batch in nearest_batches(run, target):
        changed = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=batch))
        plans = search(changed, target).plans
        if plans:
            rates.append(f"batch {batch}: {plans[0].estimate.tokens_per_second:,.0f} tokens/s ({plans[0].name})")
    if not rates or not result.plans:
        return None
    own = result.plans[0].estimate.tokens_per_second
    return f"{'; '.join(rates)}; against {own:,.0f} tokens/s with {run.training.batch}"


def sharding_note(result: SearchResult) -> str | None:
    """States the factor of the devices that shards no parameter, where FSDP over all devices is refused for it."""
    devices = result.target.devices
    odd = odd_part(devices)
    refused = [mesh for mesh, reason in result.refused.items() if "no dimension divides" in reason]
    sharding = [plan.mesh.fsdp for plan in (*result.plans, *result.too_large)]
    if odd == 1 or not refused or any(fsdp % odd == 0 for fsdp in sharding):
        return None
    return (
        f"{devices} = {devices // odd} * {odd}: {odd} divides no dimension of some parameters, which are split evenly "
        f"or not at all, so fsdp has at most {max(sharding, default=1)} here, and {odd} is in data, stage or context; "
        f"{refused[0]} and {len(refused) - 1} more meshes are refused"
    )


def notes(run: Run, result: SearchResult) -> list[str]:
    """Returns what does not divide on a target, and how much faster the nearest batches are that do."""
    target = result.target
    found = [batch_note(run, target), compare_batches(run, target, result), sharding_note(result)]
    return [note for note in found if note is not None]

"""Plan of a run on the devices that are left of it: another mesh, the same model and batch."""

import contextlib
import dataclasses

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.formatting import format_step
from meshwright.hardware.chips import CHIPS, Torus, chip_name
from meshwright.hardware.targets import Target, slices_by_chips
from meshwright.planner.search import Plan, search
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run

UNKNOWN = "h100"
"""Chip that meshes are priced on where nothing is known of the run's own:
with nodes, whatever their size."""
_VOCAB = 1024
_ALWAYS = ("microbatches", "remat", "saved_layers")
_STAGED = ("pipeline_schedule", "virtual_stages", "stage_saves")
"""Fields of `Training` that a search chooses besides the mesh,
and those that it chooses with pipeline stages."""


@dataclasses.dataclass(frozen=True)
class FewerDevices:
    """Changes with which a run goes on with fewer devices, and their reason."""

    mesh: MeshShape
    training: dict[str, int | str]
    """Fields of `Training` that have to change with the mesh."""
    layout: str | None
    """Layout, where that changes too."""
    why: str
    """One line: what was chosen among how many plans, for which hardware."""


def plan_for_fewer(run: Run, hosts: int, each: int, kind: str) -> FewerDevices:
    """Returns the fastest plan of the run that fits on `hosts` hosts with `each` devices.

    kind: `jax.Device.device_kind`. Of a known chip the whole plan is taken, microbatches and remat
    policy included. Of others, such as simulated devices, only the mesh, in the order of the
    predicted step on `UNKNOWN`: the first on which the run's own settings are legal. Raises
    ConfigError where the run fits no mesh, or no plan fits the memory.
    """
    # The vocabulary comes from the text, which is not read here;
    # it is padded, so every size divides.
    run = dataclasses.replace(
        run, model=dataclasses.replace(run.model, vocab=run.model.vocab or _VOCAB)
    )
    devices, asked = hosts * each, f"the run {run.name} on {hosts * each} of its devices"
    target = _target(run, hosts, each, kind)
    found = search(run, target or Target(UNKNOWN, CHIPS[UNKNOWN], (hosts, each)))
    if target is not None and not found.plans and found.too_large:
        least = found.too_large[0]
        truth = (
            f"none of {found.priced} plans fits; closest on a {target.chip.name} is {least.name}, "
            f"which {least.estimate.shortfall}"
        )
        raise ConfigError(
            asked, truth, "--restarts.hosts all, or a model or batch that fits fewer devices"
        )
    plans = [*found.plans, *(() if target else found.too_large)]
    if not plans:
        refused = "; ".join(dict.fromkeys(text.splitlines()[0] for text in found.refused.values()))
        truth = (
            refused
            or f"no mesh of {devices} devices divides the batch of {run.training.batch} and "
            "the model"
        )
        raise ConfigError(
            asked, truth, "--restarts.hosts all, or a mesh and batch that more numbers divide"
        )
    if target is not None:
        seconds = format_step(plans[0].estimate.seconds)
        why = f"for {target}, {seconds} per step predicted: the fastest of {found.priced} plans"
        return _changes(plans[0], run, f"{plans[0].name} {why}")
    ranked = f"so {len(plans)} meshes were ranked as on {UNKNOWN}:{hosts}x{each}"
    rule = f"nothing is known of {kind or 'the devices'}, {ranked}"
    for plan in plans:
        with contextlib.suppress(ConfigError):
            place_run(dataclasses.replace(run, mesh=plan.mesh))
            return FewerDevices(
                plan.mesh, {}, None, f"{plan.mesh}, all other settings as they were: {rule}"
            )
    return _changes(plans[0], run, f"{plans[0].name}: {rule}")


def _target(run: Run, hosts: int, each: int, kind: str) -> Target | None:
    name = chip_name(kind)
    if name is None:
        return None
    chip = CHIPS[name]
    if not isinstance(chip.interconnect, Torus):
        return Target(name, chip, (hosts, each))
    # Slices are lost as a whole; what is left of a single one may be no slice.
    slices = run.mesh.slices if run.mesh else 1
    whole = run.mesh.size // slices if run.mesh else 0
    slices = hosts * each // whole if slices > 1 and hosts * each % whole == 0 else 1
    chips = hosts * each // slices // chip.devices_per_chip
    shape = slices_by_chips(chip.interconnect).get(chips)
    return None if shape is None else Target(name, chip, shape, slices)


def _changes(plan: Plan, run: Run, why: str) -> FewerDevices:
    names = [*_ALWAYS, *(_STAGED if plan.mesh.stage > 1 else ())]
    names += ["context_strategy"] if plan.mesh.context > 1 else []
    chosen = {name: getattr(plan.run.training, name) for name in names}
    changed = {
        name: value for name, value in chosen.items() if value != getattr(run.training, name)
    }
    return FewerDevices(
        plan.mesh, changed, None if plan.run.layout == run.layout else plan.run.layout, why
    )

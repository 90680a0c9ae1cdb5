"""Runs that fit the devices at hand: recipes with as many layers as the planner finds memory for, tiny ones on CPUs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.bench.hardware.machine import memory_stats
from meshwright.bench.hardware.rates import calibration_of
from meshwright.config import Training
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import default_mesh_shape
from meshwright.hardware.targets import Target
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.model import Model
from meshwright.planner.forecast import local_target
from meshwright.planner.search import Plan, price_run, search
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run

RECIPES: dict[str, tuple[tuple[str, ...], int]] = {
    "small": (("qwen3-0-6b",), 4096),
    "dense": (("llama3-8b", "llama2-7b"), 4096),
    "experts": (("mixtral-8x7b", "qwen3-30b-a3b"), 4096),
    "long": (("llama3-8b", "llama2-7b"), 32768),
}
"""Name -> recipes and sequence length of the runs on accelerators; a later recipe where few layers of the first fit."""
_FEW_LAYERS = 4
_TOKENS = 16384
"""Tokens of a step on each device."""
_FEWER_LAYERS = 0.75
_LEAST_STEPS = 25
"""Steps that a measurement takes at least."""
_TINY: dict[str, Model] = {
    "dense": Llama(vocab=512, width=64, layers=2, heads=8, kv_heads=8, mlp=128, vocab_multiple=16),
    "experts": Mixtral(
        vocab=512, width=64, layers=2, heads=8, kv_heads=8, mlp=128, experts=8, expert_mlp=64, vocab_multiple=16
    ),
}
"""Runs on simulated devices."""
_TINY_SEQ = 64


@dataclasses.dataclass(frozen=True)
class SizedRun:
    """A run for the devices at hand, with the planner's prediction where anything is known of them."""

    name: str
    run: Run
    """Run with its mesh."""
    plan: Plan | None
    target: Target | None
    note: str = ""
    """What was cut so that it fits."""


def run_names() -> tuple[str, ...]:
    """Returns the names of the runs for these devices."""
    return tuple(_TINY if jax.default_backend() == "cpu" else RECIPES)


def target_here(folder: Path, devices: Sequence[Any] | None = None) -> Target | None:
    """Returns the target that the devices form, with the rates measured in `folder` and the memory that JAX may use.

    None where the chip is not known and no rates were measured.
    """
    devices = jax.devices() if devices is None else devices
    known = local_target(devices, calibration_of(folder))
    if known is None:
        return None
    limit = memory_stats(devices[0]).get("bytes_limit")
    target, chip = known[0], known[0].chip
    if limit and limit < chip.hbm_bytes:
        target = dataclasses.replace(target, chip=dataclasses.replace(chip, hbm_bytes=float(limit)))
    return target


def sized_run(name: str, folder: Path, seconds: float, layers: int | None = None) -> SizedRun:
    """Returns the run of that name on all devices.

    seconds: time for its steps.  layers: at most so many.
    Raises ConfigError where not even one layer fits, or nothing is known of the devices.
    """
    target, devices = target_here(folder), jax.device_count()
    if jax.default_backend() == "cpu":
        training = Training(steps=1000, batch=2 * devices, seq=_TINY_SEQ, compute_dtype="float32", remat="none")
        run = Run(model=_TINY[name], mesh=default_mesh_shape(devices), training=training, name=f"tiny {name}")
        return SizedRun(name, run, None if target is None else price_run(run, target), target)
    if target is None:
        raise ConfigError(
            f"a run for {jax.devices()[0].device_kind}",
            "the chip is not in hardware/chips.py and has no rates here",
            "run the section matmuls first",
        )
    return fit_recipe(name, target, seconds, layers)


def fit_recipe(name: str, target: Target, seconds: float, layers: int | None = None) -> SizedRun:
    """Returns the first recipe of RECIPES of which more than a few layers fit the target's memory and the time.

    seconds: time for its steps.  layers: at most so many. Raises ConfigError where not even one layer fits.
    """
    recipes, seq = RECIPES[name]
    found: list[tuple[int, SizedRun]] = []
    for recipe in recipes:
        run = find_recipe(recipe)
        training = dataclasses.replace(run.training, batch=target.devices * max(1, _TOKENS // seq), seq=seq, steps=1000)
        fitted = _fit(name, dataclasses.replace(run, training=training), target, seconds, layers)
        if fitted is None:
            continue
        found.append(fitted)
        if fitted[0] >= _FEW_LAYERS:
            return fitted[1]
    if not found:
        raise ConfigError(f"{' or '.join(recipes)} on {target}", "not even one layer of it fits", "more devices")
    return max(found, key=lambda pair: pair[0])[1]


def _with_layers(model: Any, layers: int) -> Model:
    cut: Model = dataclasses.replace(model, layers=layers)
    return cut


def _fit(name: str, run: Run, target: Target, seconds: float, most: int | None) -> tuple[int, SizedRun] | None:
    """Cuts layers until a plan fits memory and time, then takes the fastest, without a pipeline where there is one.

    Returns the number of layers and the run; None where not even one layer fits the memory.
    """
    whole = int(getattr(run.model, "layers", 1))
    layers = min(whole, most or whole)
    while layers >= 1:
        changed = dataclasses.replace(run, model=_with_layers(run.model, layers))
        plans = search(changed, target).plans
        plan = next((p for p in plans if p.mesh.stage == 1), plans[0]) if plans else None
        if plan is not None and (plan.estimate.seconds * _LEAST_STEPS <= seconds or layers == 1):
            note = "" if layers == whole else f"{layers} of {whole} layers, which fit memory and time"
            return layers, SizedRun(name, dataclasses.replace(plan.run, name=run.name), plan, target, note)
        layers = int(layers * _FEWER_LAYERS)
    return None

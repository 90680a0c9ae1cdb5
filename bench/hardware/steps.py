"""Runs that fit the devices at hand, measured.

    meshwright bench hardware --only matmuls collectives bench/hardware/steps.py:measure_steps --out hardware
    meshwright bench hardware --only bench/hardware/steps.py:measure_checkpoint --out hardware

A run is a recipe with as many layers as the planner finds memory for, a tiny one on CPUs. Its steps are measured with
the planner's prediction and the simulated schedule, and its state is saved and restored.
"""

import contextlib
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.analysis.programs import OutOfMemory, compiler_error, parse_module
from meshwright.analysis.run_census import profile_for, simulate_run
from meshwright.bench.hardware.machine import calibration_of, memory_stats
from meshwright.bench.hardware.section import Measurement, Section, describe
from meshwright.checkpoint.checkpoints import Checkpoints, check_room
from meshwright.config import Training
from meshwright.errors import ConfigError
from meshwright.formatting import format_step
from meshwright.hardware.chips import find_chip
from meshwright.hardware.mesh import build_mesh, default_mesh_shape
from meshwright.hardware.targets import Target
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.flops import mfu, training_flops_per_token
from meshwright.models.model import Model
from meshwright.planner.forecast import local_target
from meshwright.planner.search import Plan, price_run, search
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.sharding.params import count_params
from meshwright.statuses import statuses_of
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.step.train_step import build_train_step
from meshwright.storage.removing import remove_tree
from xlacensus.hlo.parser import Module

sys.path.append(str(Path(__file__).parents[1]))
from loop_cost import StepRunner, measure_loop

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
_SIZES: dict[str, Any] = dict(
    vocab=512, width=64, layers=2, heads=8, kv_heads=8, mlp=128, vocab_multiple=16
)
_TINY: dict[str, Model] = {
    "dense": Llama(**_SIZES),
    "experts": Mixtral(**_SIZES, experts=8, expert_mlp=64),
}
"""Runs on simulated devices."""
_TINY_SEQ = 64


@dataclasses.dataclass(frozen=True)
class SizedRun:
    """A run for the devices at hand, with the planner's prediction where anything is known of them."""

    name: str
    run: Run
    plan: Plan | None
    target: Target | None
    note: str = ""
    """What was cut so that it fits."""


def run_names() -> tuple[str, ...]:
    """Returns the names of the runs for these devices."""
    return tuple(_TINY if jax.default_backend() == "cpu" else RECIPES)


def target_here(folder: Path) -> Target | None:
    """Returns the target that the devices form, with the rates measured in `folder` and the memory that JAX may use.

    None where the chip is not known and no rates were measured.
    """
    known = local_target(jax.devices(), calibration_of(folder))
    if known is None:
        return None
    limit = memory_stats(jax.devices()[0]).get("bytes_limit")
    target, chip = known[0], known[0].chip
    if limit and limit < chip.hbm_bytes:
        target = dataclasses.replace(target, chip=dataclasses.replace(chip, hbm_bytes=float(limit)))
    return target


def sized_run(name: str, folder: Path, seconds: float, layers: int | None = None) -> SizedRun:
    """Returns the run of that name on all devices.

    seconds: time for its steps.  layers: upper limit of its layers.
    Raises ConfigError where not even one layer fits, or nothing is known of the devices.
    """
    target, devices = target_here(folder), jax.device_count()
    if jax.default_backend() == "cpu":
        training = Training(
            steps=1000, batch=2 * devices, seq=_TINY_SEQ, compute_dtype="float32", remat="none"
        )
        run = Run(
            model=_TINY[name],
            mesh=default_mesh_shape(devices),
            training=training,
            name=f"tiny {name}",
        )
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

    seconds: time for its steps.  layers: upper limit of its layers. Raises ConfigError where not even one layer fits.
    """
    recipes, seq = RECIPES[name]
    found: list[tuple[int, SizedRun]] = []
    for recipe in recipes:
        run = find_recipe(recipe)
        training = dataclasses.replace(
            run.training, batch=target.devices * max(1, _TOKENS // seq), seq=seq, steps=1000
        )
        fitted = _fit(name, dataclasses.replace(run, training=training), target, seconds, layers)
        if fitted is None:
            continue
        found.append(fitted)
        if fitted[0] >= _FEW_LAYERS:
            return fitted[1]
    if not found:
        raise ConfigError(
            f"{' or '.join(recipes)} on {target}", "not even one layer of it fits", "more devices"
        )
    return max(found, key=lambda pair: pair[0])[1]


def _layers(model: Any) -> int:
    return int(getattr(model, "layers", 1))


def _fit(
    name: str, run: Run, target: Target, seconds: float, most: int | None
) -> tuple[int, SizedRun] | None:
    """Cuts layers until a plan fits memory and time, then takes the fastest, without a pipeline where there is one.

    Returns the number of layers and the run; None where not even one layer fits the memory.
    """
    model: Any = run.model
    layers = min(_layers(model), most or _layers(model))
    while layers >= 1:
        plans = search(
            dataclasses.replace(run, model=dataclasses.replace(model, layers=layers)), target
        ).plans
        plan = next((p for p in plans if p.mesh.stage == 1), plans[0]) if plans else None
        if plan is not None and (plan.estimate.seconds * _LEAST_STEPS <= seconds or layers == 1):
            cut = f"{layers} of {_layers(model)} layers, which fit memory and time"
            note = "" if layers == _layers(model) else cut
            return layers, SizedRun(
                name, dataclasses.replace(plan.run, name=run.name), plan, target, note
            )
        layers = int(layers * _FEWER_LAYERS)
    return None


HOST_LIMIT = 1e-3
"""Seconds of the host's work per step above which it is noted on accelerators."""
_ROUNDS = 3
_MAX_STEPS = 40
_MEASURED_FRACTION = 0.3
"""Fraction of a run's time that steps are taken for; compiling takes the rest."""


class _StartedRun:
    """A sized run on its devices, compiled as `train` does, that has taken a step."""

    def __init__(self, sized: SizedRun, steps: int):
        self.sized, self.laps, self._last = sized, dict[str, float](), time.perf_counter()
        self.device_run = _place(sized)
        self.runner = StepRunner(self.device_run, steps=steps)
        self._lap("place_seconds")
        lowered = build_train_step(self.device_run).lower(
            self.device_run.abstract, self.runner.batch
        )
        options: dict[str, Any] = self.device_run.accepted_compiler_options()
        if sized.target is not None:
            options |= profile_for(sized.target)(self.device_run, lowered)
        self.compiled: Any = lowered.compile(compiler_options=options)
        self._lap("compile_seconds")
        state = jax.block_until_ready(self.device_run.initial_state())
        self._lap("init_seconds")
        self.runner.start(self.compiled, state)
        del state
        self._lap("first_step_seconds")

    def _lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @functools.cached_property
    def module(self) -> Module:
        """Parsed program."""
        return parse_module(self.compiled.as_text())

    def simulated(self) -> dict[str, Any]:
        """Simulates the program; no figures where nothing is known of the chip, or stages run different branches."""
        if self.sized.target is None or self.device_run.layout.shape.stage > 1:
            return {"simulated_seconds": None}
        try:
            schedule = simulate_run(self.module, self.device_run, self.sized.target)
        except (
            Exception
        ) as error:  # a program that the reader does not know must not lose the measured figures
            return {"simulated_seconds": None, "simulated_note": describe(error)}
        return {
            "simulated_seconds": schedule.step_seconds,
            "simulated_exposed": sum(schedule.exposed.values()),
            "simulated_links": sum(schedule.link_seconds.values()),
            "simulated_exposed_by_axes": dict(schedule.exposed),
        }


def _place(sized: SizedRun) -> DeviceRun:
    assert sized.run.mesh is not None
    return place_on_devices(sized.run, build_mesh(sized.run.mesh))


def _describe_run(sized: SizedRun, device_run: DeviceRun) -> dict[str, Any]:
    training = device_run.run.training
    return {
        "run": sized.run.name,
        "note": sized.note,
        "mesh": str(device_run.layout.shape),
        **{
            name: getattr(training, name)
            for name in ("batch", "seq", "microbatches", "remat", "compute_dtype")
        },
        "attention_kernel": device_run.kernels.name,
        "parameters": count_params(device_run.layout.params),
        "compiler_options": device_run.accepted_compiler_options(),
    }


def measure_steps(section: Section) -> None:
    """Compiles and runs train steps: a small and a large dense model, experts, a long sequence."""
    names = run_names()
    items: dict[str, Measurement] = {
        name: functools.partial(_measure_or_cut, section, name, section.seconds / len(names))
        for name in names
    }
    section.measure(items)
    for row in section.rows:
        if "loop_seconds" in row:
            section.notes.append(_summary(row))
        slow = max(
            row.get("dispatch_seconds", 0.0),
            row.get("overhead_seconds", 0.0),
            row.get("host_seconds", 0.0),
        )
        if slow > HOST_LIMIT and jax.default_backend() != "cpu":
            section.notes.append(
                f"{row['item']}: the host takes {slow * 1e3:.1f} ms of a step; the aim is under 1 ms"
            )


def _summary(row: Mapping[str, Any]) -> str:
    """Returns one line: step time, and the planned and the simulated time over it."""
    measured = row["loop_seconds"]
    text = f"{row['item']} {format_step(measured)}"
    if row["mfu"]:
        text += f", MFU {row['mfu']:.1%}"
    for name in ("planned", "simulated"):
        seconds = row["predicted_seconds" if name == "planned" else "simulated_seconds"]
        if seconds:
            text += f", {name} / measured {seconds / measured:.2f}"
    return text


def _measure_or_cut(section: Section, name: str, seconds: float) -> Mapping[str, Any]:
    """Measures a run; where it needs more memory than planned, records that and measures half of its layers."""
    allowed = seconds * _MEASURED_FRACTION
    try:
        sized = sized_run(name, section.folder, allowed)
    except ConfigError as error:
        return {"unsupported": f"{error.asked}: {error.truth}"}
    try:
        return _measure_run(sized, seconds)
    except Exception as error:
        layers = _layers(sized.run.model) // 2
        refused_by_compiler = isinstance(compiler_error(error), OutOfMemory)
        if not layers or not (refused_by_compiler or "RESOURCE_EXHAUSTED" in statuses_of(error)):
            raise
        section.notes.append(f"{name}: the planned run does not fit: {describe(error)[:200]}")
    return _measure_run(sized_run(name, section.folder, allowed, layers), seconds)


def _measure_run(sized: SizedRun, seconds: float) -> Mapping[str, Any]:
    started = _StartedRun(sized, steps=(_ROUNDS + 1) * _MAX_STEPS)
    device_run, training = started.device_run, sized.run.training
    probe = max(started.runner.bare(2), 1e-5)
    steps = int(seconds * _MEASURED_FRACTION / probe / (3 * _ROUNDS))
    cost = measure_loop(
        started.runner, steps=min(_MAX_STEPS, max(1, steps)), rounds=_ROUNDS, reporters=[]
    )
    tokens = training.batch * training.seq / cost.loop_seconds
    device = device_run.mesh.devices.flat[0]
    chip, per_token = (
        find_chip(device.device_kind),
        training_flops_per_token(device_run.run.model, training.seq),
    )
    memory = started.compiled.memory_analysis()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        **_describe_run(sized, device_run),
        **started.laps,
        **dataclasses.asdict(cost),
        "tokens_per_second": tokens,
        "mfu": None
        if chip is None
        else mfu(per_token, tokens, chip.flops_bf16 * device_run.mesh.size),
        "predicted_seconds": None if sized.plan is None else sized.plan.estimate.seconds,
        "predicted_bytes": None if sized.plan is None else sized.plan.estimate.bytes,
        "compiled_bytes": live + memory.temp_size_in_bytes,
        "peak_bytes": memory_stats(device).get("peak_bytes_in_use"),
        **started.simulated(),
    }


def measure_checkpoint(section: Section) -> None:
    """Saves and restores the smallest of the sized runs; a restore verifies every tensor."""
    name = run_names()[0]
    section.measure(
        {name: functools.partial(_save_and_restore, name, section.folder, section.seconds)}
    )


def _save_and_restore(name: str, folder: Path, seconds: float) -> Mapping[str, Any]:
    sized = sized_run(name, folder, seconds)
    device_run = _place(sized)
    out = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=folder))
    check_room(out, device_run, 1)
    state = jax.block_until_ready(device_run.initial_state())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer)))
    try:
        with Checkpoints(out, max_to_keep=1) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(state, device_run, step=1, cursor=0)  # also compiles the fingerprints
            checkpoints.wait()
            first, began = time.perf_counter() - began, time.perf_counter()
            checkpoints.save(state, device_run, step=2, cursor=0)
            blocked = time.perf_counter() - began
            checkpoints.wait()
            saved = time.perf_counter() - began
            del state
            began = time.perf_counter()
            jax.block_until_ready(checkpoints.restore(device_run)[0].params)
            restored = time.perf_counter() - began
    finally:
        with contextlib.suppress(OSError):
            remove_tree(out, below=out.parent)
    return {
        **_describe_run(sized, device_run),
        "bytes": size,
        "blocked_seconds": blocked,
        "save_seconds": saved,
        "first_save_seconds": first,
        "restore_seconds": restored,
        "save_bandwidth": size / saved,
        "restore_bandwidth": size / restored,
    }

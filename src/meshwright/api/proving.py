"""The verb `prove`: a step compiled for hardware, here or not, and read."""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jax
import tyro
from rich.console import Console

from meshwright.activity import activity
from meshwright.analysis.programs import Census, OutOfMemory, read_census, save_census
from meshwright.analysis.run_census import (
    cache_key,
    cached,
    census_of_eval_step,
    census_of_train_step,
    profile_for,
)
from meshwright.analysis.run_memory import compiled_phases
from meshwright.api.proofs import Say, compile_in_subprocess, is_compiling_process, timings_file
from meshwright.api.targets import find_target, refuse_wrapped, resolved_run, run_on_mesh
from meshwright.api.verb import (
    SIMULATED,
    Base,
    Call,
    Outcome,
    RunOptions,
    given_options,
    require_writable,
    start_devices,
)
from meshwright.bench.calibration_file import calibration_here
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError, unwritable_file
from meshwright.formatting import format_bytes
from meshwright.hardware.aot import topology_devices
from meshwright.hardware.mesh import build_mesh
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import Estimate, estimate
from meshwright.planner.explain import memory_remedies
from meshwright.planner.forecast import local_target
from meshwright.planner.plan_file import is_plan, read_plan
from meshwright.planner.search import machine_for, with_choices_that_fit
from meshwright.ranges import TimeLimit
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import default_cache_folder, path_of
from meshwright.trainer.relations import check_run
from meshwright.trust import trust_options
from meshwright.views.blocks import Facts
from meshwright.views.census_page import (
    census_page,
    census_sections,
    census_title,
    difference_section,
    prediction_section,
    remedies_section,
)
from meshwright.views.draw import MachineGrid, machine_of
from meshwright.views.layout_page import layout_sections, phases_section
from meshwright.views.report import Report, Section, print_sections
from meshwright.views.run_tables import choices_facts, choices_to_json
from xlacensus.comparison import compare

_LARGEST_ON_CPU = 2**33
"""Elements of an array from which on XLA's compiler for CPUs counts no tiles, and divides by zero.
"""
_WRITTEN = ("save", "hlo", "html")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProveOptions(RunOptions):
    """Compile the train step of RECIPE (by default `tiny`) for a mesh of the devices at hand, of
    simulated devices, or of hardware that is not here, and read the compiled program: memory by
    category, every collective, FLOPs, faults. Nothing is trained. The exit code is 6 where the step
    does not fit the memory.
    """

    on: Annotated[str | None, tyro.conf.arg(metavar="CHIP:SIZE")] = None
    """Compile for hardware that is not here, with its own compiler: v5p:4x4x8, 2*v6e:16x16,
    tpu7x:4x4x4, h100:64, b200:256. A plan file names its own."""
    limit: TimeLimit = 3600
    """Most seconds of processor time for compiling with --on."""
    step: Literal["train", "evaluate"] = "train"
    """Program to compile."""
    against: str | None = None
    """Compare with another mesh (axis=degree,...), another PLAN.json for the same hardware, or a
    census that --save wrote; --html then shows the difference."""
    save: Path | None = None
    """Write the census as JSON."""
    hlo: Path | None = None
    """Write the text of the compiled program (HLO)."""
    html: Path | None = None
    """Write one offline page: mesh, parameters, memory, collectives, FLOPs, findings."""
    fresh: bool = False
    """Compile again what is in the cache of proofs."""
    json: bool = False
    """Print the census as JSON on standard output, and everything else on standard error."""

    @classmethod
    def of(cls, base: Base) -> Self:
        """Returns the options before any is given: a plan names its hardware."""
        return cls(run=base.run, on=base.target)

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright prove`: compiles, writes, prints."""
        console = call.console
        target = find_target(self.on) if self.on else None
        refuse_wrapped(self.run, given_options(self, ("step",)))
        require_writable(getattr(self, name) for name in _WRITTEN)
        other = self._other_side(target)
        if target is not None and not is_compiling_process(target):
            # A run that no compiler would take is refused without one.
            check_run(self.run, self.run.mesh or MeshShape(fsdp=target.devices))
            words = [*call.words, *trust_options()]
            code, errors = compile_in_subprocess(target, self.limit, words, sys.stdout)
            sys.stderr.write(errors)
            return Outcome(code=code)
        devices = self._devices_here(other) if target is None else target_devices(target)
        take = functools.partial(
            compile_step, devices=devices, target=target, step=self.step, fresh=self.fresh
        )
        run = run_on_mesh(self.run, len(devices), target)
        step: Callable[[], CompiledStep] = functools.partial(take, run)
        if target is not None and self.step == "train":
            say = functools.partial(console.print, soft_wrap=True)
            run, step = compile_choices(run, target, take, say)
        try:
            compiled = step()
        except OutOfMemory as error:
            print_sections(console, _remedies(run, target, error.required - error.available))
            raise
        sections = self._compare(console, run, compiled.census, other, take)
        self._write_files(compiled, machine_of(devices), sections)
        phases = compiled.phases() if self.against is None else {}
        if self.against is None and not self.json:
            _print_step(console, compiled, phases)
        fits = target is None or _print_verdict(console, compiled, target, phases)
        code = 0 if fits else CensusError.exit_code
        return Outcome(record=_to_json(compiled, phases), code=code)

    def _devices_here(self, other: Any) -> list[Any]:
        """Starts as many devices as the run, and the one it is compared with, need;
        returns them."""
        sizes = []
        for run in (self.run, other):
            if isinstance(run, Run) and run.mesh is not None:
                sizes.append(run.mesh.size)
        if self.run.mesh is None:
            sizes.append(SIMULATED)
        start_devices(max(sizes), None)
        return list(jax.devices())

    def _other_side(self, target: Target | None) -> Run | dict[str, Any] | None:
        """Reads --against: a run to compile, or a saved census.

        Raises ConfigError for a plan for other hardware.
        """
        if self.against is None:
            return None
        file = path_of(self.against)
        if file.suffix != ".json":
            return dataclasses.replace(self.run, mesh=MeshShape.parse(self.against))
        if not is_plan(file):
            return read_census(file)
        plan = read_plan(file)
        if target is None or plan.target != str(target):
            raise ConfigError(
                f"--against {file}",
                f"it is a plan for {plan.target}, and this proof is for {target or 'devices here'}",
                f"--on {plan.target}, or compare with a census of it that --save wrote",
            )
        return plan.run

    def _compare(
        self,
        console: Console,
        run: Run,
        census: Census,
        other: Run | dict[str, Any] | None,
        take: "Callable[[Run], CompiledStep]",
    ) -> list[Section]:
        """Prints the difference to the other side, if there is one.

        Returns the sections of a page of all.
        """
        if other is None:
            return census_sections(census) if self.html else []
        if isinstance(other, Run):
            names = (str(run.mesh), str(other.mesh))
            if run.training != other.training:
                names = (_short_name(run), _short_name(other))
            its = take(other).census
            changes = compare(census.to_json(), its.to_json())
            drawn = {f": {names[0]}": census, f": {names[1]}": its}
        else:
            names = (str(self.against), str(run.mesh))
            changes = compare(other, census.to_json())
            drawn = {"": census}
        difference = difference_section(changes, names)
        print_sections(console, [difference])
        if not self.html:
            return []
        return [
            difference,
            *(
                section
                for suffix, each in drawn.items()
                for section in census_sections(each, suffix)
            ),
        ]

    def _write_files(
        self, compiled: "CompiledStep", machine: MachineGrid, sections: list[Section]
    ) -> None:
        census, run = compiled.census, compiled.placed.run
        try:
            if self.hlo:
                self.hlo.write_text(census.text, encoding="utf-8")
            if self.save:
                save_census(census, self.save)
            if self.html:
                parts = [*sections, *layout_sections(compiled.placed, machine)]
                Report(
                    f"{run.name} on {run.mesh}", parts, topic="proof", lead=census_title(census)
                ).write(self.html)
        except OSError as error:
            raise unwritable_file(error.filename, error) from error


def target_devices(target: Target) -> list[Any]:
    """Returns the devices of a target.

    Raises CensusError where its compiler has another number of them.
    """
    devices = topology_devices(target)
    if len(devices) != target.devices:
        raise CensusError(
            f"compiling for {target}",
            f"its compiler describes {len(devices)} devices, and it has {target.devices}",
            "meshwright plan, which needs no compiler, or another chip",
        )
    return devices


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step compiled in this process, and what was predicted of it."""

    placed: PlacedRun
    census: Census
    device_run: DeviceRun | None
    """None for a wrapped model."""
    planned: Estimate | None
    """Price of the train step on the target; None for devices here, and for an evaluation step."""
    undetermined: float | None = None
    """Predicted seconds of the step without `deterministic`, where that changes it."""
    cache: tuple[Path, bool] | None = None
    """File of the census in the cache of proofs, and whether to compile again what is there; None
    for devices here."""

    def phases(self) -> dict[str, int]:
        """Compiles all phases of the training of a model family.

        Returns the bytes of a device.
        """
        device_run, census = self.device_run, self.census
        if device_run is None or census.name != "train step":
            return {}
        if self.cache is None:
            return compiled_phases(device_run, census)
        file, fresh = self.cache
        file = file.with_suffix(".phases.json")
        return cached(file, dict[str, int], lambda: compiled_phases(device_run, census), fresh)


def _print_step(console: Console, compiled: CompiledStep, phases: dict[str, int]) -> None:
    """Prints the census of a compiled step, its choices, and the bytes of each phase."""
    census_page(compiled.census).print(console)
    if compiled.device_run is not None:
        facts = Facts(choices_facts(compiled.device_run))
        print_sections(console, [Section("Choices", [facts])])
    if phases:
        planned = compiled.planned.phases if compiled.planned else {}
        print_sections(console, [phases_section(planned, phases)])


def compile_step(
    run: Run,
    devices: Sequence[Any],
    target: Target | None,
    *,
    step: str = "train",
    fresh: bool = False,
) -> CompiledStep:
    """Compiles the train or evaluation step of a run for devices, here or not.

    target: hardware of the devices, None for those at hand.  step: `train` or `evaluate`.  fresh:
    compile again what is in the cache of proofs.
    Raises OutOfMemory where the compiler refuses it.
    """
    run = resolved_run(run, len(devices), target)
    assert run.mesh is not None
    device_run = place_on_devices(run, build_mesh(run.mesh, list(devices)))
    if target is None:
        device_run = _prepared_for(run, devices, device_run)
    # Choices are made, and states saved as weights, of a model whose layers are known.
    known = device_run if run.model.states_layers else None
    if target is None or step != "train":
        census_of = census_of_train_step if step == "train" else census_of_eval_step
        with activity("compile", f"compiling the {step} step", f"compiled the {step} step"):
            return CompiledStep(device_run, census_of(device_run), known, None)
    file, census = _proved(device_run, target, "the train step", fresh)
    undetermined = None
    if device_run.fixes_bits:
        training = dataclasses.replace(run.training, deterministic=False)
        plain = place_on_devices(dataclasses.replace(run, training=training), device_run.mesh)
        what = "the train step without deterministic sums"
        schedule = _proved(plain, target, what, fresh)[1].schedule
        undetermined = None if schedule is None else schedule.step_seconds
    planned = estimate(place_run(run), target)
    return CompiledStep(device_run, census, known, planned, undetermined, (file, fresh))


def _prepared_for(run: Run, devices: Sequence[Any], device_run: DeviceRun) -> DeviceRun:
    """Returns a run for devices that are here, with the profile by which XLA schedules it."""
    if devices[0].platform == "cpu":
        _check_arrays(run, device_run)
        return device_run
    here = local_target(list(devices), calibration_here(default_cache_folder()))
    if here is None:
        return device_run
    return dataclasses.replace(device_run, profile_of=profile_for(here[0]))


def _proved(device_run: DeviceRun, target: Target, what: str, fresh: bool) -> tuple[Path, Census]:
    """Returns the census of a train step, from the cache of proofs or compiled,
    and its file there."""
    file = default_cache_folder() / "proofs" / f"{cache_key(device_run, target)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with activity("compile", f"compiling {what}", f"compiled {what}"):
        compiled = functools.partial(_timed_census, device_run, target)
        return file, cached(file, Census, compiled, fresh)


def _timed_census(device_run: DeviceRun, target: Target) -> Census:
    """Compiles a train step for a target, and notes the processor seconds that it took."""
    began = time.process_time()
    try:
        return census_of_train_step(device_run, target)
    finally:
        with (
            contextlib.suppress(OSError),
            timings_file(target).open("a", encoding="utf-8") as taken,
        ):
            taken.write(f"{time.process_time() - began:.0f}\n")


def compile_choices(
    run: Run, target: Target, take: Callable[[Run], CompiledStep], say: Say
) -> tuple[Run, Callable[[], CompiledStep]]:
    """Compiles the train step of a run with choices that fit the target.

    If they do not, others follow.
    run: with its mesh.  take: compiles a run.  say: receives why a choice is given up. Returns the
    run, and a function that returns its compiled step or raises the compiler's OutOfMemory.
    """
    compiled: dict[Run, CompiledStep | OutOfMemory] = {}

    def needed(run: Run) -> float:
        try:
            compiled[run] = step = take(run)
            return float(step.census.memory.compiled.live)
        except OutOfMemory as error:
            compiled[run] = error
            return error.required

    run = with_choices_that_fit(run, target, needed, say)

    def result() -> CompiledStep:
        found = compiled.get(run) or take(run)
        if isinstance(found, OutOfMemory):
            raise found
        return found

    return run, result


def _check_arrays(run: Run, placed: PlacedRun) -> None:
    """Raises CensusError for a step that kills XLA's compiler for CPUs.

    It dies of SIGFPE on some arrays (jaxlib 0.12.0).
    """
    shape, width = placed.layout.shape, placed.layout.spec.width
    training = placed.run.training
    batch, seq = (
        training.batch // shape.over(BATCH_AXES),
        training.seq // (shape.context * shape.tensor),
    )
    batch //= training.microbatches
    elements = batch * seq * width
    if elements >= _LARGEST_ON_CPU:
        parts = training.microbatches * 2 * math.ceil(elements / _LARGEST_ON_CPU)
        raise CensusError(
            f"compiling {run.name} on mesh {shape} for this CPU",
            f"a microbatch on a device has {batch} x {seq} x {width} = {elements:,} activations, "
            f"and from 2^33 = "
            f"{_LARGEST_ON_CPU:,} elements on its compiler dies",
            f"the same command with --on {machine_for(run)}; or --training.microbatches {parts} "
            f"here",
        )


def _to_json(compiled: CompiledStep, phases: Mapping[str, int]) -> dict[str, Any]:
    document, planned = compiled.census.to_json(), compiled.planned
    if compiled.device_run:
        document["choices"] = choices_to_json(compiled.device_run)
    if planned:
        document["planned"] = {"seconds": planned.seconds, "bytes": planned.bytes}
    if compiled.undetermined:
        document["undetermined_seconds"] = compiled.undetermined
    if phases:
        document["phases"] = dict(phases)
    return document


def _short_name(run: Run) -> str:
    microbatches = (
        f", {run.training.microbatches} microbatches" if run.training.microbatches > 1 else ""
    )
    return f"{run.mesh}, {run.training.remat}{microbatches}"


def _print_verdict(
    console: Console, compiled: CompiledStep, target: Target, phases: Mapping[str, int]
) -> bool:
    """Prints the predicted step and whether every phase fits, with remedies.

    Returns whether they do.
    """
    print_sections(
        console,
        [prediction_section(compiled.census, target, compiled.planned, compiled.undetermined)],
    )
    peaks = {"step": compiled.census.memory.compiled.live} | dict(phases)
    most, available = max(peaks, key=peaks.__getitem__), target.chip.hbm_bytes
    peak = peaks[most]
    fits = peak <= available
    console.print(
        f"\n[bold]{'it fits' if fits else 'it does not fit'}[/]: {format_bytes(peak)} of the "
        f"{format_bytes(available)} "
        f"of a {target.chip.name}, {peak / available:.0%}"
        + ("" if most == "step" else f", in {most}")
    )
    print_sections(
        console, [] if fits else _remedies(compiled.placed.run, target, peak - available, most)
    )
    return fits


def _remedies(run: Run, target: Target | None, over: float, phase: str = "step") -> list[Section]:
    remedies = (
        memory_remedies(run, target, run.mesh, over, phase)
        if target is not None and run.mesh is not None
        else []
    )
    return [remedies_section(over, remedies)] if remedies else []

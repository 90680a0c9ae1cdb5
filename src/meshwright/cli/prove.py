"""The verb `prove`: compile a step for hardware, here or not, and read the compiled program."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

from meshwright.analysis.census import Census, save_census
from meshwright.analysis.compare import check_budget, compare, read_budget, read_census, write_budget
from meshwright.analysis.compile import OutOfMemory
from meshwright.api.planning import find_target, refuse_wrapped
from meshwright.api.proving import (
    CompiledStep,
    compile_decoding,
    compile_in_subprocess,
    compile_step,
    is_compiling_process,
    resolved_run,
    target_devices,
)
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.devices import SIMULATED, start_devices
from meshwright.cli.output import require_writable, unwritable, write_json
from meshwright.cli.parse import given_options, parse, refuse_options
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware.targets import Target
from meshwright.planner.explain import memory_remedies
from meshwright.planner.plan_file import is_plan, read_plan
from meshwright.ranges import PositiveInt, TimeLimit
from meshwright.reporters.console import open_console
from meshwright.runs.run import Run
from meshwright.storage.paths import path_of
from meshwright.trust import trust_options
from meshwright.views.blocks import Facts
from meshwright.views.census_page import (
    budget_section,
    census_page,
    census_sections,
    census_title,
    difference_section,
    prediction_section,
    remedies_section,
    write_trace,
)
from meshwright.views.draw import MachineGrid, machine_of
from meshwright.views.layout_page import layout_sections, phases_section
from meshwright.views.plan_page import print_decode_proof
from meshwright.views.report import Report, Section, print_sections
from meshwright.views.run_tables import choices_facts, choices_to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProveOptions(RunOptions):
    """Compile the train step of RECIPE (by default `tiny`) for a mesh of the devices at hand, of simulated devices, or
    of hardware that is not here, and read the compiled program: memory by category, every collective, FLOPs, faults.
    Nothing is trained. The exit code is 6 where the step does not fit the memory or breaks a budget."""

    on: Annotated[str | None, tyro.conf.arg(metavar="CHIP:SIZE")] = None
    """Compile for hardware that is not here, with its own compiler: v5p:4x4x8, 2*v6e:16x16, tpu7x:4x4x4, h100:64,
    b200:256. A plan file names its own."""
    trace: Path | None = None
    """Write the simulated schedule as a trace for ui.perfetto.dev or chrome://tracing."""
    limit: TimeLimit = 900
    """Most seconds for compiling with --on."""
    step: Literal["train", "evaluate", "prefill", "decode"] = "train"
    """Program to compile; of prefill and decode, memory is shown."""
    decode_batch: PositiveInt = 8
    """Sequences decoded together, for --step prefill and decode."""
    decode_slots: PositiveInt = 4096
    """Slots of the cache for each sequence, for --step prefill and decode."""
    against: str | None = None
    """Compare with another mesh (axis=degree,...), another PLAN.json for the same hardware, or a census that --save
    wrote; --html then shows the difference."""
    budget: Path | None = None
    """Compare the program with the limits of this TOML file; exit code 6 where one is exceeded."""
    save_budget: Path | None = None
    """Write the program's own figures as a budget."""
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


_WRITTEN = ("trace", "save_budget", "save", "hlo", "html")
_OF_A_STEP = (*_WRITTEN, "against", "budget", "fresh")
"""Options that read or write the census of a step."""


def main(args: Sequence[str]) -> int:
    """Runs `meshwright prove`: compiles, writes, prints."""
    base = base_run(args)
    options = parse(ProveOptions, "prove [RECIPE]", base.args, default=ProveOptions(run=base.run, on=base.target))
    console = open_console(sys.stderr if options.json else sys.stdout)
    budget = read_budget(options.budget) if options.budget else None
    target = find_target(options.on) if options.on else None
    _refuse_unused(options)
    require_writable(getattr(options, name) for name in _WRITTEN)
    other = _other_side(options, target)
    if target is None:
        meshes = [run.mesh for run in (options.run, other) if isinstance(run, Run) and run.mesh is not None]
        sizes = [mesh.size for mesh in meshes] + ([] if options.run.mesh else [SIMULATED])
        start_devices(max(sizes), None)
        devices = list(jax.devices())
    elif is_compiling_process(target):
        devices = target_devices(target)
    else:
        code, errors = compile_in_subprocess(target, options.limit, ["prove", *args, *trust_options()], sys.stdout)
        sys.stderr.write(errors)
        return code
    if options.step in ("prefill", "decode"):
        return _prove_decoding(options, devices, target, console)
    take = functools.partial(compile_step, devices=devices, target=target, step=options.step, fresh=options.fresh)
    run = resolved_run(options.run, len(devices), target)
    try:
        compiled = take(run)
    except OutOfMemory as error:
        print_sections(console, _remedies(run, target, error.required - error.available))
        raise
    sections = _compare(options, console, run, compiled.census, other, take)
    _write_files(options, compiled, machine_of(devices), sections)
    phases = compiled.phases() if options.against is None else {}
    if options.json:
        write_json(_to_json(compiled, phases))
    elif options.against is None:
        census_page(compiled.census).print(console)
        if compiled.device_run is not None:
            print_sections(console, [Section("Choices", [Facts(choices_facts(compiled.device_run))])])
        if phases:
            planned = compiled.planned.phases if compiled.planned else {}
            print_sections(console, [phases_section(planned, phases)])
    exceeded = check_budget(compiled.census, budget) if budget is not None else []
    print_sections(console, [budget_section(exceeded)] if exceeded else [])
    fits = target is None or _print_verdict(console, compiled, target, phases)
    return CensusError.exit_code if exceeded or not fits else 0


def _refuse_unused(options: ProveOptions) -> None:
    """Raises ConfigError for an option that belongs to another one, which is not given."""
    if options.step in ("prefill", "decode"):
        refuse_options(options, _OF_A_STEP, f"--step {options.step}", "leave it out: memory is printed")
    else:
        refuse_options(options, ("decode_batch", "decode_slots"), f"--step {options.step}", "--step decode with it")
    refuse_wrapped(options.run, given_options(options, ("step",)))


def _other_side(options: ProveOptions, target: Target | None) -> Run | dict[str, Any] | None:
    """Reads --against: a run to compile, or a saved census. Raises ConfigError for a plan for other hardware."""
    if options.against is None:
        return None
    file = path_of(options.against)
    if file.suffix != ".json":
        return dataclasses.replace(options.run, mesh=MeshShape.parse(options.against))
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


def _prove_decoding(options: ProveOptions, devices: list[Any], target: Target | None, console: Console) -> int:
    """Prints the memory of prefill or decode; returns the exit code."""
    assert options.step in ("prefill", "decode")
    mesh, planned, compiled = compile_decoding(
        options.run, devices, target, step=options.step, batch=options.decode_batch, slots=options.decode_slots
    )
    if options.json:
        write_json({"step": options.step, "mesh": str(mesh), "compiled": compiled, "planned": planned})
    else:
        shape = f"{options.decode_batch} sequences of {options.decode_slots:,} slots"
        console.print(f"[bold]{options.step}[/] of {options.run.name} on {mesh}: {shape}")
        print_decode_proof(console, planned, compiled, target)
    return CensusError.exit_code if target is not None and compiled["bytes"] > target.chip.hbm_bytes else 0


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


def _compare(
    options: ProveOptions,
    console: Console,
    run: Run,
    census: Census,
    other: Run | dict[str, Any] | None,
    take: Callable[[Run], CompiledStep],
) -> list[Section]:
    """Prints the difference to the other side, where there is one; returns the sections of a page of all."""
    if other is None:
        return census_sections(census) if options.html else []
    if isinstance(other, Run):
        names = (str(run.mesh), str(other.mesh))
        if run.training != other.training:
            names = (_short_name(run), _short_name(other))
        its = take(other).census
        changes = compare(census.to_json(), its.to_json())
        drawn = {f": {names[0]}": census, f": {names[1]}": its}
    else:
        names = (str(options.against), str(run.mesh))
        changes = compare(other, census.to_json())
        drawn = {"": census}
    difference = difference_section(changes, names)
    print_sections(console, [difference])
    if not options.html:
        return []
    return [difference, *(section for suffix, each in drawn.items() for section in census_sections(each, suffix))]


def _short_name(run: Run) -> str:
    microbatches = f", {run.training.microbatches} microbatches" if run.training.microbatches > 1 else ""
    return f"{run.mesh}, {run.training.remat}{microbatches}"


def _print_verdict(console: Console, compiled: CompiledStep, target: Target, phases: Mapping[str, int]) -> bool:
    """Prints the predicted step and whether every phase fits, with remedies; returns whether they do."""
    print_sections(console, [prediction_section(compiled.census, target, compiled.planned, compiled.undetermined)])
    peaks = {"step": compiled.census.memory.compiled.live} | dict(phases)
    most, available = max(peaks, key=peaks.__getitem__), target.chip.hbm_bytes
    peak = peaks[most]
    fits = peak <= available
    console.print(
        f"\n[bold]{'it fits' if fits else 'it does not fit'}[/]: {format_bytes(peak)} of the {format_bytes(available)} "
        f"of a {target.chip.name}, {peak / available:.0%}" + ("" if most == "step" else f", in {most}")
    )
    print_sections(console, [] if fits else _remedies(compiled.placed.run, target, peak - available))
    return fits


def _remedies(run: Run, target: Target | None, over: float) -> list[Section]:
    remedies = memory_remedies(run, target, run.mesh, over) if target is not None and run.mesh is not None else []
    return [remedies_section(over, remedies)] if remedies else []


def _write_files(options: ProveOptions, compiled: CompiledStep, machine: MachineGrid, sections: list[Section]) -> None:
    census, run = compiled.census, compiled.placed.run
    try:
        if options.hlo:
            options.hlo.write_text(census.text, encoding="utf-8")
        if options.save:
            save_census(census, options.save)
        if options.trace and census.schedule is not None:
            write_trace(census.schedule, options.trace)
        if options.save_budget:
            options.save_budget.write_text(write_budget(census), encoding="utf-8")
        if options.html:
            parts = [*sections, *layout_sections(compiled.placed, machine)]
            Report(f"{run.name} on {run.mesh}", parts, topic="proof", lead=census_title(census)).write(options.html)
    except OSError as error:
        raise unwritable(error.filename, error) from error

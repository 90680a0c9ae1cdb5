"""The verb `prove`: compile a step for hardware, here or not, and read the compiled program."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

from meshwright.analysis.budgets import check_budget, read_budget, write_budget
from meshwright.analysis.census import Census, save_census
from meshwright.analysis.compare import Change, compare, read_census
from meshwright.analysis.compile import OutOfMemory
from meshwright.analysis.proof_cache import cached_census, refresh_census
from meshwright.analysis.run_census import census_of_eval_step, census_of_train_step
from meshwright.analysis.run_measure import measure_steps
from meshwright.analysis.run_saving import SavingMemory, saving_memory
from meshwright.api.planning import find_target, with_vocab
from meshwright.cli.aot_subprocess import compile_in_subprocess, is_compiling_process
from meshwright.cli.base_run import RunOptions, base_run
from meshwright.cli.devices import SIMULATED, start_devices
from meshwright.cli.output import require_writable, unwritable, write_json
from meshwright.cli.parse import parse, refuse_options
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware import mesh
from meshwright.hardware.aot import topology_devices
from meshwright.hardware.targets import Target
from meshwright.planner.automatic import with_best_remat
from meshwright.planner.estimate import Estimate, estimate
from meshwright.planner.explain import memory_remedies
from meshwright.planner.plan_file import is_plan, read_plan
from meshwright.report.console import open_console
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.views.census_page import census_sections, difference_section
from meshwright.views.census_tables import (
    census_title,
    print_census,
    print_changes,
    print_limits_exceeded,
    print_measured,
    print_prediction,
    print_remedies,
    print_saving,
)
from meshwright.views.draw.machine import MachineGrid, machine_of, parse_machine
from meshwright.views.layout_page import layout_sections
from meshwright.views.pages import Page, Section
from meshwright.views.run_tables import choices_to_json, print_choices
from meshwright.views.trace import write_trace
from meshwright.wrapped.model import is_wrapped


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
    limit: int = 900
    """Most seconds for compiling with --on."""
    step: Literal["train", "evaluate", "prefill", "decode"] = "train"
    """Program to compile; of prefill and decode, memory and speed are shown."""
    decode_batch: int = 8
    """Sequences decoded together, for --step prefill and decode."""
    decode_slots: int = 4096
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
    machine: str | None = None
    """Machine that the page draws the mesh over: v5p:4x4x8, gpu:8x8, or host; by default the one of the devices."""
    measure: int = 0
    """Also run this many steps on random tokens and measure memory."""
    profile: Path | None = None
    """With --measure: write JAX's device memory profile, for pprof."""
    fresh: bool = False
    """Compile again what is in the cache of proofs."""
    json: bool = False
    """Print the census as JSON on standard output, and everything else on standard error."""


_OF_TRAINING = (
    "trace", "against", "budget", "save_budget", "save", "hlo", "html", "machine", "measure", "profile", "fresh",
)  # fmt: skip
"""Options that read or write the census of a step."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Other side of a proof: a run to compile, or a census that was saved."""

    run: Run | None = None
    saved: dict[str, Any] | None = None


def main(args: Sequence[str]) -> int:
    """Runs `meshwright prove`."""
    base = base_run(args)
    default = ProveOptions(run=base.run, on=base.target)
    return run_prove(parse(ProveOptions, "prove [RECIPE]", base.args, default=default))


def run_prove(options: ProveOptions) -> int:
    """Compiles, writes, prints; returns the exit code."""
    console = open_console(sys.stderr if options.json else sys.stdout)
    budget = read_budget(options.budget) if options.budget else None
    target = find_target(options.on) if options.on else None
    if target is not None and options.measure:
        raise ConfigError("--measure with --on", "hardware that is not here cannot run a step", "one of them")
    _refuse_unused(options)
    require_writable((options.trace, options.save_budget, options.save, options.hlo, options.html, options.profile))
    other = _other_side(options, target)
    if target is not None and not is_compiling_process(target):
        return compile_in_subprocess(target, options.limit)
    devices = _target_devices(target) if target else _local_devices(options, other)
    if is_wrapped(options.run):
        return _prove_wrapped(options, devices, target, console, other, budget)
    run = with_vocab(dataclasses.replace(options.run, mesh=_shape(options.run, devices, target)))
    if options.step in ("prefill", "decode"):
        from meshwright.cli.decoding import prove_decode  # a proof of training loads no decoder

        refuse_options(options, _OF_TRAINING, f"--step {options.step}", "leave it out: memory and speed are printed")
        sizes = (options.decode_batch, options.decode_slots)
        return prove_decode(run, devices, target, step=options.step, sizes=sizes, console=console, as_json=options.json)
    run = with_best_remat(run, target) if target is not None else run
    machine = _machine(options, devices)
    try:
        device_run, census = _take_census(options, run, devices, target)
    except OutOfMemory as error:
        if target is not None:
            _print_remedies(console, run, target, error.required - error.available)
        raise
    sections = _compare(options, console, run, census, other, lambda r: _take_census(options, r, devices, target)[1])
    _write_files(options, device_run.placed, machine, census, sections)
    planned = estimate(place_run(run), target) if target is not None and options.step == "train" else None
    saving = saving_memory(device_run) if options.step == "train" and options.against is None else None
    if options.json:
        figures: dict[str, Any] = {"planned": {"seconds": planned.seconds, "bytes": planned.bytes}} if planned else {}
        figures |= {"saving": dataclasses.asdict(saving)} if saving else {}
        write_json({**census.to_json(), "choices": choices_to_json(device_run), **figures})
    elif options.against is None:
        print_census(console, census)
        print_choices(console, device_run)
        if saving is not None:
            print_saving(console, saving)
    if options.measure:
        print_measured(console, measure_steps(device_run, census, steps=options.measure, profile=options.profile))
    exceeded = check_budget(census, budget) if budget is not None else []
    print_limits_exceeded(console, exceeded)
    fits = target is None or _print_verdict(console, run, target, census, planned, saving)
    return CensusError.exit_code if exceeded or not fits else 0


def _refuse_unused(options: ProveOptions) -> None:
    """Raises ConfigError for an option that belongs to another one, which is not given."""
    if options.step not in ("prefill", "decode"):
        refuse_options(options, ("decode_batch", "decode_slots"), f"--step {options.step}", "--step decode with it")
    if not options.measure:
        refuse_options(options, ("profile",), "no --measure", "--measure 2 with it")
    if options.html is None:
        refuse_options(options, ("machine",), "no --html", "--html page.html with it")


def _prove_wrapped(
    options: ProveOptions,
    devices: list[Any],
    target: Target | None,
    console: Console,
    other: Comparison,
    budget: dict[str, float] | None,
) -> int:
    """Compiles the train step of a wrapped model, writes, prints; returns the exit code."""
    from meshwright.cli.wrapped import compile_wrapped  # a proof of a family's model loads no wrapped one

    refuse_options(options, ("step", "measure", "profile", "fresh"), "a wrapped model", "leave it out")
    if other.run is not None:
        raise ConfigError(
            f"--against {options.against} with a wrapped model", "its proof compiles one mesh",
            "--save other.json with that mesh, then --against other.json",
        )  # fmt: skip
    machine = _machine(options, devices)
    placed, census, planned = compile_wrapped(options.run, devices, target)
    sections = _compare(options, console, placed.run, census, other, lambda run: census)
    _write_files(options, placed, machine, census, sections)
    if options.json:
        figures = {"planned": {"seconds": planned.seconds, "bytes": planned.bytes}} if planned else {}
        write_json({**census.to_json(), **figures})
    elif options.against is None:
        print_census(console, census)
    exceeded = check_budget(census, budget) if budget is not None else []
    print_limits_exceeded(console, exceeded)
    fits = target is None or census.memory.compiled.live <= target.chip.hbm_bytes
    if target is not None:
        print_prediction(console, census, target, planned)
    return CensusError.exit_code if exceeded or not fits else 0


def _other_side(options: ProveOptions, target: Target | None) -> Comparison:
    """Reads --against. Raises ConfigError for a plan for other hardware."""
    if options.against is None:
        return Comparison()
    file = Path(options.against)
    if file.suffix != ".json":
        return Comparison(run=dataclasses.replace(options.run, mesh=MeshShape.parse(options.against)))
    if not is_plan(file):
        return Comparison(saved=read_census(file))
    plan = read_plan(file)
    if target is None or plan.target != str(target):
        raise ConfigError(
            f"--against {file}", f"it is a plan for {plan.target}, and this proof is for {target or 'devices here'}",
            f"--on {plan.target}, or compare with a census of it that --save wrote",
        )  # fmt: skip
    return Comparison(run=plan.run)


def _target_devices(target: Target) -> list[Any]:
    """Returns the devices of a target. Raises CensusError where its compiler has another number of them."""
    devices = topology_devices(target)
    if len(devices) != target.devices:
        raise CensusError(
            f"compiling for {target}",
            f"its compiler describes {len(devices)} devices, and it has {target.devices}",
            "meshwright plan, which needs no compiler, or another chip",
        )
    return devices


def _local_devices(options: ProveOptions, other: Comparison) -> list[Any]:
    sizes = [run.mesh.size for run in (options.run, other.run) if run is not None and run.mesh is not None]
    start_devices(max(sizes if options.run.mesh else [SIMULATED, *sizes]), options.run)
    return list(jax.devices())


def _shape(run: Run, devices: Sequence[Any], target: Target | None) -> MeshShape:
    """Returns the run's mesh; without one, FSDP over a target, or the default mesh here."""
    if run.mesh is not None:
        return run.mesh
    return MeshShape(fsdp=len(devices)) if target else mesh.default_mesh_shape(min(SIMULATED, len(devices)))


def _take_census(
    options: ProveOptions, run: Run, devices: list[Any], target: Target | None
) -> tuple[DeviceRun, Census]:  # fmt: skip
    run = with_vocab(run) if target is None else with_best_remat(with_vocab(run), target)
    assert run.mesh is not None
    device_run = place_on_devices(run, mesh.build_mesh(run.mesh, devices))
    if options.step != "train":
        return device_run, census_of_eval_step(device_run)
    if target is None:
        return device_run, census_of_train_step(device_run)
    take = refresh_census if options.fresh else cached_census
    return device_run, take(mesh.default_cache_folder() / "proofs", device_run, target)


def _compare(
    options: ProveOptions, console: Console, run: Run, census: Census, other: Comparison, take: Callable[[Run], Census]
) -> Callable[[], list[Section]]:
    """Prints the difference to the other side, where there is one; returns what makes the sections of a page.

    take: compiles the run of the other side.
    """
    if other.saved is not None:
        names = (str(options.against), str(run.mesh))
        changes = compare(other.saved, census.to_json())
        drawn = [("", census)]
    elif other.run is not None:
        names = (str(run.mesh), str(other.run.mesh))
        if run.training != other.run.training:
            names = (_short_name(run), _short_name(other.run))
        its = take(other.run)
        changes = compare(census.to_json(), its.to_json())
        drawn = [(f": {names[0]}", census), (f": {names[1]}", its)]
    else:
        return functools.partial(census_sections, census)
    print_changes(console, changes, names)
    return functools.partial(_difference_sections, changes, names, drawn)


def _difference_sections(
    changes: Sequence[Change], names: tuple[str, str], drawn: Sequence[tuple[str, Census]]
) -> list[Section]:  # fmt: skip
    """Returns two censuses side by side, then the sections of each of `drawn`, with the suffixes of their headings."""
    parts = [section for suffix, census in drawn for section in census_sections(census, suffix)]
    return [difference_section(changes, names), *parts]


def _short_name(run: Run) -> str:
    """Returns mesh, remat policy and microbatches, for a heading."""
    microbatches = f", {run.training.microbatches} microbatches" if run.training.microbatches > 1 else ""
    return f"{run.mesh}, {run.training.remat}{microbatches}"


def _print_verdict(
    console: Console, run: Run, target: Target, census: Census, planned: Estimate | None, saving: SavingMemory | None
) -> bool:
    """Prints the predicted step and whether step, save and restore fit, with remedies; returns whether they do."""
    print_prediction(console, census, target, planned)
    peaks = {
        "the step": census.memory.compiled.live,
        **({"a save": saving.save, "a restore": saving.restore} if saving else {}),
    }
    most, available = max(peaks, key=peaks.__getitem__), target.chip.hbm_bytes
    peak = peaks[most]
    fits = peak <= available
    console.print(
        f"\n[bold]{'it fits' if fits else 'it does not fit'}[/]: {format_bytes(peak)} of the {format_bytes(available)} "
        f"of a {target.chip.name}, {peak / available:.0%}" + ("" if most == "the step" else f", in {most}")
    )
    if not fits:
        _print_remedies(console, run, target, peak - available)
    return fits


def _print_remedies(console: Console, run: Run, target: Target, over: float) -> None:
    assert run.mesh is not None
    print_remedies(console, over, memory_remedies(run, target, run.mesh, over))


def _machine(options: ProveOptions, devices: Sequence[Any]) -> MachineGrid:
    """Returns what the page draws the mesh over. Raises ConfigError where it has another number of devices."""
    return parse_machine(options.machine, len(devices)) if options.machine else machine_of(devices)


def _page(placed: PlacedRun, census: Census, sections: list[Section], machine: MachineGrid) -> Page:
    """Returns the page of a proof: the census, then the layout of the run."""
    run = placed.run
    parts = [*sections, *layout_sections(placed, machine)]
    return Page(f"{run.name} on {run.mesh}", parts, topic="proof", lead=census_title(census))


def _write_files(
    options: ProveOptions,
    placed: PlacedRun,
    machine: MachineGrid,
    census: Census,
    sections: Callable[[], list[Section]],
) -> None:
    """Writes every file that is asked for. machine, sections: those of --html."""
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
            _page(placed, census, sections(), machine).write(options.html)
    except OSError as error:
        raise unwritable(error.filename, error) from error

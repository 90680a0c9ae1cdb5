"""Verbs that compile a step and read it, or time the devices at hand."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from meshwright import mesh, show
from meshwright.calibrate.collectives import KINDS, Product, Timing, time_collectives, time_products
from meshwright.calibrate.files import calibration_file, plot_timings, require_plotting, write_calibration, write_rows
from meshwright.census.budget import check_budget, read_budget, write_budget
from meshwright.census.compare import compare, read_census
from meshwright.census.html import census_sections
from meshwright.census.live import measure
from meshwright.census.tables import print_census, print_changes, print_excess, print_measured
from meshwright.census.take import Census, save_census
from meshwright.census.training import census_of_eval_step, census_of_train_step
from meshwright.cli.absent import compile_elsewhere, is_inside
from meshwright.cli.prepare import SIMULATED, say, start_devices, vocab
from meshwright.compilers import devices_of
from meshwright.config import MeshShape, Run
from meshwright.draw.machine import machine_of, parse_machine
from meshwright.errors import CensusError, ConfigError
from meshwright.hardware import find_chip
from meshwright.report.console import open_console, spell_bytes
from meshwright.step import Program, lay_out
from meshwright.target import parse_target


@dataclasses.dataclass(frozen=True)
class Prove:
    """Compile RECIPE's step (or `tiny`'s) for a mesh of the devices at hand, simulated where there is none, or for
    hardware that is not here, and read it: memory by category, every collective, FLOPs, and what is wrong. Nothing is
    trained."""

    run: Annotated[Run, tyro.conf.arg(name="")]
    on: str | None = None
    """Compile for TPUs that nobody here has, by their own compiler: v5p:4x4x8, v5e:16x16, v6e:16x16, tpu7x:4x4x4, or
    2*v6e:16x16 for two slices. Exit code 6 where the step does not fit their memory."""
    limit: int = 900
    """Seconds that compiling for absent hardware may take."""
    step: Literal["train", "evaluate"] = "train"
    """Which of the run's programs."""
    against: str | None = None
    """Compare with another mesh (axis=degree,...) or with a census saved in FILE.json."""
    budget: Path | None = None
    """Fail with exit code 6 where the program breaks a limit of this TOML file."""
    save_budget: Path | None = None
    """Write the program's own figures as a budget."""
    save: Path | None = None
    """Write the census as JSON."""
    hlo: Path | None = None
    """Write the compiled program's text."""
    html: Path | None = None
    """Write one offline page: mesh, tensors, memory, ledger, FLOPs, findings."""
    machine: str | None = None
    """What the page lays the mesh over: v5p:4x4x8, gpu:8x8, or host; None asks the devices."""
    measure: int = 0
    """Also run so many steps on random tokens and compare memory."""
    profile: Path | None = None
    """With --measure: write JAX's device memory profile, for pprof."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the census as JSON on standard output."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Time WHAT on the devices at hand: `collectives` over every axis of a mesh, or `matmul` on one device. Writes CSV
    and JSON, and the calibration that plans are made with."""

    what: Annotated[Literal["collectives", "matmul"], tyro.conf.Positional]
    mesh: str | None = None
    """Mesh of the collectives, as axis=degree,...; None takes one over all devices."""
    devices: int | None = None
    """Devices simulated where there is no accelerator."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Collectives to time."""
    sizes: tuple[int, ...] = (2**12, 2**16, 2**20, 2**24)
    """Bytes of the whole array."""
    shapes: tuple[tuple[int, int, int], ...] = ((128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (64, 1024, 4096))
    """m, k, n of the matrix products."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Element types of the matrix products."""
    out: Path = Path("bench-results")
    """Folder for CSV and JSON."""
    plot: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also draw bus bandwidth over size (needs matplotlib)."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""


def run_prove(args: Prove) -> int:
    console = open_console(sys.stderr if args.json else sys.stdout)
    other = MeshShape.parse(args.against) if args.against and not args.against.endswith(".json") else None
    saved = read_census(Path(args.against)) if args.against and other is None else None
    budget = read_budget(args.budget) if args.budget else None
    target = parse_target(args.on) if args.on else None
    if target is not None and args.measure:
        raise ConfigError("--measure with --on", "what is not here cannot run", "one of them")
    if target is not None and not is_inside(target):
        return compile_elsewhere(target, args.limit)
    devices = devices_of(target) if target else _devices_here(args, other)
    here = min(SIMULATED, len(devices))
    shape = args.run.mesh or (MeshShape(fsdp=len(devices)) if target else mesh.default_shape(here))
    program, census = _census(args, shape, devices)
    if args.json:
        say(census.to_json(), True, lambda: None)
    elif saved is None and other is None:
        print_census(console, census)
    if saved is not None:
        changes = compare(saved, census.to_json())
        print_changes(console, changes, (str(args.against), str(shape)))
    elif other is not None:
        changes = compare(census.to_json(), _census(args, other, devices)[1].to_json())
        print_changes(console, changes, (str(shape), str(other)))
    _write_files(args, program, census)
    if args.measure:
        print_measured(console, measure(program, census, steps=args.measure, profile=args.profile))
    excess = check_budget(census, budget) if budget is not None else []
    print_excess(console, excess)
    fits = target is None or _say_whether_it_fits(console, census)
    return CensusError.exit_code if excess or not fits else 0


def _devices_here(args: Prove, other: MeshShape | None) -> list[Any]:
    size = args.run.mesh.size if args.run.mesh else SIMULATED
    start_devices(max(size, other.size if other else 1), args.run)
    return list(jax.devices())


def _say_whether_it_fits(console: Console, census: Census) -> bool:
    chip = find_chip(census.device)
    if chip is None:
        return True
    peak = census.memory.compiled.peak
    verdict = f"{spell_bytes(peak)} of the {spell_bytes(chip.memory)} of a {census.device}, {peak / chip.memory:.0%}"
    console.print(f"\n[bold]{'it fits' if peak <= chip.memory else 'it does not fit'}[/]: {verdict}")
    return peak <= chip.memory


def _census(args: Prove, shape: MeshShape, devices: list[Any]) -> tuple[Program, Census]:
    run = args.run
    if run.model.vocab is None:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab(run)))
    program = lay_out(dataclasses.replace(run, mesh=shape), mesh.build_mesh(shape, devices))
    return program, census_of_train_step(program) if args.step == "train" else census_of_eval_step(program)


def _write_files(args: Prove, program: Program, census: Census) -> None:
    run = program.run
    try:
        if args.hlo:
            args.hlo.write_text(census.text, encoding="utf-8")
        if args.save:
            save_census(census, args.save)
        if args.save_budget:
            args.save_budget.write_text(write_budget(census), encoding="utf-8")
        if args.html:
            devices = list(program.mesh.devices.flat)
            machine = parse_machine(args.machine, len(devices)) if args.machine else machine_of(devices)
            args.html.write_text(show.page(run, machine, census_sections(census)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"writing {error.filename}", f"the file cannot be written: {error.strerror}", "a folder that is there"
        ) from error  # fmt: skip


def run_bench(args: Bench) -> int:
    console = open_console(sys.stderr if args.json else sys.stdout)
    shape = MeshShape.parse(args.mesh) if args.mesh else None
    mesh.prepare_host(args.devices or (shape.size if shape else SIMULATED if args.what == "collectives" else 1))
    if min(args.sizes, default=1) < 1 or min((n for s in args.shapes for n in s), default=1) < 1:
        raise ConfigError("a size below 1", "sizes count bytes, shapes rows and columns", "sizes of at least 1")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out}", f"it cannot be made: {error.strerror}", "another folder") from error
    if args.plot:
        require_plotting()
    rows: list[Any]
    if args.what == "collectives":
        shape = shape or mesh.default_shape(jax.device_count())
        rows = list(time_collectives(mesh.build_mesh(shape), args.kinds, args.sizes))
        write_calibration(args.out / "calibration.json", collectives=rows, mesh=str(shape))
        write_calibration(calibration_file(mesh.default_cache()), collectives=rows, mesh=str(shape))
        if args.plot:
            plot_timings(rows, args.out / "collectives.svg")
    else:
        rows = list(time_products(args.shapes, args.dtypes))
        write_calibration(args.out / "calibration.json", products=rows)
        write_calibration(calibration_file(mesh.default_cache()), products=rows)
    write_rows(rows, args.out / f"{args.what}.csv")
    told = {"rows": [dataclasses.asdict(row) for row in rows], "out": str(args.out)}
    say(told, args.json, lambda: _print_rows(console, args, rows))
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise CensusError(f"{args.what} here", f"{len(wrong)} results were wrong, {wrong[0]}", "a report to JAX")
    return 0


def _print_rows(console: Console, args: Bench, rows: list[Timing] | list[Product]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    timed = isinstance(rows[0], Timing)
    left = ("collective", "axis", "devices", "size") if timed else ("type", "m x k x n")
    for heading in (*left, "median", *(("algorithm", "bus") if timed else ("rate",)), "result"):
        table.add_column(heading, justify="left" if heading in left[:2] else "right")
    for row in rows:
        right = "right" if row.right else "WRONG"
        if isinstance(row, Timing):
            table.add_row(
                row.kind, row.axis, str(row.devices), spell_bytes(row.bytes), f"{row.seconds * 1e6:,.0f} us",
                f"{row.algorithm_bandwidth / 1e9:.3g} GB/s", f"{row.bus_bandwidth / 1e9:.3g} GB/s", right,
            )  # fmt: skip
        else:
            shape = f"{row.m} x {row.k} x {row.n}"
            table.add_row(
                row.dtype, shape, f"{row.seconds * 1e6:,.0f} us", f"{row.flops_per_second / 1e9:.3g} GFLOP/s", right
            )
    console.print(table)
    console.print(f"\nwritten to {args.out}, and kept as calibration for plans")

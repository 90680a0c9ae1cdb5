"""The verb `bench`: collectives, matrix products, or everything about the devices at hand."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import msgspec
import tyro
from rich.console import Console

from meshwright.bench.calibration_file import calibration_path, write_calibration
from meshwright.bench.hardware.run import check_sections, run_sections
from meshwright.bench.hardware.section import Request, write_json_file
from meshwright.bench.microbenchmarks import (
    COLLECTIVES,
    CollectiveTiming,
    MatmulTiming,
    measure_memory_bandwidth,
    time_collectives,
    time_matmuls,
    write_csv,
)
from meshwright.cli.devices import SIMULATED, HostOptions, start_devices
from meshwright.cli.output import unwritable, write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError, TrainingError, reason_of
from meshwright.hardware import mesh
from meshwright.hardware.hosts import Hosts
from meshwright.ranges import PositiveInt, Ranged
from meshwright.reporters.console import open_console
from meshwright.storage.paths import default_cache_folder
from meshwright.views.blocks import Column, Table
from meshwright.views.hardware_report import (
    print_section,
    problems_of,
    report_json,
    report_page,
    unfinished_of,
)
from meshwright.views.terminal import print_table

_COPY_BYTES = 2**28
"""Size of the array with which memory bandwidth is measured: larger than any cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(Ranged):
    """Time WHAT on the devices at hand: `collectives` over every axis of a mesh, `matmul` on one device, or `hardware`,
    which measures a new machine in 30 minutes. Writes the figures, and the calibration that `plan` and `train` use for
    their predictions."""

    what: Annotated[Literal["collectives", "matmul", "hardware"], tyro.conf.Positional]
    """`collectives`, `matmul` or `hardware`."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh of the collectives, as axis=degree,...; by default one over all devices."""
    devices: PositiveInt | None = None
    """Number of simulated devices where there is no accelerator."""
    kinds: tuple[str, ...] = tuple(COLLECTIVES)
    """Collectives to time."""
    sizes: tuple[PositiveInt, ...] = (2**12, 2**16, 2**20, 2**24)
    """Sizes of the whole array, in bytes."""
    shapes: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] = (
        (128, 128, 128),
        (512, 512, 512),
        (1024, 1024, 1024),
        (64, 1024, 4096),
    )
    """m k n of the matrix products."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Element types of the matrix products."""
    out: Path = Path("bench-results")
    """Folder for the results."""
    minutes: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 30.0
    """With `hardware`: time of all sections together."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION ...")] = ()
    """With `hardware`: sections to run, by default all: kernels, meshes, matmuls, collectives, steps, overlap,
    checkpoint, or module:attribute of a section of your own."""
    kernels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KERNEL ...")] = ()
    """With `hardware`: attention kernels from outside the package to check, each as module:attribute."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: bool = False
    """Print JSON."""


Rows = list[CollectiveTiming] | list[MatmulTiming]


def main(args: Sequence[str]) -> int:
    """Runs `meshwright bench`; with `hardware` the exit code is 6 after a wrong result, and 5 for unfinished sections.

    Raises CensusError where a collective or a product gives a wrong result.
    """
    options = parse(BenchOptions, "bench", args)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        truth = f"it cannot be created: {reason_of(error)}"
        raise ConfigError(f"--out {options.out}", truth, "another folder") from error
    hosts = options.hosts.hosts()
    if options.what == "collectives":
        return _finish(options, hosts, _time_collectives(options, hosts))
    if hosts.processes > 1:
        raise ConfigError(
            f"meshwright bench {options.what} as process {hosts.process} of {hosts.processes} ({hosts.source})",
            "it measures the devices of one host",
            f"--processes 1, on one of the hosts: meshwright bench {options.what} --processes 1",
        )
    return _bench_hardware(options) if options.what == "hardware" else _finish(options, hosts, _time_matmuls(options))


def _finish(options: BenchOptions, hosts: Hosts, rows: Rows) -> int:
    """Writes the figures and prints them, in process 0: the others have measured the same."""
    if hosts.process == 0:
        write_csv(rows, options.out / f"{options.what}.csv")
        if options.json:
            write_json({"rows": [dataclasses.asdict(row) for row in rows], "out": options.out})
        else:
            console = open_console(sys.stdout)
            print_timings(console, rows)
            text = f"\nwritten to {options.out}, and kept as the calibration of plans"
            console.print(text, markup=False, soft_wrap=True)
    wrong = [row for row in rows if not row.correct]
    if wrong:
        truth = f"{len(wrong)} results are wrong, first {wrong[0]}"
        raise CensusError(f"{options.what} here", truth, "a report to JAX")
    return 0


def _time_collectives(options: BenchOptions, hosts: Hosts) -> list[CollectiveTiming]:
    shape = MeshShape.parse(options.mesh) if options.mesh else None
    start_devices(options.devices, shape, hosts)
    shape = shape or mesh.default_mesh_shape(jax.device_count())
    rows = list(time_collectives(mesh.build_mesh(shape), options.kinds, options.sizes))
    if hosts.process == 0:
        _write_calibrations(options, collectives=rows, mesh=str(shape))
    return rows


def _time_matmuls(options: BenchOptions) -> list[MatmulTiming]:
    mesh.prepare_host(options.devices or 1)
    rows = list(time_matmuls(options.shapes, options.dtypes))
    _write_calibrations(options, matmuls=rows, memory_bandwidth=measure_memory_bandwidth(_COPY_BYTES))
    return rows


def _write_calibrations(options: BenchOptions, **measured: Any) -> None:
    """Writes the calibration into the output folder and into the cache, where plans find it."""
    for file in (options.out / "calibration.json", calibration_path(default_cache_folder())):
        try:
            write_calibration(file, **measured)
        except OSError as error:
            raise unwritable(file, error) from error


def _bench_hardware(options: BenchOptions) -> int:
    """Runs the sections and writes the report. Raises ConfigError for an unknown section, or another host's folder."""
    out, devices = options.out, SIMULATED if options.devices is None else options.devices
    names, console = check_sections(options.only), open_console(sys.stderr if options.json else sys.stdout)
    results: dict[str, Mapping[str, Any]] = {}

    def finished(name: str, result: Mapping[str, Any]) -> None:
        results[name] = result
        print_section(console, name, result)
        # A run that is killed leaves the report of what it had.
        write_json_file(out / "report.json", report_json(results))
        report_page(results).write(out / "report.html")

    run_sections(Request(str(out.resolve()), devices, options.kernels), names, options.minutes, finished)
    if options.json:
        write_json(report_json(results))
    else:
        report_page(results).print(console)
    calibration = out / "calibration.json"
    kept = f", {calibration} (kept as the calibration of plans)" if calibration.exists() else ""
    text = f"\nwritten: {out / 'report.html'}, {out / 'report.json'}{kept}"
    console.print(text, markup=False, soft_wrap=True)
    if problems_of(results):
        return CensusError.exit_code
    return TrainingError.exit_code if unfinished_of(results) else 0


def print_timings(console: Console, rows: Rows) -> None:
    """Prints the timings of collectives, or of matrix products."""
    if all(isinstance(row, CollectiveTiming) for row in rows):
        columns = [
            Column("collective", cell="kind"),
            Column("axis", cell="axis"),
            Column("devices", "integer", "devices"),
            Column("size", "bytes", "bytes"),
            Column("median", "seconds", "seconds"),
            Column("algorithm", cell=lambda row: f"{row.algorithm_bandwidth / 1e9:.3g} GB/s"),
            Column("bus", cell=lambda row: f"{row.bus_bandwidth / 1e9:.3g} GB/s"),
        ]
    else:
        columns = [
            Column("type", cell="dtype"),
            Column("m x k x n", cell=lambda row: f"{row.m} x {row.k} x {row.n}"),
            Column("median", "seconds", "seconds"),
            Column("rate", cell=lambda row: f"{row.flops_per_second / 1e9:.3g} GFLOP/s"),
        ]
    columns.append(Column("result", cell=lambda row: "correct" if row.correct else "WRONG"))
    print_table(console, Table.of(rows, columns, printed=None))

"""The verb `bench`: collectives, matrix products, or everything about the devices at hand."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

from meshwright.bench.calibration_file import calibration_path, write_calibration
from meshwright.bench.collectives import COLLECTIVES, CollectiveTiming, time_collectives
from meshwright.bench.results import plot_timings, require_plotting, write_csv
from meshwright.bench.single_device import MatmulTiming, measure_memory_bandwidth, time_matmuls
from meshwright.cli.devices import SIMULATED, HostOptions, require_one_process, simulate_devices
from meshwright.cli.output import write_json
from meshwright.cli.parse import parse
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError
from meshwright.formatting import format_bytes
from meshwright.hardware import mesh
from meshwright.hardware.hosts import Hosts
from meshwright.report.console import open_console
from meshwright.views.draw.colours import plot_colours
from meshwright.views.plain_table import plain_table

_COPY_BYTES = 2**28
"""Size of the array with which memory bandwidth is measured: larger than any cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Time WHAT on the devices at hand: `collectives` over every axis of a mesh, `matmul` on one device, or `hardware`,
    which is everything there is to know of a machine in half an hour. Writes the figures, and the calibration that
    `plan` and `train` use for their predictions."""

    what: Annotated[Literal["collectives", "matmul", "hardware"], tyro.conf.Positional]
    """`collectives`, `matmul` or `hardware`."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh of the collectives, as axis=degree,...; by default one over all devices."""
    devices: int | None = None
    """Number of simulated devices where there is no accelerator."""
    kinds: tuple[str, ...] = tuple(COLLECTIVES)
    """Collectives to time."""
    sizes: tuple[int, ...] = (2**12, 2**16, 2**20, 2**24)
    """Sizes of the whole array, in bytes."""
    shapes: tuple[tuple[int, int, int], ...] = ((128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (64, 1024, 4096))
    """m k n of the matrix products."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Element types of the matrix products."""
    out: Path = Path("bench-results")
    """Folder for the results."""
    minutes: float = 30.0
    """With `hardware`: time of all sections together."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION ...")] = ()
    """With `hardware`: sections to run, by default all: kernels, meshes, matmuls, collectives, steps, overlap,
    checkpoint, or module:attribute of a section of your own."""
    kernels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KERNEL ...")] = ()
    """With `hardware`: attention kernels from outside the package to check, each as module:attribute."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    plot: bool = False
    """Also draw bus bandwidth over size (needs matplotlib)."""
    json: bool = False
    """Print JSON."""


Rows = list[CollectiveTiming] | list[MatmulTiming]


def main(args: Sequence[str]) -> int:
    """Runs `meshwright bench`. Raises CensusError where a collective or a product gives a wrong result."""
    options = parse(BenchOptions, "bench", args)
    _check(options)
    hosts = options.hosts.hosts()
    if options.what != "collectives":
        require_one_process(hosts, f"bench {options.what}", "it measures the devices of one host")
    if options.what == "hardware":
        from meshwright.cli.bench_hardware import bench_hardware  # the other two need no planner

        return bench_hardware(
            options.out, minutes=options.minutes, only=options.only, kernels=options.kernels,
            devices=options.devices if options.devices is not None else SIMULATED, json=options.json,
        )  # fmt: skip
    rows = _time_collectives(options, hosts) if options.what == "collectives" else _time_matmuls(options)
    if hosts.process == 0:  # the others have measured the same
        _show(options, rows)
    wrong = [row for row in rows if not row.correct]
    if wrong:
        raise CensusError(
            f"{options.what} here", f"{len(wrong)} results are wrong, first {wrong[0]}", "a report to JAX"
        )
    return 0


def _show(options: BenchOptions, rows: Rows) -> None:
    """Writes the figures and prints them."""
    write_csv(rows, options.out / f"{options.what}.csv")
    if options.json:
        write_json({"rows": [dataclasses.asdict(row) for row in rows], "out": options.out})
    else:
        _print(open_console(sys.stdout), options, rows)


def _check(options: BenchOptions) -> None:
    """Creates the output folder. Raises ConfigError for an illegal size, or a folder that cannot be created."""
    if min(options.sizes, default=1) < 1 or min((n for shape in options.shapes for n in shape), default=1) < 1:
        raise ConfigError("a size below 1", "sizes count bytes, shapes rows and columns", "sizes of at least 1")
    if options.plot:
        require_plotting()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {options.out}", f"it cannot be created: {error.strerror}", "another folder"
        ) from error


def _time_collectives(options: BenchOptions, hosts: Hosts) -> list[CollectiveTiming]:
    shape = MeshShape.parse(options.mesh) if options.mesh else None
    simulate_devices(options.devices or (shape.size if shape else SIMULATED), hosts)
    shape = shape or mesh.default_mesh_shape(jax.device_count())
    rows = list(time_collectives(mesh.build_mesh(shape), options.kinds, options.sizes))
    if hosts.process:
        return rows
    _write_calibrations(options, collectives=rows, mesh=str(shape))
    if options.plot:
        plot_timings(rows, options.out / "collectives.svg", plot_colours())
    return rows


def _time_matmuls(options: BenchOptions) -> list[MatmulTiming]:
    mesh.prepare_host(options.devices or 1)
    rows = list(time_matmuls(options.shapes, options.dtypes))
    _write_calibrations(options, matmuls=rows, memory_bandwidth=measure_memory_bandwidth(_COPY_BYTES))
    return rows


def _write_calibrations(options: BenchOptions, **measured: Any) -> None:
    """Writes the calibration into the output folder and into the cache, where plans find it."""
    for file in (options.out / "calibration.json", calibration_path(mesh.default_cache_folder())):
        try:
            write_calibration(file, **measured)
        except OSError as error:
            raise ConfigError(
                f"writing {file}", f"{error.strerror}", "another --out, or another cache folder"
            ) from error


def _print(console: Console, options: BenchOptions, rows: Rows) -> None:
    print_timings(console, rows)
    console.print(f"\nwritten to {options.out}, and kept as the calibration of plans", markup=False, soft_wrap=True)


def print_timings(console: Console, rows: Rows) -> None:
    """Prints the timings of collectives, or of matrix products."""
    right: tuple[str, ...]
    if all(isinstance(row, CollectiveTiming) for row in rows):
        right = ("devices", "size", "median", "algorithm", "bus", "result")
        table = plain_table("collective", "axis", *right, right=right)
    else:
        right = ("median", "rate", "result")
        table = plain_table("type", "m x k x n", *right, right=right)
    for row in rows:
        result, median = "correct" if row.correct else "WRONG", f"{row.seconds * 1e6:,.0f} us"
        if isinstance(row, CollectiveTiming):
            bandwidths = [f"{n / 1e9:.3g} GB/s" for n in (row.algorithm_bandwidth, row.bus_bandwidth)]
            table.add_row(row.kind, row.axis, str(row.devices), format_bytes(row.bytes), median, *bandwidths, result)
        else:
            rate = f"{row.flops_per_second / 1e9:.3g} GFLOP/s"
            table.add_row(row.dtype, f"{row.m} x {row.k} x {row.n}", median, rate, result)
    console.print(table)

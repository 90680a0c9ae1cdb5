"""The verb `bench`: collectives over a mesh, or everything about the devices at hand."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import msgspec
import tyro
from rich.console import Console

from meshwright.api.verb import SIMULATED, Call, HostOptions, Outcome, start_devices
from meshwright.bench.calibration_file import calibration_path, write_calibration
from meshwright.bench.hardware.run import check_sections, run_sections
from meshwright.bench.hardware.section import Request, write_json_file
from meshwright.bench.microbenchmarks import (
    COLLECTIVES,
    CollectiveTiming,
    time_collectives,
    write_csv,
)
from meshwright.config import MeshShape
from meshwright.errors import (
    CensusError,
    ConfigError,
    TrainingError,
    by_class,
    reason_of,
    unwritable_file,
)
from meshwright.hardware import mesh
from meshwright.hardware.hosts import Hosts
from meshwright.ranges import PositiveInt, Ranged
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(Ranged):
    """Time WHAT on the devices at hand: `collectives` over every axis of a mesh, or `hardware`,
    which measures a new machine in 10 minutes. Writes the figures, and the calibration that `plan`
    and `train` use for their predictions.
    """

    what: Annotated[Literal["collectives", "hardware"], tyro.conf.Positional]
    """`collectives` or `hardware`."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXIS=N,...")] = None
    """Mesh of the collectives, as axis=degree,...; by default one over all devices."""
    devices: PositiveInt | None = None
    """Number of simulated devices where there is no accelerator."""
    kinds: tuple[str, ...] = tuple(COLLECTIVES)
    """Collectives to time."""
    sizes: tuple[PositiveInt, ...] = (2**12, 2**16, 2**20, 2**24)
    """Sizes of the whole array, in bytes."""
    out: Path = Path("bench-results")
    """Folder for the results."""
    minutes: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 10.0
    """With `hardware`: time of all sections together."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION ...")] = ()
    """With `hardware`: sections to run, by default all: kernels, matmuls, collectives; or
    FILE.py:function of a section of your own, such as those in the repository's bench/hardware."""
    kernels: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KERNEL ...")] = ()
    """With `hardware`: attention kernels from outside the package to time, each as
    module:attribute."""
    hosts: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions()
    json: bool = False
    """Print JSON."""

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright bench`.

        With `hardware` the exit code is 6 after a wrong result, 5 for unfinished sections.
        Raises CensusError where a collective gives a wrong result.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            truth = f"it cannot be created: {reason_of(error)}"
            raise by_class(
                error, ConfigError(f"--out {self.out}", truth, "another folder")
            ) from error
        hosts = self.hosts.hosts()
        if self.what == "collectives":
            return self._finish(self._time_collectives(hosts))
        if hosts.processes > 1:
            raise ConfigError(
                f"meshwright bench hardware as process {hosts.process} of {hosts.processes} "
                f"({hosts.source})",
                "it measures the devices of one host",
                "--processes 1, on one of the hosts: meshwright bench hardware --processes 1",
            )
        return self._bench_hardware(call.console)

    def _finish(self, rows: list[CollectiveTiming]) -> Outcome:
        """Writes the figures, in process 0: the others have measured the same."""
        if jax.process_index() == 0:
            write_csv(rows, self.out / "collectives.csv")
        wrong = [row for row in rows if not row.correct]
        if wrong:
            truth = f"{len(wrong)} results are wrong, first {wrong[0]}"
            raise CensusError("collectives here", truth, "a report to JAX")
        record = {"rows": [dataclasses.asdict(row) for row in rows], "out": self.out}
        return Outcome(functools.partial(self._print, rows), record)

    def _print(self, rows: list[CollectiveTiming], console: Console) -> None:
        print_timings(console, rows)
        text = f"\nwritten to {self.out}, and kept as the calibration of plans"
        console.print(text, markup=False, soft_wrap=True)

    def _time_collectives(self, hosts: Hosts) -> list[CollectiveTiming]:
        shape = MeshShape.parse(self.mesh) if self.mesh else None
        start_devices(self.devices, shape, hosts)
        shape = shape or mesh.default_mesh_shape(jax.device_count())
        rows = list(time_collectives(mesh.build_mesh(shape), self.kinds, self.sizes))
        if hosts.process != 0:
            return rows
        for file in (self.out / "calibration.json", calibration_path(default_cache_folder())):
            try:
                write_calibration(file, collectives=rows, mesh=str(shape))
            except OSError as error:
                raise unwritable_file(file, error) from error
        return rows

    def _bench_hardware(self, console: Console) -> Outcome:
        """Runs the sections and writes the report. Raises ConfigError for an unknown one."""
        out, devices = self.out, SIMULATED if self.devices is None else self.devices
        names = check_sections(self.only)
        results: dict[str, Mapping[str, Any]] = {}

        def finished(name: str, result: Mapping[str, Any]) -> None:
            results[name] = result
            print_section(console, name, result)
            # A run that is killed leaves the report of what it had.
            write_json_file(out / "report.json", report_json(results))
            report_page(results).write(out / "report.html")

        run_sections(
            Request(str(out.resolve()), devices, self.kernels), names, self.minutes, finished
        )
        if not self.json:
            report_page(results).print(console)
        calibration = out / "calibration.json"
        kept = f", {calibration} (kept as the calibration of plans)" if calibration.exists() else ""
        text = f"\nwritten: {out / 'report.html'}, {out / 'report.json'}{kept}"
        console.print(text, markup=False, soft_wrap=True)
        unfinished = TrainingError.exit_code if unfinished_of(results) else 0
        code = CensusError.exit_code if problems_of(results) else unfinished
        return Outcome(record=report_json(results), code=code)


def print_timings(console: Console, rows: list[CollectiveTiming]) -> None:
    """Prints the timings of collectives."""
    columns = [
        Column("collective", cell="kind"),
        Column("axis", cell="axis"),
        Column("devices", "integer", "devices"),
        Column("size", "bytes", "bytes"),
        Column("median", "seconds", "seconds"),
        Column("algorithm", cell=lambda row: f"{row.algorithm_bandwidth / 1e9:.3g} GB/s"),
        Column("bus", cell=lambda row: f"{row.bus_bandwidth / 1e9:.3g} GB/s"),
        Column("result", cell=lambda row: "correct" if row.correct else "WRONG"),
    ]
    print_table(console, Table.of(rows, columns, printed=None))

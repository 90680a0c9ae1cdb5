"""Census of a compiled program: memory, collectives, FLOPs and findings, read from the program; step time, simulated.

That a program compiles, what it stores and what it sends is proved by the compiler. Its step time is predicted by a
simulated schedule.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import meshwright
from meshwright.analysis.arguments import (
    ARGUMENT_CATEGORIES,
    argument_leaves,
    definition_line,
    layout_findings,
    mesh_of_program,
    program_arguments,
    program_shardings,
)
from meshwright.analysis.compile import CompiledProgram, compile_function
from meshwright.analysis.donation import lint_donation
from meshwright.analysis.expected_sharding import ExpectedSharding, collect_expected_shardings
from meshwright.analysis.grouped_matmuls import grouped_products, lint_grouped_matmuls
from meshwright.analysis.jaxpr_collectives import read_jaxpr_collectives
from meshwright.analysis.lint import Finding, lint_expected_shardings, lint_host, lint_rematerialisation, lint_tiles
from meshwright.analysis.memory import Argument, Memory, read_memory
from meshwright.analysis.missed_overlap import lint_missed_overlap
from meshwright.analysis.replicated_work import lint_duplicated_work, lint_whole_state
from meshwright.analysis.self_check import FlopsBand, doubts_of
from meshwright.analysis.simulate import SimulatedSchedule, TargetDevices, Ticks, simulate_schedule
from meshwright.analysis.source_lint import lint_source
from meshwright.analysis.unexpected_collectives import MIN_SENT_BYTES, lint_unexpected_collectives
from meshwright.hlo.flops import ALL_ROWS, CompiledMatmul, Skipped, read_matmuls, unpriced_kernels
from meshwright.hlo.ledger import LedgerEntry, by_kind_and_axes, read_ledger, unread_collectives
from meshwright.hlo.parser import Module
from meshwright.hlo.scopes import Branches

PROVENANCE: dict[str, tuple[str, ...]] = {
    "compiled": (
        "memory",
        "ledger",
        "unread",
        "traffic",
        "flops.matmuls",
        "flops.unpriced",
        "flops.cost_analysis",
        "findings",
        "doubts",
    ),
    "model": ("flops.model",),
    "simulated": ("simulated_schedule",),
}
"""Origin of the parts of a census document: proved by the compiler, computed from the model, or predicted."""


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """Facts about a program that its compiled text does not contain."""

    name: str = ""
    """Title; empty takes the function's name."""
    model_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Model FLOPs of one execution on one device, by item."""
    skipped: Skipped = ALL_ROWS
    """Parts of their operands that kernels skip, averaged over layers."""
    flops_band: FlopsBand | None = None
    """FLOPs that the compiled program may have; None checks none."""
    branches: Branches = dataclasses.field(default_factory=dict)
    """How often the branches of conditionals are taken, by named scope; others count as always taken."""
    ticks: Ticks = dataclasses.field(default_factory=dict)
    """Ticks of a pipeline schedule by the branches that run in them on some stage."""
    library_files: tuple[str, ...] = ()
    """Ends of file names that are skipped when a collective's source line is chosen."""
    min_sent: int = MIN_SENT_BYTES
    """Bytes that a device sends in one execution below which a collective that the compiler inserted is no finding."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one execution on one device."""

    model: Mapping[str, float]
    """Model FLOPs by item; empty for a function that is not a run's step."""
    matmuls: tuple[CompiledMatmul, ...]
    """Matrix products in the compiled program, recomputation included."""
    cost_analysis: float | None
    """All operations by the compiler's cost analysis, which counts a loop's body once on some backends."""
    bytes_accessed: float | None
    """Bytes read and written by the compiler's cost analysis."""
    unpriced: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Executions of the kernels whose FLOPs are not known, by name: `matmuls` and the predicted time lack them."""

    @property
    def compiled(self) -> float:
        """FLOPs of all matrix products in the compiled program."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity: FLOPs per byte, both by the compiler's cost analysis."""
        return self.cost_analysis / self.bytes_accessed if self.cost_analysis and self.bytes_accessed else None


@dataclasses.dataclass(frozen=True)
class Census:
    """Memory, collectives, FLOPs and findings of one device of a compiled program, with a simulated schedule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> report = mw.census(jax.jit(lambda x, w: jnp.tanh(x @ w)), jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> report.flops.compiled, len(report.ledger)
        (1024.0, 0)
    """

    name: str
    """Title of the program."""
    mesh: Mapping[str, int]
    """Degree of each axis, outermost first."""
    device: str
    """Kind of the devices it was compiled for."""
    ledger: tuple[LedgerEntry, ...]
    """Collectives in program order."""
    memory: Memory
    flops: Flops
    findings: tuple[Finding, ...]
    compile_seconds: float
    """Time of lowering and compilation."""
    versions: str
    """Versions of JAX and the compiler."""
    text: str = dataclasses.field(repr=False)
    """HLO text of the compiled program."""
    unread: tuple[str, ...] = ()
    """Instructions that look like a collective and are not in the ledger; empty if the ledger is complete."""
    schedule: SimulatedSchedule | None = None
    """Simulated schedule; None if no target was given."""
    doubts: tuple[str, ...] = ()
    """Reasons for which the census does not trust its own figures (`analysis.self_check`); empty where it does."""

    def to_json(self) -> dict[str, Any]:
        """Returns everything except the program's text; `provenance` tells proved from predicted parts."""
        flops = {**dataclasses.asdict(self.flops), "compiled": self.flops.compiled, "intensity": self.flops.intensity}
        memory = {
            **dataclasses.asdict(self.memory),
            "categories": self.memory.by_category(),
            "modules": self.memory.by_module(),
            "peak": self.memory.compiled.peak,
            "live": self.memory.compiled.live,
        }
        return {
            "name": self.name,
            "mesh": dict(self.mesh),
            "device": self.device,
            "versions": self.versions,
            "compile_seconds": self.compile_seconds,
            "provenance": PROVENANCE,
            "memory": memory,
            "ledger": [_entry_json(entry) for entry in self.ledger],
            "unread": list(self.unread),
            "doubts": list(self.doubts),
            "traffic": summarise_traffic(self.ledger),
            "flops": flops,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "simulated_schedule": None if self.schedule is None else _schedule_json(self.schedule),
        }

    def __str__(self) -> str:
        return meshwright.render("census_tables", "census_text", self)

    def _repr_html_(self) -> str:
        return meshwright.render("census_page", "census_html", self)


def _entry_json(entry: LedgerEntry) -> dict[str, Any]:
    return {**dataclasses.asdict(entry), "total": entry.total, "sent": entry.sent, "axes_label": entry.axes_label}


def _schedule_json(schedule: SimulatedSchedule) -> dict[str, Any]:
    """Returns the schedule without its spans, which `views/trace.py` writes."""
    fields = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    del fields["spans"]
    return {**fields, "doubt": schedule.doubt}


def summarise_traffic(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    """Sums a ledger by kind and axes."""
    return [
        {"kind": kind, "axes": axes, "count": count, "total": total, "sent": sent}
        for (kind, axes), (count, total, sent) in by_kind_and_axes(list(entries)).items()
    ]


def census(
    function: Any,
    *args: Any,
    mesh: Mapping[str, int] | None = None,
    categories: Mapping[str, str] | None = None,
    declared: Mapping[str, PartitionSpec] | None = None,
    target: TargetDevices | None = None,
    facts: ProgramFacts | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Census:
    """Compiles `function` for its arguments (arrays, abstract arrays, Python numbers) and reads the compiled program.

    Nothing runs. function: jitted or not, with static arguments as it declares them; or a `Traced`, `Lowered` or
    `Compiled` of `jax.stages`, alone.  keywords: keyword arguments of the function.

    mesh: degree of each axis, outermost first; None takes it from the shardings of arguments, program or source.
    categories: beginning of an argument's path -> category of its memory, in addition to ARGUMENT_CATEGORIES.
    declared: path of an argument or result -> the sharding it must have.
    target: devices on which a schedule is simulated; None simulates none.
    facts: facts that the compiled text does not contain, such as how often branches are taken.
    compiler_options: XLA options by name.

    Raises CensusError if a path of `declared` does not exist, or the compiler refuses the program.

    >>> import jax.numpy as jnp
    >>> census(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).flops.compiled
    1024.0
    """
    facts, line = facts or ProgramFacts(), definition_line(function)
    with collect_expected_shardings() as expected:
        program = compile_function(function, *args, compiler_options=compiler_options, keywords=keywords)
    program = dataclasses.replace(program, module=dataclasses.replace(program.module, branches=facts.branches))
    module, device = program.module, _device_kind(program.executable)
    degrees = mesh_of_program((args, keywords), program.executable, program.jaxpr) if mesh is None else dict(mesh)
    leaves = {} if program.jaxpr is None else argument_leaves(program.jaxpr, (*args, keywords))
    arguments = program_arguments(module, leaves, {**ARGUMENT_CATEGORIES, **(categories or {})})
    ledger = read_ledger(module, degrees, facts.library_files)
    findings = layout_findings(leaves, program, declared or {}, degrees, line)
    findings += _program_findings(program, ledger, expected, degrees, arguments, facts.min_sent)
    findings += [*_argument_findings(program, arguments, leaves, line, device), *lint_whole_state(arguments, line)]
    schedule = None if target is None else simulate_schedule(module, target, degrees, facts.skipped, facts.ticks)
    flops, grouped = _flops(program, facts), grouped_products(module, program.jaxpr)
    findings += lint_duplicated_work(program.jaxpr, flops.compiled - grouped.excess, arguments, degrees, line)
    findings += [*lint_grouped_matmuls(grouped), *_waits(module, schedule, ledger, device, facts.min_sent)]
    return Census(
        name=facts.name or str(getattr(function, "__name__", "") or module.name.removeprefix("jit_") or "function"),
        mesh=degrees,
        device=device,
        ledger=tuple(ledger),
        memory=read_memory(module, program.memory, program.assignment, arguments),
        flops=flops,
        findings=tuple(f if f.line else dataclasses.replace(f, line=line) for f in findings),
        compile_seconds=program.compile_seconds,
        versions=_versions(device),
        text=program.text,
        unread=tuple(unread_collectives(module)),
        schedule=schedule,
        doubts=doubts_of(flops.compiled, grouped.excess, flops.unpriced, facts.flops_band, schedule),
    )


def _waits(
    module: Module, schedule: SimulatedSchedule | None, ledger: Sequence[LedgerEntry], device: str, min_sent: int
) -> list[Finding]:
    """Reports collectives that could overlap and do not; simulated devices have none that could."""
    if schedule is None or device == "cpu":
        return []
    return lint_missed_overlap(module, schedule, ledger, min_sent)


def _flops(program: CompiledProgram, facts: ProgramFacts) -> Flops:
    cost = program.cost_analysis
    matmuls = tuple(read_matmuls(program.module, facts.skipped))
    unpriced = unpriced_kernels(program.module)
    return Flops(dict(facts.model_flops), matmuls, cost.get("flops"), cost.get("bytes accessed"), unpriced)


def _program_findings(
    program: CompiledProgram,
    ledger: Sequence[LedgerEntry],
    expected: Sequence[ExpectedSharding],
    mesh: dict[str, int],
    arguments: Sequence[Argument],
    min_sent: int,
) -> list[Finding]:
    findings = lint_expected_shardings(expected, mesh)
    findings += lint_rematerialisation(program.module, program.warnings)
    if mesh and program.jaxpr is not None:
        written = read_jaxpr_collectives(program.jaxpr, mesh)
        results = {tuple(getattr(aval, "shape", ())) for aval in program.jaxpr.out_avals}
        findings += lint_unexpected_collectives(ledger, written, arguments, min_sent, results)
    findings += [] if program.jaxpr is None else lint_source(program.jaxpr)
    return findings + lint_host(program.module)


def _argument_findings(
    program: CompiledProgram, arguments: Sequence[Argument], leaves: Mapping[str, Any], line: str, device: str
) -> list[Finding]:
    categories = {a.path: a.category for a in arguments}
    findings = [] if program.jaxpr is None else lint_donation(program.module, program.jaxpr, leaves, categories, line)
    if not device.startswith("TPU"):
        return findings
    itemsize = {a.path: a.bytes // max(1, math.prod(a.local_shape)) for a in arguments}
    return findings + lint_tiles([a for a in arguments if a.category == "parameters"], itemsize, line)


def _versions(device: str) -> str:
    """Lists the versions of JAX and of the device's compiler."""
    versions = [f"jax {jax.__version__}"]
    for kind, package in (("TPU", "libtpu"), ("NVIDIA", "jax-cuda13-plugin"), ("NVIDIA", "nvidia-cudnn-cu13")):
        if device.startswith(kind):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)


def _device_kind(executable: Any) -> str:
    shardings = [program_shardings(executable, which) for which in ("input_shardings", "output_shardings")]
    for sharding in itertools.chain(*shardings):
        devices = getattr(sharding, "_device_assignment", None) or tuple(sharding.device_set)
        if devices:
            return str(devices[0].device_kind)
    return jax.devices()[0].device_kind


def save_census(census: Census, file: Path) -> None:
    """Writes the census as JSON, for a comparison with another commit or mesh."""
    file.write_text(json.dumps(census.to_json(), indent=1) + "\n", encoding="utf-8")

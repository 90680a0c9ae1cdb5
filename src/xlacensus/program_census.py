"""Census of a compiled program: memory, collectives, FLOPs and findings, read
from the program; step time, simulated.

That a program compiles, what it stores and what it sends is proved by the compiler. Its step time
is predicted by a simulated schedule.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from xlacensus.collective_lints import MIN_SENT_BYTES, lint_unexpected_collectives
from xlacensus.compilation import (
    ARGUMENT_CATEGORIES,
    CompiledProgram,
    argument_leaves,
    compile_function,
    definition_line,
    program_arguments,
)
from xlacensus.donation_lint import lint_donation
from xlacensus.findings import Finding
from xlacensus.formatting import format_bytes, format_count, format_step
from xlacensus.hlo.flops import ALL_ROWS, CompiledMatmul, Skipped, read_matmuls, unpriced_kernels
from xlacensus.hlo.ledger import Ledger, LedgerEntry, read_ledger, traffic, unread_collectives
from xlacensus.hlo.parser import Module
from xlacensus.hlo.scopes import Branches
from xlacensus.jaxprs import read_jaxpr_collectives
from xlacensus.layout_lints import (
    lint_layouts,
    lint_rematerialisation,
    lint_tiles,
    lint_whole_state,
)
from xlacensus.lints import lint_determinism, lint_duplicated_work, lint_host
from xlacensus.overlap_lint import lint_missed_overlap
from xlacensus.peak_memory import Argument, Memory, read_memory
from xlacensus.schedule import SimulatedSchedule, TargetDevices, Ticks, simulate_schedule
from xlacensus.source_lints import (
    GroupedProducts,
    grouped_products,
    lint_grouped_matmuls,
    lint_source,
)

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
"""Origin of the parts of a census document: proved by the compiler, computed
from the model, or predicted."""


@dataclasses.dataclass(frozen=True)
class FlopsBand:
    """Matrix-product FLOPs that a compiled step of one device may have,
    from the model's formulas."""

    least: float
    """A step with fewer misses part of the model."""
    most: float
    """A step with more multiplies what the model does not need, or is counted twice."""
    most_is: str = ""
    """What `most` allows for, in words."""


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
    """How often the branches of conditionals are taken, by named scope;
    others count as always taken."""
    ticks: Ticks = dataclasses.field(default_factory=dict)
    """Ticks of a pipeline schedule by the branches that run in them on some stage."""
    library_files: tuple[str, ...] = ()
    """Ends of file names that are skipped when a collective's source line is chosen."""
    min_sent: int = MIN_SENT_BYTES
    """Bytes that a device sends in one execution below which a collective that the compiler
    inserted is no finding."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one execution on one device."""

    model: Mapping[str, float]
    """Model FLOPs by item; empty for a function that is not a run's step."""
    matmuls: tuple[CompiledMatmul, ...]
    """Matrix products in the compiled program, recomputation included."""
    cost_analysis: float | None
    """All operations by the compiler's cost analysis,
    which counts a loop's body once on some backends."""
    bytes_accessed: float | None
    """Bytes read and written by the compiler's cost analysis."""
    unpriced: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Executions of the kernels whose FLOPs are not known,
    by name: `matmuls` and the predicted time lack them."""

    @property
    def compiled(self) -> float:
        """FLOPs of all matrix products in the compiled program."""
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity: FLOPs per byte, both by the compiler's cost analysis."""
        return (
            self.cost_analysis / self.bytes_accessed
            if self.cost_analysis and self.bytes_accessed
            else None
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Census:
    """Memory, collectives, FLOPs and findings of one device of a compiled program,
    with a simulated schedule.

    Example:
        >>> import jax, jax.numpy as jnp, xlacensus
        >>> layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
        >>> report = xlacensus.census(layer, jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> report.flops.compiled, len(report.ledger)
        (1024.0, 0)
    """

    name: str
    mesh: Mapping[str, int]
    """Degree of each axis, outermost first."""
    device: str
    ledger: tuple[LedgerEntry, ...]
    """Collectives in program order."""
    memory: Memory
    flops: Flops
    findings: tuple[Finding, ...]
    compile_seconds: float
    versions: str
    text: str = dataclasses.field(repr=False)
    unread: tuple[str, ...] = ()
    """Instructions that look like a collective and are not in the ledger;
    empty if the ledger is complete."""
    schedule: SimulatedSchedule | None = None
    """Simulated schedule; None if no target was given."""
    doubts: tuple[str, ...] = ()
    """Reasons for which the census does not trust its own figures (`doubts_of`);
    empty where it does."""

    def brief(self) -> str:
        """Returns the program, its mesh, memory, FLOPs, collectives and findings."""
        axes = ",".join(f"{axis}={degree}" for axis, degree in self.mesh.items() if degree > 1)
        facts = [
            f"{format_bytes(self.memory.compiled.live)} on a device",
            f"{format_count(self.flops.compiled)} FLOPs",
            f"{len(self.ledger)} collectives",
            f"{len(self.findings)} findings",
        ]
        if self.schedule is not None:
            facts.append(f"{format_step(self.schedule.step_seconds)} simulated")
        return f"of {self.name} on {axes or 'one device'} of {self.device}: {', '.join(facts)}"

    def to_json(self) -> dict[str, Any]:
        """Returns everything except the program's text;
        `provenance` tells proved from predicted parts."""
        flops = {
            **dataclasses.asdict(self.flops),
            "compiled": self.flops.compiled,
            "intensity": self.flops.intensity,
        }
        memory = {
            **dataclasses.asdict(self.memory),
            "categories": self.memory.by_category(),
            "modules": self.memory.by_module(),
            "peak": self.memory.compiled.peak,
            "live": self.memory.compiled.live,
        }
        timed = {} if self.schedule is None else self.schedule.by_collective
        entries = [
            {**dataclasses.asdict(e), "total": e.total, "sent": e.sent, "axes_label": e.axes_label}
            | dict(zip(("seconds", "exposed"), timed.get(e.instruction, ()), strict=False))
            for e in self.ledger
        ]
        return {
            "name": self.name,
            "mesh": dict(self.mesh),
            "device": self.device,
            "versions": self.versions,
            "compile_seconds": self.compile_seconds,
            "provenance": PROVENANCE,
            "memory": memory,
            "ledger": entries,
            "unread": list(self.unread),
            "doubts": list(self.doubts),
            "traffic": traffic(self.ledger),
            "flops": flops,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            # Without its spans, which the page draws.
            "simulated_schedule": self.schedule
            and {
                **{k: v for k, v in vars(self.schedule).items() if k != "spans"},
                "doubt": self.schedule.doubt,
            },
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.brief()}>"

    def __str__(self) -> str:
        return "\n\n".join(_paragraphs(self))


def _paragraphs(census: Census) -> Iterator[str]:
    """Yields the parts of a census as text: summary, collectives, memory, findings, doubts."""
    yield f"Census {census.brief()}"
    ledger = Ledger(census.ledger, census.unread)
    yield f"Collectives of one device\n{ledger}" if ledger.entries else "No collectives"
    memory = census.memory.by_category().items()
    lines = [f"{format_bytes(size):>10}  {category}" for category, size in memory if size]
    yield "\n".join(["Memory of one device at the peak", *lines])
    yield from map(format_finding, census.findings)
    for instruction in census.unread:
        yield f"not in the ledger: {instruction}"
    yield from census.doubts


def format_finding(finding: Finding) -> str:
    """Formats a finding: what it is about, the reason, and the fix."""
    place = f" ({finding.line})" if finding.line else ""
    return (
        f"{finding.kind}: {finding.subject}{place}\n  because: {finding.reason}\n  fix:     "
        f"{finding.fix}"
    )


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
    """Compiles `function` for its arguments (arrays, abstract arrays, Python numbers)
    and reads the compiled program.

    Nothing runs. function: jitted or not, with static arguments as it declares them; or a `Traced`,
    `Lowered` or `Compiled` of `jax.stages`, alone.
    keywords: keyword arguments of the function.

    mesh: degree of each axis, outermost first;
    None takes it from the shardings of arguments, program or source.
    categories: beginning of an argument's path -> category of its memory,
    in addition to ARGUMENT_CATEGORIES.
    declared: path of an argument or result -> the sharding it must have.
    target: devices on which a schedule is simulated; None simulates none.
    facts: facts that the compiled text does not contain, such as how often branches are taken.
    compiler_options: XLA options by name.

    Raises CensusError if a path of `declared` does not exist, or the compiler refuses the program.

    >>> import jax.numpy as jnp
    >>> census(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).flops.compiled
    1024.0
    """
    facts = facts or ProgramFacts()
    program = compile_function(
        function,
        *args,
        compiler_options=compiler_options,
        keywords=keywords,
        branches=facts.branches,
    )
    module = program.module
    degrees = program.mesh((args, keywords)) if mesh is None else dict(mesh)
    leaves: Mapping[str, Any] = {}
    if program.jaxpr is not None:
        leaves = argument_leaves(program.jaxpr, (*args, keywords))
    arguments = program_arguments(module, leaves, {**ARGUMENT_CATEGORIES, **(categories or {})})
    schedule = None
    if target is not None:
        schedule = simulate_schedule(module, target, degrees, facts.skipped, facts.ticks)
    flops = Flops(
        model=dict(facts.model_flops),
        matmuls=tuple(read_matmuls(module, facts.skipped)),
        cost_analysis=program.cost_analysis.get("flops"),
        bytes_accessed=program.cost_analysis.get("bytes accessed"),
        unpriced=unpriced_kernels(module),
    )
    read = _ReadProgram(
        program=program,
        mesh=degrees,
        leaves=leaves,
        arguments=arguments,
        ledger=read_ledger(module, degrees, facts.library_files, facts.skipped.sent_rows),
        flops=flops,
        grouped=grouped_products(module, program.jaxpr),
        schedule=schedule,
    )
    findings = _findings(read, declared or {}, compiler_options or {}, facts.min_sent)
    return Census(
        name=facts.name or _name_of(function, module),
        mesh=degrees,
        device=program.device_kind,
        ledger=tuple(read.ledger),
        memory=read_memory(module, program.memory, program.assignment, arguments),
        flops=flops,
        findings=tuple(_with_line(findings, definition_line(function))),
        compile_seconds=program.compile_seconds,
        versions=_versions(program.device_kind),
        text=program.text,
        unread=tuple(unread_collectives(module)),
        schedule=schedule,
        doubts=doubts_of(
            flops.compiled, read.grouped.excess, flops.unpriced, facts.flops_band, schedule
        ),
    )


@dataclasses.dataclass(frozen=True)
class _ReadProgram:
    """Everything that was read of a program, for the checks."""

    program: CompiledProgram
    mesh: dict[str, int]
    leaves: Mapping[str, Any]
    """Arguments of the function by path; empty where it was lowered before."""
    arguments: Sequence[Argument]
    ledger: Sequence[LedgerEntry]
    flops: Flops
    grouped: GroupedProducts
    schedule: SimulatedSchedule | None


def _findings(
    read: _ReadProgram,
    declared: Mapping[str, PartitionSpec],
    compiler_options: Mapping[str, Any],
    min_sent: int,
) -> Iterator[Finding]:
    """Yields what the checks find that apply to a program: by its devices,
    and by what is known of its source."""
    program = read.program
    module = program.module
    jaxpr = program.jaxpr
    yield from lint_layouts(program, read.leaves, declared, read.mesh)
    yield from lint_rematerialisation(module, program.warnings)
    if jaxpr is not None and read.mesh:
        written = read_jaxpr_collectives(jaxpr, read.mesh)
        results = {getattr(result, "shape", ()) for result in jaxpr.out_avals}
        yield from lint_unexpected_collectives(
            read.ledger, written, read.arguments, min_sent, results
        )
    if jaxpr is not None:
        yield from lint_source(jaxpr)
    yield from lint_host(module)
    if program.device_kind.startswith("NVIDIA"):
        yield from lint_determinism(module, read.ledger, compiler_options)
    if read.leaves:
        yield from lint_donation(module, jaxpr, read.leaves, read.arguments)
    if program.device_kind.startswith("TPU"):
        yield from lint_tiles(read.arguments)
    yield from lint_whole_state(read.arguments)
    needed_flops = read.flops.compiled - read.grouped.excess
    yield from lint_duplicated_work(jaxpr, needed_flops, read.arguments, read.mesh)
    yield from lint_grouped_matmuls(read.grouped)
    # Simulated devices have no collectives that could overlap.
    if read.schedule is not None and program.device_kind != "cpu":
        yield from lint_missed_overlap(module, read.schedule, read.ledger, min_sent)


def _with_line(findings: Iterable[Finding], line: str) -> Iterator[Finding]:
    """Yields findings; those without a line of their own get `line`, that
    of the function's definition."""
    for finding in findings:
        yield finding if finding.line else dataclasses.replace(finding, line=line)


def _name_of(function: Any, module: Module) -> str:
    """Returns the name of a function, or of its compiled program where the function has none."""
    name = str(getattr(function, "__name__", ""))
    return name or module.name.removeprefix("jit_") or "function"


def doubts_of(
    flops: float,
    excess: float,
    unpriced: Mapping[str, int],
    band: FlopsBand | None,
    schedule: SimulatedSchedule | None,
) -> tuple[str, ...]:
    """Returns the reasons for which a census does not trust itself; empty where it does.

    flops: matrix products of the program.
    excess: of those, what a finding reports as not needed.
    unpriced: executions of kernels whose FLOPs are not known.
    band: None where no formula is known.
    schedule: None where none was simulated.
    """
    doubts: list[str] = []
    if schedule is not None and schedule.doubt:
        doubts.append(schedule.doubt)
    if band is not None and flops < band.least:
        cause = f": kernels without known FLOPs ({', '.join(unpriced)})" if unpriced else ""
        doubts.append(
            f"the compiled program has {format_count(flops)} FLOPs of matrix products, and the "
            f"model needs at least {format_count(band.least)}{cause}; FLOPs and predicted time are "
            "too low"
        )
    elif band is not None and flops - excess > band.most:
        doubts.append(
            f"the compiled program has {format_count(flops - excess)} FLOPs of matrix products, "
            f"and the model explains at most {format_count(band.most)} ({band.most_is}); FLOPs and "
            "predicted time may be too high"
        )
    return tuple(doubts)


def _versions(device: str) -> str:
    versions = [f"jax {jax.__version__}"]
    for kind, package in (
        ("TPU", "libtpu"),
        ("NVIDIA", "jax-cuda13-plugin"),
        ("NVIDIA", "nvidia-cudnn-cu13"),
    ):
        if device.startswith(kind):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)


def memory(function: Any, *args: Any, **options: Any) -> Memory:
    """Compiles a function and returns the memory of one device at the program's peak,
    by category and module.

    options: as `census` takes them, and keyword arguments of the function.

    Example:
        >>> import jax.numpy as jnp
        >>> memory(lambda x: x @ x, jnp.ones((8, 8))).compiled.arguments
        256
    """
    return census(function, *args, **options).memory


def simulate(function: Any, *args: Any, target: TargetDevices, **options: Any) -> SimulatedSchedule:
    """Compiles a function and predicts a timeline of its program on other devices. Nothing runs.

    A program for CPUs has no asynchronous collectives: compile for the devices that the time is
    asked of (`jax.experimental.topologies`), or read the times as those of a program that overlaps
    nothing.

    target: devices of the mesh, in its order.
    options: as `census` takes them, and keyword arguments of the function.

    Example: a product of 2 x 4096^3 = 137 G FLOPs takes 0.14 ms of a GPU with 989 TFLOP/s.

        >>> import jax, jax.numpy as jnp
        >>> from xlacensus import ChipRates, Nodes, TargetDevices
        >>> gpu = ChipRates("GPU", 989e12, 3.35e12, Nodes(450e9, 8), 50e9, 55e9)
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> schedule = simulate(jnp.dot, x, x, target=TargetDevices.grid(gpu, (1,)))
        >>> f"{schedule.floor_seconds * 1e3:.2f} ms"
        '0.14 ms'
    """
    found = census(function, *args, target=target, **options).schedule
    assert found is not None
    return found


def lint(function: Any, *args: Any, **options: Any) -> tuple[Finding, ...]:
    """Compiles a function and returns what wastes memory, bytes or time in its program,
    with a fix for each.

    options: as `census` takes them, and keyword arguments of the function.

    Example: a state that is returned updated, and not donated.

        >>> import jax.numpy as jnp
        >>> step = lambda params, g: {"w": params["w"] - g}
        >>> w = jnp.ones((512, 512))
        >>> [finding.kind for finding in lint(step, {"w": w}, w)]
        ['donation']
    """
    return census(function, *args, **options).findings

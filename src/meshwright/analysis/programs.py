"""Compiled programs as this package reads them: by `xlacensus`,
with errors and pages of this package.

What `xlacensus` refuses is raised as a CensusError of this package, so that the command line and
its exit codes treat it as any other error. Functions of `xlacensus` that raise are called by way of
this module only.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

import xlacensus.errors
from meshwright.documents import LARGE, read_json
from meshwright.errors import CensusError, by_class, reason_of
from meshwright.formatting import Shown
from xlacensus import compilation, program_census, schedule
from xlacensus.comparison import quantities
from xlacensus.compilation import CompiledProgram
from xlacensus.findings import Finding
from xlacensus.hlo import parser
from xlacensus.hlo.flops import ALL_ROWS, Skipped
from xlacensus.hlo.parser import Module
from xlacensus.hlo.scopes import Branches
from xlacensus.program_census import ProgramFacts
from xlacensus.schedule import SimulatedSchedule, TargetDevices, Ticks


class OutOfMemory(CensusError):
    """The compiler's refusal of a program that does not fit the device's memory."""

    def __init__(self, refusal: compilation.OutOfMemory):
        super().__init__(refusal.asked, refusal.truth, refusal.fix)
        self.required = refusal.required
        self.available = refusal.available


def _error_of(refusal: xlacensus.errors.CensusError) -> CensusError:
    """Returns an error of `xlacensus` as one of this package."""
    if isinstance(refusal, compilation.OutOfMemory):
        return OutOfMemory(refusal)
    return CensusError(refusal.asked, refusal.truth, refusal.fix)


@contextlib.contextmanager
def census_errors() -> Iterator[None]:
    """Raises the errors of `xlacensus` as those of this package."""
    try:
        yield
    except xlacensus.errors.CensusError as refusal:
        raise _error_of(refusal) from refusal


def compiler_error(error: Exception) -> CensusError:
    """Converts an error of XLA: OutOfMemory with its sizes,
    or CensusError with the beginning of the error."""
    return _error_of(compilation.compiler_error(error))


@dataclasses.dataclass(frozen=True, repr=False)
class Census(program_census.Census, Shown):
    """Memory, collectives, FLOPs and findings of one device of a compiled program,
    with a simulated schedule.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
        >>> report = mw.census(layer, jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> report.flops.compiled, len(report.ledger)
        (1024.0, 0)
    """

    def __str__(self) -> str:
        return str(self.page())


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
    in addition to those of usual names.
    declared: path of an argument or result -> the sharding it must have.
    target: devices on which a schedule is simulated; None simulates none.
    facts: facts that the compiled text does not contain, such as how often branches are taken.
    compiler_options: XLA options by name.

    Raises CensusError if a path of `declared` does not exist, or the compiler refuses the program.

    >>> import jax.numpy as jnp
    >>> census(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).flops.compiled
    1024.0
    """
    with census_errors():
        found = program_census.census(
            function,
            *args,
            mesh=mesh,
            categories=categories,
            declared=declared,
            target=target,
            facts=facts,
            compiler_options=compiler_options,
            **keywords,
        )
    findings = tuple(_with_option(finding) for finding in found.findings)
    return Census(**{**vars(found), "findings": findings})


def _with_option(finding: Finding) -> Finding:
    """Returns a finding whose fix names the option of this package that does it,
    where there is one."""
    if finding.kind == "determinism":
        fix = f"--training.deterministic; of a function of your own, {finding.fix}"
    elif finding.kind == "overlap" and "through the loop" in finding.fix:
        fix = f"{finding.fix} (a Run: training.gather_ahead layer)"
    else:
        return finding
    return dataclasses.replace(finding, fix=fix)


@census_errors()
def compile_function(
    function: Any,
    *arguments: Any,
    compiler_options: Mapping[str, Any] | None = None,
    branches: Branches | None = None,
) -> CompiledProgram:
    """Compiles a function, or what JAX makes of one on the way, for `arguments`. Nothing runs.

    Raises OutOfMemory, or CensusError with the compiler's message.
    """
    return compilation.compile_function(
        function, *arguments, compiler_options=compiler_options, branches=branches
    )


@census_errors()
def parse_module(text: str, branches: Branches | None = None) -> Module:
    """Parses the text of a compiled program. Raises CensusError if it is none."""
    return parser.parse_module(text, branches)


@census_errors()
def simulate_schedule(
    module: Module,
    target: TargetDevices,
    mesh: Mapping[str, int],
    skipped: Skipped = ALL_ROWS,
    ticks: Ticks | None = None,
) -> SimulatedSchedule:
    """Simulates the program of one device.
    Raises CensusError for a program with an array of unknown size."""
    return schedule.simulate_schedule(module, target, mesh, skipped, ticks)


def read_census(file: Path) -> dict[str, Any]:
    """Reads a census that `--json` or `--save` wrote.
    Raises CensusError if the file is not a census."""
    try:
        document = read_json(file, LARGE)
        for values in quantities(document).values():
            for name, value in values.items():
                if not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"{name} is {value!r:.80}, not a number")
    except OSError as error:
        raise by_class(
            error,
            CensusError(
                f"the census {file}", f"it cannot be read: {reason_of(error)}", "a file of --json"
            ),
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CensusError(
            f"the census {file}",
            f"it is not a census: {reason_of(error)}",
            "what `meshwright prove --json` prints",
        ) from error
    return dict(document)


def save_census(census: Census, file: Path) -> None:
    """Writes the census as JSON, for a comparison with another commit or mesh."""
    file.write_text(json.dumps(census.to_json(), indent=1) + "\n", encoding="utf-8")

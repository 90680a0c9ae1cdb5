"""Grades an answer: values and gradients against one device, then what the compiled program sends, stores and takes.

A problem is a module with `PROBLEM`, `one_device` (what the result must equal), `answer` (for the learner to write) and
`PREDICTION`. Its file in `solutions/` has a `reference`, perhaps a faster `best`, and typical mistakes. `answer` is the
body of a `shard_map` over all axes of the mesh with `check_vma=False`. A problem of another form defines `program`, a
function of unsharded arrays, or `attempt` and `measure`.

Derivatives follow the package's convention: the cotangent of a value that is replicated over an axis is replicated too,
and the gradient of a replicated value must be complete on every device.
"""

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.analysis.run_census import located_devices
from meshwright.errors import MeshwrightError
from meshwright.hardware.aot import compiler_environment, require_compiler, topology_devices
from meshwright.hardware.targets import Target, parse_target
from meshwright.views.draw import picture_of, side_by_side
from xlacensus.hlo.parser import parse_module
from xlacensus.interconnect import all_coordinates
from xlacensus.schedule import TargetDevices, simulate_schedule

HERE = Path(__file__).parent
MORE_BYTES, MORE_MEMORY, MORE_FLOPS, MORE_TIME = 1.02, 1.2, 1.1, 1.5
"""Factors on the reference's figures above which a right answer is called wasteful.

That of time is wide: how a program is fused between its products depends on the compiler.
"""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Statement of a problem in data; the module's docstring has it in words."""

    lesson: str
    """Chapter of the ladder that it follows."""
    mesh: str
    """Degree of each axis: `data=4, tensor=2`."""
    takes: str
    """Arrays in the notation of the ladder, `x[B/data, D]; labels<V[B]`: `<V` are integers below V."""
    gives: str
    small: str
    """Sizes of the dimensions at which values are compared: `B=16 D=8`."""
    other: str
    """Other sizes at which they are compared, so that an answer cannot contain the first."""
    full: str
    """Sizes at which the program is compiled, not run."""
    predict: str
    """Quantity (sent, memory, flops, or a machine) and the question: `sent: MB that a device sends`."""
    arithmetic: str
    """Expression in the sizes that gives the predicted quantity, in bytes, FLOPs or seconds."""
    because: str
    """Explanation of the arithmetic."""
    hints: tuple[str, str, str]
    gradients: str = ""
    """Arguments whose gradients are compared."""
    tolerance: float = 1e-4
    """Largest difference over the largest value."""
    large: str = ""
    """Argument that is multiplied by 200 in a third comparison: exponentials overflow that no maximum keeps small."""
    collectives: str = ""
    """The only kinds of collectives that the statement allows; empty for any."""
    most_memory: str = ""
    """Expression in the sizes: bytes that the statement allows; empty for what the reference needs, and a fifth."""
    most_time: float = MORE_TIME
    """Factor on the reference's predicted time above which a right answer is too slow."""
    machines: str = ""
    """Machines that times are predicted for; empty for the v5p and the H100 of as many devices as the mesh."""

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of each axis, outermost first."""
        return read_sizes(self.mesh)

    @property
    def targets(self) -> list[str]:
        """Machines that times are predicted for."""
        devices = math.prod(self.degrees.values())
        cube = {1: "2x2x1", 2: "2x2x1", 4: "2x2x1", 8: "2x2x2"}[devices]
        return self.machines.split() or [f"v5p:{cube}", f"h100:{devices}"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Array of a problem: name, dimensions, the axes that split each, and the bound of integers."""

    name: str
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    below: str = ""

    @property
    def spec(self) -> P:
        """Sharding of the array."""
        return P(*(a if len(a) > 1 else a[0] if a else None for a in self.axes))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the unsharded array."""
        return tuple(int(d) if d.isdigit() else sizes[d] for d in self.dims)


def read_sizes(text: str) -> dict[str, int]:
    """Reads `B=16 D=8`."""
    return {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", text)}


def read_operands(text: str) -> list[Operand]:
    """Reads `x[B/data, D]; labels<V[B]`."""
    operands = []
    for name, below, inside in re.findall(r"(\w+)(?:<(\w+))?\[(.*?)\]", text):
        parts = [part.strip().split("/") for part in inside.split(",") if part.strip()]
        axes = tuple(tuple(part[1].split("+")) if len(part) > 1 else () for part in parts)
        operands.append(Operand(name, tuple(part[0] for part in parts), axes, below))
    return operands


def mistake[F: Callable[..., Any]](kind: str, explanation: str) -> Callable[[F], F]:
    """Marks a function of a solution as a typical mistake.

    kind: `result`, `gradient`, `bytes`, `memory` or `time`.  explanation: what the learner reads.
    """

    def mark(function: F) -> F:
        function.kind, function.explanation = kind, explanation  # type: ignore[attr-defined]
        return function

    return mark


def load(path: Path) -> ModuleType:
    """Imports a file by its path."""
    spec = importlib.util.spec_from_file_location(f"ladder_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem_files() -> list[Path]:
    """Lists the files of the problems in order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem with its solution, loaded."""

    number: int
    file: Path
    module: ModuleType
    solution: ModuleType

    @property
    def problem(self) -> Problem:
        """Its data."""
        return self.module.PROBLEM

    @property
    def title(self) -> str:
        """First line of its docstring."""
        return inspect.getdoc(self.module).splitlines()[0]  # type: ignore[union-attr]

    @property
    def statement(self) -> str:
        """Its docstring without the title."""
        return inspect.getdoc(self.module).partition("\n")[2].strip()  # type: ignore[union-attr]

    @property
    def mistakes(self) -> dict[str, Any]:
        """Typical mistakes by name."""
        return {name: f for name, f in vars(self.solution).items() if hasattr(f, "explanation")}

    @property
    def best(self) -> Any:
        """The fastest answer known."""
        return getattr(self.solution, "best", self.solution.reference)


def task(number: int) -> Task:
    """Loads a problem. Raises LookupError where there is none of this number."""
    for file in problem_files():
        if int(file.name[:2]) == number:
            return Task(number, file, load(file), load(HERE / "solutions" / file.name))
    raise LookupError(f"there is no problem {number}: they are 1 to {len(problem_files())}")


# Arrays and programs


def arrays_of(operands: Sequence[Operand], sizes: Mapping[str, int], seed: int = 0) -> list[jax.Array]:
    """Draws the arrays of a problem; weights (`w...`) have the scale of an initialiser."""
    drawn = []
    for key, o in zip(jax.random.split(jax.random.key(seed), len(operands) + 1)[1:], operands, strict=True):
        shape = o.shape(sizes)
        if o.below:
            drawn.append(jax.random.randint(key, shape, 0, sizes.get(o.below) or int(o.below)))
        else:
            scale = shape[-2] ** -0.5 if o.name.startswith("w") and len(shape) > 1 else 1.0
            drawn.append(jax.random.normal(key, shape) * scale)
    return drawn


def mesh_of(problem: Problem, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of a problem over these devices, or simulated ones."""
    shape = tuple(problem.degrees.values())
    chosen = (devices or jax.devices())[: math.prod(shape)]
    return Mesh(np.array(chosen).reshape(shape), tuple(problem.degrees))


def _differentiated(problem: Problem) -> list[int]:
    names = [o.name for o in read_operands(problem.takes)]
    return [names.index(name) for name in problem.gradients.split()]


def _with_gradients(problem: Problem, function: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Returns a function of (arguments, cotangents) that gives all results, then the gradients."""
    chosen, count = _differentiated(problem), len(read_operands(problem.gives))

    def results(args: Any, cotangents: Any) -> tuple[Any, ...]:
        def of(*some: Any) -> tuple[Any, ...]:
            every = list(args)
            for i, value in zip(chosen, some, strict=True):
                every[i] = value
            given = function(*every)
            given = given if isinstance(given, tuple | list) else (given,)
            if len(given) != count:
                raise ValueError(f"answer returns {len(given)} values, and {count} are asked: {problem.gives}")
            return tuple(given)

        if not chosen:
            return of()
        out, pull = jax.vjp(of, *(args[i] for i in chosen))
        cast = [jnp.asarray(c, o.dtype) for c, o in zip(cotangents, out, strict=True)]
        for o, c in zip(out, cast, strict=True):
            if o.shape != c.shape:
                raise ValueError(f"answer returns an array of {o.shape} on each device, and {c.shape} is asked")
        return (*out, *pull(tuple(cast)))

    return results


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function of (arguments, cotangents), with their shardings."""

    function: Any
    args: tuple[list[P], list[P]]

    def abstract(self, values: Any, mesh: Mesh) -> Any:
        """Returns abstract arrays for the arguments."""
        return tuple(
            [
                jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, s))
                for v, s in zip(vs, specs, strict=True)
            ]
            for vs, specs in zip(values, self.args, strict=True)
        )


def program_of(module: ModuleType, answer: Callable[..., Any], mesh: Mesh) -> Program:
    """Builds the program of an answer: its results and the gradients that the problem asks for."""
    problem = module.PROBLEM
    takes, gives = read_operands(problem.takes), read_operands(problem.gives)
    in_specs, out_specs = [o.spec for o in takes], [o.spec for o in gives]
    if hasattr(module, "program"):
        function, in_specs, out_specs = module.program(answer, mesh)
        shardings = [[NamedSharding(mesh, s) for s in specs] for specs in (in_specs, out_specs)]
        every = tuple(shardings[1]) + tuple(shardings[0][i] for i in _differentiated(problem))
        whole = _with_gradients(problem, function)
        return Program(jax.jit(whole, in_shardings=tuple(shardings), out_shardings=every), (in_specs, out_specs))
    body = _with_gradients(problem, answer)
    every = (*out_specs, *(in_specs[i] for i in _differentiated(problem)))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(in_specs, out_specs), out_specs=every, check_vma=False)
    return Program(jax.jit(mapped), (in_specs, out_specs))


def names_of_results(problem: Problem) -> list[str]:
    """Names the results, then the gradients."""
    return [o.name for o in read_operands(problem.gives)] + [f"the gradient of {n}" for n in problem.gradients.split()]


# Values


@dataclasses.dataclass(frozen=True)
class Blocks:
    """One result: on each device the block that it has, and the one that it should have."""

    name: str
    got: list[np.ndarray]
    want: list[np.ndarray]
    tolerance: float

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient: asked for as one, or a result named d..."""
        return self.name.startswith(("the gradient", "d"))

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return self.name if " " in self.name else f"`{self.name}`"

    @functools.cached_property
    def wrong_devices(self) -> list[int]:
        """Devices whose block differs."""
        return [d for d, (g, w) in enumerate(zip(self.got, self.want, strict=True)) if not self.same(g, w)]

    def same(self, got: np.ndarray, want: np.ndarray) -> bool:
        """Whether two blocks are equal within the tolerance."""
        if got.shape != want.shape:
            return False
        scale = max(float(np.max(np.abs(w), initial=0)) for w in self.want)
        return bool(np.allclose(got, want, rtol=0, atol=self.tolerance * scale + 1e-7))


LARGE = 200.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays for which an answer is compared with one device."""

    sizes: str
    seed: int = 0
    large: str = ""
    """Argument that is multiplied by `LARGE`."""


def cases_of(problem: Problem) -> list[Case]:
    """Lists what an answer is compared on: two sizes, and large values where the problem has a maximum to subtract."""
    cases = [Case(problem.small), Case(problem.other, seed=1)]
    if problem.large:
        cases.append(Case(problem.other, seed=2, large=problem.large))
    return cases


def attempt(module: ModuleType, answer: Callable[..., Any], case: Case) -> list[Blocks]:
    """Runs an answer on the arrays of a case on simulated devices, and one device beside it."""
    if hasattr(module, "attempt"):
        return module.attempt(answer, case)
    problem = module.PROBLEM
    mesh = mesh_of(problem)
    args, cotangents = inputs(module, read_sizes(case.sizes), case.seed)
    names = [o.name for o in read_operands(problem.takes)]
    args = [x * LARGE if name == case.large else x for name, x in zip(names, args, strict=True)]
    program = program_of(module, answer, mesh)
    placed = tuple(
        [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(vs, specs, strict=True)]
        for vs, specs in zip((args, cotangents), program.args, strict=True)
    )
    results = program.function(*placed)
    wanted = _with_gradients(problem, module.one_device)(args, cotangents)
    blocks = []
    for name, got, want in zip(names_of_results(problem), results, wanted, strict=True):
        want, shards = np.asarray(want, np.float32), sorted(got.addressable_shards, key=lambda s: s.device.id)
        if got.shape != want.shape:
            raise ValueError(f"{name} has the shape {got.shape} over all devices, and {want.shape} is asked")
        blocks.append(
            Blocks(
                name,
                [np.asarray(s.data, np.float32) for s in shards],
                [want[s.index] for s in shards],
                problem.tolerance,
            )
        )
    return blocks


def inputs(module: ModuleType, sizes: Mapping[str, int], seed: int = 0) -> tuple[list[jax.Array], list[jax.Array]]:
    """Draws the arguments and a cotangent for each result; that of a scalar is 1."""
    problem = module.PROBLEM
    args = arrays_of(read_operands(problem.takes), sizes, 2 * seed)
    args = list(module.prepare(*args)) if hasattr(module, "prepare") else args
    cotangents = arrays_of(
        [dataclasses.replace(o, name="c") for o in read_operands(problem.gives)], sizes, 2 * seed + 1
    )
    return args, [c if c.ndim else jnp.ones(()) for c in cotangents]


def patterns(blocks: Blocks, degrees: Mapping[str, int]) -> Iterator[str]:
    """Describes what is wrong with a result by its pattern."""
    got, want, n, name = blocks.got, blocks.want, len(blocks.got), blocks.label
    if not all(np.isfinite(g).all() for g in got):
        bad = [d for d, g in enumerate(got) if not np.isfinite(g).all()]
        yield f"{name} is NaN or infinite on devices {_listed(bad)}: 0/0, or infinity minus infinity."
        return
    if any(g.shape != w.shape for g, w in zip(got, want, strict=True)):
        yield f"{name} has blocks of {got[0].shape} on a device, and {want[0].shape} are asked."
        return
    if not any(np.abs(g).max(initial=0) > 0 for g in got):
        yield f"{name} is zero everywhere" + (": nothing connects it to the result." if blocks.is_gradient else ".")
        return
    flat, aim = (np.concatenate([b.ravel() for b in side]) for side in (got, want))
    ratio = float(flat @ aim / max(float(aim @ aim), 1e-30))
    if blocks.same(np.asarray(flat - ratio * aim + aim), aim):
        yield _factor(name, ratio, degrees)
        return
    right = [d for d in range(n) if d not in blocks.wrong_devices]
    if right:
        yield f"{name} is right on devices {_listed(right)} and wrong on {_listed(blocks.wrong_devices)}."
    for by in range(1, n):
        if all(blocks.same(got[d], want[(d - by) % n]) for d in range(n)):
            yield f"Every device has the block of the device {by} before it: shifted by {by} in the ring."
    if all(w.shape == want[0].shape and np.array_equal(w, want[0]) for w in want) and n > 1:
        yield from _of_replicated(blocks, degrees)
    yield from _block_order(blocks)
    yield from _row_order(blocks)
    zero = np.mean([np.mean((g == 0) & (w != 0)) for g, w in zip(got, want, strict=True)])
    if zero > 0.05:
        yield f"{zero:.0%} of {name} is zero and should not be: what other devices hold never arrived."


def _of_replicated(blocks: Blocks, degrees: Mapping[str, int]) -> Iterator[str]:
    """Compares a result that every device should have alike with sums over the devices of an axis."""
    shape = tuple(degrees.values())
    stacked = np.stack(blocks.got).reshape(*shape, *blocks.got[0].shape)
    aim = blocks.want[0]
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            label = " and ".join(f"`{list(degrees)[a]}`" for a in axes)
            sums = stacked.sum(axes, keepdims=True)
            size = math.prod(shape[a] for a in axes)
            if np.allclose(sums, stacked * size):
                continue  # the devices agree along these axes
            parts = sums.reshape(-1, *aim.shape)
            if all(blocks.same(part, aim) for part in parts):
                yield f"Each device has its own addend of {blocks.label}; only their sum over {label} is right."
            elif all(blocks.same(part / size, aim) for part in parts):
                yield f"Each device has {blocks.label} of its own part; only their mean over {label} is right."
    if not all(np.allclose(g, blocks.got[0], atol=1e-6) for g in blocks.got):
        yield f"The devices disagree on {blocks.label}, which must be the same on all of them."


def _block_order(blocks: Blocks) -> Iterator[str]:
    """Finds results that have the right blocks in the wrong order."""
    n = len(blocks.got)
    for dim in range(blocks.want[0].ndim):
        if n > 1 and blocks.want[0].shape[dim] % n == 0 and blocks.want[0].shape[dim] >= n:
            device = blocks.wrong_devices[-1]
            got, want = (np.split(side[device], n, dim) for side in (blocks.got, blocks.want))
            order = [next((j for j, w in enumerate(want) if blocks.same(g, w)), -1) for g in got]
            if sorted(order) == list(range(n)) and order != list(range(n)):
                yield f"{blocks.label} has the right blocks in the wrong order: device {device} has them as {order}."


def _row_order(blocks: Blocks) -> Iterator[str]:
    """Finds results whose rows are those of the right result, in another order or on other devices."""
    if blocks.want[0].ndim < 2 or blocks.want[0][..., 0].size > 256:
        return
    got, want = ([b.reshape(-1, b.shape[-1]) for b in side] for side in (blocks.got, blocks.want))

    def found(rows: np.ndarray, among: np.ndarray) -> bool:
        nearest = np.abs(rows[:, None] - among[None]).max(-1).argmin(1)
        return len(set(nearest)) == len(rows) and blocks.same(rows, among[nearest])

    if all(found(g, w) for g, w in zip(got, want, strict=True)):
        yield f"{blocks.label} has the right rows on every device, in the wrong order."
    elif len(got) > 1 and all(found(g, np.concatenate(want)) for g in got):
        yield f"{blocks.label} has right rows, but on other devices than their own."


def _factor(name: str, ratio: float, degrees: Mapping[str, int]) -> str:
    sizes: dict[float, str] = {}
    for count in range(len(degrees), 0, -1):
        for axes in itertools.combinations(degrees, count):
            sizes[float(math.prod(degrees[a] for a in axes))] = " and ".join(f"`{a}`" for a in axes)
    for size, axes in sizes.items():
        if size > 1 and math.isclose(ratio, size, rel_tol=1e-3):
            return f"{name} is {size:g} times too large: a sum over {axes} where a mean is due, or one sum too many."
        if size > 1 and math.isclose(ratio, 1 / size, rel_tol=1e-3):
            return f"{name} is {size:g} times too small: divided by the devices of {axes}, and not summed over them."
    return f"{name} is {ratio:.3g} times what it should be, everywhere."


def _listed(devices: Sequence[int]) -> str:
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]} to {devices[-1]}"
    return ", ".join(map(str, devices))


# Figures


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a program does at the full sizes, for one device."""

    sent: dict[str, float]
    """Bytes by the axes that the collective goes over."""
    memory: float
    """Bytes at the peak, arguments included."""
    flops: float
    seconds: dict[str, float]
    """Predicted seconds by machine."""
    basis: dict[str, str] = dataclasses.field(default_factory=dict)
    """What each prediction was made from."""
    largest: tuple[tuple[str, float], ...] = ()
    """Largest temporaries at the peak: type and shape, and the bytes of all that are alike."""
    collectives: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    """Kinds of collectives that the program has."""

    def over(self, axis: str) -> float:
        """Bytes of all collectives that go over an axis, with others or without."""
        return sum(sent for axes, sent in self.sent.items() if axis in axes.split("+"))

    def quantity(self, name: str) -> float:
        """The quantity that a prediction is about, in bytes, FLOPs or seconds."""
        if name in ("memory", "flops"):
            return float(getattr(self, name))
        return sum(self.sent.values()) if name == "sent" else self.seconds[name]


SIMULATED = "simulated from the program compiled for CPUs, in which nothing overlaps"


@functools.cache
def measure(module: ModuleType, answer: Callable[..., Any]) -> Figures:
    """Compiles an answer at the full sizes for simulated devices, and predicts its time on the machines."""
    if hasattr(module, "measure"):
        return module.measure(answer)
    problem = module.PROBLEM
    report = _census(module, answer, mesh_of(problem), None)
    parsed, seconds = parse_module(report.text), {}
    for machine in problem.targets:
        target = parse_target(machine)
        places = all_coordinates(target.chip, target.topology, target.domains)
        devices = TargetDevices(target.chip, target.topology, tuple(places), target.efficiency)
        seconds[machine] = simulate_schedule(parsed, devices, problem.degrees).step_seconds
    return _figures(report, seconds, dict.fromkeys(seconds, SIMULATED))


def _census(module: ModuleType, answer: Callable[..., Any], mesh: Mesh, target: Target | None) -> mw.Census:
    problem, sizes = module.PROBLEM, read_sizes(module.PROBLEM.full)
    program = program_of(module, answer, mesh)
    values = jax.eval_shape(functools.partial(inputs, module, sizes))
    located = None if target is None else located_devices(mesh.devices.flat, target)
    arguments = program.abstract(values, mesh)
    return mw.census(program.function, *arguments, mesh=problem.degrees, target=located)


def _figures(report: Any, seconds: dict[str, float], basis: dict[str, str]) -> Figures:
    sent: dict[str, float] = {}
    for e in report.ledger:
        sent[e.axes_label] = sent.get(e.axes_label, 0.0) + e.sent
    largest = tuple((array, size) for _, _, array, size in report.memory.largest[:3])
    counts: dict[tuple[str, str], float] = {}
    for e in sorted(report.ledger, key=lambda e: -e.sent):
        what = f"{e.kind} over {e.axes_label}, {e.payload / 1e6:,.1f} MB", e.line or "from autodiff"
        counts[what] = counts.get(what, 0) + e.count
    lines = tuple(f"{count} x {what}, {line}" for (what, line), count in counts.items())
    memory = float(report.memory.compiled.peak)
    kinds = frozenset(e.kind for e in report.ledger)
    return Figures(sent, memory, report.flops.compiled, seconds, basis, largest, lines, kinds)


def compiled_here(module: ModuleType, answers: Mapping[str, Callable[..., Any]], machine: str) -> dict[str, Any]:
    """Compiles answers with the compiler of an absent machine, in this process; returns seconds and bytes of each."""
    target = parse_target(machine)
    devices = topology_devices(target)
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        report = _census(module, answer, mesh_of(module.PROBLEM, devices), target)
        assert report.schedule is not None
        found[name] = [report.schedule.step_seconds, report.memory.compiled.live]
    return found


def compiled_for(number: int, file: Path, machine: str) -> dict[str, list[float]] | str:
    """Compiles an answer, the reference and the best for an absent machine; returns a reason where that fails."""
    target = parse_target(machine)
    try:
        require_compiler(target)
    except MeshwrightError:
        return "its own compiler is not installed"
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "check.py"), str(number), str(file), "--compile-for", machine],
            env={**os.environ, **compiler_environment(target)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "its compiler took more than ten minutes"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (done.stderr.strip().splitlines() or ["it gave no message"])[-1]
        return f"its compiler failed: {last[:120]}"


# Verdicts


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is said of an answer."""

    kind: str
    """right; todo; error; impossible; limits; or result, gradient, bytes, memory, time."""
    lines: tuple[str, ...]
    figures: Figures | None = None
    reference: Figures | None = None


HEADINGS = {
    "right": "RIGHT: equal to one device, and nothing is wasted.",
    "todo": "TO DO: `answer` is not written yet.",
    "error": "ERROR: `answer` does not run.",
    "impossible": "NOT AN ANSWER: at the full sizes it does less than any answer has to.",
    "limits": "RIGHT RESULT, BUT NOT AS THE PROBLEM ASKS.",
    "result": "WRONG RESULT.",
    "gradient": "WRONG GRADIENT: the values are right.",
    "bytes": "RIGHT RESULT, TOO MANY BYTES SENT.",
    "memory": "RIGHT RESULT, TOO MUCH MEMORY.",
    "time": "RIGHT RESULT, TOO SLOW.",
}


def grade(found: Task, answer: Callable[..., Any]) -> Verdict:
    """Grades an answer: values in every case, then what its program does at the full sizes."""
    module, problem = found.module, found.problem
    for case in cases_of(problem):
        try:
            blocks = attempt(module, answer, case)
        except Exception as error:
            return _of_error(error, answer, f"with {case.sizes}")
        wrong = [b for b in blocks if b.wrong_devices]
        if wrong:
            return _of_wrong(found, case, blocks, wrong)
    try:
        own = measure(module, answer)
    except Exception as error:
        return _of_error(error, answer, f"with the full sizes, {problem.full}")
    reference = measure(module, found.solution.reference)
    best = measure(module, found.best)
    against = _against_the_statement(problem, own)
    if against:
        return Verdict("limits", tuple(against), own, reference)
    kind, lines = _waste(problem, own, reference)
    below = _below_the_bound(problem, own, (reference, best))
    if kind == "right" and below:
        return Verdict("impossible", tuple(below))
    return Verdict(kind, (*lines, *_recognised_waste(found, kind, own)), own, reference)


def _of_error(error: Exception, answer: Callable[..., Any], when: str) -> Verdict:
    """Says where an answer failed; the stub of a problem is still to do."""
    if isinstance(error, NotImplementedError) and not error.args:
        return Verdict("todo", ())
    lines = [_where(error, answer, when), *str(error).splitlines()[:6]]
    if "pmax" in str(error) or "pmin" in str(error):
        lines.append(
            "pmax and pmin have no derivative. A maximum that is subtracted needs none: take it of "
            "jax.lax.stop_gradient(x)."
        )
    return Verdict("error", tuple(lines))


def _of_wrong(found: Task, case: Case, blocks: Sequence[Blocks], wrong: Sequence[Blocks]) -> Verdict:
    """Describes wrong values: results before gradients."""
    first = next((b for b in wrong if not b.is_gradient), wrong[0])
    kind = "gradient" if first.is_gradient else "result"
    seen = tuple(dict.fromkeys(text[:1].upper() + text[1:] for text in patterns(first, found.problem.degrees)))
    lines = list(seen or (_size_of_error(first),))
    if case.large:
        lines.append(
            f"This is with `{case.large}` multiplied by {LARGE:g}; with small values the answer is right. The largest "
            "float32 is e^88: subtract the maximum of a row before exp, the same one on all devices."
        )
    elif case.sizes != found.problem.small:
        lines.append(f"This is with {case.sizes}; with {found.problem.small} the answer is right.")
    return Verdict(kind, (*lines, *_recognised(found, case, kind, blocks)))


LEAST_BYTES, LEAST_FLOPS = 0.95, 0.5
"""Fractions of the smallest known figures that no answer goes below."""


def _below_the_bound(problem: Problem, own: Figures, known: Sequence[Figures]) -> list[str]:
    """Says which figures no right answer could have: the work was not done at the full sizes."""
    sent, least_sent = sum(own.sent.values()), min(sum(f.sent.values()) for f in known)
    least_flops = min(f.flops for f in known)
    lines = []
    if sent < LEAST_BYTES * least_sent - 1e4:
        lines.append(f"A device sends {_mb(sent)}, and no answer is known that sends less than {_mb(least_sent)}.")
    if own.flops < LEAST_FLOPS * least_flops:
        lines.append(
            f"A device computes {own.flops / 1e9:,.1f} GFLOPs, and no answer is known that computes less than "
            f"{least_flops / 1e9:,.1f}."
        )
    for machine, seconds in own.seconds.items():
        roofline = max(own.flops, LEAST_FLOPS * least_flops) / parse_target(machine).chip.flops_bf16
        if seconds < 0.999 * roofline:
            lines.append(
                f"Predicted on {machine}: {seconds * 1e3:,.3f} ms, and its FLOPs alone take {roofline * 1e3:,.3f}."
            )
    if lines:
        lines.append("Does `answer` look at the shapes, and do the work only for some of them?")
    return lines


def _against_the_statement(problem: Problem, own: Figures) -> list[str]:
    """Checks what the statement of a problem forbids."""
    lines = []
    allowed = set(problem.collectives.split())
    foreign = sorted(own.kinds - allowed)
    if allowed and foreign:
        lines.append(f"The problem asks for {', '.join(sorted(allowed))} alone, and `answer` has {', '.join(foreign)}.")
    return lines


def _where(error: Exception, answer: Callable[..., Any], when: str) -> str:
    file = inspect.getsourcefile(answer)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == file:
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            return f"{type(error).__name__} at {place}, {when}: {frame.line}"
    return f"{type(error).__name__}, not in your file, {when}:"


def _size_of_error(blocks: Blocks) -> str:
    error = max(float(np.abs(g - w).max(initial=0)) for g, w in zip(blocks.got, blocks.want, strict=True))
    size = max(float(np.abs(w).max(initial=0)) for w in blocks.want)
    where = _listed(blocks.wrong_devices)
    return f"{blocks.label} differs by up to {error:.3g} where its largest value is {size:.3g}, on devices {where}."


def _recognised(found: Task, case: Case, kind: str, blocks: Sequence[Blocks]) -> list[str]:
    """Explains an answer whose numbers are those of a typical mistake."""
    for known in found.mistakes.values():
        if known.kind != kind:
            continue
        try:
            theirs = attempt(found.module, known, case)
        except Exception:  # a mistake that does not run for this case is another one
            continue
        pairs = [(b, g, t) for b, o in zip(blocks, theirs, strict=True) for g, t in zip(b.got, o.got, strict=True)]
        if all(b.same(g, t) or not (np.isfinite(g).all() or np.isfinite(t).all()) for b, g, t in pairs):
            return ["", known.explanation]
    return []


def _waste(problem: Problem, own: Figures, reference: Figures) -> tuple[str, list[str]]:
    """Compares the figures of a right answer with the reference's."""
    lines = []
    for axis in problem.degrees:
        mine, theirs = own.over(axis), reference.over(axis)
        if mine > theirs * MORE_BYTES + 1e4:
            times = mine / theirs if theirs else 0.0
            factor = (
                f", {times:,.0f} times as many" if times >= 10 else f", {times:.2f} times as many" if theirs else ""
            )
            lines.append(f"Over `{axis}` a device sends {_mb(mine)}, the reference {_mb(theirs)}{factor}.")
    if lines:
        heading = ["Your collectives:"] if own.collectives else []
        return "bytes", [*lines, *heading, *(f"  {line}" for line in own.collectives[:6])]
    most = reference.memory * MORE_MEMORY + 1e4
    if problem.most_memory:
        most = float(eval(problem.most_memory, {}, dict(read_sizes(problem.full))))
    if own.memory > most:
        allowed = f", and {_mb(most)} are allowed" if problem.most_memory else ""
        lines.append(f"At its peak a device holds {_mb(own.memory)}, the reference {_mb(reference.memory)}{allowed}.")
        return "memory", [*lines, *_temporaries(problem, own)]
    if own.flops > reference.flops * MORE_FLOPS:
        return "time", [f"A device computes {own.flops / 1e9:,.1f} GFLOPs, the reference {reference.flops / 1e9:,.1f}."]
    slowdown = {machine: seconds / reference.seconds[machine] for machine, seconds in own.seconds.items()}
    machine = max(slowdown, key=lambda machine: slowdown[machine])
    times = f"Predicted on {machine}: {slowdown[machine]:.2f} times as long as the reference"
    if slowdown[machine] > problem.most_time:
        return "time", [f"{times}."]
    if slowdown[machine] > MORE_FLOPS:
        lines = [f"{times}, with the same bytes and FLOPs: there is more work between the products."]
    return "right", lines


def _temporaries(problem: Problem, own: Figures) -> Iterator[str]:
    """Explains what the largest temporaries of a program are."""
    sizes, kept = read_sizes(problem.full), False
    operands = read_operands(f"{problem.takes}; {problem.gives}")
    split = {d: a for o in operands for d, a in zip(o.dims, o.axes, strict=True) if a and d in sizes}
    unsplit = {d for o in operands for d, a in zip(o.dims, o.axes, strict=True) if not a}
    said: list[str] = []
    for array, total in own.largest:
        shape = tuple(int(n) for n in re.findall(r"\d+", array.partition("[")[2]))
        count = round(total / (4 * math.prod(shape))) if array.startswith("f32") else 1
        kept = kept or count > 3
        whole = next((o.name for o in operands if o.shape(sizes) == shape and any(o.axes)), "")
        long = next((d for d in split if sizes[d] in shape and d not in unsplit), "")
        if whole:
            said.append(f"{array} has the shape of the unsharded `{whole}`: every device has all of it.")
        elif long:
            said.append(
                f"{array} has all of {long} = {sizes[long]:,}, which is split over `{'`, `'.join(split[long])}`."
            )
    if own.largest:
        text = ", ".join(f"{array} ({size / 1e6:,.0f} MB)" for array, size in own.largest)
        yield f"The largest temporaries: {text}."
    yield from dict.fromkeys(said)
    if kept and problem.gradients:
        yield "Many alike are kept from forward to backward: jax.checkpoint computes them again instead."


def _recognised_waste(found: Task, kind: str, own: Figures) -> list[str]:
    """Explains an answer that sends, stores or computes what a typical mistake does: the most similar one."""
    alike: dict[str, int] = {}
    for known in found.mistakes.values():
        if known.kind == kind:
            theirs = measure(found.module, known)
            sent = own.sent.keys() == theirs.sent.keys() and all(
                math.isclose(own.sent[a], theirs.sent[a], rel_tol=0.05) for a in own.sent
            )
            memory, flops = (
                math.isclose(getattr(own, name), getattr(theirs, name), rel_tol=0.1) for name in ("memory", "flops")
            )
            seconds = all(math.isclose(own.seconds[m], theirs.seconds[m], rel_tol=0.05) for m in own.seconds)
            if {"bytes": sent, "memory": memory, "time": flops and seconds}[kind]:
                alike[known.explanation] = sent + memory + flops + seconds + (own.largest == theirs.largest)
    return ["", max(alike, key=lambda text: alike[text])] if alike else []


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def pictures(found: Task) -> Any:
    """Returns the pictures of a problem: its own, or where the arrays that it takes and gives are placed."""
    if hasattr(found.module, "picture"):
        return found.module.picture()
    problem, sizes = found.problem, read_sizes(found.problem.full)
    operands = [o for o in read_operands(f"{problem.takes}; {problem.gives}") if o.dims]
    drawn = [
        picture_of(
            o.name,
            o.shape(sizes),
            "".join(d if len(d) == 1 and d.isalpha() else "?" for d in o.dims),
            o.axes,
            problem.degrees,
        )
        for o in operands
    ]
    return side_by_side(*drawn)

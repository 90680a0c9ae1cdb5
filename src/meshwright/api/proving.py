"""The verb `prove`: a step compiled for hardware, here or not, in a process of its own, read, and tuned."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self

import jax
import tyro
from rich.console import Console

from meshwright.activity import activity
from meshwright.analysis.census import Census, save_census
from meshwright.analysis.compare import check_budget, compare, read_budget, read_census, write_budget
from meshwright.analysis.compile import OutOfMemory, compiler_error
from meshwright.analysis.run_census import cache_key, cached, census_of_eval_step, census_of_train_step
from meshwright.analysis.run_memory import compiled_phases
from meshwright.api.targets import find_target, refuse_wrapped, with_vocab
from meshwright.api.verb import (
    SIMULATED,
    Base,
    Call,
    Outcome,
    RunOptions,
    given_options,
    refuse_options,
    require_writable,
    start_devices,
    unwritable,
)
from meshwright.config import MeshShape
from meshwright.errors import CensusError, ConfigError
from meshwright.fine_tuning import FineTune
from meshwright.formatting import format_bytes
from meshwright.generation.decoder import Bucket, Decoder
from meshwright.generation.source import run_for_decoding
from meshwright.generation.weights import abstract_layout, weight_bytes
from meshwright.hardware.aot import compiler_environment, require_compiler, topology_devices
from meshwright.hardware.chips import Torus
from meshwright.hardware.machine import AUTO
from meshwright.hardware.mesh import build_mesh, default_mesh_shape
from meshwright.hardware.targets import Target
from meshwright.planner.estimate import Estimate, estimate
from meshwright.planner.explain import memory_remedies
from meshwright.planner.plan_file import is_plan, read_plan, write_plan
from meshwright.planner.search import Plan, machine_for, price_run, remat_policies, with_choices, with_choices_that_fit
from meshwright.plugins import options_of_child
from meshwright.ranges import PositiveInt, TimeLimit
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import default_cache_folder, path_of
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
from meshwright.views.report import Report, Section, frame, print_sections
from meshwright.views.run_tables import choices_facts, choices_to_json

_COMPILES_FOR = "MESHWRIGHT_COMPILES_FOR"
"""Environment variable that marks a process that compiles, with its target."""
_LONGER = 10
"""Most time by the clock over that of the processor, where a compiler waits."""
_COMPILER_EXIT = 1
"""Exit code of a process that its compiler ends; errors of this package have others."""
_KEPT = 0.998
"""Largest fraction of the best step so far with which a change is kept."""

_LARGEST_ON_CPU = 2**33
"""Elements of an array from which on XLA's compiler for CPUs counts no tiles, and divides by zero."""
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Proof:
    """Result of compiling a plan for its machine.

    Proved by the compiler: that it compiles, its memory, its collectives. Predicted: the time of a step, by simulating
    the compiled schedule.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4")
        >>> proof = mw.Proof(best[0], step_seconds=1.2, peak_bytes=20 * 2**30, compile_seconds=30.0)
        >>> proof.fits
        True
    """

    plan: Plan
    step_seconds: float | None
    """Predicted step time of the compiled schedule; None where it does not compile."""
    peak_bytes: float | None
    """Peak memory of a device, by the compiler."""
    compile_seconds: float | None
    refused: str = ""
    """Reason why the plan cannot run: it does not compile, or does not fit; empty where it can."""
    census: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Census of the compiled step, as JSON (docs/formats.md)."""
    page: str = dataclasses.field(default="", repr=False)
    """Page of the census, as HTML; a notebook shows it."""

    @property
    def fits(self) -> bool:
        """Whether the step compiles and fits the memory of a device."""
        return self.step_seconds is not None and not self.refused

    def _repr_html_(self) -> str | None:
        return frame(self.page, f"proof of {self.plan.name}") if self.page else None

    def to_json(self) -> dict[str, Any]:
        """Returns planned and compiled figures side by side."""
        e = self.plan.estimate
        figures = {name: getattr(self, name) for name in ("step_seconds", "peak_bytes", "compile_seconds", "refused")}
        return {"plan": self.plan.name, "planned_seconds": e.seconds, "planned_bytes": e.bytes, **figures}


_WRITTEN = ("trace", "save_budget", "save", "hlo", "html")
_OF_A_STEP = (*_WRITTEN, "against", "budget", "fresh")
"""Options that read or write the census of a step."""


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
    limit: TimeLimit = 3600
    """Most seconds of processor time for compiling with --on."""
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

    @classmethod
    def of(cls, base: Base) -> Self:
        """Returns the options before any is given: a plan names its hardware."""
        return cls(run=base.run, on=base.target)

    def act(self, call: Call) -> Outcome:
        """Runs `meshwright prove`: compiles, writes, prints."""
        console = call.console
        budget = read_budget(self.budget) if self.budget else None
        target = find_target(self.on) if self.on else None
        self._refuse_unused()
        require_writable(getattr(self, name) for name in _WRITTEN)
        other = self._other_side(target)
        if target is None:
            meshes = [run.mesh for run in (self.run, other) if isinstance(run, Run) and run.mesh is not None]
            sizes = [mesh.size for mesh in meshes] + ([] if self.run.mesh else [SIMULATED])
            start_devices(max(sizes), None)
            devices = list(jax.devices())
        elif is_compiling_process(target):
            devices = target_devices(target)
        else:
            code, errors = compile_in_subprocess(target, self.limit, [*call.words, *trust_options()], sys.stdout)
            sys.stderr.write(errors)
            return Outcome(code=code)
        if self.step in ("prefill", "decode"):
            return self._prove_decoding(devices, target)
        take = functools.partial(compile_step, devices=devices, target=target, step=self.step, fresh=self.fresh)
        run = run_on_mesh(self.run, len(devices), target)
        step: Callable[[], CompiledStep] = functools.partial(take, run)
        if target is not None and self.step == "train":
            run, step = compile_choices(run, target, take, lambda why: console.print(why, soft_wrap=True))
        try:
            compiled = step()
        except OutOfMemory as error:
            print_sections(console, _remedies(run, target, error.required - error.available))
            raise
        sections = self._compare(console, run, compiled.census, other, take)
        self._write_files(compiled, machine_of(devices), sections)
        phases = compiled.phases() if self.against is None else {}
        if self.against is None and not self.json:
            census_page(compiled.census).print(console)
            if compiled.device_run is not None:
                print_sections(console, [Section("Choices", [Facts(choices_facts(compiled.device_run))])])
            if phases:
                planned = compiled.planned.phases if compiled.planned else {}
                print_sections(console, [phases_section(planned, phases)])
        exceeded = check_budget(compiled.census, budget) if budget is not None else []
        print_sections(console, [budget_section(exceeded)] if exceeded else [])
        fits = target is None or _print_verdict(console, compiled, target, phases)
        return Outcome(record=_to_json(compiled, phases), code=CensusError.exit_code if exceeded or not fits else 0)

    def _refuse_unused(self) -> None:
        """Raises ConfigError for an option that belongs to another one, which is not given."""
        if self.step in ("prefill", "decode"):
            refuse_options(self, _OF_A_STEP, f"--step {self.step}", "leave it out: memory is printed")
        else:
            refuse_options(self, ("decode_batch", "decode_slots"), f"--step {self.step}", "--step decode with it")
        refuse_wrapped(self.run, given_options(self, ("step",)))

    def _other_side(self, target: Target | None) -> Run | dict[str, Any] | None:
        """Reads --against: a run to compile, or a saved census. Raises ConfigError for a plan for other hardware."""
        if self.against is None:
            return None
        file = path_of(self.against)
        if file.suffix != ".json":
            return dataclasses.replace(self.run, mesh=MeshShape.parse(self.against))
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

    def _prove_decoding(self, devices: list[Any], target: Target | None) -> Outcome:
        """Compiles prefill or decode, and shows its memory."""
        assert self.step in ("prefill", "decode")
        mesh, batch, planned, compiled = compile_decoding(
            self.run, devices, target, step=self.step, batch=self.decode_batch, slots=self.decode_slots
        )

        def show(console: Console) -> None:
            shape = f"{batch} sequences of {self.decode_slots:,} slots"
            console.print(f"[bold]{self.step}[/] of {self.run.name} on {mesh}: {shape}")
            print_decode_proof(console, planned, compiled, target)

        fits = target is None or compiled["bytes"] <= target.chip.hbm_bytes
        record = {"step": self.step, "mesh": str(mesh), "compiled": compiled, "planned": planned}
        return Outcome(show, record, 0 if fits else CensusError.exit_code)

    def _compare(
        self,
        console: Console,
        run: Run,
        census: Census,
        other: Run | dict[str, Any] | None,
        take: "Callable[[Run], CompiledStep]",
    ) -> list[Section]:
        """Prints the difference to the other side, where there is one; returns the sections of a page of all."""
        if other is None:
            return census_sections(census) if self.html else []
        if isinstance(other, Run):
            names = (str(run.mesh), str(other.mesh))
            if run.training != other.training:
                names = (_short_name(run), _short_name(other))
            its = take(other).census
            changes = compare(census.to_json(), its.to_json())
            drawn = {f": {names[0]}": census, f": {names[1]}": its}
        else:
            names = (str(self.against), str(run.mesh))
            changes = compare(other, census.to_json())
            drawn = {"": census}
        difference = difference_section(changes, names)
        print_sections(console, [difference])
        if not self.html:
            return []
        return [difference, *(section for suffix, each in drawn.items() for section in census_sections(each, suffix))]

    def _write_files(self, compiled: "CompiledStep", machine: MachineGrid, sections: list[Section]) -> None:
        census, run = compiled.census, compiled.placed.run
        try:
            if self.hlo:
                self.hlo.write_text(census.text, encoding="utf-8")
            if self.save:
                save_census(census, self.save)
            if self.trace and census.schedule is not None:
                write_trace(census.schedule, self.trace)
            if self.save_budget:
                self.save_budget.write_text(write_budget(census), encoding="utf-8")
            if self.html:
                parts = [*sections, *layout_sections(compiled.placed, machine)]
                Report(f"{run.name} on {run.mesh}", parts, topic="proof", lead=census_title(census)).write(self.html)
        except OSError as error:
            raise unwritable(error.filename, error) from error


def prove(plan: Plan | Run, on: str | None = None, *, limit: int = 3600) -> Proof:
    """Compiles a plan's train step for its machine with that machine's own compiler, in a process of its own.

    on: the machine, for a Run.  limit: seconds of processor time that compiling may take.
    Needs libtpu, or NVIDIA's compiler (docs: Install), not the hardware. Raises ConfigError for a Run without `on`.

    Example:
        >>> run = mw.recipe("llama3-8b", mesh="fsdp=64")
        >>> mw.prove(run)
        Traceback (most recent call last):
        meshwright.errors.ConfigError: proving llama3-8b
          because: a Run does not say which machine to compile for
          fix:     prove(run, on="v5p:4x4x4"), or one of the plans of plan(...)
    """
    if not isinstance(plan, Run):
        return prove_plan(plan, plan.target, limit)
    if on is None:
        raise ConfigError(
            f"proving {plan.name}",
            "a Run does not say which machine to compile for",
            'prove(run, on="v5p:4x4x4"), or one of the plans of plan(...)',
        )
    target = find_target(on)
    return prove_plan(price_run(resolved_run(plan, target.devices, target), target), target, limit)


def prove_plan(plan: Plan, target: Target, limit: int) -> Proof:
    """Compiles a plan for `target` by `meshwright prove PLAN --json`, for at most `limit` seconds."""
    own = plan.run.model.options_of_child()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        file, html = Path(folder) / "plan.json", Path(folder) / "page.html"
        write_plan(plan, target, file)
        given = options_of_child([run_to_dict(plan.run), target.name])
        words = ["prove", str(file), "--json", "--html", str(html), *given, *own]
        try:
            _, errors = compile_in_subprocess(target, limit, words, printed)
        except CensusError as error:
            return Proof(plan, None, None, None, error.truth)
        printed.seek(0)
        documents = [line for line in printed if line.startswith("{")]
        page = html.read_text(encoding="utf-8") if html.is_file() else ""
    if not documents:
        reason = next((line.split(":", 1)[1] for line in errors.splitlines() if "because:" in line), errors[-200:])
        return Proof(plan, None, None, None, " ".join(reason.split()))
    census = json.loads(documents[-1])
    peak, available = census["memory"]["live"], target.chip.hbm_bytes
    phases = {"step": peak} | census.get("phases", {})
    most = max(phases, key=phases.__getitem__)
    where = "" if most == "step" else f", in {most}"
    refused = "" if phases[most] <= available else f"{format_bytes(phases[most])} of {format_bytes(available)}{where}"
    return Proof(
        plan, census["simulated_schedule"]["step_seconds"], peak, census["compile_seconds"], refused, census, page
    )


def is_compiling_process(target: Target) -> bool:
    """Whether this is the process that compiles for `target`."""
    return os.environ.get(_COMPILES_FOR) == str(target)


def compile_in_subprocess(target: Target, limit: int, words: Sequence[str], output: IO[str]) -> tuple[int, str]:
    """Runs `meshwright WORDS` in a process that compiles for `target`; returns its exit code and our own messages.

    limit: most seconds of processor time, and ten times as many by the clock, for a compiler that waits for ever.
    output: file of its standard output. Raises CensusError where the compiler is missing, takes too long or crashes;
    its log is kept in the cache, in a file that the error names.
    """
    require_compiler(target)
    log = default_cache_folder() / "proofs" / f"compiler-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    asked = f"compiling for {target}"
    work = activity("compile", asked + _took_before(target), f"compiled for {target}")
    with work, log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshwright", *words],
            env={**os.environ, **compiler_environment(target), _COMPILES_FOR: str(target)},
            stdout=output.fileno(),
            stderr=errors,
        )
        # Busy machines and many cores change the time by the clock.
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (limit, limit + 1))
        try:
            code = child.wait(_LONGER * limit)
        except subprocess.TimeoutExpired:
            code = -signal.SIGXCPU
        except KeyboardInterrupt:
            log.unlink()
            raise
        finally:
            child.kill()
            child.wait()
    text = log.read_text(encoding="utf-8")
    if code == -signal.SIGXCPU:
        truth = f"it took more than {limit} s of processor time; its log is {log}"
        raise CensusError(asked, truth, f"--limit {2 * limit}")
    if code < 0 or code == _COMPILER_EXIT or "Traceback (most recent call last)" in text:
        last = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "it gave no message")
        reason = signal.Signals(-code).name if code < 0 else last
        raise CensusError(asked, f"the compiler failed: {reason}; its log is {log}", "another mesh or target")
    log.unlink()
    # Without a TPU or GPU the compilers warn about the machine; only this package's error, and what follows it, matter.
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    return code, "".join(lines[first:])


def _took_before(target: Target) -> str:
    """Says how long programs for the chip took to compile here; "" where none has been compiled."""
    file = _timings(target)
    taken = sorted(map(float, file.read_text(encoding="utf-8").split())) if file.is_file() else []
    if not taken:
        return ""
    programs, middle = f"{len(taken)} program{'s' if len(taken) > 1 else ''}", statistics.median(taken)
    took = f"took {taken[0]:.0f} to {taken[-1]:.0f} s of processor time here, {middle:.0f} in the middle"
    return f" ({programs} for {target.chip.name} {took})"


def _timings(target: Target) -> Path:
    """File with the seconds of processor time of each program that was compiled for a chip."""
    return default_cache_folder() / "proofs" / f"{target.chip.name.replace(' ', '-')}.seconds"


def target_devices(target: Target) -> list[Any]:
    """Returns the devices of a target. Raises CensusError where its compiler has another number of them."""
    devices = topology_devices(target)
    if len(devices) != target.devices:
        raise CensusError(
            f"compiling for {target}",
            f"its compiler describes {len(devices)} devices, and it has {target.devices}",
            "meshwright plan, which needs no compiler, or another chip",
        )
    return devices


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step compiled in this process, and what was predicted of it."""

    placed: PlacedRun
    census: Census
    device_run: DeviceRun | None
    """None for a wrapped model."""
    planned: Estimate | None
    """Price of the train step on the target; None for devices here, and for an evaluation step."""
    undetermined: float | None = None
    """Predicted seconds of the step without `deterministic`, where that changes it."""
    cache: tuple[Path, bool] | None = None
    """File of the census in the cache of proofs, and whether to compile again what is there; None for devices here."""

    def phases(self) -> dict[str, int]:
        """Compiles all phases of a training, where the step is that of a model family; returns bytes of a device."""
        device_run, census = self.device_run, self.census
        if device_run is None or census.name != "train step":
            return {}
        if self.cache is None:
            return compiled_phases(device_run, census)
        file, fresh = self.cache
        file = file.with_suffix(".phases.json")
        return cached(file, dict[str, int], lambda: compiled_phases(device_run, census), fresh)


def compile_step(
    run: Run,
    devices: Sequence[Any],
    target: Target | None,
    *,
    step: str = "train",
    fresh: bool = False,
) -> CompiledStep:
    """Compiles the train or evaluation step of a run for devices, here or not.

    target: hardware of the devices, None for those at hand.  step: `train` or `evaluate`.  fresh: compile again what is
    in the cache of proofs.
    Raises OutOfMemory where the compiler refuses it.
    """
    run, devices = resolved_run(run, len(devices), target), list(devices)
    assert run.mesh is not None
    device_run = place_on_devices(run, build_mesh(run.mesh, devices))
    if target is None and devices[0].platform == "cpu":
        _check_arrays(run, device_run.placed)
    # Choices are made, and states saved as weights, of a model whose layers are known.
    known = device_run if run.model.unit == "tokens" else None
    if target is None or step != "train":
        census_of = census_of_train_step if step == "train" else census_of_eval_step
        with activity("compile", f"compiling the {step} step", f"compiled the {step} step"):
            return CompiledStep(device_run.placed, census_of(device_run), known, None)
    folder, undetermined = default_cache_folder() / "proofs", None

    def compiled(device_run: DeviceRun) -> Census:
        began = time.process_time()
        try:
            return census_of_train_step(device_run, target)
        finally:
            with _timings(target).open("a", encoding="utf-8") as taken:
                taken.write(f"{time.process_time() - began:.0f}\n")

    def proved(device_run: DeviceRun) -> tuple[Path, Census]:
        file = folder / f"{cache_key(device_run, target)}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file, cached(file, Census, lambda: compiled(device_run), fresh)

    file, census = proved(device_run)
    if device_run.settled.fixes_bits:
        plain = dataclasses.replace(run, training=dataclasses.replace(run.training, deterministic=False))
        schedule = proved(place_on_devices(plain, device_run.mesh))[1].schedule
        undetermined = None if schedule is None else schedule.step_seconds
    planned = estimate(place_run(run), target)
    return CompiledStep(device_run.placed, census, known, planned, undetermined, (file, fresh))


def compile_choices(
    run: Run, target: Target, take: Callable[[Run], CompiledStep], say: Say
) -> tuple[Run, Callable[[], CompiledStep]]:
    """Compiles the train step of a run with choices that fit the target, and others where those do not.

    run: with its mesh.  take: compiles a run.  say: receives why a choice is given up.
    Returns the run, and a function that returns its compiled step or raises the compiler's OutOfMemory.
    """
    compiled: dict[Run, CompiledStep | OutOfMemory] = {}

    def needed(run: Run) -> float:
        try:
            compiled[run] = step = take(run)
            return float(step.census.memory.compiled.live)
        except OutOfMemory as error:
            compiled[run] = error
            return error.required

    run = with_choices_that_fit(run, target, needed, say)

    def result() -> CompiledStep:
        found = compiled.get(run) or take(run)
        if isinstance(found, OutOfMemory):
            raise found
        return found

    return run, result


def _check_arrays(run: Run, placed: PlacedRun) -> None:
    """Raises CensusError for a step with arrays that XLA's compiler for CPUs dies of, with SIGFPE (jaxlib 0.12.0)."""
    shape, width = placed.shape, placed.spec.width
    training = placed.run.training
    batch, seq = training.batch // shape.over(BATCH_AXES), training.seq // (shape.context * shape.tensor)
    batch //= training.microbatches
    elements = batch * seq * width
    if elements >= _LARGEST_ON_CPU:
        parts = training.microbatches * 2 * math.ceil(elements / _LARGEST_ON_CPU)
        raise CensusError(
            f"compiling {run.name} on mesh {shape} for this CPU",
            f"a microbatch on a device has {batch} x {seq} x {width} = {elements:,} activations, and from 2^33 = "
            f"{_LARGEST_ON_CPU:,} elements on its compiler dies",
            f"the same command with --on {machine_for(run)}; or --training.microbatches {parts} here",
        )


def run_on_mesh(run: Run, devices: int, target: Target | None) -> Run:
    """Returns the run with a vocabulary and a mesh: FSDP over a target, the default one here."""
    if run.mesh is None:
        here = target is None and run.model.unit == "tokens"
        shape = default_mesh_shape(min(8, devices)) if here else MeshShape(fsdp=devices)
        run = dataclasses.replace(run, mesh=shape)
    return with_vocab(run)


def resolved_run(run: Run, devices: int, target: Target | None) -> Run:
    """Returns the run with a vocabulary, a mesh, and for a target the choices of the best plan on it."""
    run = run_on_mesh(run, devices, target)
    return run if target is None else with_choices(run, target)


def compile_decoding(
    run: Run,
    devices: Sequence[Any],
    target: Target | None,
    *,
    step: Literal["prefill", "decode"],
    batch: int,
    slots: int,
) -> tuple[MeshShape, int, dict[str, float], dict[str, float]]:
    """Compiles prefill or decode; returns mesh, sequences compiled, planned bytes, compiled bytes and seconds.

    batch: sequences, rounded up to what the mesh divides.  slots: of the cache for each sequence.
    """
    if run.mesh is None and target is not None:
        run = dataclasses.replace(run, mesh=MeshShape(fsdp=len(devices)))
    run = resolved_run(run, len(devices), None)  # decoding has no remat policy
    assert run.mesh is not None
    merged = dataclasses.replace(run, finetune=FineTune())  # adapters are merged before weights are laid out
    device_run = place_on_devices(run_for_decoding(merged, run.mesh), build_mesh(run.mesh, list(devices)))
    share = run.mesh.over(BATCH_AXES)
    batch = math.ceil(batch / share) * share
    bucket = Bucket(batch, slots, math.gcd(slots, 512))
    decoder = Decoder(device_run, abstract_layout(device_run, "gathered"), bucket)
    began = time.perf_counter()
    try:
        stats = decoder.memory(step)
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(error) from error
    compiled = {
        "weights": float(stats.argument_size_in_bytes - stats.alias_size_in_bytes),
        "cache": float(decoder.cache_bytes(stats)),
        "temporaries": float(stats.temp_size_in_bytes),
        "bytes": float(stats.argument_size_in_bytes + stats.temp_size_in_bytes),
        "compile_seconds": time.perf_counter() - began,
    }
    planned = {
        "weights": float(weight_bytes(device_run.placed, "gathered")),
        "cache": float(decoder.plan.bytes_per_device),
    }
    return run.mesh, batch, planned, compiled


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Result of tuning a plan."""

    start: Proof
    best: Proof
    tried: tuple[tuple[str, Proof], ...]
    """Name of each change, tried on top of those kept before, and its proof."""
    kept: frozenset[str]
    """Names of the changes that were kept."""


def prove_best(plans: Sequence[Plan], target: Target, limit: int, say: Say) -> list[Proof]:
    """Compiles plans one after another; those that fit come first, the fastest first."""
    proofs = []
    for plan in plans:
        say(f"compiling {plan.name} for {target} ...")
        proofs.append(prove_plan(plan, target, limit))
    return sorted(proofs, key=lambda p: (bool(p.refused), p.step_seconds or 0.0))


def trials(run: Run, target: Target) -> Iterator[tuple[str, Run]]:
    """Yields `run` with one thing changed, and the name of the change.

    The changes are the neighbouring remat policies, half and twice the microbatches, the dtype of gradient sums, block
    sizes of attention and loss, and compiler options.
    """
    training = run.training

    def changed(**fields: Any) -> Run:
        return dataclasses.replace(run, training=dataclasses.replace(training, **fields))

    policies = remat_policies(target)
    current = policies.index(training.remat)
    for remat in policies[max(0, current - 2) : current + 2]:
        if remat != training.remat:
            yield f"remat {remat}", changed(remat=remat)
    for microbatches in filter(None, (training.microbatches // 2, 2 * training.microbatches)):
        other = changed(microbatches=microbatches)
        if _is_legal(other):
            yield f"{microbatches} microbatch{'es' if microbatches > 1 else ''}", other
    if training.reduce_dtype == "float32":
        yield "gradients summed in bfloat16", changed(reduce_dtype="bfloat16")
    if isinstance(target.chip.interconnect, Torus):
        for block in (1024, 256):
            if training.seq % block == 0:
                yield f"attention in blocks of {block}", changed(attention_block=block)
    for mib in (256, 2048):
        yield f"logits of {mib} MiB", changed(logits_mib=mib)
    if AUTO in training.compiler_options and target.chip.compiler_options:
        others = tuple(word for word in training.compiler_options if word != AUTO)
        yield "the compiler's own options", changed(compiler_options=others)


def _is_legal(run: Run) -> bool:
    try:
        place_run(run)
    except ConfigError:
        return False
    return True


def tune(proof: Proof, target: Target, limit: int, say: Say) -> Tuned:
    """Tries each change of `trials` on top of those that made the compiled step faster.

    Raises ConfigError where the plan itself has no proof.
    """
    if proof.step_seconds is None:
        raise ConfigError(f"tuning {proof.plan.name}", f"it cannot be compiled: {proof.refused}", "another plan")
    # Any variant that fits is better than a plan that does not.
    best, fastest = proof, math.inf if proof.refused else proof.step_seconds
    tried, kept = list[tuple[str, Proof]](), set[str]()
    names = [name for name, _ in trials(best.plan.run, target)]
    for name in names:
        changed = dict(trials(best.plan.run, target)).get(name)
        if changed is None:
            continue
        say(f"trying {name} ...")
        variant = prove_plan(price_run(changed, target), target, limit)
        tried.append((name, variant))
        if variant.step_seconds is not None and not variant.refused and variant.step_seconds < fastest * _KEPT:
            best, fastest = variant, variant.step_seconds
            kept.add(name)
    return Tuned(proof, best, tuple(tried), frozenset(kept))


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

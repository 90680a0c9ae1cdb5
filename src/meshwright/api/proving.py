"""Proofs: a step compiled by the compiler of hardware that need not be here, in a process of its own, and tuned."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import jax

from meshwright.activity import activity
from meshwright.analysis.census import Census
from meshwright.analysis.compile import compiler_error
from meshwright.analysis.run_census import cache_key, cached, census_of_eval_step, census_of_train_step
from meshwright.analysis.run_memory import compiled_phases
from meshwright.api.planning import find_target, with_vocab
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
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import Plan, machine_for, price_run, remat_policies, with_best_remat
from meshwright.plugins import options_of_child
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.sharding.layouts import BATCH_AXES
from meshwright.step.device_run import DeviceRun, place_on_devices
from meshwright.storage.paths import default_cache_folder
from meshwright.views.report import frame

_COMPILES_FOR = "MESHWRIGHT_COMPILES_FOR"
"""Environment variable that marks a process that compiles, with its target."""
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


def prove(plan: Plan | Run, on: str | None = None, *, limit: int = 900) -> Proof:
    """Compiles a plan's train step for its machine with that machine's own compiler, in a process of its own.

    on: the machine, for a Run.  limit: seconds that compiling may take.
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

    limit: most seconds.  output: file of its standard output. Raises CensusError where the compiler is missing, takes
    too long or crashes; its log is kept in the cache, in a file that the error names.
    """
    require_compiler(target)
    log = default_cache_folder() / "proofs" / f"compiler-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    asked = f"compiling for {target}"
    work = activity("compile", asked, f"compiled for {target}")
    with work, log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "meshwright", *words],
                env={**os.environ, **compiler_environment(target), _COMPILES_FOR: str(target)},
                stdout=output.fileno(),
                stderr=errors,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CensusError(asked, f"it took more than {limit} s; its log is {log}", "a larger --limit") from error
        except KeyboardInterrupt:
            log.unlink()
            raise
    text = log.read_text(encoding="utf-8")
    if done.returncode < 0 or done.returncode == _COMPILER_EXIT or "Traceback (most recent call last)" in text:
        last = next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "it gave no message")
        reason = signal.Signals(-done.returncode).name if done.returncode < 0 else last
        raise CensusError(asked, f"the compiler failed: {reason}; its log is {log}", "another mesh or target")
    log.unlink()
    # Without a TPU or GPU the compilers warn about the machine; only this package's error, and what follows it, matter.
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    return done.returncode, "".join(lines[first:])


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

    def proved(device_run: DeviceRun) -> tuple[Path, Census]:
        file = folder / f"{cache_key(device_run, target)}.json"
        return file, cached(file, Census, lambda: census_of_train_step(device_run, target), fresh)

    file, census = proved(device_run)
    if device_run.settled.fixes_bits:
        plain = dataclasses.replace(run, training=dataclasses.replace(run.training, deterministic=False))
        schedule = proved(place_on_devices(plain, device_run.mesh))[1].schedule
        undetermined = None if schedule is None else schedule.step_seconds
    planned = estimate(place_run(run), target)
    return CompiledStep(device_run.placed, census, known, planned, undetermined, (file, fresh))


def _check_arrays(run: Run, placed: PlacedRun) -> None:
    """Raises CensusError for a step with arrays that XLA's compiler for CPUs dies of, with SIGFPE (jaxlib 0.12.0)."""
    shape, width = placed.shape, placed.spec.width
    batch, seq = run.training.batch // shape.over(BATCH_AXES), run.training.seq // (shape.context * shape.tensor)
    batch //= run.training.microbatches
    elements = batch * seq * width
    if elements >= _LARGEST_ON_CPU:
        parts = run.training.microbatches * 2 * math.ceil(elements / _LARGEST_ON_CPU)
        raise CensusError(
            f"compiling {run.name} on mesh {shape} for this CPU",
            f"a microbatch on a device has {batch} x {seq} x {width} = {elements:,} activations, and from 2^33 = "
            f"{_LARGEST_ON_CPU:,} elements on its compiler dies",
            f"the same command with --on {machine_for(run)}; or --training.microbatches {parts} here",
        )


def resolved_run(run: Run, devices: int, target: Target | None) -> Run:
    """Returns the run with a mesh (FSDP over a target, the default one here), a vocabulary and a remat policy."""
    if run.mesh is None:
        here = target is None and run.model.unit == "tokens"
        shape = default_mesh_shape(min(8, devices)) if here else MeshShape(fsdp=devices)
        run = dataclasses.replace(run, mesh=shape)
    return with_vocab(run) if target is None else with_best_remat(with_vocab(run), target)


def compile_decoding(
    run: Run,
    devices: Sequence[Any],
    target: Target | None,
    *,
    step: Literal["prefill", "decode"],
    batch: int,
    slots: int,
) -> tuple[MeshShape, dict[str, float], dict[str, float]]:
    """Compiles prefill or decode for devices, here or not; returns mesh, planned bytes, compiled bytes and seconds.

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
    return run.mesh, planned, compiled


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

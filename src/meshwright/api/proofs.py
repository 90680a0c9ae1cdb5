"""Plans compiled for their machine, each in a process of its own, and tuned by their programs."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from meshwright.activity import activity, doing_of
from meshwright.api.targets import find_target, resolved_run
from meshwright.config import MeshShape
from meshwright.errors import CensusError, CompilerError, ConfigError, UnavailableError
from meshwright.formatting import Brief, format_bytes, format_step, shortened
from meshwright.hardware.aot import compiler_environment, require_compiler
from meshwright.hardware.chips import Torus
from meshwright.hardware.interconnect import machine_of_target
from meshwright.hardware.machine import AUTO
from meshwright.hardware.targets import Target
from meshwright.models.families import family_name
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import Plan, price_run, remat_policies
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.storage.paths import default_cache_folder
from meshwright.storage.removing import remove_file
from meshwright.trust import options_of_child, own
from meshwright.views.blocks import Text
from meshwright.views.report import FRAME_BYTES, Report, Section, frame

_COMPILES_FOR = "MESHWRIGHT_COMPILES_FOR"
"""Environment variable that marks a process that compiles, with its target."""
_LONGER = 10
"""Most time by the clock over that of the processor, where a compiler waits."""
_COMPILER_EXIT = 1
"""Exit code of a process that its compiler ends; errors of this package have others."""
_CRASHES = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGTRAP,
)
"""Signals of a compiler's own fault, which another start would meet again; all others are sent from
outside."""
_REPORT = "report it with that log; another batch or version of the compiler may not meet it"
_LISTENED = 0.5
"""Seconds between two readings of the log of a process that compiles."""
_KEPT = 0.998
"""Largest fraction of the best step so far with which a change is kept."""
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, repr=False)
class Proof(Brief):
    """Result of compiling a plan for its machine.

    Proved by the compiler: that it compiles, its memory, its collectives. Predicted: the time of a
    step, by simulating the compiled schedule.

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

    def brief(self) -> str:
        """Returns the plan, and what the compiler proved of it."""
        subject = f"of {self.plan.run.name} on {self.plan.target}, {self.plan.name}"
        if self.step_seconds is None or self.peak_bytes is None:
            return f"{subject}: refused: {shortened(self.refused, 300)}"
        fits = f"does not fit ({self.refused})" if self.refused else "fits"
        return (
            f"{subject}: {fits}, {format_bytes(self.peak_bytes)} by the compiler, "
            f"{format_step(self.step_seconds)} simulated"
        )

    def _repr_html_(self) -> str | None:
        title = f"proof of {self.plan.name}"
        framed = frame(self.page, title) if self.page else ""
        if not framed or len(framed.encode()) <= FRAME_BYTES:
            return framed or None
        text = Text(
            [self.brief(), "The page is too large for a notebook; `page` of this proof has it."]
        )
        return Report(title, [Section("Proof", [text])], topic="proof", height=300).frame()

    def to_json(self) -> dict[str, Any]:
        """Returns planned and compiled figures side by side."""
        e = self.plan.estimate
        figures = {
            name: getattr(self, name)
            for name in ("step_seconds", "peak_bytes", "compile_seconds", "refused")
        }
        return {
            "plan": self.plan.name,
            "planned_seconds": e.seconds,
            "planned_bytes": e.bytes,
            **figures,
        }


def prove(plan: Plan | Run, on: str | None = None, *, limit: int = 3600) -> Proof:
    """Compiles a plan's train step with its machine's own compiler.

    A child process does it.
    on: the machine, for a Run.  limit: seconds of processor time that compiling may take. Needs
    libtpu, or NVIDIA's compiler (docs: Install), not the hardware. Raises CompilerError where that
    is missing, and ConfigError for a Run without `on`. A plan that the compiler refuses is a Proof
    with the reason in `refused`.

    Example:
        >>> run = mw.recipe("llama3-8b", mesh="fsdp=64")
        >>> mw.prove(run)
        Traceback (most recent call last):
        meshwright.errors.ConfigError: proving llama3-8b
          because: a Run does not say which machine to compile for
          fix:     prove(run, on="v5p:4x4x4"), or one of the plans of plan(...)
    """
    plan = own(plan)
    if not isinstance(plan, Run):
        return prove_plan(plan, plan.target, limit)
    if on is None:
        raise ConfigError(
            f"proving {plan.name}",
            "a Run does not say which machine to compile for",
            'prove(run, on="v5p:4x4x4"), or one of the plans of plan(...)',
        )
    target = find_target(own(on))
    return prove_plan(price_run(resolved_run(plan, target.devices, target), target), target, limit)


def prove_plan(plan: Plan, target: Target, limit: int) -> Proof:
    """Compiles a plan by `meshwright prove PLAN --json`, for at most `limit` seconds."""
    model = plan.run.model.options_of_child()
    require_compiler(target)  # a fault of this machine, and none of the plan
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8") as printed,
    ):
        file, html = Path(folder) / "plan.json", Path(folder) / "page.html"
        write_plan(plan, target, file)
        given = options_of_child(plan.run, family_name(plan.run.model), target.name)
        words = ["prove", str(file), "--json", "--html", str(html), *given, *model]
        try:
            _, errors = compile_in_subprocess(target, limit, words, printed)
        except CensusError as error:
            return Proof(plan, None, None, None, error.truth)
        printed.seek(0)
        documents = [line for line in printed if line.startswith("{")]
        page = html.read_text(encoding="utf-8") if html.is_file() else ""
    if not documents:
        reason = next(
            (line.split(":", 1)[1] for line in errors.splitlines() if "because:" in line),
            errors[-200:],
        )
        return Proof(plan, None, None, None, " ".join(reason.split()))
    census = json.loads(documents[-1])
    peak, available = census["memory"]["live"], target.chip.hbm_bytes
    phases = {"step": peak} | census.get("phases", {})
    most = max(phases, key=phases.__getitem__)
    where = "" if most == "step" else f", in {most}"
    refused = (
        ""
        if phases[most] <= available
        else f"{format_bytes(phases[most])} of {format_bytes(available)}{where}"
    )
    return Proof(
        plan,
        census["simulated_schedule"]["step_seconds"],
        peak,
        census["compile_seconds"],
        refused,
        census,
        page,
    )


def is_compiling_process(target: Target) -> bool:
    """Whether this is the process that compiles for `target`."""
    return os.environ.get(_COMPILES_FOR) == str(target)


def compile_in_subprocess(
    target: Target, limit: int, words: Sequence[str], output: IO[str]
) -> tuple[int, str]:
    """Runs `meshwright WORDS` in a process that compiles for `target`.

    Returns its exit code and our own messages.
    limit: most seconds of processor time, and ten times as many by the clock, for a compiler that
    waits for ever.
    output: file of its standard output. The notices in its log are announced here as activities.
    Raises CompilerError where the compiler is missing, takes too long or crashes, and
    UnavailableError where something outside ends it, such as Linux for want of memory; its log is
    kept in the cache, in a file that the error names.
    """
    require_compiler(target)
    log = default_cache_folder() / "proofs" / f"compiler-{secrets.token_hex(8)}.log"
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
            code = _wait_and_announce(child, log, _LONGER * limit)
        except KeyboardInterrupt:
            remove_file(log, below=log.parent)
            raise
        finally:
            child.kill()
            child.wait()
    text = log.read_text(encoding="utf-8")
    if code < 0 or code == _COMPILER_EXIT or "Traceback (most recent call last)" in text:
        raise _error_of_end(asked, code, limit, log, text)
    remove_file(log, below=log.parent)
    # Without a TPU or GPU the compilers warn about the machine; only this package's error, and what
    # follows it, matter.
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("error:")), len(lines))
    return code, "".join(lines[first:])


def _wait_and_announce(child: subprocess.Popen[bytes], log: Path, most: float) -> int:
    """Waits for a process that compiles, and announces the notices in its log.

    Returns its exit code.
    After `most` seconds that is the one of the limit on its processor time.
    """
    latest, deadline = "", time.monotonic() + most
    with contextlib.ExitStack() as announced:
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_LISTENED)
            said = [doing_of(line) for line in log.read_text(errors="replace").splitlines()]
            doing = next((each for each in reversed(said) if each), "")
            if doing != latest:
                latest = doing
                announced.close()
                announced.enter_context(activity("compile", doing, f"done with {doing}"))
    return -signal.SIGXCPU


def _error_of_end(
    asked: str, code: int, limit: int, log: Path, text: str
) -> CompilerError | UnavailableError:
    """Returns the error of a compiler that ended without an answer, by what ended it.

    code: exit code of its process, negative for a signal.  text: what it wrote to `log`.
    """
    lines = text.splitlines()
    doing = next((each for each in map(doing_of, reversed(lines)) if each), "")
    during = f" while {doing}" if doing else ""
    if code == -signal.SIGXCPU:
        truth = f"it took more than {limit} s of processor time{during}; its log is {log}"
        return CompilerError(asked, truth, f"--limit {2 * limit}")
    if code < 0 and -code not in _CRASHES:
        truth = (
            f"{_name_of(-code)} ended the compiler{during}, so nothing is known of the "
            f"program; its log is {log}"
        )
        if -code == signal.SIGKILL:
            truth += "; Linux sends it where a machine's memory is exhausted (dmesg shows it)"
        fix = "the same command again, with less beside it or on a machine with more memory"
        return UnavailableError(asked, truth, fix)
    last = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
    reason = _name_of(-code) if code < 0 else last or "it gave no message"
    truth = f"the compiler failed{during}: {reason}; its log is {log}"
    return CompilerError(asked, truth, _REPORT)


def _name_of(number: int) -> str:
    """Returns the name of a signal; those of real time have none."""
    known = {int(each): each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def _took_before(target: Target) -> str:
    """Says how long programs for the chip took to compile here; "" where none has been compiled."""
    file = timings_file(target)
    taken = sorted(map(float, file.read_text(encoding="utf-8").split())) if file.is_file() else []
    if not taken:
        return ""
    programs, middle = (
        f"{len(taken)} program{'s' if len(taken) > 1 else ''}",
        statistics.median(taken),
    )
    took = (
        f"took {taken[0]:.0f} to {taken[-1]:.0f} s of processor time here, {middle:.0f} in the "
        f"middle"
    )
    return f" ({programs} for {target.chip.name} {took})"


def timings_file(target: Target) -> Path:
    """File with the seconds of processor time of each program that was compiled for a chip."""
    return default_cache_folder() / "proofs" / f"{target.chip.name.replace(' ', '-')}.seconds"


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

    The changes are the neighbouring remat policies, half and twice the microbatches, the dtype of
    gradient sums, block sizes of attention and loss, and compiler options.
    """
    training = run.training
    changed = functools.partial(_with_training, run)
    policies = remat_policies(target)
    current = policies.index(training.remat)
    for remat in policies[max(0, current - 2) : current + 2]:
        if remat != training.remat:
            yield f"remat {remat}", changed(remat=remat)
    for microbatches in filter(None, (training.microbatches // 2, 2 * training.microbatches)):
        other = changed(microbatches=microbatches)
        with contextlib.suppress(ConfigError):
            place_run(other)
            yield f"{microbatches} microbatch{'es' if microbatches > 1 else ''}", other
    if training.reduce_dtype == "float32":
        yield "gradients summed in bfloat16", changed(reduce_dtype="bfloat16")
    if isinstance(target.chip.interconnect, Torus):
        for block in (1024, 256):
            if training.seq % block == 0:
                yield f"attention in blocks of {block}", changed(attention_block=block)
    for mib in (256, 2048):
        yield f"logits of {mib} MiB", changed(logits_mib=mib)
    settled = settle(place_run(run), machine_of_target(target, run.mesh or MeshShape()))
    if AUTO in training.compiler_options and (
        settled.compiler_options or settled.scheduled_by_price
    ):
        others = tuple(word for word in training.compiler_options if word != AUTO)
        yield "the compiler's own options", changed(compiler_options=others)


def _with_training(run: Run, **fields: Any) -> Run:
    return dataclasses.replace(run, training=dataclasses.replace(run.training, **fields))


def tune(proof: Proof, target: Target, limit: int, say: Say) -> Tuned:
    """Tries each change of `trials` on top of those that made the compiled step faster.

    Raises ConfigError where the plan itself has no proof.
    """
    if proof.step_seconds is None:
        raise ConfigError(
            f"tuning {proof.plan.name}", f"it cannot be compiled: {proof.refused}", "another plan"
        )
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
        if (
            variant.step_seconds is not None
            and not variant.refused
            and variant.step_seconds < fastest * _KEPT
        ):
            best, fastest = variant, variant.step_seconds
            kept.add(name)
    return Tuned(proof, best, tuple(tried), frozenset(kept))

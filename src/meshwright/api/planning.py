"""Planning and proving from Python: plans by arithmetic, and their compilation for hardware that need not be here."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.api.ranked import Plans
from meshwright.bench.calibration_file import read_calibration
from meshwright.data.vocabulary import vocab_of_corpus
from meshwright.errors import ConfigError
from meshwright.formatting import format_bytes, parse_count
from meshwright.hardware.mesh import default_cache_folder
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.automatic import with_best_remat
from meshwright.planner.calibration import calibrate_target
from meshwright.planner.explain import nothing_fits
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import Plan, price_run, search, with_tokens_per_step
from meshwright.plugins import options_of_child
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.views.pages import frame
from meshwright.wrapped.model import Wrapped, check_named, is_wrapped


def plan(
    run: Run | str, on: str | Sequence[str], *, tokens_per_step: str | int | None = None, at_most: int = 20
) -> Plans:
    """Returns the best plans of a run on hardware that need not be here, the fastest predicted step first.

    run: a Run, or a recipe's name.  on: a machine such as `v5p:8x8x16` or `h100:64`, or several.
    tokens_per_step: global batch in tokens, such as `4M`; None keeps the run's batch.
    Memory and time are predicted by arithmetic; `prove` compiles a plan. The list prints as a table; in a notebook it
    shows its page.
    Raises ConfigError where no mesh of a machine has the memory.

    Example:
        >>> best = mw.plan("llama3-8b", on="v5p:4x4x4", tokens_per_step="1M")
        >>> best[0].mesh.size, best[0].estimate.fits
        (64, True)
    """
    base = find_recipe(run) if isinstance(run, str) else run
    if is_wrapped(base):
        if tokens_per_step is not None:
            raise ConfigError(
                f"{tokens_per_step} tokens per step of a wrapped model", "its batch is that of its data", "leave it out"
            )
        from meshwright.wrapped.plan import plan_wrapped  # loads optax

        return Plans(
            plan_wrapped(base, [find_target(m) for m in ((on,) if isinstance(on, str) else on)], at_most=at_most)
        )
    base = with_vocab(base)
    if tokens_per_step is not None:
        base = with_tokens_per_step(base, parse_count(str(tokens_per_step), "tokens_per_step"))
    searches = []
    for machine in (on,) if isinstance(on, str) else on:
        result = search(base, find_target(machine))
        if not result.plans:
            raise nothing_fits(base, result)
        searches.append(result)
    plans = [plan for result in searches for plan in result.plans[:at_most]]
    return Plans(sorted(plans, key=lambda p: p.estimate.seconds)[:at_most], searches)


def find_target(text: str) -> Target:
    """Returns the machine that `text` names, with the efficiencies that `meshwright bench` measured on such a chip."""
    target = parse_target(text)
    for file in sorted((default_cache_folder() / "calibration").glob("*.json")):
        target = calibrate_target(target, read_calibration(file))
    return target


def with_vocab(run: Run) -> Run:
    """Returns the run with a vocabulary size, which some recipes leave to their tokenizer."""
    if run.model.vocab is not None:
        return run
    data = run.data
    vocab = vocab_of_corpus(
        data.paths, data.tokenizer, default_cache_folder(), run.faults.bad_records, data.text_field
    )  # fmt: skip
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab=vocab))


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
        return {
            "plan": self.plan.name,
            "planned_seconds": e.seconds,
            "planned_bytes": e.bytes,
            "step_seconds": self.step_seconds,
            "peak_bytes": self.peak_bytes,
            "compile_seconds": self.compile_seconds,
            "refused": self.refused,
        }


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
    if isinstance(plan, Run):
        if on is None:
            raise ConfigError(
                f"proving {plan.name}",
                "a Run does not say which machine to compile for",
                'prove(run, on="v5p:4x4x4"), or one of the plans of plan(...)',
            )
        target = find_target(on)
        if is_wrapped(plan):
            from meshwright.wrapped.plan import price_wrapped

            return prove_plan(price_wrapped(plan, target), target, limit)
        return prove_plan(price_run(with_best_remat(with_vocab(plan), target), target), target, limit)
    return prove_plan(plan, plan.target, limit)


def prove_plan(plan: Plan, target: Target, limit: int) -> Proof:
    """Compiles a plan for `target` by `meshwright prove PLAN --json` in a child process."""
    check_named(plan.run)  # another process compiles it
    with tempfile.TemporaryDirectory() as folder:
        file, html = Path(folder) / "plan.json", Path(folder) / "page.html"
        write_plan(plan, target, file)
        words = [str(file), "--json", "--html", str(html), "--limit", str(limit), *options_of_child()]
        if isinstance(plan.run.model, Wrapped):  # whose code this process runs already
            words += ["--model.name", plan.run.model.named().name]
        command = [sys.executable, "-m", "meshwright", "prove", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        page = html.read_text(encoding="utf-8") if html.is_file() else ""
    documents = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not documents:
        message = done.stderr[done.stderr.find("error:") :] if "error:" in done.stderr else done.stderr
        reason = next((line.split(":", 1)[1] for line in message.splitlines() if "because:" in line), message[-200:])
        return Proof(plan, None, None, None, " ".join(reason.split()))
    census = json.loads(documents[-1])
    peak = census["memory"]["live"]
    fits = peak <= target.chip.hbm_bytes
    return Proof(
        plan,
        census["simulated_schedule"]["step_seconds"],
        peak,
        census["compile_seconds"],
        "" if fits else f"{format_bytes(peak)} of {format_bytes(target.chip.hbm_bytes)}",
        census,
        page,
    )

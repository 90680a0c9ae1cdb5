"""Planned step time and memory against compiled, for cases drawn at random: `python bench/compiled_plans.py`.

Needs the `tpu` extra, and for GPUs the wheels that `meshwright prove` names; cases whose compiler is not installed are
left out. A case is a machine, a model and a batch. Its first choice of `plan` is compiled whole and its schedule
simulated; every second case is one of the meshes with `expert`, `context` or `stage`. `--set tuned` draws fine-tuning
(LoRA on the compute dtype, int8 and NF4) on 1, 2 and 8 devices, half of the cases with nothing recomputed,
`--set none` the fastest mesh of a model of each family with nothing recomputed, and `--set named` has cases whose
memory was once far off. Of each the programs of all phases of a training are compiled. A row goes to
bench/results/compiled_plans.json as soon as it is there, and rows that are there for the compiler that is installed are
not compiled again (`--again NAME`); what the planner predicts is computed anew each time. The summary goes to
docs/plan.md, the rows to results/compiled_plans.md, the picture to docs/img/compiled-plans.svg.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from page_table import put_rows, put_table

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.memory_model import PHASES
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import Plan, price_run, search
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_from_dict, run_to_dict
from meshwright.views.colours import PALETTE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "compiled_plans.json"
PAGE = ROOT / "docs" / "plan.md"
PICTURE = ROOT / "docs" / "img" / "compiled-plans.svg"

SEED, CASES, SET = 20261126, 20, "first choices, 2026-11-26"
# Of three cases two are on GPUs. TPUs are those whose programs compile in minutes.
GPUS = (
    "a100:16",
    "h100:8",
    "h100:16",
    "h100:32",
    "h100:64",
    "h100:128",
    "h200:32",
    "b200:8",
    "b200:32",
)
TPUS = ("v5e:4x4", "v5e:8x8", "v5p:2x2x4", "v5p:4x4x4", "tpu7x:2x2x4", "v6e:4x4")
MODELS = (
    *(
        "llama3-8b",
        "llama3-70b",
        "llama2-13b",
        "qwen3-14b",
        "qwen3-32b",
        "qwen25-32b",
        "gemma3-12b",
        "gemma3-27b",
    ),
    *(
        "olmo2-13b",
        "olmo2-32b",
        "mistral-7b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "gpt-oss-20b",
    ),
    *("gpt-oss-120b", "glm45-air", "deepseek-v2-lite", "gemma2-9b", "llama32-3b"),
)
AXES = ("expert", "context", "stage")
TOKENS, SEQS = (8192, 16384, 32768), (2048, 4096, 8192, 32768)
"""Tokens of a device, and of a sequence."""


TUNED_ON = ("h100:1", "h100:2", "h100:8", "b200:1", "v5p:2x2x1", "v6e:2x4")
BASES: tuple[Literal["compute", "int8", "nf4"], ...] = ("compute", "int8", "nf4")
FAMILIES = (
    *("llama2-13b", "gpt2-xl", "olmo2-13b", "olmo3-7b", "gemma2-9b", "gemma3-12b", "qwen3-14b"),
    *("mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "glm45-air", "smollm3-3b"),
)
"""A model of each family whose `none` fits a node."""
SETS = {
    "choices": SET,
    "tuned": "fine-tuning, 2026-11-28",
    "none": "nothing recomputed, 2026-11-28",
    "named": "cases by hand, 2026-11-28",
}
"""Value of --set -> name of the rows."""


def tuned_plans(numbers: Iterable[int]) -> Iterable[tuple[str, Plan]]:
    """Yields first choices of fine-tuning; those of every second case among the meshes with nothing recomputed."""
    for number in numbers:
        generator, plan, base = random.Random(SEED + 1000 + number), None, BASES[0]
        while plan is None:
            target = parse_target(generator.choice(TUNED_ON))
            run = find_recipe(generator.choice(MODELS))
            base, seq = generator.choice(BASES), generator.choice(SEQS[:3])
            tuning = dataclasses.replace(run.finetune, method="lora", base=base)
            run = dataclasses.replace(run, finetune=tuning)
            batch = target.devices * max(1, generator.choice(TOKENS) // seq)
            plan = saving_all(run, target, batch, seq) if number % 2 else None
            plan = plan or first_choice(run, target, batch, seq, None)
        yield f"{plan.target} {plan.run.name}+lora-{base} {sizes_of(plan)}", plan


def plans_that_save_all(numbers: Iterable[int]) -> Iterable[tuple[str, Plan]]:
    """Yields for each family the fastest mesh on which nothing is recomputed."""
    for number in numbers:
        generator, plan = random.Random(SEED + 2000 + number), None
        model = FAMILIES[number % len(FAMILIES)]
        while plan is None:
            target = parse_target(generator.choice((*GPUS, *TPUS)))
            run = find_recipe(model)
            longest = run.model.spec().max_seq if run.model.vocab else 1024
            seq = min(generator.choice(SEQS[:3]), longest or SEQS[0])
            batch = target.devices * max(1, generator.choice((2048, 4096, 8192)) // seq)
            plan = saving_all(run, target, batch, seq)
        yield f"{plan.target} {plan.run.name} {sizes_of(plan)}", plan


class Case(NamedTuple):
    """A plan that is compiled since its memory was once far off; a mesh of None takes the first choice of `plan`."""

    recipe: str
    on: str
    batch: int
    seq: int
    mesh: MeshShape | None
    base: Literal["compute", "int8", "nf4"] | None = None
    """Of LoRA's frozen weights; None trains all weights."""


NAMED = (
    Case("llama2-13b", "h100:1", 1, 4096, MeshShape(), "compute"),
    Case("gpt2-xl", "a100:4", 32, 1024, MeshShape(fsdp=4)),
    Case("olmo2-13b", "b200:8", 16, 4096, MeshShape(fsdp=8)),
    Case("llama3-70b", "h100:1", 1, 4096, None, "nf4"),
    Case("gpt-oss-20b", "h100:1", 1, 4096, None, "compute"),
)
"""With a mesh, nothing is recomputed."""


def named_plans(numbers: Iterable[int]) -> Iterable[tuple[str, Plan]]:
    """Yields the plans of the cases that were chosen by hand."""
    for number in numbers:
        if number >= len(NAMED):
            return
        case = NAMED[number]
        target, run, word = parse_target(case.on), find_recipe(case.recipe), ""
        if case.base is not None:
            tuning = dataclasses.replace(run.finetune, method="lora", base=case.base)
            run, word = dataclasses.replace(run, finetune=tuning), f"+lora-{case.base}"
        plan = first_choice(run, target, case.batch, case.seq, None)
        if case.mesh is not None:
            training = dataclasses.replace(
                run.training, batch=case.batch, seq=case.seq, remat="none"
            )
            plan = price_run(dataclasses.replace(run, mesh=case.mesh, training=training), target)
        assert plan is not None
        yield f"{plan.target} {plan.run.name}{word} {sizes_of(plan)}", plan


def saving_all(run: Run, target: Target, batch: int, seq: int) -> Plan | None:
    """Returns the fastest plan that fits and recomputes nothing, of the meshes of a search; None without one."""
    with contextlib.suppress(ConfigError):
        training = dataclasses.replace(run.training, batch=batch, seq=seq)
        result = search(dataclasses.replace(run, training=training), target)
        changed = []
        for plan in result.plans:
            saving = dataclasses.replace(plan.run.training, remat="none", saved_layers=0)
            with contextlib.suppress(ConfigError):
                changed.append(price_run(dataclasses.replace(plan.run, training=saving), target))
        fitting = [plan for plan in changed if plan.estimate.fits]
        return min(fitting, key=lambda plan: plan.estimate.seconds, default=None)
    return None


def sizes_of(plan: Plan) -> str:
    """Returns sequences and tokens of a step, as in a row's name."""
    training = plan.run.training
    return f"{training.batch}x{training.seq}"


def drawn_plans(numbers: Iterable[int]) -> Iterable[tuple[str, Plan]]:
    """Yields the first choices of the cases of these numbers, named after machine, model and batch."""
    for number in numbers:
        generator, plan = random.Random(SEED + number), None
        while plan is None:
            axis = generator.choice(AXES) if number % 2 else None
            target = parse_target(generator.choice(TPUS if number % 3 == 2 else GPUS))
            run, tokens, seq = (
                find_recipe(generator.choice(MODELS)),
                generator.choice(TOKENS),
                generator.choice(SEQS),
            )
            plan = first_choice(run, target, max(1, tokens * target.devices // seq), seq, axis)
        yield f"{target} {plan.run.name} {sizes_of(plan)}", plan


def first_choice(run: Run, target: Target, batch: int, seq: int, axis: str | None) -> Plan | None:
    """Returns the first choice among the meshes that have `axis`; None where nothing fits."""
    with contextlib.suppress(ConfigError):
        training = dataclasses.replace(run.training, batch=batch, seq=seq)
        plans = search(dataclasses.replace(run, training=training), target).plans
        return next((plan for plan in plans if axis is None or plan.mesh.degrees()[axis] > 1), None)
    return None


def compile_plan(plan: Plan, kept: Path | None = None) -> dict[str, Any]:
    """Proves a plan in a process of its own; returns its compiled bytes, simulated seconds, FLOPs and versions.

    kept: folder that receives the plan, the census and the compiled program.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(plan, plan.target, folder / "plan.json")
        words = [
            sys.executable,
            "-m",
            "meshwright",
            "prove",
            str(folder / "plan.json"),
            "--json",
            "--fresh",
        ]
        words += (
            ["--save", str(folder / "census.json"), "--hlo", str(folder / "program.txt")]
            if kept
            else []
        )
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"wall": time.perf_counter() - began}
    if "{" not in done.stdout:
        return {**row, "error": done.stderr[-600:]}
    return {**row, **figures_of(done.stdout), "fits": done.returncode == 0}


def figures_of(text: str) -> dict[str, Any]:
    """Returns the figures of what `prove --json` printed; none where there is no census."""
    if "{" not in text:
        return {}
    census = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    return {
        "compiled": census["memory"]["live"],
        "phases": census.get("phases", {}),
        "compiled_seconds": census["simulated_schedule"]["step_seconds"],
        "flops": census["flops"]["compiled"],
        "versions": census["versions"],
    }


def compiler_of(target: Target) -> str:
    """Returns package and version of the compiler that is installed for a target; an empty text without one."""
    package = "jax-cuda13-plugin" if isinstance(target.chip.interconnect, Nodes) else "libtpu"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


DRAWN = {
    "choices": drawn_plans,
    "tuned": tuned_plans,
    "none": plans_that_save_all,
    "named": named_plans,
}
"""Value of --set -> function that draws its plans."""


def compile_cases(
    numbers: Iterable[int], again: list[str], kept: Path | None, drawn: str = "choices"
) -> list[dict[str, Any]]:
    """Compiles the plans of these cases that have no row yet; returns all rows."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if RESULTS.is_file():
        rows = {(row["name"], row["compiler"]): row for row in json.loads(RESULTS.read_text())}
    draw = DRAWN[drawn]
    for name, plan in draw(numbers):
        key = (name, compiler_of(plan.target))
        if not key[1]:
            print(f"{name}: {plan.name} is left out", flush=True)
            continue
        if key in rows and not any(word in name for word in again):
            continue
        folder = kept and kept / "-".join(key).replace(" ", "-").replace(":", "-")
        rows[key] = {
            "name": name,
            "set": SETS[drawn],
            "compiler": key[1],
            "run": run_to_dict(plan.run),
            **compile_plan(plan, folder),
        }
        RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
        figures = {k: v for k, v in rows[key].items() if k not in ("name", "run")}
        print(name, plan.name, plan.estimate.seconds, plan.estimate.bytes, figures, flush=True)
    return list(rows.values())


def with_prediction(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the planner's present prediction of its plan."""
    plan = price_run(run_from_dict(row["run"], str(RESULTS)), parse_target(row["name"].split()[0]))
    return {
        **row,
        "plan": plan.name,
        "planned": plan.estimate.bytes,
        "planned_seconds": plan.estimate.seconds,
        "planned_phases": {name: x.device for name, x in plan.estimate.phases.items()},
    }


def errors(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns the relative errors of time and memory of the compiled rows."""
    return [
        (r["planned_seconds"] / r["compiled_seconds"] - 1, r["planned"] / r["compiled"] - 1)
        for r in rows
        if "error" not in r
    ]


def is_gpu(row: dict[str, Any]) -> bool:
    """Whether a row's machine has GPUs."""
    return isinstance(parse_target(row["name"].split()[0]).chip.interconnect, Nodes)


def split_axis(row: dict[str, Any]) -> str:
    """Returns which of the axes that half of the cases are drawn for a row's mesh has; an empty text without one."""
    degrees = run_from_dict(row["run"], str(RESULTS)).mesh.degrees()
    return next((axis for axis in AXES if degrees[axis] > 1), "")


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, int, int, float, float, float, float]]:
    """Returns by group its name, plans, those that fit, and median and 90th percentile of the absolute errors."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            device = "GPU" if is_gpu(row) else row["compiler"]
            for name in (
                "",
                f", {device}",
                f", {'with ' + ' or '.join(AXES) if split_axis(row) else 'other meshes'}",
            ):
                groups.setdefault(row["set"] + name, []).append(row)
    result = []
    for name, group in groups.items():
        time_errors, memory_errors = (
            sorted(map(abs, column)) for column in zip(*errors(group), strict=True)
        )
        cells = [f(e) for e in (time_errors, memory_errors) for f in (statistics.median, ninetieth)]
        result.append((name, len(group), sum(row["fits"] for row in group), *cells))
    return result  # type: ignore[return-value]


def ninetieth(values: list[float]) -> float:
    """Returns the smallest of sorted values that nine tenths of them do not exceed."""
    return values[min(len(values) - 1, -(-9 * len(values) // 10) - 1)]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the summary as Markdown."""
    lines = [
        "| plans | number | fit | time, median error | 90th | memory, median error | 90th |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, count, fitting, *cells in summary(rows):
        lines.append(
            f"| {name} | {count} | {fitting} | {' | '.join(f'{cell:.1%}' for cell in cells)} |"
        )
    return "\n".join(lines) + "\n"


def phase_table(rows: list[dict[str, Any]]) -> str:
    """Returns planned and compiled memory of each phase as Markdown, for the plans whose phases were compiled."""
    head = " | ".join(f"{phase}, GiB" for phase in PHASES)
    lines = [
        f"| machine | model | tokens | plan | {head} |",
        "|---|---|---|---|" + "---|" * len(PHASES),
    ]
    for row in rows:
        compiled = row.get("phases")
        if not compiled:
            continue
        on, model, _ = row["name"].split()
        training = row["run"]["training"]
        cells = []
        for phase in PHASES:
            planned = row["planned_phases"][phase]
            error = planned / compiled[phase] - 1
            cells.append(f"{planned / 2**30:.1f} / {compiled[phase] / 2**30:.1f} ({error:+.1%})")
        size = f"{training['batch']} x {training['seq']}"
        lines.append(f"| {on} | {model} | {size} | {row['plan']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def row_table(rows: list[dict[str, Any]]) -> str:
    """Returns one line of Markdown for each plan."""
    lines = [
        "| machine | model | tokens | plan | compiler | planned, GiB | compiled, GiB | error | step planned "
        "| simulated | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        on, model, _ = row["name"].split()
        training = row["run"]["training"]
        start = (
            f"| {on} | {model} | {training['batch']} x {training['seq']} | {row['plan']} | "
            f"{row['compiler']} | {row['planned'] / 2**30:.1f} |"
        )
        if "error" in row:
            told = [line for line in row["error"].splitlines() if line.strip()]
            reason = next(
                (line.partition("because: ")[2] for line in told if "because: " in line), told[-1]
            )
            lines.append(f"{start} {reason[:80].strip()} | | {row['planned_seconds']:.3g} s | | |")
            continue
        ((seconds, size),) = errors([row])
        lines.append(
            f"{start} {row['compiled'] / 2**30:.1f} | {size:+.0%} | {row['planned_seconds']:.3g} s | "
            f"{row['compiled_seconds']:.3g} s | {seconds:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]]) -> None:
    """Plots planned over compiled step time and memory, with a colour for each set of rows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "compiled-plans"
    figure, both = plt.subplots(1, 2, figsize=(9.6, 4.6))
    columns = (
        ("compiled_seconds", "planned_seconds", "step, s", 1.0),
        ("compiled", "planned", "memory, GiB", 2**30),
    )
    for axes, (compiled, planned, label, unit) in zip(both, columns, strict=True):
        axes.set_prop_cycle(color=[light for light, _ in PALETTE.values()])
        for kind in dict.fromkeys(row["set"] for row in rows):
            found = [r for r in rows if "error" not in r and r["set"] == kind]
            points = [(r[compiled] / unit, r[planned] / unit) for r in found]
            axes.scatter(
                *zip(*points, strict=True), s=18, label=f"{kind} ({len(points)})", alpha=0.8
            )
        ends = (
            min(axes.get_xlim()[0], axes.get_ylim()[0], 1.0),
            max(axes.get_xlim()[1], axes.get_ylim()[1]),
        )
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.set(
            xscale="log", yscale="log", xlabel=f"compiled: {label}", ylabel=f"planned: {label}"
        )
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", type=int, nargs="+", default=range(CASES), help="numbers of the cases to compile"
    )
    parser.add_argument(
        "--set", choices=SETS, default="choices", dest="drawn", help="which plans are drawn"
    )
    parser.add_argument("--list", action="store_true", help="print the plans, compile nothing")
    parser.add_argument(
        "--again", action="append", default=[], help="compile cases whose name has this word again"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder that receives plans, censuses and compiled programs"
    )
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args()
    if given.list:
        for name, plan in DRAWN[given.drawn](given.only):
            print(
                f"{name}: {plan.name}, {plan.estimate.bytes / 2**30:.1f} GiB, {plan.estimate.seconds:.3g} s"
            )
        return
    rows = (
        json.loads(RESULTS.read_text())
        if given.table
        else compile_cases(given.only, given.again, given.keep, given.drawn)
    )
    rows = [with_prediction(row) for row in rows]
    put_table(PAGE, "compiled_plans.py", table(rows))
    put_table(PAGE, "compiled_plans.py phases", phase_table(rows))
    put_rows(
        "compiled_plans.py",
        "First choices of cases drawn at random: planned and compiled",
        row_table(rows),
    )
    plot(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

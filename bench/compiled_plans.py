"""Planned step time and memory against compiled, over plans drawn at random: `python bench/compiled_plans.py`.

Needs the `tpu` extra, and for GPUs the wheels that `meshwright prove` names. For each machine legal meshes, pipeline
schedules, remat policies and numbers of microbatches are drawn until the planner finds one that fits; every drawn plan
is compiled whole and its schedule simulated. Every other plan may be used to set the planner's constants (`fit`), the
rest is `held-out`. A row goes to bench/results/compiled_plans.json as soon as it is there, and rows that are there
are not compiled again (`--again NAME`); what the planner predicts is computed anew each time. The summary goes to
docs/plan.md, the rows to results/compiled_plans.md, the picture to docs/img/compiled-plans.svg.
"""

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from page_table import put_rows, put_table

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.plan_file import write_plan
from meshwright.planner.search import (
    STAGE_SAVES,
    Plan,
    accumulation_counts,
    candidate_meshes,
    candidate_schedules,
    price_run,
    remat_policies,
)
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_from_dict, run_to_dict
from meshwright.views.colours import PALETTE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "compiled_plans.json"
PAGE = ROOT / "docs" / "plan.md"
PICTURE = ROOT / "docs" / "img" / "compiled-plans.svg"

# Machine, model, sequences for each device, tokens of each, plans drawn.
MACHINES = [
    ("a100:8", "llama3-8b", 4, 2048, 6),
    ("a100:16", "llama2-13b", 4, 4096, 5),
    ("h100:8", "llama3-8b", 4, 4096, 6),
    ("h100:8", "qwen3-30b-a3b", 2, 4096, 4),
    ("h100:32", "llama2-7b", 8, 4096, 6),
    ("h100:64", "qwen3-32b", 4, 4096, 6),
    ("h100:128", "llama3-70b", 4, 8192, 6),
    ("h200:64", "mixtral-8x7b", 4, 4096, 5),
    ("b200:8", "qwen3-14b", 4, 4096, 5),
    ("b200:64", "llama2-70b", 4, 4096, 6),
    ("v5e:4x4", "llama32-3b", 4, 4096, 3),
    ("v5e:16x16", "llama3-8b", 2, 4096, 3),
    ("v6e:4x4", "llama3-8b", 4, 4096, 3),
    ("v6e:8x16", "qwen3-14b", 2, 8192, 3),
    ("v5p:2x2x4", "llama2-7b", 4, 4096, 3),
    ("v5p:4x4x4", "qwen3-32b", 4, 4096, 3),
    ("v5p:4x4x8", "llama2-70b", 4, 4096, 3),
    ("tpu7x:2x2x4", "llama2-13b", 4, 4096, 3),
]


def kind_of(mesh: MeshShape) -> str:
    """Returns the axis beside `data` and `fsdp` that a mesh is drawn for."""
    return next((axis for axis in ("stage", "context", "expert", "tensor") if mesh.degrees()[axis] > 1), "fsdp")


def drawn_plans(number: int, machine: tuple[str, str, int, int, int]) -> Iterable[tuple[str, Plan]]:
    """Yields named plans that fit by the planner: a kind of mesh, then a mesh of it, its schedule and remat policy."""
    on, model, sequences, seq, count = machine
    target = parse_target(on)
    run = find_recipe(model)
    training = dataclasses.replace(run.training, batch=sequences * target.devices, seq=seq)
    run = dataclasses.replace(run, training=training)
    kinds: dict[str, list[MeshShape]] = {}
    for mesh in candidate_meshes(run, target):
        kinds.setdefault(kind_of(mesh), []).append(mesh)
    generator = random.Random(number)
    for drawn in range(count):
        while True:
            # The first plan of a machine shards over `fsdp` and `data` alone, as most runs do.
            kind = "fsdp" if drawn == 0 else generator.choice(sorted(kinds))
            plan = draw(generator, run, target, generator.choice(kinds[kind]))
            if plan is not None and plan.estimate.fits:
                break
        yield f"{on} {model} {drawn}", plan


def draw(generator: random.Random, run: Run, target: Target, mesh: MeshShape) -> Plan | None:
    """Returns a plan on a mesh with a schedule, policy and number of microbatches at random; None if it is refused."""
    scheduled = generator.choice(list(candidate_schedules(run, mesh)))
    saves = generator.choice(STAGE_SAVES) if mesh.stage > 1 else None
    changes: dict[str, Any] = {"remat": generator.choice(remat_policies(target, saves))}
    if mesh.stage > 1:
        changes["stage_saves"] = saves
    else:
        changes["microbatches"] = generator.choice(accumulation_counts(scheduled, mesh))
    try:
        changed = dataclasses.replace(scheduled.training, **changes)
        return price_run(dataclasses.replace(scheduled, training=changed), target)
    except ConfigError:
        return None


def compile_plan(plan: Plan) -> dict[str, Any]:
    """Proves a plan in a process of its own; returns its compiled bytes, simulated seconds, FLOPs and versions."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        write_plan(plan, plan.target, file)
        words = [sys.executable, "-m", "meshwright", "prove", str(file), "--json", "--fresh", "--limit", "3000"]
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
        "compiled_seconds": census["simulated_schedule"]["step_seconds"],
        "exposed": census["simulated_schedule"]["exposed"],
        "flops": census["flops"]["compiled"],
        "versions": census["versions"],
    }


def compile_all(again: list[str]) -> list[dict[str, Any]]:
    """Compiles the plans that have no row yet; returns all rows."""
    rows: dict[str, dict[str, Any]] = {}
    if RESULTS.is_file():
        rows = {row["name"]: row for row in json.loads(RESULTS.read_text())}
    for number, machine in enumerate(MACHINES):
        for name, drawn in drawn_plans(number, machine):
            plan = drawn
            if name in rows:
                if not any(word in name for word in again):
                    continue
                plan = price_run(run_from_dict(rows[name]["run"], str(RESULTS)), drawn.target)
            rows[name] = {"name": name, "run": run_to_dict(plan.run), **compile_plan(plan)}
            RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
            print(name, plan.name, {k: v for k, v in rows[name].items() if k not in ("name", "run")}, flush=True)
    return list(rows.values())


def with_prediction(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the planner's present prediction of its plan."""
    plan = price_run(run_from_dict(row["run"], str(RESULTS)), parse_target(row["name"].split()[0]))
    return {**row, "plan": plan.name, "planned": plan.estimate.bytes, "planned_seconds": plan.estimate.seconds}


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


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, int, float, float, float, float]]:
    """Returns name, number, median and 90th percentile of the absolute errors of time, and of memory, by group."""
    groups: dict[str, list[dict[str, Any]]] = {"all": rows, "fit": rows[::2], "held-out": rows[1::2]}
    for row in rows:
        groups.setdefault("GPU" if is_gpu(row) else "TPU", []).append(row)
    result = []
    for name, group in groups.items():
        time_errors, memory_errors = (sorted(map(abs, column)) for column in zip(*errors(group), strict=True))
        cells = [f(e) for e in (time_errors, memory_errors) for f in (statistics.median, ninetieth)]
        result.append((name, len(time_errors), *cells))
    return result  # type: ignore[return-value]


def ninetieth(values: list[float]) -> float:
    """Returns the smallest of sorted values that nine tenths of them do not exceed."""
    return values[min(len(values) - 1, -(-9 * len(values) // 10) - 1)]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the summary as Markdown."""
    lines = [
        "| plans | number | time, median error | 90th | memory, median error | 90th |",
        "|---|---|---|---|---|---|",
    ]
    for name, count, *cells in summary(rows):
        lines.append(f"| {name} | {count} | {' | '.join(f'{cell:.1%}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def row_table(rows: list[dict[str, Any]]) -> str:
    """Returns one line of Markdown for each plan."""
    lines = [
        "| machine | model | tokens | plan | planned, GiB | compiled, GiB | error | step planned | simulated | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        on, model, _ = row["name"].split()
        training = row["run"]["training"]
        start = (
            f"| {on} | {model} | {training['batch']} x {training['seq']} | {row['plan']} | "
            f"{row['planned'] / 2**30:.1f} |"
        )
        if "error" in row:
            told = [line for line in row["error"].splitlines() if line.strip()]
            reason = next((line.partition("because: ")[2] for line in told if "because: " in line), told[-1])
            lines.append(f"{start} {reason[:80].strip()} | | {row['planned_seconds']:.3g} s | | |")
            continue
        ((seconds, size),) = errors([row])
        lines.append(
            f"{start} {row['compiled'] / 2**30:.1f} | {size:+.0%} | {row['planned_seconds']:.3g} s | "
            f"{row['compiled_seconds']:.3g} s | {seconds:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]]) -> None:
    """Plots planned over compiled step time and memory, with a colour for each kind of machine."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "compiled-plans"
    figure, both = plt.subplots(1, 2, figsize=(9.6, 4.6))
    columns = (("compiled_seconds", "planned_seconds", "step, s", 1.0), ("compiled", "planned", "memory, GiB", 2**30))
    for axes, (compiled, planned, label, unit) in zip(both, columns, strict=True):
        axes.set_prop_cycle(color=[light for light, _ in PALETTE.values()])
        for kind in ("GPU", "TPU"):
            points = [
                (r[compiled] / unit, r[planned] / unit)
                for r in rows
                if "error" not in r and is_gpu(r) == (kind == "GPU")
            ]
            axes.scatter(*zip(*points, strict=True), s=18, label=f"{kind} ({len(points)})", alpha=0.8)
        ends = (min(axes.get_xlim()[0], axes.get_ylim()[0], 1.0), max(axes.get_xlim()[1], axes.get_ylim()[1]))
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=f"compiled: {label}", ylabel=f"planned: {label}")
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="append", default=[], help="compile rows whose name has this word again")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if given.table else compile_all(given.again)
    rows = [with_prediction(row) for row in rows]
    put_table(PAGE, "compiled_plans.py", table(rows))
    put_rows("compiled_plans.py", "Plans drawn at random: planned and compiled", row_table(rows))
    plot(rows)
    print(table(rows))


if __name__ == "__main__":
    main()

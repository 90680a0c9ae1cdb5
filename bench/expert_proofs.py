"""Best plans of mixtures of experts with and without the axis `expert`, planned against compiled.

`python bench/expert_proofs.py [--only NAME] [--from FOLDER]`. Needs the `tpu` extra, and for GPUs the wheels that
`meshwright prove` names. For each model and machine the fastest plan that fits is taken among those with `expert` and
among those without, both without stages and context, and compiled whole. Results go to bench/results/experts.json, the
table to bench/results/expert_proofs.md. --from takes what `prove --json` has written into FOLDER instead of compiling.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from compiled_plans import compile_plan, figures_of
from page_table import put_rows

from meshwright.config import MeshShape
from meshwright.errors import MeshwrightError
from meshwright.hardware.targets import parse_target
from meshwright.planner.plan_file import read_plan
from meshwright.planner.search import Plan, price_run, search
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.runs.recipe import find_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "experts.json"
MECHANISMS = RESULTS.with_name("expert_mechanisms.json")
"""Simulated steps without and with each mechanism, from `prove` on two commits or with two values of an option."""

# Model, machine, sequences, tokens of each.
CASES = [
    ("qwen3-30b-a3b", "h100:8", 16, 4096),
    ("mixtral-8x7b", "h100:8", 8, 4096),
    ("qwen3-30b-a3b", "h200:64", 256, 4096),
    ("mixtral-8x7b", "h200:64", 256, 4096),
    ("qwen3-235b-a22b", "h200:64", 256, 4096),
    ("qwen3-30b-a3b", "b200:64", 256, 4096),
    ("mixtral-8x7b", "b200:64", 256, 4096),
    ("qwen3-235b-a22b", "b200:64", 256, 4096),
    ("mixtral-8x7b", "v5p:4x4x8", 512, 4096),
    ("qwen3-30b-a3b", "v5p:4x4x8", 512, 4096),
    ("qwen3-235b-a22b", "v5p:4x4x8", 512, 4096),
]


def best_plans(case: tuple[str, str, int, int]) -> dict[str, Plan]:
    """Returns the fastest plan that fits without and with `expert`; where none does, full remat on the whole axis."""
    model, on, batch, seq = case
    run = find_recipe(model)
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, batch=batch, seq=seq))
    target = parse_target(on)
    try:
        found = [p for p in search(run, target).plans if p.mesh.stage == p.mesh.context == 1]
    except MeshwrightError:
        found = []
    best = {}
    for name, group in (
        ("none", [p for p in found if p.mesh.expert == 1]),
        ("expert", [p for p in found if p.mesh.expert > 1]),
    ):
        if group:
            best[name] = min(group, key=lambda p: p.estimate.seconds)
        else:
            mesh = MeshShape.parse(f"{'expert' if name == 'expert' else 'fsdp'}={target.devices}")
            full = dataclasses.replace(run.training, remat="full")
            best[name] = price_run(dataclasses.replace(run, mesh=mesh, training=full), target)
    return best


def needed_flops(plan: Plan) -> float:
    """Returns the FLOPs of a device's step: the model's, and what the remat policy and the loss compute again.

    Programs for GPUs have two forms of attention in branches, for whole and for packed sequences; the census counts the
    larger, as a step runs one.
    """
    training, work = plan.run.training, work_of(plan.placed)
    again = recomputed_roles(training.remat)
    matmuls = sum((3 + (m.role in again)) * m.flops for m in work.matmuls)
    attention = (3.5 + ("attention" in again)) * work.attention
    return training.microbatches * (matmuls + attention + 4 * work.unembedding.flops)


def prove(case: tuple[str, str, int, int], name: str, plan: Plan, given: Path | None) -> dict[str, Any]:
    """Compiles a plan, or reads what is in `given`; returns planned and compiled figures."""
    key = f"{case[0]}_{case[1].replace(':', '-')}_{'exp' if name == 'expert' else 'noexp'}"
    if given is not None:
        contents = read_plan(given / f"{key}.plan.json")
        plan = price_run(contents.run, parse_target(contents.target))
        compiled = figures_of((given / f"{key}.json").read_text())
    else:
        compiled = compile_plan(plan)
    row: dict[str, Any] = {
        "case": case, "experts over": name, "plan": plan.name, "planned": plan.estimate.bytes,
        "planned_seconds": plan.estimate.seconds, "needed_flops": needed_flops(plan),
    }  # fmt: skip
    return row | compiled if "compiled" in compiled else {**row, "error": "not compiled"}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "| model | machine | tokens | plan | planned, GiB | compiled, GiB | error | FLOPs, compiled / needed "
        "| step planned | step simulated | tokens/s per device |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        model, on, batch, seq = row["case"]
        start = f"| {model} | {on} | {batch} x {seq} | {row['plan']} | {row['planned'] / 2**30:.1f} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | {row['planned_seconds']:.3g} s | | |")
            continue
        per_device = batch * seq / row["compiled_seconds"] / parse_target(on).devices
        lines.append(
            f"{start} {row['compiled'] / 2**30:.1f} | {row['planned'] / row['compiled'] - 1:+.0%} | "
            f"{row['flops'] / row['needed_flops']:.2f} | {row['planned_seconds']:.3g} s | "
            f"{row['compiled_seconds']:.3g} s | {per_device:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def mechanisms() -> str:
    """Returns the effect of each mechanism alone, as Markdown."""
    lines = [
        "| mechanism | model | machine | mesh | tokens | step, s | what it changes | speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads(MECHANISMS.read_text()):
        where = " | ".join(row[name] for name in ("mechanism", "model", "machine", "mesh", "tokens"))
        steps = f"{row['before']:.4g} to {row['after']:.4g}"
        changes = ", ".join(f"{name} {before:.4g} to {after:.4g}" for name, (before, after) in row["changes"].items())
        lines.append(f"| {where} | {steps} | {changes} | {row['before'] / row['after'] - 1:+.0%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="models or machines to compile again, by name")
    parser.add_argument("--from", dest="given", type=Path, help="folder with NAME.plan.json and NAME.json")
    given = parser.parse_args()
    old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = []
    for case in CASES:
        kept = [row for row in old if tuple(row["case"]) == case]
        if given.only and not {case[0], case[1]} & set(given.only) and kept:
            rows += kept
            continue
        rows += [prove(case, name, plan, given.given) for name, plan in best_plans(case).items()]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    title = "Plans with and without the axis `expert`, planned and compiled"
    put_rows("expert_proofs.py", title, f"{table(rows)}\n{mechanisms()}")
    print(table(rows))


if __name__ == "__main__":
    main()

"""Best plans of mixtures of experts, planned against compiled, and what has been published for the same machine.

`python bench/expert_proofs.py [--only NAME] [--keep FOLDER] [--table]`. Needs the `tpu` extra, and for GPUs the wheels
that `meshwright prove` names. For each model and machine the first choice is taken among those without and with
`expert`, both without stages and context, and for some of all plans; it is compiled whole. A row goes to
bench/results/experts.json as soon as it is there, the table to bench/results/expert_proofs.md. --only compiles cases by
model, machine or kind of plan, and keeps the rows of the others; --table compiles nothing.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

from compiled_plans import compile_plan
from page_table import put_rows

from meshwright.config import MeshShape
from meshwright.errors import MeshwrightError
from meshwright.hardware.interconnect import map_axes
from meshwright.hardware.targets import parse_target
from meshwright.planner.search import Plan, price_run, search
from meshwright.planner.work import recomputed_roles, work_of
from meshwright.runs.recipe import change_fields, find_recipe
from meshwright.runs.run_file import run_from_dict, run_to_dict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "experts.json"
MECHANISMS = RESULTS.with_name("expert_mechanisms.json")
"""Simulated steps without and with each mechanism, from `prove` on two commits or with two values of an option."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Model and batch on a machine, with the tokens per second of a device that others have published for it."""

    model: str
    on: str
    batch: int
    seq: int = 4096
    precision: str = "compute"
    published: float = 0.0
    source: str = ""
    kinds: tuple[str, ...] = ("none", "expert")
    """Plans that are compiled: the fastest without and with `expert`, and the `best` of all."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over devices; NVIDIA's recipes sum them in bfloat16."""
    exchange: Literal["compute", "fp8"] = "compute"
    """Type in which rows are sent to experts; DeepSeek-AI sent them in fp8."""

    @property
    def key(self) -> tuple[str, str, int, int, str, str, str]:
        """Name of the case in the results."""
        return self.model, self.on, self.batch, self.seq, self.precision, self.reduce, self.exchange


ALL = ("none", "expert", "best")
CASES = [
    Case("qwen3-30b-a3b", "h100:8", 16),
    Case("mixtral-8x7b", "h100:8", 8),
    Case(
        "qwen3-30b-a3b",
        "h100:16",
        256,
        4096,
        "compute",
        13_011,
        "Megatron-Bridge on 16 H100, bfloat16 (13,011 in its card of the model: `bench/foresight/records.py`)",
        ALL,
    ),
    Case(
        "qwen3-30b-a3b",
        "h100:16",
        256,
        published=13_011,
        source="gradients summed in bfloat16 as in its recipes (`grad_reduce_in_fp32 = False`)",
        kinds=("best",),
        reduce="bfloat16",
    ),
    Case("qwen3-30b-a3b", "h200:64", 256),
    Case("mixtral-8x7b", "h200:64", 256),
    Case("qwen3-235b-a22b", "h200:64", 256),
    Case(
        "qwen3-30b-a3b",
        "b200:64",
        256,
        4096,
        "compute",
        14_796,
        "Megatron-Bridge on B200, bfloat16, as the issue states it: no public source was found",
    ),
    Case("mixtral-8x7b", "b200:64", 256),
    Case("qwen3-235b-a22b", "b200:64", 256),
    Case(
        "qwen3-235b-a22b",
        "b200:64",
        256,
        4096,
        "mxfp8",
        3_776,
        "Megatron-Bridge on 256 B200, MXFP8",
        ("expert", "best"),
    ),
    Case(
        "deepseek-v3",
        "h100:2048",
        15_360,
        4096,
        "fp8",
        1_544,
        "DeepSeek-AI on 2,048 H800, fp8, 19.9 s",
        ("best",),
        exchange="fp8",
    ),
    Case(
        "deepseek-v3",
        "v5p:8x8x16",
        15_360,
        4096,
        "compute",
        542,
        "MaxText on 512 v5p, 8,192 tokens",
        ("best",),
    ),
    Case("mixtral-8x7b", "v5p:4x4x8", 512),
    Case("qwen3-30b-a3b", "v5p:4x4x8", 512),
    Case("qwen3-235b-a22b", "v5p:4x4x8", 512),
]


def run_of(case: Case) -> Any:
    """Returns the run of a case, without a mesh."""
    run = find_recipe(case.model)
    training = dataclasses.replace(
        run.training,
        batch=case.batch,
        seq=case.seq,
        matmul_precision=case.precision,
        reduce_dtype=case.reduce,
    )
    run = dataclasses.replace(run, training=training)
    return change_fields(
        run, None, {} if case.exchange == "compute" else {"expert_exchange": case.exchange}
    )


def best_plans(case: Case) -> dict[str, Plan]:
    """Returns the first choice of each kind; of meshes where nothing fits, full remat on the whole axis."""
    run, target = run_of(case), parse_target(case.on)
    try:
        found = search(run, target).plans
    except MeshwrightError:
        found = ()
    plain = [p for p in found if p.mesh.stage == p.mesh.context == 1]
    groups = {
        "none": [p for p in plain if p.mesh.expert == 1],
        "expert": [p for p in plain if p.mesh.expert > 1],
        "best": list(found),
    }
    best: dict[str, Plan] = {}
    for kind in case.kinds:
        if groups[kind]:
            plan = groups[kind][0]
        else:
            mesh = MeshShape.parse(f"{'expert' if kind == 'expert' else 'fsdp'}={target.devices}")
            full = dataclasses.replace(run.training, remat="full")
            plan = price_run(dataclasses.replace(run, mesh=mesh, training=full), target)
        if plan.name not in [p.name for p in best.values()]:
            best[kind] = plan
    return best


def needed_flops(plan: Plan) -> float:
    """Returns the FLOPs of a device's step: the model's, and what remat policies and the loss compute again.

    Saved layers have the policy `projections`. Programs for GPUs have two forms of attention in branches, for whole and
    for packed sequences; the census counts the larger, as a step runs one.
    """
    training, work = plan.run.training, work_of(plan.placed)
    saved = training.saved_layers / len(plan.placed.layout.spec.layers)
    total = training.microbatches * 4 * work.unembedding.flops
    for remat, share in ((training.remat, 1 - saved), ("projections", saved)):
        again = recomputed_roles(remat)
        matmuls = sum((3 + (m.role in again)) * m.flops for m in work.matmuls)
        attention = (3.5 + ("attention" in again)) * work.attention
        total += training.microbatches * share * (matmuls + attention)
    return total


def exchange_of(census: dict[str, Any], plan: Plan) -> dict[str, float]:
    """Returns the seconds that rows travel to experts and back, those of them exposed, and the bytes a device sends.

    A ring over several nodes crosses the network once for all devices of a node; in an exchange each device sends its
    own rows.
    """
    mapping, sums = (
        map_axes(plan.mesh, plan.target),
        dict.fromkeys(("seconds", "exposed", "network", "inside"), 0.0),
    )
    for entry in census["ledger"]:
        span = mapping.span(tuple(entry["axes"] or ()))
        n = entry["group_size"]
        inside = n if span is None or plan.target.domains == 1 else span.devices // span.domains
        if entry["kind"].endswith("all-to-all"):
            crossing, within = (n - inside) / max(n - 1, 1), (inside - 1) / max(n - 1, 1)
        else:
            crossing, within = (1 / inside if n > inside else 0.0), float(inside > 1)
        sums["network"] += entry["sent"] * crossing
        sums["inside"] += entry["sent"] * within
        if entry["kind"] == "ragged-all-to-all":
            sums["seconds"] += entry.get("seconds", 0.0)
            sums["exposed"] += entry.get("exposed", 0.0)
    return sums


def prove(case: Case, kind: str, plan: Plan, kept: Path | None) -> dict[str, Any]:
    """Compiles a plan; returns planned and compiled figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept / "-".join((*map(str, case.key), kind)) if kept else Path(temporary)
        compiled, saved = compile_plan(plan, folder), folder / "census.json"
        census = json.loads(saved.read_text()) if saved.is_file() else None
    row: dict[str, Any] = {
        "case": case.key, "experts over": kind, "plan": plan.name,
        "run": run_to_dict(plan.run), "planned": plan.estimate.bytes, "planned_seconds": plan.estimate.seconds,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if "compiled" not in compiled or census is None:
        return {**row, "error": "not compiled"}
    schedule = census["simulated_schedule"]
    return row | compiled | {
        "exchange": exchange_of(census, plan), "by_kind": schedule["by_kind"], "exposed": schedule["exposed"],
        "bubble": schedule["bubble"],
    }  # fmt: skip


def with_prediction(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the planner's present prediction of its plan, and the FLOPs that it needs."""
    plan = price_run(run_from_dict(row["run"], str(RESULTS)), parse_target(row["case"][1]))
    figures = {"planned": plan.estimate.bytes, "planned_seconds": plan.estimate.seconds}
    return {**row, **figures, "needed_flops": needed_flops(plan)}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "| model | machine | tokens | plan | compiled on | planned, GiB | compiled, GiB | error "
        "| FLOPs, compiled / needed | step planned | step simulated | error | exchange exposed "
        "| KiB per token: network, inside a node or slice | tokens/s per device | published | ratio |",
        "|---" * 17 + "|",
    ]
    published = {case.key: case.published for case in CASES}
    for row in rows:
        model, on, batch, seq, precision, reduce, exchange_type = row["case"]
        words = row["plan"] if precision == "compute" else f"{row['plan']}, {precision}"
        words += "" if reduce == "float32" else f", gradients summed in {reduce}"
        words += "" if exchange_type == "compute" else f", rows sent in {exchange_type}"
        tokens = batch * seq / parse_target(on).devices
        start = f"| {model} | {on} | {batch} x {seq} | {words} | {row.get('date', 'older code')} "
        start += f"| {row['planned'] / 2**30:.1f} |"
        if "error" in row:
            reached = f"{tokens / row['planned_seconds']:,.0f} planned"
            lines.append(
                f"{start} {row['error']} | | | {row['planned_seconds']:.3g} s | | | | | {reached} | | |"
            )
            continue
        cells = [f"{row['compiled'] / 2**30:.1f}", f"{row['planned'] / row['compiled'] - 1:+.0%}"]
        cells += [f"{row['flops'] / row['needed_flops']:.2f}", f"{row['planned_seconds']:.3g} s"]
        cells += [
            f"{row['compiled_seconds']:.3g} s",
            f"{row['planned_seconds'] / row['compiled_seconds'] - 1:+.0%}",
        ]
        exchange = row.get("exchange")
        if exchange:
            of = exchange["exposed"] / exchange["seconds"] if exchange["seconds"] else None
            cells += ["" if of is None else f"{of:.0%}"]
            cells += [
                f"{exchange['network'] / tokens / 1024:,.0f}, {exchange['inside'] / tokens / 1024:,.0f}"
            ]
        else:
            cells += ["", ""]
        reached = tokens / row["compiled_seconds"]
        theirs = published.get(tuple(row["case"]), 0.0)
        cells += [
            f"{reached:,.0f}",
            *((f"{theirs:,.0f}", f"{reached / theirs:.2f}") if theirs else ("", "")),
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def errors(rows: list[dict[str, Any]]) -> str:
    """Returns the planner's median errors over the compiled rows, as a paragraph."""
    sentences = []
    for name, group in (
        ("all compiled rows", rows), ("rows with a date", [r for r in rows if "date" in r]),
    ):  # fmt: skip
        found = [row for row in group if "error" not in row]
        if found:
            time, memory = (
                statistics.median(abs(row[planned] / row[compiled] - 1) for row in found)
                for planned, compiled in (
                    ("planned_seconds", "compiled_seconds"),
                    ("planned", "compiled"),
                )
            )
            sentences.append(f"{name} ({len(found)}): step {time:.1%}, memory {memory:.1%}")
    sources = "; ".join(
        f"{case.model} on {case.on}: {case.source}" for case in CASES if case.source
    )
    published = f"Published steps are measured, ours simulated; batches may differ: {sources}."
    return f"Median error of the planner, {'; '.join(sentences)}.\n\n{published}\n"


def seconds_of(rows: list[dict[str, Any]]) -> str:
    """Returns what the simulated steps that are slower than published ones spend their seconds on, a line for each."""
    lines, published = [], {case.key: case.published for case in CASES}
    for row in rows:
        (model, on, batch, seq, *_), theirs = row["case"], published.get(tuple(row["case"]), 0.0)
        if (
            "by_kind" in row
            and batch * seq / row["compiled_seconds"] / parse_target(on).devices < theirs
        ):
            kinds = {kind: n for kind, n in row["by_kind"].items() if kind != "exposed"} | {
                f"exposed over {axes}": n for axes, n in row["exposed"].items()
            }
            kinds["bubble"] = row["bubble"]
            most = sorted(
                ((n, kind) for kind, n in kinds.items() if n > 0.02 * row["compiled_seconds"]),
                reverse=True,
            )
            spent = ", ".join(f"{n:.3g} s {kind}" for n, kind in most)
            lines.append(
                f"- {model} on {on}, {row['plan']}: of {row['compiled_seconds']:.3g} s {spent}."
            )
    return (
        "Seconds of the simulated steps that are slower than the published ones:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def mechanisms() -> str:
    """Returns the effect of each mechanism alone, as Markdown."""
    lines = [
        "| mechanism | model | machine | mesh | tokens | step, s | what it changes | speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads(MECHANISMS.read_text()):
        where = " | ".join(
            row[name] for name in ("mechanism", "model", "machine", "mesh", "tokens")
        )
        steps = f"{row['before']:.4g} to {row['after']:.4g}"
        changes = ", ".join(
            f"{name} {before:.4g} to {after:.4g}"
            for name, (before, after) in row["changes"].items()
        )
        lines.append(f"| {where} | {steps} | {changes} | {row['before'] / row['after'] - 1:+.0%} |")
    return "\n".join(lines) + "\n"


FLOAT8 = """On an H100 experts stay in bfloat16 where a run multiplies in fp8, since their kernel is slower in fp8 there
(docs/log.md, "One H100"). Of B200 nothing is measured: its rates of low precision are the datasheet's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="model, machine or kind of plan to compile again",
    )
    parser.add_argument(
        "--keep", type=Path, help="folder that receives plans, censuses and compiled programs"
    )
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args()
    rows = {
        (tuple(row["case"]), row["experts over"]): row for row in json.loads(RESULTS.read_text())
    }
    for case in () if given.table else CASES:
        only = set(given.only)
        kinds = [
            kind
            for kind in case.kinds
            if (
                only <= {case.model, case.on, case.precision, case.reduce, case.exchange, kind}
                if only
                else (case.key, kind) not in rows
            )
        ]
        for kind, plan in best_plans(case).items() if kinds else ():
            if kind in kinds:
                rows[case.key, kind] = prove(case, kind, plan, given.keep)
                RESULTS.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    keys = [(case.key, kind) for case in CASES for kind in case.kinds]
    shown = [with_prediction(rows[key]) for key in keys if key in rows]
    title = "Mixtures of experts: plans, compiled programs and published figures"
    rows_and_figures = "\n".join((table(shown), errors(shown), seconds_of(shown), mechanisms()))
    put_rows("expert_proofs.py", title, f"{FLOAT8}\n\n{rows_and_figures}")
    print(table(shown), errors(shown), seconds_of(shown), sep="\n")


if __name__ == "__main__":
    main()

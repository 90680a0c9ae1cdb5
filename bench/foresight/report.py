"""Predicted against published step times: `python bench/foresight/report.py` writes docs/foresight.md and rows.md.

It also writes every other error of a prediction that the pages print, between the marks of `page_table.py`, and all of
them to bench/results/foresight.json.
"""

import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fit import FAMILIES, FITTED, current, error, family_of, halves
from other_programs import estimate_program
from rows import Row, read_rows, read_vtrain

from meshwright.hardware.chips import Torus
from meshwright.planner.estimate import Estimate
from meshwright.views.colours import PALETTE

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

from page_table import put_figures, put_table  # noqa: E402  (of the folder above)

SCRIPT = "foresight/report.py"
RESULTS = ROOT / "bench" / "results" / "foresight.json"
LEFT_OUT = ROOT / "bench" / "results" / "foresight-left-out.json"
"""Errors of each program's rows with constants fitted without it, written by left_out.py."""
MEASURED = ROOT / "bench" / "results" / "h100.json"
"""Steps that were measured on one H100."""

MARKS = {
    "hidden of 3072 and more": ("hidden sizes of 3072 and more", 0.05, 0.15),
    "`expert` axis": ("plans with `expert`", 0.10, None),
    "mxfp8": ("mxfp8", 0.08, None),
    "B200 and GB200": ("B200 and GB200", 0.08, None),
    "vTrain's predictions for 2 to 8 A100": ("small models", 0.12, None),
}
"""Rows of the table -> what they are called, and the marks of their median error and 90th percentile."""

CAUSES = {
    ("P471", "P477"): (
        "Qwen3 30B, NeMo 25.11",
        "the next release takes a third of the time on the first; 9 and 32 ms per layer and microbatch are not work of "
        "the GPU",
    ),
    ("V-multi-15", "V-multi-20"): (
        "3.6B, `tensor=8`",
        "unexplained: the rows of 18B with `tensor=8` are closer",
    ),
    ("P010",): (
        "GPT-OSS, TPU7x",
        "experts' outputs offloaded to the host; windows are priced as skipped",
    ),
    ("V-multi-43", "V-multi-80"): (
        "39B, `stage=16,tensor=2`",
        "memory at its limit is likely",
    ),
    ("P470",): (
        "GPT-OSS, B200, NeMo 25.11",
        "the next release is closer; sinks of attention have no price",
    ),
    ("P139", "P140"): (
        "torchtitan, fp8 rowwise",
        "slower than bfloat16 with `tensor` only (pytorch/pytorch issue 149990); bytes do not explain it",
    ),
    ("P154",): ("GPT 1.7B, H100", "unexplained; a run of 48 GPUs"),
    ("P550", "P577"): ("MPT on full A100", "memory at its limit is likely"),
    ("P266",): ("fuji 7B, four slices of v5e", "gradients over DCN are taken to overlap"),
    ("P404", "P427"): (
        "405B in NVFP4, GB300",
        "rotations and rounding of NVFP4 have no price",
    ),
}
"""Rows with the largest errors -> what they are, and what is known of the cause."""

ALONE = {
    "v4": 0.89, "v5e": 0.877, "v5p": 0.902, "v6e": 0.705, "tpu7x": 0.814,
    "a100": 0.87, "h100": 0.80, "b200": 0.776, "b300": 0.776,
}  # fmt: skip
"""Fraction of peak of one large bfloat16 matmul alone, which needs no training run. TPUs: cycles that the compiler
estimates for [8192, 8192] x [8192, 16384] (v4: as v5e and v5p); GPUs: best of many shapes, stas00/ml-engineering,
compute/accelerator (B300: as B200)."""

KINDS: dict[str, Callable[[Row], bool]] = {
    "all rows": lambda row: True,
    "bfloat16": lambda row: not is_low(row),
    "below bfloat16": lambda row: is_low(row),
    "pipeline or context": lambda row: (
        row.placed.layout.shape.stage > 1 or row.placed.layout.shape.context > 1
    ),
}
CLASSES: dict[str, Callable[[Row], bool]] = {
    "hidden of 3072 and more": lambda row: row.placed.layout.spec.width >= 3072,
    "`expert` axis": lambda row: row.placed.layout.shape.expert > 1,
    "`tensor` axis": lambda row: row.placed.layout.shape.tensor > 1,
    "mxfp8": lambda row: row.placed.run.training.matmul_precision == "mxfp8",
    "B200 and GB200": lambda row: family_of(row) == "b200",
    "vTrain, 64 to 512 A100": lambda row: row.id.startswith("V-multi"),
}


def is_low(row: Row) -> bool:
    """Whether a row's matmuls are below bfloat16."""
    return row.placed.run.training.matmul_precision != "compute"


def results_of(rows: list[Row]) -> dict[str, tuple[Row, Estimate, float]]:
    """Returns for each row its estimate, and predicted over measured step time less one."""
    results = {}
    for row in rows:
        predicted = estimate_program(row.placed, row.target, row.software)
        results[row.id] = (row, predicted, predicted.seconds / row.measured - 1)
    return results


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns median and 90th percentile of the absolute errors, and the median of the signed ones."""
    values = list(values)
    absolute = sorted(abs(v) for v in values)
    return {
        "rows": len(values), "median": statistics.median(absolute),
        "90th": absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))], "bias": statistics.median(values),
    }  # fmt: skip


def fits(row: Row, predicted: Estimate) -> bool:
    """Returns whether a step fits. Other phases of a training are only this package's."""
    return row.bytes(predicted) * predicted.target.chip.fragmentation <= predicted.hbm_bytes


def sweeps(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each model, machine, batch, precision and program that differ in layout only."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        training = row.placed.run.training
        facts = (
            row.model,
            row.target,
            f"{training.batch} x {training.seq}",
            training.matmul_precision,
            row.system,
        )
        groups[" ".join(map(str, facts))].append(row)

    def layouts(group: list[Row]) -> int:
        runs = [row.placed.run for row in group]
        return len({(run.mesh, run.training.microbatches, run.training.remat) for run in runs})

    return {name: group for name, group in groups.items() if layouts(group) > 1}


def regrets(rows: list[Row]) -> dict[str, tuple[int, float]]:
    """Returns for each sweep its rows, and how much slower the layout predicted fastest is than the fastest."""
    seconds = {name: predicted.seconds for name, (_, predicted, _) in results_of(rows).items()}
    result = {}
    for name, group in sweeps(rows).items():
        chosen = min(group, key=lambda row: seconds[row.id])
        result[name] = (len(group), chosen.measured / min(row.measured for row in group) - 1)
    return result


def without_the_chip(rows: list[Row]) -> dict[str, float]:
    """Returns each row's error with the fractions of its chip taken from the other chips of its kind."""
    fitted = current()
    measured = {family_of(row) for row in rows}
    families = [family for family in FAMILIES if family in measured]
    kinds = {name: isinstance(_chip_of(rows, name).interconnect, Torus) for name in families}
    result = {}
    for family in families:
        values = dict(fitted)
        for owner, name in FITTED:
            others = [
                o for o, n in FITTED if n == name and o != family and kinds.get(o) == kinds[family]
            ]
            if owner != family:
                continue
            if name == "matmul":
                ratios = [fitted[o, name] / ALONE[o] for o in others]
                values[owner, name] = min(1.0, ALONE[family] * statistics.mean(ratios))
            else:
                values[owner, name] = (
                    statistics.mean(fitted[o, name] for o in others) if others else 1.0
                )
        result |= {
            row.id: math.exp(error(row, values)) - 1 for row in rows if family_of(row) == family
        }
    return result


def _chip_of(rows: list[Row], family: str) -> object:
    return next(row.target.chip for row in rows if family_of(row) == family)


def baseline(rows: list[Row], group: Callable[[Row], object]) -> dict[str, float]:
    """Returns each row's error where all rows of a group have one MFU, the median of those to fit on."""
    fitted, _ = halves(rows)
    mfu: dict[object, list[float]] = defaultdict(list)
    for row in fitted:
        mfu[group(row)].append(_flops(row) / row.measured)
    overall = statistics.median(value for values in mfu.values() for value in values)
    return {
        row.id: _flops(row) / statistics.median(mfu.get(group(row), [overall])) / row.measured - 1
        for row in rows
    }


def _flops(row: Row) -> float:
    """Model FLOPs of a device over its peak in bfloat16: seconds at an MFU of one."""
    e = estimate_program(row.placed, row.target, row.software)
    return e.model_flops / e.peak


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Returns the spread of errors: of each kind of rows and half, of chips, programs, memory, and the baselines."""
    results = results_of(rows)
    errors = {name: found for name, (_, _, found) in results.items()}
    fitted, other = halves(rows)
    table: dict[str, dict[str, float]] = {}

    def add(name: str, chosen: Iterable[Row], of: dict[str, float]) -> None:
        values = [of[row.id] for row in chosen]
        if values:
            table[name] = spread(values)

    for kind, chosen in KINDS.items():
        for half, name in ((rows, "both halves"), (fitted, "fitted half"), (other, "other half")):
            add(f"{kind}, {name}", filter(chosen, half), errors)
    for kind, chosen in CLASSES.items():
        add(f"{kind}, fitted half", filter(chosen, fitted), errors)
        add(f"{kind}, other half", filter(chosen, other), errors)
    small = read_vtrain("V-single")
    predictions = {name: found for name, (_, _, found) in results_of(small).items()}
    add("vTrain's predictions for 2 to 8 A100, fitted half", halves(small)[0], predictions)
    add("vTrain's predictions for 2 to 8 A100, other half", halves(small)[1], predictions)
    left_out = without_the_chip(rows)
    for kind, chosen in KINDS.items():
        add(f"{kind}, without the chip's own rows", filter(chosen, rows), left_out)
    for name, group in (
        ("one MFU per chip", lambda row: (family_of(row), is_low(row))),
        (
            "one MFU per chip and program",
            lambda row: (family_of(row), is_low(row), row.software.name),
        ),
    ):
        found = baseline(rows, group)
        for kind in ("bfloat16", "below bfloat16"):
            add(f"{kind}, other half: {name}", filter(KINDS[kind], other), found)
    for family in FAMILIES:
        add(f"other half, {family}", [row for row in other if family_of(row) == family], errors)
    for program in sorted({row.software.name for row in rows}):
        add(
            f"other half, {program}", [row for row in other if row.software.name == program], errors
        )
    memory = [row.bytes(results[row.id][1]) / row.memory - 1 for row in rows if row.memory]
    return {**table, "memory": spread(memory)}


def lines_of_spread(spreads: dict[str, dict[str, float]]) -> Iterable[str]:
    """Yields the lines of the page's table of errors."""
    for name, of in spreads.items():
        if "both halves" in name and not name.startswith("all rows"):
            continue
        yield f"| {name} | {of['rows']} | {of['median']:.1%} | {of['90th']:.1%} | {of['bias']:+.1%} |"


def table(rows: list[Row], left_out: dict[str, str]) -> str:
    """Returns the page's tables as Markdown."""
    results = results_of(rows)
    lines = [
        f"{len(rows)} of {len(rows) + len(left_out)} rows are priced. {len(FITTED)} constants are fitted.", "",
        "| rows | number | median error | 90th percentile | bias |", "|---|---|---|---|---|",
    ]  # fmt: skip
    lines += lines_of_spread(summary(rows))
    bound = Counter(predicted.bound_by for _, predicted, _ in results.values())
    lines += [
        "",
        "Bound by: " + ", ".join(f"{name} {count}" for name, count in bound.most_common()) + ".",
    ]
    stated = sum(row.states_remat for row in rows)
    misses = [row for row, predicted, _ in results.values() if not fits(row, predicted)]
    tight = sum(row.states_remat for row in misses)
    programs = Counter(row.software.name for row in misses).most_common()
    lines += [
        "", f"All runs ran. {tight} of the {stated} whose recomputation is published are predicted not to fit, and "
        f"{len(misses) - tight} of the {len(rows) - stated} whose is not: "
        + ", ".join(f"{name} {count}" for name, count in programs) + ".",
    ]  # fmt: skip
    lines += [
        "",
        "| sweep of layouts | layouts | fastest predicted over fastest |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {layouts} | {regret:+.1%} |"
        for name, (layouts, regret) in regrets(rows).items()
    ]
    small = sorted(regret for _, regret in regrets(read_vtrain("V-single")).values())
    lines.append(
        f"| vTrain's predictions for 2 to 8 A100, {len(small)} sweeps | median, 90th percentile, worst "
        f"| {statistics.median(small):+.1%}, {small[int(0.9 * len(small))]:+.1%}, {small[-1]:+.1%} |"
    )
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in left_out.items():
        reasons[reason.splitlines()[0]].append(name)
    lines += ["", f"{len(left_out)} rows are not priced:", ""]
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in ordered]
    return "\n".join(lines) + "\n"


def row_tables(rows: list[Row]) -> str:
    """Returns every priced row, and every published memory, as Markdown."""
    results = results_of(rows)
    lines = [
        "# Every priced row: published and predicted", "",
        "Written by `python bench/foresight/report.py`; the sources of the rows are in `published.csv`.",
        "", "| row | system | hardware | model | mesh | remat | matmuls | measured | predicted, s | error | bound by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row, predicted, found in results.values():
        run = row.placed.run
        precision = (
            run.training.matmul_precision.replace("compute", "bfloat16")
            .removeprefix("rows:")
            .lower()
        )
        lines.append(
            f"| {row.id} | {row.system} | {row.target} | {row.model} | {run.mesh} | {run.training.remat} | {precision} "
            f"| {row.measured:.3g} | {predicted.seconds:.3g} | {found:+.0%} | {predicted.bound_by} |"
        )
    lines += [
        "",
        "| row | model | mesh | published GiB | predicted GiB | error |",
        "|---|---|---|---|---|---|",
    ]
    for row, predicted, _ in results.values():
        if row.memory:
            lines.append(
                f"| {row.id} | {row.model} | {row.placed.run.mesh} | {row.memory / 2**30:.1f} | "
                f"{row.bytes(predicted) / 2**30:.1f} | {row.bytes(predicted) / row.memory - 1:+.0%} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], file: Path) -> None:
    """Plots predicted over measured step time, with a colour for each family of chips."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "foresight"
    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    axes.set_prop_cycle(color=[light for light, _ in PALETTE.values()])
    results = results_of(rows)
    for family in FAMILIES:
        points = [(r.measured, e.seconds) for r, e, _ in results.values() if family_of(r) == family]
        if points:
            axes.scatter(
                *zip(*points, strict=True), s=18, label=f"{family} ({len(points)})", alpha=0.8
            )
    ends = (0.4, 400)
    axes.plot(ends, ends, color="grey", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot(ends, [factor * n for n in ends], color="grey", linewidth=0.5, linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="published step, s",
        ylabel="predicted step, s",
        xlim=ends,
        ylim=ends,
    )
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def results_to_dict(rows: list[Row]) -> dict[str, Any]:
    """Returns what bench/results/foresight.json holds, of which every figure of the pages is made."""
    return {
        "spread": summary(rows),
        "sweeps": regrets(rows),
        "errors": {name: found for name, (_, _, found) in results_of(rows).items()},
    }


def figures(
    results: dict[str, Any], left_out: dict[str, Any], measured: dict[str, Any]
) -> dict[str, str]:
    """Returns the figures of the pages by name. left_out: LEFT_OUT; measured: bench/results/h100.json."""
    every = left_out["spread"]["all programs"]
    experts = left_out["spread"]["experts"]
    steps = [s["bare_seconds"] / s["planned_with_listed_rates"] - 1 for s in measured["steps"]]
    return {
        "median": f"median error of {every['median']:.1%} against {every['rows']} published steps",
        "ninetieth": f"{every['90th']:.1%} at the 90th percentile",
        "experts": f"{experts['median']:.1%} and {experts['90th']:.1%}",
        "sweeps": sentence_of_sweeps(results["sweeps"]),
        "h100": f"{-min(steps):.0%} less to {max(steps):.0%} more time than planned",
        "marks": "; ".join(sentences_of_marks(results["spread"])),
        "largest": table_of_causes(results["errors"]),
    }


def sentence_of_sweeps(sweeps: dict[str, tuple[int, float]]) -> str:
    """Returns how often the layout predicted fastest is the fastest, and how much slower the others are."""
    slower = sorted(regret for _, regret in sweeps.values() if regret > 0)
    fastest = len(sweeps) - len(slower)
    text = (
        f"in {len(sweeps)} published sweeps of layouts the one predicted fastest is the fastest "
        f"{fastest} times"
    )
    if not slower:
        return text
    return f"{text}, and otherwise {' and '.join(f'{regret:.1%}' for regret in slower)} slower"


def sentences_of_marks(spreads: dict[str, dict[str, float]]) -> Iterable[str]:
    """Yields for each kind of rows its mark, and the error of the half that was not fitted."""
    for kind, (name, median, ninetieth) in MARKS.items():
        found = spreads[f"{kind}, other half"]
        mark, reached = f"{median:.0%}", f"{found['median']:.1%}"
        if ninetieth is not None:
            mark += f", and {ninetieth:.0%} at the 90th percentile,"
            reached += f" and {found['90th']:.1%}"
        yield f"{mark} for {name} ({reached})"


def table_of_causes(errors: dict[str, float]) -> str:
    """Returns the rows with the largest errors and their causes as Markdown."""
    lines = ["", "| row | error | cause |", "|---|---|---|"]
    for names, (what, cause) in CAUSES.items():
        found = ", ".join(f"{errors[name]:+.0%}" for name in names)
        lines.append(f"| {', '.join(names)}: {what} | {found} | {cause} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows, left_out = read_rows()
    put_table(ROOT / "docs" / "foresight.md", SCRIPT, table(rows, left_out))
    (Path(__file__).parent / "rows.md").write_text(row_tables(rows), encoding="utf-8")
    results = results_to_dict(rows)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    left_out_results = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    put_figures(SCRIPT, figures(results, left_out_results, measured))
    plot(rows, ROOT / "docs" / "img" / "foresight.svg")
    print(json.dumps(results["spread"], indent=1))


if __name__ == "__main__":
    main()

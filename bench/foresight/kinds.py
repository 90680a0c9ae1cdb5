"""Measured and predicted seconds of a training step on v6e by kind of operation: `python bench/foresight/kinds.py`.

It prices the steps of v6e-steps.csv, compares kinds with the profiles of those that have one, and writes the tables of
docs/foresight.md. `matmul` and `overlap` of v6e in hardware/chips.toml are the medians that it prints, of the lanes l3 and
cc; `Physics.tpu_elementwise` is that of the fastest step. The lanes cc5 and ag are only judged.

    matmul          FLOPs of all products at the peak / matmul fusions
    elementwise     loop fusions and relayouts / copies counted, at 0.65 of the HBM bandwidth
    exposed         exposed collectives / communication that could overlap
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from other_programs import estimate_program
from v6e_rows import MeasuredStep, read_v6e

from meshwright.planner.estimate import ATTENTION, ELEMENTWISE, MATMULS, Estimate
from meshwright.planner.physics import PHYSICS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

from page_table import put_table  # noqa: E402  (of the folder above)

PAGE = ROOT / "docs" / "foresight.md"
SCRIPT = "foresight/kinds.py"
SHOWN = ("cc-mt-0602-maxtext-qwen3-8b-v6e8-ref-seq8192", "l3-0427-exp28b")
"""Steps of which every kind is shown: MaxText's Qwen3-8B, and the fastest of Llama 3 8B."""


def kinds_of(step: MeasuredStep, e: Estimate) -> dict[str, tuple[float | None, float]]:
    """Returns measured and predicted seconds by kind; None where the profile does not list it."""
    profile = step.profile
    loops = None
    if "loop_fusion" in profile:
        loops = profile["loop_fusion"] + profile.get("data_formatting", 0.0)
    return {
        "matmuls": (profile.get("matmul_fusion"), e.bounds[MATMULS]),
        "attention": (profile.get("attention_kernel"), e.bounds[ATTENTION]),
        "loop fusions and relayouts": (loops, e.bounds[ELEMENTWISE] + e.parts["optimizer"]),
        "exposed collectives": (profile.get("collective_exposed"), e.parts["exposed"]),
    }


def priced(steps: Iterable[MeasuredStep]) -> list[tuple[MeasuredStep, Estimate]]:
    """Returns the steps with their predictions."""
    found = []
    for step in steps:
        row = step.row
        found.append((step, estimate_program(row.placed, row.target, row.software)))
    return found


def rates(pairs: list[tuple[MeasuredStep, Estimate]]) -> dict[str, list[float]]:
    """Returns what each profile says of the chip's constants."""
    found: dict[str, list[float]] = defaultdict(list)
    for step, e in pairs:
        efficiency = step.row.target.efficiency
        for kind, (measured, predicted) in kinds_of(step, e).items():
            if measured is None or not measured:
                continue
            ratio = predicted / measured
            if kind == "matmuls":
                found["matmul"].append(efficiency.matmul * ratio)
            elif kind == "exposed collectives":
                found["overlap"].append(1 - (1 - efficiency.overlap) / ratio)
            elif kind == "loop fusions and relayouts":
                found["elementwise"].append(PHYSICS.tpu_elementwise / ratio)
    return found


def table(pairs: list[tuple[MeasuredStep, Estimate]]) -> str:
    """Returns errors by lane, kinds by lane, and the kinds of two steps as Markdown."""
    lines = ["| lanes | steps | median error | 90th percentile | bias |", "|---|---|---|---|---|"]
    for name, is_check in (("l3, cc: rates were read", False), ("cc5, ag: judged", True)):
        errors = [e.seconds / s.row.measured - 1 for s, e in pairs if s.is_check == is_check]
        sizes = sorted(map(abs, errors))
        lines.append(
            f"| {name} | {len(errors)} | {statistics.median(sizes):.1%} | "
            f"{sizes[int(0.9 * len(sizes))]:.1%} | {statistics.median(errors):+.1%} |"
        )
    lines += ["", "| kind, predicted over measured (median) | l3, cc | cc5, ag |", "|---|---|---|"]
    ratios: dict[str, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, e in pairs:
        for kind, (measured, predicted) in kinds_of(step, e).items():
            if measured:
                ratios[kind][step.is_check].append(predicted / measured)
    for kind, lanes in ratios.items():
        cells = [f"{statistics.median(lanes[c]):.2f} of {len(lanes[c])}" for c in (False, True)]
        lines.append(f"| {kind} | {cells[0]} | {cells[1]} |")
    lines += ["", "| step | kind | measured, s | predicted, s |", "|---|---|---|---|"]
    for step, e in pairs:
        if step.row.id not in SHOWN:
            continue
        row = step.row
        name = f"{row.model}, {row.system}, {row.placed.run.training.batch} x 8,192"
        lines.append(f"| {name} | step | {row.measured:.2f} | {e.seconds:.2f} |")
        for kind, (measured, predicted) in kinds_of(step, e).items():
            seen = "" if measured is None else f"{measured:.2f}"
            lines.append(f"| | {kind} | {seen} | {predicted:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    pairs = priced(read_v6e()[0])
    fitted = [(step, e) for step, e in pairs if not step.is_check]
    medians = {name: statistics.median(found) for name, found in rates(fitted).items()}
    fastest = [pair for pair in fitted if pair[0].row.id == SHOWN[-1]]
    medians["elementwise of the fastest"] = rates(fastest)["elementwise"][0]
    print(json.dumps(medians, indent=1))
    put_table(PAGE, SCRIPT, table(pairs))


if __name__ == "__main__":
    main()

"""The planner's best plan against the published layout of the same model, chips and batch, both compiled.

    python bench/layouts.py [--case P032 ...]

Published layouts are rows of bench/foresight/published.csv, read as runs of this package (with the nearest remat
policy, or where that does not fit the next that saves less). Each is compiled by the chip's own compiler, as are the
planner's `--best` best plans; all have the compiler options that `plan --tune` tries for the chip. Results go to
bench/results/layouts.json and layouts.md.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "foresight"))

from page_table import put_rows
from rows import Row, read_rows

from meshwright.api.proofs import Proof, prove_plan
from meshwright.hardware.targets import Target
from meshwright.planner.search import OFFLOADING, price_run, remat_policies, search
from meshwright.runs.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "layouts.json"

CASES = ("P032", "P077", "P081", "P083", "P059", "P095", "P135", "P145", "P151")
"""Llama 3.1 8B on v6e, MaxText 32B and 128B on v5p and v5e; Llama 2 7B, Llama 3.1 8B and 405B on H100, Llama 3 70B on
A100."""


def with_options(run: Run, target: Target) -> Run:
    """Returns the run with all compiler options that tuning tries for its chip."""
    options = tuple(f"{name}={value}" for name, value in target.chip.compiler_options.items())
    return dataclasses.replace(
        run, training=dataclasses.replace(run.training, compiler_options=options)
    )


def proof_json(proof: Proof) -> dict[str, Any]:
    """Returns the figures of a proof."""
    return {
        "plan": proof.plan.name, "planned": proof.plan.estimate.seconds, "compiled": proof.step_seconds,
        "bytes": proof.peak_bytes, "refused": proof.refused,
    }  # fmt: skip


def prove_published(row: Row, limit: int) -> Proof:
    """Compiles the published layout with its remat policy, or where that does not fit with the next that saves less."""
    run, target = row.placed.run, row.target
    policies = [p for p in remat_policies(target) if p not in OFFLOADING or p == run.training.remat]
    for remat in policies[policies.index(run.training.remat) :]:
        changed = dataclasses.replace(run, training=dataclasses.replace(run.training, remat=remat))
        proof = prove_plan(price_run(with_options(changed, target), target), target, limit)
        if proof.fits:
            break
    return proof


def compare(row: Row, best: int, limit: int) -> dict[str, Any]:
    """Compiles the published layout and the planner's best plans."""
    published = prove_published(row, limit)
    plans = search(row.placed.run, row.target).plans[:best]
    proofs = [
        prove_plan(price_run(with_options(p.run, row.target), row.target), row.target, limit)
        for p in plans
    ]
    fitting = [proof for proof in proofs if proof.fits]
    planned = min(fitting, key=lambda proof: proof.step_seconds or 0.0) if fitting else proofs[0]
    return {
        "row": row.id, "model": row.model, "target": str(row.target), "measured": row.measured,
        "published": proof_json(published), "planned": proof_json(planned),
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    lines = [
        "| row | model | hardware | published layout | simulated | measured | best plan | simulated | ratio |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in results.values():
        published, planned = row["published"], row["planned"]
        both = published["compiled"] and planned["compiled"]
        ratio = f"{planned['compiled'] / published['compiled']:.2f}" if both else ""
        steps = [
            f"{p['compiled']:.3g} s" if p["compiled"] else p["refused"][-60:]
            for p in (published, planned)
        ]
        lines.append(
            f"| {row['row']} | {row['model']} | {row['target']} | {published['plan']} | {steps[0]} | "
            f"{row['measured']:.3g} s | {planned['plan']} | {steps[1]} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append")
    parser.add_argument("--best", type=int, default=2)
    parser.add_argument("--limit", type=int, default=600)
    given = parser.parse_args()
    rows = {row.id: row for row in read_rows()[0]}
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for name in given.case or CASES:
        results[name] = compare(rows[name], given.best, given.limit)
        print(json.dumps(results[name]), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    put_rows("layouts.py", "The planner's choice against nine published layouts", table(results))


if __name__ == "__main__":
    main()

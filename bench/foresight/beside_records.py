"""Plans beside the highest measured speed of their kind: `python bench/foresight/beside_records.py` writes docs/plan.md.

Each row is the best plan on one mesh. Beside it stand the fastest published runs on the chip, in bfloat16 or below it as
the plan is: of the same model, and of any.
"""

import dataclasses
import sys
from pathlib import Path

from meshwright.config import MeshShape
from meshwright.hardware.targets import parse_target
from meshwright.planner.records import record_of, records_of
from meshwright.planner.search import Plan, price_mesh
from meshwright.runs.recipe import change_fields, find_recipe

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

from page_table import put_table  # noqa: E402  (of the folder above)

PAGE = ROOT / "docs" / "plan.md"
SCRIPT = "foresight/beside_records.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one mesh of one machine."""

    recipe: str
    target: str
    mesh: str
    batch: int
    seq: int
    published: str
    """Name of the model in planner/data/records.json."""
    precision: str = "compute"
    layout: str = "auto"
    exchange: str = "compute"
    """Type in which rows are sent to experts."""


CASES = (
    Case("llama2-7b", "v5p:2x2x4", "fsdp=16", 64, 4096, "Llama2-7B"),
    Case("llama2-70b", "v5p:4x4x8", "fsdp=128", 512, 4096, "Llama2-70B"),
    Case("llama3-405b", "v5p:8x8x8", "fsdp=512", 512, 8192, "llama3.1-405b"),
    Case("llama3-8b", "v6e:16x16", "fsdp=256", 1024, 8192, "Llama3-8B"),
    Case("llama3-8b", "v6e:2x4", "fsdp=8", 32, 8192, "Llama3-8B"),
    Case("qwen3-8b", "v6e:2x4", "fsdp=8", 32, 8192, "Qwen3-8B"),
    Case("qwen3-30b-a3b", "b200:64", "fsdp=8,expert=8", 512, 4096, "Qwen3_30B_a3B"),
    Case("qwen3-30b-a3b", "h100:16", "expert=16", 256, 4096, "Qwen3_30B_a3B"),
    Case(
        "deepseek-v3",
        "h100:2048",
        "data=2,fsdp=16,expert=16,tensor=4",
        15360,
        4096,
        "DeepSeek-V3",
        "fp8",
        "folded",
        "fp8",
    ),
)


def plan_of(case: Case) -> Plan:
    """Returns the best plan of a case that fits its memory."""
    shape = MeshShape.parse(case.mesh)
    run = find_recipe(case.recipe)
    training = dataclasses.replace(
        run.training,
        batch=case.batch,
        seq=case.seq,
        microbatches=0,
        remat="auto",
        matmul_precision=case.precision,
    )
    run = dataclasses.replace(run, mesh=shape, training=training, layout=case.layout)
    if case.exchange != "compute":
        run = change_fields(run, None, {"expert_exchange": case.exchange})
    best, _ = price_mesh(run, parse_target(case.target), shape)
    assert best is not None, f"{case} does not fit"
    return best


def row_of(case: Case) -> str:
    """Returns a case's row of the table."""
    plan = plan_of(case)
    e = plan.estimate
    rate = e.tokens / e.seconds / e.devices
    precision = plan.run.training.matmul_precision
    name = f"{case.recipe}, {case.target}, {case.batch:,} x {case.seq:,}"
    if case.precision != "compute":
        name += f", {case.precision}"
    if case.exchange != "compute":
        name += f", rows sent in {case.exchange}"
    cells = [name, plan.name, f"{e.seconds:.3g}", f"{rate:,.0f}", f"{e.mfu:.1%}"]
    same = next((r for r in records_of(e, precision) if r.model == case.published), None)
    of_chip = record_of(e, precision)
    if same is None:
        cells += ["no run published", ""]
    else:
        cells += [str(same), f"{e.mfu / same.mfu:.2f}"]
    cells.append("" if of_chip is None else str(of_chip))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    lines = [
        "| model, machine, tokens | plan | s | tokens/s/chip | MFU | highest measured of the model | plan over it "
        "| highest measured on the chip |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        lines.append(row_of(case))
        print(lines[-1], flush=True)
    put_table(PAGE, SCRIPT, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

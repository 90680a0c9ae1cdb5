"""Tables of a layout report on a terminal; they need no trainer and no device."""

from rich.console import Console
from rich.markup import escape

from meshwright.formatting import format_bytes, format_count
from meshwright.runs.placed_run import PlacedRun
from meshwright.sharding.layouts import find_layout
from meshwright.sharding.params import named_leaves
from meshwright.views.plain_table import plain_table
from meshwright.views.show import LayoutReport, pipeline_timeline, stage_rows

_MAX_STAGES = 8
"""Pipeline stages that are printed; the others are counted."""


def print_layout(console: Console, placed: PlacedRun, report: LayoutReport) -> None:
    """Prints every parameter, sharded and gathered, with its bytes per device."""
    run = placed.run
    console.print(
        f"[bold]{escape(run.name)}[/]: {format_count(report.parameters)} parameters on mesh [bold]{report.mesh}[/], "
        f"{report.mesh.size} devices\nlayout [bold]{escape(run.layout)}[/]: {find_layout(run.layout).summary}\n"
    )
    right = ("bytes sharded", "layer gathered")
    headings = ("parameter", "shape", "sharded", "gathered", *right)
    table = plain_table(*headings, right=right, unwrapped=("parameter", "shape"))
    for row in report.rows:
        table.add_row(
            row.path, "x".join(map(str, row.shape)), escape(row.sharded), escape(row.gathered),
            format_bytes(row.bytes_sharded), format_bytes(row.bytes_gathered),
        )  # fmt: skip
    console.print(table)
    print_precision(console, placed)
    console.print(
        f"\non each device: {format_bytes(report.bytes_parameters)} of parameters ({_types(placed)}), "
        f"{format_bytes(report.bytes_optimizer)} of optimizer state ({escape(run.optimizer.name)})"
    )
    print_stages(console, placed)


def _types(placed: PlacedRun) -> str:
    """Types of the parameters at rest."""
    return ", ".join(sorted({p.stored or placed.run.training.param_dtype for _, p, _ in placed.leaves}))


def print_precision(console: Console, placed: PlacedRun) -> None:
    """Prints which matmuls are in low precision and what stays in the compute dtype; nothing where none is."""
    training = placed.run.training
    if training.matmul_precision == "compute":
        return
    from meshwright.models.quantisation import IN_COMPUTE_DTYPE, find_precision, is_low_precision

    low = sum(p.size for p in named_leaves(placed.params).values() if is_low_precision(p))
    console.print(
        f"matmuls of {format_count(low)} parameters in [bold]{escape(training.matmul_precision)}[/]: "
        f"{find_precision(training.matmul_precision).summary}; in {training.compute_dtype}: {IN_COMPUTE_DTYPE}"
    )


def print_stages(console: Console, placed: PlacedRun) -> None:
    """Prints the pipeline schedule, its bubble, and the layers of each stage; nothing without a pipeline."""
    timeline = pipeline_timeline(placed)
    if timeline is None:
        return
    stages = stage_rows(placed)
    console.print(f"pipeline [bold]{timeline.title}[/]: {timeline.summary}")
    for number, stage in enumerate(stages[:_MAX_STAGES]):
        console.print(f"  stage {number}: layers {stage.layers}, {stage.flops_fraction:.1%} of the FLOPs")
    if len(stages) > _MAX_STAGES:
        console.print(f"  ... and {len(stages) - _MAX_STAGES} more")

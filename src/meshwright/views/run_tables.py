"""Tables that `train` and `parity` print: the prepared run, its summary, and the comparison of two meshes."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshwright.formatting import format_bytes, format_count, format_time
from meshwright.sharding.layouts import find_layout
from meshwright.sharding.params import count_params
from meshwright.sharding.placement import notation
from meshwright.step.device_run import DeviceRun
from meshwright.trainer import loop, parity
from meshwright.views.layout_tables import print_precision, print_stages
from meshwright.views.plain_table import plain_table
from meshwright.views.show import layout_report

_EXAMPLES = ("embed", "blocks.query", "blocks.attention_out", "blocks.up", "blocks.down", "blocks.expert_up",
             "blocks.expert_down", "blocks.mlp_norm")  # fmt: skip
"""Parameters whose placement is printed before training."""
_ROWS = 20
"""Most parameters of a wrapped model whose placement is printed."""


def print_prepared_run(console: Console, prepared: loop.PreparedRun) -> None:
    """Prints the run on its mesh: parameters, placement of a few of them, pipeline stages, text."""
    placed, mesh = prepared.device_run.placed, prepared.device_run.mesh
    run, first = placed.run, mesh.devices.flat[0]
    kind = "simulated on this CPU" if first.platform == "cpu" else first.device_kind
    console.print(
        f"[bold]{escape(run.name)}[/]: {format_count(count_params(placed.params))} parameters, mesh "
        f"[bold]{run.mesh}[/] ({mesh.size} device{'s' if mesh.size > 1 else ''}, {kind})"
    )
    console.print(f"layout [bold]{escape(run.layout)}[/]: {find_layout(run.layout).summary}")
    console.print(f"attention: {escape(prepared.device_run.settled.kernels.summary)}")
    if prepared.device_run.settled.grouped_matmul is not None:
        console.print(f"grouped matmul: {escape(prepared.device_run.settled.grouped_matmul.name)}")
    table = plain_table("parameter", "sharded", "gathered", "bytes per device", right=("bytes per device",))
    rows = {row.path: row for row in layout_report(placed).rows}
    for path in _EXAMPLES:
        if path in rows:
            row = rows[path]
            table.add_row(path, escape(row.sharded), escape(row.gathered), format_bytes(row.bytes_sharded))
    console.print(table)
    print_precision(console, placed)
    print_stages(console, placed)
    print_choices(console, prepared.device_run)
    tokens = sum(len(file.tokens) for file in prepared.corpus.files)
    console.print(
        f"text: {format_count(tokens)} tokens of a vocabulary of {prepared.corpus.vocab}, {run.data.held_out:.0%} "
        f"held-out; {run.training.steps} steps of {run.training.batch} x {run.training.seq} tokens\n"
    )


def choices_to_json(device_run: DeviceRun) -> dict[str, Any]:
    """Returns what of the step was chosen for this machine, as `print_choices` prints it."""
    model, training = device_run.local_model, device_run.run.training
    return {
        "remat": training.remat,
        "saved_layers": training.saved_layers,
        "attention_kernel": model.kernels.name,
        "grouped_matmul": device_run.settled.grouped_matmul and device_run.settled.grouped_matmul.name,
        "gathered_ahead": {stack: list(names) for stack, names in model.ahead.items()},
        "tensor_ring": list(model.tensor_ring),
        "compiler_options": device_run.compiler_options(),
        "refused_compiler_options": list(device_run.refused_compiler_options),
    }


def print_choices(console: Console, device_run: DeviceRun) -> None:
    """Prints what of the step was chosen for this machine: remat policy, overlap, compiler options."""
    options, refused = device_run.compiler_options(), device_run.refused_compiler_options
    model, training = device_run.local_model, device_run.run.training
    saved = [f"projections of {training.saved_layers} layers saved"] if training.saved_layers else []
    overlap = ["weights gathered one layer ahead"] if model.ahead else []
    overlap += ["collective matmul over tensor"] if model.tensor_ring else []
    parts = [f"remat {training.remat}", *saved, *overlap]
    parts += [f"{len(options)} compiler options of the chip"] if options else []
    console.print(f"step: {', '.join(parts)}", markup=False)
    if refused:
        console.print(f"the installed compiler does not know {', '.join(refused)}: left out", markup=False)


def print_prepared_model(console: Console, device_run: DeviceRun) -> None:
    """Prints where the parameters of a wrapped model lie."""
    placed, run = device_run.placed, device_run.run
    model: Any = run.model
    console.print(
        f"[bold]{escape(run.name)}[/]: {model.parts.adapter.framework}, {format_count(count_params(placed.params))} "
        f"parameters, mesh [bold]{placed.shape}[/]; {run.training.steps} steps of {run.training.batch} examples"
    )
    table = plain_table("parameter", "sharded", "gathered")
    for name, p, where in placed.leaves[:_ROWS]:
        row = (escape(notation("w", p.dims, placement)) for placement in (where.at_rest, where.in_use))
        table.add_row(name, *row)
    console.print(table)
    if len(placed.leaves) > _ROWS:
        console.print(f"[dim]and {len(placed.leaves) - _ROWS} more[/]")


def print_summary(console: Console, summary: loop.Summary, unit: str = "tokens") -> None:
    """Prints the losses, the time and the output files of a training run."""
    if summary.sample:
        console.print("\n[dim]sample from the model:[/]")
        console.print(summary.sample.rstrip(), markup=False)
    console.print()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if not summary.steps_taken and not summary.interrupted_by:
        console.print(
            f"the run in {summary.out} is finished: it has taken all of its {summary.steps} steps; a larger --steps "
            "goes on from there",
            markup=False,
        )
        return
    if summary.interrupted_by:
        signal = f"by signal {summary.interrupted_by} after step {summary.steps}; --resume continues from there"
        table.add_row("stopped", signal)
    table.add_row("loss", f"{summary.loss:.4f} over the last steps")
    if summary.held_out_loss is not None:
        table.add_row("held-out loss", f"{summary.held_out_loss:.4f}")
    table.add_row(
        "time", f"{format_time(summary.seconds)} for {format_count(summary.tokens)} {unit}, compilation included"
    )
    compiling = f", compiling the step {format_time(summary.compile_seconds)}" if summary.compile_seconds else ""
    table.add_row("start", f"{format_time(summary.start_seconds)} to the end of the first step{compiling}")
    table.add_row("waiting for data", format_time(summary.data_wait_seconds))
    for name, contents in (
        ("checkpoints", "parameters, optimizer state, position in the data"),
        ("metrics.jsonl", "metrics of every step"),
        ("run.json", "the whole Run: meshwright train --run FILE repeats it"),
        ("sample.txt", "the sample above"),
    ):
        if (summary.out / name).exists():
            table.add_row(str(summary.out / name), contents)
    console.print(table)


def print_parity(console: Console, result: parity.Parity) -> None:
    """Prints the losses and gradients of the same run on two meshes, step by step."""
    first, second = result.meshes
    console.print(f"[bold]{first}[/] against [bold]{second}[/], float32")
    if result.unequal_initial:
        console.print("initial values differ: " + ", ".join(result.unequal_initial))
    else:
        console.print("initial values: bitwise equal")
    table = plain_table("step", f"loss, {first}", f"loss, {second}", "gradients differ by", "most in")
    for step in result.steps:
        losses = [f"{loss:.7f}" for loss in step.losses]
        table.add_row(str(step.step), *losses, f"{step.gradient_difference:.1e}", step.worst_tensor)
    console.print(table)
    divergence = result.first_divergence
    agreement = f"equal within {parity.TOLERANCE:.0e}: losses, and gradients on each tensor's own scale"
    console.print(f"first divergence: {divergence}" if divergence else agreement)

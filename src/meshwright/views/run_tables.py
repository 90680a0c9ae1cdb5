"""Tables that `train` prints: parameters on the mesh, choices for the machine, summary, predicted against measured."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
from rich.console import Console

from meshwright.data.feed import held_out_border
from meshwright.formatting import format_count, format_time
from meshwright.sharding.layouts import find_layout
from meshwright.sharding.params import count_params
from meshwright.step.device_run import DeviceRun
from meshwright.trainer import loop
from meshwright.views.blocks import Block, Code, Column, Facts, Table
from meshwright.views.layout import param_rows, precision_blocks, stage_rows, stages_table
from meshwright.views.terminal import print_blocks

if TYPE_CHECKING:
    from meshwright.planner.forecast import ForecastGap

_EXAMPLES = (
    "embed",
    "query",
    "attention_out",
    "up",
    "down",
    "expert_up",
    "expert_down",
    "mlp_norm",
)
"""Parameters, of blocks or outside them, whose placement is printed before training."""
_PLACEMENT = [
    Column("parameter", cell="path"),
    Column("sharded", cell="sharded"),
    Column("gathered", cell="gathered"),
    Column("bytes per device", "bytes", "bytes_sharded"),
]


def print_prepared_run(console: Console, prepared: loop.PreparedRun) -> None:
    """Prints the run on its mesh: parameters, placement of a few of them, pipeline stages, text."""
    device_run = prepared.device_run
    mesh = device_run.mesh
    run, first = device_run.run, mesh.devices.flat[0]
    kind = "simulated on this CPU" if first.platform == "cpu" else first.device_kind
    title = (
        f"{run.name}: {format_count(count_params(device_run.layout.params))} parameters, mesh {run.mesh} ({mesh.size} "
        f"device{'s' if mesh.size > 1 else ''}, {kind})"
    )
    counts = [len(file.tokens) for file in prepared.corpus.files]
    tokens, evaluated = (
        sum(counts),
        sum(count - held_out_border(count, run.data.held_out) for count in counts),
    )
    text = (
        f"{format_count(tokens)} tokens of a vocabulary of {prepared.corpus.vocab}, {100 * evaluated / tokens:.2g}% "
        f"held-out; {run.training.steps} steps of {run.training.batch} x {run.training.seq} tokens"
    )
    facts = [
        ("layout", f"{run.layout}: {find_layout(run.layout).summary}"),
        ("attention", device_run.kernels.summary),
    ]
    if device_run.grouped_matmul is not None:
        facts.append(("grouped matmul", device_run.grouped_matmul.name))
    facts += [*choices_facts(device_run), ("text", text)]
    grouped = (
        "e4m3, one scale per row and per expert"
        if device_run.low_precision_experts
        else run.training.compute_dtype
    )
    low = device_run.in_low_precision
    shown = [
        row for row in param_rows(device_run, low) if row.path.removeprefix("blocks.") in _EXAMPLES
    ]
    blocks = [
        Facts(facts),
        Table.of(shown, _PLACEMENT),
        *precision_blocks(device_run, low, grouped),
    ]
    if stages := stage_rows(device_run):
        table = device_run.schedule_table
        blocks.append(
            dataclasses.replace(stages_table(stages), title=table.title, note=table.summary)
        )
    print_blocks(console, title, "", blocks)


def print_prepared_model(console: Console, device_run: DeviceRun) -> None:
    """Prints the placement of the parameters of a wrapped model."""
    run = device_run.run
    kind = cast(Any, run.model).parts.adapter.parts.framework
    layout = device_run.layout
    title = (
        f"{run.name}: {kind}, {format_count(count_params(layout.params))} parameters, mesh {layout.shape}; "
        f"{run.training.steps} steps of {run.training.batch} examples"
    )
    print_blocks(console, title, "", [Table.of(param_rows(device_run), _PLACEMENT)])


def choices_facts(device_run: DeviceRun) -> list[tuple[str, str]]:
    """Returns what was chosen for this machine: remat policy, overlap, compiler options."""
    chosen = choices_to_json(device_run)
    step = [
        f"remat {chosen['remat']}",
        chosen["saved_layers"] and f"projections of {chosen['saved_layers']} layers saved",
        chosen["gathered_ahead"] and "weights gathered one layer ahead",
        chosen["tensor_strategy"] == "ring" and "collective matmul over tensor",
        chosen["compiler_options"]
        and f"{len(chosen['compiler_options'])} compiler options of the chip",
        chosen["scheduled_by_price"] and "scheduled by predicted times",
    ]
    facts, refused = [("step", ", ".join(filter(None, step)))], chosen["refused_compiler_options"]
    if (nodes := chosen["expert_nodes"]) > 1:
        spec = next(layer.experts for layer in device_run.layout.spec.layers if layer.experts)
        rows = f"{spec.mean_nodes(nodes):.3g} rows of a token for its {spec.experts_per_token} experts at an even load"
        facts.append(("exchange", f"one row for each of {nodes} groups of devices: {rows}"))
        at_once, pieces = chosen["exchanged_at_once_reason"], chosen["exchange_pieces"]
        overlap = (
            f"those of {pieces} pieces of the batch one after another, while the other computes"
        )
        facts.append(
            (
                "rows travel",
                overlap if at_once is None else f"those of the whole batch at once: {at_once}",
            )
        )
    facts.append(("bits", chosen["bits"]))
    return (
        [*facts, ("left out", f"{', '.join(refused)}: unknown to the installed compiler")]
        if refused
        else facts
    )


def choices_to_json(device_run: DeviceRun) -> dict[str, Any]:
    """Returns what was chosen for this machine as JSON values."""
    execution = device_run.local_model.execution
    training = device_run.run.training
    return {
        "layout": device_run.run.layout,
        "remat": training.remat,
        "saved_layers": training.saved_layers,
        "attention_kernel": execution.kernels.name,
        "grouped_matmul": device_run.grouped_matmul and device_run.grouped_matmul.name,
        "expert_nodes": device_run.expert_nodes,
        "exchange_pieces": execution.exchange_pieces,
        "exchanged_at_once_reason": device_run.exchanged_at_once_reason,
        "gathered_ahead": {
            stack: sorted({*first, *half})
            for stack, (first, half) in execution.gathered_ahead.items()
        },
        "tensor_strategy": execution.tensor_strategy,
        "compiler_options": device_run.accepted_compiler_options(),
        "scheduled_by_price": device_run.scheduled_by_price,
        "refused_compiler_options": list(device_run.refused_compiler_options),
        "bits": device_run.machine.determinism.sentence,
    }


def print_summary(console: Console, summary: loop.Summary, unit: str = "tokens") -> None:
    """Prints the losses, the time and the output files of a training run."""
    blocks: list[Block] = (
        [Code(summary.sample, title="sample from the model:")] if summary.sample else []
    )
    if not summary.steps_taken and not summary.interrupted_by:
        finished = (
            f"the run in {summary.out} is finished: it has taken all of its {summary.steps} steps; a larger --steps "
            "continues it"
        )
        print_blocks(console, "", "", blocks)
        console.print(f"\n{finished}", markup=False)
        return
    facts = [("loss", f"{summary.loss:.4f} over the last steps")]
    if summary.interrupted_by:
        signal = f"by signal {summary.interrupted_by} after step {summary.steps}; --resume continues from there"
        if not summary.steps:
            signal = f"by signal {summary.interrupted_by} before its first step"
        facts.insert(0, ("stopped", signal))
    if summary.held_out_loss is not None:
        facts.append(("held-out loss", f"{summary.held_out_loss:.4f}"))
    compiling = (
        f", compiling the step {format_time(summary.compile_seconds)}"
        if summary.compile_seconds
        else ""
    )
    waited = format_time(summary.data_wait_seconds)
    if jax.process_count() > 1:
        waited += f" on process {summary.data_wait_host}, which waited longest"
    facts += [
        (
            "time",
            f"{format_time(summary.seconds)} for {format_count(summary.tokens)} {unit}, compilation included",
        ),
        ("start", f"{format_time(summary.start_seconds)} to the end of the first step{compiling}"),
        ("waiting for data", waited),
    ]
    files = {
        "checkpoints": "parameters, optimizer state, position in the data",
        "metrics.jsonl": "metrics of every step",
        "run.json": "the Run: meshwright train --run FILE repeats it",
        "sample.txt": "the sample above",
    }
    facts += [
        (str(summary.out / name), text)
        for name, text in files.items()
        if (summary.out / name).exists()
    ]
    print_blocks(console, "", "", [*blocks, Facts(facts)])


def print_forecast_gaps(console: Console, gaps: Sequence["ForecastGap"]) -> None:
    """Prints the predicted and measured seconds of a step, by part."""
    columns = [
        Column("part", cell="part"),
        *(Column(name, "seconds", name) for name in ("predicted", "measured")),
        Column("difference", "seconds", "seconds"),
    ]
    note = f"largest difference: {gaps[0].part}"
    print_blocks(console, "time per step", "", [Table.of(gaps, columns, note=note)])

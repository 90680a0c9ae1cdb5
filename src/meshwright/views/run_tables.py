"""Tables that `train` prints: parameters on the mesh, choices
for the machine, summary, predicted against measured."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
from rich.console import Console

from meshwright.data.feed import held_out_border
from meshwright.formatting import format_count, format_time
from meshwright.reporters.goodput import METRIC
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
    run = device_run.run
    facts = [
        ("layout", f"{run.layout}: {find_layout(run.layout).summary}"),
        ("attention", device_run.kernels.summary),
    ]
    if device_run.grouped_matmul is not None:
        facts.append(("grouped matmul", device_run.grouped_matmul.name))
    facts += [*choices_facts(device_run), ("text", _text_summary(prepared))]

    low = device_run.in_low_precision
    examples = []
    for row in param_rows(device_run, low):
        if row.path.removeprefix("blocks.") in _EXAMPLES:
            examples.append(row)
    grouped: str = run.training.compute_dtype
    if device_run.low_precision_experts:
        grouped = "e4m3, one scale per row and per expert"
    blocks = [
        Facts(facts),
        Table.of(examples, _PLACEMENT),
        *precision_blocks(device_run, low, grouped),
    ]
    stages = stage_rows(device_run)
    if stages:
        table = device_run.schedule_table
        block = stages_table(stages)
        blocks.append(dataclasses.replace(block, title=table.title, note=table.summary))
    print_blocks(console, _mesh_title(device_run), "", blocks)


def _mesh_title(device_run: DeviceRun) -> str:
    """Names a run, its size and its devices: `tiny: 3 M parameters, mesh fsdp=4 (4 devices,
    H100)`."""
    mesh = device_run.mesh
    first = mesh.devices.flat[0]
    kind = "simulated on this CPU" if first.platform == "cpu" else first.device_kind
    plural = "s" if mesh.size > 1 else ""
    parameters = format_count(count_params(device_run.layout.params))
    return (
        f"{device_run.run.name}: {parameters} parameters, "
        f"mesh {device_run.run.mesh} ({mesh.size} device{plural}, {kind})"
    )


def _text_summary(prepared: loop.PreparedRun) -> str:
    """Returns the tokens of the text, the part for evaluation, and what the steps take of it."""
    run = prepared.device_run.run
    tokens = sum(len(file.tokens) for file in prepared.corpus.files)
    if prepared.order is not None:
        held_out = sum(len(part) * part.seq for part in prepared.held_out)
    else:
        held_out = sum(
            len(file.tokens) - held_out_border(len(file.tokens), run.data.held_out)
            for file in prepared.corpus.files
        )
    return (
        f"{format_count(tokens)} tokens of a vocabulary of {prepared.corpus.vocab}, "
        f"{100 * held_out / tokens:.2g}% held-out; "
        f"{run.training.steps} steps of {run.training.batch} x {run.training.seq} tokens"
    )


def print_prepared_model(console: Console, device_run: DeviceRun) -> None:
    """Prints the placement of the parameters of a wrapped model."""
    run = device_run.run
    kind = cast(Any, run.model).parts.adapter.parts.framework
    layout = device_run.layout
    title = (
        f"{run.name}: {kind}, {format_count(count_params(layout.params))} parameters, mesh "
        f"{layout.shape}; {run.training.steps} steps of {run.training.batch} examples"
    )
    print_blocks(console, title, "", [Table.of(param_rows(device_run), _PLACEMENT)])


def choices_facts(device_run: DeviceRun) -> list[tuple[str, str]]:
    """Returns what was chosen for this machine: remat policy, overlap, compiler options."""
    chosen = choices_to_json(device_run)
    facts = [("step", ", ".join(_step_choices(chosen)))]
    if chosen["expert_nodes"] > 1:
        facts += _exchange_facts(device_run, chosen)
    facts.append(("bits", chosen["bits"]))
    if device_run.sends_note is not None:
        facts.append(("between nodes", device_run.sends_note))
    refused = chosen["refused_compiler_options"]
    if refused:
        facts.append(("left out", f"{', '.join(refused)}: unknown to the installed compiler"))
    return facts


def _step_choices(chosen: Mapping[str, Any]) -> list[str]:
    words = [f"remat {chosen['remat']}"]
    if chosen["saved_layers"]:
        words.append(f"projections of {chosen['saved_layers']} layers saved")
    if chosen["gathered_ahead"]:
        words.append("weights gathered one layer ahead")
    if chosen["tensor_strategy"] == "ring":
        words.append("collective matmul over tensor")
    if chosen["compiler_options"]:
        words.append(f"{len(chosen['compiler_options'])} compiler options of the chip")
    if chosen["scheduled_by_price"]:
        words.append("scheduled by predicted times")
    return words


def _exchange_facts(device_run: DeviceRun, chosen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns how rows of tokens reach experts on other groups of devices."""
    nodes = chosen["expert_nodes"]
    spec = next(layer.experts for layer in device_run.layout.spec.layers if layer.experts)
    rows = (
        f"{spec.mean_nodes(nodes):.3g} rows of a token for its {spec.experts_per_token} experts "
        "at an even load"
    )
    at_once = chosen["exchanged_at_once_reason"]
    travel = f"those of the whole batch at once: {at_once}"
    if at_once is None:
        pieces = chosen["exchange_pieces"]
        travel = (
            f"those of {pieces} pieces of the batch one after another, while the other computes"
        )
    return [
        ("exchange", f"one row for each of {nodes} groups of devices: {rows}"),
        ("rows travel", travel),
    ]


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
    blocks: list[Block] = []
    if summary.sample:
        blocks.append(Code(summary.sample, title="sample from the model:"))
    if not summary.steps_taken and not summary.interrupted_by:
        print_blocks(console, "", "", blocks)
        finished = (
            f"the run in {summary.out} is finished: it has taken all of its {summary.steps} steps; "
            "a larger --steps continues it"
        )
        console.print(f"\n{finished}", markup=False)
        return
    blocks.append(Facts(_summary_facts(summary, unit)))
    print_blocks(console, "", "", blocks)


_CAUSES = 3
"""Causes of lost time that a summary names, the greatest first."""
_FILES = {
    "checkpoints": "parameters, optimizer state, position in the data",
    "metrics.jsonl": "metrics of every step",
    "run.json": "the Run: meshwright train --run FILE repeats it",
    "sample.txt": "the sample above",
}
"""Files of an output folder, and what is in them."""


def _summary_facts(summary: loop.Summary, unit: str) -> list[tuple[str, str]]:
    facts = []
    if summary.interrupted_by:
        signal = f"by signal {summary.interrupted_by} before its first step"
        if summary.steps:
            signal = (
                f"by signal {summary.interrupted_by} after step {summary.steps}; "
                "--resume continues from there"
            )
        facts.append(("stopped", signal))
    if summary.tokens:  # a start that a signal stops before its first step has no loss
        facts.append(("loss", f"{summary.loss:.4f} over the last steps"))
    if summary.held_out_loss is not None:
        facts.append(("held-out loss", f"{summary.held_out_loss:.4f}"))

    amount = f"{format_count(summary.tokens)} {unit}"
    until = "the end of the first step" if summary.tokens else "the signal"
    started = f"{format_time(summary.start_seconds)} to {until}"
    if summary.compile_seconds:
        started += f", compiling the step {format_time(summary.compile_seconds)}"
    waited = format_time(summary.data_wait_seconds)
    if jax.process_count() > 1:
        waited += f" on process {summary.data_wait_host}, which waited longest"
    facts += [
        ("time", f"{format_time(summary.seconds)} for {amount}, compilation included"),
        ("start", started),
        ("waiting for data", waited),
    ]
    if summary.goodput:
        facts.append(("goodput", _goodput_fact(summary.goodput)))
    for name, content in _FILES.items():
        file = summary.out / name
        if file.exists():
            facts.append((str(file), content))
    return facts


def _goodput_fact(goodput: Mapping[str, float]) -> str:
    """Formats where the time of a run went: `91.2% of the time since it began; compiling 4.1%,
    saving 3.0%`."""
    causes = sorted((name for name in goodput if name != METRIC), key=goodput.__getitem__)
    shares = [
        f"{name.removeprefix('time ')} {goodput[name]:.1%}" for name in causes[: -_CAUSES - 1 : -1]
    ]
    text = f"{goodput[METRIC]:.1%} of the time since its first event"
    return f"{text}; {', '.join(shares)}" if shares else text


def print_forecast_gaps(console: Console, gaps: Sequence["ForecastGap"]) -> None:
    """Prints the predicted and measured seconds of a step, by part."""
    columns = [
        Column("part", cell="part"),
        Column("predicted", "seconds", "predicted"),
        Column("measured", "seconds", "measured"),
        Column("difference", "seconds", "seconds"),
    ]
    note = f"largest difference: {gaps[0].part}"
    print_blocks(console, "time per step", "", [Table.of(gaps, columns, note=note)])

"""Reports of results that a notebook shows below a cell: a run, a plan, parity, an
evaluation, generated texts."""

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.analysis.programs import Census
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.generation.generator import Generated
from meshwright.planner.search import Plan
from meshwright.runs.catalogue import list_recipes
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict, split_chosen
from meshwright.trainer.divergence import Difference, Divergence
from meshwright.trainer.evaluation import BatchEvaluation, Evaluation
from meshwright.trainer.loop import Summary
from meshwright.trainer.parity import Parity
from meshwright.views.blocks import Code, Column, Figure, Figures, Table
from meshwright.views.census_page import census_page
from meshwright.views.plan_page import single_plan_page
from meshwright.views.report import Report, Section
from meshwright.views.run_folder import flat_fields, open_folders
from meshwright.views.run_page import chosen_and_resolved, fields_table, run_page

_TEXTS = 32
"""Generated texts on a page."""


def page_of(result: Any) -> Report:
    """Returns the report of a result. Raises TypeError for a type without one."""
    for kind, report in _PAGES.items():
        if isinstance(result, kind):
            return report(result)
    raise TypeError(f"a {type(result).__name__} has no page")


def _configuration_page(run: Run) -> Report:
    document = run_to_dict(run)
    recipe = None
    if run.name in list_recipes():
        recipe = run_to_dict(find_recipe(run.name))
    blocks = chosen_and_resolved(document, recipe)
    fields = flat_fields(split_chosen(document)[0])
    place = f"on mesh {run.mesh}" if run.mesh else "on all devices that are found"
    lead = f"{run.training.steps:,} steps of {run.training.batch} x {run.training.seq} {place}"
    sections = [Section("Configuration", [*blocks, fields_table(fields, "Every field")])]
    return Report(run.name, sections, topic="run", lead=lead, height=560)


def parity_page(result: Parity) -> Report:
    """Returns the report of a comparison: step by step,
    and the tensors of one step layer by layer."""
    first, second = result.meshes
    sections: list[Section] = []
    if result.steps:
        sections.append(_steps_section(result))
    if result.tensors is not None:
        sections.append(_tensors_section(result, result.tensors))
    title = f"{first} against {second}"
    return Report(title, sections, topic="parity", lead=result.note, height=360)


def _steps_section(result: Parity) -> Section:
    """Returns losses and gradients of every step."""
    first, second = result.meshes
    columns = [
        Column("step", "integer", "step"),
        Column(f"loss, {first}", cell=lambda step: f"{step.losses[0]:.7f}"),
        Column(f"loss, {second}", cell=lambda step: f"{step.losses[1]:.7f}"),
        Column("gradients differ by", cell=lambda step: f"{step.gradient_difference:.1e}"),
        Column("most in", cell="worst_tensor"),
    ]
    note = "equal within 1e-05: losses, and gradients on each tensor's own scale"
    if result.first_divergence:
        note = f"first divergence: {result.first_divergence}"
    table = Table.of(result.steps, columns, title="Every step", note=note, printed=None)
    return Section("Parity", [_parity_figures(result), table])


def _tensors_section(result: Parity, tensors: Divergence) -> Section:
    """Returns the first tensor that diverges, and the worst of each layer."""
    first = tensors.first
    count = f"{len(tensors.differences)} tensors of step {result.tensors_of_step}"
    figures = [Figure("first difference", "none beyond rounding", count, "good")]
    if first is not None:
        where = (
            f"differs by {first.largest:.1e} of its scale; rounding explains {first.rounding:.1e}"
        )
        figures = [Figure("first difference", str(first.name), where, "bad")]
    if result.unequal_initial:
        figures.append(Figure("unequal before the step", ", ".join(result.unequal_initial)))
    if result.devices:
        figures.append(Figure("computed by", ", ".join(result.devices)))
    columns = [
        Column("", cell="where"),
        Column("activations", cell="forward"),
        Column("their gradients", cell="backward"),
        Column("gradients of parameters", cell="parameters"),
    ]
    rows = [_row_of_layer(where, passes) for where, passes in tensors.by_layer()]
    note = (
        "the tensor of each layer that differs most: by how much of its scale, and in brackets how "
        "much rounding explains; ! where it is more"
    )
    missing = sorted({name.rpartition(", ")[2] for name in tensors.only})
    if missing:
        note += f"; not compared, as one side has none: {', '.join(missing)}"
    table = Table.of(rows, columns, title="By layer", note=note, printed=None)
    return Section("Tensors", [Figures(figures), table])


def _row_of_layer(where: str, passes: Mapping[str, Difference]) -> dict[str, str]:
    """Returns the cells of a layer's worst differences."""
    row = {"where": where, "forward": "", "backward": "", "parameters": ""}
    for name, difference in passes.items():
        mark = "" if difference.is_explained else "! "
        tensor = difference.name.name
        row[name] = f"{mark}{tensor} {difference.largest:.1e} ({difference.rounding:.1e})"
    return row


def _parity_figures(result: Parity) -> Figures:
    meshes = Figure("meshes", "agree", "in float32", "good")
    if result.first_divergence:
        meshes = Figure("meshes", "differ", "in float32", "bad")
    initial = "bitwise equal"
    if result.unequal_initial:
        initial = f"{len(result.unequal_initial)} differ"
    return Figures(
        [
            meshes,
            Figure("initial values", initial, ", ".join(result.unequal_initial)),
            Figure("steps", f"{len(result.steps)}"),
        ]
    )


def _evaluation_page(result: Evaluation) -> Report:
    tokens = f"{format_count(result.tokens)} tokens"
    return _metrics_page(
        result.step,
        Figure("loss", f"{result.loss:.4f}", "nats per token"),
        Figure("perplexity", f"{result.perplexity:.4g}"),
        Figure("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers"),
        Figure("predicted", tokens, f"of {result.samples:,} sequences"),
    )


def _batch_evaluation_page(result: BatchEvaluation) -> Report:
    figures = [Figure(name, f"{value:.5g}") for name, value in result.metrics.items()]
    return _metrics_page(result.step, *figures)


def _metrics_page(step: int, *figures: Figure) -> Report:
    sections = [Section("Held-out data", [Figures(figures)])]
    return Report(f"Evaluation of step {step:,}", sections, topic="evaluation", height=360)


def _generated_page(result: Generated) -> Report:
    report = result.report
    texts = []
    for number in range(min(_TEXTS, len(result.texts))):
        logprobs = result.logprobs[number]
        mean = f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "unknown"
        title = (
            f"Text {number + 1}: {len(result.tokens[number])} tokens, mean log-probability {mean}"
        )
        texts.append(Code(result.texts[number], title=title))
    more = len(result.texts) - len(texts)

    decoded = f"{report.decode_tokens_per_second:,.4g} tokens/s"
    first_token = format_step(report.first_token_seconds)
    weights = f"of a device, {report.weights}"
    figures = [
        Figure("new tokens", f"{report.new_tokens:,}", f"of {report.prompts} prompts"),
        Figure("decode", decoded, "all texts together"),
        Figure("first token", first_token, f"{report.prompt_tokens:,} prompt tokens"),
        Figure("weights", format_bytes(report.weight_bytes), weights),
        Figure("cache", format_bytes(report.cache_bytes), "of a device"),
    ]
    sections = [
        Section("Texts", texts, f"{more} more are in `texts`." if more else ""),
        Section("Speed", [Figures(figures)]),
    ]
    return Report("Generated text", sections, topic="generation", height=480)


def _summary_page(result: Summary) -> Report:
    return run_page(open_folders([result.out]))


_PAGES: dict[type, Callable[[Any], Report]] = {
    Run: _configuration_page,
    Summary: _summary_page,
    Plan: single_plan_page,
    Census: census_page,
    Parity: parity_page,
    Evaluation: _evaluation_page,
    BatchEvaluation: _batch_evaluation_page,
    Generated: _generated_page,
}
"""Type of a result -> its report."""

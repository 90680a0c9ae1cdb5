"""Reports of results that a notebook shows below a cell: a run, a plan, parity, an evaluation, generated texts."""

from collections.abc import Callable
from typing import Any

from meshwright.analysis.programs import Census
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.generation.generator import Generated
from meshwright.planner.search import Plan
from meshwright.runs.catalogue import list_recipes
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict, split_chosen
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
    document, recipe = run_to_dict(run), None
    if run.name in list_recipes():
        recipe = run_to_dict(find_recipe(run.name))
    blocks = chosen_and_resolved(document, recipe)
    fields = flat_fields(split_chosen(document)[0])
    where = f"on mesh {run.mesh}" if run.mesh else "on all devices that are found"
    lead = f"{run.training.steps:,} steps of {run.training.batch} x {run.training.seq} {where}"
    sections = [Section("Configuration", [*blocks, fields_table(fields, "Every field")])]
    return Report(run.name, sections, topic="run", lead=lead, height=560)


def parity_page(result: Parity) -> Report:
    """Returns the report of a comparison of two meshes, step by step."""
    divergence = result.first_divergence
    initial = f"{len(result.unequal_initial)} differ" if result.unequal_initial else "bitwise equal"
    figures = [
        Figure(
            "meshes",
            "differ" if divergence else "agree",
            "in float32",
            "bad" if divergence else "good",
        ),
        Figure("initial values", initial, ", ".join(result.unequal_initial)),
        Figure("steps", f"{len(result.steps)}"),
    ]
    agreement = "equal within 1e-05: losses, and gradients on each tensor's own scale"
    first, second = result.meshes
    columns = [
        Column("step", "integer", "step"),
        Column(f"loss, {first}", cell=lambda row: f"{row.losses[0]:.7f}"),
        Column(f"loss, {second}", cell=lambda row: f"{row.losses[1]:.7f}"),
        Column("gradients differ by", cell=lambda row: f"{row.gradient_difference:.1e}"),
        Column("most in", cell="worst_tensor"),
    ]
    note = f"first divergence: {divergence}" if divergence else agreement
    blocks = [
        Figures(figures),
        Table.of(result.steps, columns, title="Every step", note=note, printed=None),
    ]
    return Report(
        " against ".join(result.meshes), [Section("Parity", blocks)], topic="parity", height=360
    )


def _evaluation_page(result: Evaluation) -> Report:
    return _metrics_page(
        result.step,
        Figure("loss", f"{result.loss:.4f}", "nats per token"),
        Figure("perplexity", f"{result.perplexity:.4g}"),
        Figure("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers"),
        Figure(
            "predicted", f"{format_count(result.tokens)} tokens", f"of {result.samples:,} sequences"
        ),
    )


def _metrics_page(step: int, *figures: Figure) -> Report:
    sections = [Section("Held-out data", [Figures(figures)])]
    return Report(f"Evaluation of step {step:,}", sections, topic="evaluation", height=360)


def _generated_page(result: Generated) -> Report:
    report, texts = result.report, []
    figures = [
        Figure("new tokens", f"{report.new_tokens:,}", f"of {report.prompts} prompts"),
        Figure("decode", f"{report.decode_tokens_per_second:,.4g} tokens/s", "all texts together"),
        Figure(
            "first token",
            format_step(report.first_token_seconds),
            f"{report.prompt_tokens:,} prompt tokens",
        ),
        Figure("weights", format_bytes(report.weight_bytes), f"of a device, {report.weights}"),
        Figure("cache", format_bytes(report.cache_bytes), "of a device"),
    ]
    shown = zip(
        result.texts[:_TEXTS], result.tokens[:_TEXTS], result.logprobs[:_TEXTS], strict=True
    )
    for number, (text, tokens, logprobs) in enumerate(shown, 1):
        mean = f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "unknown"
        texts.append(
            Code(text, title=f"Text {number}: {len(tokens)} tokens, mean log-probability {mean}")
        )
    more = len(result.texts) - len(texts)
    sections = [
        Section("Texts", texts, f"{more} more are in `texts`." if more else ""),
        Section("Speed", [Figures(figures)]),
    ]
    return Report("Generated text", sections, topic="generation", height=480)


_PAGES: dict[type, Callable[[Any], Report]] = {
    Run: _configuration_page,
    Summary: lambda summary: run_page(open_folders([summary.out])),
    Plan: single_plan_page,
    Census: census_page,
    Parity: parity_page,
    Evaluation: _evaluation_page,
    BatchEvaluation: lambda e: _metrics_page(
        e.step, *(Figure(k, f"{v:.5g}") for k, v in e.metrics.items())
    ),
    Generated: _generated_page,
}
"""Type of a result -> its report."""

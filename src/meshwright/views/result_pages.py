"""Reports of results that a notebook shows below a cell: a run, a plan, parity, an evaluation, generated texts."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from meshwright.analysis.census import Census
from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.generation.generator import Generated
from meshwright.planner.search import Plan
from meshwright.runs.catalogue import list_recipes
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.trainer.evaluation import BatchEvaluation, Evaluation
from meshwright.trainer.parity import Parity
from meshwright.views.blocks import Code, Figure, Figures
from meshwright.views.census_page import census_page
from meshwright.views.plan_page import single_plan_page
from meshwright.views.report import Report, Section
from meshwright.views.run_folder import flat_fields
from meshwright.views.run_page import fields_table, parity_blocks, recipe_differences

_TEXTS = 32
"""Generated texts on a page."""


def result_html(value: Any) -> str:
    """Returns the page of a result as a frame for a notebook. Raises TypeError for a type without a report."""
    for kind, (report, height) in REPORTS.items():
        if isinstance(value, kind):
            return report(value).frame(height)
    raise TypeError(f"a {type(value).__name__} has no page")


def configuration_page(run: Run) -> Report:
    """Returns the report of a Run: how it differs from its recipe, and all of its fields."""
    fields = flat_fields(run_to_dict(run))
    recipe = run_to_dict(find_recipe(run.name)) if run.name in list_recipes() else None
    blocks = [] if recipe is None else recipe_differences(fields, recipe, "Differences")
    where = f"on mesh {run.mesh}" if run.mesh else "on all devices that are found"
    lead = f"{run.training.steps:,} steps of {run.training.batch} x {run.training.seq} {where}"
    sections = [Section("Configuration", [*blocks, fields_table(fields, "Every field")])]
    return Report(run.name, sections, topic="run", lead=lead)


def parity_page(result: Parity) -> Report:
    """Returns the report of a comparison of two meshes, step by step."""
    first, second = result.meshes
    divergence = result.first_divergence
    initial = f"{len(result.unequal_initial)} differ" if result.unequal_initial else "bitwise equal"
    figures = [
        Figure("meshes", "differ" if divergence else "agree", "in float32", "bad" if divergence else "good"),
        Figure("initial values", initial, ", ".join(result.unequal_initial)),
        Figure("steps", f"{len(result.steps)}"),
    ]
    document = json.loads(json.dumps({**dataclasses.asdict(result), "first_divergence": divergence}))
    blocks = parity_blocks(document, "Every step")
    return Report(f"{first} against {second}", [Section("Parity", [Figures(figures), *blocks])], topic="parity")


def evaluation_page(result: Evaluation | BatchEvaluation) -> Report:
    """Returns the report of an evaluation; of a wrapped model, each of its metrics."""
    if isinstance(result, BatchEvaluation):
        figures = [Figure(name, f"{value:.5g}") for name, value in result.metrics.items()]
    else:
        figures = [
            Figure("loss", f"{result.loss:.4f}", "nats per token"),
            Figure("perplexity", f"{result.perplexity:.4g}"),
            Figure("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers"),
            Figure("predicted", f"{format_count(result.tokens)} tokens", f"of {result.samples:,} sequences"),
        ]
    sections = [Section("Held-out data", [Figures(figures)])]
    return Report(f"Evaluation of step {result.step:,}", sections, topic="evaluation")


def generated_page(result: Generated) -> Report:
    """Returns the report of generated texts, and how fast they came."""
    report = result.report
    figures = [
        Figure("new tokens", f"{report.new_tokens:,}", f"of {report.prompts} prompts"),
        Figure("decode", f"{report.decode_tokens_per_second:,.4g} tokens/s", "all texts together"),
        Figure("first token", format_step(report.first_token_seconds), f"{report.prompt_tokens:,} prompt tokens"),
        Figure("weights", format_bytes(report.weight_bytes), f"of a device, {report.weights}"),
        Figure("cache", format_bytes(report.cache_bytes), "of a device"),
    ]
    texts: list[Code] = []
    for text, tokens, logprobs in list(zip(result.texts, result.tokens, result.logprobs, strict=True))[:_TEXTS]:
        mean = f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "unknown"
        texts.append(Code(text, title=f"Text {len(texts) + 1}: {len(tokens)} tokens, mean log-probability {mean}"))
    more = len(result.texts) - len(texts)
    sections = [
        Section("Texts", texts, f"{more} more are in `texts`." if more else ""),
        Section("Speed", [Figures(figures)]),
    ]
    return Report("Generated text", sections, topic="generation")


REPORTS: dict[type, tuple[Callable[[Any], Report], int]] = {
    Run: (configuration_page, 560),
    Plan: (single_plan_page, 720),
    Census: (census_page, 720),
    Parity: (parity_page, 360),
    Evaluation: (evaluation_page, 360),
    BatchEvaluation: (evaluation_page, 360),
    Generated: (generated_page, 480),
}
"""Type of a result -> what describes it, and the pixels of its frame in a notebook."""

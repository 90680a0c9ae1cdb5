"""Pages of results that a notebook shows below a cell: a run, a plan, parity, an evaluation, generated texts."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.formatting import format_bytes, format_count, format_step
from meshwright.generation.generator import Generated
from meshwright.planner.search import Plan
from meshwright.runs.recipe import find_recipe, list_recipes
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.trainer.evaluation import BatchEvaluation, Evaluation
from meshwright.trainer.parity import Parity
from meshwright.views.layout_page import layout_sections
from meshwright.views.pages import Block, Cell, Code, Column, Figure, Figures, Page, Section, Table, inline
from meshwright.views.plan_page import machine_of_target, plan_inspector
from meshwright.views.run_folder import flat_fields
from meshwright.views.run_page_tables import parity_table

_TEXTS = 32
"""Generated texts on a page."""


def result_html(value: Any) -> str:
    """Returns the page of a result as a frame for a notebook. Raises TypeError for a type without a page."""
    for kind, page in PAGES.items():
        if isinstance(value, kind):
            return inline(page(value), _HEIGHTS.get(kind, 360))
    raise TypeError(f"a {type(value).__name__} has no page")


def configuration_page(run: Run) -> Page:
    """Returns the page of a Run: how it differs from its recipe, and all of its fields."""
    fields = flat_fields(run_to_dict(run))
    blocks: list[Block] = []
    if run.name in list_recipes():
        recipe = flat_fields(run_to_dict(find_recipe(run.name)))
        changed: list[list[Cell]] = [
            [name, recipe.get(name, ""), value] for name, value in fields.items() if recipe.get(name) != value
        ]
        columns = [Column("field"), Column(f"recipe {run.name}", wide=True), Column("this run", wide=True)]
        if changed:
            blocks.append(Table(columns, changed, title=f"Differences from the recipe {run.name}"))
    rows: list[list[Cell]] = [list(row) for row in fields.items()]
    columns = [Column("field"), Column("value", wide=True)]
    blocks.append(Table(columns, rows, searchable=True, shown=20, title="Every field"))
    where = f"on mesh {run.mesh}" if run.mesh else "on all devices that are found"
    lead = f"{run.training.steps:,} steps of {run.training.batch} x {run.training.seq} {where}"
    return Page(run.name, [Section("Configuration", blocks)], topic="run", lead=lead)


def single_plan_page(plan: Plan) -> Page:
    """Returns the page of one plan without its search: where its seconds and bytes go, and its tensors on devices."""
    e, state = plan.estimate, "fits" if plan.estimate.fits else "does not fit"
    inspector = plan_inspector({"p0": plan}, {"p0": state}, "p0", 0)
    lead = (
        f"{plan.name}, predicted: {format_step(e.seconds)} per step, {e.mfu:.0%} MFU, "
        f"{format_bytes(e.bytes)} of {format_bytes(e.hbm_bytes)} per device"
    )
    sections = [Section("Prediction", [inspector]), *layout_sections(plan.placed, machine_of_target(plan.target))]
    return Page(f"{plan.run.name} on {plan.target}", sections, topic="plan", lead=lead)


def parity_page(result: Parity) -> Page:
    """Returns the page of a comparison of two meshes, step by step."""
    first, second = result.meshes
    initial = ", ".join(result.unequal_initial) or "bitwise equal"
    figures = Figures(
        [
            Figure("meshes", "differ" if result.first_divergence else "agree", f"{first} and {second}",
                   "bad" if result.first_divergence else "good"),
            Figure("initial values", initial if len(initial) < _TEXTS else f"{len(result.unequal_initial)} differ"),
            Figure("steps", f"{len(result.steps)}", "in float32"),
        ]
    )  # fmt: skip
    document = json.loads(json.dumps(dataclasses.asdict(result) | {"first_divergence": result.first_divergence}))
    table = parity_table(document, "Every step")
    return Page(f"{first} against {second}", [Section("Parity", [figures, *table])], topic="parity")


def evaluation_page(result: Evaluation) -> Page:
    """Returns the page of an evaluation."""
    figures = [
        Figure("loss", f"{result.loss:.4f}", "nats per token"),
        Figure("perplexity", f"{result.perplexity:.4g}"),
        Figure("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers"),
        Figure("predicted", f"{format_count(result.tokens)} tokens", f"of {result.samples:,} sequences"),
    ]
    return Page(
        f"Evaluation of step {result.step:,}", [Section("Held-out text", [Figures(figures)])], topic="evaluation"
    )


def batch_evaluation_page(result: BatchEvaluation) -> Page:
    """Returns the page of an evaluation of a wrapped model: each of its metrics."""
    figures = [Figure(name, f"{value:.5g}") for name, value in result.metrics.items()]
    return Page(
        f"Evaluation of step {result.step:,}", [Section("Held-out data", [Figures(figures)])], topic="evaluation"
    )


def generated_page(result: Generated) -> Page:
    """Returns the page of generated texts, and how fast they came."""
    report = result.report
    figures = [
        Figure("new tokens", f"{report.new_tokens:,}", f"of {report.prompts} prompts"),
        Figure("decode", f"{report.decode_tokens_per_second:,.4g} tokens/s", "all texts together"),
        Figure("first token", format_step(report.first_token_seconds), f"{report.prompt_tokens:,} prompt tokens"),
        Figure("weights", format_bytes(report.weight_bytes), f"of a device, {report.weights}"),
        Figure("cache", format_bytes(report.cache_bytes), "of a device"),
    ]
    texts: Sequence[Block] = [
        Code(text, title=f"Text {number}: {len(tokens)} tokens, mean log-probability {_mean(logprobs)}")
        for number, (text, tokens, logprobs) in enumerate(
            zip(result.texts, result.tokens, result.logprobs, strict=True), 1
        )
    ][:_TEXTS]
    more = len(result.texts) - len(texts)
    note = f"{more} more are in `texts`." if more else ""
    return Page(
        "Generated text", [Section("Texts", texts, note), Section("Speed", [Figures(figures)])], topic="generation"
    )


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "unknown"


PAGES: dict[type, Callable[[Any], Page]] = {
    Run: configuration_page, Plan: single_plan_page, Parity: parity_page, Evaluation: evaluation_page,
    BatchEvaluation: batch_evaluation_page, Generated: generated_page,
}  # fmt: skip
"""Type of a result -> what makes its page."""
_HEIGHTS: dict[type, int] = {Plan: 720, Run: 560, Generated: 480}
"""Type of a result -> pixels of its frame in a notebook."""

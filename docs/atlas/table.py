"""Writes the table of docs/atlas/index.md and a plan page of each run of docs/atlas/runs.

`python docs/atlas/table.py [NAME ...]` takes some minutes for the searches; with names only those runs are priced anew.
`atlas.json` keeps their figures, so that a test can hold the predictions to them.
"""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from meshwright.config import MeshShape, Training
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.estimate import Estimate
from meshwright.planner.search import OFFLOADING, Plan, is_roomy, price_run, search
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.views.plan_page import plan_page
from meshwright.views.report import Report

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "bench" / "foresight"))
from other_programs import SOFTWARE, estimate_program  # noqa: E402

_BEGIN, _END = "<!-- table: docs/atlas/table.py -->\n", "<!-- end of the table -->\n"
_SENTENCES = "<!-- sentences: docs/atlas/table.py -->\n"
_SENTENCES_END = "<!-- end of the sentences -->\n"
_WHOLE_LOGITS = 2**20
"""MiB of logits at once: other programs compute those of a microbatch together."""
_LOGITS_MIB = 1024
"""MiB of logits at once in Meshwright's step, as the recipes of large models have it."""


_SHOWN = 80
"""Plans on a page that fit, and as many that do not."""


class Source(msgspec.Struct, forbid_unknown_fields=True):
    """Where a fact was published."""

    states: str
    where: str
    url: str


class Difference(msgspec.Struct, forbid_unknown_fields=True):
    """How the priced run differs from the published one."""

    what: str


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """Published speed, and tokens and chip-hours of the training; None where the sources do not have it."""

    seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_chip: float | None = None
    mfu: float | None = None
    tokens: float | None = None
    chip_hours: float | None = None


class Step(msgspec.Struct, forbid_unknown_fields=True):
    """Machine, mesh and program of a step; the bandwidths are bytes per second of a device, one way."""

    on: str
    program: str
    mesh: str
    layout: str = "fsdp"
    training: dict[str, Any] = {}
    network_bandwidth: float | None = None
    nvlink_bandwidth: float | None = None


class Facts(msgspec.Struct, forbid_unknown_fields=True):
    """A file of docs/atlas/runs.

    `model` and `step.training` change fields of the recipe, `instead` those of the training that the planner chooses a
    plan for.
    """

    title: str
    summary: str
    year: int
    recipe: str
    step: Step
    published: Published
    sources: tuple[Source, ...]
    model: dict[str, Any] = {}
    instead: dict[str, Any] = {}
    differs: tuple[Difference, ...] = ()
    reason: str = ""

    def target(self) -> Target:
        """Returns the machine, with the links that the published one had otherwise."""
        target = parse_target(self.step.on)
        chip = target.chip
        if self.step.network_bandwidth is not None:
            chip = dataclasses.replace(chip, network_bandwidth=self.step.network_bandwidth)
        if self.step.nvlink_bandwidth is not None:
            assert isinstance(chip.interconnect, Nodes)
            links = dataclasses.replace(chip.interconnect, link_bandwidth=self.step.nvlink_bandwidth)
            chip = dataclasses.replace(chip, interconnect=links)
        return dataclasses.replace(target, chip=chip)

    def placed(self) -> PlacedRun:
        """Returns the published run on its mesh."""
        recipe = find_recipe(self.recipe)
        training = _changed(recipe.training, {**self.step.training, "logits_mib": _WHOLE_LOGITS})
        shape = MeshShape.parse(self.step.mesh)
        run = dataclasses.replace(
            recipe, model=_changed(recipe.model, self.model), training=training, layout=self.step.layout, mesh=shape
        )
        return place_run(run, shape)

    def published_step(self, priced: Estimate) -> tuple[float, float]:
        """Returns the published seconds per step and MFU: as published, or what follows from the other figures.

        priced: estimate of the same step, whose FLOPs count where an MFU was published without seconds, or none.
        """
        p, tokens, flops = self.published, priced.tokens, priced.model_flops
        chips = self.target().chips
        if p.seconds is not None:
            seconds = p.seconds
        elif p.tokens_per_second is not None:
            seconds = tokens / p.tokens_per_second
        elif p.tokens_per_second_per_chip is not None:
            seconds = tokens / (p.tokens_per_second_per_chip * chips)
        elif p.mfu is not None:
            seconds = flops / (p.mfu * priced.peak)
        else:
            assert p.chip_hours is not None and p.tokens is not None
            seconds = p.chip_hours / chips * tokens / p.tokens * 3600
        return seconds, flops / (seconds * priced.peak) if p.mfu is None else p.mfu


def read_facts(file: Path) -> Facts:
    """Reads a file of facts."""
    return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Facts)


def priced(file: Path) -> tuple[dict[str, Any], Report]:
    """Returns the prices of a published run and of the best plan of its model, batch and machine, and a page."""
    facts = read_facts(file)
    placed, target = facts.placed(), facts.target()
    predicted = estimate_program(placed, target, SOFTWARE[facts.step.program])
    searched = dataclasses.replace(
        placed.run.training, microbatches=1, remat="auto", pipeline_schedule="auto", stage_saves="auto",
        logits_mib=_LOGITS_MIB,
    )  # fmt: skip
    free = dataclasses.replace(placed.run, mesh=None, layout="fsdp", training=_changed(searched, facts.instead))
    found = search(free, target, (placed.layout.shape,))
    chunked: Training = dataclasses.replace(placed.run.training, logits_mib=_LOGITS_MIB)
    own = price_run(dataclasses.replace(placed.run, training=chunked), target)
    best = found.plans[0]
    same = own if own.estimate.fits else next((plan for plan in found.plans if plan.mesh == placed.layout.shape), None)
    seconds, mfu = facts.published_step(predicted)
    saved = None if same is None else 1 - best.estimate.seconds / same.estimate.seconds
    record = {
        "name": file.stem, "title": facts.title, "year": facts.year, "source": facts.sources[0].url,
        "target": str(target), "mesh": str(placed.layout.shape), "published_seconds": seconds, "published_mfu": mfu,
        "predicted_seconds": predicted.seconds, "predicted_mfu": predicted.mfu, "plan": best.name,
        "plan_seconds": best.estimate.seconds, "saved": saved,
        "own_seconds": None if same is None else same.estimate.seconds,
        "rule": None if same is None else rule_against(same),
        "experts": any(layer.experts for layer in placed.layout.spec.layers),
    }  # fmt: skip
    page = plan_page(best, found, compared=(best, same or own), most=_SHOWN)
    return record, dataclasses.replace(page, title=facts.title)


def rule_against(plan: Plan) -> str:
    """Names the rule by which the planner does not choose a plan that may be faster; an empty text without one."""
    chip, bytes_planned = plan.target.chip, plan.estimate.bytes
    if not plan.estimate.fits:
        return "the published mesh does not fit with Meshwright's step"
    if not is_roomy(plan):
        return (
            f"it takes {bytes_planned / chip.hbm_bytes:.0%} of a device's memory, and plans that take at most "
            f"{chip.roomy_bytes / chip.hbm_bytes:.0%} come first"
        )
    if plan.run.training.remat in OFFLOADING:
        return "it offloads activations to the hosts, which is never chosen"
    return ""


def sentences(records: list[dict[str, Any]]) -> str:
    """Returns what the table says, in sentences that follow from its figures."""
    dense = [r for r in records if not r["experts"]]
    mixtures = [r for r in records if r["experts"]]
    lines = []
    for name, group in (("Dense models", dense), ("Mixtures of experts", mixtures)):
        errors = [r["predicted_seconds"] / r["published_seconds"] - 1 for r in group]
        lines.append(
            f"- **{name}** on the published mesh, {len(group)} runs, are predicted with errors from {min(errors):+.0%} "
            f"to {max(errors):+.0%}."
        )
    compared = [r for r in records if r["saved"] is not None]
    faster = [r for r in compared if r["saved"] > 0]
    slower = [r for r in compared if r["saved"] < 0]
    text = f"- **The planner's plan** is faster than the published mesh in {len(faster)} of {len(compared)} runs"
    lines.append(f"{text} that fit there with Meshwright's step, and slower in {len(slower)}.")
    for r in slower:
        because = r["rule"] or "the search did not price the published settings"
        lines.append(
            f"    - {r['title']}: {r['plan_seconds']:.3g} s, and {r['own_seconds']:.3g} s on the published mesh: {because}."
        )
    behind = [r for r in records if r["plan_seconds"] > r["published_seconds"]]
    listed = ", ".join(f"{r['title']} in {r['plan_seconds']:.3g} s" for r in behind)
    lines.append(
        f"- **A smaller step time is not a promise.** Both sides of the planner's choice are predicted with Meshwright's "
        f"constants. Where its program is slower than the published one, its plan can be slower than what was published: "
        f"{listed}."
    )
    return "\n".join(lines) + "\n"


def table(records: list[dict[str, Any]]) -> str:
    """Returns the table of published and predicted steps, and what the planner's choice saves."""
    lines = [
        "| run | facts | machine | published mesh | step: published | predicted | error | MFU: published | predicted "
        "| planner's plan | saves |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        lines.append(
            f"| [{r['title']}](pages/{r['name']}.html) ({r['year']}) | [file](runs/{r['name']}.toml) | {r['target']} | "
            f"{r['mesh']} | [{r['published_seconds']:.3g} s]({r['source']}) | {r['predicted_seconds']:.3g} s | "
            f"{r['predicted_seconds'] / r['published_seconds'] - 1:+.0%} | {r['published_mfu']:.1%} | "
            f"{r['predicted_mfu']:.1%} | {r['plan']} | {'-' if r['saved'] is None else format(r['saved'], '+.1%')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the plan pages, atlas.json and the table."""
    kept, records = {record["name"]: record for record in json.loads((HERE / "atlas.json").read_text())}, []
    for file in sorted((HERE / "runs").glob("*.toml")):
        if file.stem in kept and sys.argv[1:] and file.stem not in sys.argv[1:]:
            records.append(kept[file.stem])
            continue
        record, page = priced(file)
        page.write(HERE / "pages" / f"{file.stem}.html")
        records.append(record)
        print(file.stem)
    (HERE / "atlas.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    index = HERE / "index.md"
    text = index.read_text(encoding="utf-8")
    for begin, end, generated in (
        (_BEGIN, _END, table(records)),
        (_SENTENCES, _SENTENCES_END, sentences(records)),
    ):
        before, rest = text.split(begin)
        text = before + begin + generated + end + rest.split(end, 1)[1]
    index.write_text(text, encoding="utf-8")


def _changed[T](part: T, changes: dict[str, Any]) -> T:
    """Returns a part of a Run with fields changed to values of their types."""
    types = {field.name: field.type for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    values = {name: msgspec.convert(value, types[name]) for name, value in changes.items()}
    return dataclasses.replace(part, **values)  # type: ignore[type-var]


if __name__ == "__main__":
    main()

"""Published training runs from small files of facts: placed, priced, and what the planner would have chosen instead.

A file names a recipe and what its model has otherwise, the machine, the mesh and the program of the run, the published
speed, and the source of each fact (docs/atlas/runs has ten).
"""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import msgspec

from meshwright.config import MeshShape, Training
from meshwright.errors import ConfigError, nearest
from meshwright.hardware.chips import Nodes
from meshwright.hardware.targets import Target, parse_target
from meshwright.planner.estimate import Estimate, estimate
from meshwright.planner.published_facts import Facts, Published, Source, Step, read_facts
from meshwright.planner.search import Plan, SearchResult, price_run, search
from meshwright.planner.software import SOFTWARE, Software
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.recipe import find_recipe
from meshwright.runs.run import Run

_WHOLE_LOGITS = 2**20
"""MiB of logits at once: other programs compute those of a microbatch together."""
_LOGITS_MIB = 1024
"""MiB of logits at once in Meshwright's step, as the recipes of large models have it."""


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A published training run as a run of this package."""

    name: str
    """Name of its file, without the suffix."""
    title: str
    summary: str
    year: int
    placed: PlacedRun
    target: Target
    software: Software
    """Program whose constants price it."""
    published: Published
    sources: tuple[Source, ...]
    """Where the facts were published; the first has the speed."""
    differs: tuple[str, ...]
    """How the priced run differs from the published one."""
    reason: str
    """Why the prediction is off."""
    instead: Training
    """Training that the planner chooses a plan for."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.placed.run.training.batch * self.placed.run.training.seq

    def published_seconds(self, priced: Estimate) -> tuple[float, str]:
        """Returns the published seconds per step and the figure that they follow from.

        priced: estimate of the same step, whose FLOPs an MFU refers to.
        """
        p = self.published
        if p.seconds is not None:
            return p.seconds, "published"
        if p.tokens_per_second is not None:
            return self.tokens_per_step / p.tokens_per_second, "from the published tokens/s"
        if p.tokens_per_second_per_chip is not None:
            rate = p.tokens_per_second_per_chip * self.target.chips
            return self.tokens_per_step / rate, "from the published tokens/s and chip"
        if p.chip_hours is not None and p.tokens is not None and p.mfu is None:
            hours = p.chip_hours / self.target.chips * self.tokens_per_step / p.tokens
            return hours * 3600, "from the published chip-hours and tokens"
        assert p.mfu is not None
        return priced.model_flops / (p.mfu * priced.peak), "from the published MFU"

    def published_mfu(self, priced: Estimate) -> tuple[float, str]:
        """Returns the published MFU and who counted its FLOPs: the publisher, or where it gave none `models/flops.py`.

        priced: estimate of the same step.
        """
        if self.published.mfu is not None:
            return self.published.mfu, "as published"
        seconds, _ = self.published_seconds(priced)
        return priced.model_flops / (seconds * priced.peak), "by our count of FLOPs, of the published step"


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A published run, priced, and the planner's choice for the same model, batch and machine."""

    run: PublishedRun
    predicted: Estimate
    """Step of the published mesh with the published program's constants."""
    own: Plan
    """The published layout with Meshwright's step, whether it fits or not."""
    same_mesh: Plan | None
    """`own`, or where that does not fit, the fastest plan that does on its mesh."""
    found: SearchResult
    """Search for Meshwright's step."""

    @property
    def best(self) -> Plan | None:
        """The fastest plan of the search; None where nothing fits."""
        return self.found.plans[0] if self.found.plans else None

    @property
    def error(self) -> float:
        """Predicted over published step time, less one."""
        return self.predicted.seconds / self.run.published_seconds(self.predicted)[0] - 1

    @property
    def saved(self) -> float | None:
        """Fraction of a step that the planner's choice saves against `same_mesh`; None where one of them is missing."""
        if self.best is None or self.same_mesh is None:
            return None
        return max(0.0, 1 - self.best.estimate.seconds / self.same_mesh.estimate.seconds)


def read_published(file: Path) -> PublishedRun:
    """Reads a file of facts. Raises ConfigError naming the file and the field that is missing, unknown or refused."""
    facts = read_facts(file)
    try:
        return _published_run(file, facts)
    except ConfigError as error:
        raise ConfigError(f"{error.asked}, in {file}", error.truth, error.fix) from error


def _published_run(file: Path, facts: Facts) -> PublishedRun:
    step = facts.step
    if step.program not in SOFTWARE:
        raise ConfigError(f"program {step.program!r}", "it has no constants", nearest(step.program, SOFTWARE))
    recipe = find_recipe(facts.recipe)
    training = _changed("step.training", recipe.training, {**step.training, "logits_mib": _WHOLE_LOGITS})
    model = _changed("model", recipe.model, facts.model)
    run = dataclasses.replace(
        recipe, name=file.stem, model=model, training=training, layout=step.layout, mesh=MeshShape.parse(step.mesh)
    )
    target = _machine(step)
    placed = _placed(run, target)
    return PublishedRun(
        file.stem, facts.title, facts.summary, facts.year, placed, target, SOFTWARE[step.program], facts.published,
        facts.sources, tuple(difference.what for difference in facts.differs), facts.reason,
        _changed("instead", _searched(training), facts.instead),
    )  # fmt: skip


def price_published(run: PublishedRun) -> Chapter:
    """Prices a published run and searches for the best plan of the same model, batch and machine."""
    predicted = estimate(run.placed, run.target, run.software)
    free = dataclasses.replace(run.placed.run, mesh=None, layout="fsdp", training=run.instead)
    found = search(free, run.target, (run.placed.shape,))
    chunked = dataclasses.replace(run.placed.run.training, logits_mib=_LOGITS_MIB)
    published = dataclasses.replace(run.placed.run, training=chunked)
    own = price_run(published, run.target)
    on_mesh = next((plan for plan in found.plans if plan.mesh == run.placed.shape), None)
    return Chapter(run, predicted, own, own if own.estimate.fits else on_mesh, found)


def _searched(training: Training) -> Training:
    """Returns the training with what the planner chooses left to it: precision, batch and sequence stay."""
    return dataclasses.replace(
        training, microbatches=1, remat="auto", pipeline_schedule="auto", stage_saves="auto", logits_mib=_LOGITS_MIB
    )


def _changed[T](where: str, part: T, changes: dict[str, Any]) -> T:
    """Returns a part of a Run with fields changed. Raises ConfigError for an unknown or ill-typed field."""
    known = {field.name: field.type for field in dataclasses.fields(part)}  # type: ignore[arg-type]
    values = {}
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{where}.{name}", f"{type(part).__name__} has no such field", nearest(name, known))
        try:
            values[name] = msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            choices = [str(choice) for choice in get_args(known[name]) if isinstance(choice, str)]
            fix = nearest(str(value), choices) if choices else "a value of the type that is named"
            raise ConfigError(f"{where}.{name} {value!r}", str(error), fix) from error
    return dataclasses.replace(part, **values)  # type: ignore[type-var]


def _machine(step: Step) -> Target:
    """Returns the machine, with the links that the published one had otherwise."""
    target = parse_target(step.on)
    chip = target.chip
    if step.network_bandwidth is not None:
        chip = dataclasses.replace(chip, network_bandwidth=step.network_bandwidth)
    if step.nvlink_bandwidth is not None:
        if not isinstance(chip.interconnect, Nodes):
            raise ConfigError(f"nvlink_bandwidth on {step.on}", "it has no NVLink", "leave it out")
        links = dataclasses.replace(chip.interconnect, link_bandwidth=step.nvlink_bandwidth)
        chip = dataclasses.replace(chip, interconnect=links)
    return dataclasses.replace(target, chip=chip)


def _placed(run: Run, target: Target) -> PlacedRun:
    shape = run.mesh
    assert shape is not None
    if shape.size != target.devices:
        raise ConfigError(
            f"mesh {shape} on {target}", f"it has {shape.size} devices and the machine {target.devices}",
            "degrees whose product is the number of devices",
        )  # fmt: skip
    return place_run(run, shape)

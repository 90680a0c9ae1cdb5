"""Choices that a Run leaves to the planner (`auto`): remat policy, pipeline schedule, what a pipeline stage saves."""

import contextlib
import dataclasses

from meshwright.config import StageSaves
from meshwright.errors import ConfigError
from meshwright.hardware.targets import Target
from meshwright.planner.candidates import SCHEDULES_TRIED
from meshwright.planner.estimate import with_remat
from meshwright.planner.search import (
    price_placed,
    remat_policies,
    stage_saves_of,
    with_saved_layers,
)
from meshwright.runs.placed_run import PlacedRun, place_run
from meshwright.runs.run import Run


def with_best_remat(run: Run, target: Target) -> Run:
    """Returns the run with the choices of the shortest predicted step that fits, where it leaves them open (`auto`).

    Chosen are the remat policy and, with pipeline stages, the schedule and what a stage saves. Where nothing fits they
    are those that need least memory. Raises ConfigError where the run does not fit its mesh.
    """
    training = run.training
    staged = run.mesh is not None and run.mesh.stage > 1
    if training.remat != "auto" and not (staged and "auto" in (training.pipeline_schedule, training.stage_saves)):
        return run
    scheduled = _with_schedules(run)
    if not scheduled[0].spec.layers:  # no policies are known for a model without known layers
        return run
    plans = [
        price_placed(with_remat(placed, remat, training.saved_layers if remat == training.remat else 0, saves), target)
        for placed in scheduled
        for saves in (_stage_saves(placed) if staged and training.stage_saves == "auto" else (None,))
        for remat in remat_policies(target, saves or placed.run.training.stage_saves)
        if remat == training.remat or training.remat == "auto"
    ]
    roomy = [plan for plan in plans if plan.estimate.bytes <= target.chip.roomy_bytes]
    fitting = [plan for plan in roomy or plans if plan.estimate.fits]
    if training.remat == "auto":
        fitting = [with_saved_layers(plan) for plan in fitting]
    best = min(fitting, key=lambda plan: plan.estimate.seconds, default=None)
    best = best or min(plans, key=lambda plan: plan.estimate.bytes)
    chosen = best.run.training
    names = ("remat", "saved_layers", *(("pipeline_schedule", "stage_saves") if staged else ()))
    return dataclasses.replace(
        run, training=dataclasses.replace(training, **{name: getattr(chosen, name) for name in names})
    )


def _stage_saves(placed: PlacedRun) -> tuple[StageSaves, ...]:
    """Returns what the stages of a run can save; a split backward pass starts from the stage's input."""
    with_inputs = with_remat(placed, placed.run.training.remat, stage_saves="input")
    return ("input",) if with_inputs.schedule_table.splits_backward else stage_saves_of(placed)


def _with_schedules(run: Run) -> list[PlacedRun]:
    """Returns the run placed with each schedule that `auto` chooses from; one that needs more layers is left out."""
    placed = [place_run(run)]
    if placed[0].shape.stage > 1 and run.training.pipeline_schedule == "auto":
        for schedule in SCHEDULES_TRIED[1:]:
            training = dataclasses.replace(run.training, pipeline_schedule=schedule)
            with contextlib.suppress(ConfigError):
                placed.append(place_run(dataclasses.replace(run, training=training)))
    return placed

"""Choices that a Run leaves to the machine, made by the planner before the run is placed on devices."""

from collections.abc import Sequence
from typing import Any

from meshwright.runs.run import Run


def choose_for_devices(run: Run, devices: Sequence[Any]) -> Run:
    """Returns the run with the remat policy, and the pipeline schedule, that is fastest on `devices`, where it leaves
    them open.

    Unchanged on simulated devices and on chips of which nothing is known. run: with its mesh and vocabulary.
    """
    training = run.training
    open_choices = "auto" in (training.remat, training.pipeline_schedule, training.stage_saves)
    if not open_choices or devices[0].platform == "cpu":
        return run
    from meshwright.planner.automatic import with_best_remat
    from meshwright.planner.forecast import local_target  # training with a given policy needs no planner

    known = local_target(devices, None)
    return run if known is None else with_best_remat(run, known[0])

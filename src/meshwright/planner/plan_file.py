"""Plan file: JSON with a run, the target it is for, and the predicted step time and memory."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.documents import LARGE, read_json
from meshwright.errors import ConfigError, by_class, reason_of
from meshwright.hardware.targets import Target
from meshwright.path_kinds import find_path_kind
from meshwright.planner.search import Plan
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_unique_json, run_from_dict, run_to_dict
from meshwright.storage.attempts import may_pass
from meshwright.storage.writing import write_atomically
from meshwright.trust import foreign

FORMAT = 2
"""Version of the file format."""


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """Contents of a plan file."""

    run: Run
    target: str
    """Target as `--on` takes it."""
    predicted: dict[str, Any]
    """Prediction of the planner (`prediction_json`)."""


def prediction_json(plan: Plan) -> dict[str, Any]:
    """Returns the planner's prediction as JSON values: seconds, bytes per device, MFU,
    and their breakdowns."""
    e = plan.estimate
    return {
        "seconds": e.seconds,
        "bytes": e.bytes,
        "hbm_bytes": e.hbm_bytes,
        "mfu": e.mfu,
        "tokens_per_second": e.tokens_per_second,
        "bound_by": e.bound_by,
        "seconds_by_part": dict(e.parts),
        "seconds_by_bound": e.seconds_by_bound,
        "exposed_seconds_by_axes": dict(e.exposed),
        "busy_seconds_by_axes": dict(e.busy),
        "links_by_axes": dict(e.routes),
        "bytes_by_category": dict(e.memory),
        "bytes_by_phase": {name: dataclasses.asdict(phase) for name, phase in e.phases.items()},
        "axis_mapping": str(e.axis_mapping),
    }


def write_plan(
    plan: Plan, target: Target, file: Path, compiled: Mapping[str, Any] | None = None
) -> None:
    """Writes a plan file.

    compiled: figures of the target's compiler for this plan and others. Raises ConfigError where
    the file cannot be written.
    """
    contents = {
        "plan": FORMAT,
        "target": str(target),
        "run": run_to_dict(plan.run),
        "predicted": prediction_json(plan),
        **(compiled or {}),
    }
    try:
        write_atomically(file, json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise by_class(
            error,
            ConfigError(f"writing {file}", reason_of(error), "give a file in an existing folder"),
        ) from error


def is_plan(file: Path) -> bool:
    """Whether a file is a plan, of this version's format or another."""
    try:
        contents = read_json(file, LARGE)
    except (OSError, ValueError) as error:
        if may_pass(error):
            raise
        return False
    return isinstance(contents, dict) and "plan" in contents


def read_plan(file: Path) -> PlanFile:
    """Reads a plan file. Raises ConfigError where it is missing or has another format."""
    fix = "give a file that `meshwright plan --on CHIP:SIZE --out FILE` wrote"
    try:
        contents = read_unique_json(file, LARGE)
    except (OSError, ValueError) as error:
        raise by_class(
            error, ConfigError(f"plan {file}", f"it cannot be read: {reason_of(error)}", fix)
        ) from error
    forms = {"run": dict, "target": str, "predicted": dict}
    if not isinstance(contents, dict) or contents.get("plan") != FORMAT:
        kind = find_path_kind(str(file))
        if kind is not None:
            raise ConfigError(f"plan {file}", f"it is {kind.summary}, not a plan", kind.run)
        raise ConfigError(f"plan {file}", f"it is not a plan of format {FORMAT}", fix)
    for name, form in forms.items():
        if not isinstance(contents.get(name), form):
            raise ConfigError(f"plan {file}", f"its {name!r} is no {form.__name__}", fix)
    target = foreign(contents["target"], str(file))
    return PlanFile(run_from_dict(contents["run"], str(file)), target, contents["predicted"])

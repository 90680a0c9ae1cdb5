"""Calibration file: measured rates of the present devices, as JSON,
with which plans and forecasts are made."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshwright.documents import read_json
from meshwright.errors import ConfigError, by_class, reason_of
from meshwright.storage.writing import write_atomically

_FIGURES = ("memory_bandwidth", "attention", "grouped_matmul")
_ROWS = {
    "matmuls": ("m", "k", "n", "flops_per_second"),
    "collectives": ("devices", "bus_bandwidth"),
}
"""Lists of a calibration, and the figures of each row that plans are made with."""


def calibration_path(cache: Path) -> Path:
    """Returns the file in `cache` that holds the calibration of the present kind of device."""
    kind = jax.devices()[0].device_kind.lower().replace(" ", "-")
    return cache / "calibration" / f"{kind}.json"


def calibration_here(cache: Path) -> dict[str, Any] | None:
    """Returns the calibration in `cache` of the present kind of device;
    None where it has not been measured."""
    file = calibration_path(cache)
    return read_calibration(file) if file.is_file() else None


def write_calibration(
    file: Path,
    *,
    collectives: Sequence[Any] = (),
    matmuls: Sequence[Any] = (),
    mesh: str = "",
    memory_bandwidth: float | None = None,
    kernels: Mapping[str, float] | None = None,
    step: Mapping[str, Any] | None = None,
) -> None:
    """Adds measurements to the calibration in `file`; earlier ones of the same kind are replaced.

    collectives, matmuls: timings of `bench.microbenchmarks`.
    mesh: on which the collectives were timed.
    memory_bandwidth: bytes/s that a device reads and writes (`measure_memory_bandwidth`).
    kernels: `attention`, FLOP/s of the attention kernel in a training step, of which the backward
    pass counts as 3.5 forward passes; `grouped_matmul`, rate of a grouped matmul over that of a
    dense one of equal FLOPs.
    step: rates of traced training steps, with the run that they are of (`bench.step_profile`).
    """
    calibration = read_calibration(file, f"rm {file}") if file.exists() else {}
    if collectives:
        calibration["collectives"] = [dataclasses.asdict(row) for row in collectives]
        calibration["mesh"] = mesh
    if memory_bandwidth is not None:
        calibration["memory_bandwidth"] = memory_bandwidth
    calibration |= kernels or {}
    if step is not None:
        calibration["step"] = step
    if matmuls:
        calibration["matmuls"] = [dataclasses.asdict(row) for row in matmuls]
    calibration |= {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(calibration, indent=1) + "\n")


def read_calibration(
    file: Path, fix: str = "write it again with meshwright bench"
) -> dict[str, Any]:
    """Reads a calibration. Raises ConfigError, with this fix,
    where the file is missing or is not a calibration."""
    try:
        calibration: dict[str, Any] = read_json(file)
        _check_figures(calibration)
    except KeyError as error:
        raise ConfigError(
            f"the calibration {file}",
            f"it has no {error.args[0]}",
            fix,
        ) from error
    except (OSError, ValueError, TypeError, ArithmeticError) as error:
        raise by_class(
            error,
            ConfigError(
                f"the calibration {file}",
                f"it cannot be read: {reason_of(error)}",
                fix,
            ),
        ) from error
    return calibration


def _check_figures(calibration: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for anything but positive figures of a device."""
    if not isinstance(calibration["device"], str) or not isinstance(calibration["date"], str):
        raise ValueError("device and date are not text")
    figures = {name: calibration[name] for name in _FIGURES if calibration.get(name) is not None}
    for name, keys in _ROWS.items():
        for number, row in enumerate(calibration.get(name, [])):
            for key in keys:
                if key not in row:
                    raise KeyError(f"{key} in {name}[{number}]")
                figures[f"{name}[{number}].{key}"] = row[key]
            if name == "matmuls" and not isinstance(row.get("dtype"), str):
                raise ValueError(f"dtype of {name}[{number}] is not text")
    if "step" in calibration:
        figures |= _step_figures(calibration["step"])
    for name, value in figures.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < float(value) < math.inf:
            raise ValueError(f"{name} is {value!r}, not a positive number")


_OF_STEP = {
    "rates": dict,
    "refused": dict,
    "impossible": list,
    "model": dict,
    "mesh": str,
    "target": str,
}
"""What the calibration of a traced step has, by type."""


def _step_figures(step: Any) -> dict[str, Any]:
    """Returns the figures of a traced step.
    Raises KeyError or ValueError where something else lacks or is wrong."""
    for name, form in _OF_STEP.items():
        if not isinstance(step[name], form):
            raise ValueError(f"step.{name} is not a {form.__name__}")
    figures = {f"step.{name}": step[name] for name in ("devices", "seconds", "planned_seconds")}
    if figures["step.planned_seconds"] is None:
        del figures["step.planned_seconds"]
    unpriced = step["unpriced_seconds"]
    if (
        isinstance(unpriced, bool)
        or not isinstance(unpriced, int | float)
        or not 0 <= unpriced < math.inf
    ):
        raise ValueError(f"step.unpriced_seconds is {unpriced!r}, not a number from 0")
    rates = dict(step["rates"])
    overlap = rates.pop("overlap", 1)
    if isinstance(overlap, bool) or not isinstance(overlap, int | float) or not 0 <= overlap <= 1:
        raise ValueError(f"step.rates.overlap is {overlap!r}, not a fraction from 0 to 1")
    return figures | {f"step.rates.{name}": value for name, value in rates.items()}

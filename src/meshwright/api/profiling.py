"""Steps of a training traced, and set beside the simulated schedule."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
from rich.console import Console

from meshwright.bench.calibration_file import write_calibration
from meshwright.bench.slow_steps import WatchedRun
from meshwright.bench.step_profile import ProfiledRun, parse_steps
from meshwright.errors import Closing, shell_word
from meshwright.hardware.targets import Target
from meshwright.storage.writing import write_atomically
from meshwright.trainer.loop import Trainable
from meshwright.views.run_page import print_profile

FOLDER = "profile"
"""Folder of the trace in the output folder."""
CALIBRATION = "calibration.json"
"""Name of the calibration in the output folder."""


@contextlib.contextmanager
def profiled(
    prepared: Trainable, steps: str, out: Path, console: Console | None, target: Target | None
) -> Iterator[Trainable]:
    """Yields the run with the profiler around its steps.

    Then writes OUT/profile.json and the measured rates to OUT/calibration.json, and prints them.
    steps: as `10:13`.  console: None prints nothing.  target: the hardware here, where it is known.
    Raises ConfigError where they are none of this run's.
    """
    run = ProfiledRun(
        prepared,
        *parse_steps(steps, prepared.device_run.run.training.steps),
        _folder_of_process(out),
    )
    with Closing() as stack:
        stack.callback(run.stop)
        yield cast(Trainable, run)
    profile = run.profile(target)
    if profile is not None and jax.process_index() == 0:
        if profile.calibration:
            write_calibration(out / CALIBRATION, step=profile.calibration)
        write_atomically(
            out / "profile.json", json.dumps(dataclasses.asdict(profile), indent=1) + "\n"
        )
    if console is None:
        return
    if profile is None:
        console.print(
            f"no profile: the run ended before step {steps.rpartition(':')[2]}", markup=False
        )
        return
    print_profile(console, dataclasses.asdict(profile))
    for line in _rate_lines(profile.calibration, out):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"{out / FOLDER}: for xprof (TensorBoard), and perfetto_trace.json.gz for ui.perfetto.dev",
        markup=False,
    )


@contextlib.contextmanager
def watched_for_slowness(prepared: Trainable, out: Path) -> Iterator[Trainable]:
    """Yields the run with a trace of two steps whenever its steps have become slow, once an hour
    at most."""
    run = WatchedRun(prepared, _folder_of_process(out) / "slow")
    with Closing() as stack:
        stack.callback(run.stop)
        yield cast(Trainable, run)


def _folder_of_process(out: Path) -> Path:
    """Returns the folder of this process's traces: their files are named after the host only."""
    if jax.process_count() == 1:
        return out / FOLDER
    return out / FOLDER / f"process-{jax.process_index()}"


_UNITS = {"matmul": "FLOP/s", "attention": "FLOP/s", "hbm": "B/s", "links": "B/s", "overlap": ""}


def _rate_lines(step: Mapping[str, Any], out: Path) -> list[str]:
    """Says which rates were measured, which were not taken and why, and how to plan with them."""
    if not step:
        return []
    rates = [f"{name} {value:.3g} {_UNITS[name]}".rstrip() for name, value in step["rates"].items()]
    lines = [f"measured rates of a device: {', '.join(rates) or 'none'}, in {out / CALIBRATION}"]
    lines += [f"not taken: {name}: {reason}" for name, reason in step["refused"].items()]
    return [*lines, f"plan with them: meshwright plan --measured {shell_word(out)}"]

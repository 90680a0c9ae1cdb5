"""Checkpoints moved out of the way, so that training can continue from an earlier step."""

import os
from pathlib import Path

import jax
from jax.experimental import multihost_utils


def set_aside(folder: Path, steps: list[int]) -> None:
    """Moves the checkpoints of `steps` from `folder` into the folder `set-aside` beside it, on all processes."""
    aside = folder.parent / "set-aside"
    if jax.process_index() == 0:
        for step in steps:
            aside.mkdir(exist_ok=True)
            target, number = aside / str(step), 1
            while target.exists():
                target, number = aside / f"{step}.{number}", number + 1
            os.replace(folder / str(step), target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")

"""Resuming: the state of the last committed checkpoint, on the data that it was trained on."""

from collections.abc import Mapping
from typing import Any, Literal

from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.manifest import Manifest
from meshwright.errors import CheckpointError
from meshwright.runs.run import Run
from meshwright.step.device_run import DeviceRun, State
from meshwright.trainer.bad_steps import read_skipped
from meshwright.trainer.prepare import Position


def resume(
    device_run: DeviceRun,
    checkpoints: Checkpoints,
    at: int | None,
    data: Mapping[str, Any] | None,
    policy: Literal["same", "new"],
) -> tuple[State, Position]:
    """Returns the state of the last committed checkpoint, or of step `at`, and its place.

    data: fingerprint of the data that the run reads now.  policy: `new` accepts data that differ.
    Raises CheckpointError.
    """
    if policy == "same" and data is not None:
        _check_data(checkpoints.manifest(at), data, device_run.run)
    state, manifest = checkpoints.restore(device_run, at)
    checkpoints.set_aside(after=manifest.step)
    skipped = tuple(sorted({*manifest.skipped, *read_skipped(checkpoints.folder.parent)}))
    return state, Position(manifest.step, manifest.cursor, skipped, manifest.data)


def _check_data(manifest: Manifest, data: Mapping[str, Any], run: Run) -> None:
    """Raises CheckpointError naming what differs between the data of a checkpoint and those of the run that resumes."""
    if manifest.corpus is None:  # written by an earlier version
        return
    before = {**data, **manifest.corpus}
    options = {"--seq": "sequence", "--seed": "seed", "--data.held-out": "held_out"}
    changed = {option: name for option, name in options.items() if before[name] != data[name]}
    differences = [f"{option} was {before[name]} and is {data[name]}" for option, name in changed.items()]
    restored = [f"{option} {before[name]}" for option, name in changed.items()]
    if before["tokenizer"] != data["tokenizer"]:
        differences.insert(0, "the tokenizer is another: the same tokens would stand for other text")
    differences = _sources(before["sources"], data["sources"], run.data.paths) + differences
    if len(differences) > len(restored):
        restored.insert(0, "the data that it was trained on")
    if differences:
        raise CheckpointError(
            f"resuming from step {manifest.step} on the data of this run",
            "; ".join(differences),
            f"{' and '.join(restored)}, or --new-data if the change is meant",
        )


def _sources(before: list[Any], now: list[Any], paths: tuple[str, ...]) -> list[str]:
    """Describes the sources that differ."""
    if len(before) != len(now):
        return [f"there were {len(before)} sources and there are {len(now)}"]
    texts = []
    for path, (digest, weight), (digest_now, weight_now) in zip(paths, before, now, strict=True):
        if digest != digest_now:
            texts.append(f"the text or the tokens of {path} have changed")
        elif weight != weight_now:
            texts.append(f"the weight of {path} was {weight:g} and is {weight_now:g}")
    return texts

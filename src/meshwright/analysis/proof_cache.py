"""Cache of train-step censuses, keyed by the program, the target, the compiler's options and all versions."""

import hashlib
import importlib.metadata
from pathlib import Path

import jax
import msgspec

import meshwright
from meshwright.analysis.census import Census
from meshwright.analysis.run_census import abstract_batch, census_of_train_step
from meshwright.hardware.targets import Target
from meshwright.step.device_run import DeviceRun
from meshwright.step.train_step import build_train_step


def cached_census(folder: Path, device_run: DeviceRun, target: Target) -> Census:
    """Returns the census of a train step on a target, from `folder` if the same one was taken before."""
    file = folder / f"{cache_key(device_run, target)}.json"
    if file.is_file():
        try:
            return msgspec.json.decode(file.read_bytes(), type=Census)
        except (OSError, msgspec.MsgspecError):
            pass  # truncated, or written by another version
    return refresh_census(folder, device_run, target)


def refresh_census(folder: Path, device_run: DeviceRun, target: Target) -> Census:
    """Takes the census of a train step on a target and writes it to `folder`."""
    file = folder / f"{cache_key(device_run, target)}.json"
    census = census_of_train_step(device_run, target)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(census))
    partial.replace(file)
    return census


def cache_key(device_run: DeviceRun, target: Target) -> str:
    """Returns a key of the program's text, the target, the compiler options, and the code that reads the program."""
    lowered = build_train_step(device_run).lower(device_run.abstract, abstract_batch(device_run))
    parts = [
        lowered.as_text(),
        str(target),
        repr(sorted(device_run.compiler_options().items())),
        repr(target.chip),
        repr(target.efficiency),
        jax.__version__,
        _analysis_source(),
    ]
    for package in ("libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "meshwright"):
        try:
            parts.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            parts.append("")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _analysis_source() -> str:
    """Returns the source of `hlo`, `analysis` and `hardware`: a change of theirs changes the census."""
    root = Path(str(meshwright.__file__)).parent
    files = sorted(f for room in ("hlo", "analysis", "hardware") for f in (root / room).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)

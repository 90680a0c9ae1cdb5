"""Comparison of all hosts of a run, before anything is compiled: Run, versions, data and tokenizer."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.steps import committed_steps
from meshwright.hardware.agreement import agree, digest, flatten
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_to_dict
from meshwright.trainer.prepare import Trainable
from meshwright.trainer.watchdog import PREPARING, Phases, Watchdog, watching

_PACKAGES = ["meshwright", "jax", "jaxlib", "numpy", "optax", "tensorstore", "tokenizers", "libtpu"] + [
    f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt")
]
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
"""Variables that change what a program computes."""


@contextlib.contextmanager
def watched(prepared: Trainable, out: Path, phases: Phases, limits: Watchdog | None) -> Iterator[None]:
    """Compares the run of this process with that of all others, and watches them while the context is open.

    A single process has nothing to compare.
    """
    with watching(out, phases, limits or Watchdog()):
        if jax.process_count() > 1:
            agree("run, versions, data or tokenizer", same_fields(prepared, out))
        yield


def watched_before(out: Path, limits: Watchdog) -> AbstractContextManager[None]:
    """Watches the other processes while this one reads, tokenises or waits for the tokens of process 0."""
    phases = Phases()
    phases.enter(PREPARING)
    return watching(out, phases, limits)


def agree_on(run: Run) -> None:
    """Compares the Run and the versions before anything is read: hosts with other sources would wait for each other."""
    agree("run or versions", _fields_of(run))


def _fields_of(run: Run) -> dict[str, str]:
    return flatten(run_to_dict(run)) | {f"version of {name}": version for name, version in versions().items()}


def same_fields(prepared: Trainable, out: Path) -> dict[str, str]:
    """Returns what all hosts must have in common, by name: the Run's fields, versions, data and tokenizer."""
    fields = _fields_of(prepared.device_run.run)
    flags = {name: os.environ[name].split() for name in _FLAGS if name in os.environ}
    fields |= {name: " ".join(w for w in words if not w.startswith("--xla_dump")) for name, words in flags.items()}
    data: dict[str, Any] = dict(prepared.fingerprint() or {})
    fields["tokenizer"] = digest(str(data.pop("tokenizer", "")))
    fields |= {f"tokens: {name}": value for name, value in flatten(data).items()}
    # A folder that is not shared, or one that has not caught up, has other checkpoints.
    fields["checkpoints in --out"] = str(committed_steps(out / "checkpoints"))
    return fields


def versions() -> dict[str, str]:
    """Returns the versions of Python, of the libraries that decide on numbers, and of the devices' driver."""
    # The package's files: an installation in place has no version that tells changes.
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    sources = digest(b"".join(str(file.relative_to(root)).encode() + file.read_bytes() for file in files))
    found = {"Python": platform.python_version(), "meshwright's source": sources}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    device = jax.local_devices()[0]
    found["the device's runtime"] = f"{device.device_kind}, {device.client.platform_version}".replace("\n", ", ")
    return found

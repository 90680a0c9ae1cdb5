"""Sections `machine`, `matmuls` and `collectives`: what the machine is, and its rates,
which plans are made with."""

import dataclasses
import functools
import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.bench.calibration_file import calibration_path, read_calibration, write_calibration
from meshwright.bench.hardware.section import Measurement, Section
from meshwright.bench.microbenchmarks import (
    COLLECTIVES,
    CollectiveTiming,
    MatmulTiming,
    measure_memory_bandwidth,
    time_collective,
    time_matmul,
)
from meshwright.config import MeshShape
from meshwright.errors import reason_of
from meshwright.hardware.chips import CHIPS, Nodes, Torus, find_chip
from meshwright.hardware.mesh import build_mesh
from meshwright.storage.paths import default_cache_folder

_PACKAGES = (
    *(
        "meshwright",
        "jax",
        "jaxlib",
        "libtpu",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "nvidia-cudnn-cu12",
    ),
    *("nvidia-cudnn-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "optax", "tensorstore"),
)
_PREFIXES = ("XLA_", "JAX_", "LIBTPU_", "TPU_", "NCCL_", "CUDA_VISIBLE", "MESHWRIGHT_")
"""Beginnings of environment variables that change what is compiled or measured."""
_MEMORY_GAP = 0.1
"""Memory below the chip's by more than this fraction is noted."""


def measure_machine(section: Section) -> None:
    """Records the machine; nothing is timed but the start of the backend."""
    devices = jax.devices()
    chip = find_chip(devices[0].device_kind)
    stats = memory_stats(devices[0])
    section.facts |= {
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "devices": len(devices),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "chip": next((name for name, known in CHIPS.items() if known is chip), None),
        "peak_bfloat16": chip.flops_bf16 if chip else None,
        "hbm_bytes": chip.hbm_bytes if chip else None,
        "memory_limit": stats.get("bytes_limit"),
        "runtime": " ".join(str(getattr(devices[0].client, "platform_version", "")).split()),
        # Slice and position on the torus, or process and number.
        "coordinates": [
            [getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0) or 0]
            if getattr(d, "coords", None) is not None
            else [d.process_index, d.id]
            for d in devices
        ],
        "versions": {
            name: importlib.metadata.version(name)
            for name in _PACKAGES
            if any(importlib.metadata.distributions(name=name))
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        "host": f"{platform.platform()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "driver": _command(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
            "--format=csv,noheader",
        ),
        "links": _command("nvidia-smi", "topo", "-m"),
    }
    if devices[0].platform == "cpu":
        section.notes.append(
            "simulated devices: threads of this CPU. Rates and times are not those of an "
            "accelerator"
        )
    elif chip is None:
        section.notes.append(
            f"{devices[0].device_kind} is not in hardware/chips.py: no MFU, and predictions come "
            "from measured rates"
        )
    limit = stats.get("bytes_limit")
    if chip is not None and limit and limit < chip.hbm_bytes * (1 - _MEMORY_GAP):
        section.notes.append(
            f"JAX may use {limit / 2**30:.1f} of the {chip.hbm_bytes / 2**30:.1f} GiB of a device; "
            "on GPUs XLA_CLIENT_MEM_FRACTION=0.92 raises it, and the runs below are sized for what "
            "it may use"
        )
    if (
        chip is not None
        and isinstance(chip.interconnect, Nodes)
        and len(devices) > chip.interconnect.devices_per_node
    ):
        section.notes.append("more devices than a node has: some links are the network")
    if chip is not None and isinstance(chip.interconnect, Torus) and jax.process_count() > 1:
        section.notes.append("several hosts: this benchmark measures from one process of each")


def memory_stats(device: Any) -> dict[str, int]:
    """Returns the memory statistics of a device; empty where its backend has none (CPU)."""
    try:
        return dict(device.memory_stats() or {})
    except Exception:  # backends raise several types where they have none
        return {}


def _command(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


CALIBRATION = "calibration.json"
"""Name of the calibration in the benchmark's folder."""
_MATMULS = (
    *((8192, 4096, 14336), (8192, 14336, 4096)),
    *((n, n, n) for n in (8192, 4096, 2048, 1024)),
    *((1024, 8192, 8192), (128, 8192, 8192)),
)
"""m k n on accelerators: a feed-forward of Llama 3 8B, squares, few rows.
Plans take the best: large ones first."""
_SMALL_MATMULS = tuple((n, n, n) for n in (128, 256, 512))
_SIZES = (2**14, 2**18, 2**22, 2**26)
"""Bytes of collectives on accelerators."""
_SMALL_SIZES = (2**12, 2**18)


def measure_matmuls(section: Section) -> None:
    """Times matrix multiplications on one device in bfloat16 and float32,
    and its memory bandwidth."""
    cpu = jax.default_backend() == "cpu"
    items: dict[str, Measurement] = {
        f"{dtype} {m} x {k} x {n}": functools.partial(_matmul, m, k, n, dtype)
        for m, k, n in (_SMALL_MATMULS if cpu else _MATMULS)
        for dtype in ("bfloat16", "float32")
    }
    items["memory"] = lambda: {
        "bytes_per_second": measure_memory_bandwidth(2**26 if cpu else 2**30)
    }
    section.measure(items)
    bandwidth = next(
        (row["bytes_per_second"] for row in section.rows if "bytes_per_second" in row), None
    )
    keep_calibration(section, matmuls=_timings(section, MatmulTiming), memory_bandwidth=bandwidth)


def _timings[T](section: Section, kind: type[T]) -> list[T]:
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return [
        kind(**{name: row[name] for name in names}) for row in section.rows if names <= set(row)
    ]


def _matmul(m: int, k: int, n: int, dtype: str) -> Mapping[str, Any]:
    timing = time_matmul(m, k, n, dtype)
    chip = find_chip(jax.devices()[0].device_kind)
    fraction = timing.flops_per_second / chip.flops_bf16 if chip and dtype == "bfloat16" else None
    wrong = [] if timing.correct else [f"{dtype} {m} x {k} x {n}: the product is wrong"]
    return {**dataclasses.asdict(timing), "fraction": fraction, "problems": wrong}


def measure_collectives(section: Section) -> None:
    """Times every collective over all devices, then over the axes of meshes of two dimensions."""
    devices = jax.device_count()
    if devices == 1:
        section.notes.append("one device sends nothing")
        return
    sizes = _SMALL_SIZES if jax.default_backend() == "cpu" else _SIZES
    # One axis, and the mesh nearest to a square: its inner axis has neighbouring devices.
    inner = max(d for d in range(1, devices + 1) if devices % d == 0 and d * d <= devices)
    shapes = [
        MeshShape(fsdp=devices),
        *([MeshShape(fsdp=devices // inner, tensor=inner)] if inner > 1 else []),
    ]
    items: dict[str, Measurement] = {
        f"{kind} over {axis} of {shape}, {size} bytes": functools.partial(
            _collective, build_mesh(shape), axis, kind, size
        )
        for shape, size, kind in itertools.product(shapes, reversed(sizes), COLLECTIVES)
        for axis, degree in shape.degrees().items()
        if degree > 1
    }
    section.measure(items)
    keep_calibration(section, collectives=_timings(section, CollectiveTiming), mesh=str(shapes[0]))


def _collective(mesh: Any, axis: str, kind: str, size: int) -> Mapping[str, Any]:
    timing = time_collective(mesh, axis, kind, size)
    wrong = [] if timing.correct else [f"{kind} over {axis}, {size} bytes: the result is wrong"]
    return {**dataclasses.asdict(timing), "problems": wrong}


def keep_calibration(section: Section, **measured: Any) -> None:
    """Adds rates to the calibration in the folder and to the one in the cache,
    where plans find it."""
    for file in (section.folder / CALIBRATION, calibration_path(default_cache_folder())):
        try:
            write_calibration(file, **measured)
        except OSError as error:
            section.notes.append(f"the calibration {file} was not written: {reason_of(error)}")


def calibration_of(folder: Path) -> dict[str, Any] | None:
    """Returns the calibration measured in this folder, or None where there is none yet."""
    file = folder / CALIBRATION
    return read_calibration(file) if file.is_file() else None

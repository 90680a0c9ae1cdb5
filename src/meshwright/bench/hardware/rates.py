"""Sections `matmuls` and `collectives`: the rates of `meshwright bench`, kept as the calibration of plans."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
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
    time_collectives,
    time_matmuls,
)
from meshwright.config import MeshShape
from meshwright.hardware.chips import find_chip
from meshwright.hardware.mesh import build_mesh, default_cache_folder

CALIBRATION = "calibration.json"
"""Name of the calibration in the benchmark's folder."""
_COPY_BYTES = {"cpu": 2**26}
"""Array with which memory bandwidth is measured, by platform."""
_COPY_BYTES_DEFAULT = 2**30

_MATMULS = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (1024, 8192, 8192),
    (128, 8192, 8192),
)
"""m k n on accelerators: squares, a feed-forward of Llama 3 8B, and few rows."""
_SMALL_MATMULS = ((128, 128, 128), (256, 256, 256), (512, 512, 512))
_SIZES = (2**14, 2**18, 2**22, 2**26)
"""Bytes of collectives on accelerators."""
_SMALL_SIZES = (2**12, 2**18)


def measure_matmuls(section: Section) -> None:
    """Times matrix multiplications on one device in bfloat16 and float32, and its memory bandwidth."""
    cpu = jax.default_backend() == "cpu"
    items: dict[str, Measurement] = {
        f"{dtype} {m} x {k} x {n}": functools.partial(_matmul, m, k, n, dtype)
        for m, k, n in (_SMALL_MATMULS if cpu else _MATMULS)
        for dtype in ("bfloat16", "float32")
    }
    items["memory"] = lambda: {
        "bytes_per_second": measure_memory_bandwidth(_COPY_BYTES.get(jax.default_backend(), _COPY_BYTES_DEFAULT))
    }
    section.measure(items)
    bandwidth = next((row["bytes_per_second"] for row in section.rows if "bytes_per_second" in row), None)
    keep_calibration(section, matmuls=_timings(section, MatmulTiming), memory_bandwidth=bandwidth)


def _timings[T](section: Section, kind: type[T]) -> list[T]:
    """Returns the section's rows that have the fields of a timing."""
    names = set(inspect.signature(kind).parameters)
    return [kind(**{name: row[name] for name in names}) for row in section.rows if names <= set(row)]


def _matmul(m: int, k: int, n: int, dtype: str) -> Mapping[str, Any]:
    timing = next(time_matmuls(((m, k, n),), (dtype,)))
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
    section.measure(dict(_collectives(devices, sizes)))
    rows = _timings(section, CollectiveTiming)
    keep_calibration(section, collectives=rows, mesh=str(_meshes(devices)[0]))


def _meshes(devices: int) -> list[MeshShape]:
    """Returns a mesh of one axis, and the one nearest to a square: its inner axis has neighbouring devices."""
    inner = max(d for d in range(1, devices + 1) if devices % d == 0 and d * d <= devices)
    square = [MeshShape(fsdp=devices // inner, tensor=inner)] if inner > 1 else []
    return [MeshShape(fsdp=devices), *square]


def _collectives(devices: int, sizes: tuple[int, ...]) -> Iterator[tuple[str, Measurement]]:
    for shape, size, kind in itertools.product(_meshes(devices), reversed(sizes), COLLECTIVES):
        mesh = build_mesh(shape)
        for axis, degree in shape.degrees().items():
            if degree > 1:
                yield (
                    f"{kind} over {axis} of {shape}, {size} bytes",
                    functools.partial(_collective, mesh, kind, size, axis),
                )


def _collective(mesh: Any, kind: str, size: int, axis: str) -> Mapping[str, Any]:
    timing = next(t for t in time_collectives(mesh, (kind,), (size,), (axis,)))
    wrong = [] if timing.correct else [f"{kind} over {axis}, {size} bytes: the result is wrong"]
    return {**dataclasses.asdict(timing), "problems": wrong}


def keep_calibration(section: Section, **measured: Any) -> None:
    """Adds rates to the calibration in the folder and to the one in the cache, where plans find it."""
    for file in (section.folder / CALIBRATION, calibration_path(default_cache_folder())):
        try:
            write_calibration(file, **measured)
        except OSError as error:
            section.notes.append(f"the calibration {file} was not written: {error.strerror}")


def calibration_of(folder: Path) -> dict[str, Any] | None:
    """Returns the calibration measured in this folder, or None where there is none yet."""
    file = folder / CALIBRATION
    return read_calibration(file) if file.is_file() else None

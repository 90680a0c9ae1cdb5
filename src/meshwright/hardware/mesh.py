"""Mesh over devices, real or simulated, and the process settings that come before it.

`prepare_host` must be called before anything asks JAX for its devices: its settings cannot be
changed later.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from meshwright.errors import ConfigError
from meshwright.hardware.chips import find_chip
from meshwright.hardware.machine import degrees_on_torus, ring_order
from meshwright.mesh_shape import MeshShape
from meshwright.words import AXES

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Parameters of glibc's `mallopt`."""


def prepare_host(devices: int | None) -> None:
    """Simulates `devices` CPU devices if there is no accelerator.

    Of a GPU's memory it takes 92 %; JAX's default is 75 %.
    """
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.92"
    simulated = devices or 1
    if simulated == 1:
        _keep_heap()
    else:
        # A collective blocks a thread of XLA:CPU's pool on every device, and a pipeline has several
        # in flight. With a thread per device, the default, some devices then wait for others that
        # have no thread left.
        os.environ.setdefault("NPROC", str(4 * simulated))
    jax.config.update("jax_num_cpu_devices", simulated)


_MIN_COMPILE_SECONDS = 0.3
"""Compilation time above which a compiled program is written to the persistent cache."""
_NEVER = 1e9


def enable_compilation_cache(folder: Path) -> None:
    """Keeps compiled programs in `folder` for the next start.

    JAX's persistent compilation cache does it.
    On several simulated devices, only programs compiled inside `cache_on_simulated_devices` are
    cached: XLA:CPU (jaxlib 0.12.0) loses the order of a program's collectives when it reads the
    program back, and two devices may then deadlock (docs/log.md).
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    simulated = jax.default_backend() == "cpu" and jax.device_count() > 1
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", _NEVER if simulated else _MIN_COMPILE_SECONDS
    )


@contextlib.contextmanager
def cache_on_simulated_devices() -> Iterator[None]:
    """Caches programs compiled inside it on simulated devices too.

    For programs without collectives.
    """
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _keep_heap() -> None:
    """Makes glibc keep the step's temporary buffer between steps.

    XLA:CPU allocates one buffer per execution. Above the mmap threshold glibc maps, faults in and
    unmaps it every step: 13,240 page faults and 21 ms per step for a GPT of 0.8 M parameters. Not
    for several simulated devices, whose threads would then share one arena. Without glibc it does
    nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)


def open_devices() -> list[jax.Device]:
    """Returns the devices of all processes; the first call opens them.

    Raises ConfigError where JAX opens none, and for settings of JAX under which no step runs.
    """
    _check_settings()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.jax_platforms
        reason = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0]
        fix = "meshwright doctor, which asks for the devices and the drivers of this host"
        truth = reason or "JAX opened no device"
        if platforms:
            truth = reason or f"JAX opened no device of the platform {platforms}"
            fix = f"unset JAX_PLATFORMS, which is {platforms}, or {fix}"
        raise ConfigError("the devices of this host", truth, fix) from error


def _check_settings() -> None:
    """Raises ConfigError for settings of JAX that change the types of a step, or compile none."""
    if jax.config.jax_enable_x64:
        raise ConfigError(
            "JAX_ENABLE_X64=1",
            "JAX would compute in 64 bits what the step, its layouts and its plans have in 32",
            "unset JAX_ENABLE_X64",
            'jax.config.update("jax_enable_x64", False)',
        )
    if jax.config.jax_disable_jit:
        raise ConfigError(
            "JAX_DISABLE_JIT=1",
            "a step is compiled before it runs, and JAX would compile nothing",
            "unset JAX_DISABLE_JIT",
            'jax.config.update("jax_disable_jit", False)',
        )


def default_mesh_shape(devices: int) -> MeshShape:
    """Returns the mesh of a run that names none.

    FSDP on accelerators, several kinds of split on simulated devices.
    """
    if jax.default_backend() != "cpu":
        return MeshShape(fsdp=devices)
    if devices % 8 == 0:
        return MeshShape(data=devices // 4, fsdp=2, tensor=2)
    if devices % 4 == 0:
        return MeshShape(fsdp=devices // 2, tensor=2)
    return MeshShape(data=devices)


def first_devices(count: int | None) -> list[jax.Device]:
    """Returns the first `count` devices of all processes, or all of them.

    Raises ConfigError where there are fewer.
    """
    devices = open_devices()
    if count is None:
        return devices
    if not 1 <= count <= len(devices):
        truth = f"there are {len(devices)} ({devices[0].device_kind}), and a run takes at least one"
        fix = f"--devices {len(devices)}, or leave it out"
        raise _too_few_devices(f"--devices {count}", truth, fix, count, devices)
    return devices[:count]


def _too_few_devices(
    asked: str, truth: str, fix: str, wanted: int, devices: list[jax.Device]
) -> ConfigError:
    """Builds the error of more devices than there are, with what simulates them on a CPU.

    fix: the change for accelerators, whose number nothing changes.
    """
    if devices[0].platform != "cpu" or wanted < 1:
        return ConfigError(asked, truth, fix)
    setting = f'jax.config.update("jax_num_cpu_devices", {wanted})'
    return ConfigError(
        asked,
        truth,
        f"--devices {wanted} to simulate them",
        f"in a new Python process, {setting} before JAX is first used, which simulates them",
    )


def build_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """Builds the mesh of `shape` over the first devices.

    Device order follows the topology: first by slice, which only the DCN axis crosses; then along
    the torus of a TPU slice (ICI), or in the order of processes elsewhere, so that the innermost
    axes stay inside a host (NVLink). Devices that report no slice are divided into as many slices
    as the shape has. Raises ConfigError where there are too few devices, or in other slices.
    """
    devices = jax.devices() if devices is None else devices
    if shape.size > len(devices):
        product = " * ".join(str(d) for d in shape.degrees().values() if d > 1)
        truth = (
            f"it takes {product} = {shape.size} devices, and there are {len(devices)} "
            f"({devices[0].device_kind})"
        )
        fix = f"a mesh whose degrees multiply to {len(devices)}"
        raise _too_few_devices(f"mesh {shape}", truth, fix, shape.size, devices)
    degrees = shape.degrees()
    inside = {
        axis: n // (shape.slices if axis == shape.dcn_axis else 1) for axis, n in degrees.items()
    }
    sizes, on_torus = (
        tuple(inside.values()),
        devices[0].platform == "tpu" and shape.size == len(devices),
    )
    slices = [
        # Neighbours in the mesh are neighbours on the torus of a TPU slice.
        order_rings(mesh_utils.create_device_mesh(sizes, part, allow_split_physical_axes=True))
        if on_torus
        else np.array(part).reshape(sizes)
        for part in _in_slices(shape, devices)
    ]
    array = np.concatenate(slices, axis=list(degrees).index(shape.dcn_axis))
    return Mesh(array, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def order_rings(devices: np.ndarray) -> np.ndarray:
    """Orders the devices of axes that send around a ring.

    Neighbors on the ring are neighbors on the torus.
    devices: of a slice, by the axes of a mesh. A line whose permutes cannot go around goes there
    and back.
    """
    chip = find_chip(devices.flat[0].device_kind)
    for number, axis in enumerate(AXES):
        degrees = (
            degrees_on_torus(devices, number) if axis in ("stage", "context", "tensor") else ()
        )
        if degrees:
            order = list(ring_order(degrees))
            folds = chip is not None and chip.folds_rings and len(degrees) == 1
            if folds:
                order = [*order[::2], *reversed(order[1::2])]
            devices = devices.take(order, axis=number)
    return devices


def _in_slices(shape: MeshShape, devices: list[jax.Device]) -> list[list[jax.Device]]:
    ordered = sorted(
        devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id)
    )
    slices = sorted({getattr(d, "slice_index", 0) or 0 for d in ordered})
    each = shape.size // shape.slices
    # All nodes of GPUs are on one network, so the mesh may ignore them. TPU slices it may not
    # ignore.
    if len(slices) == 1 or (shape.slices == 1 and devices[0].platform != "tpu"):
        return [ordered[i * each : (i + 1) * each] for i in range(shape.slices)]
    by_slice = [[d for d in ordered if getattr(d, "slice_index", 0) == s] for s in slices]
    if shape.slices != len(slices) or any(len(part) != each for part in by_slice):
        number, degree = len(slices), shape.degrees()[shape.dcn_axis]
        raise ConfigError(
            f"mesh {shape} over {len(devices)} devices in {number} slices",
            f"the mesh has {shape.slices} slice{'s' if shape.slices > 1 else ''} of {each}, and "
            f"there are "
            f"{', '.join(str(len(part)) for part in by_slice)} devices in them",
            f"{shape.dcn_axis}={number}*{max(1, degree // number)}, and all devices of each slice",
        )
    return by_slice

"""Devices, real or simulated, and the mesh over them.

Call `prepare_host` before anything asks JAX for its devices: what it sets cannot be changed later.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.config import MeshShape
from meshwright.errors import ConfigError
from meshwright.words import AXES


def prepare_host(devices: int | None) -> None:
    """Simulates `devices` CPU devices where no accelerator is found."""
    simulated = devices or 1
    if simulated == 1:
        _keep_heap()
    jax.config.update("jax_num_cpu_devices", simulated)


_WORTH_KEEPING = 0.3
"""Seconds of compilation above which a program is kept on disk."""
_NEVER = 1e9


def keep_programs(folder: Path) -> None:
    """Keeps compiled programs in `folder` for the next start.

    On several simulated devices only those inside `kept`: XLA:CPU (jaxlib 0.12.0) forgets the order of a program's
    collectives when it reads it back, so that two devices may wait for each other for ever (docs/log.md).
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    simulated = jax.default_backend() == "cpu" and jax.device_count() > 1
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _NEVER if simulated else _WORTH_KEEPING)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within it, programs are kept on disk also on simulated devices: for programs without collectives."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _keep_heap() -> None:
    """Lets glibc keep the step's temporary buffer between steps.

    XLA:CPU takes one buffer per execution; above the mmap threshold it is mapped, faulted in and unmapped every
    step: 13,240 page faults and 21 ms a step for a GPT of 0.8 M parameters. Harmful with several simulated
    devices, whose threads then share one arena. Not glibc: nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        mallopt(mmap_threshold, 2**31 - 1)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(arena_max, 1)


def join_processes(coordinator: str, processes: int, process: int) -> None:
    """Makes this process one of `processes` that train together; `coordinator` is host:port of process 0."""
    if not 0 <= process < processes:
        raise ConfigError(f"process {process} of {processes}", "processes are counted from 0", f"0 to {processes - 1}")
    jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=30)


def default_cache() -> Path:
    """Where compiled programs and token files are kept between runs."""
    home = os.environ.get("MESHWRIGHT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "meshwright"
    )
    return Path(home)


def default_shape(devices: int) -> MeshShape:
    """A mesh over `devices`: on accelerators all of them fsdp; simulated, one that shows every kind of split."""
    if jax.default_backend() != "cpu":
        return MeshShape(fsdp=devices)
    if devices % 8 == 0:
        return MeshShape(data=devices // 4, fsdp=2, tensor=2)
    if devices % 4 == 0:
        return MeshShape(fsdp=devices // 2, tensor=2)
    return MeshShape(data=devices)


def build_mesh(shape: MeshShape, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `shape` over the first devices. Raises ConfigError where there are too few.

    Devices keep the order of their processes, so the innermost axes stay within a host; on a TPU torus
    `jax.make_mesh` assigns them by the wires.
    """
    devices = jax.devices() if devices is None else devices
    if shape.size > len(devices):
        product = " * ".join(str(d) for d in shape.degrees().values() if d > 1)
        cpu = devices[0].platform == "cpu"
        raise ConfigError(
            f"mesh {shape}",
            f"it takes {product} = {shape.size} devices, and there are {len(devices)} ({devices[0].device_kind})",
            f"--devices {shape.size} to simulate them" if cpu else f"a mesh whose degrees multiply to {len(devices)}",
        )
    degrees, axis_types = tuple(shape.degrees().values()), (AxisType.Auto,) * len(AXES)
    if devices[0].platform == "tpu" and shape.size == len(devices):
        return jax.make_mesh(degrees, tuple(AXES), axis_types=axis_types, devices=devices)
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))[: shape.size]
    return Mesh(np.array(ordered).reshape(degrees), tuple(AXES), axis_types=axis_types)

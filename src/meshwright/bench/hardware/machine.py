"""Section `machine`: devices, memory, topology, versions, driver, and every setting that changes what is compiled."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import jax

from meshwright.bench.hardware.section import Section
from meshwright.hardware.chips import CHIPS, Nodes, Torus, find_chip

_PACKAGES = (
    "meshwright",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "numpy",
    "optax",
    "tensorstore",
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
        "coordinates": [_coordinates(device) for device in devices],
        "versions": _versions(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        "host": f"{platform.platform()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "driver": _command(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
            "--format=csv,noheader",
        ),
        "links": _command("nvidia-smi", "topo", "-m"),
    }
    _add_notes(section, chip, devices, stats)


def memory_stats(device: Any) -> dict[str, int]:
    """Returns the memory statistics of a device; empty where its backend has none (CPU)."""
    try:
        return dict(device.memory_stats() or {})
    except Exception:  # backends raise several types where they have none
        return {}


def _add_notes(section: Section, chip: Any, devices: list[Any], stats: dict[str, int]) -> None:
    """Notes what the reader should know before the figures."""
    if devices[0].platform == "cpu":
        section.notes.append("simulated devices: threads of this CPU. Rates and times are not those of an accelerator")
    elif chip is None:
        section.notes.append(
            f"{devices[0].device_kind} is not in hardware/chips.py: no MFU, and predictions come from measured rates"
        )
    limit = stats.get("bytes_limit")
    if chip is not None and limit and limit < chip.hbm_bytes * (1 - _MEMORY_GAP):
        section.notes.append(
            f"JAX may use {limit / 2**30:.1f} of the {chip.hbm_bytes / 2**30:.1f} GiB of a device; on GPUs "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 raises it, and the runs below are sized for what it may use"
        )
    if chip is not None and isinstance(chip.interconnect, Nodes) and len(devices) > chip.interconnect.devices_per_node:
        section.notes.append("more devices than a node has: some links are the network")
    if chip is not None and isinstance(chip.interconnect, Torus) and jax.process_count() > 1:
        section.notes.append("several hosts: this benchmark measures from one process of each")


def _coordinates(device: Any) -> list[int]:
    """Returns slice and position on the torus, or process and number."""
    coords = getattr(device, "coords", None)
    if coords is None:
        return [device.process_index, device.id]
    return [getattr(device, "slice_index", 0) or 0, *coords, getattr(device, "core_on_chip", 0) or 0]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _command(*words: str) -> str:
    """Returns the output of a program; empty where it is not installed or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

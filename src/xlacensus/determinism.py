"""Settings of the environment and of a compilation
that let a GPU program give other bits in another run."""

import os
from collections.abc import Mapping
from typing import Any

ORDERED_SUMS = ("Ring", "Tree")
"""NCCL's algorithms that add in one order;
by default it may choose NVLS, in which the switch adds in any."""


def sums_in_order() -> bool:
    """Whether the environment lets NCCL add in one order only."""
    return os.environ.get("NCCL_ALGO") in ORDERED_SUMS


def nondeterminism_of(options: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether XLA:GPU keeps kernels that add by atomics,
    and whether it chooses kernels anew by timing them.

    options: of the compilation; those of XLA_FLAGS count too.
    """
    flags = (word.lstrip("-").partition("=") for word in os.environ.get("XLA_FLAGS", "").split())
    given = {name: value or "true" for name, _, value in flags} | dict(options)
    given = {name: str(value).lower() for name, value in given.items()}
    deterministic = given.get("xla_gpu_deterministic_ops") == "true"
    saved = {
        "xla_gpu_load_autotune_results_from",
        "xla_gpu_per_fusion_autotune_cache_dir",
    } & given.keys()
    atomics = not deterministic and given.get("xla_gpu_exclude_nondeterministic_ops") != "true"
    return atomics, not (deterministic or saved or given.get("xla_gpu_autotune_level") == "0")

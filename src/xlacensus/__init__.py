"""Reads any compiled JAX function: what it stores, what it sends,
what it multiplies, how long it may take.

    >>> import jax.numpy as jnp
    >>> import xlacensus
    >>> report = xlacensus.census(jnp.dot, jnp.ones((8, 16)), jnp.ones((16, 4)))
    >>> report.flops.compiled, len(report.ledger), report.findings
    (1024.0, 0, ())

Nothing runs, and no array is made: a function is compiled for its arguments, which may be abstract,
and the program's text is read. `python -m xlacensus PROGRAM.txt` reads a text alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlacensus.chips import AchievedFractions as AchievedFractions
    from xlacensus.chips import ChipRates as ChipRates
    from xlacensus.chips import Nodes as Nodes
    from xlacensus.chips import Torus as Torus
    from xlacensus.comparison import Change as Change
    from xlacensus.comparison import compare as compare
    from xlacensus.compilation import OutOfMemory as OutOfMemory
    from xlacensus.errors import CensusError as CensusError
    from xlacensus.findings import Finding as Finding
    from xlacensus.hlo.ledger import Ledger as Ledger
    from xlacensus.hlo.ledger import LedgerEntry as LedgerEntry
    from xlacensus.hlo.scopes import BranchScope as BranchScope
    from xlacensus.peak_memory import Memory as Memory
    from xlacensus.program_census import Census as Census
    from xlacensus.program_census import ProgramFacts as ProgramFacts
    from xlacensus.program_census import census as census
    from xlacensus.program_census import lint as lint
    from xlacensus.program_census import memory as memory
    from xlacensus.program_census import simulate as simulate
    from xlacensus.schedule import SimulatedSchedule as SimulatedSchedule
    from xlacensus.schedule import TargetDevices as TargetDevices

_MODULES = {
    "chips": ("AchievedFractions", "ChipRates", "Nodes", "Torus"),
    "comparison": ("Change", "compare"),
    "compilation": ("OutOfMemory",),
    "errors": ("CensusError",),
    "hlo.ledger": ("Ledger", "LedgerEntry"),
    "hlo.scopes": ("BranchScope",),
    "findings": ("Finding",),
    "peak_memory": ("Memory",),
    "program_census": ("Census", "ProgramFacts", "census", "lint", "memory", "simulate"),
    "schedule": ("SimulatedSchedule", "TargetDevices"),
}
"""Module -> the public names that it defines. They are imported when they are first used."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'xlacensus' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"xlacensus.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

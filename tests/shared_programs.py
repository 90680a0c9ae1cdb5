"""Programs that a test process has compiled already: the same text, options and devices give the same executable.

A training that resumes, the same tiny run in another file, one mesh beside another: each builds a new function, for which
JAX compiles again. JAX's cache on disk is not for them: XLA:CPU loses the order of collectives when it reads a program
back. Here the executable itself is kept.
"""

import collections
import hashlib
import os
from typing import Any

from jax._src import compiler

MOST = 96
"""Programs that are kept; the one that was asked for longest ago goes first."""
OWN_LINES = ("tests/analysis/", "tests/xlacensus/")
"""Tests that read from which line of the source an instruction comes, of which the text here has none."""

_kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
_compile = compiler.compile_or_get_cached


def _compile_once(
    backend: Any,
    computation: Any,
    devices: Any,
    options: Any,
    callbacks: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    """Compiles a program, or returns the executable of an equal one."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if callbacks or test.startswith(OWN_LINES):
        return _compile(backend, computation, devices, options, callbacks, *rest, **more)
    text = computation.operation.get_asm(enable_debug_info=False)
    ids = [device.id for device in devices.flat]
    key = hashlib.sha256(f"{ids} {options.SerializeAsString()!r} {text}".encode()).hexdigest()
    if key not in _kept:
        _kept[key] = _compile(backend, computation, devices, options, callbacks, *rest, **more)
        if len(_kept) > MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def share_programs() -> None:
    """Shares the programs of this process from here on."""
    compiler.compile_or_get_cached = _compile_once

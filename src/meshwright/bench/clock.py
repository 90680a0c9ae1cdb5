"""Timing of a compiled function: warm-up calls, then the median of several synchronised calls."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

_WARM_UP_CALLS = 2
_TOTAL_SECONDS = 0.25
"""Seconds of measurement after which repetition stops, once there are `_MIN_CALLS`."""
_MIN_CALLS, _MAX_CALLS = 5, 50
_CALLS_TOGETHER = 20
"""Calls where several processes take part, which must make equally many."""


def median_seconds(function: Callable[..., Any], *arguments: Any) -> tuple[float, int]:
    """Returns the median seconds of a call, measured until the result is ready, and the number of timed calls."""
    for _ in range(_WARM_UP_CALLS):
        jax.block_until_ready(function(*arguments))
    times: list[float] = []
    least, most = (_CALLS_TOGETHER, 0) if jax.process_count() > 1 else (_MIN_CALLS, _MAX_CALLS)
    while len(times) < least or (sum(times) < _TOTAL_SECONDS and len(times) < most):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times), len(times)

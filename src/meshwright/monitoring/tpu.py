"""Counters of TPUs, by the monitoring interface of libtpu (`libtpu.sdk.tpumonitoring`)."""

import re
from collections.abc import Iterator
from typing import Any

from meshwright.hardware.hosts import has_tpu
from meshwright.monitoring.counters import Counter, NotThere

_METRICS = {"ici_link_health": "ICI link health", "tpu_throttle_score": "throttle score"}
"""Metric of libtpu -> counter."""
_ROW = re.compile(r"(?:(?P<part>.+):)?\s*(?P<value>\d+(?:\.\d+)?)")
"""Value of a metric: `tray1.chip3.ici0.int: 0` of a link, `0` of the chip with the index
of the row."""


def open_tpu() -> "TpuCounters":
    """Opens the counters of the host's TPUs. Raises NotThere."""
    if not has_tpu():
        raise NotThere
    try:
        from libtpu.sdk import tpumonitoring
    except ImportError as error:
        raise NotThere("a libtpu with libtpu.sdk.tpumonitoring") from error
    return TpuCounters(tpumonitoring)


class TpuCounters:
    """TPUs of a host, and their links."""

    name = "TPUs"

    def __init__(self, monitoring: Any):
        """Takes the module `tpumonitoring`, or what has its functions."""
        self._monitoring = monitoring
        supported = set(monitoring.list_supported_metrics())
        self._metrics = {metric: name for metric, name in _METRICS.items() if metric in supported}

    def read(self) -> Iterator[Counter]:
        """Reads every metric. One that libtpu cannot give now,
        as before a program runs, is left out."""
        for metric, name in self._metrics.items():
            try:
                rows = self._monitoring.get_metric(metric).data()
            except (RuntimeError, ValueError):
                continue
            for index, row in enumerate(rows):
                match = _ROW.fullmatch(str(row).strip())
                if match is not None:
                    part = match["part"] or f"chip {index}"
                    yield Counter(f"TPU {part}", name, float(match["value"]))

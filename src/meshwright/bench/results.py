"""Results of a benchmark as CSV and as a plot."""

import csv
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.bench.collectives import CollectiveTiming
from meshwright.errors import ConfigError


def write_csv(rows: Sequence[Any], file: Path) -> None:
    """Writes one line per dataclass in `rows`, with the field names as headings."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [f.name for f in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)


def require_plotting() -> None:
    """Raises ConfigError where matplotlib is not installed; called before anything is timed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot", "matplotlib is not installed", "pip install 'meshwright[plot]', or omit --plot")


def plot_timings(timings: Sequence[CollectiveTiming], file: Path, colours: Sequence[str]) -> None:
    """Plots bus bandwidth over size into `file`: a panel per mesh axis, a line per collective, each in its colour."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(t.axis for t in timings))
    # A figure with its own canvas leaves pyplot's backend and settings alone; `fonttype: none` keeps text as text.
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2 * len(axes), 3.8))
        FigureCanvasAgg(figure)
        panels: Any = figure.subplots(1, len(axes), sharey=True, squeeze=False)
        for panel, axis in zip(panels[0], axes, strict=True):
            panel.set_prop_cycle(color=colours)
            for kind in dict.fromkeys(t.kind for t in timings):
                line = [t for t in timings if t.axis == axis and t.kind == kind]
                panel.loglog([t.bytes for t in line], [t.bus_bandwidth / 1e9 for t in line], marker="o", label=kind)
            panel.set_title(f"{axis} ({line[0].devices} devices)")
            panel.set_xlabel("bytes")
            panel.grid(True, which="both", alpha=0.2)
        panels[0][0].set_ylabel("bus bandwidth, GB/s")
        panels[0][-1].legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(file)

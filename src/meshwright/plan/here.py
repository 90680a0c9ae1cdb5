"""The step budget of a run on the devices at hand: foreseen by arithmetic, held against what was measured."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.config import Run
from meshwright.efficiency import Efficiency
from meshwright.hardware import CHIPS, Chip, Nodes, Torus, find_chip
from meshwright.plan.estimate import estimate
from meshwright.target import Target

_UNKNOWN = 1e12
"""Bytes/s of a memory that nobody has timed: fast enough never to be what a step waits for."""
_MEASURED = Efficiency(
    matmul=1.0,
    grouped=0.7,
    attention=1.0,
    memory=1.0,
    wires=1.0,
    network=1.0,
    hidden=0.0,
    hidden_tensor=0.0,
    tile=8,
)
"""Of a chip whose figures are themselves measurements."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Seconds of a step."""

    compute: float
    """Computation, HBM and bubble."""
    exposed: float
    """Communication that nothing hides."""
    by: str
    """What was taken for the chip's figures."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed


@dataclasses.dataclass(frozen=True)
class Gap:
    """What one part of a step was foreseen to take, and took."""

    part: str
    foreseen: float
    measured: float

    @property
    def seconds(self) -> float:
        return self.measured - self.foreseen


def target_here(devices: Sequence[Any], calibration: Mapping[str, Any] | None) -> tuple[Target, str] | None:
    """The machine that these devices are, and where its figures come from; None where nothing is known of them.

    calibration: what `meshwright bench` wrote of such devices; it is asked where the chip is in no table.
    """
    chip = find_chip(devices[0].device_kind)
    if chip is not None:
        name = next(name for name, known in CHIPS.items() if known is chip)
        slices = len({_slice(d) for d in devices}) if isinstance(chip.wires, Torus) else 1
        return Target(name, chip, _topology(chip, devices), slices), "hardware.py"
    if not calibration or not calibration.get("products"):
        return None
    measured = measured_chip(calibration, len(devices))
    return Target(measured.name, measured, (1, len(devices))), f"meshwright bench, {calibration['date']}"


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0


def _topology(chip: Chip, devices: Sequence[Any]) -> tuple[int, ...]:
    if isinstance(chip.wires, Torus):
        inside = [d.coords for d in devices if _slice(d) == _slice(devices[0])]
        return tuple(max(c[d] for c in inside) + 1 for d in range(chip.wires.dims))
    nodes = len({d.process_index for d in devices})
    return nodes, math.ceil(len(devices) / nodes)


def measured_chip(calibration: Mapping[str, Any], devices: int) -> Chip:
    """A chip of measured figures. Simulated devices share one machine: each has its part of what one alone reached."""
    products = calibration["products"]
    rate = max(row["flops_per_second"] for row in products)
    bandwidth = float(calibration.get("copied", _UNKNOWN))
    buses = [row["bus_bandwidth"] for row in calibration.get("collectives", ())]
    link = max(buses, default=_UNKNOWN)
    return Chip(
        str(calibration["device"]), rate / devices, _UNKNOWN, bandwidth / devices, Nodes(link, devices), link, link,
        dict.fromkeys(("flops_bf16", "bandwidth", "wires"), f"meshwright bench, {calibration['date']}"),
    )  # fmt: skip


def foresee(run: Run, devices: Sequence[Any], calibration: Mapping[str, Any] | None) -> Budget | None:
    """What a step of `run`, fitted to its mesh over `devices`, should take; None where nothing is known of them."""
    found = target_here(devices, calibration)
    if found is None:
        return None
    target, by = found
    e = estimate(run, target, None if target.name in CHIPS else _MEASURED)
    exposed = e.parts["exposed"]
    return Budget(e.seconds - exposed, exposed, by)


def gaps(budget: Budget, *, step: float, waited: float, saving: float) -> list[Gap]:
    """Foreseen and measured seconds of a step, by part, the largest gap first.

    step: median seconds between steps, input and checkpoints left out.  waited, saving: for data and checkpoints, a
    step on average; neither is foreseen to take any, as both go on beside the step.
    """
    found = [
        Gap("computation and exposed communication", budget.step, step),
        Gap("waiting for data", 0.0, waited),
        Gap("checkpoints", 0.0, saving),
    ]
    return sorted(found, key=lambda gap: -abs(gap.seconds))

"""Predicted step time of a run on the local devices, of listed or measured chips,
and its gap to the measured time."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.hardware.chips import CHIPS, Chip, Efficiency, Nodes, Torus, chip_name, find_chip
from meshwright.hardware.targets import Target
from meshwright.planner.compute import shape_efficiency
from meshwright.planner.estimate import estimate
from meshwright.runs.placed_run import PlacedRun

_UNMEASURED = 1e12
"""Bytes/s or FLOP/s of what was not measured: fast enough that no step waits for it."""
_MEASURED = Efficiency(
    matmul=1.0,
    grouped_matmul=0.7,
    attention=1.0,
    hbm=1.0,
    links=1.0,
    network=1.0,
    overlap=0.0,
    tensor_overlap=0.0,
    tile=8,
)
"""Fractions for a chip whose specification consists of measured rates."""


def calibrate_target(target: Target, calibration: Mapping[str, Any]) -> Target:
    """Returns `target` with the fractions of peak that `meshwright bench` measured on such a chip.

    `matmul` is the best bfloat16 matmul, relative to what its shape allows; `hbm` a copy; `links`
    the best bus bandwidth of a collective inside one node; `attention` and `grouped_matmul` are of
    `bench hardware`. A TPU keeps its fraction of ICI, because a benchmark does not tell which links
    an axis used. Rates of traced training steps (`step`) replace those of benchmarks. A fraction
    above 1 is of something else than was measured: the chip keeps its own, and `efficiency_source`
    names it. Returns `target` itself where the calibration is of another chip.
    """
    chip, efficiency = target.chip, target.efficiency
    if find_chip(str(calibration["device"])) is not chip:
        return target
    fractions: dict[str, Any] = {}
    rates = [
        row["flops_per_second"]
        / shape_efficiency(row["m"], row["k"], row["n"], efficiency, chip.multiprocessors)
        for row in calibration.get("matmuls", ())
        if row["dtype"] == "bfloat16"
    ]
    if rates:
        fractions["matmul"] = max(rates) / chip.flops_bf16
    if calibration.get("memory_bandwidth"):
        fractions["hbm"] = calibration["memory_bandwidth"] / chip.hbm_bandwidth
    if calibration.get("attention"):
        fractions["attention"] = calibration["attention"] / chip.flops_bf16
    if calibration.get("grouped_matmul"):
        fractions["grouped_matmul"] = calibration["grouped_matmul"]
    nodes = chip.interconnect
    if isinstance(nodes, Nodes):
        rows = [
            row
            for row in calibration.get("collectives", ())
            if row["devices"] <= nodes.devices_per_node
        ]
        if rows:
            fractions["links"] = max(row["bus_bandwidth"] for row in rows) / nodes.link_bandwidth
    rates_of_step = step_rates(calibration)
    for name, peak in (
        ("matmul", chip.flops_bf16),
        ("attention", chip.flops_bf16),
        ("hbm", chip.hbm_bandwidth),
    ):
        if name in rates_of_step:
            fractions[name] = rates_of_step[name] / peak
    if "overlap" in rates_of_step:
        fractions["overlap"] = rates_of_step["overlap"]
    if not fractions:
        return target
    taken = {name: value for name, value in fractions.items() if value <= 1}
    changes = [
        f"{name} {value:.2f} for {getattr(efficiency, name):.2f}" for name, value in taken.items()
    ]
    changes += [
        f"{name} not taken: {value:.3f} of {_FRACTION_OF.get(name, 'the data sheet')}"
        for name, value in fractions.items()
        if value > 1
    ]
    return dataclasses.replace(
        target,
        given_efficiency=dataclasses.replace(efficiency, **taken),
        efficiency_source=f"{_source_of(calibration)}: {', '.join(changes)}",
    )


_FRACTION_OF = {"grouped_matmul": "the rate of matmuls", "overlap": "all communication"}
"""Fraction of `Efficiency` -> what it is of, where that is not the chip's data sheet."""


def step_rates(calibration: Mapping[str, Any]) -> Mapping[str, float]:
    """Returns the rates of traced training steps in a calibration; empty where it has none."""
    step: Mapping[str, Any] = calibration.get("step", {})
    rates: Mapping[str, float] = step.get("rates", {})
    return rates


def _source_of(calibration: Mapping[str, Any]) -> str:
    if "step" in calibration:
        return f"traced steps, {calibration['date']}"
    return f"meshwright bench, {calibration['date']}"


def local_target(
    devices: Sequence[Any], calibration: Mapping[str, Any] | None
) -> tuple[Target, str] | None:
    """Returns the target that JAX devices form and the source of its figures,
    or None where nothing is known of them.

    calibration: measurements of `meshwright bench` on such devices,
    which are all there is for an unlisted chip.
    """
    name = chip_name(devices[0].device_kind)
    if name is None:
        if not calibration or not calibration.get("matmuls"):
            return None
        target = measured_target(calibration, len(devices))
        return target, target.efficiency_source
    chip, first = CHIPS[name], _slice_index(devices[0])
    if isinstance(chip.interconnect, Torus):
        coords = [d.coords for d in devices if _slice_index(d) == first]
        topology = tuple(max(c[d] for c in coords) + 1 for d in range(chip.interconnect.dims))
        slices = len({_slice_index(d) for d in devices})
    else:
        nodes = len({d.process_index for d in devices})
        topology, slices = (nodes, math.ceil(len(devices) / nodes)), 1
    target = Target(name, chip, topology, slices)
    target = target if calibration is None else calibrate_target(target, calibration)
    source = "hardware/chips.toml"
    return target, f"{source}; {target.efficiency_source}" if target.efficiency_source else source


def measured_target(calibration: Mapping[str, Any], devices: int) -> Target:
    """Returns a target whose chip consists of measured rates.

    Simulated devices share what a benchmark of one of them reached;
    rates of traced steps are those of each.
    """
    bandwidth = float(calibration.get("memory_bandwidth", _UNMEASURED))
    link = max(
        (row["bus_bandwidth"] for row in calibration.get("collectives", ())), default=_UNMEASURED
    )
    rate = max(
        (row["flops_per_second"] for row in calibration.get("matmuls", ())), default=_UNMEASURED
    )
    of_step = step_rates(calibration)
    link = of_step.get("links", link)
    source = _source_of(calibration)
    chip = Chip(
        str(calibration["device"]),
        flops_bf16=of_step.get("matmul", rate / devices),
        hbm_bytes=_UNMEASURED,
        hbm_bandwidth=of_step.get("hbm", bandwidth / devices),
        interconnect=Nodes(link, devices),
        network_bandwidth=link,
        host_bandwidth=link,
        sources=dict.fromkeys(("flops_bf16", "hbm_bandwidth", "interconnect"), source),
    )
    return Target(chip.name, chip, (1, devices), 1, _MEASURED, source)


def _slice_index(device: Any) -> int:
    return getattr(device, "slice_index", 0) or 0


@dataclasses.dataclass(frozen=True)
class StepForecast:
    """Predicted seconds of a step."""

    compute: float
    """Computation, HBM traffic and pipeline bubble."""
    exposed: float
    """Communication that is not overlapped with compute."""
    source: str
    """Source of the chip's figures."""

    @property
    def step(self) -> float:
        """Seconds of the full step."""
        return self.compute + self.exposed


def forecast_step(
    placed: PlacedRun, devices: Sequence[Any], calibration: Mapping[str, Any] | None
) -> StepForecast | None:
    """Predicts the step time of a placed run on local devices,
    or returns None where nothing is known of them."""
    known = local_target(devices, calibration)
    if known is None:
        return None
    e = estimate(placed, known[0])
    return StepForecast(e.seconds - e.parts["exposed"], e.parts["exposed"], known[1])


@dataclasses.dataclass(frozen=True)
class ForecastGap:
    """Predicted and measured seconds of one part of a step."""

    part: str
    predicted: float
    measured: float

    @property
    def seconds(self) -> float:
        """Measured minus predicted seconds."""
        return self.measured - self.predicted


def forecast_gaps(
    forecast: StepForecast, *, step: float, data_wait: float, saving: float
) -> list[ForecastGap]:
    """Returns the predicted and measured seconds of each part
    of a step, the largest difference first.

    step: median seconds between steps, without input and checkpoints. data_wait, saving: mean
    seconds per step spent waiting for data and on checkpoints; both are predicted to take none,
    because they overlap with the step.
    """
    gaps = [
        ForecastGap("compute and exposed communication", forecast.step, step),
        ForecastGap("waiting for data", 0.0, data_wait),
        ForecastGap("checkpoints", 0.0, saving),
    ]
    return sorted(gaps, key=lambda gap: -abs(gap.seconds))

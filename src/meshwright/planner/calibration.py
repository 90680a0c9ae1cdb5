"""Targets with measured efficiency: achieved fractions of peak, or a whole chip, from `meshwright bench`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.hardware.chips import Chip, Efficiency, Nodes, find_chip
from meshwright.hardware.targets import Target
from meshwright.planner.layer_time import shape_efficiency

_UNMEASURED = 1e12
"""Bytes/s or FLOP/s of what was not measured: fast enough that no step waits for it."""
MEASURED_EFFICIENCY = Efficiency(
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

    `matmul` is the best bfloat16 matmul, relative to what its shape allows; `hbm` a copy; `links` the best bus
    bandwidth of a collective inside one node; `attention` and `grouped_matmul` are of `bench hardware`. A TPU keeps its
    fraction of ICI, because a benchmark does not tell which links an axis used. Returns `target`
    itself where the calibration is of another chip.
    """
    chip, efficiency = target.chip, target.efficiency
    if find_chip(str(calibration["device"])) is not chip:
        return target
    fractions: dict[str, Any] = {}
    rates = [
        row["flops_per_second"] / shape_efficiency(row["m"], row["k"], row["n"], efficiency.tile)
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
        rows = [row for row in calibration.get("collectives", ()) if row["devices"] <= nodes.devices_per_node]
        if rows:
            fractions["links"] = max(row["bus_bandwidth"] for row in rows) / nodes.link_bandwidth
    if not fractions:
        return target
    fractions = {name: min(1.0, value) for name, value in fractions.items()}
    changes = ", ".join(f"{name} {value:.2f} for {getattr(efficiency, name):.2f}" for name, value in fractions.items())
    return dataclasses.replace(
        target,
        given_efficiency=dataclasses.replace(efficiency, **fractions),
        efficiency_source=f"meshwright bench, {calibration['date']}: {changes}",
    )


def measured_chip(calibration: Mapping[str, Any], devices: int) -> Chip:
    """Returns a chip made of measured rates; `devices` simulated devices share what one of them alone reached."""
    rate = max(row["flops_per_second"] for row in calibration["matmuls"])
    bandwidth = float(calibration.get("memory_bandwidth", _UNMEASURED))
    link = max((row["bus_bandwidth"] for row in calibration.get("collectives", ())), default=_UNMEASURED)
    source = f"meshwright bench, {calibration['date']}"
    return Chip(
        str(calibration["device"]),
        flops_bf16=rate / devices,
        hbm_bytes=_UNMEASURED,
        hbm_bandwidth=bandwidth / devices,
        interconnect=Nodes(link, devices),
        network_bandwidth=link,
        host_bandwidth=link,
        sources=dict.fromkeys(("flops_bf16", "hbm_bandwidth", "interconnect"), source),
    )

"""Output folder of a run on two hosts with eight GPUs, as the training loop writes it, with numbers that a test knows.

Host node1 is slow in its data, has a sick link and gave its last sign ten minutes ago; layer 2 spikes in step 700.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.reporters.health import HealthLog, HealthRecord, Series
from meshwright.step.health import GRADIENT, PARAMETER, UPDATE

GIB = 2**30
STEPS, ALL_STEPS = 800, 1000
SEQ, BATCH = 128, 16
BEGIN = 1_790_000_000.0
STEP_SECONDS = 2.0
AWAY = 3600.0
"""Seconds between the first start, which ended after step 400, and the second."""
SPIKE = 700
LAYERS = 4
LINK = "GPU 3 (NVIDIA H100 80GB HBM3, serial 1650524, 00000000:5D:00.0), NVLink 14"
WARNING = f"{LINK}: 505 NVLink recoveries in 1 h: cordon the host and have the link looked at"
SERIES = (
    *(Series(figure, "blocks.query", tuple(range(LAYERS))) for figure in (GRADIENT, PARAMETER, UPDATE)),
    *(Series(figure, "blocks.up", tuple(range(LAYERS))) for figure in (GRADIENT, PARAMETER, UPDATE)),
    *(Series(figure, "embed", ()) for figure in (GRADIENT, PARAMETER, UPDATE)),
)  # fmt: skip


def time_of(step: int) -> float:
    """Returns the time (Unix seconds) at which a step was reported."""
    return BEGIN + 60 + STEP_SECONDS * step + (AWAY if step > 400 else 0.0)


def write_run(folder: Path) -> Path:
    """Writes the folder."""
    folder.mkdir(parents=True)
    training = {"steps": ALL_STEPS, "batch": BATCH, "seq": SEQ}
    run = {"name": "mine", "model": {"family": "llama"}, "training": training}
    (folder / "run.json").write_text(json.dumps(run))
    _write_lines(folder / "metrics.jsonl", [_metrics(step) for step in range(1, STEPS + 1)])
    _write_lines(folder / "events.jsonl", _events())
    (folder / "processes.json").write_text(json.dumps(_processes()))
    _write_health(folder / "health.jsonl")
    return folder


def _write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def _metrics(step: int) -> dict[str, Any]:
    loss = 2.0 + 6.0 / step**0.5
    if step == SPIKE:
        loss += 3.0
    return {
        "step": step,
        "time": time_of(step),
        "loss": loss,
        "gradient norm": 20.0 if step == SPIKE else 1.0,
        "learning rate": 1e-3,
        "tokens": step * BATCH * SEQ,
        "tokens/s": BATCH * SEQ / STEP_SECONDS,
        "step seconds": STEP_SECONDS,
        "input wait seconds": 0.01,
    }


def _events() -> list[dict[str, Any]]:
    sources = [
        {"name": "web.jsonl", "samples": 50_000, "share": 0.75},
        {"name": "code.jsonl", "samples": 2_000, "share": 0.25},
    ]
    data = {
        "unit": "tokens",
        "units": ALL_STEPS * BATCH * SEQ,
        "per sample": SEQ,
        "first sample": 0,
        "sources": sources,
        "more sources": 0,
    }
    start = {"mesh": "fsdp=16", "devices": 16, "processes": 2, "kind": "NVIDIA H100", "data": data}
    machine = {"host": "node1", "part": LINK, "counter": "NVLink recoveries", "value": 505}
    compiled = {"event": "compile", "seconds": 50.0, "bytes": 60 * GIB}
    return [
        {"time": BEGIN, "step": 0, "event": "start", "how": "fresh", **start},
        {"time": BEGIN + 50, "step": 0, **compiled},
        {"time": time_of(400), "step": 400, "event": "save", "seconds": 4.0},
        {"time": time_of(400) + AWAY - 20, "step": 400, "event": "restore", "seconds": 5.0, "restored": 400,
         "taken again": 0},
        {"time": time_of(400) + AWAY - 10, "step": 400, "event": "start", "how": "resume", **start},
        {"time": time_of(400) + AWAY, "step": 400, **compiled},
        {"time": time_of(600), "step": 600, "event": "machine", **machine, "warning": WARNING},
    ]  # fmt: skip


def _processes() -> dict[str, Any]:
    now = time_of(STEPS)
    seen = (now, now - 600)
    seconds = (
        {"step": 1.98, "work": 0.02, "data": 0.01, "save": 4.0},
        {"step": 1.48, "work": 0.03, "data": 0.51, "save": 4.0},
    )
    peaks = (61 * GIB, 79 * GIB)
    rows = []
    for process in range(2):
        devices = [
            {"device": 8 * process + n, "kind": "NVIDIA H100", "peak": peaks[process], "limit": 80 * GIB}
            for n in range(8)
        ]  # fmt: skip
        rows.append(
            {
                "process": process,
                "host": f"node{process}",
                "pid": 100 + process,
                "beat": 99,
                "step": STEPS,
                "phase": ("step", "data")[process],
                "in phase": 0.5,
                "seconds": seconds[process],
                "memory": [40 * GIB, 2000 * GIB],
                "devices": devices,
                "seen": seen[process],
            }
        )
    return {"time": now, "processes": rows}


def health_of(step: int) -> np.ndarray:
    """Returns the numbers of a record, in the order of `SERIES`."""
    rng = np.random.default_rng(step)
    values = []
    for series in SERIES:
        size = series.size
        scale = {GRADIENT: 0.5, PARAMETER: 30.0, UPDATE: 0.03}[series.figure]
        numbers = scale * (1 + np.arange(size)) * np.exp(rng.normal(0, 0.05, size))
        if step >= SPIKE and step < SPIKE + 30 and series.figure == GRADIENT and series.layers:
            numbers[2] *= 40
        values.append(numbers)
    return np.concatenate(values)


def _write_health(file: Path) -> None:
    log = HealthLog(file, upto=0)
    for step in range(5, STEPS + 1, 5):
        log.health(step, HealthRecord(SERIES, health_of(step).astype(np.float32)))
    log.close()

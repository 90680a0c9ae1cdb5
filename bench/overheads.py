"""Cost of watchdog, checksums, comparison of hosts and saving, over steps of 50 ms.

Blocks of steps with and without the watchdog alternate, so that a busy machine slows both; CPU seconds of the process
are compared, beside wall time, because other programs take none of them away. With a priority above theirs (Linux gives
sessions equal shares first: `echo 0 > /proc/sys/kernel/sched_autogroup_enabled`) wall time tells something too:

    nice -n -15 python bench/overheads.py --blocks 70 --results bench/results/overheads.json
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from page_table import put_table

from meshwright.checkpoint.checkpoints import Checkpoints, named_tensors
from meshwright.checkpoint.fingerprints import fingerprints
from meshwright.config import MeshShape
from meshwright.hardware.hosts import store
from meshwright.hardware.mesh import prepare_host
from meshwright.runs.recipe import find_recipe
from meshwright.signs import Phases
from meshwright.trainer.hosts import _FOLDER, _Watch, same_fields, verdict
from meshwright.trainer.loop import prepare_run
from meshwright.trainer.prepare import Position
from meshwright.trainer.watchdog import Watchdog

ROOT = Path(__file__).parents[1]
BLOCK = 60
"""Steps of a block: three seconds, three signs of the watchdog; starting its threads for each block costs little."""
STEP = 0.05
"""Seconds of a step."""
SAVE_EVERY = 100
_ERROR = 0.002
"""Standard error of the watchdog's share of CPU below which no more pairs are measured."""


def main() -> None:
    """Measures, prints a line for each cost, and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    prepare_host(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)  # the store of a run on several hosts
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.blocks)
    for name, row in rows.items():
        print(name, json.dumps(row), flush=True)
    if options.results:
        record = {
            "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": os.getloadavg()[0],
            "nice": os.nice(0), "rows": rows,
        }  # fmt: skip
        options.results.write_text(json.dumps(record, indent=1) + "\n")
        put_table(ROOT / "docs" / "faults.md", "overheads.py", page_table(record))


def page_table(record: dict[str, Any]) -> str:
    """The table of the page, with its date and machine."""
    lines = [
        f"`nice -n {record['nice']} python bench/overheads.py`, {record['date']}, {record['cores']} cores of an AMD "
        f"EPYC (KVM, shared, load {record['load']:.0f}), one process, steps of {record['rows']['step']['ms']:.0f} ms.",
        "",
        "| part | measured |", "|---|---|",
    ]  # fmt: skip
    for name, row in record["rows"].items():
        lines.append(
            f"| {name} | {', '.join(f'{what}: {value:g}' for what, value in row.items())} |"
        )
    return "\n".join(lines) + "\n"


def measure(folder: Path, blocks: int) -> dict[str, dict[str, float]]:
    """Returns the cost of each part."""
    run = find_recipe("tiny")
    run = dataclasses.replace(
        run, mesh=MeshShape(), training=dataclasses.replace(run.training, batch=1, seq=64)
    )
    prepared = prepare_run(run, cache=Path(os.environ.get("MESHWRIGHT_CACHE", folder / "cache")))
    state, feed = prepared.device_run.initial_state(), prepared.feed(Position(0, 0))
    batch = next(feed)
    step = prepared.compile(batch)
    phases = Phases()

    # A step of 50 ms, most of which the device takes: the cost does not depend on what it computes meanwhile, and the
    # less this process computes, the less of the difference is noise. Returns seconds awake, and of CPU.
    def block(state: Any, watched: bool, steps: int = BLOCK) -> tuple[Any, float, float]:
        awake, cpu = 0.0, time.process_time()
        for number in range(steps):
            start = time.perf_counter()
            if watched:
                phases.enter("data", number)
                phases.enter("step", number + 1)
            state, metrics = step(state, batch)
            jax.device_get(metrics)
            took = time.perf_counter() - start
            awake += took
            time.sleep(max(0.0, STEP - took))
        return state, awake, time.process_time() - cpu

    for _ in range(3):
        state, awake, cpu = block(state, False)
    rows: dict[str, dict[str, float]] = {
        "step": {
            "ms": 1000 * STEP,
            "ms awake": round(1000 * awake / BLOCK, 2),
            "ms of CPU": round(1000 * cpu / BLOCK, 2),
        }
    }
    watch = _Watch(folder, phases, Watchdog(), store())
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    # More pairs while the error bar is wide, as it is on a busy machine.
    while len(on) < blocks or (
        paired(on, off)["standard error, CPU"] > _ERROR and len(on) < 4 * blocks
    ):
        # Which comes first alternates too.
        for watched in (True, False) if len(on) % 2 else (False, True):
            with watch.running() if watched else contextlib.nullcontext():
                state, *seconds = block(state, watched)
            watch.stopped.clear()
            watch.left = ""
            (on if watched else off).append((seconds[0], seconds[1]))
    rows["watchdog"] = {"pairs": len(on), **paired(on, off)}
    rows["watchdog, by its parts"] = {
        "enter, us per step": round(2e6 * seconds_of(lambda: phases.enter("data", 1), 10000), 2),
        "sign and reading, us of CPU per second": round(
            1e6 * cpu_of(lambda: (watch._sign(), watch._read()), 200), 1
        ),
    }
    rows["watchdog, process 0 of 1,000 hosts"] = thousand_hosts(watch)
    tensors = named_tensors(state)
    jax.device_get(fingerprints(tensors))
    rows["checksums of a checkpoint"] = checksums(tensors)
    fields = seconds_of(lambda: same_fields(prepared, folder), 3)
    rows["comparison of hosts"] = {"ms once per start": round(1000 * fields, 1)}
    rows["saving"] = saving(prepared, state, folder, blocks=8, block=block)
    return rows


def thousand_hosts(watch: _Watch) -> dict[str, float]:
    """CPU of process 0 for the signs of 1,000 hosts, each once a second: its reading, and the store that takes them."""
    sign = json.dumps(["a-host-name-of-usual-length", 4103, 7, 1234, "step", 0.01, ""])
    keys = [f"{_FOLDER}/signs/{process}" for process in range(1, 1000)]

    def publish() -> None:
        for key in keys:
            watch.client.key_value_set(key, sign, True)

    stored = cpu_of(publish, 3)
    reading = cpu_of(watch._read, 20)
    judging = cpu_of(lambda: verdict(watch.signs, watch.limits, time.monotonic()), 20)
    for key in keys:
        watch.client.key_value_delete(key)
    return {
        "reading and judging, ms of CPU per second": round(1000 * (reading + 2 * judging), 2),
        "store with its clients, ms of CPU per second": round(1000 * stored, 1),
    }


def checksums(tensors: dict[str, Any]) -> dict[str, float]:
    """Seconds of the checksums of a checkpoint, which the loop waits for: of one save in 100 steps."""
    seconds = []
    for _ in range(40):
        began = time.perf_counter()
        jax.device_get(fingerprints(tensors))
        seconds.append(time.perf_counter() - began)
    whole = SAVE_EVERY * STEP
    return {
        "million elements": round(sum(x.size for x in tensors.values()) / 1e6, 2),
        "ms per save": round(1000 * statistics.median(seconds), 2),
        "share of 100 steps": round(statistics.median(seconds) / whole, 5),
        "standard error": round(statistics.stdev(seconds) / len(seconds) ** 0.5 / whole, 5),
    }


def saving(
    prepared: Any, state: Any, folder: Path, blocks: int, block: Callable[..., Any]
) -> dict[str, float]:
    """Share of the wall time that the loop waits for a save every 100 steps, its checksums included."""
    waits = []
    with Checkpoints(folder / "checkpoints", max_to_keep=2) as checkpoints:
        for number in range(1, blocks + 1):
            began = time.perf_counter()
            checkpoints.save(state, prepared.device_run, step=number, cursor=0)
            waits.append(time.perf_counter() - began)
            state, *_ = block(state, False, SAVE_EVERY)
    whole = SAVE_EVERY * STEP
    # The first compiles the fingerprints.
    return {
        "ms of waiting per save": round(1000 * statistics.median(waits[1:]), 1),
        "share of wall time": round(
            statistics.mean(waits[1:]) / (whole + statistics.mean(waits[1:])), 4
        ),
    }


def paired(on: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, float]:
    """Median differences of neighbouring blocks, as shares of the time of their steps, with standard errors.

    The errors are those of a median, from the median distance to it: other programs make some blocks far longer.
    """
    found = {}
    for i, name in enumerate(("wall", "CPU")):
        shares = [(a[i] - b[i]) / (BLOCK * STEP) for a, b in zip(on, off, strict=True)]
        middle = statistics.median(shares)
        spread = 1.4826 * statistics.median(abs(share - middle) for share in shares)
        found[f"share, {name}"] = round(middle, 5)
        found[f"standard error, {name}"] = round(1.2533 * spread / len(shares) ** 0.5, 5)
    return found


def seconds_of(call: Callable[[], Any], times: int) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - began) / times)
    return statistics.median(found)


def cpu_of(call: Callable[[], Any], times: int) -> float:
    """CPU seconds of the whole process for a call, the store's own threads included."""
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


if __name__ == "__main__":
    main()

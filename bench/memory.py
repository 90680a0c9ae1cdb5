"""Memory of each phase of a training on eight simulated devices: planned, compiled, and measured of the process.

    python bench/memory.py            # all layouts, docs/howto/find-a-memory-problem.md and results/memory.json
    python bench/memory.py LAYOUT     # one, as JSON

Each layout is a process of its own, whose large arrays the C library returns to the system at once. It takes every
phase once, so that everything is compiled, and then measures how its resident memory grows in each. Simulated devices
and the host have the same memory: of a save that is what the devices hold and what the host has copied.
"""

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.hardware.machine import Machine
from meshwright.hardware.mesh import build_mesh, prepare_host
from meshwright.planner.memory_model import (
    PHASES,
    PhaseMemory,
    checkpoint_bytes,
    memory_by_category,
    phase_memory,
)
from meshwright.planner.work import work_of
from meshwright.runs.placed_run import place_run
from meshwright.runs.run import Run
from meshwright.runs.settle import settle
from meshwright.sharding.schedules import build_counts

DEVICES = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp=8": {},
    "data=2,fsdp=2,tensor=2": {"microbatches": 2},
    "data=8 zero1": {"layout": "zero1", "microbatches": 4},
    "fsdp=4,context=2": {},
    "stage=2,data=2,fsdp=2 interleaved": {"pipeline_schedule": "interleaved", "microbatches": 4},
    "stage=2,data=2,tensor=2 uneven": {"pipeline_schedule": "1f1b", "microbatches": 4, "layers": 7},
}
RESULTS = Path(__file__).parent / "results" / "memory.json"
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "find-a-memory-problem.md"


def run_of(layout: str) -> Run:
    """A Llama of 30 M parameters, whose arrays are much larger than what the process has besides."""
    changes = {"layers": 8, "remat": "full", **LAYOUTS[layout]}
    run = mw.recipe(
        "tiny", mesh=layout.partition(" ")[0], batch=32, seq=256, compute_dtype="float32", **changes
    )
    return dataclasses.replace(
        run, model=dataclasses.replace(run.model, width=512, heads=8, mlp=1408, vocab=8192)
    )


def planned(run: Run) -> dict[str, PhaseMemory]:
    """The planner's arithmetic, for devices that are simulated."""
    placed = place_run(run)
    settled, work, training, in_flight = (
        settle(placed, Machine("cpu")),
        work_of(placed),
        run.training,
        1.0,
    )
    if placed.layout.shape.stage > 1:
        counts = build_counts(
            training.pipeline_schedule,
            placed.layout.shape.stage,
            training.microbatches,
            placed.layout.stages.virtual_stages,
        )
        in_flight = float(counts.most_live_inputs)
    phases = phase_memory(settled, work, memory_by_category(settled, work, in_flight))
    # All devices have one host, which copies one replica.
    host = min(phases["save"].host, checkpoint_bytes(placed)[0] / DEVICES)
    return phases | {"save": dataclasses.replace(phases["save"], host=host)}


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def measured(layout: str) -> dict[str, Any]:
    """Bytes of each phase: planned, compiled, and measured, all of one device with its part of the host's."""
    prepare_host(DEVICES)
    import jax
    import numpy as np

    from meshwright.analysis.run_census import census_of_train_step
    from meshwright.analysis.run_memory import compiled_phases
    from meshwright.checkpoint.checkpoints import Checkpoints
    from meshwright.step.device_memory import shard_bytes
    from meshwright.step.device_run import place_on_devices
    from meshwright.step.eval_step import compile_eval_step
    from meshwright.step.train_step import CompiledTrainStep

    run = run_of(layout)
    assert run.mesh is not None
    device_run = place_on_devices(run, build_mesh(run.mesh))
    compiled = compiled_phases(device_run, census_of_train_step(device_run))
    like = device_run.abstract_batch
    batch = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), like)
    train, evaluate = CompiledTrainStep(device_run, like), compile_eval_step(device_run)
    trim, grown = ctypes.CDLL("libc.so.6").malloc_trim, dict[str, int]()

    def phase(name: str, take: Callable[[], Any]) -> Any:
        gc.collect()
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS:")
        result = jax.block_until_ready(take())
        grown[name] = _status("VmHWM:") - before
        return result

    state_bytes = DEVICES * shard_bytes(device_run.abstract)
    for _ in range(2):
        with (
            tempfile.TemporaryDirectory() as folder,
            Checkpoints(Path(folder), max_to_keep=1) as checkpoints,
        ):
            state = phase("start", device_run.initial_state)
            state = phase("step", lambda state=state: train(state, batch))[0]
            phase("evaluation", lambda state=state: evaluate(state.params, batch))

            def save(state: Any = state) -> None:
                checkpoints.save(state, device_run, step=1, cursor=0)
                checkpoints.wait()

            phase("save", save)
            del state, save
            phase("resume", lambda: checkpoints.restore(device_run)[0])
    plan, apart = planned(run), ("step", "evaluation", "save")  # the state is there when they begin
    totals = {name: (n + state_bytes * (name in apart)) / DEVICES for name, n in grown.items()}
    return {
        name: {
            "planned": plan[name].device + plan[name].host,
            "compiled": compiled[name] + plan[name].host,
            "measured": totals[name],
            "host": plan[name].host,
        }
        for name in PHASES
    }


def table(results: dict[str, Any]) -> str:
    """Rows of a Markdown table, in MiB."""
    rows = ["| layout | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for layout, phases in results.items():
        cells = [
            " / ".join(f"{phases[p][k] / 2**20:.0f}" for k in ("planned", "compiled", "measured"))
            for p in PHASES
        ]
        rows.append(f"| {layout} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(args: list[str]) -> None:
    if args:
        print(json.dumps(measured(args[0])))
        return
    results = {}
    for layout in LAYOUTS:
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(
            [sys.executable, __file__, layout],
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        results[layout] = json.loads(done.stdout.splitlines()[-1])
        print(table(results), flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- table: bench/memory.py -->\n", "<!-- end of the table -->"
    before, _, rest = text.partition(start)
    PAGE.write_text(
        f"{before}{start}{table(results)}\n{end}{rest.partition(end)[2]}", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

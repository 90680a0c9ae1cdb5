"""Cost of watching a run's tensors, written into docs/health.md.

    python bench/health_cost.py                      # processor time
    python bench/health_cost.py --compiled h100:64 v5p:4x4x4   # the comparison of replicas

The first takes steps with and without health, sums of bits and compared replicas by turns, so that
what else the machine does meets all of them, and writes the quartiles of the ratios of the rounds.
The second compiles the comparison of replicas for devices that are not here and takes its census;
it needs the compilers that `meshwright prove` names.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from page_table import ROOT, put_table

sys.path.insert(0, str(ROOT / "tests"))

PAGE = ROOT / "docs" / "health.md"
ROUNDS = 12
STEPS_OF_A_ROUND = 3
MODEL, MESHES = "llama3-8b", ("data=2,fsdp=32", "data=8,fsdp=8")


class Case:
    """One kind of step, and its state."""

    def __init__(self, mesh: str, health: bool, check_bits: bool, check_replicas: bool):
        from tiny_runs import MODELS, device_run_of, random_batch, tiny_run

        from meshwright.config import Faults
        from meshwright.step.train_step import build_train_step

        size = {"width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 768, "vocab": 1024}
        model: Any = dataclasses.replace(MODELS["llama"], **size)
        run = tiny_run(model, mesh)
        training = dataclasses.replace(run.training, health=health, batch=4, seq=256)
        run = dataclasses.replace(run, training=training, faults=Faults(check_bits=check_bits))
        device_run = device_run_of(run)
        self._check_replicas = check_replicas
        self._step = build_train_step(device_run)
        self._state = device_run.initial_state()
        self._batch = random_batch(device_run)

    def seconds(self) -> float:
        """Takes a round of steps; returns the processor seconds of one."""
        import jax

        from meshwright.trainer.replicas import replicas_differ

        began = time.process_time()
        for _ in range(STEPS_OF_A_ROUND):
            self._state, _ = self._step(self._state, self._batch)
            if self._check_replicas:
                assert not replicas_differ(self._state)
        jax.block_until_ready(self._state)
        return (time.process_time() - began) / STEPS_OF_A_ROUND


def measured_ratios() -> str:
    """Returns the table of processor time over that of a step without."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    plain = {mesh: Case(mesh, False, False, False) for mesh in ("data=1", "data=4")}
    watched = {
        "health (the default)": ("data=1", Case("data=1", True, False, False)),
        "health and `--faults.check-bits`": ("data=1", Case("data=1", True, True, False)),
        "replicas compared after every step, no health": (
            "data=4",
            Case("data=4", False, False, True),
        ),
    }
    cases = [*plain.values(), *(case for _, case in watched.values())]
    for case in cases:
        case.seconds()  # compiles
    rows = []
    rounds = [{id(case): case.seconds() for case in cases} for _ in range(ROUNDS)]
    for name, (mesh, case) in watched.items():
        ratios = [seconds[id(case)] / seconds[id(plain[mesh])] for seconds in rounds]
        low, median, high = np.percentile(ratios, [25, 50, 75])
        rows.append(f"| {name} | {mesh} | {median:.2f} | {low:.2f} to {high:.2f} |")
    head = (
        f"`python bench/health_cost.py`, {datetime.date.today()}: four layers of width 256, 1,024 "
        f"tokens, simulated devices on one CPU, {ROUNDS} interleaved rounds.\n\n"
        "| watched | mesh | processor time of a step over one without | quartiles |\n"
        "|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def compiled_comparison(targets: Sequence[str]) -> str:
    """Returns the table of the comparison of replicas, compiled for devices that are not here.

    targets: such as `h100:64`; each is compiled in a process of its own, as its compiler needs
    variables that are set before JAX is imported.
    """
    rows = []
    for target in targets:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            rows += pool.submit(rows_of, target).result()
    command = f"python bench/health_cost.py --compiled {' '.join(targets)}"
    head = (
        f"`{command}`, {datetime.date.today()}: one comparison of {MODEL} with AdamW, from the "
        "census of its compiled program; nothing ran.\n\n"
        "| on | mesh | state of a device | collectives | bytes sent by a device "
        "| memory besides the state |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def rows_of(on: str) -> list[str]:
    """Compiles the comparison for a target, and returns the rows of the table."""
    from meshwright.hardware.aot import compiler_environment, require_compiler, topology_devices
    from meshwright.hardware.targets import parse_target

    target = parse_target(on)
    require_compiler(target)
    os.environ |= compiler_environment(target)
    devices = topology_devices(target)
    return [_row_of(mesh, on, devices) for mesh in MESHES]


def _row_of(mesh: str, on: str, devices: list[Any]) -> str:
    """Compiles the comparison on a mesh, and returns its row."""
    import jax

    from meshwright.analysis.programs import census
    from meshwright.api.targets import resolved_run
    from meshwright.config import MeshShape
    from meshwright.hardware.mesh import build_mesh
    from meshwright.hardware.targets import parse_target
    from meshwright.runs.recipe import find_recipe
    from meshwright.step.device_run import place_on_devices
    from meshwright.trainer.replicas import comparison_of
    from xlacensus.formatting import format_bytes

    run = find_recipe(MODEL)
    shape = MeshShape.parse(mesh)
    training = dataclasses.replace(run.training, batch=len(devices))
    run = dataclasses.replace(run, mesh=shape, training=training)
    run = resolved_run(run, len(devices), parse_target(on))
    device_run = place_on_devices(run, build_mesh(shape, devices))
    compare, tensors = comparison_of(device_run.abstract)
    found = census(compare, tensors, mesh=device_run.mesh.shape)
    collectives = sum(entry.count for entry in found.ledger)
    sent = sum(entry.sent for entry in found.ledger)
    state = sum(
        leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in jax.tree.leaves(tensors)
    )
    kinds = ", ".join(sorted({entry.kind for entry in found.ledger}))
    return (
        f"| {on} | `{mesh}` | {format_bytes(state)} | "
        f"{collectives} ({kinds}) | {format_bytes(sent)} | "
        f"{format_bytes(found.memory.compiled.temporary)} |"
    )


def main() -> None:
    """Writes one of the two tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiled", nargs="+", metavar="TARGET")
    arguments = parser.parse_args()
    script = Path(__file__).name
    if arguments.compiled:
        table = compiled_comparison(arguments.compiled)
        script += " --compiled"
    else:
        table = measured_ratios()
    print(table)
    put_table(PAGE, script, table)


if __name__ == "__main__":
    main()

"""What the training loop adds to the bare compiled step on one CPU device: both by turns, in one process.

    python bench/loop_overhead.py [STEPS [ROUNDS]]

A round is STEPS steps dispatched back to back on one batch, then STEPS steps with the trainer's feed, meter and
metrics.jsonl, in the order of `trainer/loop.py`. Wall time on a shared machine varies between rounds; the processor
time of the loop's thread does not.
"""

import sys
import tempfile
from pathlib import Path

from loop_cost import StepRunner, measure_loop

from meshwright.config import MeshShape, Training
from meshwright.hardware.mesh import build_mesh, prepare_host
from meshwright.models.families.llama import Llama
from meshwright.reporters.files import JsonLines
from meshwright.runs.run import Run
from meshwright.step.device_run import place_on_devices
from meshwright.step.train_step import CompiledTrainStep

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 30


def main() -> None:
    """Prints the medians."""
    prepare_host(1)
    model = Llama(vocab=512, width=64, layers=2, heads=4, kv_heads=4, mlp=128)
    training = Training(steps=10_000, batch=8, seq=64, compute_dtype="float32", remat="none")
    device_run = place_on_devices(
        Run(model=model, mesh=MeshShape(), training=training), build_mesh(MeshShape())
    )
    runner = StepRunner(device_run, steps=STEPS * ROUNDS + 1)
    runner.start(CompiledTrainStep(device_run, runner.batch), device_run.initial_state())
    with tempfile.TemporaryDirectory() as out:
        metrics = JsonLines(Path(out) / "metrics.jsonl", upto=0)
        cost = measure_loop(runner, steps=STEPS, rounds=ROUNDS, reporters=[metrics])
        metrics.close()
    for name, seconds in vars(cost).items():
        if name != "steps":
            print(f"{name.removesuffix('_seconds'):>10}  {seconds * 1e3:8.3f} ms per step")


main()

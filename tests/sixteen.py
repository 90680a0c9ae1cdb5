"""Sixteen devices: two meshes of four axes against one device, and a checkpoint that moves. Prints JSON."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

from meshwright.hardware.mesh import prepare_host

prepare_host(16)
sys.path.insert(0, str(Path(__file__).parent))

from expert_exchange import Shape
from expert_exchange import largest_difference as exchange_difference
from shared_programs import share_programs
from tiny_runs import MODELS, largest_difference, tiny_run, train

from meshwright.config import Data, MeshShape
from meshwright.trainer import loop

DENSE, EXPERTS = "data=2,fsdp=2,tensor=2,stage=2", "fsdp=2,context=2,expert=4"
FOLDED = "fsdp=2,expert=2,context=2,tensor=2"
share_programs()
folder = Path(sys.argv[1])
results: dict[str, object] = {"devices": len(jax.devices())}

for family, mesh, changes in (
    ("llama", DENSE, {"microbatches": 4}),
    ("mixtral", EXPERTS, {}),
    ("mixtral", FOLDED, {"layout": "folded"}),
):
    single = train(tiny_run(MODELS[family]), 3)
    sharded = train(tiny_run(MODELS[family], mesh, **changes), 3)
    results[mesh] = {
        "losses": float(np.max(np.abs(np.array(sharded.losses) / np.array(single.losses) - 1))),
        "gradients": largest_difference(sharded.gradients, single.gradients),
    }

folded = Shape(16, 48, 5, nodes=2, split=(2, 2, 4))
shapes = (
    Shape(13, 13, 5),
    Shape(16, 16, 5, nodes=2),
    Shape(16, 32, 5, nodes=4, groups=(8, 2)),
    folded,
)
results["exchange"] = {
    str(s): max(exchange_difference(s, load) for load in ("even", "one")) for s in shapes
}

text = folder / "text.txt"
text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
model = dataclasses.replace(MODELS["llama"], vocab=None)
data = Data(paths=(str(text),), tokenizer="chars", sample=0)
run = tiny_run(model, DENSE, data=data, steps=8, microbatches=4, save_every=4, max_to_keep=9)
loop.train(loop.prepare_run(run, cache=folder), folder / "out")
for mesh in ("fsdp=2,context=2,data=4", "data=1"):
    out = folder / mesh
    (out / "checkpoints").mkdir(parents=True)
    (folder / "out" / "checkpoints" / "4").rename(out / "checkpoints" / "4")
    moved = dataclasses.replace(run, mesh=MeshShape.parse(mesh))
    moved = dataclasses.replace(moved, training=dataclasses.replace(moved.training, microbatches=1))
    loop.train(loop.prepare_run(moved, cache=folder), out, start="resume")
    (out / "checkpoints" / "4").rename(folder / "out" / "checkpoints" / "4")


def losses(out: Path) -> list[float]:
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line and line["step"] > 4]


results["moved"] = {mesh: losses(folder / mesh) for mesh in ("fsdp=2,context=2,data=4", "data=1")}
results["stayed"] = losses(folder / "out")
print(json.dumps(results))

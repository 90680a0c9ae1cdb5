"""A tiny run on one device and on meshes of all devices, compared by `trainer/parity.py`; and one run taken twice,
whose bits are compared.

    meshwright bench hardware --only bench/hardware/meshes.py:measure_meshes --out hardware
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.bench.hardware.section import Measurement, Section
from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.errors import ConfigError
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.runs.run import Run
from meshwright.step.train_step import build_train_step
from meshwright.storage.paths import default_cache_folder
from meshwright.storage.writing import write_text
from meshwright.trainer.loop import prepare_run
from meshwright.trainer.parity import compare_meshes
from meshwright.trainer.replicas import shard_sums

sys.path.append(str(Path(__file__).parents[1]))
from loop_cost import random_feed

_STEPS = 3
"""Steps that are compared on each mesh."""
_WORDS = (
    "mesh",
    "shard",
    "gather",
    "reduce",
    "scatter",
    "tensor",
    "stage",
    "expert",
    "token",
    "step",
)
_TEXT_LINES = 4000


def measure_meshes(section: Section) -> None:
    """Compares initial values, gradients and losses of meshes of all devices with those of one device, in float32."""
    devices, text = jax.device_count(), _write_text(section.folder)
    items: dict[str, Measurement] = {
        "the same bits twice": functools.partial(_repeat, MeshShape(fsdp=devices), text)
    }
    for name, mesh in meshes_of(devices) if devices > 1 else ():
        items[f"{name} on {mesh}"] = functools.partial(_compare, name, mesh, text)
    section.measure(items)
    section.notes += ["one device: there is no other mesh to compare with"] if devices == 1 else []


def meshes_of(devices: int) -> list[tuple[str, MeshShape]]:
    """Returns models and meshes of `devices`: each axis with FSDP, three axes together, and FSDP and data alone."""
    half, quarter = (devices // n if devices % n == 0 else 0 for n in (2, 4))
    found = [
        (1, "llama", MeshShape(fsdp=devices)),
        (4, "llama", MeshShape(data=max(quarter, 1), fsdp=2, tensor=2)),
        (2, "mixtral", MeshShape(fsdp=max(half, 1), expert=2)),
        (2, "llama", MeshShape(stage=2, fsdp=max(half, 1))),
        (2, "llama", MeshShape(fsdp=max(half, 1), context=2)),
        (2, "llama", MeshShape(fsdp=max(half, 1), tensor=2)),
        (4, "mixtral", MeshShape(expert=4, tensor=max(quarter, 1))),
        (1, "llama", MeshShape(data=devices)),
    ]
    return [(name, mesh) for multiple, name, mesh in found if devices % multiple == 0]


def _tiny(name: str, mesh: MeshShape, text: Path, **training: Any) -> Run:
    heads = max(4, mesh.size)
    sizes: dict[str, Any] = dict(
        width=16 * heads, layers=2, heads=heads, kv_heads=heads, mlp=32 * heads
    )
    experts: dict[str, Any] = dict(experts=8, experts_per_token=2, expert_mlp=16 * heads)
    model = (
        Mixtral(**sizes, **experts, vocab_multiple=16)
        if name == "mixtral"
        else Llama(**sizes, vocab_multiple=16)
    )
    return Run(
        model=model,
        mesh=mesh,
        fsdp_min_size=64,
        training=Training(steps=_STEPS, batch=2 * mesh.size, seq=128, remat="none", **training),
        optimizer=Optimizer(learning_rate=3e-3),
        data=Data(paths=(str(text),), tokenizer="bytes", sample=0),
    )


def _repeat(mesh: MeshShape, text: Path) -> Mapping[str, Any]:
    """Takes the same steps twice, placed and compiled anew, with the options that make a platform keep its bits."""
    label, sums = {"model": "llama", "mesh": str(mesh)}, list[Any]()
    try:
        for _ in range(2):
            jax.clear_caches()
            device_run = prepare_run(
                _tiny("llama", mesh, text, deterministic=True), cache=default_cache_folder()
            ).device_run
            batch, state = next(random_feed(device_run, 1)), device_run.initial_state()
            step = build_train_step(device_run)
            for _ in range(_STEPS):
                state, _ = step(state, batch)
            sums.append(shard_sums(state))
    except ConfigError as error:
        return {**label, "unsupported": f"{error.asked}: {error.truth}"}
    differ = [name for name in sums[0] if sums[0][name] != sums[1][name]]
    wrong = [f"two runs on {mesh} have other bits in {', '.join(differ[:4])}"] if differ else []
    return {**label, "bits": "differ" if differ else "equal in two runs", "problems": wrong}


def _compare(name: str, mesh: MeshShape, text: Path) -> Mapping[str, Any]:
    microbatches, label = max(1, mesh.stage), {"model": name, "mesh": str(mesh)}
    run = _tiny(name, mesh, text, attention_kernel="reference", microbatches=microbatches)
    try:
        # Float32 matmuls take bfloat16 passes on TPUs, and TF32 on GPUs, unless the highest precision is asked for.
        with jax.default_matmul_precision("highest"):
            prepared = prepare_run(run, cache=default_cache_folder())
            result = compare_meshes(prepared, MeshShape(), steps=_STEPS)
    except ConfigError as error:
        return {**label, "unsupported": f"{error.asked}: {error.truth}"}
    worst = max(result.steps, key=lambda s: s.gradient_difference)
    wrong = (
        [] if result.first_divergence is None else [f"{name} on {mesh}: {result.first_divergence}"]
    )
    return {
        **label,
        "initial_values_equal": not result.unequal_initial,
        "gradient_difference": worst.gradient_difference,
        "worst_tensor": worst.worst_tensor,
        "losses": [s.losses for s in result.steps],
        "first_divergence": result.first_divergence,
        "problems": wrong,
        "steps": [dataclasses.asdict(s) for s in result.steps],
    }


def _write_text(folder: Path) -> Path:
    """Writes some text to train on and returns its file; the same text every time."""
    file = folder / "text.jsonl"
    lines = (
        json.dumps(
            {"text": " ".join(_WORDS[(i * k) % len(_WORDS)] for k in (1, 3, 7, i % 5)) + f" {i}.\n"}
        )
        for i in range(_TEXT_LINES)
    )
    if not file.is_file():
        write_text(file, "\n".join(lines) + "\n")
    return file

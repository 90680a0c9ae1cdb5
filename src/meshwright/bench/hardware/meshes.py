"""Section `meshes`: a tiny run on one device and on meshes of all devices, compared by `trainer/parity.py`."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.bench.hardware.section import Measurement, Section
from meshwright.config import Data, MeshShape, Optimizer, Training
from meshwright.errors import ConfigError
from meshwright.hardware.mesh import default_cache_folder
from meshwright.models.families.llama import Llama
from meshwright.models.families.mixtral import Mixtral
from meshwright.models.model import Model
from meshwright.runs.run import Run
from meshwright.trainer.loop import prepare_run
from meshwright.trainer.parity import compare_meshes

_STEPS = 3
"""Steps that are compared on each mesh."""
_WORDS = ("mesh", "shard", "gather", "reduce", "scatter", "tensor", "stage", "expert", "token", "step")
_TEXT_LINES = 4000


def measure_meshes(section: Section) -> None:
    """Compares initial values, gradients and losses of meshes of all devices with those of one device, in float32."""
    devices = jax.device_count()
    if devices == 1:
        section.notes.append("one device: there is no other mesh to compare with")
        return
    text = _write_text(section.folder)
    items: dict[str, Measurement] = {
        f"{name} on {mesh}": functools.partial(_compare, name, mesh, text) for name, mesh in meshes_of(devices)
    }
    section.measure(items)


def meshes_of(devices: int) -> list[tuple[str, MeshShape]]:
    """Returns models and meshes of `devices`: each axis with FSDP, three axes together, and FSDP and data alone."""
    half = devices // 2 if devices % 2 == 0 else 0
    quarter = devices // 4 if devices % 4 == 0 else 0
    found = [("llama", MeshShape(fsdp=devices))]
    if quarter:
        found += [("llama", MeshShape(data=quarter, fsdp=2, tensor=2))]
    if half:
        found += [
            ("mixtral", MeshShape(fsdp=half, expert=2)),
            ("llama", MeshShape(stage=2, fsdp=half)),
            ("llama", MeshShape(fsdp=half, context=2)),
            ("llama", MeshShape(fsdp=half, tensor=2)),
        ]
    if quarter:
        found += [("mixtral", MeshShape(expert=4, tensor=quarter))]
    return [*found, ("llama", MeshShape(data=devices))]


def _model(name: str, devices: int) -> Model:
    heads = max(4, devices)
    sizes: dict[str, Any] = {
        "width": 16 * heads,
        "layers": 2,
        "heads": heads,
        "kv_heads": heads,
        "mlp": 32 * heads,
        "vocab_multiple": 16,
    }
    if name == "mixtral":
        return Mixtral(**sizes, experts=8, experts_per_token=2, expert_mlp=16 * heads)
    return Llama(**sizes)


def _compare(name: str, mesh: MeshShape, text: Path) -> Mapping[str, Any]:
    """Compares a mesh with one device."""
    training = Training(
        steps=_STEPS,
        batch=2 * mesh.size,
        seq=128,
        remat="none",
        attention_kernel="reference",
        microbatches=mesh.stage if mesh.stage > 1 else 1,
    )
    run = Run(
        model=_model(name, mesh.size),
        mesh=mesh,
        fsdp_min_size=64,
        training=training,
        optimizer=Optimizer(learning_rate=3e-3),
        data=Data(paths=(str(text),), tokenizer="bytes", sample=0),
    )
    label = {"model": name, "mesh": str(mesh)}
    try:
        # Float32 matmuls take bfloat16 passes on TPUs, and TF32 on GPUs, unless the highest precision is asked for.
        with jax.default_matmul_precision("highest"):
            prepared = prepare_run(run, cache=default_cache_folder())
            result = compare_meshes(prepared, MeshShape(), steps=_STEPS)
    except ConfigError as error:
        return {**label, "unsupported": f"{error.asked}: {error.truth}"}
    worst = max(result.steps, key=lambda s: s.gradient_difference)
    wrong = [] if result.first_divergence is None else [f"{name} on {mesh}: {result.first_divergence}"]
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
        json.dumps({"text": " ".join(_WORDS[(i * k) % len(_WORDS)] for k in (1, 3, 7, i % 5)) + f" {i}.\n"})
        for i in range(_TEXT_LINES)
    )
    if not file.is_file():
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file

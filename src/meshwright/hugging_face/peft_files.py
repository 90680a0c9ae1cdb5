"""Adapters in PEFT's format: adapter_config.json, and adapter_model.safetensors with A and B of each module.

PEFT stores A as [r, in] and B as [out, r], with the dimensions of a module's weight merged as `transformers` has them.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.documents import check_inside, read_json
from meshwright.errors import WeightsError
from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.architectures import architecture_of
from meshwright.hugging_face.names import StoredTensor
from meshwright.hugging_face.safetensors_files import DTYPES, NewSafetensorsFile, SafetensorsFile
from meshwright.models.adapters import targets_of
from meshwright.models.model import Model
from meshwright.sharding.params import Param

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LARGEST_RANK = 2**16
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), (None, [])),
    **dict.fromkeys(("target_parameters", "trainable_token_indices", "alora_invocation_tokens"), (None, [])),
}
"""Settings of PEFT that change what is computed, and the values with which nothing does."""

Pair = tuple[np.ndarray, np.ndarray]
"""A [L, in..., r] and B [L, r, out...]."""


def read_config(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises WeightsError where it is not LoRA, or one that computes something else."""
    file = folder / CONFIG
    try:
        check_inside(folder, [file])
        config = dict(read_json(file))
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or not 1 <= rank <= _LARGEST_RANK or not isinstance(alpha, int | float):
            raise ValueError(f"r is {rank!r} and lora_alpha is {alpha!r}")
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"reading {file}", f"it cannot be read: {error}", "the folder of an adapter") from error
    if config.get("peft_type") != "LORA":
        raise WeightsError(f"reading {file}", f"its peft_type is {config.get('peft_type')!r}", "an adapter of LoRA")
    for field, plain in _PLAIN.items():
        if config.get(field, plain[0]) not in plain:
            raise WeightsError(
                f"reading {file}",
                f"{field} is {config[field]!r}, which Meshwright does not compute",
                f"an adapter with {field} {plain[0]!r}, or its weights merged by PEFT (merge_and_unload)",
            )
    return config


def tuning_of(folder: Path) -> FineTune:
    """Returns the fine-tuning that an adapter continues: rank, alpha, and the adapter to start from.

    Its targets are found by its tensors (`read_adapter` refuses those that are not there): here they are named by the
    modules of PEFT, of which each is the last part.
    """
    config = read_config(folder)
    rank = int(config["r"])
    alpha = float(config["lora_alpha"]) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)
    return FineTune(method="lora", rank=rank, alpha=alpha, adapter=str(folder))


def targets_in(folder: Path, model: Model) -> tuple[str, ...]:
    """Returns the matrices of a model that an adapter has tensors for."""
    with_tensors = SafetensorsFile(folder / WEIGHTS).entries
    found = []
    for path, p, stored in _matrices(model, FineTune(method="lora")):
        if any(_key(module, "A") in with_tensors for module in _modules(stored, p)):
            found.append(path)
    if not found:
        raise WeightsError(
            f"the adapter in {folder}",
            f"none of its {len(with_tensors)} tensors is of a projection of this model",
            f"an adapter of a {type(model).__name__}",
        )
    return tuple(found)


def read_adapter(folder: Path, model: Model, tuning: FineTune) -> dict[str, Pair]:
    """Returns A and B of every adapted matrix by path, float32, one row per layer.

    Raises WeightsError for another rank or scale than the adapter's, and for a tensor that is missing, of another
    shape, or of a module that has no adapter in the run.
    """
    config, own = read_config(folder), tuning_of(folder)
    if tuning.rank != own.rank or not math.isclose(tuning.scale, own.scale, rel_tol=1e-6):
        raise WeightsError(
            f"the adapter in {folder}",
            f"it has rank {own.rank} and alpha {own.alpha:g}, and the run rank {tuning.rank} and alpha "
            f"{tuning.alpha:g}: the model would start as another than the one it was trained to",
            f"--finetune.rank {own.rank} --finetune.alpha {own.alpha:g}",
        )
    file = SafetensorsFile(folder / WEIGHTS)
    used: set[str] = set()
    found: dict[str, Pair] = {}

    def tensor(module: str, side: str, shape: tuple[int, ...]) -> np.ndarray:
        name = _key(module, side)
        if name not in file.entries:
            raise WeightsError(
                f"the adapter in {folder}", f"it has no tensor {name!r}", "--finetune.targets as the adapter has them"
            )
        if file.entries[name].shape != shape:
            raise WeightsError(
                f"the adapter in {folder}",
                f"{name!r} is {list(file.entries[name].shape)}, and the model needs {list(shape)}",
                f"the model it was trained for ({config.get('base_model_name_or_path')}), and its rank",
            )
        used.add(name)
        return np.asarray(file.tensor(name)).astype(np.float32)

    for path, p, stored in _matrices(model, tuning):
        outer, inner = (_sizes(p, letters) for letters in stored.axes)
        rank, rows = tuning.rank, []
        for module in _modules(stored, p):
            a = tensor(module, "A", (rank, math.prod(inner))).reshape(rank, *inner)
            b = tensor(module, "B", (math.prod(outer), rank)).reshape(*outer, rank)
            rows.append((np.moveaxis(a, 0, -1), np.moveaxis(b, -1, 0)))
        found[path] = (np.stack([a for a, _ in rows]), np.stack([b for _, b in rows]))
    other = sorted(set(file.entries) - used)
    if other:
        raise WeightsError(
            f"the adapter in {folder}",
            f"it has a tensor {other[0]!r}, and the run no such adapter",
            "--finetune.targets as the adapter has them; without a tensor the model would compute something else",
        )
    return found


def write_adapter(folder: Path, model: Model, tuning: FineTune, adapters: Mapping[str, Pair], base: str) -> int:
    """Writes an adapter that `peft.PeftModel.from_pretrained` reads; returns the number of its tensors.

    adapters: as `read_adapter` returns them.  base: name or folder of the model it belongs to. Raises WeightsError for
    a matrix that `transformers` stores as part of another, of which PEFT would have one adapter.
    """
    tensors: dict[str, np.ndarray] = {}
    suffixes: set[str] = set()
    for path, p, stored in _matrices(model, tuning):
        for layer, module in enumerate(_modules(stored, p)):
            a, b = (x[layer] for x in adapters[path])
            tensors[_key(module, "A")] = np.moveaxis(a, -1, 0).reshape(tuning.rank, -1)
            tensors[_key(module, "B")] = np.moveaxis(b, 0, -1).reshape(-1, tuning.rank)
            suffixes.add(module.split(f".{stored.layers[layer]}.", 1)[1])
    file = NewSafetensorsFile(folder / WEIGHTS, {name: ("F32", x.shape) for name, x in tensors.items()})
    for name, x in tensors.items():
        file.tensor(name)[...] = x.astype(DTYPES["F32"])
    file.release()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.rank,
        "lora_alpha": tuning.alpha,
        "target_modules": sorted(suffixes),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(tensors)


def _matrices(model: Model, tuning: FineTune) -> Iterator[tuple[str, Param, StoredTensor]]:
    """Path, description and place of each adapted matrix. Raises WeightsError for a part of a fused tensor."""
    params, stored = model.params(), architecture_of(model)[0].tensors(model)
    for stack, names in targets_of(params, tuning).items():
        for name in names:
            path, p = f"{stack}.{name}", params[stack][name]
            inner, outer = p.dims[1 : 1 + p.contract], p.dims[1 + p.contract :]
            where = stored[path]
            if where.part is not None or where.axes != (outer, inner):
                raise WeightsError(
                    f"{path} as an adapter in PEFT's format",
                    f"`transformers` stores it as a part of {where.name.format(layer=0, expert=0)!r} or transposed, "
                    "for which PEFT has one adapter with another A",
                    "the weights with adapters merged: meshwright convert RUN OUT",
                )
            yield path, p, where


def _modules(stored: StoredTensor, p: Param) -> list[str]:
    return [name.removesuffix(".weight") for name in stored.names(p)]


def _key(module: str, side: str) -> str:
    return f"{_PREFIX}{module}.lora_{side}.weight"


def _sizes(p: Param, letters: str) -> tuple[int, ...]:
    return tuple(p.shape[p.dims.index(letter)] for letter in letters)

"""Adapters in PEFT's format: adapter_config.json,
and adapter_model.safetensors with A and B of each module.

PEFT stores A as [r, in] and B as [out, r],
with the dimensions of a module's weight merged as `transformers` has them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from meshwright.errors import WeightsError
from meshwright.fine_tuning import FineTune
from meshwright.hugging_face.architectures import architecture_of
from meshwright.hugging_face.names import StoredTensor
from meshwright.hugging_face.safetensors_files import DTYPES, NewSafetensorsFile
from meshwright.hugging_face.text_models import TextPrefix
from meshwright.models.adapters import targets_of
from meshwright.models.model import Model
from meshwright.sharding.params import Param
from meshwright.storage.writing import write_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
Pair = tuple[np.ndarray, np.ndarray]
"""A [L, in..., r] and B [L, r, out...]."""


def write_adapter(
    folder: Path,
    model: Model,
    tuning: FineTune,
    adapters: Mapping[str, Pair],
    base: str,
    prefix: TextPrefix | None = None,
) -> int:
    """Writes an adapter that `peft.PeftModel.from_pretrained` reads;
    returns the number of its tensors.

    adapters: A and B of every adapted matrix by path.
    base: name or folder of the model it belongs to.
    prefix: form of the names where the base is a larger model, in which PEFT finds modules by the
    names of `transformers` 5. Raises WeightsError for a matrix that `transformers` stores as part
    of another, of which PEFT would have one adapter.
    """
    tensors: dict[str, np.ndarray] = {}
    suffixes: set[str] = set()
    for path, p, stored in _matrices(model, tuning):
        for layer, name in enumerate(stored.names(p)):
            stored_name = name if prefix is None else prefix.name_in_larger_model(name)
            module = stored_name.removesuffix(".weight")
            a, b = (x[layer] for x in adapters[path])
            tensors[_key(module, "A")] = np.moveaxis(a, -1, 0).reshape(tuning.rank, -1)
            tensors[_key(module, "B")] = np.moveaxis(b, 0, -1).reshape(-1, tuning.rank)
            suffixes.add(module.split(f".{stored.layers[layer]}.", 1)[1])
    file = NewSafetensorsFile(
        folder / WEIGHTS, {name: ("F32", x.shape) for name, x in tensors.items()}
    )
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
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return len(tensors)


def _matrices(model: Model, tuning: FineTune) -> Iterator[tuple[str, Param, StoredTensor]]:
    """Path, description and place of each adapted matrix.
    Raises WeightsError for a part of a fused tensor."""
    params, stored = model.params(), architecture_of(model)[0].tensors(model)
    for stack, names in targets_of(params, tuning).items():
        for name in names:
            path, p = f"{stack}.{name}", params[stack][name]
            inner, outer = p.dims[1 : 1 + p.contract], p.dims[1 + p.contract :]
            where = stored[path]
            if where.part is not None or where.axes != (outer, inner):
                raise WeightsError(
                    f"{path} as an adapter in PEFT's format",
                    "`transformers` stores it as a part of "
                    f"{where.name.format(layer=0, expert=0)!r} or transposed, for which PEFT has "
                    "one adapter with another A",
                    "the weights with adapters merged: meshwright convert RUN OUT",
                )
            yield path, p, where


def _key(module: str, side: str) -> str:
    return f"{_PREFIX}{module}.lora_{side}.weight"

"""Conversion of a run's checkpoint into a Hugging Face folder: configuration, tokenizer, safetensors with an index."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.checkpoint.blocks import Index, StoredTensors
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.import_weights import Conversion, Say
from meshwright.checkpoint.journal import Journal, write_sums
from meshwright.documents import read_json
from meshwright.hugging_face.architecture import Architecture, architecture_of
from meshwright.hugging_face.folder import KEPT, read_model
from meshwright.hugging_face.names import StoredTensor, unpadded_shape, write_block
from meshwright.hugging_face.safetensors_files import DTYPES, NewSafetensorsFile, file_names, split_into_files
from meshwright.hugging_face.tokenizer_files import write_tokenizer
from meshwright.models.model import Model
from meshwright.runs.run import Run
from meshwright.runs.run_file import run_in_folder
from meshwright.sharding.params import Param, named_leaves

_CODES = {"float32": "F32", "bfloat16": "BF16"}
LARGEST_FILE = 5 * 10**9
"""Largest file in bytes, as `transformers` has it."""


@dataclasses.dataclass(frozen=True)
class _Target:
    """Names, shapes and files of the tensors to write."""

    architecture: Architecture
    config: dict[str, Any]
    params: dict[str, Param]
    stored: Mapping[str, StoredTensor]
    shapes: dict[str, tuple[int, ...]]
    groups: list[list[str]]
    """Tensors of each file."""


def export_weights(
    source: Path, out: Path, *, at: int | None = None, dtype: str | None = None, largest_file: int = LARGEST_FILE,
    say: Say = lambda line: None,
) -> Conversion:  # fmt: skip
    """Converts the checkpoint of a run in the folder `source` into the Hugging Face folder `out`.

    at: step of the checkpoint; None takes the last.  dtype: float32 or bfloat16; None keeps that of the checkpoint.
    Adapters are merged, W + (alpha / r) A B in float32 (checkpoint/export_adapter.py writes them alone).
    Memory is bounded by the checkpoint's largest chunk. Every tensor is compared with the checkpoint's fingerprint.
    Raises CheckpointError for a damaged checkpoint, WeightsError for a model that no architecture expresses,
    ConfigError where `out` exists.
    """
    run = run_in_folder(source)
    with Checkpoints(source / "checkpoints", max_to_keep=None) as checkpoints:
        manifest = checkpoints.manifest(at)
    tensors = StoredTensors(source / "checkpoints" / str(manifest.step), manifest)
    dtype = dtype or _dtype_of(tensors)
    target = _target(manifest.run, source, dtype, largest_file)
    code = _CODES[dtype]
    weights: WeightReader = tensors
    if manifest.run.finetune.method == "lora":
        from meshwright.checkpoint.merged_tensors import MergedTensors  # loaded for runs with adapters

        weights = MergedTensors(tensors)
    identity = [str(tensors.step_folder.resolve()), manifest.to_dict()["tensors"], code, target.groups]
    journal = Journal(out, identity)
    if journal.resumed:
        say(f"going on in {journal.folder}: {journal.resumed} of {len(target.params)} parameters are done")
    names = file_names(len(target.groups))
    files = {
        name: NewSafetensorsFile(journal.folder / name, {t: (code, target.shapes[t]) for t in group})
        for name, group in zip(names, target.groups, strict=True)
    }
    file_of = {tensor: name for name, group in zip(names, target.groups, strict=True) for tensor in group}
    for number, (path, p) in enumerate(target.params.items(), 1):
        if path not in journal.done:
            say(f"{number}/{len(target.params)} {path} {list(unpadded_shape(p))}")
            _export_one(weights, path, p, target.stored[path], {t: files[f] for t, f in file_of.items()})
            journal.add(path, True)
    _write_rest(journal.folder, run, source, target, file_of, DTYPES[code].itemsize)
    journal.commit()
    count = sum(int(np.prod(unpadded_shape(p))) for p in target.params.values())
    dtype_name = next(name for name, known in _CODES.items() if known == code)
    return Conversion(out, target.architecture.name, count, len(target.shapes), dtype_name, journal.resumed, ())


def _dtype_of(tensors: StoredTensors) -> str:
    tuning, training = tensors.manifest.run.finetune, tensors.manifest.run.training
    if tuning.method == "lora":
        return "float32" if tuning.base == "float32" else training.compute_dtype
    return next(t.dtype for name, t in tensors.manifest.tensors.items() if name.startswith("params."))


def _target(run: Run, source: Path, dtype: str, largest_file: int) -> _Target:
    architecture, config = _configuration(run, source)
    # `transformers` 4 calls it torch_dtype, 5 calls it dtype and reads both.
    config = {**config, "dtype" if "dtype" in config else "torch_dtype": dtype}
    params = named_leaves(run.model.params())
    stored = architecture.tensors(run.model)
    shapes = {name: stored[path].stored_shape(p) for path, p in params.items() for name in stored[path].names(p)}
    sizes = {name: int(np.prod(shape)) * DTYPES[_CODES[dtype]].itemsize for name, shape in shapes.items()}
    return _Target(architecture, config, params, stored, shapes, split_into_files(sizes, largest_file))


def _configuration(run: Run, source: Path) -> tuple[Architecture, dict[str, Any]]:
    """Architecture and config.json of a run's model: that which it came with, where the model is still the same."""
    kept = source / KEPT
    longest = {} if run.model.spec().max_seq else {"max_position_embeddings": run.training.seq}
    if not (kept / "config.json").is_file():
        architecture, config = architecture_of(run.model)
        return architecture, {**config, **_longest(config, longest)}
    folder = read_model(str(kept.absolute()))
    config = read_json(kept / "config.json")
    config.pop("quantization_config", None)  # weights go out as numbers
    if _same(folder.architecture, folder.model, run.model):
        return folder.architecture, config
    architecture, changed = architecture_of(run.model)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    if longest and folder.max_seq:
        longest = {"max_position_embeddings": max(folder.max_seq, run.training.seq)}
    return architecture, {**changed, **ids, **_longest(changed, longest)}


def _longest(config: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """The longer of the sequence of the training and that of the configuration, which YaRN has for its extension."""
    return {name: max(length, config.get(name, 0)) for name, length in trained.items()}


def _same(architecture: Architecture, first: Model, second: Model) -> bool:
    return type(first) is type(second) and architecture.write(first) == architecture.write(second)


class WeightReader(Protocol):
    """Weights of a model, block by block."""

    def read_blocks(self, name: str, shape: tuple[int, ...], then: Callable[[Index, np.ndarray], None]) -> None:
        """Calls `then` with each block of the weight `name`, without its rows beyond `shape`."""
        ...


def _export_one(
    tensors: WeightReader, path: str, p: Param, stored: StoredTensor, files: dict[str, NewSafetensorsFile]
) -> None:
    """Writes one parameter into the tensors that it is stored in."""
    touched: set[NewSafetensorsFile] = set()

    def tensor(stored_name: str) -> np.ndarray:
        touched.add(files[stored_name])
        return files[stored_name].tensor(stored_name)

    def write(index: Index, block: np.ndarray) -> None:
        write_block(p, stored, index, block, tensor)
        for file in touched:
            file.release()
        touched.clear()

    tensors.read_blocks(f"params.{path}", unpadded_shape(p), write)


def _write_rest(
    folder: Path, run: Run, source: Path, target: _Target, file_of: dict[str, str], itemsize: int
) -> None:  # fmt: skip
    """Writes index, checksums, configuration and tokenizer."""
    if len(target.groups) > 1:
        total = sum(int(np.prod(shape)) for shape in target.shapes.values()) * itemsize
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    write_sums(folder)
    kept = source / KEPT
    end = write_tokenizer(source / "tokenizer.json", kept, folder)
    config = target.config if "eos_token_id" in target.config or end is None else {**target.config, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (kept / "generation_config.json").is_file():
        shutil.copyfile(kept / "generation_config.json", folder / "generation_config.json")

"""Checkpoints of other programs, converted into Hugging Face folders.

    folder of another program                       OUT.partial, moved to OUT at the end
    tensors in its names and order  -- blocks -->   model.safetensors, written in place
    config.json, tokenizer          -- copied -->   config.json, tokenizer

The names and order of each program are in `hugging_face`; here is what every one of them needs:
headers are written and compared with the model first, then tensors block by block, so that an
interrupted conversion goes on.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.checkpoint.conversion import (
    LARGEST_FILE,
    Conversion,
    FilePlan,
    Journal,
    Say,
    count_parameters,
    write_json,
    write_sums,
)
from meshwright.documents import check_inside
from meshwright.errors import WeightsError
from meshwright.hugging_face.folder import (
    TOKENIZER_FILES,
    ModelFolder,
    WeightsFolder,
    check_tied,
    open_folder,
    read_model,
)
from meshwright.hugging_face.maxtext_checkpoints import ARCHITECTURES, items_of, read_maxtext
from meshwright.hugging_face.megatron_checkpoints import (
    MEGATRON_ARCHITECTURES,
    is_megatron,
    megatron_tensors,
)
from meshwright.hugging_face.safetensors_files import INDEX, split_into_files, tensor_bytes
from meshwright.hugging_face.torch_checkpoints import (
    METADATA,
    TorchTensor,
    named_tensors,
    read_tensors_and_objects,
)
from meshwright.storage.writing import copy_file, make_folder

LLAMA_NAME = "LlamaForCausalLM"
"""Architecture whose names in torchtitan are known."""


class NamedTensor(Protocol):
    """Tensor of another program's checkpoint, under Hugging Face's name and in its order."""

    @property
    def code(self) -> str:
        """Type, as safetensors files name it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Hugging Face's tensor."""

    def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields parts of Hugging Face's tensor: the index of each in it, and its values."""


@dataclasses.dataclass(frozen=True)
class OtherCheckpoint:
    """Checkpoint of another program, read so far that its tensors have Hugging Face's names."""

    model: ModelFolder
    """Its folder and config.json."""
    program: str
    """Program that wrote it."""
    tensors: Mapping[str, NamedTensor]
    files: frozenset[Path]
    """Files that a conversion reads, config.json among them."""
    notes: tuple[str, ...]
    """What is not read."""

    def identity(self) -> list[Any]:
        """Returns what identifies its files: path, size and time of each."""
        states = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(self.files)]
        return [f"from {self.program}", states]

    def plan(self, largest_file: int) -> FilePlan:
        """Returns the safetensors files that hold its tensors."""
        described = {name: (tensor.code, tensor.shape) for name, tensor in self.tensors.items()}
        sizes = {name: tensor_bytes(code, shape) for name, (code, shape) in described.items()}
        return FilePlan(described, split_into_files(sizes, largest_file))


def import_torch_checkpoint(
    source: Path, out: Path, *, largest_file: int = LARGEST_FILE, say: Say = lambda line: None
) -> Conversion:
    """Converts a checkpoint of `torch.distributed.checkpoint` that torchtitan or Megatron wrote
    into a Hugging Face folder.

    source: folder with `.metadata`, and with the config.json of its model.
    out: the Hugging Face folder. The weights keep their type. Memory is bounded by the largest
    chunk. Raises WeightsError for anything missing, unknown or damaged, ConfigError where `out`
    exists.
    """
    tensors, objects = read_tensors_and_objects(source)
    read = _megatron(source, tensors, len(objects))
    if read is None:
        read = _torchtitan(source, tensors)
    return _convert(read, out, largest_file, say)


def _torchtitan(source: Path, stored: Mapping[str, TorchTensor]) -> OtherCheckpoint:
    """Names the tensors of a checkpoint of torchtitan.
    Raises WeightsError where it is of another model."""
    model = _model_of(source, "torchtitan", (LLAMA_NAME,))
    llama: Any = model.model
    tensors, notes = named_tensors(source, stored, llama.heads, llama.kv_heads)
    return OtherCheckpoint(model, "torch", tensors, _torch_files(source, stored), notes)


def _megatron(
    source: Path, stored: Mapping[str, TorchTensor], objects: int
) -> OtherCheckpoint | None:
    """Names the tensors of a checkpoint of Megatron; None for one of another program.
    Raises WeightsError as above."""
    if not is_megatron(stored):
        return None
    model = _model_of(source, "Megatron", MEGATRON_ARCHITECTURES)
    tensors, notes = megatron_tensors(source, stored, objects, model.model)
    return OtherCheckpoint(model, "Megatron", tensors, _torch_files(source, stored), notes)


def _model_of(source: Path, program: str, known: tuple[str, ...]) -> ModelFolder:
    """Returns the model of a folder's config.json.
    Raises WeightsError where its names in a program are not known."""
    model = read_model(str(source.absolute()))
    if model.architecture.name not in known:
        raise WeightsError(
            f"converting {source}",
            f"its config.json is of {model.architecture.name}, and names in {program} are known of "
            f"{', '.join(known)}",
            "a Hugging Face folder, written by the program that saved it",
        )
    return model


def _torch_files(source: Path, stored: Mapping[str, TorchTensor]) -> frozenset[Path]:
    """Returns the files of a folder of `torch.distributed.checkpoint`."""
    files = {source.resolve() / METADATA, source.resolve() / "config.json"}
    for tensor in stored.values():
        files.update(chunk.file.resolve() for chunk in tensor.chunks)
    return frozenset(files)


def import_maxtext_checkpoint(
    source: Path, out: Path, *, largest_file: int = LARGEST_FILE, say: Say = lambda line: None
) -> Conversion:
    """Converts a checkpoint of MaxText's Llama, Mistral or Mixtral
    into the Hugging Face folder `out`.

    source: folder of Orbax with `_METADATA`, or the step's folder around it, and with the
    config.json of its model. The weights keep their type. Raises WeightsError for anything missing,
    unknown or damaged, ConfigError where `out` exists.
    """
    return _convert(_read_maxtext(source), out, largest_file, say)


def _read_maxtext(source: Path) -> OtherCheckpoint:
    """Reads names and shapes of a checkpoint of MaxText.
    Raises WeightsError where it is of another model."""
    model = _model_of(source, "MaxText", ARCHITECTURES)
    items = items_of(source)
    assert items is not None
    tensors, notes = read_maxtext(source, items, model.model)
    files = {path.resolve() for path in items.rglob("*") if path.is_file()}
    files.add(source.resolve() / "config.json")
    return OtherCheckpoint(model, "MaxText", tensors, frozenset(files), notes)


def _convert(source: OtherCheckpoint, out: Path, largest_file: int, say: Say) -> Conversion:
    """Writes the Hugging Face folder of another program's checkpoint."""
    plan = source.plan(largest_file)
    journal = Journal(out, [*source.identity(), plan.groups], len(source.tensors), say)
    weights = _write_headers(source, plan, journal.folder)
    _write_tensors(source, plan, journal, say)
    _check_tied(source, weights)
    write_sums(journal.folder)
    journal.commit()
    return Conversion(
        out,
        source.model.architecture.name,
        count_parameters(weights.params),
        len(source.tensors),
        weights.dtype,
        journal.resumed,
        source.notes,
    )


def _check_tied(source: OtherCheckpoint, weights: WeightsFolder) -> None:
    """Raises WeightsError where config.json ties the output layer to the embedding, and the
    checkpoint has another one."""
    try:
        check_tied(weights)
    except WeightsError as error:
        raise WeightsError(f"converting {source.model.path}", error.truth, error.fix) from error


def _write_headers(source: OtherCheckpoint, plan: FilePlan, folder: Path) -> WeightsFolder:
    """Writes all but the values of the tensors;
    returns the folder, compared with the model of its config.json.

    Raises WeightsError where names or shapes are of another model: before a weight is read.
    """
    plan.open(folder)
    if len(plan.groups) > 1:
        write_json(folder / INDEX, plan.index())
    path = source.model.path
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        if (path / name).is_file():
            check_inside(path, [path / name])
            make_folder(folder, *Path(name).parts[:-1])
            copy_file(path / name, folder / name)
    try:
        return open_folder(str(folder.absolute()))
    except WeightsError as error:
        raise WeightsError(f"converting {path}", error.truth, error.fix) from error


def _write_tensors(source: OtherCheckpoint, plan: FilePlan, journal: Journal, say: Say) -> None:
    """Writes the tensors that are not done, block by block."""
    files = plan.open(journal.folder)
    for number, (name, tensor) in enumerate(source.tensors.items(), 1):
        if name in journal.done:
            continue
        say(f"{number}/{len(source.tensors)} {name} {list(tensor.shape)}")
        target = files[name].tensor(name)
        for index, values in tensor.blocks():
            target[index] = values
        files[name].release()
        journal.note(name, True)

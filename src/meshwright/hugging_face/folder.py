"""Folders of Hugging Face models: configuration, tokenizer files,
and weights checked and put onto a mesh."""

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright.config import Precision
from meshwright.data.vocabularies import tokenizer_file
from meshwright.documents import check_inside, read_json
from meshwright.errors import MeshwrightError, WeightsError, reason_of
from meshwright.formatting import format_bytes
from meshwright.hugging_face import quantised
from meshwright.hugging_face.architectures import Architecture
from meshwright.hugging_face.config_fields import read_fields
from meshwright.hugging_face.hub import find_folder
from meshwright.hugging_face.names import Index, StoredTensor, read_block
from meshwright.hugging_face.safetensors_files import (
    DTYPES,
    FP8_CODE,
    NewSafetensorsFile,
    SafetensorsFile,
    TensorEntry,
    check_one_set,
    check_unwrapped,
    find_files,
    read_header,
    read_metadata,
)
from meshwright.hugging_face.text_models import (
    TEXT_PREFIXES,
    TextModel,
    TextPrefix,
    find_text_model,
    prefix_of_text,
)
from meshwright.models.model import Model
from meshwright.path_kinds import KEPT
from meshwright.sharding.params import Param, Tree, is_param, named_leaves
from meshwright.sharding.stages import NO_LAYER
from meshwright.storage.transfer import copy_file
from meshwright.storage.writing import write_text

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(CHAT_TEMPLATE, "additional_chat_templates/tool_use.jinja", "chat_template.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)
OTHER_PARTS = "other_parts.safetensors"
"""File with the tensors of a larger model's other parts, in the folder `KEPT`."""
FORM = "form.json"
"""File with the form of the tensors, where an architecture has several, in the folder `KEPT`."""
_KEPT_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder's model, without its weights."""

    path: Path
    text: TextModel
    """Architecture and fields of the text model, and the larger model around it."""
    model: Model
    max_seq: int | None
    """Longest sequence that the configuration names."""
    notes: tuple[str, ...]
    """What the configuration has and the model does not read."""
    packed: bool = False
    """Whether some weights are in the quantised form that the architecture reads (quantised.py)."""
    fp8_block: quantised.Block | None = None
    """Blocks of float8 weights that share a scale; None where weights are not float8."""

    @property
    def architecture(self) -> Architecture:
        """Architecture of the text model."""
        return self.text.architecture

    @property
    def tokenizer(self) -> Path:
        """Its tokenizer.json, whether or not there is one,
        or the vocab.json of a tokenizer in two files."""
        return tokenizer_file(self.path)


def note_of_length(tokens: int, positions: int | None, source: str) -> str:
    """Returns a note where texts are longer than the positions that a configuration names;
    "" where they are not.

    A model with a table of positions refuses such texts. Rotary positions have no end, so that the
    model computes them, and its training does not show how well.
    """
    if positions is None or tokens <= positions:
        return ""
    return (
        f"texts of {tokens:,} tokens are longer than the {positions:,} positions of {source} "
        "(max_position_embeddings, or the sequences of its training): those beyond are computed, "
        "and the weights were not trained on them"
    )


def read_model(name: str, *, weights: bool = False) -> ModelFolder:
    """Reads the model that `hf:NAME` names from its config.json.
    weights: whether they will be read as well.

    Raises WeightsError for an unknown architecture,
    and for a field whose value the family does not compute.
    """
    folder = find_folder(name, weights=weights)
    text = find_text_model(read_fields(folder))
    architecture, fields = text.architecture, text.fields
    packed = fields.check_quantised(architecture.packed)
    try:
        model = architecture.read(fields)
        model.params()
    except MeshwrightError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = (
            f"its fields describe no {architecture.name}: {type(error).__name__}: "
            f"{reason_of(error)}"
        )
        raise fields.error(
            found, "the config.json that was published with these weights"
        ) from error
    longest = fields.get("max_position_embeddings", fields.get("n_positions", None))
    block = quantised.block_of(fields) if packed and architecture.packed == quantised.FP8 else None
    text.check_all_read()
    notes = list[str]()
    if text.larger is not None:
        notes.append(f"the text model of {text.larger.name}, computed as {architecture.name}")
    if packed:
        notes.append(
            f"weights in {architecture.packed} are read as the bfloat16 numbers that they stand for"
        )
    return ModelFolder(folder, text, model, longest, tuple(notes), packed, block)


@dataclasses.dataclass(frozen=True)
class WeightsFolder:
    """A folder's model and its weights: every tensor found, of the right shape,
    in a file of the right size."""

    folder: ModelFolder
    params: dict[str, Param]
    """Parameters by dotted path."""
    stored: dict[str, StoredTensor]
    """Where each of them is stored."""
    entries: dict[str, TensorEntry]
    """Tensors by name, and the file of each."""
    dtype: Precision
    """Type of the weights: float32 where there are several,
    or one that float32 holds and bfloat16 does not."""
    notes: tuple[str, ...]
    unpacked: frozenset[str]
    """Tensors that are stored as blocks and scales in MXFP4."""
    others: dict[str, TensorEntry] = dataclasses.field(default_factory=dict)
    """Tensors of a larger model's other parts, by their own names."""
    prefix: TextPrefix | None = None
    """Form of the text model's names inside a larger model."""
    form: str = ""
    """Form of the tensors, where the architecture has several (`Architecture.forms`)."""

    @contextlib.contextmanager
    def reader(self) -> Iterator["TensorReader"]:
        """Opens the files for reading."""
        reader = TensorReader(self)
        yield reader
        reader.release()


class TensorReader:
    """Tensors of a folder by name; files are mapped when they are first used."""

    def __init__(self, weights: WeightsFolder):
        self._weights = weights
        self._open: dict[Path, SafetensorsFile] = {}
        self._last: tuple[str, np.ndarray] | None = None

    def __call__(self, name: str) -> np.ndarray:
        """Returns a view of a tensor; one in float8 is dequantised, and the last one kept."""
        if name in self._weights.unpacked:
            packed: Any = quantised.PackedTensor(
                self(name + quantised.BLOCKS), self(name + quantised.SCALES)
            )
            return packed
        block = self._weights.folder.fp8_block
        if self._weights.entries[name].dtype != FP8_CODE or block is None:
            return self._view(name)
        if self._last is None or self._last[0] != name:
            self._last = (
                name,
                quantised.dequantise(
                    self._view(name), self._view(quantised.scale_name(name)), block
                ),
            )
        return self._last[1]

    def _view(self, name: str) -> np.ndarray:
        entry = self._weights.entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = SafetensorsFile(entry.file)
        return self._open[entry.file].view(entry)

    def release(self) -> None:
        """Gives back the memory of what was read."""
        for file in self._open.values():
            file.release()


def open_folder(name: str) -> WeightsFolder:
    """Opens the model that `hf:NAME` names, and checks all
    of its weights' names, shapes, types and places.

    Reads the headers of the files and no weights. Raises WeightsError naming the file and the
    tensor where one is missing, unknown, of another shape, or in a file that is damaged.
    """
    folder = read_model(name, weights=True)
    tensors = _all_tensors(folder)
    entries = tensors.text
    packed = folder.packed and folder.fp8_block is None
    unpacked = quantised.unpacked_entries(entries) if packed else {}
    entries |= unpacked
    params = named_leaves(folder.model.params())
    form = _form_of(folder, params, entries)
    stored = dict(folder.architecture.tensors(folder.model, form))
    expected, parts = set[str](), set[str]()
    for path, p in params.items():
        shape = stored[path].stored_shape(p)
        for tensor in stored[path].names(p):
            expected.add(tensor)
            _check_tensor(folder, entries, tensor, path, shape)
            if entries[tensor].dtype == FP8_CODE and folder.fp8_block is not None:
                scales = quantised.scale_name(tensor)
                # One for each block of a weight [out, in]; the last blocks may be partial.
                blocks = tuple(
                    -(-size // n) for size, n in zip(shape, folder.fp8_block, strict=True)
                )
                _check_tensor(folder, entries, scales, path, blocks)
                parts.add(scales)
    parts |= {
        tensor + part
        for tensor in expected & unpacked.keys()
        for part in (quantised.BLOCKS, quantised.SCALES)
    }
    notes = folder.notes + tensors.notes + _check_others(folder, expected | parts, entries)
    if tensors.others:
        notes += (_note_of_others(tensors.others),)
    # What a model of any type keeps in float32 does not tell its type.
    typed = (
        tensor for path, p in params.items() if p.stored is None for tensor in stored[path].names(p)
    )
    found = {
        "BF16" if entries[tensor].dtype == FP8_CODE else entries[tensor].dtype for tensor in typed
    }
    dtype: Precision = "bfloat16" if found == {"BF16"} else "float32"
    return WeightsFolder(
        folder,
        params,
        stored,
        entries,
        dtype,
        notes,
        frozenset(unpacked),
        tensors.others,
        tensors.prefix,
        form,
    )


def _form_of(folder: ModelFolder, params: dict[str, Param], entries: dict[str, TensorEntry]) -> str:
    """Returns the form of a folder's tensors, by their names and shapes.

    Where names are of another form and shapes of none, it is the first form with these names, so
    that the error names the tensor and both shapes.
    """
    architecture = folder.architecture
    named = list[str]()
    for form in architecture.forms:
        stored = architecture.tensors(folder.model, form)
        shapes = {
            tensor: stored[path].stored_shape(p)
            for path, p in params.items()
            for tensor in stored[path].names(p)
        }
        if not shapes.keys() <= entries.keys():
            continue
        named.append(form)
        if all(entries[tensor].shape == shape for tensor, shape in shapes.items()):
            return form
    return named[0] if named else ""


def _note_of_others(others: dict[str, TensorEntry]) -> str:
    size = sum(entry.stop - entry.start for entry in others.values())
    return (
        f"other parts of the model: {len(others)} tensors ({format_bytes(size)}), such as "
        f"{min(others)}, are kept byte for byte and take no part in training"
    )


@dataclasses.dataclass(frozen=True)
class _FolderTensors:
    """Every tensor of a folder."""

    text: dict[str, TensorEntry]
    """Those of the text model, by their names in it."""
    others: dict[str, TensorEntry]
    """Those of a larger model's other parts, by their own names."""
    prefix: TextPrefix | None
    """Form of the text model's names inside a larger model."""
    notes: tuple[str, ...]
    """Files that are not read."""


def _all_tensors(folder: ModelFolder) -> _FolderTensors:
    """Finds every tensor of a folder.

    Raises WeightsError where index and files do not agree, or the folder has weights of two models.
    """
    index = find_files(folder.path)
    headers = {path: read_header(path) for path in sorted(set(index.values()))}
    for tensor, path in index.items():
        if tensor and tensor not in headers[path]:
            truth = f"the index places {tensor!r} in {path.name}, which does not have it"
            raise WeightsError(f"weights in {folder.path}", truth, "download both again")
    found: dict[str, TensorEntry] = {}
    for path, header in headers.items():
        for tensor, entry in header.items():
            if tensor in found:
                truth = f"{tensor!r} is in {found[tensor].file.name} and in {path.name}"
                raise WeightsError(f"weights in {folder.path}", truth, "one file for each tensor")
            found[tensor] = entry
    check_unwrapped(folder.path, found)
    notes = check_one_set(folder.path, found)
    if folder.text.larger is None:
        return _FolderTensors(_with_prefix(folder, found), {}, None, notes)
    prefix = prefix_of_text(found)
    if prefix is None:
        raise WeightsError(
            f"weights in {folder.path}",
            f"no tensor has the prefix of a text model in {folder.text.larger.name}, "
            f"{' or '.join(repr(known.body) for known in TEXT_PREFIXES)}; the first is "
            f"{min(found, default='none')!r}",
            "all files of the model",
        )
    text: dict[str, TensorEntry] = {}
    others: dict[str, TensorEntry] = {}
    for tensor, entry in found.items():
        name = prefix.name_in_text_model(tensor)
        if name is None:
            others[tensor] = entry
        else:
            text[name] = entry
    return _FolderTensors(text, others, prefix, notes)


def _with_prefix(folder: ModelFolder, found: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns tensors by their whole names, of which files may lack the architecture's prefix."""
    prefix = folder.architecture.prefix
    entries: dict[str, TensorEntry] = {}
    for tensor, entry in found.items():
        whole = tensor if tensor.startswith((prefix, "lm_head.")) else prefix + tensor
        if whole in entries:
            truth = f"{tensor!r} is in {entry.file.name} with the prefix {prefix!r} and without"
            raise WeightsError(f"weights in {folder.path}", truth, "one of the two")
        entries[whole] = entry
    return entries


def _check_tensor(
    folder: ModelFolder,
    entries: dict[str, TensorEntry],
    tensor: str,
    param: str,
    shape: tuple[int, ...],
) -> None:
    if tensor not in entries:
        raise WeightsError(
            f"weights in {folder.path}",
            f"no file has the tensor {tensor!r}, which is {param} of the model, {list(shape)}",
            "all files of the model, or a config.json that describes these (layers, tied "
            "embeddings, biases)",
        )
    entry = entries[tensor]
    asked = f"weights in {folder.path / entry.file.name}"
    if entry.dtype not in DTYPES and not (entry.dtype == FP8_CODE and folder.fp8_block is not None):
        raise WeightsError(
            asked,
            f"{tensor!r} is {entry.dtype}, a quantised or integer type; {', '.join(DTYPES)} are "
            "read",
            "the model's unquantised weights",
        )
    if entry.shape != shape:
        raise WeightsError(
            asked,
            f"{tensor!r} is {list(entry.shape)}, and {param} of the model of config.json needs "
            f"{list(shape)}",
            "the config.json of these weights",
        )


def _check_others(
    folder: ModelFolder, expected: set[str], entries: dict[str, TensorEntry]
) -> tuple[str, ...]:
    """Returns notes on the tensors that are not kept.
    Raises WeightsError for one that the model does not have."""
    computed, unused = 0, list[str]()
    tied = folder.architecture.tied
    for tensor, entry in entries.items():
        if tensor in expected or (tied is not None and tensor == tied[0]):
            continue
        if any(re.fullmatch(pattern, tensor) for pattern in folder.architecture.left_out):
            unused.append(tensor)
        elif any(re.fullmatch(pattern, tensor) for pattern in folder.architecture.computed):
            computed += 1
        else:
            raise WeightsError(
                f"weights in {entry.file}",
                f"it has a tensor {tensor!r}, and {folder.architecture.name} of config.json has "
                "none of that name",
                "the config.json of these weights; a tensor that is left out would change what the "
                "model computes",
            )
    notes = [f"computed and not kept: {computed} tensors of the files"] if computed else []
    if unused:
        notes.append(
            f"not kept, as no logit depends on them: {len(unused)} tensors of the files, such as "
            f"{unused[0]}"
        )
    return tuple(notes)


def check_tied(weights: WeightsFolder) -> None:
    """Raises WeightsError where files have a tensor that is tied to another, and not its values."""
    rows = 4096  # compared at a time
    tied = weights.folder.architecture.tied
    kept = {name for path, p in weights.params.items() for name in weights.stored[path].names(p)}
    if tied is None or tied[0] not in weights.entries or tied[0] in kept:
        return
    with weights.reader() as read:
        first, second = read(tied[0]), read(tied[1])
        for row in range(0, max(len(first), len(second)), rows):
            part, other = first[row : row + rows], second[row : row + rows]
            if (
                part.shape != other.shape
                or part.dtype != other.dtype
                or part.tobytes() != other.tobytes()
            ):
                raise WeightsError(
                    f"weights in {weights.folder.path}",
                    f"config.json ties {tied[0]!r} to {tied[1]!r} (tie_word_embeddings), and their "
                    "values differ",
                    "tie_word_embeddings false in config.json, if the model was trained so",
                )
            read.release()


def load_params(
    weights: WeightsFolder,
    params: Tree,
    shardings: Tree,
    dtype: Any,
    then: Callable[[str, jax.Array], Any] = lambda path, w: w,
) -> Tree:
    """Returns the weights as arrays in `shardings`: no host and no device ever has more
    than its shards.

    params: descriptions of the parameters, rows of stacks in the order of the stages.
    dtype: of the arrays, except of those that are float32 at rest.
    then: makes of a weight, by its path, what is kept of it, before the next is loaded.
    Raises WeightsError where `params` are not those of the folder's model.
    """
    _check_params(weights, params)
    check_tied(weights)
    treedef: Any = jax.tree.structure(params, is_leaf=is_param)
    where = named_leaves(shardings)
    with weights.reader() as reader:
        arrays = [
            then(
                path,
                _load(
                    path, p, weights.stored[path], where[path], np.dtype(p.stored or dtype), reader
                ),
            )
            for path, p in named_leaves(params).items()
        ]
    return treedef.unflatten(arrays)


def _load(
    path: str,
    p: Param,
    stored: StoredTensor,
    sharding: Sharding,
    dtype: np.dtype[Any],
    reader: TensorReader,
) -> jax.Array:
    last: list[Any] = [None, None]

    def shard(index: Any) -> np.ndarray:
        whole = tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(index, p.shape, strict=True)
        )
        # Neighbouring devices often have the same block: replicas.
        if last[0] != whole:
            last[:] = [whole, _read_rows(p, stored, whole, reader, dtype)]
            reader.release()
        block: np.ndarray = last[1]
        return block

    return jax.make_array_from_callback(p.shape, sharding, shard)


def _read_rows(
    p: Param, stored: StoredTensor, index: Index, reader: TensorReader, dtype: Any
) -> np.ndarray:
    """Reads a block of `p`, whose rows may be in the order of pipeline stages,
    with zeros in padding rows."""
    if p.order is None:
        return read_block(p, stored, index, reader, dtype)
    rows = p.order[index[0]]
    block = np.zeros([part.stop - part.start for part in index], dtype)
    for row, layer in enumerate(rows):
        if layer != NO_LAYER:
            at = (slice(layer, layer + 1), *index[1:])
            block[row : row + 1] = read_block(p, stored, at, reader, dtype)
    return block


def _check_params(weights: WeightsFolder, params: Tree) -> None:
    wanted, folder = named_leaves(params), weights.folder.path
    for path in sorted({*wanted, *weights.params}):
        p, own = wanted.get(path), weights.params.get(path)
        if p is None or own is None:
            has = ("the weights", "the model") if p is None else ("the model", "the weights")
            raise WeightsError(
                f"weights in {folder} for this model",
                f"{has[0]} have a parameter {path!r}, and {has[1]} do not",
                "the model of the folder's config.json: hf:PATH instead of the recipe",
            )
        if (p.logical_shape[1:], p.rows) != (own.logical_shape[1:], own.rows) or (
            p.rows is None and p.logical_shape != own.logical_shape
        ):
            raise WeightsError(
                f"weights in {folder} for this model",
                f"{path!r} is {list(own.logical_shape)} in the weights and {list(p.logical_shape)} "
                "in the model" + (f", {own.rows} and {p.rows} rows of them used" if p.rows else ""),
                "the model of the folder's config.json: hf:PATH instead of the recipe",
            )


def keep_files(folder: Path, out: Path) -> None:
    """Copies into `out`/huggingface what the model of a folder has besides the weights
    that are trained.

    That is tokenizer files, chat template, configuration,
    and the tensors of a larger model's other parts.
    """
    target = out / KEPT
    try:
        check_inside(folder, [folder / name for name in _KEPT_FILES])
    except ValueError as error:
        raise WeightsError(
            f"copying the files of {folder}", str(error), "a folder whose files are in it"
        ) from error
    for name in _KEPT_FILES:
        if (folder / name).is_file():
            copy_file(folder / name, target / name)
    text = find_text_model(read_fields(folder))
    if text.larger is None and not text.architecture.forms:
        return
    weights = open_folder(str(folder.absolute()))
    if text.larger is not None:
        _keep_other_parts(weights, target)
    if weights.form:
        write_text(target / FORM, json.dumps({"form": weights.form}) + "\n")


def _keep_other_parts(weights: WeightsFolder, target: Path) -> None:
    """Copies the tensors of a larger model's other parts into one file of the folder `target`."""
    prefix = weights.prefix
    assert prefix is not None
    shapes = {name: (entry.dtype, entry.shape) for name, entry in weights.others.items()}
    metadata = {"text_body": prefix.body, "text_head": prefix.head}
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / OTHER_PARTS
        file = NewSafetensorsFile(written, shapes, metadata)
        sources: dict[Path, SafetensorsFile] = {}
        for name, entry in weights.others.items():
            if entry.file not in sources:
                sources[entry.file] = SafetensorsFile(entry.file)
            file.copy(name, sources[entry.file], entry)
        copy_file(written, target / OTHER_PARTS)


@dataclasses.dataclass(frozen=True)
class OtherParts:
    """Tensors of a larger model besides its text model, as an output folder keeps them."""

    file: SafetensorsFile
    prefix: TextPrefix
    """Form of the text model's names inside the larger model."""


def read_form(kept: Path, architecture: Architecture) -> str:
    """Returns the form that a run's weights came in, "" for the usual one.
    kept: the folder OUT/huggingface."""
    path = kept / FORM
    if not path.is_file():
        return ""
    try:
        form = str(read_json(path)["form"])
    except (ValueError, LookupError, TypeError) as error:
        raise WeightsError(
            f"reading {path}",
            f"it names no form of tensors: {reason_of(error)}",
            "the file as it was written",
        ) from error
    return form if form in architecture.forms else ""


def read_other_parts(kept: Path) -> OtherParts | None:
    """Returns what `keep_files` kept of a larger model; None for a text model.
    kept: the folder OUT/huggingface."""
    path = kept / OTHER_PARTS
    if not path.is_file():
        return None
    file = SafetensorsFile(path)
    metadata = read_metadata(path)
    for prefix in TEXT_PREFIXES:
        if (prefix.body, prefix.head) == (metadata.get("text_body"), metadata.get("text_head")):
            return OtherParts(file, prefix)
    raise WeightsError(
        f"reading {path}",
        "its header does not say how the text model's tensors were named",
        "the file as it was written, or none: the text model is then exported alone",
    )

"""Folders of `torch.distributed.checkpoint` (DCP),
as torchtitan and Megatron write them, read without torch.

    .metadata      a pickle: type, shape and chunks of each tensor, and the file, first byte and
                   length of each chunk
    __0_0.distcp   chunks, each a zip file of `torch.save`: `data.pkl` (type, shape, strides) and
                   `data/0` (the bytes)

Both pickles are read as data (`pickled_data`): nothing is imported or called. Every number is
compared with the others before a byte of a tensor is read: chunks have to fill their tensor once,
and lie in their file.
"""

import dataclasses
import io
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from meshwright.documents import LARGE, check_inside, open_bytes
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.hugging_face.pickled_data import ORDERED, Call, Named, Persistent, read_pickled
from meshwright.hugging_face.safetensors_files import DTYPES

METADATA = ".metadata"
"""File by which a folder is known."""
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of weights, as safetensors files name them."""
_STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
}
_OTHER_TYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
)
_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = frozenset(
    {
        ORDERED,
        *(
            f"{_CHECKPOINT} {name}"
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
                *("ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        # What megatron-core keeps of its plan of the writing.
        *(
            f"torch.distributed.checkpoint.planner {name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ),
        "torch.serialization _get_layout",
        "torch Size",
        "pathlib PosixPath",
        "pathlib._local PosixPath",
        *(f"torch {name}" for name in (*_CODES, *_OTHER_TYPES)),
    }
)
"""Objects that `.metadata` may name."""
_TENSOR_NAMES = frozenset({ORDERED, "torch._utils _rebuild_tensor_v2", *_STORAGES})
"""Objects that the description of a chunk may name."""
_FIX = "the folder copied again from where it was saved, .metadata and all .distcp files"
_MOST_DESCRIPTION = 2**16
"""Largest description of a chunk in bytes."""
_MOST_BYTEORDER = 16
"""Largest file `byteorder` in bytes: it has "little" or "big"."""

_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
"""torchtitan's tensors of Llama 3, those of a layer after its number, and Hugging Face's."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_STATES = re.compile(r"(optimizer|optim|lr_scheduler|dataloader|train_state|step)(\.|$)")
"""Start of the names of what a training has besides its model."""
_COMPUTED = ("freqs_cis", "rope.cache")
"""Buffers that follow from the configuration."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of a tensor, and where it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    """First byte of its zip file."""
    length: int

    @property
    def block(self) -> tuple[slice, ...]:
        """Part of the tensor that it is."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """Tensor of a checkpoint."""

    code: str
    """Type, as safetensors files name it; "" for one that is not of weights."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_torch_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of `torch.distributed.checkpoint`."""
    return (folder / METADATA).is_file()


def read_metadata(folder: Path) -> dict[str, TorchTensor]:
    """Returns the tensors of a checkpoint by name.

    Raises WeightsError where `.metadata` names or describes anything else than tensors, or
    contradicts itself or the files of the folder.
    """
    tensors, _ = read_tensors_and_objects(folder)
    return tensors


def read_tensors_and_objects(folder: Path) -> tuple[dict[str, TorchTensor], list[str]]:
    """Returns the tensors of a checkpoint by name,
    and the names of its pickled objects, as `read_metadata` does."""
    file = folder / METADATA
    try:
        check_inside(folder, [file])
        with open_bytes(file) as opened:
            content = opened.read(LARGE + 1)
        if len(content) > LARGE:
            raise ValueError(f"it is larger than {LARGE:,} bytes")
        fields = _state(read_pickled(content, _METADATA_NAMES), "Metadata")
        described = _dictionary(fields, "state_dict_metadata")
        objects = [_name(name) for name, value in described.items() if _is_object(value)]
        tensors = _tensors_of(folder, fields, described)
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
    except (OSError, ValueError) as error:
        truth = reason_of(error)
        raise by_class(error, WeightsError(f"reading {file}", truth, _FIX)) from error
    return tensors, objects


def _is_object(value: Any) -> bool:
    """Whether the pickle describes another pickle, of a state that is not a tensor."""
    return isinstance(value, Call) and value.name == f"{_CHECKPOINT} BytesStorageMetadata"


def _tensors_of(
    folder: Path, fields: Mapping[str, Any], described: Mapping[Any, Any]
) -> dict[str, TorchTensor]:
    """Returns the tensors that the pickle describes, with the places of their chunks.
    Raises ValueError."""
    stored = _dictionary(fields, "storage_data")
    places: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {}
    for index, info in stored.items():
        entry = _state(index, "MetadataIndex")
        offset = entry.get("offset")
        offsets = () if offset is None else _sizes(offset)
        places[_name(entry.get("fqn")), offsets] = _place(folder, _state(info, "_StorageInfo"))

    tensors: dict[str, TorchTensor] = {}
    for key, value in described.items():
        if _is_object(value):
            continue
        name = _name(key)
        entry = _state(value, "TensorStorageMetadata")
        chunks = []
        for part in _list(entry, "chunks"):
            chunk = _state(part, "ChunkStorageMetadata")
            offsets = _sizes(chunk.get("offsets"))
            if (name, offsets) not in places:
                raise ValueError(f"{name!r} has a chunk at {list(offsets)}, which is in no file")
            chunks.append(Chunk(offsets, _sizes(chunk.get("sizes")), *places[name, offsets]))
        tensors[name] = TorchTensor(_code(entry), _sizes(entry.get("size")), tuple(chunks))
    return tensors


def _place(folder: Path, info: Mapping[str, Any]) -> tuple[Path, int, int]:
    """Returns file, first byte and length of a chunk.
    Raises ValueError where they lie outside of the folder's files."""
    name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError("a chunk is in a file that is not named in the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"chunks in {name} are compressed (transform_descriptors)")
    if not _is_count(start) or not _is_count(length):
        raise ValueError(f"a chunk in {name} has no place")
    file = folder / name
    if not file.is_file():
        raise ValueError(f"it has chunks in {name}, and there is no such file")
    check_inside(folder, [file])
    size = file.stat().st_size
    if start + length > size:
        raise ValueError(f"{name} has {size:,} bytes, and a chunk ends at {start + length:,}")
    return file, start, length


def _check_tensor(name: str, tensor: TorchTensor) -> None:
    """Raises ValueError where chunks do not fill a tensor once."""
    covered = 0
    for chunk in tensor.chunks:
        inside = len(chunk.sizes) == len(chunk.offsets) == len(tensor.shape) and all(
            part.stop <= size for part, size in zip(chunk.block, tensor.shape, strict=False)
        )
        if not inside:
            raise ValueError(
                f"{name!r} has the shape {list(tensor.shape)}, and a chunk {list(chunk.sizes)} at "
                f"{list(chunk.offsets)}"
            )
        covered += math.prod(chunk.sizes)
    if covered != math.prod(tensor.shape):
        raise ValueError(
            f"{name!r} has {math.prod(tensor.shape):,} elements, and its chunks have {covered:,}"
        )
    if _overlap(tensor.chunks):
        raise ValueError(f"{name!r} has chunks that overlap")


def _overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Whether two chunks have an element in common.
    The corners of a division into blocks tell it."""
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    corners = {chunk.offsets for chunk in filled}
    if len(corners) != len(filled):
        return True
    dims = range(len(filled[0].sizes)) if filled else range(0)
    if not dims:
        return False
    # Along the dimension that is divided most, few chunks are beside each other.
    most = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    ordered = sorted(filled, key=lambda chunk: chunk.offsets[most])
    for number, chunk in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.offsets[most] >= chunk.block[most].stop:
                break
            if all(
                part.start < theirs.stop and theirs.start < part.stop
                for part, theirs in zip(chunk.block, other.block, strict=True)
            ):
                return True
    return False


def _code(entry: Mapping[str, Any]) -> str:
    """Returns the type of a tensor's elements."""
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Call) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], Named):
        raise ValueError("a tensor has no type")
    return _CODES.get(state[0].name.removeprefix("torch "), "")


def _state(value: Any, kind: str) -> dict[str, Any]:
    """Returns the fields of an object of a class. Raises ValueError for anything else."""
    if not isinstance(value, Call) or value.name.rpartition(" ")[2] != kind:
        raise ValueError(f"it has something else in the place of a {kind}")
    state = value.state
    if not isinstance(state, dict):
        raise ValueError(f"a {kind} has no fields")
    return state


def _name(value: Any) -> str:
    """Returns the name of a tensor or an object.
    Raises ValueError for anything else than a text."""
    if not isinstance(value, str):
        raise ValueError("a tensor or an object has a name that is not a text")
    return value


def _dictionary(fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"its {name} is no dictionary")
    return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ValueError(f"its {name} is no list")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns the numbers of a `torch.Size`. Raises ValueError for anything else."""
    if isinstance(value, Call) and value.name == "torch Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple) or not all(map(_is_count, value)):
        raise ValueError("a shape or an offset is not of whole numbers from 0 on")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60


class _Part(io.RawIOBase):
    """Bytes of a file from one place to another, as a file."""

    def __init__(self, file: Any, start: int, length: int):
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether it has places: always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a place, and returns it."""
        before = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, before + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer, and returns the number of bytes read."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        found: int = self._file.readinto(view[:count])
        self._at += found
        return found


ZIP_ERRORS = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError),
    zipfile.BadZipFile,
)
"""Errors of a damaged zip file, and of one that is encrypted or has an unknown compression."""


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytes:
    """Returns a file of a zip file of `torch.save`, which compresses nothing.

    Raises ValueError for one of more than `most` bytes, and for a compressed one,
    whose size the zip file only claims.
    """
    size = member.file_size
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != size:
        raise ValueError(f"{member.filename} is compressed, which torch.save does not do")
    if size > most:
        raise ValueError(f"{member.filename} has {size:,} bytes, and {most:,} are expected at most")
    return archive.read(member)


def read_chunk(name: str, code: str, chunk: Chunk) -> np.ndarray:
    """Returns the values of a chunk.
    Raises WeightsError where its file does not have what `.metadata` describes."""
    try:
        with open_bytes(chunk.file) as file:
            part = io.BufferedReader(_Part(file, chunk.start, chunk.length))
            with zipfile.ZipFile(part) as archive:
                return _values(archive, code, chunk.sizes)
    except ZIP_ERRORS as error:
        truth = reason_of(error)
        asked = f"reading {name} in {chunk.file}, from byte {chunk.start:,} on"
        raise by_class(error, WeightsError(asked, truth, _FIX)) from error


def _values(archive: zipfile.ZipFile, code: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Returns the tensor of a file of `torch.save`.
    Raises ValueError where it is another than is expected."""
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "byteorder" in members:
        order = read_member(archive, members["byteorder"], _MOST_BYTEORDER)
        if order != b"little":
            raise ValueError("its numbers have their largest byte first")
    view = _read_view(read_member(archive, members["data.pkl"], _MOST_DESCRIPTION), code)
    view.check(sizes)

    dtype = DTYPES[code]
    data = members[f"data/{view.key}"]
    size = view.count * dtype.itemsize
    if data.file_size != size:
        raise ValueError(
            f"its storage takes {view.count:,} x {dtype.itemsize} bytes, and has {data.file_size:,}"
        )
    values = np.frombuffer(read_member(archive, data, size), dtype)[view.offset :]
    steps = [step * dtype.itemsize for step in view.strides]
    return np.lib.stride_tricks.as_strided(values, sizes, steps, writeable=False)


class _StorageView(NamedTuple):
    """A tensor as `torch.save` describes it: a view of a storage, counted in elements.

    Nothing of it has been checked but the type of the storage's elements.
    """

    key: Any
    """Name of the storage's file, `data/{key}`."""
    count: Any
    """Elements of the storage."""
    offset: Any
    """Element that the tensor begins at."""
    shape: Any
    strides: Any

    def check(self, sizes: tuple[int, ...]) -> None:
        """Raises ValueError where it is no view of `sizes`, or reaches beyond its storage."""
        if _sizes(self.shape) != sizes or len(_sizes(self.strides)) != len(sizes):
            raise ValueError(
                f"its tensor has the shape {list(self.shape)}, and .metadata has {list(sizes)}"
            )
        if not (_is_count(self.offset) and _is_count(self.count) and isinstance(self.key, str)):
            raise ValueError("its storage has no size or no name")
        steps = zip(sizes, self.strides, strict=True)
        last = self.offset + sum((n - 1) * step for n, step in steps)
        if math.prod(sizes) and last >= self.count:
            raise ValueError(
                f"its tensor ends at element {last:,} of a storage that has {self.count:,}"
            )


def _read_view(description: bytes, code: str) -> _StorageView:
    """Returns the tensor of a `data.pkl`. Raises ValueError for another object or type."""
    called = read_pickled(description, _TENSOR_NAMES)
    if not isinstance(called, Call) or len(called.arguments) < 4:
        raise ValueError("it describes no tensor")
    storage, offset, shape, strides = called.arguments[:4]
    reference = storage.value if isinstance(storage, Persistent) else None
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise ValueError("its tensor has no storage")
    _, kind, key, _, count = reference
    if not isinstance(kind, Named) or _STORAGES.get(kind.name) != code:
        raise ValueError(f"its tensor is of another type than {code}, which .metadata has")
    return _StorageView(key, count, offset, shape, strides)


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """Tensor of a checkpoint under Hugging Face's name."""

    own_name: str
    tensor: TorchTensor
    heads: int = 0
    """Heads whose rotary pairs are in another order: numbers 2i and 2i + 1 here, i
    and i + half a head there; 0: none."""

    @property
    def code(self) -> str:
        """Type, as safetensors files name it."""
        return self.tensor.code

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, the same in both."""
        return self.tensor.shape

    def blocks(self) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields parts of Hugging Face's tensor: where each is in it, and its values."""
        for chunk in self.tensor.chunks:
            block: tuple[Any, ...] = chunk.block
            if self.heads:
                rows = np.arange(chunk.block[0].start, chunk.block[0].stop)
                block = (_row_with_halves(rows, self.tensor.shape[0] // self.heads), *block[1:])
            yield block, read_chunk(self.own_name, self.tensor.code, chunk)


def _row_with_halves(rows: np.ndarray, size: int) -> np.ndarray:
    """Returns the rows of heads in Hugging Face's order: number 2i + c
    of a head is its number c size / 2 + i."""
    head, number = np.divmod(rows, size)
    pair, half = np.divmod(number, 2)
    placed: np.ndarray = head * size + half * (size // 2) + pair
    return placed


def named_tensors(
    folder: Path, tensors: Mapping[str, TorchTensor], heads: int, kv_heads: int
) -> tuple[dict[str, NamedTensor], tuple[str, ...]]:
    """Returns torchtitan's tensors of a Llama by Hugging Face's names,
    and notes on what is not read.

    Raises WeightsError for a tensor of another model.
    """
    found: dict[str, NamedTensor] = {}
    states: list[str] = []
    for own_name, tensor in tensors.items():
        name = own_name.removeprefix("model.")
        layer = _LAYER.fullmatch(name)
        inner = layer[2] if layer else name
        if _STATES.match(own_name) or inner in _COMPUTED:
            states.append(own_name)
            continue
        if inner not in _NAMES or (layer is None) != (inner in list(_NAMES)[:3]) or not tensor.code:
            raise WeightsError(
                f"converting {folder}",
                f"it has a tensor {own_name!r}, which is none of torchtitan's Llama 3",
                f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} "
                "FILE.pt, and a Hugging Face folder made of it by the program that saved it",
            )
        count = {"attention.wq.weight": heads, "attention.wk.weight": kv_heads}.get(inner, 0)
        theirs = f"model.layers.{layer[1]}.{_NAMES[inner]}" if layer else _NAMES[inner]
        if count and (len(tensor.shape) != 2 or tensor.shape[0] % (2 * count)):
            raise WeightsError(
                f"converting {folder}",
                f"{own_name!r} has the shape {list(tensor.shape)}, and config.json has {count} "
                "heads of an even size",
                "the config.json of this model",
            )
        if theirs in found:
            truth = f"{own_name!r} and {found[theirs].own_name!r} are the same tensor"
            raise WeightsError(f"converting {folder}", truth, "one of the two")
        found[theirs] = NamedTensor(own_name, tensor, count)
    notes: tuple[str, ...] = ()
    if states:
        notes = (
            f"{len(states)} tensors of the training, such as {min(states)}, are not read: "
            "optimizer, counters, buffers",
        )
    return found, notes

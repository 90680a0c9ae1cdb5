"""Files in the safetensors format: headers checked before anything is read, tensors as views
of the mapped file.

A file is 8 bytes (the header's length, little-endian), the header (JSON: dtype, shape and data
offsets by name), and the data. The format's page in the repository huggingface/safetensors has the
rules that are checked here. Files are mapped, so a block of a tensor costs the memory of its pages;
`release` gives them back.
"""

import json
import math
import mmap
import os
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from meshwright.documents import (
    GGUF_KIND,
    LARGE,
    check_contents,
    check_inside,
    fix_of,
    parse_document,
    read_json,
)
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.formatting import format_bytes
from meshwright.path_kinds import TORCH_SUFFIXES, find_checkpoint_kind
from meshwright.storage.attempts import may_pass
from meshwright.storage.writing import open_file

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of weights that are read."""
FP8_CODE = "F8_E4M3"
"""Type of weights that are read with their scales (quantised.py)."""
_OTHERS = {FP8_CODE: np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype(np.uint8)}
"""Types of parts of quantised weights."""
_NAMES_BY_BYTES = {
    1: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    2: ("I16", "U16", "F16", "BF16"),
    4: ("I32", "U32", "F32"),
    8: ("I64", "U64", "C64", "F64"),
}
_BYTES = {name: size for size, names in _NAMES_BY_BYTES.items() for name in names}
"""Bytes of an element of every type of the format."""
_MAX_HEADER = 100_000_000
"""Largest header in bytes, as in the format's own implementation."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files in which `transformers` looks for weights, in this order."""
ADAPTER = "adapter_model.safetensors"
"""File of an adapter in PEFT's format."""
_WRAPPERS = {
    "module": "DistributedDataParallel of PyTorch (or DeepSpeed)",
    "_orig_mod": "torch.compile",
    "base_model": "PEFT",
    "_fsdp_wrapped_module": "FullyShardedDataParallel of PyTorch",
    "_checkpoint_wrapped_module": "activation checkpointing of PyTorch",
    "_forward_module": "Lightning Fabric",
}
"""Parts of names of tensors that are of a wrapper, and the wrapper."""
_SET = re.compile(r"model(-\d+-of-\d+)?\.safetensors$")
"""Names that `transformers` gives to files of a model's weights."""
_COMPARED = 64 * 2**20
"""Bytes that are compared or copied at a time."""
_FIX = "download the file again; `sha256sum` against the hub's page shows whether it is whole"


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int


class _MappedFile:
    entries: dict[str, TensorEntry]
    _map: mmap.mmap

    def tensor(self, name: str) -> np.ndarray:
        """Returns a view of a tensor, read-only in a file that is read."""
        return self.view(self.entries[name])

    def view(self, entry: TensorEntry) -> np.ndarray:
        """Returns a view of one of this file's tensors."""
        dtype = (DTYPES | _OTHERS)[entry.dtype]
        return np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.start).reshape(
            entry.shape
        )

    def read(self, start: int, length: int) -> bytes:
        """Returns bytes of the file."""
        return self._map[start : start + length]

    def release(self) -> None:
        """Gives back the memory of the pages used so far;
        the system writes changed ones to disk when it likes."""
        self._map.madvise(mmap.MADV_DONTNEED)


class SafetensorsFile(_MappedFile):
    """A file that is read, its header checked against its size."""

    def __init__(self, path: Path):
        self.entries = read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a file by name.
    Raises WeightsError where the header and the file do not agree."""
    try:
        check_inside(path.parent, [path])
        size = path.stat().st_size
        with path.open("rb") as file:
            check_contents(path, file.read(64), size)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                found = f"it has {size:,} bytes" + (
                    f", and its header would have {length:,}" if size >= 8 else ""
                )
                raise WeightsError(
                    f"reading {path}", f"{found}: it is damaged, or not a safetensors file", _FIX
                )
            header = parse_document(file.read(length).decode("utf-8"))
    except OSError as error:
        raise by_class(
            error,
            WeightsError(f"reading {path}", reason_of(error), "a folder with all of its files"),
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"reading {path}", f"it is not a safetensors file: {error}", fix_of(error, _FIX)
        ) from error
    if not isinstance(header, dict):
        raise WeightsError(f"reading {path}", "its header is not a JSON object", _FIX)
    header.pop("__metadata__", None)
    return _checked(path, size, 8 + length, header)


def read_metadata(path: Path) -> dict[str, str]:
    """Returns the texts in the header of a file that `read_header` has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_document(file.read(length).decode("utf-8"))
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        return {}
    return {str(name): str(text) for name, text in metadata.items()}


def _whole(number: Any) -> int:
    """Returns a whole number of a header. Raises ValueError for anything else."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _checked(path: Path, size: int, data: int, header: dict[str, Any]) -> dict[str, TensorEntry]:
    """Returns the entries of a header. data: the first byte of the data."""
    entries = {}
    for name, fields in header.items():
        try:
            dtype, shape = str(fields["dtype"]), tuple(_whole(n) for n in fields["shape"])
            start, stop = (_whole(offset) for offset in fields["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"reading {path}", f"its header has no place for {name!r}: {reason_of(error)}", _FIX
            ) from error
        bytes_each = _BYTES.get(dtype, 0)
        expected = math.prod(shape) * bytes_each
        if min((*shape, start, stop - start), default=0) < 0 or (
            bytes_each and stop - start != expected
        ):
            raise WeightsError(
                f"reading {path}",
                f"{name!r} is {dtype}{list(shape)}, {expected:,} bytes, and its place has "
                f"{stop - start:,}",
                _FIX,
            )
        entries[name] = TensorEntry(path, dtype, shape, data + start, data + stop)
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise WeightsError(f"reading {path}", f"{name!r} overlaps the tensor before it", _FIX)
        end = entry.stop
    if end != size:
        truth = (
            f"its header places tensors up to byte {end:,}, and it has {size:,} bytes "
            f"({format_bytes(size)})"
        )
        raise WeightsError(f"reading {path}", truth, _FIX)
    return entries


class NewSafetensorsFile(_MappedFile):
    """A file that is written block by block: its size and header first, its tensors
    in any order."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] = types.MappingProxyType({}),
    ):
        """Opens `path`, or creates it with all its bytes.

        tensors: dtype and shape by name, in order.
        metadata: texts that the header has besides the format.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            stop = offset + tensor_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        size = 8 + len(text) + offset
        if not path.is_file() or path.stat().st_size != size:
            with open_file(path, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(size)
        self.entries = read_header(path)
        with open_file(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def copy(self, name: str, source: SafetensorsFile, entry: TensorEntry) -> None:
        """Writes the bytes of another file's tensor, of any type, into the tensor `name`."""
        target = self.entries[name]
        size = entry.stop - entry.start
        for at in range(0, size, _COMPARED):
            length = min(_COMPARED, size - at)
            part = source.read(entry.start + at, length)
            self._map[target.start + at : target.start + at + length] = part
            source.release()
            self.release()


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor. dtype: the format's name, such as "BF16"."""
    return math.prod(shape) * _BYTES[dtype]


def split_into_files(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Returns the names of tensors in groups of at most `largest` bytes, in order;
    a larger tensor is alone."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = largest
        groups[-1].append(name)
        room -= size
    return groups


def file_names(count: int) -> list[str]:
    """Returns the names that `transformers` gives to the files of a model."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def file_of_weights(folder: Path) -> Path | None:
    """Returns the file that names a folder's weights, by the precedence of `transformers`;
    None where there is none.

    That is what config.json names (`transformers_weights`), model.safetensors, and
    model.safetensors.index.json.
    """
    named = _named_in_config(folder)
    if named is not None:
        return folder / named
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return folder / name
    return None


def _named_in_config(folder: Path) -> str | None:
    """Returns the file that `transformers_weights` of config.json names.
    Raises WeightsError where it is not there."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        check_inside(folder, [file])
        config = read_json(file)
    except (OSError, ValueError) as error:
        if may_pass(error):  # it may name other weights
            refusal = WeightsError(f"reading {file}", reason_of(error), _FIX)
            raise by_class(error, refusal) from error
        return None  # `read_fields` names what is wrong with it
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if name is None:
        return None
    known = isinstance(name, str) and name.endswith((".safetensors", ".safetensors.index.json"))
    if not known or not _is_plain_name(name) or not (folder / name).is_file():
        raise WeightsError(
            f"reading {file}",
            f"its transformers_weights is {json.dumps(name)}, which is not a safetensors file in "
            "the folder",
            "the name of a file of weights in the folder, or no such field",
        )
    return str(name)


def find_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor of a folder by its index, or one for all (key "").

    Of several sets of weights it is the one that `transformers` reads (`file_of_weights`). Raises
    WeightsError for a folder without weights, an index that is damaged, and a path that leaves the
    folder.
    """
    file = file_of_weights(folder)
    if file is not None and file.suffix == ".json":
        names = _read_index(folder, file)
        _check_present(folder, names.values())
        return {tensor: folder / name for tensor, name in names.items()}
    if file is not None:
        names = _read_index(folder, folder / INDEX) if (folder / INDEX).is_file() else {}
        if file.name not in names.values():
            return {"": file}  # an index of other files, if there is one: `check_one_set`
        _check_present(folder, names.values())
        if set(names.values()) != {file.name}:
            return {"": file}
        return dict.fromkeys(names, file)
    shards = sorted(path.name for path in folder.glob("*.safetensors") if _SET.match(path.name))
    if shards:
        raise WeightsError(
            f"weights in {folder}",
            f"it has {shards[0]}, and no {INDEX}, the list of what is in which file",
            f"{INDEX} of the same model: hf download OWNER/MODEL {INDEX} --local-dir {folder}",
        )
    kind = find_checkpoint_kind(folder)
    if kind is not None:
        raise WeightsError(
            f"weights in {folder}",
            f"it is {kind.summary}, and has no .safetensors file",
            kind.weights,
        )
    pickled = sorted(
        p.name for p in folder.glob("*") if p.suffix.lower() in (".bin", *TORCH_SUFFIXES)
    )
    if pickled:
        raise WeightsError(
            f"weights in {folder}",
            f"{pickled[0]} is a pickle, which runs code when it is read; there is no .safetensors "
            "file",
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) of "
            "`transformers`, where you trust it",
        )
    packed = sorted(path.name for path in folder.glob("*.gguf"))
    if packed:
        raise WeightsError(
            f"weights in {folder}",
            f"{packed[0]} is {GGUF_KIND}, and there is no .safetensors file",
            "the model's own folder, from which that file was made",
        )
    if (folder / ADAPTER).is_file():
        raise WeightsError(
            f"weights in {folder}",
            f"{ADAPTER} is an adapter of PEFT, and the weights that it belongs to are not there",
            "the adapter merged by PEFT: merge_and_unload(), then save_pretrained(OTHER)",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        raise WeightsError(
            f"weights in {folder}",
            f"{others[0]} has a name that `transformers` does not read: it has neither {SINGLE} "
            f"nor {INDEX}",
            f"if it is all of the model: mv {folder / others[0]} {folder / SINGLE}",
        )
    raise WeightsError(
        f"weights in {folder}",
        f"it has neither {SINGLE} nor {INDEX}",
        "a folder that save_pretrained of `transformers` wrote, or one downloaded from the hub",
    )


def _is_plain_name(file: str) -> bool:
    is_path = os.sep in file or "\\" in file or "\0" in file
    return Path(file).name == file and file not in ("", ".", "..") and not is_path


def _read_index(folder: Path, index: Path) -> dict[str, str]:
    """Returns the name of the file of every tensor.
    Raises WeightsError for what is not an index of files beside it."""
    try:
        check_inside(folder, [index])
        names = read_json(index, LARGE)["weight_map"]
        files = {str(tensor): str(file) for tensor, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refusal = WeightsError(
            f"reading {index}", f"it is not an index: {reason_of(error)}", fix_of(error, _FIX)
        )
        raise by_class(error, refusal) from error
    for tensor, file in files.items():
        if not _is_plain_name(file):
            raise WeightsError(
                f"reading {index}",
                f"it places {tensor!r} in {file!r}, which is not the name of a file in the folder",
                "an index whose files are in its folder",
            )
    return files


def check_one_set(folder: Path, read: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Returns notes on the files of weights in a folder that are not read.

    read: the tensors that are read. Raises WeightsError where another file of the model has other
    values under the name of one of them: which of two trainings is meant cannot be known.
    """
    used = {entry.file for entry in read.values()}
    chosen = file_of_weights(folder)
    assert chosen is not None
    others = [path for path in sorted(folder.glob("*.safetensors")) if path not in used]
    index = folder / INDEX
    named = set(_read_index(folder, index).values()) if index.is_file() else set[str]()
    for path in others:
        if _SET.match(path.name) or path.name in named:
            _compare(folder, chosen, read, path)
    names = [path.name for path in others]
    if chosen != index and named - {chosen.name}:
        names.append(INDEX)
    names += sorted(path.name for path in folder.glob("pytorch_model*"))
    if not names:
        return ()
    return (f"files that are not read, as `transformers` reads {chosen.name}: {', '.join(names)}",)


def _compare(folder: Path, chosen: Path, read: Mapping[str, TensorEntry], path: Path) -> None:
    """Raises WeightsError for a tensor of a file that is not read which differs
    from the one that is."""
    other = SafetensorsFile(path)
    files = dict[Path, SafetensorsFile]()
    for name, entry in other.entries.items():
        mine = read.get(name)
        if mine is None:
            found = f"{path.name} has a tensor {name!r}, and the weights of {chosen.name} do not"
        else:
            if mine.file not in files:
                files[mine.file] = SafetensorsFile(mine.file)
            if _same_bytes(files[mine.file], mine, other, entry):
                continue
            found = f"{name!r} in {mine.file.name} and in {path.name} differ"
        raise WeightsError(
            f"weights in {folder}",
            f"it has two sets of weights: {found}; `transformers` reads {chosen.name}",
            f"a folder with one of the two: move {path.name} away to read {chosen.name}",
        )


def _same_bytes(
    one: "SafetensorsFile", first: TensorEntry, two: "SafetensorsFile", second: TensorEntry
) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    size = first.stop - first.start
    for at in range(0, size, _COMPARED):
        length = min(_COMPARED, size - at)
        if one.read(first.start + at, length) != two.read(second.start + at, length):
            return False
        one.release()
        two.release()
    return True


def tensor_names(folder: Path) -> set[str]:
    """Returns the names of the tensors that are read, by the index or the header of the file;
    none without weights."""
    file = file_of_weights(folder)
    if file is None:
        return set()
    if file.suffix == ".json":
        try:
            return set(read_json(file, LARGE)["weight_map"])
        except (ValueError, KeyError, TypeError):
            return set()  # `find_files` names what is wrong with it
    return set(read_header(file))


def _check_present(folder: Path, files: Iterable[str]) -> None:
    missing = sorted(file for file in set(files) if not os.path.isfile(folder / file))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        there = sorted(path.name for path in folder.glob("*.safetensors") if _SET.match(path.name))
        truth = f"its index names {missing[0]}{more}, and there is no such file"
        fix = f"the missing files: hf download OWNER/MODEL {missing[0]} --local-dir {folder}"
        if there and not set(there) & set(files):
            truth += f"; it has {', '.join(there[:4])}, of which the index names none"
            fix = f"the index is of other files: replace {folder / INDEX} by that of {there[0]}"
        raise WeightsError(f"weights in {folder}", truth, fix)


def check_unwrapped(folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Raises WeightsError where the names of tensors have a part that a wrapper
    of the model put there."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        for part in name.split("."):
            if part in _WRAPPERS:
                found.setdefault(part, []).append(name)
    if not found:
        return
    prefixes = [f"{part}." + "model." * (part == "base_model") for part in found]
    first = next(iter(found.values()))[0]
    owners = ", ".join(_WRAPPERS[part] for part in found)
    count = len(set().union(*found.values()))
    has_adapter = any(".lora_A." in name or ".lora_B." in name for name in tensors)
    if has_adapter:
        fix = "the adapter merged by PEFT: merge_and_unload(), then save_pretrained(OTHER)"
    else:
        calls = "".join(f".replace({prefix!r}, '')" for prefix in prefixes)
        fix = (
            f"the model saved without its wrapper; or the same tensors under name{calls}, "
            "with load_file and save_file of safetensors"
        )
    raise WeightsError(
        f"weights in {tensors[first].file}",
        f"{count} of {len(tensors)} tensors have {', '.join(map(repr, prefixes))} in their names, "
        f"such as {first!r}: they were saved from inside {owners}",
        fix,
    )

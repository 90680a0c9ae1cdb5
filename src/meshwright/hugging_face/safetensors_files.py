"""Files in the safetensors format: headers checked before anything is read, tensors as views of the mapped file.

A file is 8 bytes (the header's length, little-endian), the header (JSON: dtype, shape and data offsets by name), and
the data. The format's page in the repository huggingface/safetensors has the rules that are checked here. Files are
mapped, so a block of a tensor costs the memory of its pages; `release` gives them back.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from meshwright.documents import LARGE, check_inside, parse_json, read_json
from meshwright.errors import WeightsError, by_class, reason_of
from meshwright.formatting import format_bytes

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
        entry = self.entries[name]
        dtype = (DTYPES | _OTHERS)[entry.dtype]
        return np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.start).reshape(
            entry.shape
        )

    def release(self) -> None:
        """Gives back the memory of the pages used so far; the system writes changed ones to disk when it likes."""
        self._map.madvise(mmap.MADV_DONTNEED)


class SafetensorsFile(_MappedFile):
    """A file that is read, its header checked against its size."""

    def __init__(self, path: Path):
        self.entries = read_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a file by name. Raises WeightsError where the header and the file do not agree."""
    try:
        check_inside(path.parent, [path])
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                found = f"it has {size:,} bytes" + (
                    f", and its header would have {length:,}" if size >= 8 else ""
                )
                raise WeightsError(
                    f"reading {path}", f"{found}: it is damaged, or not a safetensors file", _FIX
                )
            header = parse_json(file.read(length).decode("utf-8"))
    except OSError as error:
        raise by_class(
            error,
            WeightsError(f"reading {path}", reason_of(error), "a folder with all of its files"),
        ) from error
    except ValueError as error:
        raise WeightsError(
            f"reading {path}", f"it is not a safetensors file: {error}", _FIX
        ) from error
    if not isinstance(header, dict):
        raise WeightsError(f"reading {path}", "its header is not a JSON object", _FIX)
    header.pop("__metadata__", None)
    return _checked(path, size, 8 + length, header)


def _checked(path: Path, size: int, data: int, header: dict[str, Any]) -> dict[str, TensorEntry]:
    """Returns the entries of a header. data: the first byte of the data."""
    entries = {}
    for name, fields in header.items():
        try:
            dtype, shape = str(fields["dtype"]), tuple(int(n) for n in fields["shape"])
            start, stop = (int(offset) for offset in fields["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"reading {path}", f"its header has no place for {name!r}: {error!r}", _FIX
            ) from error
        bytes_each = _BYTES.get(dtype, 0)
        expected = math.prod(shape) * bytes_each
        if min((*shape, start, stop - start), default=0) < 0 or (
            bytes_each and stop - start != expected
        ):
            raise WeightsError(
                f"reading {path}",
                f"{name!r} is {dtype}{list(shape)}, {expected:,} bytes, and its place has {stop - start:,}",
                _FIX,
            )
        entries[name] = TensorEntry(path, dtype, shape, data + start, data + stop)
    end = data
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise WeightsError(f"reading {path}", f"{name!r} overlaps the tensor before it", _FIX)
        end = entry.stop
    if end != size:
        truth = f"its header places tensors up to byte {end:,}, and it has {size:,} bytes ({format_bytes(size)})"
        raise WeightsError(f"reading {path}", truth, _FIX)
    return entries


class NewSafetensorsFile(_MappedFile):
    """A file that is written block by block: its size and header first, its tensors in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]):
        """Opens `path`, or creates it with all its bytes. tensors: dtype and shape by name, in order."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            stop = offset + math.prod(shape) * _BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        size = 8 + len(text) + offset
        if not path.is_file() or path.stat().st_size != size:
            with path.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.truncate(size)
        self.entries = read_header(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)


def split_into_files(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Returns the names of tensors in groups of at most `largest` bytes, in order; a larger tensor is alone."""
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
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def find_files(folder: Path) -> dict[str, Path]:
    """Returns the file of every tensor that the index of a folder names, or one for all (key "").

    Raises WeightsError for a folder without weights, an index that is damaged, and a path that leaves the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            check_inside(folder, [index])
            names = read_json(index, LARGE)["weight_map"]
            files = {str(tensor): str(file) for tensor, file in names.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise by_class(
                error, WeightsError(f"reading {index}", f"it is not an index: {error!r}", _FIX)
            ) from error
        for tensor, file in files.items():
            if (
                Path(file).name != file
                or file in ("", ".", "..")
                or os.sep in file
                or "\\" in file
                or "\0" in file
            ):
                raise WeightsError(
                    f"reading {index}",
                    f"it places {tensor!r} in {file!r}, which is not the name of a file in the folder",
                    "an index whose files are in its folder",
                )
        _check_present(folder, files.values())
        return {tensor: folder / file for tensor, file in files.items()}
    single = folder / "model.safetensors"
    if single.is_file():
        return {"": single}
    pickled = sorted(
        p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        raise WeightsError(
            f"weights in {folder}",
            f"{pickled[0]} is a pickle, which runs code when it is read; there is no .safetensors file",
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) of `transformers`, where you trust it",
        )
    raise WeightsError(
        f"weights in {folder}",
        "it has neither model.safetensors nor model.safetensors.index.json",
        "a folder that save_pretrained of `transformers` wrote, or one downloaded from the hub",
    )


def tensor_names(folder: Path) -> set[str]:
    """Returns the names of a folder's tensors by its index, or by the header of its one file; none without weights."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError):
            return set()  # `find_files` names what is wrong with it
    return set(read_header(single)) if single.is_file() else set()


def _check_present(folder: Path, files: Iterable[str]) -> None:
    missing = sorted(file for file in set(files) if not (folder / file).is_file())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"weights in {folder}",
            f"its index names {missing[0]}{more}, and there is no such file",
            "download it",
        )

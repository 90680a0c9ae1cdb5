"""Files of text opened for reading: regular files alone, and decompressed as their names say."""

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PLAIN = (".txt", ".py", ".md", ".rst", ".text")
LINES = (".jsonl", ".ndjson")
DELIMITED = (".csv", ".tsv")
COLUMNS = (".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (
    *PLAIN, *LINES, *DELIMITED, *COLUMNS,
    *(kind + compression for kind in (*PLAIN, *LINES, *DELIMITED) for compression in COMPRESSED),
)  # fmt: skip
"""Ends of the names of files that are read."""
KINDS = (
    f"{', '.join((*PLAIN, *LINES, *DELIMITED))}, each also with {', '.join(COMPRESSED)}; {', '.join(COLUMNS)}; "
    "a folder of `datasets`; or module:attribute"
)
"""The same for people."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, LookupError, RuntimeError, MemoryError)
"""Errors of damaged files; those of pyarrow and of the decoders are subclasses."""


def kind_of(name: str) -> tuple[str, str]:
    """Returns kind and compression by a file's name: `a.jsonl.zst` is `.jsonl` and `.zst`."""
    name = name.lower()
    compression = next((end for end in COMPRESSED if name.endswith(end)), "")
    stem = name.removesuffix(compression)
    return next((kind for kind in (*PLAIN, *LINES, *DELIMITED, *COLUMNS) if stem.endswith(kind)), ""), compression


def open_bytes(file: Path) -> IO[bytes]:
    """Opens a regular file for reading. Raises OSError, and ValueError for a pipe, a device or a folder."""
    # A pipe without a writer would never open.
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError("it is no regular file")
    return os.fdopen(number, "rb")


def decompressed(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Returns the contents of an open file, decompressed as they are read."""
    if not compression:
        return raw
    if raw.seekable() and not raw.read(1):
        raise EOFError("it is empty, which no compressed file is")
    raw.seek(0)
    if compression == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if compression == ".bz2":
        return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), 2**18)
    if compression == ".xz":
        return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor), 2**18)
    import pyarrow  # 0.2 s of import that other files do not need

    stream: Any = pyarrow.CompressedInputStream(raw, "zstd")
    return io.BufferedReader(stream, 2**18)


class _Streams(io.RawIOBase):
    """Contents of compressed streams one after another.

    `bz2.BZ2File` and `lzma.LZMAFile` end in silence at bytes behind the first stream that begin no other: a damaged or
    overwritten second one would be lost. Here they are an error of the decoder.
    """

    def __init__(self, raw: IO[bytes], decoder: Any):
        self._raw, self._new = raw, decoder
        self._decoder, self._rest = decoder(), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            if self._decoder.eof:
                # Zeros may fill the space behind a stream of xz.
                self._rest = (self._decoder.unused_data or self._rest).lstrip(b"\0") or self._raw.read(2**18)
                if not self._rest:
                    return 0
                if self._rest.strip(b"\0"):
                    self._rest = self._rest.lstrip(b"\0")
                    self._decoder = self._new()
                continue
            data = self._rest
            self._rest = b""
            if not data and self._decoder.needs_input and not (data := self._raw.read(2**18)):
                raise EOFError("it ends before the end of its compressed contents")
            if found := self._decoder.decompress(data, len(view)):
                view[: len(found)] = found
                return len(found)

"""Texts to tokens, in this process or in several: the tokens do not depend on how many.

`python -m meshwright.data.encoding` reads texts from its standard input and writes tokens to its standard output. It
ends when its input does, however the process that started it ends.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from meshwright.data.readers import Place
from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json, with_begin
from meshwright.errors import DataError

BATCH = 2**19
"""Characters of a batch of documents."""
_ALONE = 8
"""Batches that one process encodes before others start: they take half a second to start, as long as 2 MB of text."""
_HEADER = struct.Struct("<qq")


@dataclasses.dataclass(frozen=True)
class TextBatch:
    """Documents that are encoded together."""

    texts: list[str]
    places: list[Place]
    """Place of each."""
    before: Mapping[str, Any]
    """State of the reading before the first."""


class Encoded(NamedTuple):
    """Tokens of documents, each with those that a document begins with, and closed by the tokenizer's end."""

    tokens: np.ndarray
    lengths: np.ndarray


class Unencodable(Exception):
    """Document that a tokenizer cannot encode. index: in its batch."""

    def __init__(self, index: int, truth: str, fix: str):
        self.index, self.truth, self.fix = index, truth, fix
        super().__init__(truth)


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """Encodes documents. Raises Unencodable."""
    parts = []
    try:
        for tokens in map(tokenizer.encode, texts):
            parts.append(np.append(with_begin(tokenizer, tokens), np.int32(tokenizer.end)))
            if int(parts[-1].max()) >= tokenizer.vocab or int(parts[-1].min()) < 0:
                truth = f"its tokenizer gives token {parts[-1].max()} of {tokenizer.vocab}"
                raise DataError("tokens", truth, "a tokenizer whose tokens are numbered without gaps")
    except DataError as error:
        raise Unencodable(len(parts), error.truth, error.fix) from error
    return Encoded(np.concatenate(parts), np.fromiter(map(len, parts), np.int64, len(parts)))


def encode(tokenizer: Tokenizer, batches: Iterable[TextBatch], processes: int) -> Iterator[tuple[TextBatch, Encoded]]:
    """Yields batches in order with their tokens. Raises DataError with the place of a document that has none.

    processes: 1 encodes in this process. Others start when there is more text than takes this one a second; at most
    four batches for each are in memory.
    """
    stream = iter(batches)
    for batch in stream if processes <= 1 else itertools.islice(stream, _ALONE):
        yield batch, _encode_batch(batch, lambda texts: encode_texts(tokenizer, texts))
    first = next(stream, None)
    if first is None:
        return
    with _Encoders(tokenizer, processes) as encoders:
        pending: collections.deque[tuple[TextBatch, concurrent.futures.Future[Encoded]]] = collections.deque()
        for batch in itertools.chain([first], stream):
            pending.append((batch, encoders.submit(batch)))
            while len(pending) > 2 * processes or (pending and pending[0][1].done()):
                done, future = pending.popleft()
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()


def _encode_batch(batch: TextBatch, call: Callable[[list[str]], Encoded]) -> Encoded:
    try:
        return call(batch.texts)
    except Unencodable as error:
        raise DataError(f"reading {batch.places[error.index]}", error.truth, error.fix) from error


class _Encoders:
    """Processes that encode, each with a thread that talks to it."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "encoder")

    def __enter__(self) -> "_Encoders":
        # Not multiprocessing: its processes would import the user's script again, and outlive a killed parent.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        command, pipe = [sys.executable, "-m", "meshwright.data.encoding"], subprocess.PIPE
        for _ in range(self._count):
            self._processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment))
        for process in self._processes:
            _write_frame(process.stdin, 0, self._tokenizer.to_json().encode())
            self._free.put(process)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def submit(self, batch: TextBatch) -> concurrent.futures.Future[Encoded]:
        """Encodes a batch in the next process that is free."""
        return self._threads.submit(_encode_batch, batch, self._encode)

    def _encode(self, texts: list[str]) -> Encoded:
        process = self._free.get()
        try:
            _write_frame(process.stdin, 0, msgspec.msgpack.encode(texts))
            documents, reply = _read_frame(process.stdout)
            if documents < 0:
                raise Unencodable(*json.loads(reply))
            border = 8 * documents
            return Encoded(np.frombuffer(reply[border:], "<u4"), np.frombuffer(reply[:border], "<i8"))
        except (OSError, EOFError) as error:
            raise DataError(
                f"tokenising in {self._count} processes",
                f"process {process.pid} ended with code {process.wait()}",
                "fewer --processes if memory ran out; the same command goes on after the last whole shard",
            ) from error
        finally:
            self._free.put(process)


def _write_frame(pipe: IO[bytes] | None, number: int, data: bytes) -> None:
    assert pipe is not None
    pipe.write(_HEADER.pack(number, len(data)))
    pipe.write(data)
    pipe.flush()


def _read_frame(pipe: IO[bytes] | None) -> tuple[int, bytes]:
    """Returns the number and the data of a frame. Raises EOFError where the pipe ends before."""
    assert pipe is not None
    header = pipe.read(_HEADER.size)
    number, size = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 1)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return number, data


def main() -> None:
    """Encodes the texts of standard input until it ends: with the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        tokenizer = tokenizer_from_json(_read_frame(source)[1].decode())
        while True:
            texts = msgspec.msgpack.decode(_read_frame(source)[1], type=list[str])
            try:
                tokens, lengths = encode_texts(tokenizer, texts)
                _write_frame(target, len(texts), lengths.astype("<i8").tobytes() + tokens.astype("<u4").tobytes())
            except Unencodable as error:
                _write_frame(target, -1, json.dumps([error.index, error.truth, error.fix]).encode())


if __name__ == "__main__":
    main()

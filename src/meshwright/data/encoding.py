"""Texts to tokens, in this process or in several: the tokens do not depend on how many.

`python -m meshwright.data.encoding` receives texts and sends tokens over the socket that is its standard input. It ends
when the process that started it does.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.data.tokenizers import Tokenizer, tokenizer_from_json, with_begin
from meshwright.errors import DataError

BATCH = 2**19
"""Characters of a batch of documents."""
_ALONE = 8
"""Batches that one process encodes before others start: they take half a second to start, as long as 2 MB of text."""


@dataclasses.dataclass(frozen=True)
class TextBatch:
    """Documents that are encoded together."""

    texts: list[str]
    places: list[Any]
    """`readers.Place` of each."""
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
        self._all: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._free: queue.SimpleQueue[tuple[subprocess.Popen[bytes], Connection]] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "encoder")

    def __enter__(self) -> "_Encoders":
        # Not multiprocessing's processes: they would import the user's script again, and outlive a killed parent.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
        for _ in range(self._count):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                command = [sys.executable, "-P", "-m", "meshwright.data.encoding"]
                self._all.append((subprocess.Popen(command, stdin=theirs.fileno(), env=environment), ours))
        for _, connection in self._all:
            connection.send_bytes(self._tokenizer.to_json().encode())
        for encoder in self._all:
            self._free.put(encoder)
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process, _ in self._all:
            process.kill()
        self._threads.shutdown()
        for process, connection in self._all:
            process.wait()
            connection.close()

    def submit(self, batch: TextBatch) -> concurrent.futures.Future[Encoded]:
        """Encodes a batch in the next process that is free."""
        return self._threads.submit(_encode_batch, batch, self._encode)

    def _encode(self, texts: list[str]) -> Encoded:
        process, connection = self._free.get()
        try:
            connection.send_bytes(msgspec.msgpack.encode(texts))
            reply = msgspec.msgpack.decode(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise DataError(
                f"tokenising in {self._count} processes",
                f"process {process.pid} ended with code {process.wait()}",
                "fewer --processes if memory ran out; the same command goes on after the last whole shard",
            ) from error
        finally:
            self._free.put((process, connection))
        if len(reply) == 3:
            raise Unencodable(*reply)
        return Encoded(np.frombuffer(reply[0], "<u4"), np.frombuffer(reply[1], "<i8"))


def main() -> None:
    """Encodes the texts that come over the socket until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    connection = Connection(os.dup(0))
    with contextlib.suppress(EOFError, OSError):
        tokenizer = tokenizer_from_json(connection.recv_bytes().decode())
        while True:
            texts = msgspec.msgpack.decode(connection.recv_bytes(), type=list[str])
            try:
                tokens, lengths = encode_texts(tokenizer, texts)
                reply: Any = tokens.astype("<u4").tobytes(), lengths.astype("<i8").tobytes()
            except Unencodable as error:
                reply = error.index, error.truth, error.fix
            connection.send_bytes(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()

"""Process that encodes texts: messages of texts from standard input, tokens to standard output."""

import contextlib
import json
import signal
import sys

import msgspec

from meshwright.data.encoding import HEADER, Unencodable, encode_texts, read_exactly, write_frame
from meshwright.data.tokenizers import tokenizer_from_json


def main() -> None:
    """Encodes until the input ends: with the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        size, _ = HEADER.unpack(read_exactly(source, HEADER.size))
        tokenizer = tokenizer_from_json(read_exactly(source, size).decode())
        while True:
            size, _ = HEADER.unpack(read_exactly(source, HEADER.size))
            texts = msgspec.msgpack.decode(read_exactly(source, size), type=list[str])
            try:
                encoded = encode_texts(tokenizer, texts)
            except Unencodable as error:
                message = json.dumps([error.index, error.truth, error.fix]).encode()
                write_frame(target, HEADER.pack(-1, len(message)), message)
                continue
            tokens = encoded.tokens.astype("<u4").tobytes()
            write_frame(target, HEADER.pack(len(texts), len(tokens)), encoded.lengths.astype("<i8").tobytes(), tokens)


if __name__ == "__main__":
    main()

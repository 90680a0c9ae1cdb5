"""Tokens per second of `meshwright tokenize` against `tokenizers`' own batch encoding.

`python bench/tokenize_speed.py [--megabytes 40] [--repeats 3] [--write]`. The text is that of the standard library,
drawn anew into documents of 50 to 900 words, as JSON lines with zstd; the vocabulary is `bpe:8192`, learned from the
library. The reference reads the same file into memory beforehand and encodes it with `encode_batch_fast`, which starts
a thread for each core; its time has neither reading, decompression, parsing, checks nor writing, and the others'
have all of it and the start of Python. Each figure is the median of runs that take turns. `--write` puts the table into
docs/data.md.
"""

import argparse
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import tokenizers
from page_table import put_table

from meshwright.data.readers import read_documents
from meshwright.data.sources import Records, open_source

_PAGE = Path(__file__).parents[1] / "docs" / "data.md"
_BATCH = 2000


def write_text(file: Path, size: int) -> None:
    """Writes about `size` bytes of JSON lines."""
    words = " ".join(read_documents(open_source("stdlib"), Records("stdlib"))).split(" ")
    draw = random.Random(0)
    with pyarrow.output_stream(str(file), compression="zstd") as output:
        while size > 0:
            start = draw.randrange(len(words) - 900)
            line = (
                json.dumps(
                    {"text": " ".join(words[start : start + draw.randrange(50, 900)])}
                ).encode()
                + b"\n"
            )
            output.write(line)
            size -= len(line)


def tokenize(file: Path, vocabulary: Path, folder: Path, turn: int) -> int:
    """Runs the command, with a new folder inside `folder`; returns the number of tokens."""
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "tokenize",
        str(file),
        "--tokenizer",
        str(vocabulary),
        "--out",
    ]
    run = [*command, str(folder / f"tokens-{turn}"), "--json"]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    return int(json.loads(printed)["tokens"])


def encode_batches(texts: list[str], tokenizer: tokenizers.Tokenizer) -> int:
    """Encodes texts in memory; returns the number of tokens, with one for the end of each text."""
    batches = (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH))
    encode = tokenizer.encode_batch_fast
    return sum(len(e.ids) + 1 for batch in batches for e in encode(batch, add_special_tokens=False))


def measure(megabytes: int, repeats: int) -> tuple[int, dict[str, float]]:
    """Returns the tokens of the text, and tokens per second by way of encoding."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text.jsonl.zst", megabytes * 10**6)
        command = [
            sys.executable,
            "-m",
            "meshwright",
            "tokenize",
            "stdlib",
            "--tokenizer",
            "bpe:8192",
            "--out",
        ]
        subprocess.run([*command, str(folder / "vocabulary")], check=True, capture_output=True)
        vocabulary = folder / "vocabulary" / "tokenizer.json"
        texts = list(read_documents(open_source(str(folder / "text.jsonl.zst")), Records("")))
        tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary))
        counts: set[int] = set()
        ways: dict[str, Callable[[int], int]] = {
            "`tokenize`": functools.partial(tokenize, folder / "text.jsonl.zst", vocabulary, folder)
        }
        ways["`encode_batch_fast`, text in memory"] = lambda turn: encode_batches(texts, tokenizer)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repeats):
            for way, run in ways.items():
                start = time.perf_counter()
                counts.add(run(turn))
                seconds[way].append(time.perf_counter() - start)
        assert len(counts) == 1, f"the ways give different numbers of tokens: {counts}"
        tokens = counts.pop()
        return tokens, {way: tokens / statistics.median(times) for way, times in seconds.items()}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    tokens, rates = measure(options.megabytes, options.repeats)
    reference = list(rates.values())[-1]
    rows = [
        f"| {way} | {rate / 1e3:,.0f} k | {rate / reference:.2f} |\n" for way, rate in rates.items()
    ]
    text = f"{options.megabytes} MB of JSON lines with zstd, {tokens / 1e6:.1f} million tokens, `bpe:8192`"
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    load = os.getloadavg()[0]
    head = (
        f"{text}, {machine}, load average {load:.0f}, `tokenizers` {tokenizers.__version__}.\n\n"
        "| way | tokens/s | of the library's |\n|---|---|---|\n"
    )
    print(head + "".join(rows))
    if options.write:
        put_table(_PAGE, "tokenize_speed.py", head + "".join(rows))


if __name__ == "__main__":
    main()

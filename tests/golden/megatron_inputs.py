"""Datasets and cases of the order of samples that Megatron and the tests read. NumPy only."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

DATASETS: dict[str, tuple[str, dict[str, Any]]] = {
    "short": ("uint8", {"documents": 60, "longest": 9}),
    "long": ("uint16", {"documents": 23, "longest": 90}),
    "wide": ("int32", {"documents": 41, "longest": 30}),
    "widest": ("int64", {"documents": 31, "longest": 40}),
    "narrow": ("int16", {"documents": 17, "longest": 64}),
    "signed": ("int8", {"documents": 25, "longest": 25}),
    "sentences": ("uint16", {"documents": 30, "longest": 20, "sequences": 3}),
    "empty": ("int32", {"documents": 40, "longest": 12, "empty": 0.3}),
    "ends": ("uint16", {"documents": 50, "longest": 14, "end": 0}),
    "many": ("uint16", {"documents": 900, "longest": 12}),
}
"""Dataset -> type of its tokens, and what its documents are drawn from."""


def documents_of(name: str) -> list[list[np.ndarray]]:
    """Returns the sequences of each document of a dataset."""
    dtype, drawn = DATASETS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    documents = []
    for _ in range(drawn["documents"]):
        sequences = []
        for _ in range(int(rng.integers(1, 1 + drawn.get("sequences", 1), endpoint=False))):
            length = int(rng.integers(1, drawn["longest"], endpoint=True))
            if rng.random() < drawn.get("empty", 0.0):
                length = 0
            tokens = rng.integers(1, 120, length)
            if "end" in drawn:
                tokens[-1] = drawn["end"]
            sequences.append(tokens.astype(dtype))
        documents.append(sequences)
    return documents


CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
"""Codes of types in an index."""


def write_dataset(prefix: Path, documents: list[list[np.ndarray]], dtype: str) -> Path:
    """Writes a dataset as the format is described. documents: the sequences of each."""
    sequences = [tokens for document in documents for tokens in document]
    lengths = np.array([len(tokens) for tokens in sequences], "<i4")
    starts = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    marks = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(marks))
    columns = lengths.tobytes() + starts.astype("<i8").tobytes() + marks.astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(header + columns)
    tokens = np.concatenate([np.zeros(0), *sequences]).astype(dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    return prefix


SPLITS = ("train", "valid", "test")
ENDS = "ends of documents"
"""Case of which positions, weights and attention are written: its documents end with token 0."""


def _case(
    data: str, weights: list[float] | None, samples: list[int | None], **rest: Any
) -> dict[str, Any]:
    """One case. samples: of train, valid and test."""
    return {
        "data": data.split(), "weights": weights, "samples": samples, "seed": 1234, "seq": 16, "split": "969,30,1", **rest,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "less than an epoch": _case("wide", None, [9, 1, 0], split="80,20,0", kept=True),
    "three epochs, the last apart": _case("wide", None, [95, 3, 0], split="90,10,0", kept=True),
    "three epochs together": _case("wide", None, [106, 6, 0], split="90,10,0", kept=True),
    "documents over many samples": _case("long", None, [300, 7, 0], split="90,10,0", seq=8),
    "samples over many documents": _case("short", None, [20, 2, 0], split="80,20,0", seq=50),
    "a sample longer than an epoch": _case("short", None, [5, 1, 1], split="60,20,20", seq=400),
    "train, valid and test": _case("many", None, [700, 40, 30], split="0.7,0.2,0.1"),
    "training alone": _case("many", None, [900, 0, 0], split="1"),
    "another seed": _case("many", None, [900, 5, 0], seed=7),
    "sequences of documents": _case("sentences", None, [120, 4, 0], split="80,20,0"),
    "empty documents": _case("empty", None, [60, 4, 0], split="80,20,0"),
    ENDS: _case("ends", None, [80, 4, 0], split="80,20,0"),
    "a blend of one": _case("wide", [1.0], [106, 6, 0], split="90,10,0"),
    "a blend of two": _case("wide long", [0.3, 0.7], [200, 20, 0], split="80,20,0", kept=True),
    "three epochs of a blend": _case("short wide", [30.0, 70.0], [160, 10, 0], split="80,20,0"),
    "a blend of all types": _case(
        "short long wide widest narrow signed", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [400, 30, 0], split="70,30,0", seq=12
    ),
    "equal weights": _case("wide long widest", [1.0, 1.0, 1.0], [300, 20, 0], split="70,30,0"),
    "a small weight": _case("many long", [0.999, 0.001], [1500, 10, 0], split="80,20,0"),
    "no weights": _case("wide long", None, [60, 8, 0], split="80,20,0", kept=True),
}  # fmt: skip
"""Case -> datasets, weights, samples, seed, tokens of a sample, split; `kept`: its samples are written."""

_DRAWN = np.random.default_rng(0)
for _number in range(40):
    _names = [str(name) for name in _DRAWN.permutation(list(DATASETS))[: _DRAWN.integers(1, 5)]]
    _weights = None
    if len(_names) > 1 or _DRAWN.random() < 0.3:
        _weights = [float(round(weight, 3)) for weight in _DRAWN.uniform(0.05, 3, len(_names))]
    CASES[f"drawn {_number}"] = _case(
        " ".join(_names), _weights, [int(_DRAWN.integers(1, 400)), int(_DRAWN.integers(1, 40)), 0],
        seed=int(_DRAWN.integers(0, 2**31)), seq=int(_DRAWN.integers(2, 40)), split="70,30,0",
    )  # fmt: skip

"""Mutated documents: whatever is wrong with a file that is read, it is refused with a reason, or does no harm."""

import contextlib
import io
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.analysis.programs import read_census
from meshwright.bench.calibration_file import read_calibration
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.cli.main import _error_line
from meshwright.config import Training
from meshwright.data.chat import read_chat_template
from meshwright.data.subwords import train_bpe
from meshwright.data.tokenizers import Bytes, Chars, tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import open_tokens
from meshwright.documents import seal
from meshwright.errors import MeshwrightError
from meshwright.hardware.machine import compiler_options_of
from meshwright.hardware.targets import parse_target
from meshwright.hugging_face.folder import read_model
from meshwright.hugging_face.safetensors_files import SafetensorsFile, find_files
from meshwright.launching.supervise import _read
from meshwright.models.families.gpt2 import Gpt2
from meshwright.planner.forecast import calibrate_target
from meshwright.planner.plan_file import read_plan
from meshwright.reporters.files import JsonLines, last_start
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_to_dict, write_run
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import run_page
from xlacensus.comparison import compare

RUN = Run(model=Gpt2(257, 32, 1, 4, positions=32), training=Training(seq=32, batch=4))
DOCUMENT = run_to_dict(RUN)
VALUES: list[Any] = [
    None, True, -1, 0, 0.5, 2**70, 10**400, float("nan"), float("inf"), -float("inf"), "", "\ud800", "a\x00b", "\x1b[2J",
    "x" * 200, [], {}, [[]], [None], {"a": 1}, "9" * 5000,
]  # fmt: skip
"""What takes the place of a value."""
TIMES = 45
"""Mutations of each document; the seed is fixed."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every value in a JSON document, and of the document itself."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from paths_in(item, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    """Returns a document with a value replaced, removed, or given a further name."""
    copy = json.loads(json.dumps(document))
    if not path:
        return value
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if how == "remove":
        del inner[path[-1]]
    elif how == "add" and isinstance(inner, dict):
        inner["\ud800 not a field"] = value
    else:
        inner[path[-1]] = value
    return copy


def mutations(document: Any, chance: random.Random) -> Iterator[bytes]:
    """Yields texts of a document with one value changed, and texts that are damaged."""
    whole = json.dumps(document).encode()
    yield from (
        b"",
        b"[" * 100_000,
        b"\xff" + whole,
        b"null",
        whole[: len(whole) // 2],
        b'"\\ud800"',
    )
    paths = list(paths_in(document))
    for _ in range(TIMES):
        how = chance.choice(["replace", "replace", "replace", "remove", "add"])
        yield json.dumps(
            changed(document, chance.choice(paths), chance.choice(VALUES), how)
        ).encode()


def use_run(file: Path) -> None:
    run = read_run(file)
    compiler_options_of(None, run.training.compiler_options)
    str(run)


def use_plan(file: Path) -> None:
    plan = read_plan(file)
    parse_target(plan.target)
    json.dumps(plan.predicted)


def use_calibration(file: Path) -> None:
    calibrate_target(parse_target("h100:8"), read_calibration(file))


def use_tokenizer(file: Path) -> None:
    tokenizer = tokenizer_from_json(file.read_text(encoding="utf-8", errors="replace"))
    tokenizer.decode([int(token) for token in tokenizer.encode("some text")])


def use_tokens(file: Path) -> None:
    np.asarray(open_tokens(file.parent).tokens)


def use_config(file: Path) -> None:
    read_model(f"hf:{file.parent}")


def use_manifest(file: Path) -> None:
    with Checkpoints(file.parents[2], max_to_keep=9) as checkpoints:
        checkpoints.manifest(0)


def use_sealed_manifest(file: Path) -> None:
    """A document whose checksum is right, as a stranger writes it."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        file.write_text(json.dumps(seal(json.loads(file.read_bytes()))))
    use_manifest(file)


def use_safetensors(file: Path) -> None:
    text = file.read_bytes()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    opened = SafetensorsFile(file)
    for name in opened.entries:
        opened.tensor(name)


def use_run_folder(file: Path) -> None:
    for folder in open_folders([file.parent]):
        folder.refresh()
        run_page([folder])
    last_start(file.parent)


def use_metrics(file: Path) -> None:
    JsonLines(file, upto=3, every=1).close()
    use_run_folder(file)


def use_start(file: Path) -> None:
    _read(file)


def use_census(file: Path) -> None:
    census = read_census(file)
    compare(census, census)


GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_embd": 32, "n_layer": 1,
    "n_head": 4, "n_positions": 32, "activation_function": "gelu_new", "torch_dtype": "float32",
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
CALIBRATION = {
    "device": "NVIDIA H100 80GB HBM3", "devices": 8, "jax": "0.9", "date": "2026-01-01", "mesh": "data=8",
    "memory_bandwidth": 3e12, "attention": 4e14, "grouped_matmul": 0.8,
    "matmuls": [{"m": 4096, "k": 4096, "n": 4096, "dtype": "bfloat16", "seconds": 1e-3, "flops_per_second": 6e14}],
    "collectives": [{"name": "all_gather", "devices": 8, "bytes": 2**20, "seconds": 1e-3, "bus_bandwidth": 3e11}],
}  # fmt: skip
READERS: dict[str, tuple[str, Any, Callable[[Path], None]]] = {
    "run": ("run.json", DOCUMENT, use_run),
    "plan": ("plan.json", {"plan": 2, "run": DOCUMENT, "target": "h100:8", "predicted": {"a": 1.0}}, use_plan),
    "calibration": ("calibration.json", CALIBRATION, use_calibration),
    "bytes tokenizer": ("tokenizer.json", json.loads(Bytes().to_json()), use_tokenizer),
    "chars tokenizer": ("tokenizer.json", json.loads(Chars("abc").to_json()), use_tokenizer),
    "bpe tokenizer": ("tokenizer.json", None, use_tokenizer),
    "tokens": ("tokens.json", None, use_tokens),
    "manifest": ("checkpoints/0/manifest/metadata", None, use_manifest),
    "sealed manifest": ("checkpoints/0/manifest/metadata", None, use_sealed_manifest),
    "GPT-2 config": ("config.json", GPT2, use_config),
    "Llama config": ("config.json", LLAMA, use_config),
    "safetensors": (
        "model.safetensors", {"a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "__metadata__": {"format": "pt"}}, use_safetensors,
    ),
    "index": (
        "model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "model.safetensors"}},
        lambda file: find_files(file.parent) and None,
    ),
    "metrics": ("metrics.jsonl", {"step": 1, "loss": 2.0, "held-out loss": 2.5, "seconds": 0.1}, use_metrics),
    "events": (
        "events.jsonl", {"time": 1.0, "step": 0, "event": "start", "devices": 8, "kind": "cpu", "seconds": 1.0},
        use_run_folder,
    ),
    "start": (".supervise/start-1.json", {"members": [0], "coordinator": None, "options": ["--a", "b"]}, use_start),
    "chat template": (
        "tokenizer_config.json", {"chat_template": "{{ messages }}", "eos_token": {"content": "</s>"}},
        lambda file: read_chat_template(file.parent) and None,
    ),
}  # fmt: skip
"""Every document that is read: its name, a good one, and what reads and uses it."""


def good(reader: str, folder: Path) -> tuple[Path, Any]:
    """Writes what a reader needs besides, and returns the file and its good document."""
    name, document, _ = READERS[reader]
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if reader == "tokens":
        (folder / "text.txt").write_text("some text " * 50)
        made = tokenize(str(folder / "text.txt"), "bytes", folder / "made").folder
        file = made / "tokens.json"
    elif reader == "bpe tokenizer":
        return file, json.loads(train_bpe(["some text " * 50], 260).to_json())
    elif "manifest" in reader:
        record = {"params.w": TensorRecord((4, 8), "float32", (1, 2))}
        Manifest(0, 0, RUN, record).write(file.parents[1])
    if reader in ("metrics", "events"):
        write_run(RUN, folder / "run.json")
    return file, json.loads(file.read_text()) if document is None else document


@pytest.mark.parametrize("reader", READERS)
def test_a_mutated_document_is_refused_or_harmless(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, document = good(reader, tmp_path)
    use = READERS[reader][2]
    refused = 0
    broken: list[str] = []
    for text in mutations(document, random.Random(reader)):
        file.write_bytes(text)
        try:
            try:
                use(file)
            except MeshwrightError as error:
                refused += 1
                shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # strict
                monkeypatch.setattr(sys, "stderr", shown)
                sys.stderr.write(_error_line(error))
                shown.flush()
        except Exception as error:
            broken.append(f"{type(error).__name__}: {error!s:.200} for {text[:2000]!r}")
    assert broken == []
    assert refused or reader in ("metrics", "events", "start", "chat template")

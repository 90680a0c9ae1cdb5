"""Mutated documents: whatever is wrong with a file that is read, it is refused with a reason, or does no harm."""

import ast
import contextlib
import csv
import dataclasses
import io
import json
import math
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshwright.analysis.programs import read_census
from meshwright.analysis.run_census import cached
from meshwright.api.generation import GenerateOptions
from meshwright.bench.calibration_file import read_calibration, write_calibration
from meshwright.bench.hardware.section import read_section
from meshwright.checkpoint.checkpoints import Checkpoints
from meshwright.checkpoint.conversion import Journal
from meshwright.checkpoint.manifest import Manifest, TensorRecord
from meshwright.cli.main import _error_line
from meshwright.config import MeshShape, Training
from meshwright.data.chat import read_chat_template, read_end_tokens
from meshwright.data.chat_files import read_records
from meshwright.data.chat_records import RecordRenderer
from meshwright.data.readers import read_documents
from meshwright.data.sources import Records, open_source
from meshwright.data.subwords import train_bpe
from meshwright.data.token_writer import read_progress
from meshwright.data.tokenizers import Bytes, Chars, build_tokenizer, tokenizer_from_json
from meshwright.data.tokenizing import tokenize
from meshwright.data.tokens import open_tokens
from meshwright.data.vocabularies import read_pair
from meshwright.documents import seal
from meshwright.errors import MeshwrightError
from meshwright.hardware.machine import compiler_options_of
from meshwright.hardware.targets import parse_target
from meshwright.hugging_face.architectures import ARCHITECTURES
from meshwright.hugging_face.folder import read_form, read_model
from meshwright.hugging_face.maxtext_checkpoints import read_maxtext
from meshwright.hugging_face.safetensors_files import SafetensorsFile, find_files, tensor_names
from meshwright.launching.job_starts import JobStarts
from meshwright.launching.supervise import _read
from meshwright.models.families.gpt2 import Gpt2
from meshwright.planner.forecast import calibrate_target
from meshwright.planner.offers import read_prices
from meshwright.planner.plan_file import read_plan
from meshwright.planner.search import price_run
from meshwright.reporters.files import JsonLines, last_start
from meshwright.runs.run import Run
from meshwright.runs.run_file import read_run, run_to_dict, write_run
from meshwright.storage.transfer import _link_known
from meshwright.trainer.heartbeat import describe_holder, parse_holder
from meshwright.trainer.recovery import _skipped_records
from meshwright.trainer.tiers import Tiers
from meshwright.trust import own
from meshwright.views.run_folder import open_folders
from meshwright.views.run_page import run_page
from xlacensus.comparison import compare

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
RUN = Run(model=Gpt2(257, 32, 1, 4, positions=32), training=Training(seq=32, batch=4))
DOCUMENT = run_to_dict(RUN)
VALUES: list[Any] = [
    None, True, -1, 0, 0.5, 2**70, 10**400, float("nan"), float("inf"), -float("inf"), "", "\ud800", "a\x00b", "\x1b[2J",
    "x" * 200, [], {}, [[]], [None], {"a": 1}, "9" * 5000,
]  # fmt: skip
"""What takes the place of a value."""
EIGHT = Training(seq=32, batch=8)
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


def use_place(file: Path) -> None:
    line = json.dumps({"step": 1, "time": 2.0, "loss": 2.0, "tokens": 64})
    (file.parent / "metrics.jsonl").write_text(f"{line}\n")
    use_run_folder(file)


def use_start(file: Path) -> None:
    _read(file)


def use_census(file: Path) -> None:
    census = read_census(file)
    compare(census, census)


def rewritten(file: Path, write: Callable[[Any], str]) -> None:
    """Writes a mutated document, which is JSON, in the format of its file; a damaged text stays as it is."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        file.write_text(write(json.loads(file.read_bytes())), encoding="utf-8")


def toml(document: Any) -> str:
    """Writes an object of values and of tables as TOML."""
    lines = [
        f"{json.dumps(key)} = {toml_value(value)}"
        for key, value in document.items()
        if not isinstance(value, dict)
    ]
    for key, table in document.items():
        if isinstance(table, dict):
            lines.append(f"[{json.dumps(key)}]")
            lines += [f"{json.dumps(name)} = {toml_value(value)}" for name, value in table.items()]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


def use_chip(file: Path) -> None:
    rewritten(file, toml)
    target = parse_target(own(f"{file}:8"))
    price_run(dataclasses.replace(RUN, mesh=MeshShape(data=8), training=EIGHT), target)


def table(rows: Any) -> str:
    """Writes a list of objects as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def use_prices(file: Path) -> None:
    rewritten(file, table)
    for price in read_prices(file):
        str(price)


def use_calibration_again(file: Path) -> None:
    write_calibration(file, memory_bandwidth=3e12)


def use_skipped(file: Path) -> None:
    _skipped_records(file.parent)


def use_starts(file: Path) -> None:
    environment = {"RANK": "0", "SLURM_JOB_ID": "7"}
    JobStarts(file.parents[1], 10, environment).begin()


def use_lock(file: Path) -> None:
    describe_holder(parse_holder(file.read_bytes()))


def use_conversion(file: Path) -> None:
    journal = Journal(file.parent.with_name("weights"), {"of": "a model"}, 2, lambda text: None)
    assert "embed" in journal.done or not journal.resumed or journal.done


def use_prompts(file: Path) -> None:
    GenerateOptions(source="run", prompts=file)._prompts()


def use_conversations(file: Path) -> None:
    tokenizer = build_tokenizer("bytes")
    for _, where, record in read_records([file]):
        renderer = RecordRenderer(str(where), tokenizer, None, (tokenizer.end,))
        renderer.render(record, "answers")


def use_vocabulary(file: Path) -> None:
    (file.parent / "merges.txt").write_text("#version: 0.2\na b\n")
    (file.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer_from_json(read_pair(file)).encode("ab")


def use_tokenizer_config(file: Path) -> None:
    (file.parent / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (file.parent / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer_from_json(read_pair(file.parent / "vocab.json")).encode("ab")


def use_token_note(file: Path) -> None:
    read_progress(file.parent)


def use_section(file: Path) -> None:
    read_section(file.parents[1], "matmuls")


def use_index_names(file: Path) -> None:
    tensor_names(file.parent)


def use_copies(file: Path) -> None:
    folder = file.parents[1] / ".scratch"
    _link_known(file.parents[1], {"a": "1", "b": "2"}, folder, True)


def use_corpus(file: Path) -> None:
    source = open_source(str(file))
    list(read_documents(source, Records(str(file), skippable=False)))


def use_census_copy(file: Path) -> None:
    assert cached(file, float, lambda: 1.0, fresh=False) is not None


def use_local_layout(file: Path) -> None:
    """A host's own tier, whose description of the layout is damaged."""
    tiers = object.__new__(Tiers)
    tiers._local = cast(Any, SimpleNamespace(folder=file.parents[1]))
    tiers.identity, tiers._layout = None, "x"
    Manifest(0, 0, RUN, {}).write(file.parent)
    tiers._own_checksum(0)


PROCESSES = {
    "time": 1.0,
    "processes": [
        {"process": 0, "host": "a", "pid": 7, "beat": 3, "step": 5, "phase": "data", "in phase": 0.5, "seen": 1.0,
         "seconds": {"step": 0.5, "data": 0.1, "save": 2.0}, "memory": [1e9, 4e9],
         "devices": [{"device": 0, "kind": "H100", "peak": 5e9, "limit": 8e10}]},
        {"process": 1, "host": "b", "step": 5, "phase": "step", "seconds": {"step": 0.4}, "memory": None, "devices": []},
    ],
}  # fmt: skip
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
    "step": {
        "rates": {"matmul": 5e14, "overlap": 0.5}, "refused": {"hbm": "too little"}, "impossible": [],
        "target": "h100:1x8", "devices": 8, "mesh": "fsdp=8", "model": {"family": "llama"}, "seconds": 1.0,
        "unpriced_seconds": 0.1, "planned_seconds": 0.9,
    },
}  # fmt: skip
CHIP = {
    "name": "Mine", "flops_bf16": 1e15, "hbm_bytes": 96e9, "hbm_bandwidth": 4e12, "network_bandwidth": 5e10,
    "host_bandwidth": 3e10, "clock_hz": 1e9, "devices_per_chip": 1, "multiprocessors": 100, "flops_int8": 2e15,
    "nodes": {"link_bandwidth": 4e11, "devices_per_node": 8},
    "efficiency": {
        "matmul": 0.7, "grouped_matmul": 0.7, "attention": 0.4, "hbm": 0.8, "links": 0.8, "network": 0.8,
        "overlap": 0.5, "tensor_overlap": 0.5, "tile": 128,
    },
}  # fmt: skip
TORUS = {key: value for key, value in CHIP.items() if key != "nodes"} | {
    "torus": {"link_bandwidth": 4e11, "wraparound_multiple": 4, "largest": [8, 8]}
}
PRICES = [
    {
        "chip": "h100", "provider": "a", "region": "b", "terms": "on-demand", "usd_per_chip_hour": 2.5,
        "source": "https://a", "read_on": "2026-01-01",
    }
]  # fmt: skip
FORESIGHT = {
    "gaps": [{"part": "matmuls", "predicted": 0.5, "measured": 0.6}], "source": "calibration",
}  # fmt: skip
PROFILE = {
    "first": 2, "last": 4, "note": "", "rows": [{"kind": "part", "name": "a", "measured": 0.1, "simulated": 0.2}],
}  # fmt: skip
CENSUS = {
    "simulated_schedule": {
        "step_seconds": 1.0, "by_kind": {"matmuls": 0.5, "exposed": 0.1}, "exposed": {"fsdp": 0.1}, "bubble": 0.0,
    },
    "flops": {"matmuls": [{"phase": "forward", "flops": 1e9}]},
    "memory": {"peak": 1000, "categories": {"parameters": 800}},
    "traffic": [{"kind": "all-gather", "axes": "fsdp", "sent": 1e6}],
    "findings": [],
}  # fmt: skip
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
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
    "arrays of Orbax": (
        "_METADATA", {"tree_metadata": {"('step',)": {
            "key_metadata": [{"key": "step", "key_type": 2}], "value_metadata": {"skip_deserialize": False},
        }}, "use_ocdbt": True, "use_zarr3": False}, lambda file: read_maxtext(file.parent, file.parent, None) and None,
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
    "form of packed experts": (
        "form.json", {"form": "packed"},
        lambda file: read_form(file.parent, ARCHITECTURES["Qwen3_5MoeForCausalLM"]) and None,
    ),
    "chip": ("mine.toml", CHIP, use_chip),
    "chip with a torus": ("mine.toml", TORUS, use_chip),
    "prices": ("prices.csv", PRICES, use_prices),
    "calibration that is added to": ("calibration.json", CALIBRATION, use_calibration_again),
    "place in the data": (
        "events.jsonl", {"time": 1.0, "step": 0, "event": "start", "data": {
            "unit": "tokens", "units": 100, "per sample": 8, "first sample": 0, "more sources": 2,
            "sources": [{"name": "a", "samples": 5, "share": 0.5}],
        }}, use_place,
    ),
    "processes": ("processes.json", PROCESSES, use_run_folder),
    "foresight": ("foresight.json", FORESIGHT, use_run_folder),
    "profile": ("profile.json", PROFILE, use_run_folder),
    "skipped samples": (
        "skipped.json", [{"first": 8, "number": 4, "step": 2, "reason": "nan", "identity": "a"}], use_skipped,
    ),
    "starts of a job": (
        ".starts/process-0.json", {"job": "7", "tally": {"most": 10}, "running": True}, use_starts,
    ),
    "lock": (".lock", {"host": "a", "process": 7, "count": 3}, use_lock),
    "conversion": (
        "weights.partial/progress.json", {"source": {"of": "a model"}, "done": {"embed": 1}}, use_conversion,
    ),
    "prompts": ("prompts.jsonl", {"prompt": "She sells"}, use_prompts),
    "conversation": ("talk.jsonl", {"messages": TALK, "tools": "[]"}, use_conversations),
    "array of conversations": ("talk.json", [{"messages": TALK}], use_conversations),
    "text records": ("text.jsonl", {"text": "She sells sea shells."}, use_corpus),
    "vocabulary": ("vocab.json", {"a": 0, "b": 1, "ab": 2}, use_vocabulary),
    "tokenizer configuration": (
        "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True,
        "added_tokens_decoder": {"3": {"content": "<s>", "special": True}}}, use_tokenizer_config,
    ),
    "ends of generation": (
        "generation_config.json", {"eos_token_id": [1, 2]}, lambda file: read_end_tokens(file.parent) and None,
    ),
    "note of tokens": ("progress.json", {"format": 1, "shards": [], "key": "a"}, use_token_note),
    "section of a benchmark": ("sections/matmuls.json", {"rows": [], "facts": {}}, use_section),
    "names of an index": (
        "model.safetensors.index.json", {"metadata": {}, "weight_map": {"a": "model.safetensors"}}, use_index_names,
    ),
    "copy of a bucket": ("copies/one/.copied.json", {"a": "1", "b": "2"}, use_copies),
    "census that is compared": ("census.json", CENSUS, use_census),
    "census of before": ("census.json", 2.5, use_census_copy),
    "layout of a local tier": ("0/layout.json", {"layout": "x"}, use_local_layout),
}  # fmt: skip
"""Every document that is read: its name, a good one, and what reads and uses it."""


LENIENT = {
    "metrics", "events", "start", "chat template", "foresight", "profile", "starts of a job", "lock", "conversion",
    "note of tokens", "section of a benchmark", "names of an index", "copy of a bucket", "census of before",
    "layout of a local tier", "place in the data", "processes",
}  # fmt: skip
"""Documents that are left out where they are damaged: a page shows less, or their work is done again."""


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
    if reader in ("metrics", "events", "foresight", "profile"):
        write_run(RUN, folder / "run.json")
    return file, json.loads(file.read_text()) if document is None else document


PARSERS = {
    "read_json", "parse_document", "parse_json", "json.loads", "json.load", "tomllib.loads", "tomllib.load",
    "csv.reader", "csv.DictReader", "msgspec.json.decode",
}  # fmt: skip
"""Functions that make values of a document's text."""
READ_BY = {
    "analysis/programs.py:read_census": "census that is compared",
    "analysis/run_census.py:cached": "census of before",
    "api/generation.py:_prompts": "prompts",
    "bench/calibration_file.py:read_calibration": "calibration",
    "bench/hardware/section.py:read_section": "section of a benchmark",
    "checkpoint/conversion.py:_read": "conversion",
    "checkpoint/conversion.py:_configuration": "Llama config",
    "checkpoint/manifest.py:read_document": "manifest",
    "data/cache_entries.py:_source": "tokens",
    "data/chat.py:read_chat_template": "chat template",
    "data/chat.py:read_end_tokens": "ends of generation",
    "data/chat_files.py:_array": "array of conversations",
    "data/chat_records.py:_without_messages": "conversation",
    "data/readers.py:read_json_lines": "text records",
    "data/token_writer.py:read_progress": "note of tokens",
    "data/tokenizers.py:tokenizer_from_json": "bpe tokenizer",
    "data/tokens.py:_read_description": "tokens",
    "data/vocabularies.py:read_pair": "vocabulary",
    "data/vocabularies.py:_optional": "tokenizer configuration",
    "hardware/chips.py:read_chip": "chip",
    "hugging_face/config_fields.py:read_fields": "GPT-2 config",
    "hugging_face/folder.py:read_form": "form of packed experts",
    "hugging_face/maxtext_checkpoints.py:_read_names": "arrays of Orbax",
    "hugging_face/safetensors_files.py:read_header": "safetensors",
    "hugging_face/safetensors_files.py:_named_in_config": "GPT-2 config",
    "hugging_face/safetensors_files.py:_read_index": "index",
    "hugging_face/safetensors_files.py:tensor_names": "names of an index",
    "launching/job_starts.py:_read": "starts of a job",
    "launching/supervise.py:_read": "start",
    "planner/offers.py:read_prices": "prices",
    "planner/plan_file.py:is_plan": "plan",
    "reporters/files.py:step_of_line": "metrics",
    "reporters/files.py:last_start": "events",
    "runs/run_file.py:read_unique_json": "run",
    "storage/transfer.py:_link_known": "copy of a bucket",
    "trainer/heartbeat.py:parse_holder": "lock",
    "trainer/recovery.py:_skipped_records": "skipped samples",
    "trainer/tiers.py:_own_checksum": "layout of a local tier",
    "reporters/goodput.py:_records": "metrics",
    "views/run_folder.py:_records": "metrics",
    "views/run_folder.py:document": "foresight",
}
"""Function that reads a document -> its row of `READERS`."""
NOT_FROM_ELSEWHERE = {
    "api/proofs.py:prove_plan": "what a child process printed",
    "api/rehearsal.py:wait": "what a child process printed",
    "bench/hardware/section.py:read": "what the parent process wrote",
    "checkpoint/conversion.py:__init__": "a value of this process, as JSON has it",
    "cli/explain.py:": "a file of the package",
    "data/chat.py:ask": "what a child process sent",
    "data/chat_renderer.py:main": "what the parent process sent",
    "data/conversations.py:_read_place": "an entry of the cache, which is the user's own",
    "data/corpus.py:_kept": "a tokenizer that has been read already",
    "data/subwords.py:is_separable": "a tokenizer that has been read already",
    "documents.py:parse_json": "the reader that the others call",
    "documents.py:parse_document": "the reader that the others call",
    "documents.py:read_json": "the reader that the others call",
    "hardware/agreement.py:_answers_of_all": "what another process of the run sent",
    "hardware/agreement.py:answer_of_the_first": "what another process of the run sent",
    "hardware/chips.py:": "a file of the package",
    "hardware/machine.py:": "a file of the package",
    "launching/host_checks.py:ask_devices": "what a child process printed",
    "launching/schedulers.py:": "a file of the package",
    "launching/schedulers.py:requirement": "what pip wrote when it installed the package",
    "launching/supervise.py:_watch": "what a child process sent",
    "planner/offers.py:read_bands": "a file of the package",
    "reporters/trackers.py:_configuration": "the run.json that this process wrote",
    "hugging_face/safetensors_files.py:read_metadata": "a header that read_header has checked",
    "planner/records.py:read_records": "a file of the package",
    "runs/run.py:": "words of the command line, of an option that nobody types",
    "trainer/tokens_of_weights.py:_description": "a tokenizer that has been read already",
    "trainer/hosts.py:_read": "what another process of the run sent",
    "monitoring/watch.py:gather": "what another process of the run sent",
    "monitoring/processes.py:_gather": "what another process of the run sent",
    "trust.py:_checkout_of": "what pip wrote when it installed a package",
}
"""Function that reads a text which no stranger wrote, and whose it is."""


def parsing(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yields the names of the functions of a module that call one of `PARSERS`; "" for the module itself."""
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS:
            yield name
        yield from parsing(node, name)


def test_every_document_that_is_read_is_mutated() -> None:
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found |= {f"{file.relative_to(PACKAGE)}:{name}" for name in parsing(tree)}
    assert found == set(READ_BY) | set(NOT_FROM_ELSEWHERE), "a reader without a row of READERS"
    assert set(READ_BY.values()) <= set(READERS)


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
    assert refused or reader in LENIENT
